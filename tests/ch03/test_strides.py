"""3.1.3: address arithmetic equals indexing."""

import io
import itertools
import json
import types

import pytest
import torch

from ch03_pytorch_basics import strides
from ch03_pytorch_basics.operator_library import aten_operators
from ch03_pytorch_basics.strides import (
    dense_strides,
    element_address,
    element_at,
    memory_map,
)
from common import bench

CPU = torch.device("cpu")


def views():
    """Yield views over many storages, layouts and types."""
    for dtype in (torch.float32, torch.float64, torch.uint8, torch.complex64):
        x = torch.arange(120).to(dtype).view(2, 3, 4, 5)
        yield x
        yield x.permute(3, 1, 0, 2)
        yield x[1, :, 1::2, ::3]
        yield x[:, 1:2].expand(2, 3, 4, 5)
        yield x.to(memory_format=torch.channels_last)
        yield x.diagonal(0, 2, 3)
        yield x[0, 0].unfold(1, 2, 2)
        yield x[1, 2, 3, 4]


def test_address_arithmetic_equals_indexing():
    for x in views():
        places = memory_map(x)
        assert places.shape == x.shape
        for index in itertools.product(*map(range, x.shape)):
            assert element_address(x, index) == x[index].data_ptr()
            assert element_at(x, index) == x[index]
            assert places[index] == x[index].storage_offset()


def test_addresses_without_the_offset_are_caught():
    def careless(tensor, index):
        steps = zip(index, tensor.stride(), strict=True)
        place = sum(i * stride for i, stride in steps)
        start = tensor.untyped_storage().data_ptr()
        return start + place * tensor.element_size()

    x = torch.arange(24.0).view(4, 6)
    assert careless(x, (1, 2)) == x[1, 2].data_ptr()
    assert careless(x[1:], (1, 2)) != x[1:][1, 2].data_ptr()
    assert element_address(x[1:], (1, 2)) == x[2, 2].data_ptr()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 1, 3, 1)])
def test_strides_of_memory_without_gaps(shape):
    x = torch.empty(shape)
    assert dense_strides(shape, (0, 1, 2, 3)) == x.stride()
    last = torch.empty(shape, memory_format=torch.channels_last)
    assert dense_strides(shape, (0, 2, 3, 1)) == last.stride()


def test_an_element_may_be_named_often_or_never():
    rows = {row["name"]: row for row in strides.described(CPU)}
    assert rows["expanded (3, 6)"]["elements"] == 18
    assert rows["expanded (3, 6)"]["memory_elements"] == 6
    assert rows["columns 1::2"]["places"][:4] == [1, 3, 5, 7]
    assert rows["channels_last"]["order"] == "channels_last"
    assert rows["transposed"]["order"] == "neither"


@pytest.mark.parametrize("add", [strides.add_rows, strides.add_after_copy])
def test_the_order_in_memory_changes_no_number(add):
    a = torch.randn(6, 6, requires_grad=True)
    b = torch.randn(6, 6)
    columns = b.t().contiguous().t()
    assert torch.equal(add(a, columns), a + b)
    (grad,) = torch.autograd.grad(add(a, columns).square().sum(), a)
    (expected,) = torch.autograd.grad((a + b).square().sum(), a)
    assert torch.equal(grad, expected)


def test_rows_of_the_sums_differ_in_order_or_in_a_copy_alone():
    rows = strides.additions(8, CPU)
    found = {
        name: (a.stride(), b.stride(), [str(o) for o in ran])
        for name, (add, a, b) in rows.items()
        for ran in [aten_operators(lambda add=add, a=a, b=b: add(a, b))]
    }
    rowwise, columnwise, add = (8, 1), (1, 8), "aten.add.Tensor"
    assert found == {
        "both by rows": (rowwise, rowwise, [add]),
        "both by columns": (columnwise, columnwise, [add]),
        "rows + columns": (rowwise, columnwise, [add]),
        "rows + columns, copied first": (
            rowwise,
            columnwise,
            ["aten.clone.default", add],
        ),
    }
    sums = [add(a, b) for add, a, b in rows.values()]
    assert all(torch.equal(found, sums[0]) for found in sums)


