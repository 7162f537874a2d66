"""3.2.3  The call path · 運算元的呼叫過程

Question  Which stations does a call pass on its way to the kernel, what does
          each cost, and how large must a tensor be for that not to matter?
Expect    Python, autograd's key, the kernel's key, in this order; a few
          microseconds in all, as long as it takes to move overhead × bandwidth
          bytes: as many elements hide it, ten times as many make it small
Run       python -m ch03_pytorch_basics.call_path [--smoke] [--save]
"""

import contextlib

import numpy as np
import torch

from common import bench, machine, notebook, tables, timers


def keys_ahead(name, *tensors):
    """The dispatcher unites the keys of arguments and thread, highest first.

    Args:
        name: of an overload, such as ``aten::mul.Tensor``.
        tensors: its arguments.

    Returns:
        The keys whose kernels a call visits now; those that only let it
        fall through are left out.
    """
    keys = torch._C._dispatch_tls_local_include_set()
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    known, ahead = torch._C.DispatchKey.__members__, []
    for line in torch._C._dispatch_dump_table(name).splitlines():
        key, _, kernel = line.partition(": ")  # from the lowest up
        falls = kernel.startswith("fallthrough") or key == "Undefined"
        if key in known and not falls and keys.has(known[key]):
            ahead.insert(0, key)
    return ahead


def record_kernels(name, keys, calls):
    """Every key of an operator has a kernel, and a kernel can be replaced.

    Each replacement appends its key to ``calls`` and goes on with the kernel
    that was there.  Returns the library that holds them until its
    ``_destroy()``.
    """
    import warnings

    library = torch.library.Library("aten", "IMPL")
    for key in keys:
        there = torch.library.get_kernel(name, key)

        def kernel(keyset, *args, key=key, there=there, **kwargs):
            calls.append(key)
            return there.call_boxed(keyset, *args, **kwargs)

        with warnings.catch_warnings():  # that a kernel is replaced
            warnings.simplefilter("ignore")
            library.impl(
                name, kernel, key, with_keyset=True, allow_override=True
            )
    return library


def dispatch_mode(calls):
    """The Python key lies below autograd: a mode there sees no gradients."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            calls.append("Python")
            return operator(*args, **(kwargs or {}))

    return Mode()


def function_mode(calls):
    """Before anything is dispatched, Python's own functions can be caught."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append("__torch_function__")
            return function(*args, **(kwargs or {}))

    return Mode()


def repeat(operator, args, context, times):
    """Call an operator again and again, inside one context.

    Returns:
        The last result.
    """
    with context:
        for _ in range(times):
            result = operator(*args)
    return result


def elements_that_hide(overhead_s, bytes_per_s, bytes_per_element):
    """Memory moves so many elements while the host prepares one call."""
    return overhead_s * bytes_per_s / bytes_per_element


def crossing(sizes, seconds, factor):
    """Find where the time has grown to ``factor`` times the first.

    Args:
        sizes: ascending.
        seconds: at each size.
        factor: above 1.

    Returns:
        The size, read off between two measured ones on logarithmic scales;
        None if the time never gets there.
    """
    import math

    wanted = factor * seconds[0]
    for i in range(1, len(sizes)):
        if seconds[i] >= wanted:
            low, high = seconds[i - 1], seconds[i]
            part = math.log(wanted / low) / math.log(high / low)
            return sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** max(part, 0)
    return None


# --- the keys on the way ----------------------------------------------------


