"""Do other people's tools find the same bytes per second?

Question  How near are the memory's and the disk's figures, measured the way
          chapter 2 measures them, to those of a loop in C, sysbench, mbw and
          fio on the same machine in the same run?
Expect    all within 15%: one thread each, best of rounds in turn, since
          interference only takes away; but sysbench moves 8 bytes with an
          instruction, vectors up to 64, so it may fall behind, to half
Run       python -m benchmarks.stream_peer [--smoke] [--save]
"""

import ctypes
import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ch02_hardware import chain, key_figures, memory_hierarchy
from common import bench, ceilings, machine

BAR = 0.15  # of the tool's figure
SOURCES = (  # whose change makes a record old, as the script's own does
    "benchmarks/stream.c",
    "ch02_hardware/chain.py",
    "ch02_hardware/key_figures.py",
    "ch02_hardware/memory_hierarchy.py",
    "common/ceilings.py",
)
MIB = 2**20
LOOP = "loop in C"
MEMMOVE = "memory, copied by memmove"
SCALAR = "it is scalar"
# memory brings a core up to about 8 bytes in a clock, and a scalar loop moves
# 8: even one after the other, the two take no more than twice the time
SCALAR_MOST = 2


def output_of(*command):
    """Return what a tool prints.

    Raises:
        Refusal: it fails.
    """
    done = subprocess.run(command, capture_output=True, timeout=120)
    if done.returncode:
        said = (done.stderr + done.stdout).decode(errors="replace")
        line = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise bench.Refusal(f"{command[0]} fails: {line:.120}")
    return done.stdout.decode(errors="replace")


def sysbench_rate(text):
    """Read "… transferred (7078.85 MiB/sec)" as bytes per second."""
    return float(re.search(r"\(([\d.]+) MiB/sec\)", text)[1]) * MIB


def mbw_rate(text):
    """Read the quickest copy, counting bytes read and bytes written."""
    rows = re.findall(
        r"^\d+\s+Method:.*Elapsed: ([\d.]+)\s+MiB: ([\d.]+)", text, re.M
    )
    return max(2 * float(mib) * MIB / float(s) for s, mib in rows)


def fio_rate(text):
    """Read the bandwidth from fio's JSON, which may follow other lines."""
    found = json.loads(text[text.index("{") :])
    return float(found["jobs"][0]["read"]["bw_bytes"])


def by_sysbench(operation, size, loops):
    return sysbench_rate(
        output_of(
            "sysbench",
            "memory",
            f"--memory-block-size={size // MIB}M",
            f"--memory-total-size={loops * size // MIB}M",
            f"--memory-oper={operation}",
            "--threads=1",
            "run",
        )
    )


def by_mbw(size, loops):
    """Take the best of its three ways: loop, memcpy, memcpy by blocks."""
    return mbw_rate(output_of("mbw", "-q", "-n", f"{loops}", f"{size // MIB}"))


def by_fio(folder, size):
    """Read a file that fio has written, after it told the cache to forget."""
    return fio_rate(
        output_of(
            "fio",
            "--name=read",
            f"--directory={folder}",
            "--rw=read",
            "--bs=4M",
            f"--size={size}",
            "--ioengine=psync",
            "--fallocate=none",
            "--invalidate=1",
            "--unlink=1",
            "--output-format=json",
        )
    )


def loops_in_c():
    """Return {name: C function} of stream.c, which moves bytes as torch does.

    Raises:
        Refusal: no compiler.
    """
    found = chain.library(Path(__file__).with_name("stream.c"))
    place, count = ctypes.c_void_p, ctypes.c_int64
    found.copy.argtypes = place, place, count, ctypes.c_uint32
    found.triad.argtypes = place, place, place, count, ctypes.c_float
    found.copy.restype = found.triad.restype = None
    return {"copy": found.copy, "triad": found.triad}


