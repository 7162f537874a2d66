"""6.2.1  Batch size · 增大BatchSize

Question  What does a larger batch buy, what does it cost, and from which size
          on is nothing left to buy?
Expect    a batch pays its launches and the reading of the weights once and
          its FLOPs per sample: tokens/s grow with the batch until FLOPs / peak
          outweigh the rest; the memory of activations grows for ever
Run       python -m ch06_single_gpu_perf.batch_size [--smoke] [--save]
"""

import functools
import gc

import torch

from ch06_single_gpu_perf.fused_operators import Traffic, bound_s
from common import (
    bench,
    ceilings,
    gpt,
    machine,
    notebook,
    seeding,
    tables,
    timers,
)

NEAR = 0.9  # of the best rate counts as saturated
GRADIENTS = (1e-4, 1e-6)  # relative, absolute


def gradient_in_parts(model, ids, targets, batch):
    """Gradients add up: the parts of a batch leave the gradient of the whole.

    The losses are summed and divided by the targets of *all* parts: a mean
    of the parts' means is another number when parts count unequally many.

    Args:
        model: (ids, targets, scale) -> scale * sum of losses.
        ids: token ids, (N, T).
        targets: (N, T); -100 is not counted.
        batch: sequences that are processed at once.

    Returns:
        The mean loss, 0-dim; its gradient is added to ``.grad``.
    """
    scale = 1 / (targets != -100).sum().clamp(min=1)
    total = torch.zeros_like(scale)
    parts = zip(ids.split(batch), targets.split(batch), strict=True)
    for part, wanted in parts:
        loss = model(part, wanted, scale)
        loss.backward()
        total += loss.detach()
    return total


def operator_work(step):
    """PyTorch's dispatcher sees every operator: a launch, FLOPs and bytes.

    Bytes are those of its inputs and outputs; views move and launch nothing.
    Returns a list of (FLOPs, bytes), one per operator.
    """
    from torch.utils.flop_counter import flop_registry as known

    work = []

    class Listener(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            out = op(*args, **kwargs)
            flops = known.get(op.overloadpacket, lambda *_, **__: 0)
            touched = torch.utils._pytree.tree_leaves((args, kwargs, out))
            size = sum(getattr(leaf, "nbytes", 0) for leaf in touched)
            if not op.is_view and "_unsafe_view" not in str(op):
                work.append((flops(*args, **kwargs, out_val=out), size))
            return out

    with Listener():
        step()
    return work


def roofline(work, launch_s, peak, bandwidth, queued):
    """An operator lasts as long as its FLOPs or its bytes, and its launch.

    Args:
        work: (FLOPs, bytes) of every operator.
        launch_s: seconds that the host needs to issue one.
        peak: FLOP/s.
        bandwidth: bytes/s.
        queued: launches run ahead of the work (a GPU's), so that the longer
            of the two counts; a CPU does one after the other.

    Returns:
        Seconds: launches, bytes and FLOPs (of the operators bound by them),
        and the total.
    """
    times = {"launches": len(work) * launch_s, "bytes": 0.0, "FLOPs": 0.0}
    for flops, size in work:
        by_flops, by_bytes = flops / peak, size / bandwidth
        times["bytes" if by_bytes > by_flops else "FLOPs"] += max(
            by_flops, by_bytes
        )
    busy = times["bytes"] + times["FLOPs"]
    join = max if queued else lambda a, b: a + b
    return times | {"total": join(times["launches"], busy)}


def kept_bytes(forward, known=()):
    """Autograd keeps tensors for backward; several may share one storage.

    Args:
        forward: () -> loss.
        known: tensors that are there anyway: the parameters, the input.

    Returns:
        Bytes of all other storages that the graph holds.
    """
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = forward()  # holds the graph: no address is used twice
    for tensor in known:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values()) if loss.requires_grad else 0


# --- what is run -------------------------------------------------------------


