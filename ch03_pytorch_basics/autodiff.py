"""3.4.1  What autodiff is · 什麼是自動微分

Question  What does each way to a derivative cost, and how exact is it?
Expect    of n inputs and m outputs: 2 n evaluations by differences, n tangents
          forward, m gradients in reverse. A product of n numbers: 3 (n - 1)
          multiplications in reverse, n times as many forward, n (n - 2) by
          formula. Differences lose a third of the digits, the others none
Run       python -m ch03_pytorch_basics.autodiff [--smoke] [--save]
"""

import math
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from common import bench, tables


def symbolic(expression, name):
    """Rewrite a formula by the rules of calculus: d(a b) = da b + a db.

    A formula is a number, a name, or ("+" or "*", left, right).  Nothing is
    shared: what stands in two derivatives is computed twice.
    """
    if not isinstance(expression, tuple):
        return 1 if expression == name else 0
    sign, a, b = expression
    da, db = symbolic(a, name), symbolic(b, name)

    def times(x, y):
        return (
            0 if 0 in (x, y) else y if x == 1 else x if y == 1 else ("*", x, y)
        )

    def plus(x, y):
        return y if x == 0 else x if y == 0 else ("+", x, y)

    return plus(da, db) if sign == "+" else plus(times(da, b), times(a, db))


def value_of(expression, values):
    """Run a formula: one operator per sign in it."""
    if not isinstance(expression, tuple):
        return values.get(expression, expression)
    sign, a, b = expression
    a, b = value_of(a, values), value_of(b, values)
    return a + b if sign == "+" else a * b


def central_differences(function, x, step):
    """Move one input at a time both ways: two evaluations per input.

    A large step leaves the error of the curve, step²; a small one divides
    the rounding error by the step.  Returns (m, n).
    """
    columns = []
    for i in range(len(x)):
        ahead, behind = x.clone(), x.clone()
        ahead[i] += step
        behind[i] -= step
        columns.append((function(ahead) - function(behind)) / (2 * step))
    return torch.stack(columns, -1)


def forward_mode(function, x):
    """Carry a tangent beside each value: one column per evaluation.

    Nothing is kept, for the derivative is ready when the value is.
    """
    columns = []
    for direction in torch.eye(len(x), dtype=x.dtype, device=x.device):
        columns.append(torch.func.jvp(function, (x,), (direction,))[1])
    return torch.stack(columns, -1)


def reverse_mode(function, x):
    """Keep what ran, then walk back from each output: one row per walk.

    One evaluation serves all rows, and a row adds the work of one more;
    weights that want gradients, too, would add that of another.
    """
    result, pull = torch.func.vjp(function, x)
    rows = []
    for direction in torch.eye(len(result), dtype=x.dtype, device=x.device):
        rows.append(pull(direction)[0])
    return torch.stack(rows)


TECHNIQUES = (
    symbolic,
    value_of,
    central_differences,
    forward_mode,
    reverse_mode,
)


class Multiplications(TorchDispatchMode):
    """Count the multiplications of numbers that are tensors."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.overloadpacket is torch.ops.aten.mul
        return op(*args, **(kwargs or {}))


def product(x):
    """Multiply the n elements of ``x``; returns (1,)."""
    result = x[0]
    for factor in x[1:].unbind():
        result = result * factor
    return result.view(1)


def formula_gradient(x):
    """Differentiate the formula of ``product`` by each of its names."""
    names = [f"x{i}" for i in range(len(x))]
    values = dict(zip(names, x.unbind(), strict=True))
    formula = names[0]
    for name in names[1:]:
        formula = ("*", formula, name)
    rows = [value_of(symbolic(formula, name), values) for name in names]
    return torch.stack(rows)[None]


STEP = {torch.float32: 2.0**-8, torch.float64: 2.0**-17}  # eps^(1/3), roughly

# name: (how, multiplications of the gradient of a product of n numbers)
WAYS = {
    "symbolic": (lambda f, x: formula_gradient(x), lambda n: n * (n - 2)),
    "central differences": (
        lambda f, x: central_differences(f, x, STEP[x.dtype]),
        lambda n: 2 * n * (n - 1),
    ),
    "forward mode": (forward_mode, lambda n: 3 * n * (n - 1)),
    "reverse mode": (reverse_mode, lambda n: 3 * (n - 1)),
}


def products(count, dtype, device):
    """Return rows: the multiplications that a gradient of n inputs takes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(count, generator=draw, dtype=torch.float64) + 0.5
    x = x.to(device, dtype)
    truth = x.prod() / x
    rows = []
    for name, (gradient, predict) in WAYS.items():
        with Multiplications() as seen:
            found = gradient(product, x)[0]
        error = ((found - truth).abs().max() / truth.abs().max()).item()
        rows.append(
            {
                "name": name,
                "predicted": predict(count),
                "multiplications": seen.count,
                "error": error,
            }
        )
    return rows