def pairs(size, disk_size, folder, smoke, loops):
    """Return (name, tool, our rate, its rate): functions of nothing.

    ``loops``: those in C, or None.  Both sides of a pair count the same
    bytes, those read and those written; lines that a store fetches before it
    overwrites them are counted nowhere.
    """
    cpu, repeats = torch.device("cpu"), 2
    a, b, c = (torch.ones(size // 4) for _ in "abc")
    at, n = [x.data_ptr() for x in (a, b, c)], size // 4

    def rate(arrays, call, *words):
        call = functools.partial(call, *words)
        taken = ceilings.shortest(call, cpu, 0.0 if smoke else 0.5)
        return arrays * size / taken

    found = []
    if loops:
        copy, add = loops["copy"], loops["triad"]
        found += [
            (
                "memory, copied by torch",
                LOOP,
                lambda: rate(2, memory_hierarchy.copied, a, b),
                lambda: rate(2, copy, *at[:2], n, 0),
            ),
            (
                "memory, triad by torch",
                LOOP,
                lambda: rate(3, memory_hierarchy.triad, a, b, c),
                lambda: rate(3, add, *at, n, 2.0),
            ),
        ]
    return found + [
        (
            "memory, read",
            "sysbench",
            lambda: rate(1, memory_hierarchy.summed, a),
            lambda: by_sysbench("read", size, repeats),
        ),
        (
            "memory, written",
            "sysbench",
            lambda: rate(1, b.fill_, 2.0),
            lambda: by_sysbench("write", size, repeats),
        ),
        (
            MEMMOVE,
            "mbw",
            lambda: rate(2, ctypes.memmove, a.data_ptr(), b.data_ptr(), size),
            lambda: by_mbw(size, repeats),
        ),
        (
            "disk, read",
            "fio",
            lambda: key_figures.disk_read(folder, disk_size),
            lambda: by_fio(folder, disk_size),
        ),
    ]


def verdict(tool, ratio):
    """Say whether a ratio is within the bar, and why not where that is known.

    Returns None without a ratio.
    """
    if ratio is None:
        return None
    if abs(ratio - 1) <= BAR:
        return f"within {BAR:.0%}"
    if tool == "sysbench" and 1 < ratio <= SCALAR_MOST:
        return f"missed, because {SCALAR}"
    return "missed"


def answers(entry):
    """Return (what, answer, bar, "" or why it is missed) of a record."""
    return [
        (
            row["name"],
            f"{row['ratio']:.2f}× {row['tool']}",
            f"1 ± {BAR:g}",
            row["verdict"] if row["verdict"].startswith("missed") else "",
        )
        for row in entry["rows"]
        if row["ratio"] is not None
    ]


def measured(found, rounds):
    """Let both sides of each pair take turns; return the best of each."""
    rows = []
    for name, tool, ours, theirs in found:
        mine, peers = [], []
        for _ in range(rounds):
            mine.append(ours() or 0)
            peers.append(theirs())
        best, peer = max(mine) or None, max(peers) or None
        ratio = best / peer if best and peer else None
        rows.append(
            {
                "name": name,
                "tool": tool,
                "ours_bytes_per_s": best,
                "tool_bytes_per_s": peer,
                "ratio": ratio,
                "verdict": verdict(tool, ratio),
            }
        )
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv)
    args.device = torch.device("cpu")
    tools = [t for t in ("sysbench", "mbw", "fio") if shutil.which(t)]
    missing = sorted({"sysbench", "mbw", "fio"} - set(tools))
    if missing:
        print(
            f"not on the PATH: {', '.join(missing)} (Debian's packages have "
            "these names):\nwhat they would measure is left out"
        )
    loops = None
    try:
        loops = loops_in_c()
        tools.append(LOOP)
    except bench.Refusal as refusal:
        print(f"{refusal}: torch's copy and triad are not compared")
    if not tools:
        print("no independent tool is at hand, so nothing was compared")
        return []
    most = memory_hierarchy.room_bytes() // 2
    size = 2 * max(ceilings.cache_bytes(), 2**26)
    size = 1 << (min(size, most, 2**30).bit_length() - 1)  # as sysbench asks
    size = 2**24 if args.smoke else size
    disk_size = 2**22 if args.smoke else 2**28
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(dir=machine.cache_dir()) as folder:
            folder = Path(folder)
            found = [
                pair
                for pair in pairs(size, disk_size, folder, args.smoke, loops)
                if pair[1] in tools
            ]
            rows = measured(found, 1 if args.smoke else 8)
    finally:
        torch.set_num_threads(before)
    bench.report(
        args,
        rows,
        {
            "name": "what",
            "ours_bytes_per_s": "ours",
            "tool": "tool",
            "tool_bytes_per_s": "the tool's",
            "ratio": "ratio",
            "verdict": f"bar: 1 ± {BAR:g}",
        },
        extra={
            "array_bytes": size,
            "disk_bytes": disk_size,
            "key": {"sources": bench.digests(SOURCES)},
        },
    )
    rates = {row["name"]: row["ours_bytes_per_s"] for row in rows}
    if MEMMOVE in rates and "memory, copied by torch" in rates:
        share = rates["memory, copied by torch"] / rates[MEMMOVE]
        print(
            f"torch's copy reaches {share:.0%} of memmove's rate, a second "
            "ceiling: of a large block memcpy and\nmemmove write past the "
            "cache (non-temporal stores) and move 2 bytes for each byte "
            "copied;\nan ordinary store reads its line first: 3 bytes"
        )
    missed = [row["name"] for row in rows if row["verdict"] == "missed"]
    if missed and not args.smoke:
        raise bench.Mismatch(f"bar missed: {'; '.join(missed)}")
    return rows


if __name__ == "__main__":
    bench.run(main)
