"""4.1.1  Quieten the machine · 減少無關程式的干擾

Question  Who else uses this machine, how unsteady is a fixed piece of work
          on it, and does a comparison still tell a difference from noise?
Expect    an interruption adds to the few runs that it hits: the tail grows,
          the median stays. Pinned, a loop moves to no other core, and still
          shares its own. A function compared with itself is called different
          in at most 5% of comparisons
Run       python -m ch04_profiling.quiet_machine [--smoke] [--save]
          python -m ch04_profiling.quiet_machine --pin [CORES]
"""

import contextlib
import os
import threading
import time

import numpy as np
import torch

from common import bench, gpu_clock, judging, tables, timers

try:
    import resource
except ImportError:  # Windows does not count what jitter asks for
    resource = None
try:
    import psutil
except ImportError:  # who uses the CPU is then not told
    psutil = None


def jitter(loop, repeats, clock, switches):
    """Interrupts and other programs only ever add time to a fixed loop.

    Returned are the median in seconds, how much longer the slowest 1 in 100
    and the slowest take (1.5: half as long again), and the times that the
    core was taken away.
    """
    times, before = [], switches()
    for _ in range(repeats):
        start = clock()
        loop()
        times.append(clock() - start)
    taken = switches() - before
    parts = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
    median, most, worst = torch.tensor(times).double().quantile(parts).tolist()
    return median, most / median, worst / median, taken


