"""3.2.3: the order of keys, predicted from tables and recorded."""

import io
import json

import numpy as np
import pytest
import torch

from ch03_pytorch_basics import call_path
from ch03_pytorch_basics.call_path import (
    crossing,
    dispatch_mode,
    elements_that_hide,
    function_mode,
    keys_ahead,
    record_kernels,
    repeat,
)

CPU = torch.device("cpu")
MUL = "aten::mul.Tensor"


def test_recorded_order_of_keys():
    rows = call_path.walked_rows(CPU)
    found = {row["name"]: row["stations"].split(" → ") for row in rows}
    autograd = ["AutogradCPU", "CPU"]
    assert found["x wants a gradient"] == autograd
    assert found["nobody wants one"] == autograd
    assert found["no_grad"] == autograd  # it passes by, all the same
    assert found["inference_mode"] == ["CPU"]
    counted = ["AutogradCPU", "ADInplaceOrView", "CPU"]
    assert found["in place, x.mul_(y)"] == counted
    assert found["a view, x.transpose(0, 1)"] == counted
    assert found["autocast, x @ y"] == ["AutocastCPU", *autograd]
    mode = ["PythonTLSSnapshot", "AutogradCPU", "Python", "CPU"]
    assert found["a dispatch mode"] == mode
    assert found["function and dispatch mode"] == ["__torch_function__", *mode]


def test_a_mode_below_autograd_sees_no_graph():
    seen = []

    class Looking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            seen.append(result.grad_fn)
            return result

    x = torch.ones(2, requires_grad=True)
    with Looking():
        y = torch.mul(x, x)
    assert seen == [None]
    assert y.grad_fn is not None


def test_a_wrong_order_is_caught(monkeypatch):
    monkeypatch.setattr(
        call_path,
        "keys_ahead",
        lambda name, *tensors: keys_ahead(name, *tensors)[::-1],
    )
    with pytest.raises(AssertionError, match="wants a gradient"):
        call_path.walked_rows(CPU)


def test_the_recorders_leave_everything_as_it_was():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    table = torch._C._dispatch_dump_table(MUL)
    calls = []
    library = record_kernels(MUL, ["AutogradCPU", "CPU"], calls)
    try:
        z = x * y
        (grad,) = torch.autograd.grad(z.sum(), x)
    finally:
        library._destroy()
    assert z.tolist() == grad.tolist() == [3.0, 3.0]
    # forward, and what backward multiplies
    assert calls == ["AutogradCPU", "CPU"] * 2
    torch.mul(x, y)
    assert len(calls) == 4
    assert torch._C._dispatch_dump_table(MUL) == table


def test_tensors_carry_their_keys():
    x = torch.ones(2)
    assert keys_ahead(MUL, x) == ["AutogradCPU", "CPU"]
    meta = torch.ones(2, device="meta")
    assert keys_ahead(MUL, meta) == ["AutogradMeta", "Meta"]
    sparse = torch.eye(2).to_sparse()
    assert keys_ahead(MUL, sparse)[-1] == "SparseCPU"


def test_layers_give_the_same_product():
    for name, (operator, args, context) in call_path.layers(CPU, 3).items():
        result = repeat(operator, args, context(), 2)
        if name != "dispatcher":
            assert result.tolist() == [1.0, 1.0, 1.0], name
    rows = call_path.layers(CPU)
    for name, keys in (
        ("result's memory", ["CPU"]),
        ("autograd key", ["AutogradCPU", "CPU"]),
    ):
        _, args, context = rows[name]
        with context():
            assert keys_ahead(MUL, *args) == keys, name
    assert repeat(*rows["graph node"][:2], rows["graph node"][2](), 1).grad_fn


def test_each_layer_adds_what_its_row_has_more():
    rounds = np.array([[1.0, 3.0, 4.0]] * 19 + [[50.0, 60.0, 10.0]])
    rows = call_path.layer_rows(dict.fromkeys("abc"), rounds)
    assert [row["added_s"] for row in rows] == [1.0, 2.0, 1.0]
    assert rows[-1]["call_s"] == 4.0


def test_as_many_elements_hide_the_overhead():
    assert elements_that_hide(3e-6, 12e9, 12) == pytest.approx(3000)
    # overhead + work: doubled where both are equal
    sizes = [2**n for n in range(0, 24, 2)]
    seconds = [3e-6 + 12 * n / 12e9 for n in sizes]
    assert crossing(sizes, seconds, 2) == pytest.approx(3000, rel=0.15)
    assert crossing(sizes, seconds, 11) == pytest.approx(30000, rel=0.15)
    assert crossing(sizes[:4], seconds[:4], 2) is None


@pytest.mark.parametrize("queued", [False, True])
def test_predicted_equals_measured_on_a_made_up_machine(queued):
    """A CPU waits for each call; a GPU's work runs beside the next launch."""
    sizes = [2**n for n in range(0, 24)]
    join = max if queued else lambda a, b: a + b
    seconds = [join(3e-6, 12 * n / 12e9) for n in sizes]
    rates = {"memory": 12e9, "caches": None}
    (row,) = call_path.hidden_rows(sizes, {"x": seconds}, rates, queued)
    assert row["by_memory"] == pytest.approx(3000, abs=1)
    assert row["by_caches"] is None
    assert row["measured"] == pytest.approx(3000, rel=0.1)
    assert row["tenth"] == pytest.approx(30000, rel=0.1)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (1100, "about what memory"),
        (4000, "in the caches"),
        (9000, "more than bandwidth"),
        (100, "fewer than bandwidth"),
    ],
)
def test_the_reading_follows_the_numbers(measured, words):
    row = {"name": "x", "by_memory": 1000, "by_caches": 4000}
    assert words in call_path.reading(row | {"measured": measured})
    assert call_path.reading(row | {"measured": None}) is None


def test_smoke(capsys):
    rows = call_path.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert "…" not in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    drawn = call_path.figure(json.loads(json.dumps(rows)))
    assert len(drawn.axes[0].get_legend().get_texts()) == 3
    drawn.savefig(io.BytesIO())


@pytest.mark.parametrize("function", call_path.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x, calls = pasted(function), torch.ones(2), []
    if function is keys_ahead:
        assert alone(MUL, x) == ["AutogradCPU", "CPU"]
    elif function is record_kernels:
        library = alone(MUL, ["CPU"], calls)
        torch.mul(x, x)
        library._destroy()
        assert calls == ["CPU"]
    elif function in (dispatch_mode, function_mode):
        with alone(calls):
            torch.mul(x, x)
        assert len(calls) == 1
    elif function is repeat:
        assert alone(torch.add, (x, 1), torch.no_grad(), 3).tolist() == [2, 2]
    elif function is elements_that_hide:
        assert alone(1, 24, 12) == 2
    else:
        assert alone([1, 2, 4], [1.0, 1.0, 2.0], 2) == 4


@pytest.mark.gpu
def test_the_keys_of_a_gpu():
    rows = call_path.walked_rows(torch.device("cuda"))
    assert rows[0]["stations"] == "AutogradCUDA → CUDA"
    assert rows[6]["stations"] == "AutocastCUDA → AutogradCUDA → CUDA"
    call_path.main(["--smoke", "--device", "cuda"])
