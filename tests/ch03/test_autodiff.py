"""3.4.1: four ways to a derivative agree, and cost what is said."""

import math

import pytest
import torch

from ch03_pytorch_basics import autodiff
from ch03_pytorch_basics.autodiff import (
    Multiplications,
    central_differences,
    forward_mode,
    reverse_mode,
    symbolic,
    value_of,
)
from common import bench

CPU = torch.device("cpu")
F64 = torch.float64


# --- formulas ---------------------------------------------------------------


def power(name, times):
    formula = name
    for _ in range(times - 1):
        formula = ("*", formula, name)
    return formula


@pytest.mark.parametrize(
    ("formula", "by_x", "by_y"),
    [
        (7, 0, 0),
        ("x", 1, 0),
        ("y", 0, 1),
        (("+", "x", "y"), 1, 1),
        (("+", "x", 3), 1, 0),
        (("*", "x", "y"), 5.0, 2.0),
        (("*", 3, "x"), 3, 0),
        (("*", "x", ("+", "x", "y")), 2 * 2.0 + 5.0, 2.0),
        (power("x", 4), 4 * 2.0**3, 0),
        (("*", ("*", "x", "y"), ("*", "x", "y")), 2 * 2 * 25.0, 2 * 4 * 5.0),
    ],
)
def test_rules_of_calculus(formula, by_x, by_y):
    point = {"x": 2.0, "y": 5.0}
    for name, right in (("x", by_x), ("y", by_y)):
        assert value_of(symbolic(formula, name), point) == right


def test_a_wrong_product_rule_is_noticed(monkeypatch):
    """d(a b) = da a + a db: one letter is wrong."""

    def wrong(expression, name):
        if not isinstance(expression, tuple):
            return 1 if expression == name else 0
        sign, a, b = expression
        da, db = wrong(a, name), wrong(b, name)
        return ("+", (sign, da, a), (sign, a, db))

    monkeypatch.setattr(autodiff, "symbolic", wrong)
    with pytest.raises(bench.Mismatch, match="symbolic"):
        autodiff.main(["--smoke", "--device", "cpu"])


# --- counts -----------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 17])
def test_multiplications_of_a_product(count):
    for row in autodiff.products(count, F64, CPU):
        assert row["multiplications"] == row["predicted"], row["name"]
        assert row["error"] < 1e-9


@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("m", [1, 5])
def test_calls_and_work_of_a_jacobian(n, m):
    rows = autodiff.jacobians([(n, m)], 8, F64, CPU)
    assert [row["calls"] for row in rows] == [2 * n, n, 1]
    assert [row["work"] for row in rows] == [2 * n, 3 * n, 1 + m]
    assert all(row["error"] < 1e-9 for row in rows)


def test_reverse_mode_that_evaluates_for_each_output_is_noticed(monkeypatch):
    def wasteful(function, x):
        rows = []
        for i in range(len(function(x))):
            result, pull = torch.func.vjp(function, x)
            rows.append(pull(torch.eye(len(result), dtype=x.dtype)[i])[0])
        return torch.stack(rows)

    ways = autodiff.WAYS | {"reverse mode": (wasteful, lambda n: 3 * (n - 1))}
    monkeypatch.setattr(autodiff, "WAYS", ways)
    rows = autodiff.jacobians([(4, 3)], 8, F64, CPU)
    assert rows[-1]["calls"] == 4 != rows[-1]["predicted_calls"]
    with pytest.raises(bench.Mismatch):
        autodiff.main(["--smoke", "--device", "cpu"])


def test_the_counter_counts_multiplications_only():
    x = torch.ones(3)
    with Multiplications() as seen:
        (x * x + x).sum() * 2
    assert seen.count == 2


# --- values -----------------------------------------------------------------


def curve(x):
    return torch.stack([x[0] * x[1].sin(), (x * x).sum(), x[2].exp()])


def by_hand(x):
    a, b, c = x.tolist()
    return torch.tensor(
        [
            [math.sin(b), a * math.cos(b), 0],
            [2 * a, 2 * b, 2 * c],
            [0, 0, math.exp(c)],
        ],
        dtype=F64,
    )


def test_three_ways_agree_with_a_jacobian_by_hand():
    x = torch.tensor([0.3, -1.2, 0.7], dtype=F64)
    truth = by_hand(x)
    assert torch.allclose(forward_mode(curve, x), truth, atol=1e-15)
    assert torch.allclose(reverse_mode(curve, x), truth, atol=1e-15)
    found = central_differences(curve, x, 1e-5)
    assert torch.allclose(found, truth, atol=1e-9)
    assert not torch.equal(found, truth)


def test_differences_leave_their_input_alone():
    x = torch.arange(3.0)
    central_differences(curve, x, 0.1)
    assert torch.equal(x, torch.arange(3.0))


def test_the_error_is_of_the_curve_and_then_of_rounding():
    for row in autodiff.step_errors(CPU):
        error = dict(zip(row["steps"], row["errors"], strict=True))
        best = row["step"]
        assert row["predicted_step"] / 16 < best < row["predicted_step"] * 16
        order = 1 if "one-sided" in row["name"] else 2
        fall = error[2.0**-3] / error[2.0**-5]  # a quarter of the step
        assert fall == pytest.approx(4**order, rel=0.25)
        least = row["steps"][-1]
        assert error[least] > 100 * row["error"]
        assert row["autodiff_error"] < row["error"] / 100


def test_a_one_sided_difference_is_not_a_central_one(monkeypatch):
    def one_sided(function, x, step):
        start, columns = function(x), []
        for i in range(len(x)):
            ahead = x.clone()
            ahead[i] += step
            columns.append((function(ahead) - start) / step)
        return torch.stack(columns, -1)

    monkeypatch.setattr(autodiff, "central_differences", one_sided)
    with pytest.raises(bench.Mismatch, match="central differences"):
        autodiff.main(["--smoke", "--device", "cpu"])


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = autodiff.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert not shown.err
    assert [r["multiplications"] for r in rows[:4]] == [48, 112, 168, 21]
    drawn = autodiff.figure(rows)
    assert len(drawn.axes[0].lines) == 4 + 4 + 2


@pytest.mark.parametrize("function", autodiff.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone = pasted(function)
    x = torch.tensor([0.3, -1.2, 0.7], dtype=F64)
    if function is symbolic:
        assert alone(("*", "x", "x"), "x") == ("+", "x", "x")
    elif function is value_of:
        assert alone(("+", "x", ("*", 2, "x")), {"x": 3}) == 9
    else:
        more = (1e-5,) if function is central_differences else ()
        found = alone(curve, x, *more)
        assert torch.allclose(found, by_hand(x), atol=1e-9)


@pytest.mark.gpu
def test_on_a_gpu():
    rows = autodiff.main(["--smoke", "--device", "cuda"])
    assert [r["multiplications"] for r in rows[:4]] == [48, 112, 168, 21]
