"""6.2.2  Fused operators · 使用融合運算元

Question  What does one operator save that does the work of several?
Expect    time follows the bytes: x + v a b moves 8 N numbers apart, 4 N in
          one operator: 2 times
Run       python -m ch06_single_gpu_perf.fused_operators [--smoke] [--save]
"""

import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from common import answers, bench, judging, machine, timers


def separate_multiply_add(x, a, b, value):
    """Write a b and v a b to memory, only to read them back once."""
    return x + value * (a * b)


def addcmul(x, a, b, value):
    """Keep the product in a register: three reads and one write."""
    return torch.addcmul(x, a, b, value=value)


def matmul_then_bias(x, weight, bias):
    """Write the product, then read and write it again to add the bias."""
    return x @ weight.T + bias


def matmul_then_bias_in_place(x, weight, bias):
    """Add the bias where the product lies: still two operators, one result."""
    y = x @ weight.T
    y += bias
    return y


def linear(x, weight, bias):
    """Let the matrix product (addmm) start from the bias instead of zero.

    A GPU adds it before it writes.  A CPU's addmm copies the bias into all
    rows of the result first and then reads them: as many bytes as apart.
    """
    return torch.nn.functional.linear(x, weight, bias)


def linear_then_batch_norm(x, weight, bias, mean, variance, gamma, beta, eps):
    """Read and write every output again to shift and scale it."""
    y = torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.batch_norm(
        y, mean, variance, gamma, beta, training=False, eps=eps
    )


def fold_batch_norm(weight, bias, mean, variance, gamma, beta, eps):
    """Scale the rows of a linear or convolution weight once, for inference.

    With fixed statistics a batch norm is y -> s y + t per channel, and so
    is the layer before it.  Returns (weight, bias); ``bias`` may be None.
    """
    scale = gamma * torch.rsqrt(variance + eps)  # (C,)
    rows = scale.view(-1, *[1] * (weight.dim() - 1))
    bias = -mean if bias is None else bias - mean
    return weight * rows, bias * scale + beta


def layer_norm_by_hand(x, gamma, beta, eps):
    """Pass over x (N, C) once per arithmetic sign: nine operators."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + eps) * gamma + beta


def layer_norm(x, gamma, beta, eps):
    """Read a row, finish it while the cache holds it, write it."""
    return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, eps)


def plain_attention(q, k, v):
    """Write the (T, T) scores of every head to memory at each operator.

    Causal; q, k, v and the result are (B, H, T, D).
    """
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / D**0.5  # (B, H, T, T)
    past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~past, float("-inf"))
    return scores.softmax(dim=-1) @ v


def fused_attention(q, k, v):
    """Mix tile by tile with a running softmax: no (T, T) in memory.

    Causal; q, k, v and the result are (B, H, T, D).  Backward computes the
    tiles again from q, k, v and one logarithm per row.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )


def softmax_log_gather(logits, targets):
    """Write the probabilities (N, V), then their logarithms (N, V)."""
    chances = logits.softmax(dim=-1)
    return -chances.log().gather(1, targets[:, None]).mean()


def log_softmax_gather(logits, targets):
    """Write the logarithms only; no probability underflows to 0 either."""
    logs = logits.log_softmax(dim=-1)
    return -logs.gather(1, targets[:, None]).mean()


def cross_entropy(logits, targets):
    """Know in backward that one gradient per row is not zero.

    gather's backward fills (N, V) with zeros and copies them to add to N
    of them; here they are filled in place.  Targets of -100 do not count.
    """
    return torch.nn.functional.cross_entropy(logits, targets)


# --- counting ---------------------------------------------------------------

# arguments that an operator is handed and does not read, or N of N x V only
UNREAD = {
    ("aten::gather", "self"),
    ("aten::nll_loss_forward", "self"),
    ("aten::nll_loss_backward", "self"),
    ("aten::new_zeros", "self"),
    ("aten::ones_like", "self"),
    ("aten::zeros_like", "self"),
}
# the gradients, which the schema calls written, are so by a grad_scale only
UNWRITTEN = {("aten::_fused_adamw_", "grads")}