def situations(device):
    """Return (situation, operator, call, arguments, modes)."""

    def vector(grad=False, inference=False):
        with torch.inference_mode(inference):
            return torch.ones(2, 2, device=device, requires_grad=grad)

    def none(calls):
        return contextlib.nullcontext()

    def both(calls):
        stack = contextlib.ExitStack()
        stack.enter_context(function_mode(calls))
        stack.enter_context(dispatch_mode(calls))
        return stack

    aten = torch.ops.aten
    wanted = vector(grad=True), vector()
    plain = vector(), vector()
    free = vector(inference=True), vector(inference=True)
    mul, in_place, cast = aten.mul.Tensor, aten.mul_.Tensor, aten.mm.default
    return [
        ("x wants a gradient", mul, torch.mul, wanted, none),
        ("nobody wants one", mul, torch.mul, plain, none),
        ("no_grad", mul, torch.mul, wanted, lambda _: torch.no_grad()),
        (
            "inference_mode",
            mul,
            torch.mul,
            free,
            lambda _: torch.inference_mode(),
        ),
        ("in place, x.mul_(y)", in_place, torch.Tensor.mul_, plain, none),
        (
            "a view, x.transpose(0, 1)",
            aten.transpose.int,
            lambda x: x.transpose(0, 1),
            wanted[:1],
            none,
        ),
        (
            "autocast, x @ y",
            cast,
            torch.mm,
            wanted,
            lambda _: torch.autocast(device.type, torch.bfloat16),
        ),
        ("a dispatch mode", mul, torch.mul, wanted, dispatch_mode),
        ("function and dispatch mode", mul, torch.mul, wanted, both),
    ]


def walked(operator, call, tensors, modes):
    """Predict the stations of one call from the tables, and record them.

    Returns:
        (predicted, recorded) names.
    """
    name, calls = operator.name(), []
    with modes(calls):
        predicted = keys_ahead(name, *tensors)
    calls.clear()  # what asking for the keys ran itself
    own = [key for key in predicted if key != "Python"]  # the mode records
    library = record_kernels(name, own, calls)
    try:
        with modes(calls):
            call(*tensors)
    finally:
        library._destroy()
    if "__torch_function__" in calls:  # it is in no table of the dispatcher
        predicted.insert(0, "__torch_function__")
    return predicted, calls


def walked_rows(device):
    """Predict and record the stations in every situation.

    Raises:
        AssertionError: a station more or less, or in another order.
    """
    rows = []
    for name, operator, call, tensors, modes in situations(device):
        predicted, recorded = walked(operator, call, tensors, modes)
        assert recorded == predicted, (name, predicted, recorded)
        rows.append(
            {
                "name": name,
                "operator": operator.name().removeprefix("aten::"),
                "stations": " → ".join(recorded),
            }
        )
    return rows


# --- what each station costs ------------------------------------------------


def nothing(x, y):
    """Return what was given: a Python call and no more."""
    return x


def binding(x, y):
    """Ask a tensor what it knows without an operator."""
    x.dim()
    return x


def layers(device, size=1):
    """Return {layer: (operator, arguments, context factory)}.

    Each row does what the one before does and one thing more, but for the
    kernel's: out= must check its buffer, about as long as allocating takes.
    """

    def ones(grad=False, inference=False):
        with torch.inference_mode(inference):
            return torch.ones(size, device=device, requires_grad=grad)

    free = ones(inference=True), ones(inference=True)
    out = ones(inference=True)
    plain, wanted = (ones(), ones()), (ones(grad=True), ones())
    inference, grad = torch.inference_mode, contextlib.nullcontext

    def into(x, y):
        return torch.mul(x, y, out=out)

    def modes():
        stack = contextlib.ExitStack()
        stack.enter_context(silent_function_mode())
        stack.enter_context(silent_dispatch_mode())
        return stack

    return {
        "Python call": (nothing, free, inference),
        "C++ binding": (binding, free, inference),
        "dispatcher": (torch.is_same_size, free, inference),
        "kernel": (into, free, inference),
        "result's memory": (torch.mul, free, inference),
        "autograd key": (torch.mul, plain, grad),
        "graph node": (torch.mul, wanted, grad),
        "dispatch mode": (torch.mul, wanted, silent_dispatch_mode),
        "function mode": (torch.mul, wanted, modes),
    }


