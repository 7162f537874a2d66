"""3.2.3: the order of keys, predicted from tables and recorded."""

import contextlib
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
from common import bench

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
    with pytest.raises(bench.Mismatch, match="wants a gradient"):
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


def test_each_layer_has_what_its_row_says():
    """One thing more than the row before: a buffer, memory, modes."""
    rows, kept = call_path.layers(CPU, 3), {}
    for name in ("kernel", "result's memory"):
        operator, args, context = rows[name]
        with context():
            kept[name] = operator(*args), operator(*args)
    first, second = kept["kernel"]
    assert first is second and first.data_ptr() not in {
        tensor.data_ptr() for tensor in rows["kernel"][1]
    }
    first, second = kept["result's memory"]
    assert first.data_ptr() != second.data_ptr()
    stacks = {}
    for name in list(rows)[-3:]:
        with rows[name][2]():
            functions = torch._C._len_torch_function_stack()
            dispatched = "Python" in keys_ahead(MUL, *rows[name][1])
            stacks[name] = functions, dispatched
    assert stacks == {
        "graph node": (0, False),
        "dispatch mode": (0, True),
        "function mode": (1, True),
    }


def test_times_are_of_one_call(monkeypatch):
    """A clock that ticks once a call finds one tick per call."""
    ticks = []

    def operator(x):
        ticks.append(x)

    def wall(function, calls, device):
        before = len(ticks)
        function()
        return 1e-6 * (len(ticks) - before)

    def take_turns(functions, device, **how):
        return np.array([[wall(f, 1, device) for f in functions]] * 3)

    monkeypatch.setattr(call_path.timers, "wall", wall)
    monkeypatch.setattr(call_path.timers, "take_turns", take_turns)
    row = operator, (1,), contextlib.nullcontext
    samples = call_path.timed({"a": row, "b": row}, CPU, True, 0)
    assert samples == pytest.approx(np.full((3, 2), 1e-6))


def test_all_sizes_are_timed_in_the_same_turns():
    found = call_path.sized(CPU, [1, 16])
    names = list(call_path.layers(CPU))
    stacks = list(call_path.STACKS.values())
    ones, others = [(n, 1) for n in names], [(n, 16) for n in stacks]
    assert list(found) == ones + others
    for (_, size), (_, args, _) in found.items():
        assert {x.numel() for x in args} == {size}
    samples = np.arange(12.0)[None]  # column i takes i seconds
    seen = call_path.curves(found, samples, [1, 16])
    assert seen == {
        "inference mode": [4.0, 9.0],
        "recording a graph": [6.0, 10.0],
        "both modes": [8.0, 11.0],
    }
    # the overhead is the very number of the table of layers
    rows = call_path.layer_rows(names, samples)
    assert rows[4]["call_s"] == seen["inference mode"][0]


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
    assert crossing(sizes, seconds, 2) == (1024, 4096)
    assert crossing(sizes, seconds, 11) == (16384, 65536)
    assert crossing(sizes[:4], seconds[:4], 2) is None


def test_noise_at_the_border_widens_the_range():
    sizes = [1, 4, 16, 64, 256, 1024]
    assert crossing(sizes, [1, 1, 1.9, 2, 8, 32], 2) == (16, 64)
    assert crossing(sizes, [1, 1, 2.1, 1.9, 8, 32], 2) == (4, 256)
    assert crossing(sizes, [1, 1, 2.1, 1.9, 8, 1.5], 2) is None


def test_caches_decide_while_they_hold_what_is_moved():
    rates = {"caches": 120e9, "memory": 12e9}
    predicted = call_path.predicted
    assert predicted(1e-6, rates, 12 * 10_000) == (10_000, "caches")
    assert predicted(1e-6, rates, 12 * 9_999) == (1_000, "memory")
    unknown = rates | {"caches": None}
    assert predicted(1e-6, unknown, 1 << 30) == (1_000, "memory")
    none = dict.fromkeys(rates)
    assert predicted(1e-6, none, 0) == (None, None)


@pytest.mark.parametrize("queued", [False, True])
def test_predicted_equals_measured_on_a_made_up_machine(queued):
    """A CPU waits for each call; a GPU's work runs beside the next launch."""
    sizes = [2**n for n in range(0, 24)]
    join = max if queued else lambda a, b: a + b
    seconds = [join(3e-6, 12 * n / 12e9) for n in sizes]
    rates = {"caches": None, "memory": 12e9}
    (row,) = call_path.hidden_rows(sizes, {"x": seconds}, rates, 0, queued)
    assert row["predicted"] == pytest.approx(3000, abs=1)
    assert row["by"] == "memory"
    assert list(row["measured"]) == [2048, 4096]
    assert list(row["tenth"]) == [16384, 32768]
    assert "as memory's bandwidth predicts (3,00" in call_path.reading(row)


@pytest.mark.parametrize(
    ("measured", "by", "words"),
    [
        ((1024, 4096), "memory", "as memory's bandwidth predicts (2,000)"),
        ((1024, 4096), "caches", "as the caches' bandwidth predicts (2,000)"),
        ((2000, 4000), "caches", "as the caches' bandwidth predicts (2,000)"),
        ((1000, 2000), "caches", "hide it, as the caches'"),
        ((1000, 4000), "caches", "it (noise leaves so much open), as the"),
        ((1000, 2000), "caches", "as the caches' bandwidth predicts (2,000)"),
        ((64, 256), "caches", "at most 0.128 times what the caches'"),
        ((900, 1800), "caches", "at most 0.9 times what the caches'"),
        ((2400, 4800), "caches", "at least 1.2 times what the caches'"),
        ((4096, 8192), "memory", "at least 2.05 times what memory's"),
        ((4096, 8192), "memory", "predicts (2,000): a cache holds them"),
    ],
)
def test_the_reading_follows_the_numbers(measured, by, words):
    row = {"name": "x", "predicted": 2000, "by": by, "cached": True}
    assert words in call_path.reading(row | {"measured": measured})
    assert call_path.reading(row | {"measured": None}) is None


def test_the_border_is_found_between_one_size_and_its_double(
    monkeypatch, capsys
):
    """A grid of fours would leave room for twice the prediction."""
    asked = []

    def timed(found, device, smoke, budget_s):
        asked.extend(sorted({size for _, size in found}))
        return np.array([[1e-6 + 1e-10 * size for _, size in found]])

    monkeypatch.setattr(call_path, "timed", timed)
    monkeypatch.setattr(call_path, "cached_bytes_per_s", lambda _: 120e9)
    peaks = {"copy_bytes_per_s": 12e9, "cache_bytes": 2**25}
    monkeypatch.setattr(call_path.machine, "peaks", lambda _: peaks)
    rows = call_path.main(["--device", "cpu"])
    assert asked == [2**n for n in range(21)]
    row = rows[-1]
    assert row["predicted"] == pytest.approx(10_000, abs=2)
    assert row["measured"] == (8192, 16384)
    shown = capsys.readouterr().out
    assert "predicts (10,0" in " ".join(shown.split())
    assert all(len(line) <= 100 for line in shown.splitlines())


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
        assert alone([1, 2, 4], [1.0, 1.0, 2.0], 2) == (2, 4)


@pytest.mark.gpu
def test_the_keys_of_a_gpu():
    rows = call_path.walked_rows(torch.device("cuda"))
    assert rows[0]["stations"] == "AutogradCUDA → CUDA"
    assert rows[6]["stations"] == "AutocastCUDA → AutogradCUDA → CUDA"
    call_path.main(["--smoke", "--device", "cuda"])
