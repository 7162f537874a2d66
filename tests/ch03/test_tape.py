"""3.4.2: a tape of under 100 lines has torch's gradients, nodes and errors."""

import inspect

import pytest
import torch

from ch03_pytorch_basics import tape
from ch03_pytorch_basics.tape import (
    Tape,
    by_autograd,
    by_tape,
    loss_of,
    nodes_of,
)
from common import bench

CPU = torch.device("cpu")


def randn(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def changed(old, new):
    """Return the tape with one thing done otherwise."""
    source = inspect.getsource(Tape)
    assert source.count(old) == 1, old
    names = {"torch": torch}
    exec(source.replace(old, new), names)
    return names["Tape"]


def both(function, *values, tape_class=Tape):
    """Return (torch's gradients, the tape's) of a function's result."""
    leaves = [v.clone().requires_grad_() for v in values]
    function(*leaves).backward()
    ours = tape_class()
    variables = [ours.leaf(v) for v in values]
    found = ours.backward(function(*variables))
    return [x.grad for x in leaves], [found[v.line] for v in variables]


FUNCTIONS = {
    "matmul": (lambda a, b: (a @ b).mean(), (3, 4), (4, 2)),
    "add": (lambda a, b: (a + b).tanh().mean(), (3, 4), (3, 4)),
    "add a row": (lambda a, b: (a + b).tanh().mean(), (3, 4), (4,)),
    "add a column": (lambda a, b: (a + b).tanh().mean(), (3, 1), (3, 4)),
    "add a number": (lambda a, b: (a + b).tanh().mean(), (), (3, 4)),
    "neg": (lambda a: (-a).tanh().mean(), (5,)),
    "tanh": (lambda a: a.tanh().mean(), (5,)),
    "log_softmax": (lambda a: a.log_softmax(-1).tanh().mean(), (3, 4)),
    "log_softmax of columns": (
        lambda a: a.log_softmax(0).tanh().mean(),
        (3, 4),
    ),
    "gather": (
        lambda a: a.gather(1, torch.tensor([[1], [0], [3]])).tanh().mean(),
        (3, 4),
    ),
    "gather one twice": (
        lambda a: a.gather(1, torch.tensor([[1, 1], [0, 2]])).tanh().mean(),
        (2, 3),
    ),
    "one used twice": (lambda a: (a.tanh() + a @ a).mean(), (3, 3)),
    "a deep diamond": (
        lambda a: ((a + a) + (a + a).tanh()).mean(),
        (3,),
    ),
}


# --- gradients --------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_torch_s(name):
    function, *shapes = FUNCTIONS[name]
    values = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    for right, found in zip(*both(function, *values), strict=True):
        assert found.shape == right.shape
        assert torch.allclose(found, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("g * (1 - y * y)", "g * (1 - y)", "tanh"),
        ("a.T @ g", "a.T @ g / 2", "matmul"),
        (" * g.sum(dim, True)", "", "log_softmax"),
        (
            "part if known is None else known + part",
            "part",
            "one used twice",
        ),
        ("scatter_add(dim", "scatter(dim", "gather one twice"),
        ("range(result.line, -1, -1)", "range(result.line + 1)", "tanh"),
    ],
)
def test_a_wrong_rule_is_noticed(old, new, name):
    function, *shapes = FUNCTIONS[name]
    values = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    try:
        right, found = both(function, *values, tape_class=changed(old, new))
    except KeyError:  # a gradient that never came
        return
    errors = [
        (a - b).abs().max() / a.abs().max()
        for a, b in zip(right, found, strict=True)
    ]
    assert max(errors) > 1e-3


def test_what_was_broadcast_gets_the_sum():
    wrong = changed(
        "(other, lambda g: g.sum_to_size(b))", "(other, lambda g: g)"
    )
    function, *_ = FUNCTIONS["add a row"]
    right, found = both(function, randn(3, 4), randn(4), tape_class=wrong)
    assert right[1].shape == (4,) != found[1].shape


def test_constants_get_no_line_and_keep_nothing():
    ours = Tape()
    x, w = ours.Variable(ours, randn(3, 4)), ours.leaf(randn(4, 2))
    assert (x + x).line is None and len(ours.lines) == 1
    y = x @ w
    ((_, _, saved),) = ours.lines[y.line][1]
    assert [t for t, _ in saved] == [x.value]  # and not w
    assert list(ours.backward(y.mean())) == [w.line]


def test_an_unused_leaf_has_no_gradient():
    ours = Tape()
    used, unused = ours.leaf(randn(3)), ours.leaf(randn(3))
    found = ours.backward(used.mean())
    assert used.line in found and unused.line not in found


# --- training ---------------------------------------------------------------


def test_trains_to_the_same_losses():
    weights, data = tape.problem(64, 8, 16, 4, CPU)
    right = tape.train(by_autograd, weights, data, 30)
    found = tape.train(tape.taped, weights, data, 30)
    assert found == pytest.approx(right, rel=1e-5)
    assert right[-1] < 0.7 * right[0]


