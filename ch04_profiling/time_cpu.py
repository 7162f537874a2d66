"""4.2.1  Timing CPU code · 計量CPU 程式的執行時間

Question  Which clock answers "how long", which "how much work", and how short
          a call can a clock time?
Expect    a sleep costs wall time and no CPU time; n busy threads cost n times
          as much CPU time as wall time; one call between two readings also
          holds a reading, n calls hold an n-th of it each
Run       python -m ch04_profiling.time_cpu [--smoke] [--save]
"""

import statistics
import threading
import time

import torch

from common import bench, machine, tables


def smallest_step(clock, steps):
    """A clock counts ticks of hardware: its readings differ by whole steps.

    Returned is the smallest difference seen, in the clock's unit.
    """
    smallest = None
    for _ in range(steps):
        before = clock()
        while (after := clock()) == before:
            pass
        if smallest is None or after - before < smallest:
            smallest = after - before
    return smallest


def reading_cost(clock, wall, readings):
    """A reading costs time too: some read a register, some ask the kernel."""
    start = wall()
    for _ in range(readings):
        clock()
    read = wall()
    for _ in range(readings):
        pass
    return max(0.0, (2 * read - start - wall()) / readings)


def three_clocks(work, wall, process, thread):
    """Wall time runs for all, CPU time only while a core works for us.

    The process's adds up all its threads; the thread's is the caller's own.
    Returned are the seconds that each saw, as (wall, process, thread).
    """
    before = thread(), process(), wall()  # wall innermost: nothing else in it
    work()
    after = wall(), process(), thread()
    return tuple(b - a for a, b in zip(before[::-1], after, strict=True))


def between_readings(work, calls, wall):
    """A pair of readings is shared by the calls between: 1/calls in each."""
    start = wall()
    for _ in range(calls):
        work()
    return (wall() - start) / calls


def enough_calls(work, wall, step, share):
    """Double the calls until a step of the clock is a small share of them."""
    calls = 1
    while True:
        start = wall()
        for _ in range(calls):
            work()
        if wall() - start >= step / share:
            return calls
        calls *= 2


TECHNIQUES = (
    smallest_step,
    reading_cost,
    three_clocks,
    between_readings,
    enough_calls,
)

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


def clocks(args):
    """Return rows: what each clock of Python promises, and what it does."""
    readings = 200 if args.smoke else 20_000
    rows = []
    for name in CLOCKS:
        clock, promised = getattr(time, name), time.get_clock_info(name)
        # a coarse CPU clock (Windows: 16 ms) would take seconds to show more
        steps = 2 if promised.resolution > 1e-3 or args.smoke else 1000
        rows.append(
            {
                "name": f"time.{name}()",
                "counts": "CPU time" if "_time" in name else "wall time",
                "promised_s": promised.resolution,
                "step_s": smallest_step(clock, steps),
                "cost_s": reading_cost(clock, time.perf_counter, readings),
                "set_back": promised.adjustable,
            }
        )
    return rows


def spin(seconds, clock=time.thread_time):
    """Keep a core busy for so much CPU time of this thread."""
    end = clock() + seconds
    while clock() < end:
        pass


def in_threads(work, count):
    """Return a call of ``work`` in so many Python threads at once."""

    def call():
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return call


def matmul(width, threads):
    """Return a product on so many of torch's threads."""
    x = torch.ones(width, width)

    def call():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.mm(x, x)
        finally:
            torch.set_num_threads(before)

    call()  # starts the threads
    return call


def known_work(args):
    """Return rows: what three clocks say of work that we know."""
    known_s = 0.005 if args.smoke else 0.1
    cores, width = machine.cores(), 64 if args.smoke else 1024

    def pair(work):
        return in_threads(lambda: work(known_s), 2)

    works = {
        "sleep": (lambda: time.sleep(known_s), known_s, 0.0, 0.0),
        "spin": (lambda: spin(known_s), known_s, known_s, known_s),
        # Python runs one thread at a time, unless it was built without the GIL
        "spin in 2 threads": (pair(spin), None, 2 * known_s, 0.0),
        "sleep in 2 threads": (pair(time.sleep), known_s, 0.0, 0.0),
    }
    for n in sorted({1, cores}):
        works[f"product, torch threads: {n}"] = matmul(width, n), *[None] * 3
    rows = []
    for name, (work, *truth) in works.items():
        seen = three_clocks(
            work, time.perf_counter, time.process_time, time.thread_time
        )
        row = {"name": name}
        for kind, known, found in zip(
            ("wall", "process", "thread"), truth, seen, strict=True
        ):
            row |= {f"{kind}_s": found, f"known_{kind}_s": known}
        row["busy"] = row["process_s"] / row["wall_s"]
        rows.append(row)
    return rows


def short_call(args, cost_s):
    """Return rows: one short operator, timed with more and more calls."""
    x = torch.ones(16)
    y = torch.empty_like(x)

    def work():
        torch.add(x, 1, out=y)

    samples = 3 if args.smoke else 300
    counts = [1, 10, 100] if args.smoke else [1, 10, 100, 1000]
    between_readings(work, counts[-1], time.perf_counter)  # warm
    rows = []
    for calls in counts:
        found = sorted(
            between_readings(work, calls, time.perf_counter)
            for _ in range(max(3, samples // calls))
        )
        rows.append(
            {
                "calls": calls,
                "call_s": statistics.median(found),
                "best_s": found[0],
                "worst_s": found[-1],
                "reading_percent": 100 * cost_s / calls / found[0],
            }
        )
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv)
    first = bench.report(
        args,
        clocks(args),
        {
            "name": "clock",
            "counts": "counts",
            "promised_s": "promised step",
            "step_s": "step seen",
            "cost_s": "a reading costs",
            "set_back": "can be set back",
        },
        title="The clocks of Python on this machine",
    )
    second = bench.report(
        args,
        known_work(args),
        {
            "name": "work",
            "known_wall_s": "wall known",
            "wall_s": "wall",
            "known_process_s": "CPU known",
            "process_s": "CPU, process",
            "thread_s": "CPU, caller",
            "busy": "cores busy",
        },
        title="Known work by three clocks",
        expect="cores busy = CPU time of the process / wall time",
    )
    cost_s = next(r["cost_s"] for r in first if "perf_counter" in r["name"])
    third = bench.report(
        args,
        short_call(args, cost_s),
        {
            "calls": "calls between readings",
            "call_s": "median per call",
            "best_s": "shortest",
            "worst_s": "longest",
            "reading_percent": "% of a reading",
        },
        title="One short operator",
        expect=f"a reading ({tables.seconds(cost_s)}) shared by all calls",
    )
    x = torch.ones(16)
    x + 1  # not the first call
    step_s = next(r["step_s"] for r in first if "perf_counter" in r["name"])
    calls = enough_calls(lambda: x + 1, time.perf_counter, step_s, 0.001)
    print(f"for a step of the clock below 0.1% of a sample: {calls} calls")
    return first + second + third


if __name__ == "__main__":
    bench.run(main)
