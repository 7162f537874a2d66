"""3.4.3  Extending autograd · Autograd 擴充自訂運算元

Question  What must an operator of one's own keep, and what else must it do?
Expect    GELU written with torch's operators keeps 4 N numbers for backward;
          as one autograd.Function it keeps its input, N, and computes the
          tanh twice. It must pass the checks that the composite passes
Run       python -m ch03_pytorch_basics.custom_function [--smoke] [--save]
"""

from functools import partial

import torch

from common import bench


def composite_gelu(x):
    """Each operator keeps what its own derivative reads."""
    inner = 0.7978845608 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + inner.tanh())


class Gelu(torch.autograd.Function):
    """Keep the input alone; backward computes the tanh a second time."""

    generate_vmap_rule = True  # asks for a setup_context of its own

    @staticmethod
    def forward(x):
        return 0.5 * x * (1 + (0.7978845608 * (x + 0.044715 * x**3)).tanh())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):  # of operators that have derivatives
        (x,) = ctx.saved_tensors
        tanh = (0.7978845608 * (x + 0.044715 * x**3)).tanh()
        inner = 0.7978845608 * (1 + 0.134145 * x**2)
        return gradient * 0.5 * (1 + tanh + x * (1 - tanh**2) * inner)


def kept_for_backward(function, *inputs):
    """Whatever autograd saves passes a hook: see it, and let it pass.

    Returns the tensors, each piece of memory once.  What a Function keeps
    as an attribute of ``ctx`` passes no hook, nor any other check.
    """
    kept = {}

    def see(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda saved: saved):
        result = function(*inputs)
    del result
    return list(kept.values())


TECHNIQUES = (composite_gelu, Gelu, kept_for_backward)


def library_gelu(x):
    """Return the same by the kernel that torch has for it."""
    return torch.nn.functional.gelu(x, approximate="tanh")


WAYS = {  # name: (function, tensors of N that it keeps)
    "composite": (composite_gelu, 4),
    "autograd.Function": (Gelu.apply, 1),
    "torch's own kernel": (library_gelu, 1),
}


def holds(check, *args):
    """Say whether a check of torch's comes to its end."""
    try:
        return bool(check(*args))
    except (RuntimeError, NotImplementedError):
        return False


def change_noticed(function, x):
    """Say whether a change of the input before backward is noticed."""
    x = x.detach().clone().requires_grad_()
    (truth,) = torch.autograd.grad(function(x).sum(), x)
    result = function(x).sum()
    with torch.no_grad():
        x.add_(1)
    try:
        (found,) = torch.autograd.grad(result, x)
    except RuntimeError:
        return True
    return torch.allclose(found, truth)  # it kept nothing of x


def alike_under_vmap(function, x):
    """Say whether gradients one by one are those of the whole batch."""
    x = x.detach()
    single = torch.func.vmap(torch.func.grad(function))(x)
    together = torch.func.grad(lambda x: function(x).sum())(x)
    return torch.allclose(single, together)


def checks(function, device):
    """Return {check: whether it holds} of a function of one tensor."""
    # not random: the curve's steep and flat parts, and zero
    x = torch.linspace(-3, 3, 7, dtype=torch.float64, device=device)
    x.requires_grad_()
    return {
        "first": holds(torch.autograd.gradcheck, function, (x,)),
        "second": holds(torch.autograd.gradgradcheck, function, (x,)),
        "vmap": holds(alike_under_vmap, function, x),
        "noticed": holds(change_noticed, function, x),
    }


def step(function, x, gradient):
    """Return a call of forward and backward."""

    def call():
        leaf = x.detach().requires_grad_()
        result = function(leaf)
        gradients = torch.autograd.grad(result, leaf, gradient)
        return {"result": result, "gradients": gradients}

    return call


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    count = 1 << (12 if args.smoke else 20 if device.type == "cpu" else 26)
    x = torch.linspace(-4, 4, count, device=device)
    saved, checked = [], []
    for name, (function, tensors) in WAYS.items():
        kept = kept_for_backward(function, x.clone().requires_grad_())
        row = {
            "name": name,
            "tensors": len(kept),
            "predicted_bytes": tensors * x.nbytes,
            "kept_bytes": sum(t.nbytes for t in kept),
        }
        if row["predicted_bytes"] != row["kept_bytes"]:
            raise bench.Mismatch(f"kept for backward: {row}")
        saved.append(row)
        # MPS has no float64
        where = "cpu" if device.type == "mps" else device
        checked.append({"name": name} | checks(function, where))
        if not all(checked[-1].values()):
            raise bench.Mismatch(f"a check does not hold: {checked[-1]}")
    saved = bench.report(
        args,
        saved,
        {
            "name": "row",
            "tensors": "tensors kept",
            "predicted_bytes": "predicted",
            "kept_bytes": "counted",
        },
        title=f"Kept for backward: GELU of {count:,} float32 numbers",
    )
    checked = bench.report(
        args,
        checked,
        {
            "name": "row",
            "first": "gradcheck",
            "second": "gradgradcheck",
            "vmap": "vmap of grad",
            "noticed": "a changed input is noticed",
        },
        title="What an operator must pass",
    )
    gradient = torch.linspace(-1, 1, count, device=device)
    timed = bench.compare(
        args,
        {
            name: partial(step, function, x, gradient)
            for name, (function, _) in WAYS.items()
        },
        unit="step",
        budget_s=4.0,
        title="Forward and backward",
    )
    if not args.smoke:
        less = saved[0]["kept_bytes"] / saved[1]["kept_bytes"]
        time = timed[1]["median_s"] / timed[0]["median_s"]
        print(
            f"the Function keeps {less:.0f} times less than the composite "
            f"and takes {time:.2f} times its time"
        )
    return saved + checked + timed


if __name__ == "__main__":
    bench.run(main)