def test_a_wrong_tape_trains_to_other_losses():
    wrong = changed("g * (1 - y * y)", "g * (1 - y)")
    weights, data = tape.problem(64, 8, 16, 4, CPU)
    right = tape.train(by_autograd, weights, data, 30)
    found = tape.train(
        lambda *problem: by_tape(wrong(), *problem), weights, data, 30
    )
    assert abs(found[-1] / right[-1] - 1) > 100 * 1e-5


def test_training_leaves_the_problem_alone():
    weights, data = tape.problem(8, 4, 4, 3, CPU)
    before = [w.clone() for w in (*weights, *data)]
    tape.train(tape.taped, weights, data, 3)
    assert all(map(torch.equal, before, (*weights, *data)))


# --- side by side -----------------------------------------------------------


def test_nodes_and_lines_are_the_same_operators():
    weights, data = tape.problem(64, 8, 16, 4, CPU)
    rows, distinct = tape.side_by_side(weights, data)
    assert [row["node"] for row in rows] == [
        f"{name}Backward0"
        for name in "Neg Mean Gather LogSoftmax Add Mm Tanh Add Mm".split()
    ]
    # targets, scores, hidden twice, the second weight, x: 4 bytes, or 8
    bytes_ = 8 * 64 + 4 * (64 * 4 + 64 * 16 + 16 * 4 + 64 * 8)
    assert distinct == [bytes_, bytes_]
    assert sum(row["line_bytes"] for row in rows) == bytes_ + 4 * 64 * 16


def test_nodes_of_a_known_graph():
    x = randn(3).requires_grad_()
    (name, kept), (leaf, nothing) = nodes_of(x.tanh())
    assert name == "TanhBackward0" and list(kept) == ["result"]
    assert torch.equal(kept["result"], x.tanh())
    assert leaf.endswith("AccumulateGrad") and not nothing


# --- the version counter ----------------------------------------------------


def test_a_change_in_place_is_refused_by_both():
    rows = {row["name"]: row for row in tape.changed_in_place(CPU)}
    found = rows["y.add_(1)"]
    assert "modified by an inplace operation" in found["torch_says"]
    assert "is at version 1; expected version 0" in found["torch_says"]
    assert "version 0; it is at version 1" in found["tape_says"]
    for who in ("torch", "tape"):  # .data hides the change from both
        assert rows["y + 1"][who] == "right"
        assert rows["y.data.add_(1)"][who].startswith("wrong")


def test_a_change_of_what_nobody_saved_is_harmless():
    ours = Tape()
    leaf = ours.leaf(randn(3))
    y = leaf + leaf
    y.value.add_(1)
    found = ours.backward(y.mean())[leaf.line]
    assert torch.allclose(found, torch.full_like(found, 2 / 3))


def test_a_tape_without_versions_is_noticed(monkeypatch):
    blind = changed("tensor._version != version", "False")
    monkeypatch.setattr(tape, "Tape", blind)
    with pytest.raises(bench.Mismatch, match="in place"):
        tape.main(["--smoke", "--device", "cpu"])


# --- the script -------------------------------------------------------------


def test_the_tape_has_under_100_lines():
    assert inspect.getsource(Tape).rstrip().count("\n") + 1 < 100


def test_the_tape_uses_no_autograd():
    source = inspect.getsource(Tape)
    assert "requires_grad" not in source and "autograd" not in source
    loss, _ = tape.taped(loss_of, *unpacked(*tape.problem(8, 4, 4, 3, CPU)))
    assert not loss.requires_grad


def unpacked(weights, data):
    return weights, *data


def test_smoke(capsys):
    rows = tape.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert "expected version 0" in " ".join(shown.out.split())
    assert not shown.err
    timed = [row for row in rows if "worst_error" in row]
    assert [row["compared"] for row in timed] == [5, 5]


@pytest.mark.parametrize("technique", tape.TECHNIQUES)
def test_techniques_work_when_pasted(technique, pasted):
    alone = pasted(technique)
    weights, data = tape.problem(8, 4, 4, 3, CPU)
    loss, gradients = by_autograd(loss_of, weights, *data)
    if technique is Tape:
        found = by_tape(alone(), loss_of, weights, *data)
    elif technique is by_tape:
        found = alone(Tape(), loss_of, weights, *data)
    elif technique is by_autograd:
        found = alone(loss_of, weights, *data)
    elif technique is loss_of:
        found = by_autograd(alone, weights, *data)
    else:
        x = torch.ones(2, requires_grad=True)
        assert len(alone(x.tanh())) == 2
        return
    assert torch.allclose(found[0], loss)
    for a, b in zip(found[1], gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu():
    tape.main(["--smoke", "--device", "cuda"])