def threads_pinned(cores):
    """Linux moves a thread to any core it may use: restrict all of them.

    Threads that start later inherit it. Returned is a function that undoes
    it, for those too: they may then run where the caller might before.
    """
    import contextlib
    import os

    ended = contextlib.suppress(ProcessLookupError)  # a thread that has
    mine, before = os.sched_getaffinity(0), {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with ended:
            before[thread] = os.sched_getaffinity(thread)

    def undo():
        for thread in map(int, os.listdir("/proc/self/task")):
            with ended:
                os.sched_setaffinity(thread, before.get(thread, mine))

    os.sched_setaffinity(0, cores)  # OSError: a core that is not there
    for thread in before:
        with ended:
            os.sched_setaffinity(thread, cores)
    return undo


def false_claims(judge, draw, comparisons):
    """Two samples of one function differ by luck: how often is it claimed?

    ``draw()`` returns samples (rounds, 2) of the same; ``judge`` says from
    them whether the two differ. Returned is the share of claims.
    """
    return sum(bool(judge(draw())) for _ in range(comparisons)) / comparisons


TECHNIQUES = (jitter, threads_pinned, false_claims)

CAN_PIN = hasattr(os, "sched_setaffinity")  # not on macOS and Windows


def cpu_users(seconds, most=6):
    """Return rows of the processes that use the CPU most; None untold."""
    if psutil is None:
        return None
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            process.cpu_percent()  # the first call starts the interval
    time.sleep(seconds)
    rows = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            used = process.cpu_percent()
            name, memory = process.name(), process.memory_info().rss
            mine = process.pid == os.getpid()
            rows.append(
                {
                    "name": f"{name} (this script)" if mine else name,
                    "pid": process.pid,
                    "core_percent": used,
                    "memory_bytes": memory,
                }
            )
    rows.sort(key=lambda row: -row["core_percent"])
    return [row for row in rows[:most] if row["core_percent"] > 0]


def gpu_users(nvml=None, device=0):
    """Return rows of the processes on the GPU, or why none are told."""
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
    except ImportError:
        return "nvidia-ml-py is not installed"
    except Exception as error:
        return f"no NVIDIA GPU or driver ({error})"
    try:
        gpu = gpu_clock.handle(nvml, device)
        found = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        return [
            {
                "name": _name(process.pid),
                "pid": process.pid,
                "memory_bytes": process.usedGpuMemory,
            }
            for process in found
        ]
    except Exception as error:  # NVML's errors are made at run time
        return f"the driver does not tell ({error})"
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _name(pid):
    with contextlib.suppress(Exception):  # no psutil; of another container
        return psutil.Process(pid).name()
    return "not told"


def quiet_cores(count=1):
    """Return the cores least in use, of those this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if psutil is None:
        return allowed[-count:]
    use = psutil.cpu_percent(0.2, percpu=True)
    used = {c: use[c] if c < len(use) else 0 for c in allowed}
    # of equals the last: interrupts mostly go to the first
    return sorted(allowed, key=lambda c: (used[c], -c))[:count]


def taken_away():
    """Return how often another program got a core that we still wanted."""
    if resource is None:
        return 0
    # of this thread alone where that is told (Linux), else of the process
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


def jitter_row(args, name, cores=None):
    """Measure a loop in a thread of its own, which pins itself and ends."""
    found = []

    def work():
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread alone
        loop = range(1000 if args.smoke else 20_000)
        repeats = 20 if args.smoke else 3000
        found.extend(
            jitter(lambda: sum(loop), repeats, time.perf_counter, taken_away)
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    keys = "median_s", "slow_times", "slowest_times", "taken_away"
    row = {"name": name} | dict(zip(keys, found, strict=True))
    return row if resource else row | {"taken_away": None}


def a_a(args, comparisons, budget_s):
    """Compare one operator with itself, again and again; return a row."""
    x = torch.ones(4096, device=args.device)
    noise = []

    def draw():
        ys = torch.empty_like(x), torch.empty_like(x)
        calls = [lambda y=y: torch.add(x, 1, out=y) for y in ys]
        samples = timers.take_turns(calls, args.device, budget_s=budget_s)
        low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
        noise.append(100 * (high - low) / median)
        return samples

    share = false_claims(differs, draw, comparisons)
    return {
        "comparisons": comparisons,
        "claims": round(share * comparisons),
        "claims_percent": 100 * share,
        "iqr_percent": float(np.median(noise)),
    }


def differs(samples):
    """Say what ``bench.compare`` says of two rows."""
    return judging.judge(["first", "second"], samples)[1]["differs"]


def cores_of(words):
    """Return the cores of "2,4-6", or refuse in one sentence."""
    cores = set()
    try:
        for part in words.split(","):
            first, dash, last = part.partition("-")
            last = int(last if dash else first)
            cores |= set(range(int(first), last + 1))
    except ValueError:
        cores = set()
    allowed = os.sched_getaffinity(0)
    if not cores or not cores <= allowed:
        raise bench.Refusal(
            f"--pin {words}: write cores as 1,3-5, out of those that this "
            f"process may use: {', '.join(map(str, sorted(allowed)))}"
        )
    return cores


def pin(words):
    """Pin this process as asked; return (what was done, how to undo it)."""
    if not CAN_PIN:
        return "this system pins no threads from Python", lambda: None
    cores = cores_of(words) if words else set(quiet_cores())
    text = ", ".join(map(str, sorted(cores)))
    return f"pinned to core {text}", threads_pinned(cores)


def add(parser):
    parser.add_argument(
        "--pin",
        nargs="?",
        const="",
        metavar="CORES",
        help="pin all threads of this process while measuring, as 1,3-5",
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, add)
    users = cpu_users(0.05 if args.smoke else 1.0)
    print("Who uses the CPU (100: one core)")
    if users is None:
        print("psutil is not installed")
    else:
        print(tables.table(users) if users else "nobody")
    users = gpu_users(device=args.device)
    print(
        f"Who uses the GPU: {users or 'nobody'}"
        if not users or isinstance(users, str)
        else tables.table(users, title="Who uses the GPU")
    )
    print()  # these names are not recorded: they are the reader's
    name, undo = "as found", lambda: None
    if args.pin is not None:
        name, undo = pin(args.pin)
        print(name)
    try:  # pinned, it would print and record another machine's core count
        jitters = [jitter_row(args, name)]
        if CAN_PIN and args.pin is None:
            core = quiet_cores()[0]
            name = f"thread pinned to core {core}"
            jitters.append(jitter_row(args, name, {core}))
        count, budget_s = (3, 0.0) if args.smoke else (40, 0.1)
        compared = a_a(args, count, budget_s)
    finally:
        undo()
    rows = bench.report(
        args,
        jitters,
        {
            "name": "a fixed loop",
            "median_s": "median",
            "slow_times": "slowest 1% / it",
            "slowest_times": "slowest / it",
            "taken_away": "times the core was taken",
        },
        title="Jitter",
    )
    rows += bench.report(
        args,
        [compared],
        {
            "comparisons": "A/A comparisons",
            "claims": "false claims",
            "claims_percent": "%",
            "iqr_percent": "IQR % (median)",
        },
        title="One operator compared with itself",
        expect="at most 5% false claims; chance alone gives some",
    )
    if not CAN_PIN:
        print("pinning to cores: not from Python on this system (Linux can)")
    elif args.pin is None:
        print("nothing but a thread of this script was pinned. For a program:")
        print(f"taskset -c {core} python …   (before torch starts threads)")
    return rows


if __name__ == "__main__":
    bench.run(main)