@pytest.mark.parametrize(
    ("times", "device", "said"),
    [(7.05, "cpu", True), (5.9, "cpu", False), (7.05, "meta", False)],
)
def test_more_time_than_bytes_is_explained(
    monkeypatch, capsys, times, device, said
):
    row = {"ratio": 0.2, "ratio_interval": [0.1, 0.3], "noisy": False}
    seconds = [row | {"median_s": s} for s in (1.0, 1.0, times, 6.0)]
    monkeypatch.setattr(strides.bench, "compare", lambda *a, **k: seconds)
    args = types.SimpleNamespace(device=torch.device(device), smoke=False)
    strides.addition_costs(args, 8)
    shown = capsys.readouterr().out
    assert ("takes 7.05 times as long, but moves 6 times" in shown) == said
    assert "copying b into a's order first pays nothing" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


@pytest.mark.parametrize(
    ("mixed", "copied", "words"),
    [
        ([0.14, 0.16], [0.15, 0.17], "pays nothing here: no difference"),
        ([0.14, 0.16], [0.17, 0.19], "pays here:\n0.15 times"),
        ([0.14, 0.16], [0.11, 0.13], "costs more than it saves here:\n0.15"),
    ],
)
@pytest.mark.parametrize("noisy", [False, True])
def test_whether_the_copy_pays_is_read_from_the_rows(
    mixed, copied, words, noisy
):
    pairs = [1.0, 1.0], [1.0, 1.0], mixed, copied
    found = [
        {"ratio": sum(pair) / 2, "ratio_interval": pair, "noisy": noisy}
        for pair in pairs
    ]
    said = strides.copy_pays(found)
    assert words in said and ("a quiet machine" in said) == noisy
    assert all(len(line) <= 100 for line in said.splitlines())


def test_an_address_that_is_wrong_is_caught(monkeypatch):
    def careless(tensor, index):
        steps = zip(index, tensor.stride(), strict=True)
        place = sum(i * stride for i, stride in steps)
        start = tensor.untyped_storage().data_ptr()
        return start + place * tensor.element_size()

    monkeypatch.setattr(strides, "element_address", careless)
    with pytest.raises(bench.Mismatch, match="columns 1::2"):
        strides.described(CPU)


def test_convolutions_of_both_orders_and_their_gradients():
    x = torch.randn(2, 4, 5, 5)
    weight = torch.randn(4, 4, 3, 3)
    answers = []
    for order in (torch.contiguous_format, torch.channels_last):
        w = weight.clone(memory_format=order).requires_grad_()
        y = strides.convolve(x.to(memory_format=order), w)
        assert y.is_contiguous(memory_format=order)
        y.square().sum().backward()
        answers.append((y, w.grad))
    torch.testing.assert_close(*[y for y, _ in answers])
    torch.testing.assert_close(*[g for _, g in answers], rtol=1e-4, atol=1e-4)


def test_smoke(capsys):
    rows = strides.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    # beside "no difference measured here", a ceiling and "noisy" fit 29
    assert all(len(row["name"]) <= 29 for row in rows)
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    rows = json.loads(json.dumps(rows))  # as a record gives them
    drawn = strides.figure(rows)
    assert len(drawn.axes) == len(strides.layouts(CPU))
    # every strip has 24 cells, and as many numbers as places in use
    for axes, row in zip(drawn.axes, rows, strict=False):
        assert len(axes.patches) == 24
        assert len(axes.texts) == row["memory_elements"]
    drawn.savefig(io.BytesIO())


@pytest.mark.parametrize("function", strides.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x = pasted(function), torch.arange(6.0).view(2, 3)
    if function is element_address:
        assert alone(x, (1, 2)) == x.data_ptr() + 20
    elif function is memory_map:
        assert alone(x.t()).tolist() == [[0, 3], [1, 4], [2, 5]]
    elif function is element_at:
        assert alone(x, (1, 0)) == 3
    elif function is dense_strides:
        assert alone((2, 3), (1, 0)) == (1, 2)
    elif function is strides.convolve:
        y = alone(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
        assert y[0, 0, 1, 1] == 9
    else:
        assert torch.equal(alone(x, x), 2 * x)
