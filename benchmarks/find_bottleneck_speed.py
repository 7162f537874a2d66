"""Is a large trace read fast enough, in little memory?

Question  How long does the finder of bottlenecks take for 54 MB of JSON,
          how much memory, and how long does HolisticTraceAnalysis take for
          the same file?
Expect    at most 10 s and 2 GB, and no longer than the peer; each in a
          process of its own, in turn, the median of five
Run       python -m benchmarks.find_bottleneck_speed [--trace FILE]
          [--smoke] [--save]
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import bench

MEGABYTES, SMOKE_MEGABYTES = 54, 2
MOST_S, MOST_BYTES = 10.0, 2e9
ROUNDS, SMOKE_ROUNDS = 5, 1
SOURCES = tuple(  # whose change makes a record old, as the script's own does
    f"ch04_profiling/{name}.py"
    for name in (
        "accounting",
        "event_names",
        "find_bottleneck",
        "traces",
        "verdicts",
    )
)

MEASURE = """
import json, sys, threading, time
import psutil
{imports}
me, peak, ended = psutil.Process(), 0, False
def watch():
    global peak
    while not ended:
        peak = max(peak, me.memory_info().rss)
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
try:
    {call}
finally:
    seconds, ended = time.perf_counter() - start, True
    thread.join()
