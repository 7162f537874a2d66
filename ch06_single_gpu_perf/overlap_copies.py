"""6.1.3  Overlap copy and compute · 資料傳輸與GPU 計算任務平行

Question  Copies and kernels run on different engines: what lets both work?
Expect    from copy + compute per batch down to max(copy, compute), plus the
          first copy or the last step, which have no partner; on a CPU the
          same core does both, and nothing is hidden
Run       python -m ch06_single_gpu_perf.overlap_copies [--smoke] [--save]
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch

from common import bench, tables, timers


def one_stream(batches, step, device):
    """A stream works in order: the copy engine rests during the kernels."""
    results = []
    for batch in batches:
        there = [tensor.to(device, non_blocking=True) for tensor in batch]
        results.append(step(*there))
    return results


def prefetched(batches, device):
    """The copy engine fetches the next batch while kernels work on this one.

    Batches are lists of tensors.  The side stream owns their memory and would
    reuse it as soon as the host lets go: ``record_stream`` says who reads it.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "Stream"):
        module = torch.cpu  # whose streams do nothing: one queue is in order
    side = module.Stream(device)
    batches, ahead = iter(batches), None
    while True:
        batch, ready = next(batches, None), ahead
        if ready:
            compute = module.current_stream(device)
            compute.wait_stream(side)  # for this batch, not for the next
            for tensor in ready if module is not torch.cpu else ():
                tensor.record_stream(compute)
        if batch:
            with module.stream(side):
                ahead = [t.to(device, non_blocking=True) for t in batch]
        if ready:
            yield ready
        if not batch:
            return


def double_buffered(batches, device):
    """The copy engine fills one of two buffers while kernels read the other.

    A batch is the caller's until it asks for the next: then it is overwritten.
    """
    module = torch.get_device_module(device)
    module = module if hasattr(module, "Stream") else torch.cpu
    side, compute = module.Stream(device), module.current_stream(device)
    slots, slot = ([], []), []
    try:
        for i, batch in enumerate(batches):
            compute.wait_stream(side)  # for batch i - 1, not for this one
            ready, slot = slot, slots[i % 2]
            kinds = [[(t.shape, t.dtype) for t in ts] for ts in (slot, batch)]
            if kinds[0] != kinds[1]:
                slot[:] = [torch.empty_like(t, device=device) for t in batch]
            side.wait_stream(compute)  # until it has read batch i - 2
            with module.stream(side):
                for there, here in zip(slot, batch, strict=True):
                    there.copy_(here, non_blocking=True)
            if ready:
                yield ready
    finally:  # also if the caller stops early: the buffers go with it
        compute.wait_stream(side)
    if slot:
        yield slot


def hidden_share(copies, kernels):
    """A copy costs no time while a kernel runs: the share that is so hidden.

    Both are lists of (start, end) by one clock; kernels may overlap.
    """
    busy = []
    for start, end in sorted(kernels):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    hidden = sum(
        max(0, min(end, stop) - max(start, begin))
        for start, end in copies
        for begin, stop in busy
    )
    total = sum(end - start for start, end in copies)
    return hidden / total if total else None


TECHNIQUES = (one_stream, prefetched, double_buffered, hidden_share)


def device_intervals(trace):
    """Return (copies to the device, kernels) of a Chrome trace, in µs."""
    found = {"gpu_memcpy": [], "kernel": []}
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in found:
            continue
        name = event["name"]
        if kind == "kernel" or "HtoD" in name or "HostToDevice" in name:
            start = float(event["ts"])
            found[kind].append((start, start + float(event["dur"])))
    return found["gpu_memcpy"], found["kernel"]


def profiled(function, device):
    """Return the intervals of one call, warmed up, from its trace."""
    function()
    timers.synchronize(device)
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities()
    ) as profile:
        function()
        timers.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return device_intervals(json.loads(path.read_text(encoding="utf-8")))


def sizes(args):
    """Return (batches, samples in each, width).

    A sample is 4 C bytes and asks for 4 C² FLOPs: at a width of 1024 the
    link and the kernels of most GPUs need about the same time.
    """
    if args.smoke:
        return 3, 64, 32
    if args.device.type == "cpu":
        return 4, 512, 256
    return 8, 8192, 1024


def make_batches(count, samples, width, pinned):
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        pair = [torch.randn(samples, n, generator=draw) for n in (width, 1)]
        batches.append([t.pin_memory() if pinned else t for t in pair])
    return batches


def make_model(width, device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 1),
    ).to(device)


