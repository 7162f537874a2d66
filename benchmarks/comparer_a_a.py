"""Does the comparer claim what is not there, and find what is?

Question  How often does a comparison of one function with itself claim a
          difference, on a machine with busy neighbours, and how often does
          it find a slowdown of 10% without them?
Expect    at most 10 claims in 200, at least 90 finds in 100: the interval
          is a 99% one, and the bars leave room for a machine that lies
Run       python -m benchmarks.comparer_a_a [--smoke] [--save]
"""

import contextlib
import os
import statistics
import subprocess
import sys

import torch
from torch.utils import benchmark

from common import bench, judging, timers

SOURCES = (  # whose change makes a record old, as the script's own does
    "common/bench.py",
    "common/judging.py",
    "common/timers.py",
)
NEIGHBOUR = """
import os, random, time
parent, end = os.getppid(), time.monotonic() + 600
while os.getppid() == parent and time.monotonic() < end:
    stop = time.monotonic() + random.uniform(0.01, 0.2)
    while time.monotonic() < stop:
        sum(range(2000))
    time.sleep(random.uniform(0.01, 0.2))
"""


@contextlib.contextmanager
def noisy_neighbours(count):
    """Burn ``count`` cores in bursts of 10 to 200 ms, with pauses alike."""
    command = [sys.executable, "-c", NEIGHBOUR]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def repeated_add(times, device):
    """Return a callable of fresh tensors whose work is exactly ``times``."""
    x = torch.ones(16_384, device=device)
    y = torch.empty_like(x)

    def call():
        for _ in range(times):
            torch.add(x, 1, out=y)
        return y

    return call


def count_claims(comparisons, first, second, device, budget_s):
    """Compare two repeat counts again and again; return the rows."""
    rows = []
    for _ in range(comparisons):
        functions = [repeated_add(n, device) for n in (first, second)]
        samples = timers.take_turns(functions, device, budget_s=budget_s)
        rows.append(judging.judge(["first", "second"], samples)[1])
    return rows


def verdict(name, rows, most=None, least=None):
    """Count claims (finds of a slowdown, if ``least`` is asked for)."""
    claims = sum(row["differs"] for row in rows)
    if least is not None:
        claims = sum(row["differs"] and row["ratio"] < 1 for row in rows)
    return {
        "name": name,
        "comparisons": len(rows),
        "claims": claims,
        "bar": f"at most {most}" if least is None else f"at least {least}",
        "holds": claims <= most if least is None else claims >= least,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "rounds": statistics.median(row["rounds"] for row in rows),
        "noisy": sum(row["noisy"] for row in rows),
    }


def answers(entry):
    """Return (what, answer, bar, "" or why it is missed) of a record."""
    return [
        (
            row["name"],
            f"{row['claims']} claims in {row['comparisons']}",
            row["bar"],
            "" if row["holds"] else "missed",
        )
        for row in entry["rows"]
    ]


def medians(function, samples, device):
    """Time one function here and by torch.utils.benchmark, in turn.

    The samples are equally long: in a long one a neighbour always shows.
    """
    (calls,) = timers.calls_per_sample([function], device)
    timer = benchmark.Timer(
        "f()", globals={"f": function}, num_threads=torch.get_num_threads()
    )
    ours, peers = [], []
    for _ in range(samples):
        ours.append(timers.wall(function, calls, device))
        peers.append(timer.timeit(calls).median)
    ours_s, peer_s = statistics.median(ours), statistics.median(peers)
    return {
        "ours_s": ours_s,
        "torch_benchmark_s": peer_s,
        "ratio": ours_s / peer_s,
    }


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device, share = args.device, 20 if args.smoke else 1
    budget_s = 0.0 if args.smoke else 0.3
    cores = len(getattr(os, "sched_getaffinity", lambda _: [0])(0))
    same, found = 200 // share, 100 // share

    with noisy_neighbours(cores):
        alike = count_claims(same, 40, 40, device, budget_s)
    quiet = count_claims(same, 40, 40, device, budget_s)
    planted = count_claims(found, 40, 44, device, budget_s)
    rows = [
        verdict(f"itself, {cores} busy neighbours", alike, most=same // 20),
        verdict("itself, no neighbour", quiet, most=same // 20),
        verdict("10% more work, no neighbour", planted, least=found * 9 // 10),
    ]
    both = medians(repeated_add(40, device), 500 // share, device)
    key = {"sources": bench.digests(SOURCES)}
    bench.report(args, rows, extra={"medians": both, "key": key})
    print(
        f"median of one function: {both['ours_s']:.4g} s here, "
        f"{both['torch_benchmark_s']:.4g} s by torch.utils.benchmark "
        f"(ratio {both['ratio']:.3f})"
    )
    missed = [row["name"] for row in rows if not row["holds"]]
    if missed and not args.smoke:
        raise bench.Mismatch(f"bar missed: {'; '.join(missed)}")
    return rows


if __name__ == "__main__":
    bench.run(main)
