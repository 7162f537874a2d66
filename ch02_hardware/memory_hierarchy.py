"""2.1.1  Memory · 記憶體

Question  How long does one access take, and how many bytes per second arrive
          when many are asked for at once?
Expect    an access takes as long as the level that holds the working set:
          a step up at each cache size the machine reports, if that much is
          this machine's alone; bytes per second fall at the same sizes, and
          grow with the threads only until the memory's channels are full
Run       python -m ch02_hardware.memory_hierarchy [--smoke] [--save]
"""

import functools
import itertools
import math
import platform
import re
import statistics
import subprocess
import textwrap
import time
from pathlib import Path

import torch

from ch02_hardware import chain
from common import bench, ceilings, machine, tables

GIB = 2**30


def one_cycle(lines, words, generator=None):
    """Each line of memory holds the place of the next, in random order.

    A load waits for the one that brings its address, and no prefetcher
    guesses it.  One cycle leads through all ``lines``, each of ``words``
    numbers; a permutation at random has several, most of them short.
    Returns (lines * words,) int64.
    """
    order = torch.randperm(lines, generator=generator)
    chain = torch.zeros(lines, words, dtype=torch.int64)
    chain[order, 0] = order.roll(-1) * words
    return chain.view(-1)


def gathered(chain, places):
    """A core starts the next loads before the first has ended.

    Their addresses are known beforehand: the time per load is that of the
    slowest resource, and no longer that of one access.
    """
    return chain.take(places)


def summed(a):
    """Memory is read once: n numbers."""
    return a.sum()


def copied(a, b):
    """One array is read, another written: 2 n numbers.

    On most CPUs an ordinary store also fetches the line that it overwrites:
    3 n numbers really move, but nobody counts that.
    """
    return a.copy_(b)


def triad(a, b, c):
    """Two arrays are read, the third is written: 3 n numbers."""
    return torch.add(b, c, alpha=2.0, out=a)


TECHNIQUES = (one_cycle, gathered, summed, copied, triad)
ARRAYS = {"read": 1, "copy": 2, "triad": 3}  # that each operation moves
ORDINARY = (
    "what torch's kernels reach: on most CPUs their ordinary stores also read "
    "the line that they overwrite, which is not counted"
)
STEP = 1.5  # times as long as with half the working set: another level


# --- what the machine reports -----------------------------------------------