class Traffic(TorchDispatchMode):
    """List the operators that move data: (name, bytes, FLOPs) of each.

    Bytes are those of the tensors that an operator reads and writes; what a
    kernel keeps for itself is not seen.  Views and empty tensors move none.
    ``within`` is what an operator does before its own work: a CPU's addmm
    copies the bias into the result.  ``largest`` is the largest tensor.
    With a device, ``seconds`` has the time of each, waited for.
    """

    def __init__(self, device=None):
        super().__init__()
        self.operators, self.within, self.seconds = [], [], []
        self.largest, self.device = 0, device

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.device:
            timers.synchronize(self.device)
        start = time.perf_counter()
        result = operator(*args, **kwargs)
        if self.device:
            timers.synchronize(self.device)
        seconds = time.perf_counter() - start
        name = operator._schema.name
        given, read, written = set(), {}, []
        for i, argument in enumerate(operator._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            key, alias = (name, argument.name), argument.alias_info
            for tensor in tensors(value):
                given.add(place(tensor))
                if key not in UNREAD and not argument.is_out:
                    seen = place(tensor), tensor.shape, tensor.stride()
                    read[seen] = tensor
                if alias and alias.is_write and key not in UNWRITTEN:
                    written.append(tensor)
        written += [t for t in tensors(result) if place(t) not in given]
        if written and "empty" not in name:
            sizes = list(map(touched_bytes, [*read.values(), *written]))
            self.largest = max(self.largest, *sizes)
            flops = operator_flops(operator, args, kwargs, result)
            moved = sum(sizes)
            if name == "aten::addmm" and result.device.type == "cpu":
                self.within.append((name, touched_bytes(result), 0))
                moved += touched_bytes(result)  # read what was copied
            self.operators.append((name, moved, flops))
            self.seconds.append(seconds)
        return result

    @property
    def work(self):
        return self.operators + self.within

    @property
    def bytes(self):
        return sum(moved for _, moved, _ in self.work)

    @property
    def flops(self):
        return sum(flops for _, _, flops in self.work)


def tensors(value):
    """Return the tensors in an operator's argument or result."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [t for t in values if isinstance(t, torch.Tensor)]


def place(tensor):
    """Name the storage of a tensor; views of one have the same name."""
    return tensor.untyped_storage()._cdata


def touched_bytes(tensor):
    """Count once what an expanded dimension repeats."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def operator_flops(operator, args, kwargs, result):
    """Return the FLOPs of matrix products, and of fused attention.

    torch's table does not have the CPU's fused attention, and counts the
    masked half, which causal kernels skip.
    """
    name = operator._schema.name
    if "scaled_dot_product" in name:
        backward = "backward" in name
        q, k = args[backward : backward + 2]
        scores = q.numel() // q.shape[-1] * k.shape[-2]
        products = 5 if backward else 2  # 2 D FLOPs per score, halved
        return products * scores * q.shape[-1]
    count = flop_registry.get(operator.overloadpacket)
    return count(*args, **kwargs, out_val=result) if count else 0


def counted(function, inputs, held=(), device=None):
    """Run forward and backward; return the answer and what was counted.

    Args:
        function: of the ``inputs``; its result is one tensor.
        inputs: gradients are asked of those that require one.
        held: tensors that live anyway, such as a layer's weights.
        device: to time each operator there, too.

    Returns:
        (answer, traffic of forward, of backward, bytes kept for backward).
    """
    ours = {place(t) for t in (*tensors(inputs), *held)}
    kept = {}

    def pack(tensor):
        if place(tensor) not in ours:
            kept[place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    forward, backward = Traffic(device), Traffic(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), forward:
        output = function(*inputs)
    start = starting_gradient(output)
    with backward:
        gradients = torch.autograd.grad(output, leaves(inputs), start)
    answer = {"output": output.detach(), "gradients": gradients}
    return answer, forward, backward, sum(kept.values())


def leaves(inputs):
    """Return the inputs that want a gradient."""
    return [t for t in tensors(inputs) if t.requires_grad]


def starting_gradient(output):
    """Return a gradient without any structure to exploit: cosines."""
    if not output.dim():
        return None
    count = torch.arange(output.numel(), device=output.device)
    return count.cos().view_as(output)


def copy_rate(count, device):
    """Return the bytes per second of a copy of ``count`` bytes.

    What fits into a cache is copied at the cache's rate, as it is used:
    at least that of the memory, whatever a busy neighbour does meanwhile.
    """
    memory = machine.peaks(device)["copy_bytes_per_s"]
    source = torch.ones(count // 4, device=device)
    target = torch.zeros_like(source)
    seconds = min(
        timers.wall(lambda: target.copy_(source), 1, device)
        for _ in range(100)
    )
    return max(8 * len(source) / seconds, memory or 0)


def bound_s(operators, flops_per_s=None, bytes_per_s=None):
    """Sum what each operator takes at least: its bytes, or its FLOPs.

    Without the rates, the bytes stand for the seconds.
    """
    if not bytes_per_s:
        return sum(moved for _, moved, _ in operators)
    return sum(
        max(flops / flops_per_s, moved / bytes_per_s)
        for _, moved, flops in operators
    )


# --- the pairs --------------------------------------------------------------


def pairs(device, smoke=False):
    """Return per computation: title, rows, inputs, and how it is timed.

    A row is (function, numbers that its forward moves, by hand);
    ``backward`` says whether backward is timed, ``held`` as for ``counted``.
    """
    torch.manual_seed(0)
    size = 0 if smoke else 1 if device.type == "cpu" else 2
    N = (1 << 10, 1 << 21, 1 << 25)[size]
    M, K, C = ((32, 8, 16), (1024, 320, 1280), (4096, 768, 3072))[size]
    R, W = ((32, 64), (1024, 768), (4096, 768))[size]
    B, H, T, D = ((1, 2, 16, 8), (1, 4, 512, 64), (4, 16, 2048, 64))[size]
    L, V = ((8, 500), (64, 50257), (1024, 50257))[size]

    def normal(*shape):
        return torch.randn(shape, device=device)

    def wanted(*shape):
        return normal(*shape).requires_grad_()

    # channels from lively to so still that a forgotten eps shows
    spread = torch.logspace(0, -2.5, C, device=device)
    norm = [
        normal(C, K) * spread[:, None] / K**0.5,
        normal(C) * spread,
        normal(C) * spread,
        1.5 * spread**2,
        normal(C),
        normal(C),
        1e-5,
    ]
    folded = fold_batch_norm(*norm)
    product = M * K + K * C + C + M * C
    copied = 2 * M * C if device.type == "cpu" else 0  # the bias, see linear
    scores, mixed = B * H * T * T, B * H * T * D
    return [
        {
            "title": f"x + v a b, {N:,} numbers each",
            "rows": {
                "mul, mul, add": (separate_multiply_add, 8 * N),
                "addcmul": (addcmul, 4 * N),
            },
            "inputs": [wanted(N), wanted(N), wanted(N), 0.1],
            "backward": False,
        },
        {
            "title": f"linear layer, ({M}, {K}) to ({M}, {C})",
            "rows": {
                "matmul, add": (matmul_then_bias, product + 2 * M * C),
                "matmul, add_": (
                    matmul_then_bias_in_place,
                    product + 2 * M * C,
                ),
                "linear": (linear, product + copied),
            },
            "inputs": [wanted(M, K), wanted(C, K), wanted(C)],
            "backward": False,
        },
        {
            "title": f"linear and batch norm, ({M}, {K}) to ({M}, {C})",
            "rows": {
                "linear, batch norm": (
                    lambda x: linear_then_batch_norm(x, *norm),
                    product + copied + 2 * M * C + 4 * C,
                ),
                "batch norm folded": (
                    lambda x: linear(x, *folded),
                    product + copied,
                ),
            },
            "inputs": [wanted(M, K)],
            "held": [*tensors(norm), *folded],
            "backward": False,
        },
        {
            "title": f"layer norm, ({R}, {W})",
            "rows": {
                "layer norm by hand": (
                    layer_norm_by_hand,
                    12 * R * W + 8 * R + 2 * W,
                ),
                "layer norm": (layer_norm, 2 * R * W + 2 * R + 2 * W),
            },
            "inputs": [wanted(R, W), wanted(W), wanted(W), 1e-5],
            "backward": True,
        },
        {
            "title": f"causal attention, {B, H, T, D}",
            "rows": {  # six passes over a mask of bytes
                "plain attention": (
                    plain_attention,
                    8 * scores + 4 * mixed + 6 * T * T / 4,
                ),
                "fused attention": (fused_attention, 4 * mixed + B * H * T),
            },
            "inputs": [wanted(B, H, T, D) for _ in range(3)],
            "backward": True,
        },
        {
            "title": f"cross entropy, {L, V}",
            "rows": {  # without the few numbers per row
                "softmax, log, gather": (softmax_log_gather, 4 * L * V),
                "log_softmax, gather": (log_softmax_gather, 2 * L * V),
                "cross_entropy": (cross_entropy, 2 * L * V),
            },
            "inputs": [wanted(L, V), torch.randint(V, (L,), device=device)],
            "backward": True,
        },
    ]


def count_rows(pair, flops_per_s=None):
    """Count each row of a pair, and predict its time against the first's.

    With the FLOP/s of matrix products, bytes count at the rate of a copy as
    large as the first row's largest tensor; without, they alone count.

    Raises:
        Mismatch: an answer, or a gradient, that is not the first row's.
    """
    rows = []
    for name, (function, by_hand) in pair["rows"].items():
        answer, forward, backward, kept = counted(
            function, pair["inputs"], pair.get("held", ())
        )
        found = dict(answers.parts(answer))
        timed = forward.work + pair["backward"] * backward.work
        if not rows:
            rates = ()
            if flops_per_s:
                device = pair["inputs"][0].device
                rates = flops_per_s, copy_rate(forward.largest, device)
            baseline, expected, first_s = name, found, bound_s(timed, *rates)
        error = answers.agree(name, found, baseline, expected, TOLERANCE)
        rows.append(
            {
                "name": name,
                "operators": len(forward.operators),
                "operators_backward": len(backward.operators),
                "by_hand_bytes": round(4 * by_hand),
                "forward_bytes": forward.bytes,
                "backward_bytes": backward.bytes,
                "kept_bytes": kept,
                "timed_bytes": sum(moved for _, moved, _ in timed),
                "timed_flops": sum(flops for _, _, flops in timed),
                "rates": rates,
                "predicted": first_s / bound_s(timed, *rates),
                "worst_error": error,
            }
        )
    return rows


def ceilings(counted_rows, pair, peaks):
    """Return what ``compare`` needs for per cent of the ceiling.

    The memory's rate is no ceiling for tensors that a cache holds.
    """
    work = {"flops": {row["name"]: row["timed_flops"] for row in counted_rows}}
    size = sum(map(touched_bytes, tensors(pair["inputs"])))
    if peaks and size > (peaks["cache_bytes"] or 0):
        work["bytes"] = {
            row["name"]: row["timed_bytes"] for row in counted_rows
        }
    return work


def call(function, inputs, backward):
    """Return the callable that is timed, and answers like ``counted``."""
    if not backward:

        def forward():
            with torch.no_grad():
                return {"output": function(*inputs)}

        return forward
    wanted, start = leaves(inputs), starting_gradient(function(*inputs))

    def both():
        output = function(*inputs)
        gradients = torch.autograd.grad(output, wanted, start)
        return {"output": output.detach(), "gradients": gradients}

    return both


def reading(predicted, row):
    """Say how a measured ratio stands to the predicted one.

    They agree where the interval comes within ``MARGIN`` of the predicted
    change, and the 2% by which two copies of one function differ.  One that
    is wide enough to agree with much else says nothing.
    """
    low, high = row["ratio_interval"]
    if row["differs"] is None or row["verdict"].startswith("unsteady"):
        return row["verdict"]
    change = min(predicted, abs(predicted - 1))
    allowed = judging.SMALLEST + MARGIN * change
    if low > predicted + allowed:
        return "more than predicted"
    if high < predicted - allowed:
        return "less than predicted"
    if high > WIDEST * low:
        return "too noisy to judge"
    return "about as predicted" if row["differs"] else row["verdict"]


def times_apart(function, pair, rates, runs=10):
    """Time operators one by one, beside what bytes and FLOPs ask for.

    Returns:
        {operator: (seconds, the shortest of some runs; ``bound_s``)}.
    """
    inputs, took = pair["inputs"], []
    for _ in range(runs):
        _, forward, backward, _ = counted(
            function, inputs, pair.get("held", ()), inputs[0].device
        )
        modes = [forward, backward] if pair["backward"] else [forward]
        took.append(sum((mode.seconds for mode in modes), []))
    names = [name for mode in modes for name, _, _ in mode.operators]
    found = {name: [0, 0] for name in names}
    for name, least in zip(names, map(min, *took), strict=True):
        found[name][0] += least
    for work in sum((mode.work for mode in modes), []):
        found[work[0]][1] += bound_s([work], *rates)
    return found


def because(row, pair, rates):
    """Say which operator makes a row of the summary miss its prediction.

    Of the side that is slower than predicted, the one that exceeds its
    bytes and FLOPs the most, and by more than on the other side.
    """
    if "than predicted" not in row["reading"]:
        return None
    sides = [row["name"], row["against"]]
    if row["reading"].startswith("more"):
        sides.reverse()
    at, other = (
        times_apart(pair["rows"][name][0], pair, rates) for name in sides
    )
    over = {}
    for name, (seconds, bound) in at.items():
        seconds_there, bound_there = other.get(name, (0, 0))
        over[name] = seconds - bound - (seconds_there - bound_there)
    operator = max(over, key=over.get)
    seconds, bound = at[operator]
    return (
        f"{row['name']}, {row['reading']}: "
        f"{operator.removeprefix('aten::')} in {sides[0]!r} takes "
        f"{seconds / bound:.1f} times what its bytes and FLOPs ask for"
    )


def figure(rows):
    """Draw predicted and measured ratios of the last table as bars."""
    import matplotlib
    from matplotlib.figure import Figure

    from common import notebook

    rows = [row for row in rows if "reading" in row]
    with matplotlib.rc_context(notebook.fonts()):
        size = (7.5, 1.5 + 0.45 * len(rows))
        drawn = Figure(figsize=size, dpi=100, layout="constrained")
        axes = drawn.subplots()
        for shift, key, words in (
            (-0.2, "predicted", "predicted · 預測"),
            (0.2, "measured", "measured · 實測"),
        ):
            y = [i + shift for i in range(len(rows))]
            ratios = [row[key] for row in rows]
            axes.barh(y, ratios, 0.4, label=notebook.label(words))
        axes.axvline(1, color="0.5", linewidth=1)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("times the speed of the separate operators")
        axes.spines[["top", "right"]].set_visible(False)
        # above: bars may be anywhere below
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
        axes.legend(frameon=False, ncols=2, **place)
        title = "Fused against separate · 融合與分開的運算元之比"
        drawn.suptitle(notebook.label(title), fontsize=12)
    return drawn


TOLERANCE = (1e-4, 1e-4)  # gradients are sums over all rows
MARGIN = 0.25  # of a predicted change
WIDEST = 1.25**2  # an interval's high over its low: 25% to both sides
COLUMNS = {
    "name": "row",
    "operators": "ops",
    "operators_backward": "ops back",
    "by_hand_bytes": "by hand",
    "forward_bytes": "forward",
    "backward_bytes": "backward",
    "kept_bytes": "kept",
    "predicted": "predicted",
}

TECHNIQUES = (
    separate_multiply_add,
    addcmul,
    matmul_then_bias,
    matmul_then_bias_in_place,
    linear,
    linear_then_batch_norm,
    fold_batch_norm,
    layer_norm_by_hand,
    layer_norm,
    plain_attention,
    fused_attention,
    softmax_log_gather,
    log_softmax_gather,
    cross_entropy,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    peaks = None if args.smoke else machine.peaks(args.device)
    groups = pairs(args.device, args.smoke)
    flops_per_s = peaks and peaks["gemm_flops"]["float32"]
    counts = [count_rows(pair, flops_per_s) for pair in groups]
    bench.report(
        args,
        sum(counts, []),
        COLUMNS,
        title="Operators, bytes moved, bytes kept for backward; times the "
        "first row's speed, as they predict",
    )
    summary, reasons = [], []
    for pair, counted_rows in zip(groups, counts, strict=True):
        part = "forward and backward" if pair["backward"] else "forward"
        measured = bench.compare(
            args,
            {
                name: lambda f=function, pair=pair: call(
                    f, pair["inputs"], pair["backward"]
                )
                for name, (function, _) in pair["rows"].items()
            },
            tolerance=TOLERANCE,
            budget_s=1.0,
            title=f"{pair['title']}: {part}",
            **ceilings(counted_rows, pair, peaks),
        )
        for row, count in zip(measured[1:], counted_rows[1:], strict=True):
            summary.append(
                {
                    "name": row["name"],
                    "against": measured[0]["name"],
                    "predicted": count["predicted"],
                    "measured": row["ratio"],
                    "interval": row["ratio_interval"],
                    "reading": reading(count["predicted"], row),
                }
            )
            reasons.append(because(summary[-1], pair, count["rates"]))
    bench.report(
        args,
        summary,
        [key for key in summary[0] if key != "against"],
        title="Predicted from bytes and FLOPs, and measured",
    )
    print(*filter(None, reasons), sep="\n")
    print("not predicted: allocating, exp and other arithmetic of elements")
    return args.rows


if __name__ == "__main__":
    bench.run(main)