def make_step(model):
    def step(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def apart(args, batches, step):
    """Measure copying alone and computing alone, in seconds per batch."""
    device = args.device
    places = [torch.empty_like(tensor, device=device) for tensor in batches[0]]
    resident = [[t.to(device) for t in batch] for batch in batches]

    def copy():
        for batch in batches:
            for there, here in zip(places, batch, strict=True):
                there.copy_(here, non_blocking=True)

    def compute():
        for batch in resident:
            step(*batch)

    samples = timers.take_turns(
        [copy, compute],
        device,
        rounds=3 if args.smoke else 20,
        budget_s=0.0 if args.smoke else 1.0,
    )
    return [statistics.median(s) / len(batches) for s in samples.T.tolist()]


def predict(copy_s, compute_s, count, device):
    """Return the seconds per batch that each row should take."""
    if device.type == "cpu":  # .to("cpu") has nothing to do, copy_ has
        alone = dict.fromkeys(("one stream", "side stream"), compute_s)
        return alone | {"double buffer": copy_s + compute_s}
    both = copy_s + compute_s
    if not hasattr(torch.get_device_module(device), "Stream"):
        two = both
    else:
        two = max(copy_s, compute_s) + min(copy_s, compute_s) / count
    return {"one stream": both, "side stream": two, "double buffer": two}


def in_words(copy_s, compute_s, predicted):
    """Say what is expected, in one line."""
    rows = ", ".join(f"{n} {tables.seconds(s)}" for n, s in predicted.items())
    return (
        f"copy {tables.seconds(copy_s)}, compute {tables.seconds(compute_s)} "
        f"per batch when alone; {rows}"
    )


def missed(rows):
    """Say which rows are slower than predicted by more than a twentieth."""
    for row in rows:
        if row["times"] > 1.05:
            yield (
                f"{row['name']}: {row['times'] - 1:.0%} above its prediction, "
                "which knows neither the Python between"
            )
            yield (
                "  batches nor what copies and compute take from each "
                "other's caches"
            )


def figure(rows):
    """Draw what was measured against what was predicted."""
    import matplotlib
    from matplotlib.figure import Figure

    from common import notebook

    rows = [row for row in rows if "predicted_s" in row]
    y = range(len(rows))
    with matplotlib.rc_context(notebook.fonts()):
        drawn = Figure(figsize=(7.5, 2.6), dpi=100, layout="constrained")
        axes = drawn.subplots()
        ms = [1e3 * row["measured_s"] for row in rows]
        axes.barh(y, ms, 0.7, label=notebook.label("measured · 實測"))
        ms = [1e3 * row["predicted_s"] for row in rows]
        words = notebook.label("predicted · 預測")
        axes.plot(ms, y, "k|", markersize=18, label=words)
        axes.set_yticks(y, [row["name"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms per batch")
        axes.spines[["top", "right"]].set_visible(False)
        # above: bars may be anywhere below
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
        axes.legend(frameon=False, ncols=2, **place)
        title = "A batch, copied and computed · 一批資料的複製與計算"
        drawn.suptitle(notebook.label(title), fontsize=12)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device, (count, samples, width) = args.device, sizes(args)
    model = make_model(width, device)
    step = make_step(model)
    batches = make_batches(count, samples, width, device.type == "cuda")

    def variant(losses):
        def call():
            model.zero_grad()
            found = torch.stack(losses())
            gradients = [p.grad for p in model.parameters()]
            return {"losses": found, "gradients": gradients}

        return lambda: call

    def fed(feed):
        return [step(*batch) for batch in feed(batches, device)]

    variants = {
        "one stream": variant(lambda: one_stream(batches, step, device)),
        "side stream": variant(lambda: fed(prefetched)),
        "double buffer": variant(lambda: fed(double_buffered)),
    }
    copy_s, compute_s = apart(args, batches, step)
    predicted = predict(copy_s, compute_s, count, device)
    rows = bench.compare(
        args,
        variants,
        per_call=count,
        unit="batch",
        flops=count * samples * (4 * width**2 + 6 * width),
        expect=in_words(copy_s, compute_s, predicted),
        extra={"copy_s": copy_s, "compute_s": compute_s},
    )
    held = bench.report(
        args,
        [
            {
                "name": row["name"],
                "predicted_s": predicted[row["name"]],
                "measured_s": row["median_s"],
                "times": row["median_s"] / predicted[row["name"]],
            }
            for row in rows
        ],
        {
            "name": "row",
            "predicted_s": "predicted per batch",
            "measured_s": "measured",
            "times": "measured / predicted",
        },
        title="From copy and compute, measured apart",
    )
    if not args.smoke:
        print(*missed(held), sep="\n")
    if device.type != "cuda":
        bench.left_out(
            args,
            "copies over a link, and the share of them behind kernels: only "
            "a GPU has a copy engine",
        )
        return rows + held
    hidden = []
    for name, factory in variants.items():
        copies, kernels = profiled(factory(), device)
        share = hidden_share(copies, kernels)
        hidden.append(
            {
                "name": name,
                "copies": len(copies),
                "copy_s": sum(end - start for start, end in copies) / 1e6,
                "hidden_percent": share and 100 * share,
            }
        )
    bench.report(
        args,
        hidden,
        {
            "name": "row",
            "copies": "copies",
            "copy_s": "copying",
            "hidden_percent": "% behind kernels",
        },
        title="From the profiler's trace of one call",
    )
    return rows + held + hidden


if __name__ == "__main__":
    bench.run(main)
