"""3.2.2: blocks of memory, counted by the profiler."""

import pytest
import torch

from ch03_pytorch_basics import operator_allocation
from ch03_pytorch_basics.operator_allocation import (
    allocations,
    fused,
    in_place,
    into_buffers,
    new_results,
)
from common import bench

CPU = torch.device("cpu")
N = 1000


def test_allocations_of_known_programs():
    x = torch.ones(N)
    assert allocations(lambda: x.t()) == {
        "count": 0,
        "bytes": 0,
        "peak_bytes": 0,
    }
    assert allocations(x.exp)["bytes"] == 4 * N
    two = allocations(lambda: x.exp().exp())
    assert two == {"count": 2, "bytes": 8 * N, "peak_bytes": 8 * N}

    def one_after_the_other():
        for _ in range(3):
            x.exp()

    three = allocations(one_after_the_other)
    assert three == {"count": 3, "bytes": 12 * N, "peak_bytes": 4 * N}


def test_every_row_allocates_what_was_counted_by_hand():
    rows = operator_allocation.counted(N, CPU)
    found = {row["name"]: row["allocations"] for row in rows}
    assert found == {"new results": 3, "in place": 1, "out=": 0, "fused": 1}
    bytes_of = {row["name"]: row["allocated_bytes"] for row in rows}
    assert bytes_of["new results"] == 3 * bytes_of["fused"] == 12 * N


def test_a_wrong_count_is_caught(monkeypatch):
    wrong = operator_allocation.BY_HAND | {"in place": (0, 0, 8)}
    monkeypatch.setattr(operator_allocation, "BY_HAND", wrong)
    with pytest.raises(bench.Mismatch, match="in place"):
        operator_allocation.counted(N, CPU)


def test_a_buffer_made_in_each_call_saves_nothing():
    x, w, b = operator_allocation.inputs(N, CPU)

    def careless():
        return into_buffers(x, w, b, torch.empty(0))

    assert allocations(careless)["count"] == 1
    out = torch.empty(N)
    assert allocations(lambda: into_buffers(x, w, b, out))["count"] == 0


def test_all_forms_give_the_same_numbers_and_keep_their_inputs():
    inputs = operator_allocation.inputs(N, CPU)
    before = [t.clone() for t in inputs]
    expected = new_results(*inputs)
    torch.testing.assert_close(in_place(*inputs), expected)
    torch.testing.assert_close(fused(*inputs), expected)
    out = torch.empty(N)
    assert into_buffers(*inputs, out) is out
    torch.testing.assert_close(out, expected)
    for tensor, was in zip(inputs, before, strict=True):
        assert torch.equal(tensor, was)


def test_gradients_are_the_same_and_out_is_refused():
    rows = {r["name"]: r for r in operator_allocation.with_gradient(N, CPU)}
    assert rows["out="]["autograd"] == "refused"
    assert "don't support automatic" in rows["out="]["says"]
    for name in ("new results", "in place", "fused"):
        assert rows[name]["autograd"] == "same gradients"
    assert rows["in place"]["allocations"] == 1


def test_overwriting_what_backward_needs_is_refused():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2)
    y = (x * 2).exp_().add_(1)  # exp goes back from its result
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_large_blocks_come_page_by_page():
    """How many differs by system and allocator; none is none everywhere."""
    found = operator_allocation.page_faults(lambda: torch.ones(1 << 23))
    assert found is None or found >= 0


def test_smoke(capsys):
    rows = operator_allocation.main(["--smoke", "--device", "cpu"])
    assert [row["name"] for row in rows[-4:]] == [
        "new results",
        "in place",
        "out=",
        "fused",
    ]
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "out= is refused: mul(): functions with out=" in shown
    assert all(len(s) <= 100 for s in shown.splitlines())


@pytest.mark.parametrize("function", operator_allocation.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x = pasted(function), torch.ones(2)
    if function is allocations:
        assert alone(lambda: torch.ones(2))["bytes"] == 8
    elif function is into_buffers:
        assert alone(x, x, x, torch.empty(2)).tolist() == [2.0, 2.0]
    else:
        assert alone(x, x, -2 * x).tolist() == [0.0, 0.0]


@pytest.mark.gpu
def test_a_gpus_allocator_is_seen_by_the_profiler():
    device = torch.device("cuda")
    operator_allocation.counted(N, device)
    operator_allocation.with_gradient(N, device)
    operator_allocation.main(["--smoke", "--device", "cuda"])
