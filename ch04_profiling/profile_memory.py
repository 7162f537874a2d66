"""4.3.2  Memory profiling · 顯示記憶體分析

Question  Which operator allocates, who frees, and when is the peak?
Expect    x (B, C) → h (B, H) → relu → y (B, C), 4 bytes each: with h still
          named 2 BH + BC at the peak; h let go max(2 BH, BH + BC); relu in
          place BH + BC; with gradients 3 BH + 2 BC + HC, in the middle of
          backward. To the byte
Run       python -m ch04_profiling.profile_memory [--smoke] [--save]
          [--snapshot OUT.pickle]
"""

import os
import tempfile
from pathlib import Path

import torch

from common import bench, timers


def named(x, w1, w2):
    """Python keeps a tensor's memory for as long as it has a name."""
    h = x @ w1  # (B, H)
    a = h.relu()
    return a @ w2  # (B, C)


def let_go(x, w1, w2):
    """The allocator gets memory back when its last name is gone."""
    h = x @ w1
    a = h.relu()
    del h
    return a @ w2


def in_place(x, w1, w2):
    """An operator that writes into its input allocates nothing."""
    h = x @ w1
    h.relu_()
    return h @ w2


def with_gradients(x, w1, w2):
    """Autograd keeps what backward needs, and adds gradients to it."""
    w1, w2 = w1.detach().requires_grad_(), w2.detach().requires_grad_()

    def forward():  # h has no name any more when backward begins
        h = x @ w1
        return h.relu() @ w2

    y = forward()
    y.backward(torch.ones_like(y))
    return w1.grad, w2.grad


def memory_trace(call, path):
    """The profiler writes down every allocation and release of a call."""
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities(), profile_memory=True
    ) as profile:
        call()
    profile.export_chrome_trace(path)


def changes(path, device_type):
    """Read the changes of memory: (ms, bytes, operator around it or None).

    ``device_type`` is 0 for the CPU and 1 for CUDA, as the file has it.
    """
    import json

    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    found = []
    for event in events:
        arguments = event.get("args", {})
        if event["name"] != "[memory]":
            continue
        if arguments["Device Type"] != device_type:
            continue
        at, around = event["ts"], []
        for op in operators:  # the innermost began last
            if op["tid"] == event["tid"] and op["ts"] <= at:
                if at <= op["ts"] + op["dur"]:
                    around.append((op["ts"], op["name"]))
        name = max(around)[1] if around else None
        found.append((at / 1e3, arguments["Bytes"], name))
    return sorted(found, key=lambda change: change[0])


def over_time(changed):
    """The allocator's sum of changes is what is in use; its highest counts.

    Returns [(ms since the first change, bytes in use after it)].
    """
    used, found = 0, []
    for ms, size, _ in changed:
        used += size
        found.append((ms - changed[0][0], used))
    return found


def by_operator(changed):
    """What operators allocate and free adds up to no peak: it is a flow.

    Returns {operator or None: [bytes allocated, bytes freed, allocations]}.
    """
    found = {}
    for _, size, name in changed:
        row = found.setdefault(name, [0, 0, 0])
        row[0] += max(size, 0)
        row[1] += max(-size, 0)
        row[2] += size > 0
    return found


PROGRAMS = {
    "h named": named,
    "h let go": let_go,
    "relu in place": in_place,
    "with gradients": with_gradients,
}
TECHNIQUES = (*PROGRAMS.values(), memory_trace, changes, over_time)
TECHNIQUES += (by_operator,)
NEEDS_CUDA = "only CUDA's allocator keeps a history; use --device cuda"


def sizes(args):
    """Return (B, C, H): on a GPU pieces of whole 2 MiB, as it hands out."""
    if args.smoke:
        return 64, 32, 64
    return (512, 256, 512) if args.device.type == "cpu" else (8192, 1024, 2048)


def predicted(samples, width, hidden):
    """Return {program: bytes at its peak}."""
    small, large = 4 * samples * width, 4 * samples * hidden
    return {
        "h named": 2 * large + small,
        "h let go": max(2 * large, large + small),
        "relu in place": large + small,
        "with gradients": 3 * large + 2 * small + 4 * width * hidden,
    }


def make_inputs(device, samples, width, hidden):
    draw = torch.Generator().manual_seed(0)
    shapes = (samples, width), (width, hidden), (hidden, width)
    return [torch.randn(s, generator=draw).to(device) for s in shapes]


def measured(program, inputs, device):
    """Return the changes of memory of one call, warmed up."""
    program(*inputs)  # a GPU's libraries keep a workspace from here on
    timers.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "memory.json")
        memory_trace(lambda: program(*inputs), path)
        return changes(path, 0 if device.type == "cpu" else 1)


def figure(rows):
    """Draw the bytes in use over the changes, a line per program.

    Not over time: the releases at the end would hide what comes before.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.5, 3.4), dpi=100, layout="constrained")
    axes = drawn.subplots()
    rows = [row for row in rows if row.get("in_use_bytes")]
    for at, row in enumerate(rows):
        used = [0, *(size / 2**20 for size in row["in_use_bytes"])]
        axes.step(
            range(len(used)),
            used,
            where="post",
            label=row["name"],
            linewidth=1.5 + 1.5 * at,  # they begin alike: each around the last
            zorder=10 - at,
            antialiased=False,  # or two colours would mix to a third one
        )
    axes.set(xlabel="allocations and releases", ylabel="MiB in use")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return drawn


def snapshot(args, call):
    """Keep CUDA's own history of one call: every block, with its stack."""
    if args.device.type != "cuda":
        raise bench.Refusal(f"--snapshot {args.snapshot}: {NEEDS_CUDA}")
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        call()
        torch.cuda.memory._dump_snapshot(args.snapshot)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    print(f"{args.snapshot}: drop it on https://pytorch.org/memory_viz")


def flags(parser):
    parser.add_argument(
        "--snapshot", metavar="OUT.pickle", help="keep CUDA's own history"
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    device, (samples, width, hidden) = args.device, sizes(args)
    if device.type not in ("cpu", "cuda"):
        raise bench.Refusal(
            f"--device {device}: torch.profiler records the memory of the "
            "CPU and of CUDA; use one of these"
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it narrates
    inputs = make_inputs(device, samples, width, hidden)
    if args.snapshot:
        snapshot(args, lambda: with_gradients(*inputs))
        return []
    expected, rows = predicted(samples, width, hidden), []
    for name, program in PROGRAMS.items():
        changed = measured(program, inputs, device)
        used = [size for _, size in over_time(changed)]
        rows.append(
            {
                "name": name,
                "predicted_bytes": expected[name],
                "peak_bytes": max(used),
                "bytes_apart": max(used) - expected[name],
                "allocations": sum(size > 0 for _, size, _ in changed),
                "allocated_bytes": sum(max(s, 0) for _, s, _ in changed),
                "in_use_bytes": used,
            }
        )
    shown = [key for key in rows[0] if key != "in_use_bytes"]
    bench.report(
        args,
        rows,
        {key: key.replace("_", " ") for key in shown},
        title="Peak of a program, beyond its inputs",
    )
    flows = [
        {
            "name": name or "outside operators",
            "allocations": count,
            "allocated_bytes": taken,
            "freed_bytes": freed,
        }
        for name, (taken, freed, count) in by_operator(changed).items()
    ]
    bench.report(args, flows, title="With gradients, by operator")
    if device.type == "cpu":
        bench.left_out(
            args,
            "the caching allocator's history (--snapshot), and its blocks of "
            "512 bytes and more: that is CUDA's",
        )
    return rows + flows


if __name__ == "__main__":
    bench.run(main)
