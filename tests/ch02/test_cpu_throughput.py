"""CPU: one product in several ways, equal results, FLOPs as counted."""

import math

import pytest
import torch
from test_techniques import foreign
from torch.utils.flop_counter import FlopCounterMode

from ch02_hardware import cpu_throughput
from ch02_hardware.cpu_throughput import (
    matrix_product,
    product_flops,
    python_loops,
    row_by_row,
    with_threads,
)
from common import machine


class Counted(float):
    """A number that counts what is done with it."""

    flops = 0

    def __mul__(self, other):
        Counted.flops += 1
        return Counted(float(self) * float(other))

    def __add__(self, other):
        Counted.flops += 1
        return Counted(float(self) + float(other))

    __radd__ = __add__


def operands(n=5, k=7, m=3):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((n, k), (k, m))
    ]


def test_all_ways_give_the_same_product():
    a, b = operands()
    right = torch.einsum("nk,km->nm", a, b)
    loops = torch.tensor(python_loops(a.tolist(), b.tolist()))
    assert torch.allclose(loops.double(), right, rtol=1e-6)
    exact = [
        math.fsum(x * y for x, y in zip(a[i], b[:, j], strict=True))
        for i in range(5)
        for j in range(3)
    ]
    assert right.flatten().tolist() == pytest.approx(exact, rel=1e-12)
    rows = row_by_row(a.numpy(), b.numpy(), torch.empty(5, 3).double().numpy())
    assert torch.allclose(torch.from_numpy(rows), right, rtol=1e-12)
    rows = row_by_row(a, b, torch.empty(5, 3, dtype=torch.float64))
    assert torch.allclose(rows, right, rtol=1e-12)
    assert torch.allclose(matrix_product(a, b), right, rtol=1e-12)
    for count in (1, 2):
        threaded = with_threads(count, matrix_product, a, b)
        assert torch.allclose(threaded, right, rtol=1e-12)


def test_flops_are_counted_by_hand_and_by_machine():
    a, b = operands()
    n, k, m = 5, 7, 3
    Counted.flops = 0
    python_loops(
        [[Counted(x) for x in row] for row in a.tolist()],
        [[Counted(x) for x in row] for row in b.tolist()],
    )
    assert Counted.flops == product_flops(n, k, m) == 210
    with FlopCounterMode(display=False) as counter:
        matrix_product(a, b)
    assert counter.get_total_flops() == product_flops(n, k, m)


class Rows:
    """A matrix that notes the shape of each product it takes part in."""

    def __init__(self, numbers, products):
        self.numbers, self.products = numbers, products

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return Rows(self.numbers[i], self.products)

    def __matmul__(self, other):
        self.products.append(tuple(self.numbers.shape))
        return self.numbers @ other


def test_row_by_row_is_a_product_for_each_row():
    a, b = operands()
    products = []
    result = row_by_row(Rows(a, products), b, torch.empty(5, 3).double())
    assert torch.allclose(result, a @ b)
    assert products == [(7,)] * 5
    products.clear()
    matrix_product(Rows(a, products), b)
    assert products == [(5, 7)]


def test_each_row_runs_on_the_threads_that_it_names(monkeypatch):
    seen = {}

    def noted(technique):
        def call(*inputs):
            seen["now"] = technique.__name__, torch.get_num_threads()
            return technique(*inputs)

        return call

    for technique in (python_loops, row_by_row, matrix_product):
        name = technique.__name__
        monkeypatch.setattr(cpu_throughput, name, noted(technique))

    def compared(args, n, variants, title, expect):
        for name, factory in variants.items():
            factory()()
            seen[name] = seen.pop("now")
        return [{"median_s": 1.0}] * len(variants)

    monkeypatch.setattr(cpu_throughput, "compared", compared)
    monkeypatch.setattr(cpu_throughput.machine, "cores", lambda: 3)
    cpu_throughput.main(["--smoke"])
    assert seen == {
        "Python loops": ("python_loops", 1),
        "NumPy, row by row": ("row_by_row", 1),
        "torch, one call": ("matrix_product", 1),
        "one call, 3 threads": ("matrix_product", 3),
        "torch, 1 thread": ("matrix_product", 1),
        "torch, 2 threads": ("matrix_product", 2),
        "torch, 3 threads": ("matrix_product", 3),
    }