def two_layers(count, width, outputs, dtype, device):
    """Return a function from n to m numbers, a point and its Jacobian."""
    draw = torch.Generator().manual_seed(0)
    shapes = (count, width), (width, outputs), (count,)
    A, B, x = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(
            device, dtype
        )
        / shape[0] ** 0.5
        for shape in shapes
    )

    def function(x):
        return ((x[None] @ A).tanh() @ B)[0]

    slope = 1 - (x @ A).tanh() ** 2
    return function, x, (A * slope @ B).T


def jacobians(shapes, width, dtype, device):
    """Return rows: what a Jacobian costs, in evaluations of the function."""
    predict = {
        "central differences": lambda n, m: (2 * n, 2 * n),
        # value, tangent, and the zero tangent of the constant weights: torch
        # multiplies by it, too
        "forward mode": lambda n, m: (n, 3 * n),
        "reverse mode": lambda n, m: (1, 1 + m),
    }
    rows = []
    for n, m in shapes:
        function, x, truth = two_layers(n, width, m, dtype, device)
        with FlopCounterMode(display=False) as one:
            function(x)
        for name, predicted in predict.items():
            calls = 0

            def counted(x, function=function):
                nonlocal calls
                calls += 1
                return function(x)

            with FlopCounterMode(display=False) as all_of_it:
                found = WAYS[name][0](counted, x)
            work = all_of_it.get_total_flops() / one.get_total_flops()
            rows.append(
                {
                    "shape": f"{n} → {m}",
                    "name": name,
                    "predicted_calls": predicted(n, m)[0],
                    "calls": calls,
                    "predicted_work": predicted(n, m)[1],
                    "work": work,
                    "error": (found - truth).abs().max().item(),
                }
            )
    return rows


