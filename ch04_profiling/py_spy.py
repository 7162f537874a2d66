"""4.5.1  py-spy · Py-Spy

Question  Which function of a running Python program is the hottest, without
          a change to the program?
Expect    100 samples per second of run time; in training, nearly all below
          the loader and most in decode_by_pixel itself, the planted fault;
          with the images decoded whole, that function is gone and the
          training step is on top
Run       python -m ch04_profiling.py_spy [--smoke] [--save]
          [--out FLAME.svg|.json|.txt]

py-spy is optional (pip install py-spy; on macOS it needs root). --out keeps
a flame graph: .svg for a browser, .json for https://www.speedscope.app.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import bench

MODULE = "ch04_profiling.planted_loader"
FORMATS = {".svg": "flamegraph", ".json": "speedscope", ".txt": "raw"}
RATE = 100  # samples per second
PROGRAMS = {"decoded by pixel": "pixels", "decoded whole": "whole"}
# where a sample of training belongs: below which function of the program
PLACES = {"loader": "Images.__getitem__", "training": "train"}
TOP = "train"  # what is outside it is start-up


def command(py_spy, program, out, form="raw", rate=100):
    """Return the words that sample a program (a list) into a file.

    py-spy reads the stacks of another process from its memory: the program
    does not know, and a sample costs it some ten microseconds. Threads that
    wait are left out (--idle), C++ frames, too (--native), and the children
    of a loader with workers (--subprocesses).
    """
    words = [py_spy, "record", "--format", form, "--rate", str(rate)]
    return [*words, "--output", out, "--", *program]


def stacks(raw):
    """Read py-spy's raw format: [(functions from outermost, samples)].

    A line is "outer (file:line);inner (file:line) count".
    """
    found = []
    for line in raw.splitlines():
        text, _, count = line.rpartition(" ")
        frames = [frame.rpartition(" (")[0] for frame in text.split(";")]
        if count.isdigit() and all(frames):
            found.append((frames, int(count)))
    return found


def functions(found, below):
    """Samples end in the function that runs: its self time; all on the
    stack had to wait for it: their total.

    Returns {function: [self, total]} of the samples below a function.
    """
    counts = {}
    for frames, count in found:
        if below not in frames:
            continue
        frames = frames[frames.index(below) :]
        for function in set(frames):
            counts.setdefault(function, [0, 0])[1] += count
        counts[frames[-1]][0] += count
    return counts


def hottest(counts):
    """The most samples of its own: where time goes, not what waits for it."""
    return max(counts, key=lambda function: counts[function][0])


TECHNIQUES = (command, stacks, functions, hottest)


def tool():
    """Return the path of py-spy, or None."""
    beside = Path(sys.executable).parent
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(beside))


def sampled(py_spy, decode, seconds, form="raw"):
    """Return what py-spy writes about the planted program.

    Raises:
        bench.Refusal: it may not read other processes, or failed.
    """
    program = [sys.executable, "-m", MODULE, "--decode", decode]
    program += ["--seconds", str(seconds)]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "samples")
        done = subprocess.run(
            command(py_spy, program, out, form, RATE),
            capture_output=True,
            text=True,
            cwd=bench.ROOT,
        )
        if not os.path.exists(out):
            said = (done.stderr or done.stdout).strip().splitlines()
            last = said[-1] if said else f"exit code {done.returncode}"
            raise bench.Refusal(
                f"py-spy wrote nothing ({last[:120]}); it needs the right to "
                "read another process: root, or CAP_SYS_PTRACE in a container"
            )
        return Path(out).read_text(encoding="utf-8", errors="replace")


def summary(name, raw):
    """Return a row: where the samples of one program are."""
    found = stacks(raw)
    counts = functions(found, TOP)
    if not counts:
        raise bench.Refusal(
            "py-spy took no sample of training; a busy machine?"
        )
    total = counts[TOP][1]
    loader = counts.get(PLACES["loader"], [0, 0])[1]
    own = hottest(counts)
    return {
        "name": name,
        "samples": sum(count for _, count in found),
        "in_training": total,
        "loader_percent": round(100 * loader / total, 1),
        "hottest": own,
        "self_percent": round(100 * counts[own][0] / total, 1),
    }


def top(raw, most=6):
    """Return rows of the functions with most samples of their own."""
    counts = functions(stacks(raw), TOP)
    whole = max(counts[TOP][1], 1)
    rows = [
        {
            "name": name,
            "self_percent": round(100 * own / whole, 1),
            "total_percent": round(100 * total / whole, 1),
        }
        for name, (own, total) in counts.items()
    ]
    rows.sort(key=lambda r: (-r["self_percent"], -r["total_percent"]))
    return rows[:most]


def boxes(found, below=TOP):
    """Return the boxes of a flame graph: {stack: (left, samples)}."""
    left, widths = {(): 0}, {}
    for frames, count in found:
        if below in frames:
            frames = tuple(frames[frames.index(below) :])
            for depth in range(1, len(frames) + 1):
                stack = frames[:depth]
                widths[stack] = widths.get(stack, 0) + count
    filled = {}
    for stack in sorted(widths):  # a parent comes before its children
        parent = stack[:-1]
        left[stack] = left[parent] + filled.get(parent, 0)
        filled[parent] = filled.get(parent, 0) + widths[stack]
    return {stack: (left[stack], width) for stack, width in widths.items()}


def figure(raw):
    """Draw a flame graph: width is time, a box stands on its caller."""
    from matplotlib.figure import Figure

    found = boxes(stacks(raw))
    whole = max(found[(TOP,)][1], 1)
    levels = max(map(len, found))
    drawn = Figure(figsize=(11, 0.6 + 0.3 * levels), layout="constrained")
    axes = drawn.subplots()
    for stack, (at, width) in found.items():
        warm = sum(map(ord, stack[-1])) % 7 / 7  # one colour per function
        axes.barh(
            len(stack) - 1,
            width / whole,
            left=at / whole,
            height=0.95,
            color=(0.85 + 0.14 * warm, 0.35 + 0.5 * warm, 0.15),
            edgecolor="white",
            linewidth=0.4,
        )
        room = int(130 * width / whole)
        if room > 3:
            axes.text(
                (at + width / 2) / whole,
                len(stack) - 1,
                stack[-1][:room],
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set(xlim=(0, 1), yticks=[], xlabel="share of the samples in training")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return drawn


def flags(parser):
    parser.add_argument(
        "--out", metavar="FLAME.svg", help="keep a flame graph"
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    suffix = Path(args.out).suffix.lower() if args.out else None
    if args.out and suffix not in FORMATS:
        raise bench.Refusal(
            f"--out {args.out}: end it in {', '.join(FORMATS)}"
        )
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise bench.Refusal(f"--out {args.out}: there is no such folder")
    py_spy, seconds = tool(), 1.0 if args.smoke else 3.0
    program = ["python", "-m", MODULE]
    if py_spy is None:
        if args.out:
            raise bench.Refusal("--out needs py-spy: pip install py-spy")
        print(*args.sections, sep="\n")
        print(" ".join(command("py-spy", program, "flame.svg", "flamegraph")))
        bench.left_out(
            args, "samples: py-spy is not here (pip install py-spy)", "cpu"
        )
        return []
    raws, rows = {}, []
    try:
        for name, decode in PROGRAMS.items():
            raws[name] = sampled(py_spy, decode, seconds)
            rows.append(summary(name, raws[name]))
    except bench.Refusal as refusal:
        if args.out:
            raise
        bench.left_out(args, str(refusal), "cpu")
        return []
    bench.report(
        args,
        rows,
        {
            "name": "row",
            "samples": "samples",
            "in_training": "in training",
            "loader_percent": "% in the loader",
            "hottest": "hottest function",
            "self_percent": "% in itself",
        },
        title="The rest of the samples is start-up: imports",
    )
    for name, raw in raws.items():
        rows += bench.report(args, top(raw), title=f"Functions, {name}")
    if args.out:
        data = sampled(py_spy, "pixels", seconds, FORMATS[suffix])
        bench.write_atomic(args.out, data)
        print(f"flame graph in {args.out}")
    return rows


if __name__ == "__main__":
    bench.run(main)
