"""Do other people's tools find the same bytes per second?

Question  How near are the memory's and the disk's figures, measured the way
          chapter 2 measures them, to those of sysbench, mbw and fio on the
          same machine in the same run?
Expect    copies and the disk within 15%: the same instructions, one thread,
          best of rounds in turn, since interference only takes away;
          sysbench moves 8 bytes per instruction, vectors up to 64: there
          chapter 2 may be quicker, and must not be 15% slower
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

from ch02_hardware import key_figures, memory_hierarchy
from common import bench, ceilings, machine

BAR = 0.15  # of the tool's figure
MIB = 2**20


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


def pairs(size, disk_size, folder, smoke):
    """Return (name, tool, our rate, its rate): functions of nothing."""
    cpu, loops = torch.device("cpu"), 2
    a, b = (torch.ones(size // 4) for _ in "ab")

    def rate(arrays, call, *words):
        call = functools.partial(call, *words)
        taken = ceilings.shortest(call, cpu, 0.0 if smoke else 0.5)
        return arrays * size / taken

    return [
        (
            "memory, read",
            "sysbench",
            lambda: rate(1, memory_hierarchy.summed, a),
            lambda: by_sysbench("read", size, loops),
        ),
        (
            "memory, written",
            "sysbench",
            lambda: rate(1, b.fill_, 2.0),
            lambda: by_sysbench("write", size, loops),
        ),
        (
            "memory, copied by the C library",
            "mbw",
            lambda: rate(2, ctypes.memmove, b.data_ptr(), a.data_ptr(), size),
            lambda: by_mbw(size, loops),
        ),
        (
            "disk, read",
            "fio",
            lambda: key_figures.disk_read(folder, disk_size),
            lambda: by_fio(folder, disk_size),
        ),
        (
            "memory, copied by torch",
            None,
            lambda: rate(2, memory_hierarchy.copied, b, a),
            None,
        ),
    ]


def bar(tool):
    """Say which ratios are good; sysbench's loops are the only scalar ones."""
    return f"{1 - BAR:g} at least" if tool == "sysbench" else f"1 ± {BAR:g}"


def holds(tool, ratio):
    return ratio >= 1 - BAR and (tool == "sysbench" or ratio <= 1 + BAR)


def measured(found, rounds):
    """Let both sides of each pair take turns; return the best of each."""
    rows = []
    for name, tool, ours, theirs in found:
        mine, peers = [], []
        for _ in range(rounds):
            mine.append(ours() or 0)
            peers.append(theirs() if theirs else 0)
        best, peer = max(mine) or None, max(peers) or None
        ratio = best / peer if best and peer else None
        rows.append(
            {
                "name": name,
                "tool": tool,
                "ours_bytes_per_s": best,
                "tool_bytes_per_s": peer,
                "ratio": ratio,
                "bar": tool and bar(tool),
                "holds": ratio and holds(tool, ratio),
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
                for pair in pairs(size, disk_size, folder, args.smoke)
                if pair[1] in (None, *tools)
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
            "bar": "bar",
            "holds": "holds",
        },
        extra={"array_bytes": size, "disk_bytes": disk_size},
    )
    rates = {row["name"]: row["ours_bytes_per_s"] for row in rows}
    if memmove := rates.get("memory, copied by the C library"):
        share = rates["memory, copied by torch"] / memmove
        print(
            f"torch's copy reaches {share:.0%} of memmove's rate: stores that "
            "pass the cache by, or move\nwhole lines, need not read a line "
            "before they overwrite it"
        )
    missed = [row["name"] for row in rows if row["holds"] is False]
    if missed and not args.smoke:
        raise bench.Mismatch(f"bar missed: {'; '.join(missed)}")
    return rows


if __name__ == "__main__":
    bench.run(main)