def step_errors(device):
    """Return rows: the error of differences against the step they take."""
    schemes = {  # truncation and rounding are equal at eps^(1/2), eps^(1/3)
        "one-sided": (lambda f, x, h: (f(x + h) - f(x)) / h, 1 / 2, 1 / 2),
        "central": (
            lambda f, x, h: (f(x + h) - f(x - h)) / (2 * h),
            1 / 3,
            2 / 3,
        ),
    }
    rows = []
    for dtype in (torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        x = torch.linspace(0.5, 1, 64, dtype=torch.float64)
        truth = x.cos() * x.sin().exp()
        x = x.to(device, dtype)

        def function(x):
            return x.sin().exp()

        def worst(found, truth=truth):
            return (found.cpu().double() / truth - 1).abs().max().item()

        ones = torch.ones_like(x)
        exact = torch.func.jvp(function, (x,), (ones,))[1]
        for name, (scheme, power, lost) in schemes.items():
            steps = [2.0**-k for k in range(1, 2 - round(math.log2(eps)))]
            errors = [worst(scheme(function, x, h)) for h in steps]
            best = min(range(len(steps)), key=errors.__getitem__)
            rows.append(
                {
                    "name": f"{name}, {str(dtype).removeprefix('torch.')}",
                    "predicted_step": eps**power,
                    "step": steps[best],
                    "predicted_error": eps**lost,
                    "error": errors[best],
                    "autodiff_error": worst(exact),
                    "eps": eps,
                    "steps": steps,
                    "errors": errors,
                }
            )
    return rows


def figure(rows):
    """Draw the error of differences against the step, and autodiff's."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(7, 3.8), layout="constrained")
    axes = drawn.subplots()
    for i, row in enumerate(row for row in rows if "steps" in row):
        color, style = f"C{i // 2}", ("--", "-")[i % 2]
        axes.loglog(
            row["steps"], row["errors"], style, color=color, label=row["name"]
        )
        axes.plot(row["step"], row["error"], "o", color=color)
        if i % 2:
            height = max(row["autodiff_error"], row["eps"] / 2)
            axes.axhline(height, color=color, linewidth=0.8)
            axes.annotate(
                f"autodiff, {row['name'].split(', ')[1]}",
                (row["steps"][0], height / 2),
                ha="right",
                va="top",
                color=color,
            )
    axes.set_xlabel("step")
    axes.set_ylabel("relative error")
    axes.set_ylim(1e-18, 10)
    axes.legend(frameon=False, loc=(0.03, 0.16))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        notebook.label(
            "every step errs, autodiff only rounds · "
            "任何步長都有誤差，自動微分只有捨入"
        ),
        fontfamily=notebook.fonts()["font.family"],
    )
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    # MPS has no float64
    device = "cpu" if args.device.type == "mps" else args.device
    dtype = torch.float64
    count = 8 if args.smoke else 64
    gradients = products(count, dtype, device)
    for row in gradients:
        if row["predicted"] != row["multiplications"] or row["error"] > 1e-8:
            raise bench.Mismatch(f"product of {count}: {row}")
    gradients = bench.report(
        args,
        gradients,
        {
            "name": "way",
            "predicted": "predicted",
            "multiplications": "multiplications",
            "error": "relative error",
        },
        title=f"The gradient of a product of {count} numbers (the product: "
        f"{count - 1})",
    )
    side = 8 if args.smoke else 64
    shapes = (side, 1), (8, 8), (1, side)
    full = jacobians(shapes, 32, dtype, device)
    for row in full:
        as_predicted = row["predicted_calls"] == row["calls"]
        as_predicted &= row["predicted_work"] == row["work"]
        if not as_predicted or row["error"] > 1e-8:
            raise bench.Mismatch(f"Jacobian {row['shape']}: {row}")
    full = bench.report(
        args,
        full,
        {
            "shape": "n → m",
            "name": "way",
            "predicted_calls": "predicted calls",
            "calls": "counted",
            "predicted_work": "predicted work",
            "work": "counted",
            "error": "worst error",
        },
        title="A Jacobian: calls of the function, work in evaluations of it",
    )
    curves = step_errors(device)
    for row in curves:
        near = row["error"] < 100 * row["predicted_error"]
        if not near or row["autodiff_error"] > 8 * row["eps"]:
            raise bench.Mismatch(f"error of differences: {row}")
    curves = bench.report(
        args,
        curves,
        {
            "name": "differences",
            "predicted_step": "predicted step",
            "step": "best step",
            "predicted_error": "predicted error",
            "error": "its error",
            "autodiff_error": "autodiff's error",
        },
        title="exp(sin(x)): the step that errs least",
    )
    function, x, _ = two_layers(*shapes[0][:1], 32, 1, dtype, device)
    timed = bench.compare(
        args,
        {
            name: lambda way=WAYS[name][0]: partial(way, function, x)
            for name in list(WAYS)[1:]
        },
        unit="gradient",
        tolerance=(1e-6, 1e-8),
        budget_s=3.0,
        title=f"One gradient of {side} inputs",
    )
    if not args.smoke:
        calls = [row["calls"] for row in full[:3]]
        each = [
            f"{row['name']} {tables.seconds(row['median_s'] / count)}"
            for row, count in zip(timed, calls, strict=True)
        ]
        print(f"per call of the function: {', '.join(each)}")
    return gradients + full + curves + timed


if __name__ == "__main__":
    bench.run(main)