peak = max(peak, me.memory_info().rss)
print(json.dumps([seconds, peak, answer]))
"""
OURS = MEASURE.format(
    imports="from ch04_profiling import find_bottleneck",
    call="span = find_bottleneck.read(sys.argv[1])['ranks'][0]['gpu_span']; "
    "answer = [span['idle_us'], span['compute_us'], span['other_us']]",
)
PEER = MEASURE.format(
    imports="import logging, os, warnings\n"
    "warnings.simplefilter('ignore'); logging.disable(logging.CRITICAL)\n"
    "from hta.trace_analysis import TraceAnalysis",
    call="row = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="
    "os.path.dirname(sys.argv[1]), include_last_profiler_step=True)"
    ".get_temporal_breakdown(visualize=False).iloc[0]; "
    "answer = [float(row[n]) for n in ('idle_time(us)', "
    "'compute_time(us)', 'non_compute_time(us)')]",
)


def write_trace(path, megabytes):
    """Write training steps of 500 operators each until the file is full."""
    kernels = (
        "ampere_sgemm_128x64_tn",
        "void at::native::vectorized_elementwise_kernel<4, "
        "at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >"
        "(int, at::native::CUDAFunctor_add<float>)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)",
    )
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 0}}
    at, number, written, step = 1_700_000_000_000_000, 0, 0, 0
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        while written < megabytes * 1e6:
            begin, events = at, []
            for k in range(500):
                number += 1
                stream = 20 if k % 50 == 49 else 7
                name = kernels[2 if stream == 20 else k % 2]
                link = {"External id": number, "correlation": number}
                events += [
                    _event(
                        "cpu_op",
                        "aten::mm",
                        9,
                        9,
                        at,
                        40,
                        {
                            "External id": number,
                            "Ev Idx": number,
                            "Input Dims": [[64, 768], [768, 768]],
                            "Input type": ["float", "float"],
                        },
                    ),
                    _event(
                        "cuda_runtime",
                        "cudaLaunchKernel",
                        9,
                        9,
                        at + 20,
                        8,
                        {"cbid": 211, **link},
                    ),
                    _event(
                        "kernel",
                        name,
                        0,
                        stream,
                        at + 35,
                        22 + k % 30,
                        {
                            "device": 0,
                            "context": 1,
                            "stream": stream,
                            "grid": [64, 1, 1],
                            "block": [128, 1, 1],
                            "registers per thread": 90,
                            "est. achieved occupancy %": 40,
                            **link,
                        },
                    ),
                    _flow("s", number, 9, 9, at + 20),
                    _flow("f", number, 0, stream, at + 35),
                ]
                at += 45
            mark = f"ProfilerStep#{step}"
            events.append(
                _event("user_annotation", mark, 9, 9, begin, at - begin, {})
            )
            text = ",\n".join(json.dumps(event, indent=1) for event in events)
            text = ("" if step == 0 else ",\n") + text
            file.write(text)
            written += len(text)
            at += 100
            step += 1
        file.write("\n]}\n")
    return 5 * number + step


def _event(category, name, process, thread, start, length, arguments):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": arguments,
    }


def _flow(phase, number, process, thread, at):
    return {
        "ph": phase,
        "id": number,
        "pid": process,
        "tid": thread,
        "ts": at,
        "cat": "ac2g",
        "name": "ac2g",
        "bp": "e",
    }


def measure(program, path):
    """Run a reader in a fresh process; return s, peak bytes, its answer."""
    root = str(Path(__file__).resolve().parent.parent)
    others = os.environ.get("PYTHONPATH")
    places = os.pathsep.join([root, *([others] if others else [])])
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": places},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise bench.Refusal(f"a reader failed on {path}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _flags(parser):
    parser.add_argument("--trace", help="read this file instead")


def main(argv=None):
    args = bench.cli(__doc__, argv, add=_flags)
    readers = {"find_bottleneck": OURS}
    if importlib.util.find_spec("hta") is None:
        print("HolisticTraceAnalysis is not installed: no comparison")
    else:
        readers["HolisticTraceAnalysis"] = PEER
    with tempfile.TemporaryDirectory() as folder:
        path, events = Path(folder) / "trace.json", None
        if args.trace:
            path = Path(args.trace).resolve()
            if not path.is_file():
                raise bench.Refusal(f"--trace {args.trace}: no such file")
        else:
            size = SMOKE_MEGABYTES if args.smoke else MEGABYTES
            events = write_trace(path, size)
        taken = {name: [] for name in readers}
        for _ in range(SMOKE_ROUNDS if args.smoke else ROUNDS):
            for name, program in readers.items():
                taken[name].append(measure(program, path))
        size = path.stat().st_size
    rows = [
        {
            "name": name,
            "median_s": statistics.median(s for s, _, _ in runs),
            "worst_s": max(s for s, _, _ in runs),
            "peak_bytes": max(peak for _, peak, _ in runs),
            "idle_us": runs[0][2][0],
            "compute_us": runs[0][2][1],
            "other_us": runs[0][2][2],
        }
        for name, runs in taken.items()
    ]
    key = {"sources": bench.digests(SOURCES)}
    extra = {"file_bytes": size, "events": events, "key": key}
    bench.report(args, rows, extra=extra)
    _judge(args, rows)
    return rows


def _judge(args, rows):
    """Hold the rows against the bars; the answers must agree as well."""
    ours, *peers = rows
    for peer in peers:
        span = sum(ours[k] for k in ("idle_us", "compute_us", "other_us"))
        for key in ("idle_us", "compute_us", "other_us"):
            if abs(ours[key] - peer[key]) > 0.01 * span:
                raise bench.Mismatch(
                    f"{key}: {ours[key]:.0f} here, {peer[key]:.0f} by "
                    f"{peer['name']}"
                )
    if args.smoke:
        return
    missed = [f"{w}: {a}" for w, a, _, why in answers({"rows": rows}) if why]
    if missed:
        raise bench.Mismatch(f"bar missed: {'; '.join(missed)}")


def answers(entry):
    """Return (what, answer, bar, "" or why it is missed) of a record."""
    ours, *peers = entry["rows"]
    seconds, peak = ours["median_s"], ours["peak_bytes"]
    lines = [
        ("time", f"{seconds:.3g} s", f"≤ {MOST_S:g} s", seconds > MOST_S),
        (
            "memory",
            f"{peak / 1e9:.3g} GB",
            f"≤ {MOST_BYTES / 1e9:g} GB",
            peak > MOST_BYTES,
        ),
    ]
    for peer in peers:
        ratio = peer["median_s"] / seconds
        words = f"{ratio:.1f}× {peer['name']}"
        lines.append(("speed", words, "≥ 1×", ratio < 1))
    return [(*line, "missed" * over) for *line, over in lines]


if __name__ == "__main__":
    bench.run(main)