def silent_dispatch_mode():
    """Return a dispatch mode that hands every operator on."""

    class Silent(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    return Silent()


def silent_function_mode():
    """Return a function mode that hands every function on."""

    class Silent(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    return Silent()


SAMPLE_S = 5e-4  # shorter than a time slice: some rounds are undisturbed


def timed(found, device, smoke, budget_s):
    """Time rows of ``layers`` in turn, as many calls as fill ``SAMPLE_S``.

    Returns:
        Seconds per call, (rounds, rows).
    """
    functions, counts = [], []
    for operator, args, context in found.values():

        def calls(times, operator=operator, args=args, context=context):
            return repeat(operator, args, context(), times)

        calls(20)
        one = timers.wall(lambda calls=calls: calls(20), 1, device) / 20
        counts.append(max(1, min(10_000, int(SAMPLE_S / one))))
        functions.append(lambda calls=calls, n=counts[-1]: calls(n))
    rounds = bench.SMOKE_ROUNDS if smoke else bench.ROUNDS
    samples = timers.take_turns(
        functions, device, rounds=rounds, budget_s=0 if smoke else budget_s
    )
    return samples / counts


def quiet(samples):
    """Return what each row takes when nothing disturbs it.

    Noise only adds time: the fastest tenth of the rounds has the least.
    """
    return np.quantile(samples, 0.1, axis=0)


def layer_rows(found, samples):
    """Turn samples into rows: each layer's time is its row minus the last."""
    calls = quiet(samples)
    spread = np.subtract(*np.quantile(samples, [0.75, 0.25], axis=0))
    return [
        {
            "name": name,
            "call_s": float(calls[i]),
            "iqr_s": float(spread[i]),
            "added_s": float(calls[i] - (calls[i - 1] if i else 0)),
        }
        for i, name in enumerate(found)
    ]


# --- how many elements hide it ----------------------------------------------

STACKS = {
    "inference mode": "result's memory",
    "recording a graph": "graph node",
    "both modes": "function mode",
}
MOVED = 12  # bytes per element of a product: two float32 read, one written


def cached_bytes_per_s(device):
    """Copy a little and a little more: the difference is without overhead.

    Returns:
        bytes/s where the data lie in the caches; None if noise hid it.
    """
    times = []
    for count in (1 << 12, 1 << 14):  # 2 x 16 and 2 x 64 KiB
        source = torch.ones(count, device=device)
        target = torch.empty_like(source)
        runs = [
            timers.wall(lambda s=source, t=target: t.copy_(s), 200, device)
            for _ in range(9)
        ]
        times.append(min(runs))
    moved = 2 * 4 * ((1 << 14) - (1 << 12))
    return moved / (times[1] - times[0]) if times[1] > times[0] else None


def swept(device, sizes, smoke):
    """Time the three stacks at every size.

    Returns:
        {stack: seconds at each size}.  What a larger product takes is
        enough for a smaller one: what is above it is noise.
    """
    found = {name: [] for name in STACKS}
    for size in sizes:
        rows = layers(device, size)
        rows = {name: rows[layer] for name, layer in STACKS.items()}
        samples = timed(rows, device, smoke, budget_s=0.3)
        for name, seconds in zip(STACKS, quiet(samples), strict=True):
            found[name].append(float(seconds))
    return {
        name: np.minimum.accumulate(seconds[::-1])[::-1].tolist()
        for name, seconds in found.items()
    }


def hidden_rows(sizes, found, rates, queued):
    """Predict from bandwidth, and read off the curve, what hides overhead.

    Args:
        sizes: elements.
        found: {stack: seconds at each size}.
        rates: {"memory": bytes/s, "caches": bytes/s or None}.
        queued: launches run ahead of the work, as on a GPU: the time begins
            to grow where the work is as long as the overhead; on a CPU it
            has doubled there.
    """
    rows = []
    for name, seconds in found.items():
        row = {"name": name, "overhead_s": seconds[0]}
        for kind, rate in rates.items():
            row[f"by_{kind}"] = rate and round(
                elements_that_hide(seconds[0], rate, MOVED)
            )
        for key, factor in (("measured", 2), ("tenth", 11)):
            at = crossing(sizes, seconds, factor - queued * (factor > 2))
            if at and queued and factor == 2:
                at /= 2
            row[key] = at and round(at)
        rows.append(row | {"sizes": list(sizes), "seconds": seconds})
    return rows


def reading(row):
    """Say in words how one stack's measured size stands to the predicted.

    Returns:
        A sentence, or None where something was not measured.
    """
    memory, caches, found = row["by_memory"], row["by_caches"], row["measured"]
    if not memory or not found:
        return None
    words = f"{row['name']}: {found:,} elements hide it, "
    if memory / 1.5 <= found <= memory * 1.5:
        return words + "about what memory's bandwidth predicts"
    if caches and memory < found <= 1.5 * caches:
        return words + "more than memory's bandwidth predicts: in the caches"
    kind = "more" if found > memory else "fewer"
    return words + f"{kind} than bandwidth predicts"


def figure(rows):
    """Draw the time of a product against its size, and what was predicted.

    Args:
        rows: what ``main`` returned.

    Returns:
        A matplotlib Figure.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in rows if "seconds" in row]
    with matplotlib.rc_context(notebook.fonts()):
        drawn = Figure(figsize=(7.5, 3.8), dpi=100, layout="constrained")
        axes = drawn.add_subplot()
        for i, row in enumerate(rows):
            micro = [1e6 * s for s in row["seconds"]]
            axes.plot(
                row["sizes"], micro, "o-", color=f"C{i}", label=row["name"]
            )
            for key, style in (("by_memory", ":"), ("measured", "-")):
                if row[key]:
                    axes.plot(
                        [row[key]] * 2,
                        [micro[0] / 1.5, 2 * micro[0]],
                        style,
                        color=f"C{i}",
                    )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(notebook.label("elements · 元素個數"))
        axes.set_ylabel(notebook.label("µs per call · 每次呼叫微秒"))
        axes.set_title(
            notebook.label(
                "upright: as many elements hide the overhead, predicted "
                "(dotted) and measured · 虛線為預測，實線為實測"
            ),
            fontsize=9,
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return drawn


TECHNIQUES = (
    keys_ahead,
    record_kernels,
    dispatch_mode,
    function_mode,
    repeat,
    elements_that_hide,
    crossing,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    bench.report(
        args,
        walked_rows(device),
        {"name": "a call, x * y", "stations": "stations"},
        title="read from the dispatcher's tables, and recorded on the way",
    )
    found = layers(device)
    samples = timed(found, device, args.smoke, budget_s=4.0)
    bench.report(
        args,
        layer_rows(found, samples),
        {
            "name": "with this, too",
            "call_s": "one call",
            "iqr_s": "IQR",
            "added_s": "this adds",
        },
        title="a product of one element, layer upon layer",
    )
    most = 12 if args.smoke else 20 if device.type == "cpu" else 26
    sizes = [1 << n for n in range(0, most + 1, 4 if args.smoke else 2)]
    rates = {"memory": None, "caches": None}
    if not args.smoke:
        rates["memory"] = machine.peaks(device)["copy_bytes_per_s"]
        if device.type == "cpu":
            rates["caches"] = cached_bytes_per_s(device)
    expect = "elements = overhead × bandwidth / 12 bytes"
    if rates["memory"]:
        expect += ", by " + " and ".join(
            f"{kind} of {tables.cell(rate, 'copy_bytes_per_s')}"
            for kind, rate in rates.items()
            if rate
        )
    hidden = hidden_rows(
        sizes,
        swept(device, sizes, args.smoke),
        rates,
        queued=device.type != "cpu",
    )
    bench.report(
        args,
        hidden,
        {
            "name": "product of n elements",
            "overhead_s": "overhead",
            "by_memory": "n, by memory",
            "by_caches": "n, by caches",
            "measured": "n measured",
            "tenth": "10% left at",
        },
        title="how many elements hide the overhead",
        expect=expect,
    )
    print(*filter(None, map(reading, hidden)), sep="\n")
    return args.rows


if __name__ == "__main__":
    bench.run(main)
