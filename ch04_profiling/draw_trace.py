"""4.3.3  Reading a trace · 視覺化性能圖譜

Question  What ran on which thread and stream, when, and what overlapped?
Expect    of n recorded steps, n ranges of each name on the thread that
          opened them, and the operators nested below; without a GPU no
          stream, with one a bar per kernel, later than the call behind it
Run       python -m ch04_profiling.draw_trace [TRACE] [--out OUT.png]
          [--from-ms A] [--to-ms B] [--rank N] [--smoke] [--save]

TRACE is a Chrome trace of torch.profiler (.json, .json.gz, a .tar.gz of
ranks or a folder).  It is drawn into OUT, by default <its name>.png here;
without --from-ms and --to-ms the middle marked step, if there are several.
Without TRACE a training step of this script's own is profiled; --out keeps
its picture and, beside it, the trace.
"""

import io
import math
import os
import tempfile
from pathlib import Path

import torch

from ch04_profiling import accounting, timeline, traces
from ch04_profiling.profile_ops import named_step
from common import bench, timers

KINDS = (".png", ".svg", ".pdf")
PERFETTO = """\
to look at it yourself: open https://ui.perfetto.dev, "Open trace file" (the
file stays in your browser; .json and .json.gz alike). W and S zoom, A and D
move, a click shows a bar's shapes and the arrow to what it launched."""


def exported(step, steps, path):
    """The profiler keeps every event until they are written, all at once.

    A first step warms the profiler itself up.  What a GPU did is fetched
    when the last one has ended: the profiler waits for it.
    """
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities(),
        schedule=torch.profiler.schedule(
            wait=0, warmup=1, active=steps, repeat=1
        ),
        on_trace_ready=lambda run: run.export_chrome_trace(path),
    ) as run:
        for _ in range(1 + steps):
            step()
            run.step()  # ends a mark "ProfilerStep#n", begins the next


TECHNIQUES = (exported,)
RANGES = ("forward", "backward", "update")


def record(device, steps, width, path):
    """Write the trace of a small training program, warmed up."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it narrates
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, width),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(width, width, device=device)
    named_step(model, optimizer, inputs)
    timers.synchronize(device)
    exported(lambda: named_step(model, optimizer, inputs), steps, str(path))


def lane_rows(trace, account, low, high):
    """Return what is drawn between two times, a row per stream or thread."""
    rows = []
    for lane in timeline.lanes(trace, account):
        chosen = (lane.end > low) & (lane.start < high)
        starts, ends = lane.start[chosen], lane.end[chosen]
        starts, ends = starts.clip(low, high), ends.clip(low, high)
        if len(starts):
            busy = accounting.merge(starts, ends)
            busy_ns = int((busy[1] - busy[0]).sum())
            rows.append(
                {
                    "name": lane.label,
                    "bars": len(starts),
                    "levels": int(lane.depth[chosen].max()) + 1,
                    "busy_s": busy_ns / 1e9,
                    "busy_percent": round(100 * busy_ns / (high - low), 1),
                }
            )
    return rows


def overlap_ns(account, low, high):
    """Return how long computing hides copies or communication, in ns."""
    starts, ends = timeline.overlaps(account)
    return int((ends.clip(low, high) - starts.clip(low, high)).sum())


def chosen_window(trace, account, from_ms, to_ms):
    """Return the times (ns) to draw: those asked for, or the middle step.

    Raises:
        bench.Refusal: nothing of the trace lies between them.
    """
    first, last = trace.window
    low, high = first, last
    if from_ms is None and to_ms is None and len(account.steps) > 1:
        _, low, high = account.steps[len(account.steps) // 2]
        # the work that was launched in it ends later, at most two steps
        started = trace.start[account.launch]
        mine = (started >= low) & (started < high) & (account.launch >= 0)
        ended = int(trace.end[account.gpu[mine]].max(initial=high))
        high = min(max(ended, high), 2 * high - low)
    if from_ms is not None:
        low = round(from_ms * 1e6) if math.isfinite(from_ms) else last
    if to_ms is not None:
        high = round(to_ms * 1e6) if math.isfinite(to_ms) else last
    low, high = max(low, first), min(high, last)
    if low >= high:
        raise bench.Refusal(
            f"--from-ms {from_ms} --to-ms {to_ms}: nothing to draw there; "
            f"this trace goes from 0 to {last / 1e6:.3f} ms"
        )
    return low, high


def rank_of(found, wanted):
    """Return the trace of one rank.

    Raises:
        bench.Refusal: there is none of that number.
    """
    if wanted is None:
        return found[0]
    for trace in found:
        if trace.rank == wanted:
            return trace
    known = ", ".join(str(t.rank) for t in found[:16])
    raise bench.Refusal(f"--rank {wanted}: only {known} is in these files")


def save(figure, path):
    """Write a figure whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:].lower())
    bench.write_atomic(path, drawn.getvalue())