def inputs(config, count, T, device):
    """Draw ids and targets of texts whose lengths differ, one of them empty.

    Returns:
        ids, targets; (count, T) each.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (count, T + 1)
    text = torch.randint(config.vocab_size, shape, generator=draw)
    ids, targets = text[:, :-1], text[:, 1:].clone()
    lengths = torch.arange(count) % (T + 1)
    targets[torch.arange(T) >= lengths[:, None]] = gpt.IGNORED
    return ids.to(device), targets.to(device)


def gradients(model):
    """Return the gradients of all parameters, in order."""
    return [parameter.grad for parameter in model.parameters()]


def model_of(config, device):
    """Make the same model each time."""
    seeding.seed_everything(0)
    return gpt.GPT(config).to(device)


def launch_seconds(config, device):
    """Time a step of the same network with nothing in it, per operator.

    One channel per head, one token: as many launches as the real one, and
    hardly any work.
    """
    tiny = config.but(n_embd=config.n_head, vocab_size=2)
    model = model_of(tiny, device)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)

    def step():
        gradient_in_parts(model, ids, ids, 1)

    step()  # gradients are added to from the second time on
    operators = len(operator_work(step))
    times = [timers.wall(step, 10, device) for _ in range(5)]
    return min(times) / operators


def bandwidth_at(size, device):
    """Copy arrays as large as the weights: caches may hold them, or not.

    Returns:
        bytes/s, read and written.
    """
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    times = [
        timers.wall(lambda: target.copy_(source), 10, device) for _ in range(5)
    ]
    return 2 * size / min(times)


def peak_bytes(step, model, device):
    """Return the most bytes alive during ``step``, the model's included.

    A GPU's allocator knows; on a CPU every storage is tracked.  None where
    neither is to be had.
    """
    if device.type in ("cuda", "xpu"):
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        return torch.accelerator.max_memory_allocated(device)
    if device.type != "cpu" or not torch.distributed.is_available():
        return None
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")
    return sum(kinds["Total"] for kinds in peak.values())


def memory(config, part, device):
    """Count what one batch needs: kept for backward, and at the peak.

    Args:
        config: the model's.
        part: ids and targets of the batch.
        device: where it is.

    Returns:
        kept_bytes, formula_bytes (the same by ``gpt.activation_bytes``),
        peak_bytes (weights, gradients, activations and temporaries).
    """
    model = model_of(config, device)
    batch, T = part[0].shape
    scale = torch.tensor(1.0, device=device)
    known = [*model.parameters(), *part, scale]
    return {
        "kept_bytes": kept_bytes(lambda: model(*part, scale), known),
        "formula_bytes": gpt.activation_bytes(config, batch, T)["total"],
        "peak_bytes": peak_bytes(
            lambda: gradient_in_parts(model, *part, batch), model, device
        ),
    }


def ceilings_here(config, args):
    """Measure what ``roofline`` asks for: one launch, FLOP/s and bytes/s."""
    if args.smoke:
        peak = ceilings.gemm_flops("float32", args.device, budget_s=0.05)
    else:
        peak = machine.peaks(args.device)["gemm_flops"]["float32"]
    weights = 4 * gpt.parameter_counts(config)["total"]
    return {
        "launch_s": launch_seconds(config, args.device),
        "peak": peak,
        "bandwidth": bandwidth_at(weights, args.device),
        "queued": args.device.type != "cpu",
    }


def plan(config, ids, targets, batch, here):
    """Count one row's work and predict it.

    Args:
        config: the model's.
        ids: all token ids, (N, T).
        targets: alike.
        batch: sequences processed at once.
        here: from ``ceilings_here``.

    Returns:
        The row before it is measured.
    """
    model = model_of(config, ids.device)
    work = operator_work(lambda: gradient_in_parts(model, ids, targets, batch))
    times = roofline(work, **here)
    total = times.pop("total")
    flops, size = map(sum, zip(*work, strict=True))
    return {
        "name": f"batch {batch}",
        "batch": batch,
        "operators": len(work),
        "operators_per_sequence": len(work) / len(ids),
        "flops_per_byte": flops / size,
        "times": times,
        "launches_share": times["launches"] / sum(times.values()),
        "set_by": max(times, key=times.get),
        "expected_per_s": round(ids.numel() / total),
    } | memory(config, (ids[-batch:], targets[-batch:]), ids.device)


def beyond(step, here, device, times=3):
    """Time a step's operators one by one; return what exceeds ``roofline``.

    Args:
        step: run as often; of each operator's times the shortest counts.
        here: from ``ceilings_here``.
        device: where the step computes.

    Returns:
        {operator: seconds above its launch and its FLOPs or bytes}, the
        largest first.
    """
    runs = []
    for _ in range(times):
        with Traffic(device) as traffic:
            step()
        runs.append(traffic.seconds)
    found = {}
    for operator, *took in zip(traffic.operators, *runs, strict=True):
        name = operator[0].removeprefix("aten::")
        least = bound_s([operator], here["peak"], here["bandwidth"])
        over = min(took) - least - here["launch_s"]
        found[name] = found.get(name, 0.0) + over
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def saturates(rates):
    """Return the smallest batch whose rate is near the best, or None.

    Args:
        rates: batch to tokens/s, ascending; None: the largest batch alone
            comes near, so the end was not seen.
    """
    best = max(rates.values())
    first = next(b for b, rate in rates.items() if rate >= NEAR * best)
    return None if first == list(rates)[-1] else first


def near(rates):
    """Say where a rate saturates."""
    at = saturates(rates)
    if at is None:
        return f"nowhere up to batch {max(rates)}"
    return f"at batch {at} ({rates[at] / max(rates.values()):.0%} of the best)"


def conclusion(rows):
    """Say in words where the rate saturates, and why: lines of text."""
    first, last = rows[0], rows[-1]
    found, expected = (
        {row["batch"]: row[key] for row in rows}
        for key in ("tokens_per_s", "expected_per_s")
    )
    yield f"saturates here {near(found)}; by the roofline {near(expected)}"
    yield (
        "launches, of the roofline's seconds: "
        f"{first['launches_share']:.0%} at {first['name']}, "
        f"{last['launches_share']:.0%} at {last['name']}"
    )
    yield (
        "measured, of the roofline's rate: "
        f"{first['tokens_per_s'] / first['expected_per_s']:.0%} at "
        f"{first['name']}, "
        f"{last['tokens_per_s'] / last['expected_per_s']:.0%} at "
        f"{last['name']}"
    )
    yield (
        f"from {first['name']} to {last['name']}: "
        f"{last['tokens_per_s'] / first['tokens_per_s']:.1f}× the rate, "
        f"{last['kept_bytes'] / first['kept_bytes']:.0f}× the activations"
    )
    for row in (first, last):
        most = [
            f"{name} {tables.seconds(over)}"
            for name, over in list(row["beyond_s"].items())[:3]
            if over > 0
        ]
        if most:
            yield (
                f"most above it at {row['name']}, timed apart: "
                + ", ".join(most)
            )


def figure(rows):
    """Draw tokens/s, measured and expected, and the bytes kept, by batch."""
    import matplotlib
    from matplotlib.figure import Figure

    batches = [row["batch"] for row in rows]
    with matplotlib.rc_context(notebook.fonts()):
        drawn = Figure(figsize=(7.5, 3.6), dpi=100, layout="constrained")
        left, right = drawn.subplots(1, 2)
        for axes, key, style, words in (
            (left, "tokens_per_s", "o-", "measured · 實測"),
            (left, "expected_per_s", "k--", "at most (roofline) · 上限"),
            (right, "peak_bytes", "s-", "peak · 峰值"),
            (right, "kept_bytes", "o-", "kept for backward · 為反向保留"),
        ):
            if all(row[key] for row in rows):
                unit = 2**20 if key.endswith("_bytes") else 1000
                y = [row[key] / unit for row in rows]
                axes.plot(batches, y, style, label=notebook.label(words))
        left.set_ylabel("thousand tokens/s")
        right.set_ylabel("MiB")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, batches)
            axes.set_xlabel(notebook.label("batch · 批次大小"))
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, loc="upper left")
        title = "Tokens/s and memory by batch · 批次大小與速度、記憶體"
        drawn.suptitle(notebook.label(title), fontsize=12)
    return drawn


TECHNIQUES = (gradient_in_parts, operator_work, roofline, kept_bytes)


def announce(args, plans, here):
    """Print, before anything is timed, what was counted and is expected."""
    columns = {
        "name": "row",
        "operators_per_sequence": "operators/sequence",
        "flops_per_byte": "FLOP/byte",
        "set_by": "mostly",
        "expected_per_s": "at most tokens/s",
        "kept_bytes": "kept",
        "formula_bytes": "by formula",
    }
    title = (
        f"roofline of {tables.seconds(here['launch_s'])} per launch, "
        f"{tables.cell(here['peak'], 'peak_flops')} and "
        f"{tables.cell(here['bandwidth'], 'copy_bytes_per_s')}"
    )
    bench.report(args, plans, columns, {"ceilings": here}, title)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    config, T, count = gpt.GPTConfig(2, 4, 128, 16, 512), 16, 64
    if args.device.type != "cpu":
        config, T, count = gpt.GPTConfig(4, 12, 768, 64, 8192), 64, 64
    if args.smoke:
        config, T, count = gpt.GPTConfig(1, 2, 16, 8, 64), 8, 4
    ids, targets = inputs(config, count, T, args.device)
    batches = [2**i for i in range(count.bit_length())]
    here = ceilings_here(config, args)
    plans = [plan(config, ids, targets, batch, here) for batch in batches]
    announce(args, plans, here)

    def variant(batch):
        model = model_of(config, args.device)

        def gradient():
            model.zero_grad()
            loss = gradient_in_parts(model, ids, targets, batch)
            return {"loss": loss, "gradients": gradients(model)}

        return gradient

    flops = gpt.flops_per_token(config, T)
    measured = bench.compare(
        args,
        {f"batch {b}": functools.partial(variant, b) for b in batches},
        per_call=ids.numel(),
        unit="token",
        gradients=GRADIENTS,
        flops=flops * ids.numel(),
        title=f"one gradient, of {count} sequences in parts",
    )
    rows = []
    for row, time in zip(plans, measured, strict=True):
        rate = 1 / time["median_s"]
        rows.append(
            row
            | {
                "median_s": time["median_s"],
                "tokens_per_s": round(rate),
                "sequences_per_s": round(rate / T),
                "mfu_percent": 100 * flops * rate / here["peak"],
                "beyond_s": {},
            }
        )
    for row in (rows[0], rows[-1]):
        gradient = variant(row["batch"])
        gradient()
        row["beyond_s"] = beyond(gradient, here, args.device)
    columns = {
        "name": "row",
        "sequences_per_s": "sequences/s",
        "tokens_per_s": "tokens/s",
        "expected_per_s": "at most",
        "mfu_percent": "% of ceiling",
        "kept_bytes": "kept",
        "peak_bytes": "peak",
    }
    title = "what a larger batch buys, and what it costs"
    rows = bench.report(args, rows, columns, title=title)
    if not args.smoke:
        print(*conclusion(rows), sep="\n")
    return rows


if __name__ == "__main__":
    bench.run(main)
