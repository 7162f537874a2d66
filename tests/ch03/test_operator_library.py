"""3.2.1: schemas, and the ATen operators under one layer."""

import pytest
import torch

from ch03_pytorch_basics import operator_library
from ch03_pytorch_basics.operator_library import (
    aten_operators,
    keeps,
    overloads,
    promises,
)
from common import bench

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture
def library():
    """A library of our own operators, taken out again."""
    made = torch.library.Library("ch03_test", "FRAGMENT")
    yield made
    made._destroy()


def test_schemas_of_known_operators():
    nothing = {"writes": set(), "shares": set()}
    own = {"writes": {"self"}, "shares": {"self"}}
    assert promises(aten.mul.Tensor) == nothing
    assert promises(aten.mul_.Tensor) == own
    assert promises(aten.mul.out) == {"writes": {"out"}, "shares": {"out"}}
    assert promises(aten.t.default) == {"writes": set(), "shares": {"self"}}
    assert promises(aten.split.Tensor)["shares"] == {"self"}
    assert overloads("mul")["out"] == (
        "aten::mul.out(Tensor self, Tensor other, *, Tensor(a!) out)"
        " -> Tensor(a!)"
    )


def test_operators_do_what_their_schemas_say():
    rows = operator_library.checked_schemas(operator_library.schema_cases(CPU))
    found = {row["name"]: (row["writes"], row["shares"]) for row in rows}
    assert found["aten.view.default"] == ("nothing", "self")
    assert found["aten.index_put_.default"] == ("self", "self")
    assert found["aten.addmm.default"] == ("nothing", "nothing")


def liars():
    def returns_its_argument(x):
        return x

    def writes_secretly(x):
        x.add_(1)
        return x.clone()

    def copies(x):
        return x.clone()

    return [
        ("(Tensor x) -> Tensor", returns_its_argument),
        ("(Tensor x) -> Tensor", writes_secretly),
        ("(Tensor(a) x) -> Tensor(a)", copies),
        ("(Tensor(a!) x) -> Tensor(a!)", returns_its_argument),
    ]


@pytest.mark.parametrize("number", range(len(liars())))
def test_an_operator_that_breaks_its_promise_is_caught(number, library):
    schema, kernel = liars()[number]
    library.define(f"liar{number}{schema}")
    library.impl(f"liar{number}", kernel, "CPU")
    operator = getattr(torch.ops.ch03_test, f"liar{number}").default
    with pytest.raises(bench.Mismatch, match="says"):
        operator_library.checked_schemas([(operator, (torch.ones(3),), {})])


def test_an_honest_operator_of_ours_passes(library):
    library.define("honest(Tensor(a!) x) -> Tensor(a!)")
    library.impl("honest", lambda x: x.add_(1), "CPU")
    case = (torch.ops.ch03_test.honest.default, (torch.ones(3),), {})
    assert operator_library.checked_schemas([case])[0]["writes"] == "x"


def test_each_form_is_one_operator():
    rows = operator_library.written_forms(CPU)
    found = {row["name"]: row["operator"] for row in rows}
    assert found["x * y"] == found["x.mul(y)"] == "aten.mul.Tensor"
    assert found["x.mul_(y)"] == "aten.mul_.Tensor"
    assert found["torch.mul(x, y, out=z)"] == "aten.mul.out"


def test_a_form_that_is_two_operators_is_caught(monkeypatch):
    two = {"x + x + x": lambda: torch.arange(1.0, 7.0) * 3}
    monkeypatch.setattr(
        operator_library, "forms_of_multiply", lambda *args: two
    )
    with pytest.raises(bench.Mismatch, match="x . x . x"):
        operator_library.written_forms(CPU)


def test_the_operators_under_a_linear_layer():
    rows = operator_library.under_linear(CPU)
    found = {row["name"]: row for row in rows}
    assert found["forward, x (2, 4)"]["in_order"] == "t, addmm"
    assert found["forward, no bias"]["in_order"] == "t, mm"
    assert found["forward, inference mode"]["in_order"] == "linear"
    assert found["backward of the first"]["products"] == 2
    assert all(
        row["products"] == 1
        for name, row in found.items()
        if name.startswith("forward")
    )


def test_gradients_of_a_layer_are_those_of_its_operators():
    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    with torch.no_grad():
        by_hand = aten.addmm(layer.bias, x, aten.t(layer.weight))
    assert torch.equal(layer(x), by_hand)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, aten.mm(torch.ones(3, 2), x))


def test_the_census_counts_known_kinds():
    counts = operator_library.census()
    assert counts["overloads"] > counts["operators"] > 1000
    for kind in ("in-place", "out=", "views", "core"):
        assert 50 < counts[kind] < counts["overloads"]


def test_smoke(capsys):
    operator_library.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())


@pytest.mark.parametrize("function", operator_library.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x = pasted(function), torch.ones(2)
    if function is aten_operators:
        assert alone(lambda: x.exp().neg()) == [
            aten.exp.default,
            aten.neg.default,
        ]
    elif function is overloads:
        assert set(alone("relu")) == {"default", "out"}
    elif function is promises:
        assert alone(aten.relu_.default)["writes"] == {"self"}
    elif function is keeps:
        assert alone(aten.relu_.default, -x)["writes"] == {"self"}
    else:
        results = [call() for call in alone(x, x, 1).values()]
        assert all(torch.equal(result, x) for result in results)
