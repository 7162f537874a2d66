"""3.4.3: what an operator of one's own keeps, and the checks it must pass."""

import pytest
import torch

from ch03_pytorch_basics import custom_function
from ch03_pytorch_basics.custom_function import (
    Gelu,
    checks,
    composite_gelu,
    kept_for_backward,
)
from common import bench

CPU = torch.device("cpu")


def inner(x):
    return 0.7978845608 * (x + 0.044715 * x**3)


def slope(x, tanh):
    ds = 0.7978845608 * (1 + 0.134145 * x**2)
    return 0.5 * (1 + tanh + x * (1 - tanh**2) * ds)


# --- versions that people write, each with one mistake ----------------------


class OnContext(torch.autograd.Function):
    """Keeps its input where autograd does not look."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return 0.5 * x * (1 + inner(x).tanh())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * slope(ctx.x, inner(ctx.x).tanh())


class Once(torch.autograd.Function):
    """Computes its gradient where no graph is recorded."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + inner(x).tanh())

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return gradient * slope(x, inner(x).tanh())


class SavedTanh(torch.autograd.Function):
    """Saves an intermediate: a constant to the second derivative."""

    @staticmethod
    def forward(ctx, x):
        tanh = inner(x).tanh()
        ctx.save_for_backward(x, tanh)
        return 0.5 * x * (1 + tanh)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * slope(*ctx.saved_tensors)


class OneFactor(torch.autograd.Function):
    """Forgets that the tanh depends on x, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 0.5 * x * (1 + inner(x).tanh())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 0.5 * (1 + inner(x).tanh())


def failed(function):
    return {n for n, held in checks(function.apply, CPU).items() if not held}


def test_the_right_ones_pass_every_check():
    for function, _ in custom_function.WAYS.values():
        assert all(checks(function, CPU).values())


@pytest.mark.parametrize(
    ("wrong", "by"),
    [
        (OnContext, {"second", "vmap", "noticed"}),
        (Once, {"second", "vmap"}),
        (SavedTanh, {"second", "vmap"}),
        (OneFactor, {"first"}),
    ],
)
def test_each_mistake_fails_a_check(wrong, by):
    assert failed(wrong) == by


def test_a_mistake_s_first_derivative_hides_it():
    """Three of four wrong ones train a network as the right one does."""
    x = torch.linspace(-3, 3, 9, dtype=torch.float64, requires_grad=True)
    (right,) = torch.autograd.grad(composite_gelu(x).sum(), x)
    for wrong in (OnContext, Once, SavedTanh):
        (found,) = torch.autograd.grad(wrong.apply(x).sum(), x)
        assert torch.allclose(found, right)
    (found,) = torch.autograd.grad(OneFactor.apply(x).sum(), x)
    assert (found - right).abs().max() > 0.1


def test_what_lies_on_ctx_changes_unnoticed():
    """The gradient is then silently that of another input."""

    def gradient(function):
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        result = function(x).sum()
        with torch.no_grad():
            x.add_(1)
        return torch.autograd.grad(result, x)[0]

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        gradient(Gelu.apply)
    x = torch.linspace(-1, 1, 5)
    right = slope(x, inner(x).tanh())
    assert (gradient(OnContext.apply) - right).abs().max() > 0.1


# --- what is kept -----------------------------------------------------------


def kept(function, count=100):
    x = torch.linspace(-1, 1, count, requires_grad=True)
    return sum(t.nbytes for t in kept_for_backward(function, x)) / x.nbytes


def test_kept_tensors_are_counted():
    assert kept(composite_gelu) == 4
    assert kept(Gelu.apply) == 1
    assert kept(custom_function.library_gelu) == 1
    assert kept(SavedTanh.apply) == 2
    assert kept(lambda x: x + 1) == 0
    assert kept(lambda x: x * x) == 1  # one piece of memory, saved twice


def test_what_lies_on_ctx_is_not_seen_and_not_counted():
    assert kept(OnContext.apply) == 0


def test_the_input_is_saved_and_not_a_copy():
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    (saved,) = Gelu.apply(x).grad_fn.saved_tensors
    assert saved.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradient_keep_the_type(dtype):
    x = torch.linspace(-3, 3, 9).to(dtype).requires_grad_()
    y = Gelu.apply(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


def test_a_gpt_s_block_trains_alike():
    layer = torch.nn.Linear(8, 8)
    x = torch.linspace(-2, 2, 32).view(4, 8)
    found = []
    for function in (composite_gelu, Gelu.apply):
        layer.zero_grad()
        function(layer(x)).square().mean().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = custom_function.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert not shown.err
    assert [row["tensors"] for row in rows[:3]] == [4, 1, 1]
    timed = [row for row in rows if "worst_error" in row]
    assert {row["compared"] for row in timed} == {2}


@pytest.mark.parametrize("wrong", [OnContext, Once, SavedTanh, OneFactor])
def test_the_script_refuses_a_wrong_one(wrong, monkeypatch):
    ways = custom_function.WAYS | {"autograd.Function": (wrong.apply, 1)}
    monkeypatch.setattr(custom_function, "WAYS", ways)
    with pytest.raises(bench.Mismatch):
        custom_function.main(["--smoke", "--device", "cpu"])


@pytest.mark.parametrize("technique", custom_function.TECHNIQUES)
def test_techniques_work_when_pasted(technique, pasted):
    alone = pasted(technique)
    x = torch.linspace(-3, 3, 9, dtype=torch.float64, requires_grad=True)
    if technique is kept_for_backward:
        assert len(alone(composite_gelu, x)) == 4
        return
    function = alone.apply if technique is Gelu else alone
    assert torch.allclose(function(x), custom_function.library_gelu(x))
    assert all(checks(function, CPU).values())


@pytest.mark.gpu
def test_on_a_gpu():
    rows = custom_function.main(["--smoke", "--device", "cuda"])
    assert [row["tensors"] for row in rows[:3]] == [4, 1, 1]
