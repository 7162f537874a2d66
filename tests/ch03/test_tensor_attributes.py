"""3.1.1: what a tensor says of itself, and whose memory it uses."""

import numpy as np
import pytest
import torch

from ch03_pytorch_basics import tensor_attributes
from ch03_pytorch_basics.operator_library import aten_operators
from ch03_pytorch_basics.tensor_attributes import (
    address,
    attributes,
    create_on_device,
    create_then_move,
)
from common import bench

CPU = torch.device("cpu")


def test_attributes_of_known_tensors():
    found = attributes(torch.zeros(2, 3, dtype=torch.float16))
    assert found == {
        "dtype": "float16",
        "device": "cpu",
        "layout": "strided",
        "requires_grad": False,
        "shape": "(2, 3)",
        "memory_bytes": 12,
    }
    # a view is small, the memory it describes is not
    assert attributes(torch.zeros(100)[:1])["memory_bytes"] == 400
    assert attributes(torch.empty(9, device="meta"))["memory_bytes"] == 0
    sparse = torch.eye(3).to_sparse()  # 2 x 3 int64, 3 float32
    assert attributes(sparse)["memory_bytes"] == 2 * 3 * 8 + 3 * 4
    assert attributes(torch.nn.Parameter(torch.ones(1)))["requires_grad"]


def test_only_numbers_that_vary_smoothly_want_gradients():
    with pytest.raises(RuntimeError, match="floating point and complex"):
        torch.ones(2, dtype=torch.int64, requires_grad=True)


def test_addresses_are_the_sources_own():
    array = np.arange(4, dtype=np.float32)
    assert address(array) == array.__array_interface__["data"][0]
    assert address(torch.from_numpy(array)) == address(array)
    assert address(torch.from_numpy(array)[2:]) == address(array) + 8
    assert address([1.0]) is None
    assert address(torch.tensor(array)) != address(array)


def test_every_maker_copies_or_shares_as_said():
    rows = tensor_attributes.copied_or_shared(CPU)
    memory = {row["name"]: row["memory"] for row in rows}
    assert memory["array: torch.tensor"] == "copied"
    assert memory["array: torch.from_numpy"] == "shared"
    assert memory["bytearray: torch.frombuffer"] == "shared"
    assert {"copied", "shared"} == set(memory.values())


@pytest.mark.parametrize(
    "wrong",
    [
        ("array", "torch.tensor", torch.tensor, True),
        ("array", "from_numpy", torch.from_numpy, False),
        ("tensor", "detach", torch.Tensor.detach, False),
    ],
)
def test_a_wrong_belief_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(tensor_attributes, "makers", lambda device: [wrong])
    with pytest.raises(bench.Mismatch, match=wrong[1]):
        tensor_attributes.copied_or_shared(CPU)


def test_another_way_to_make_ones_is_caught(monkeypatch):
    monkeypatch.setattr(
        tensor_attributes, "create_then_move", create_on_device
    )
    with pytest.raises(bench.Mismatch, match="ones are made by"):
        tensor_attributes.creation_rows(8, CPU, torch.float64)


def test_moving_runs_one_operator_more():
    made = create_then_move(8, CPU, torch.float64)
    assert torch.equal(made, create_on_device(8, CPU, torch.float64))
    assert made.dtype == torch.float64
    first, last = tensor_attributes.creation_rows(8, CPU, torch.float64)
    assert (first["moved_bytes"], last["moved_bytes"]) == (16 * 8, 8 * 8)
    # nothing to do: the same tensor comes back, and no operator runs
    ran = aten_operators(lambda: create_then_move(8, CPU, torch.float32))
    assert [str(o) for o in ran] == ["aten.ones.default"]


def test_smoke(capsys):
    rows = tensor_attributes.main(["--smoke", "--device", "cpu"])
    assert rows[-1]["name"] == "create on device"
    assert rows[-1]["worst_error"] == 0
    shown = capsys.readouterr()
    assert "left out: the copy over the link" in shown.out
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())


@pytest.mark.parametrize("function", tensor_attributes.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone = pasted(function)
    if function is attributes:
        assert alone(torch.ones(2))["memory_bytes"] == 8
    elif function is address:
        x = torch.ones(2)
        assert alone(x.numpy()) == alone(x) == x.data_ptr()
    else:
        assert alone(2, CPU, torch.float64).tolist() == [1.0, 1.0]


@pytest.mark.gpu
def test_what_is_made_on_a_gpu_never_was_on_the_host():
    device = torch.device("cuda")
    rows = tensor_attributes.copied_or_shared(device)
    memory = {row["name"]: row["memory"] for row in rows}
    assert memory["array: as_tensor, device=cuda"] == "copied"
    for make, count in ((create_on_device, 0), (create_then_move, 1)):
        ran = aten_operators(lambda make=make: make(8, device, torch.float32))
        assert sum("_to_copy" in str(o) for o in ran) == count
    tensor_attributes.main(["--smoke", "--device", "cuda"])