def said(path):
    """Return what a file of the system says, or what sysctl does."""
    try:
        if str(path).startswith("hw."):
            done = subprocess.run(["sysctl", "-n", path], capture_output=True)
            return done.stdout.decode(errors="replace").strip()
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def caches(cpu="/sys/devices/system/cpu/cpu0/cache", info="/proc/cpuinfo"):
    """Return {name: bytes} of the data caches that core 0 sees, inner first.

    Empty where the system does not tell.
    """
    found = {}
    for index in sorted(Path(cpu).glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", said(index / "size"))
        if size and said(index / "type") != "Instruction":
            unit = {"": 1, "K": 2**10, "M": 2**20}[size[2]]
            found[f"L{said(index / 'level')}"] = int(size[1]) * unit
    row = re.search(r"^cache size\s*:\s*(\d+) KB", said(info), re.M)
    if row and not found:
        found["last cache"] = int(row[1]) * 2**10
    if platform.system() == "Darwin":
        for name, key in (("L1", "l1d"), ("L2", "l2"), ("L3", "l3")):
            for core in ("", "perflevel0."):  # the quick cores, on ARM
                size = said(f"hw.{core}{key}cachesize")
                if size.isdigit() and int(size):
                    found[name] = int(size)
    return found


def line_bytes(cpu="/sys/devices/system/cpu/cpu0/cache"):
    """Return the bytes that travel together; 64 where nobody tells."""
    mac = platform.system() == "Darwin"
    name = f"{cpu}/index0/coherency_line_size"
    size = said("hw.cachelinesize" if mac else name)
    return max(8, int(size)) if size.isdigit() else 64


# --- measuring --------------------------------------------------------------


def access_s(size, line, walk=None, budget_s=0.1):
    """Time one access in a working set of ``size`` bytes, in seconds.

    ``walk`` is the loop in C; without it, independent gathers are timed.
    Each sample goes on where the one before stopped: from the start again,
    a set larger than the caches would be found in them.
    """
    generator = torch.Generator().manual_seed(0)
    lines, at = max(2, size // line), 0
    cycle = one_cycle(lines, line // 8, generator)
    if walk is None:
        places = torch.randint(lines, (2**14,), generator=generator)
        call = functools.partial(gathered, cycle, places * (line // 8))
        return ceilings.shortest(call, cycle.device, budget_s) / len(places)
    at = walk(cycle.data_ptr(), at, min(lines, 2**22))
    steps, best = 2**10, math.inf
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        at = walk(cycle.data_ptr(), at, steps)
        took = time.perf_counter() - start
        if took < 2e-4:  # the clock must not count
            steps *= 2
        else:  # short samples, so that some are left in peace
            best = min(best, took / steps)
    return best


def working_sets(found, room, smoke=False):
    """Return sizes in bytes, by powers of two, to well beyond the caches."""
    top = 4 * max(found.values(), default=2**24)
    top = 2**16 if smoke else min(max(top, 2**26), GIB, room)
    return [2**k for k in range(12, int(math.log2(top)) + 1)]


def levels(found, points):
    """Return a row per level: its size, and an access well inside it.

    ``points``: {working set in bytes: seconds}.  Near a border both levels
    answer, so a level's own are those between twice the inner cache and three
    quarters of its own size.
    """
    rows, inner = [], 0
    for name, size in [*found.items(), ("memory", None)]:
        inside = [
            s
            for n, s in points.items()
            if n >= 2 * inner and (size is None or n <= 0.75 * size)
        ]
        rows.append(
            {
                "name": name,
                "size_bytes": size,
                "access_s": statistics.median(inside) if inside else None,
                "least_s": min(inside, default=None),
                "most_s": max(inside, default=None),
            }
        )
        inner = size
    return rows


def steps(points):
    """Return (below, above, ratio) of each rise: working sets in bytes.

    A rise is where an access takes ``STEP`` times as long as with the next
    smaller working set; neighbouring rises are one.
    """
    found, sizes = [], sorted(points)
    for below, above in itertools.pairwise(sizes):
        if points[above] < STEP * points[below]:
            continue
        if found and found[-1][1] == below:
            below = found.pop()[0]
        found.append((below, above, points[above] / points[below]))
    return found


def borders(found, points):
    """Return a row per reported size and per step, and whether they agree.

    A step belongs to the size that lies within it.
    """
    rises, largest, rows = steps(points), max(points), []
    for name, size in found.items():
        own = [rise for rise in rises if rise[0] <= size <= rise[1]]
        words = "reported, not seen"
        if size >= largest:
            words = "reported, beyond what was measured"
        row = {"name": name, "reported_bytes": size, "words": words}
        if own:
            below, above, ratio = own[0]
            row |= {"below_bytes": below, "above_bytes": above}
            row |= {"ratio": ratio, "words": "as reported"}
        rows.append(row)
    for below, above, ratio in rises:
        if not any(below <= size <= above for size in found.values()):
            row = {"name": None, "below_bytes": below, "above_bytes": above}
            rows.append(row | {"ratio": ratio, "words": "seen, not reported"})
    key = "reported_bytes", "above_bytes"
    return sorted(rows, key=lambda row: row.get(key[0]) or row[key[1]])


def thread_counts(most):
    """Return 1, 2, 4 … and ``most`` itself."""
    return sorted({2**k for k in range(most.bit_length())} | {most})


def bandwidth_rows(threads, size, budget_s):
    """Time read, copy and triad of arrays of ``size`` bytes.

    The best of three looks counts; the worst says how much they vary.
    """
    before, cpu = torch.get_num_threads(), torch.device("cpu")
    a, b, c = (torch.ones(size // 4) for _ in "abc")
    calls = {
        "read": functools.partial(summed, b),
        "copy": functools.partial(copied, a, b),
        "triad": functools.partial(triad, a, b, c),
    }
    rows = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            row = {"threads": count, "array_bytes": size}
            looks = [
                [ceilings.shortest(f, cpu, budget_s / 3) for f in each]
                for each in [calls.values()] * 3
            ]
            for i, name in enumerate(calls):
                taken = [look[i] for look in looks]
                moved = ARRAYS[name] * size
                row[f"{name}_bytes_per_s"] = moved / min(taken)
                row[f"{name}_least_bytes_per_s"] = moved / max(taken)
            rows.append(row)
    finally:
        torch.set_num_threads(before)
    return rows


def set_rows(sets, budget_s):
    """Time read and copy of working sets of so many bytes, by one thread.

    A copy's working set is both of its arrays.  The call itself takes some
    microseconds: of the smallest sets that is most of the time.
    """
    before, cpu = torch.get_num_threads(), torch.device("cpu")
    rows = []
    try:
        torch.set_num_threads(1)
        for size in sets:
            whole = torch.ones(2, size // 8)
            calls = {
                "read": functools.partial(summed, whole),
                "copy": functools.partial(copied, *whole),
            }
            row = {"name": tables.cell(size, "bytes"), "set_bytes": size}
            for name, call in calls.items():
                taken = ceilings.shortest(call, cpu, budget_s)
                row[f"{name}_bytes_per_s"] = size / taken
            rows.append(row)
    finally:
        torch.set_num_threads(before)
    return rows


def room_bytes(device="cpu"):
    """Return what arrays may take: a quarter of the memory, half the free."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    total = machine.memory_bytes() or 4 * GIB
    try:
        import psutil
    except ImportError:
        return total // 4
    return min(total // 4, psutil.virtual_memory().available // 2)


def figure(rows):
    """Draw access time and bytes per second by working set, and threads."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(14, 3.6), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    points = [row for row in rows if "working_bytes" in row]
    sizes = [row["working_bytes"] for row in points]
    times = [1e9 * row["access_s"] for row in points]
    left.loglog(sizes, times, marker="o", markersize=4)
    found = [row for row in rows if "set_bytes" in row]
    places = [row["set_bytes"] for row in found]
    for name in ("read", "copy"):
        speeds = [row[f"{name}_bytes_per_s"] / 1e9 for row in found]
        middle.loglog(places, speeds, marker="o", markersize=4, label=name)
    middle.legend()
    ticks = sizes[:: max(1, len(sizes) // 6)]
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [tables.cell(n, "bytes") for n in ticks])
        axes.set_xlabel("working set")
    middle.set_ylabel("GB/s, one thread")
    left.set_ylim(min(times) / 1.6, 2 * max(times))
    for row in rows:
        if row.get("above_bytes"):
            span = row["below_bytes"], row["above_bytes"]
            left.axvspan(*span, color="C1", alpha=0.15, linewidth=0)
        size = row.get("size_bytes")
        if size and size <= max(sizes):
            middle.axvline(size, color="0.6", linestyle="--", linewidth=1)
            text = f"{row['name']} {tables.cell(size, 'bytes')} "
            left.axvline(size, color="0.6", linestyle="--", linewidth=1)
            left.text(
                size, 1.8 * max(times), text, ha="right", va="top", fontsize=8
            )
    left.set_ylabel(f"ns per access ({points[0]['how']})")
    rates = [row for row in rows if "threads" in row]
    threads = [row["threads"] for row in rates]
    for name in ARRAYS:
        speeds = [row[f"{name}_bytes_per_s"] / 1e9 for row in rates]
        right.plot(threads, speeds, marker="o", label=name)
    right.set_xticks(threads)
    right.set_ylim(bottom=0)
    right.set_xlabel("threads")
    right.set_ylabel("GB/s")
    right.legend()
    titles = "One access · 存取一次的時間", "Many in order · 依序存取的頻寬"
    titles += ("Many threads · 多執行緒的頻寬",)
    for axes, title in zip((left, middle, right), titles, strict=True):
        fonts = {"fontfamily": notebook.fonts()["font.family"]}
        axes.set_title(notebook.label(title), **fonts)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    args.device = torch.device("cpu")  # whatever else this machine has
    how, walk, reason = "dependent loads", None, None
    found, line = caches(), line_bytes()
    try:
        walk = chain.follow()
    except bench.Refusal as refusal:
        how, reason = "independent gathers", refusal
    sets = working_sets(found, room_bytes(), args.smoke)
    budget_s = 0.002 if args.smoke else 0.1
    points = {n: access_s(n, line, walk, budget_s) for n in sets}
    told = [f"{k} {tables.cell(s, 'bytes')}" for k, s in found.items()]
    rows = bench.report(
        args,
        [
            {
                "name": tables.cell(n, "bytes"),
                "working_bytes": n,
                "fits": next((k for k in found if n <= found[k]), "memory"),
                "access_s": s,
                "how": how,
            }
            for n, s in points.items()
        ],
        {"name": "working set", "fits": "fits", "access_s": how},
        title="One access",
        expect=f"steps at {', '.join(told) or 'sizes nobody here tells'}",
    )
    if reason:
        print(f"{reason}: independent gathers take the chain's place")
    rows += bench.report(
        args,
        levels(found, points),
        {
            "name": "level",
            "size_bytes": "reported",
            "access_s": "one access",
            "least_s": "from",
            "most_s": "to",
        },
        title="Well inside each level (— where nothing was measured)",
    )
    rows += bench.report(
        args,
        borders(found, points),
        {
            "name": "level",
            "reported_bytes": "reported",
            "below_bytes": "step from",
            "above_bytes": "to",
            "ratio": "times as long",
            "words": "",
        },
        title=f"Where an access takes {STEP} times as long as in half the set",
    )
    notes = {
        "reported, not seen": "a virtual machine is told its socket's whole "
        "last cache, and gets what its neighbours leave of it",
        "seen, not reported": "what this machine gets of a shared cache may "
        "end there",
    }
    for words, note in notes.items():
        if any(row.get("words") == words for row in rows):
            print(textwrap.fill(f"{words}: {note}", tables.WIDTH))
    rows += bench.report(
        args,
        set_rows(sets, 0.0 if args.smoke else 0.05),
        {"name": "working set", "read_bytes_per_s": "read"}
        | {"copy_bytes_per_s": "copy"},
        title="Many in order, by working set: one thread",
    )
    print(
        "a call takes some microseconds: of the smallest sets that is most of "
        "the time"
    )
    size = max(ceilings.cache_bytes(), 2**26)
    size = 2**20 if args.smoke else min(size, room_bytes() // 3) // 4 * 4
    threads = thread_counts(machine.cores())
    budget_s = 0.0 if args.smoke else min(0.4, 2 / len(threads))
    rates = bandwidth_rows(threads, size, budget_s)
    if not args.smoke and size >= ceilings.cache_bytes():
        pair = [f"{name}_bytes_per_s" for name in ("copy", "triad")]
        seen = {key: rates[-1][key] for key in pair}
        machine.keep_peaks(seen, "cpu", threads[-1])
    rows += bench.report(
        args,
        rates,
        {
            "threads": "threads",
            "array_bytes": "each array",
            **{
                f"{name}{key}_bytes_per_s": word
                for name in ARRAYS
                for key, word in (("", name), ("_least", "worst look"))
            },
        },
        title="Beyond the caches, by threads: read, copy and triad move 1, 2 "
        "and 3 arrays",
    )
    print(textwrap.fill(f"copy and triad are {ORDINARY}", tables.WIDTH))
    longest, shortest = max(points.values()), min(points.values())
    print(
        f"in the slowest working set an access takes "
        f"{longest / shortest:.0f} times as long as in the quickest"
    )
    return rows


if __name__ == "__main__":
    bench.run(main)
