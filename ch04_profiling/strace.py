"""4.5.2  strace · strace

Question  How many system calls does reading a file take, and what do they
          cost?
Expect    of a file of n bytes: n / 64 + 1 reads in pieces of 64 bytes,
          n / 8192 + 1 through a buffer of 8 KiB, 2 as a whole (the last one
          finds the end); time falls with the calls, until what Python does
          with the pieces is left
Run       python -m ch04_profiling.strace [--smoke] [--save]

strace is optional and exists on Linux only (apt-get install strace); the
times are measured without it, since every traced call stops the program
twice.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from ch04_profiling import planted_reads
from common import bench

MODULE = "ch04_profiling.planted_reads"
ROWS = {
    "64 bytes each": "unbuffered",
    "64 bytes, from a buffer of 8 KiB": "buffered",
    "whole": "whole",
}


def command(program, out, path=None):
    """Return the words that count a program's (a list's) system calls.

    -f follows its threads and children, -c counts instead of listing, -P
    keeps to the calls on one file: those of Python's imports are left out.
    """
    words = ["strace", "-f", "-c", "-o", out]
    if path:
        words += ["-P", path]
    return [*words, *program]


def calls(text):
    """Read the table of strace -c: {name: (calls, errors, seconds)}.

    The column of errors is empty where there are none; seconds are the
    kernel's own time in the call.
    """
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) not in (5, 6) or not words[3].isdigit():
            continue
        name = words[-1]
        errors = int(words[4]) if len(words) == 6 else 0
        if name != "total":
            found[name] = (int(words[3]), errors, float(words[1]))
    return found


def listed(text):
    """Read the lines of strace -f: [(name, arguments, result or None)].

    A call that another thread interrupts comes in two lines, "unfinished"
    and "resumed"; it counts once, with the result of the second.
    """
    import re

    whole = re.compile(r"^(?:\[pid +)?(?:(\d+)\]? +)?(\w+)\((.*)\) += (-?\w+)")
    begun = re.compile(
        r"^(?:\[pid +)?(?:(\d+)\]? +)?(\w+)\((.*) <unfinished \.\.\.>"
    )
    ended = re.compile(
        r"^(?:\[pid +)?(?:(\d+)\]? +)?<\.\.\. (\w+) resumed>(.*)\) += (-?\w+)"
    )
    found, waiting = [], {}
    for line in text.splitlines():
        if match := ended.match(line):
            start = waiting.pop((match[1], match[2]), "")
            found.append((match[2], start + match[3], match[4]))
        elif match := begun.match(line):
            waiting[match[1], match[2]] = match[3]
        elif match := whole.match(line):
            found.append((match[2], match[3], match[4]))
    return found


TECHNIQUES = (planted_reads.unbuffered, planted_reads.buffered)
TECHNIQUES += (planted_reads.whole, command, calls, listed)


def predicted(size):
    """Return {row: reads} of a file of so many whole pieces, in bytes."""
    pieces = -(-size // planted_reads.PIECE)
    buffers = -(-size // planted_reads.BUFFER)
    return dict(zip(ROWS, (pieces + 1, buffers + 1, 2), strict=True))


def traced(path, way):
    """Return strace's table of the calls on one file.

    Raises:
        bench.Refusal: strace may not trace, or failed.
    """
    program = [sys.executable, "-m", MODULE, path, "--by", way]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "calls")
        done = subprocess.run(
            command(program, out, path),
            capture_output=True,
            text=True,
            cwd=bench.ROOT,
        )
        text = ""
        if os.path.exists(out):
            with open(out, encoding="utf-8", errors="replace") as file:
                text = file.read()
    if done.returncode or "calls" not in text:
        said = (done.stderr or "no table").strip().splitlines()[-1]
        raise bench.Refusal(
            f"strace did not work here ({said[:120]}); it needs the right "
            "to trace: ptrace_scope, or CAP_SYS_PTRACE in a container"
        )
    return text


def timed(args, path, size):
    """Measure the three ways without a tracer."""
    counts = predicted(size)
    variants = {
        name: lambda read=planted_reads.WAYS[way]: lambda: read(path)
        for name, way in ROWS.items()
    }
    reads = " / ".join(f"{counts[name]:,}" for name in ROWS)
    return bench.compare(
        args,
        variants,
        unit="file",
        bytes=size,
        tolerance=None,
        budget_s=3.0,
        expect=f"{reads} reads of a file of {size:,} bytes in the cache",
        title="Reading a file, not traced",
    )


def counted(args, path, size):
    """Count what the three ways ask the kernel for."""
    counts, rows = predicted(size), []
    for name, way in ROWS.items():
        found = calls(traced(path, way))
        number, _, seconds = found.get("read", (0, 0, 0.0))
        others = sum(n for call, (n, *_) in found.items() if call != "read")
        rows.append(
            {
                "name": name,
                "reads": number,
                "predicted_reads": counts[name],
                "others": others,
                "in_kernel_s": seconds,
            }
        )
    return bench.report(
        args,
        rows,
        {
            "name": "row",
            "reads": "reads",
            "predicted_reads": "predicted",
            "others": "other calls on the file",
            "in_kernel_s": "in the kernel",
        },
        title="System calls on the file, by strace -c",
    )


def main(argv=None):
    args = bench.cli(__doc__, argv)
    size = 2**14 if args.smoke else 2**20
    with tempfile.TemporaryDirectory() as folder:
        # strace knows files by their real names
        path = os.path.join(os.path.realpath(folder), "samples.bin")
        with open(path, "wb") as file:
            file.write(bytes(range(256)) * (size // 256))
        rows = timed(args, path, size)
        missing = None
        if not shutil.which("strace"):
            missing = "strace is not here (Linux: apt-get install strace)"
        else:
            try:
                return rows + counted(args, path, size)
            except bench.Refusal as refusal:
                missing = str(refusal)
    shown = command(["python", "train.py"], "calls.txt")
    print(f"the command: {' '.join(shown)}")
    bench.left_out(args, f"counting system calls: {missing}", "cpu")
    return rows


if __name__ == "__main__":
    bench.run(main)
