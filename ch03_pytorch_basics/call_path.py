"""3.2.3  The call path · 運算元的呼叫過程

Question  Which stations does a call pass on its way to the kernel, what does
          each cost, and how large must a tensor be for that not to matter?
Expect    Python, autograd's key, the kernel's key, in this order; a few
          microseconds in all, as long as it takes to move overhead × bandwidth
          bytes, the caches' while they hold them: as many elements hide it,
          ten times as many make it small
Run       python -m ch03_pytorch_basics.call_path [--smoke] [--save]
"""

import contextlib
import textwrap

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
    """A memory moves so many elements while the host prepares one call."""
    return overhead_s * bytes_per_s / bytes_per_element


def crossing(sizes, seconds, factor):
    """Find where the time has grown to ``factor`` times the first.

    Args:
        sizes: ascending.
        seconds: at each size.
        factor: above 1.

    Returns:
        The last size of which all are below and the first from which all are
        above: neighbours, unless noise crosses the border more than once.
        None if the last is not above.
    """
    above = [s >= factor * seconds[0] for s in seconds]
    if not above[-1]:
        return None
    first = above.index(True)
    last = len(above) - above[::-1].index(False)
    return sizes[first - 1], sizes[last]


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
        Mismatch: a station more or less, or in another order.
    """
    rows = []
    for name, operator, call, tensors, modes in situations(device):
        predicted, recorded = walked(operator, call, tensors, modes)
        if recorded != predicted:
            raise bench.Mismatch(
                f"{name}: the tables say {predicted}, the call {recorded}"
            )
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
    """Time operators in turn, as many calls as fill ``SAMPLE_S``.

    Args:
        found: {name: (operator, arguments, context factory)}.
        device: where the work is done.
        smoke: the fewest rounds only.
        budget_s: seconds for all of it.

    Returns:
        Seconds per call, (rounds, rows).
    """
    functions, counts = [], []
    for operator, args, context in found.values():

        def calls(times, operator=operator, args=args, context=context):
            return repeat(operator, args, context(), times)

        runs = [
            timers.wall(lambda calls=calls: calls(20), 1, device)
            for _ in range(5)  # the first is cold, others may be disturbed
        ]
        counts.append(max(1, min(10_000, int(SAMPLE_S / min(runs) * 20))))
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
    """Turn samples into rows: each layer's time is its row minus the last.

    Args:
        found: names, in the order of the first columns.
        samples: seconds per call, (rounds, columns).
    """
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


def sized(device, sizes):
    """Return {(layer, size): as in ``layers``}: all layers, then the stacks.

    What is compared across sizes and tables must be timed in the same turns.
    """
    found = {(name, 1): row for name, row in layers(device).items()}
    for size in sizes:
        rows = layers(device, size)
        for name in STACKS.values():
            found.setdefault((name, size), rows[name])
    return found


def curves(found, samples, sizes):
    """Return {stack: seconds at each size}, of columns as ``sized`` has."""
    calls = dict(zip(found, quiet(samples).tolist(), strict=True))
    return {
        name: [calls[layer, size] for size in sizes]
        for name, layer in STACKS.items()
    }


def predicted(overhead_s, rates, cache_bytes):
    """Return (elements that hide it, whose bandwidth decides).

    Args:
        overhead_s: of a call.
        rates: {"caches": bytes/s or None, "memory": bytes/s or None}.
        cache_bytes: what the caches hold.
    """
    for kind, rate in rates.items():
        if rate:
            count = round(elements_that_hide(overhead_s, rate, MOVED))
            if kind == "memory" or MOVED * count <= cache_bytes:
                return count, kind
    return None, None


def hidden_rows(sizes, found, rates, cache_bytes, queued):
    """Predict from bandwidth, and read off the curve, what hides overhead.

    Args:
        sizes: elements.
        found: {stack: seconds at each size}.
        rates: as for ``predicted``.
        cache_bytes: likewise.
        queued: launches run ahead of the work, as on a GPU: the time begins
            to grow where the work is as long as the overhead; on a CPU it
            has doubled there.
    """
    rows = []
    for name, seconds in found.items():
        count, kind = predicted(seconds[0], rates, cache_bytes)
        row = {
            "name": name,
            "overhead_s": seconds[0],
            "predicted": count,
            "by": kind,
            "cached": count and MOVED * count <= cache_bytes,
            "measured": crossing(sizes, seconds, 2),
            "tenth": crossing(sizes, seconds, 10 if queued else 11),
        }
        if queued and row["measured"]:  # twice the overhead: half as many
            row["measured"] = [max(1, n // 2) for n in row["measured"]]
        rows.append(row | {"sizes": list(sizes), "seconds": seconds})
    return rows


def reading(row):
    """Say in words how one stack's measured size stands to the predicted.

    Returns:
        A sentence, or None where something was not measured.
    """
    count, found = row["predicted"], row["measured"]
    if not count or not found:
        return None
    low, high = found
    whose = {"caches": "the caches'", "memory": "memory's"}[row["by"]]
    said = f"{whose} bandwidth predicts ({count:,})"
    words = f"{row['name']}: between {low:,} and {high:,} elements hide it"
    words += " (noise leaves so much open)" * (high > 2 * low) + ", "
    if low <= count <= high:
        return f"{words}as {said}"
    if high < count:
        return f"{words}at most {high / count:.3g} times what {said}"
    cached = row["by"] == "memory" and row["cached"]
    words += f"at least {low / count:.3g} times what {said}"
    return words + ": a cache holds them" * cached


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
            height = 2 * micro[0]
            if row["predicted"]:
                count, low = row["predicted"], micro[0] / 1.5
                axes.plot([count] * 2, [low, height], f"C{i}:")
            if row["measured"]:
                axes.plot(row["measured"], [height] * 2, f"C{i}", linewidth=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(notebook.label("elements · 元素個數"))
        axes.set_ylabel(notebook.label("µs per call · 每次呼叫微秒"))
        axes.set_title(
            notebook.label(
                "elements that hide the overhead: predicted (dotted), "
                "measured (bar) · 虛線為預測，橫條為實測"
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
    most = 12 if args.smoke else 20 if device.type == "cpu" else 26
    sizes = [1 << n for n in range(0, most + 1, 4 if args.smoke else 1)]
    found = sized(device, sizes)
    samples = timed(found, device, args.smoke, budget_s=6.0)
    bench.report(
        args,
        layer_rows([name for name, n in found if n == 1], samples),
        {
            "name": "with this, too",
            "call_s": "one call",
            "iqr_s": "IQR",
            "added_s": "this adds",
        },
        title="a product of one element, layer upon layer",
    )
    rates, cache_bytes = {"caches": None, "memory": None}, 0
    if not args.smoke:
        peaks = machine.peaks(device)
        rates["memory"] = peaks["copy_bytes_per_s"]
        cache_bytes = peaks["cache_bytes"]
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
        curves(found, samples, sizes),
        rates,
        cache_bytes,
        queued=device.type != "cpu",
    )
    bench.report(
        args,
        hidden,
        {
            "name": "product of n elements",
            "overhead_s": "overhead",
            "predicted": "n predicted",
            "by": "by",
            "measured": "n measured in",
            "tenth": "10% left in",
        },
        title="how many elements hide the overhead",
        expect=expect,
    )
    for line in filter(None, map(reading, hidden)):
        print(textwrap.fill(line, tables.WIDTH, subsequent_indent="  "))
    return args.rows


if __name__ == "__main__":
    bench.run(main)