def test_threads_are_given_back(monkeypatch):
    before = torch.get_num_threads()
    assert with_threads(3, torch.get_num_threads) == 3
    assert torch.get_num_threads() == before

    def fails():
        raise ValueError

    with pytest.raises(ValueError):
        with_threads(3, fails)
    assert torch.get_num_threads() == before


def test_the_measured_threads_are_those_asked_for(monkeypatch):
    seen = []

    def gemm(dtype, device, sizes, budget_s):
        seen.append((dtype, torch.get_num_threads()))
        return 1e9

    monkeypatch.setattr(cpu_throughput.ceilings, "gemm_flops", gemm)
    rows = cpu_throughput.gemm_rows([1, 3], (64,), 0.0)
    assert [row["name"] for row in rows] == list(cpu_throughput.DTYPES)
    assert seen == [(d, n) for d in cpu_throughput.DTYPES for n in (1, 3)]
    assert rows[0]["3_flops"] == 1e9


def test_what_multiplies_is_said(monkeypatch):
    def native(yes):
        card = {"native_matmul": {"bfloat16": yes, "float16": yes}}
        monkeypatch.setattr(machine, "card", lambda: card)

    by = cpu_throughput.instructions
    native(True)
    assert by("bfloat16", ["fma", "avx512_bf16", "amx_bf16"]) == "amx_bf16"
    assert by("bfloat16", ["fma", "avx512_bf16"]) == "avx512_bf16"
    assert by("float16", ["asimdhp"]) == "asimdhp"
    assert by("float16", []) == "native, by another name"
    native(False)
    assert "not by oneDNN" in by("bfloat16", ["fma"])
    assert by("float32") == torch.backends.cpu.get_cpu_capability()


def test_the_ceilings_are_raised_by_what_all_cores_reached(
    monkeypatch, capsys
):
    most, kept = machine.cores(), []
    rows = [
        {"name": name, "by": "x", "1_flops": 1e11, f"{most}_flops": rate}
        for name, rate in (("float64", 1e11), ("float32", 2e11))
    ]
    monkeypatch.setattr(cpu_throughput, "gemm_rows", lambda *_: rows)
    pair = [{"median_s": 1.0}] * 2
    monkeypatch.setattr(cpu_throughput, "compared", lambda *_: pair)
    monkeypatch.setattr(machine, "keep_peaks", lambda *seen: kept.append(seen))
    cpu_throughput.main([])
    assert kept == [({"gemm_flops": {"float32": 2e11}}, "cpu", most)]
    del kept[:]
    cpu_throughput.main(["--smoke"])
    assert kept == []


def test_smoke(capsys):
    rows = cpu_throughput.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    ways = [row for row in rows if "per_call_flops" in row]
    assert {row["n"] for row in ways} == {16, 64}
    for row in ways:
        assert row["compared"] == 1 and row["worst_error"] < 1e-12
        assert row["per_call_flops"] == 2 * row["n"] ** 3
    left, right = cpu_throughput.figure(rows).axes
    assert len(right.patches) == len(ways)
    assert len(left.lines) % 2 == 0 and left.lines


@pytest.mark.parametrize("function", cpu_throughput.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    assert foreign(function) is None
    alone = pasted(function)
    a, b = [[1.0, 2.0]], [[3.0], [4.0]]
    x, y = torch.tensor(a), torch.tensor(b)
    if function is with_threads:
        assert alone(2, torch.get_num_threads) == 2
    elif function is python_loops:
        assert alone(a, b) == [[11.0]]
    elif function is row_by_row:
        assert alone(x, y, torch.empty(1, 1)).tolist() == [[11.0]]
    else:
        assert alone(x, y).tolist() == [[11.0]]