def figure(path, from_ms=None, to_ms=None, rank=None):
    """Return a picture of a trace's file: a matplotlib Figure."""
    trace = rank_of(traces.read([path]), rank)
    account = accounting.account(trace)
    low, high = chosen_window(trace, account, from_ms, to_ms)
    return timeline.picture(trace, account, low, high, title(trace))


def title(trace):
    which = "" if trace.rank is None else f", rank {trace.rank}"
    return f"{os.path.basename(trace.label)}{which}"


def draw(args):
    """Draw the reader's trace, and say what is in the picture."""
    out = args.out or f"{_stem(args.trace)}.png"
    _refuse_unwritable(out)
    if args.save:
        raise bench.Refusal("--save keeps the lesson's rows: leave out TRACE")
    found = traces.read([args.trace])
    trace = rank_of(found, args.rank)
    account = accounting.account(trace)
    low, high = chosen_window(trace, account, args.from_ms, args.to_ms)
    rows = lane_rows(trace, account, low, high)
    print(bench.table(rows[:20], title=title(trace)))
    if len(rows) > 20:
        print(f"… and {len(rows) - 20} more")
    print(
        f"\n{low / 1e6:,.3f} to {high / 1e6:,.3f} ms of "
        f"{trace.window[1] / 1e6:,.3f} ms; computing overlaps copies or "
        f"communication for {overlap_ns(account, low, high) / 1e6:.3f} ms"
    )
    for name, start, end in account.steps[:8]:
        print(f"  {name}: --from-ms {start / 1e6:.3f} --to-ms {end / 1e6:.3f}")
    if len(found) > 1:
        print(f"{len(found)} ranks are in it: --rank N draws another")
    for warning in trace.warnings[:3]:
        print(f"note {warning['kind']}: {warning['text']}"[:300])
    save(timeline.picture(trace, account, low, high, title(trace)), out)
    print(f"drawn in {out}\n{PERFETTO}")
    return rows


def _stem(path):
    name = Path(path).resolve().name
    for suffix in sorted(traces.SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name.removesuffix(".tar") or "trace"


def _refuse_unwritable(out):
    if Path(out).suffix.lower() not in KINDS:
        raise bench.Refusal(f"--out {out}: end it in {', '.join(KINDS)}")
    if not Path(out).absolute().parent.is_dir():
        raise bench.Refusal(f"--out {out}: there is no such folder")


def lesson(args):
    """Profile this script's own step; count its ranges in the trace."""
    steps, width = (2, 32) if args.smoke else (4, 256)
    if args.out:
        _refuse_unwritable(args.out)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.json.gz"
        record(args.device, steps, width, path)
        (trace,) = traces.read([path])
        account = accounting.account(trace)
        if args.out:
            kept = Path(args.out).with_suffix(".json.gz")
            bench.write_atomic(kept, path.read_bytes())
    found = [trace.names[name] for name in trace.name]
    rows = [
        {"name": name, "bars": found.count(name), "predicted": steps}
        for name in RANGES
    ]
    bench.report(args, rows, title="Ranges of our own in the trace")
    low, high = chosen_window(trace, account, args.from_ms, args.to_ms)
    lanes = lane_rows(trace, account, low, high)
    bench.report(args, lanes, title="What is drawn: the middle step")
    if args.out:
        drawn = timeline.picture(trace, account, low, high, "training step")
        save(drawn, args.out)
        print(f"drawn in {args.out}; the trace is {kept}")
    print(PERFETTO)
    if args.device.type == "cpu":
        bench.left_out(args, "streams of a GPU: there is none here")
    return rows + lanes


def flags(parser):
    parser.add_argument("trace", nargs="?", metavar="TRACE")
    parser.add_argument("--out", metavar="OUT.png", help="the picture's file")
    parser.add_argument("--from-ms", type=float, metavar="A")
    parser.add_argument("--to-ms", type=float, metavar="B")
    parser.add_argument("--rank", type=int, metavar="N", help="of several")


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    return draw(args) if args.trace else lesson(args)


if __name__ == "__main__":
    bench.run(main)
