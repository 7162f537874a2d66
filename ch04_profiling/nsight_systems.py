"""4.4.1  Nsight Systems · Nsight Systems

Question  What does nsys record of a PyTorch program, how is it told to leave
          the start-up out, and what do its tables say without its window?
Expect    of n steps inside the capture range, n NVTX ranges of each name;
          the kernels' time by range adds up to that of all kernels, since
          each is launched inside one: backward about twice forward
Run       python -m ch04_profiling.nsight_systems [--smoke] [--save]
          [--read REPORT.nsys-rep | REPORT.sqlite]

Where nsys is not installed, the exact command is printed. --read shows the
tables of a report of your own.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common import bench, seeding, timers

MODULE = "ch04_profiling.nsight_systems"
RANGES = ("forward", "backward", "update")
WARM_UP, STEPS = 3, 5


def nvtx_range(name, device):
    """NVTX puts a name of the program's own on the profiler's time line.

    Without CUDA the same line names a range for torch.profiler instead.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.nvtx.range(name)
    return torch.profiler.record_function(name)


def capture(step, warm_up, steps, device):
    """A profiler that waits for a signal does not record the start-up.

    Kernels run later than the calls that launch them: those launched before
    the range must have ended, and those inside it must end in it.
    """
    on_gpu = torch.device(device).type == "cuda"
    for _ in range(warm_up):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # what --capture-range waits for
    for number in range(steps):
        with nvtx_range(f"step {number}", device):
            step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def command(out, program):
    """Return the words that record ``program`` (a list) into ``out``.

    CPU samples and scheduling are left out: they need rights, and cost.
    """
    return [
        "nsys",
        "profile",
        f"--output={out}",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,cudnn,cublas",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        *program,
    ]


def export(report, out):
    """Return the words that turn a report into an SQLite file."""
    return [
        "nsys",
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={out}",
        str(report),
    ]


# ---- the tables of a report ----------------------------------------------

KERNELS = """
SELECT s.value AS name, COUNT(*) AS count, SUM(k.end - k.start) AS ns
FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName
GROUP BY s.value ORDER BY ns DESC, name"""
COPIES = """
SELECT CASE copyKind WHEN 1 THEN 'host to device' WHEN 2 THEN
  'device to host' WHEN 8 THEN 'device to device' WHEN 10 THEN
  'peer to peer' ELSE 'kind ' || copyKind END AS name,
  COUNT(*) AS count, SUM(end - start) AS ns, SUM(bytes) AS bytes
FROM CUPTI_ACTIVITY_KIND_MEMCPY GROUP BY copyKind ORDER BY ns DESC"""
CALLS = """
SELECT s.value AS name, COUNT(*) AS count, SUM(r.end - r.start) AS ns
FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId
GROUP BY s.value ORDER BY ns DESC, name"""
# 59: pushed and popped, 60: started and ended; text is inline or an id
NAMED = """
SELECT COALESCE(n.text, s.value) AS name, n.start, n.end, n.globalTid AS tid
FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
WHERE n.eventType IN (59, 60) AND n.end IS NOT NULL"""
MARKS = f"""
SELECT name, COUNT(*) AS count, SUM(end - start) AS ns FROM ({NAMED})
GROUP BY name ORDER BY ns DESC, name"""
# a kernel belongs to the ranges that were open when it was launched, be it
# by another thread (autograd's launches backward); call numbers repeat
# between processes, whose id is in the thread's upper bits
LAUNCHED = f"""
SELECT m.name AS name, COUNT(*) AS count, SUM(k.end - k.start) AS ns
FROM ({NAMED}) m
JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
  ON r.globalTid / 16777216 = m.tid / 16777216
  AND r.start >= m.start AND r.start < m.end
JOIN CUPTI_ACTIVITY_KIND_KERNEL k
  ON k.correlationId = r.correlationId
  AND k.globalPid / 16777216 = r.globalTid / 16777216
GROUP BY m.name ORDER BY ns DESC, name"""
TABLES = {
    "Kernels": KERNELS,
    "Copies": COPIES,
    "CUDA calls of the host": CALLS,
    "NVTX ranges, time on the host": MARKS,
    "NVTX ranges, time of the kernels launched inside": LAUNCHED,
}


def tables(path):
    """Return {title: rows} of a report's SQLite file; rows: name, count, ns.

    What was not recorded has no table in the file, and no rows here.

    Raises:
        bench.Refusal: no such file, or not a report.
    """
    if not Path(path).is_file():
        raise bench.Refusal(f"{path}: there is no such file")
    uri = Path(path).resolve().as_uri() + "?mode=ro"
    try:
        file = sqlite3.connect(uri, uri=True)
        try:
            names = file.execute("SELECT name FROM sqlite_master").fetchall()
            known = {name for (name,) in names}
            if "StringIds" not in known:
                raise bench.Refusal(
                    f"{path}: an SQLite file, but not of nsys (it has no "
                    "table StringIds)"
                )
            return {
                title: _rows(file, query) for title, query in TABLES.items()
            }
        finally:
            file.close()
    except sqlite3.Error as error:
        raise bench.Refusal(
            f"{path}: not an SQLite file of nsys ({error}); make one with "
            "nsys export --type=sqlite"
        ) from None


def _rows(file, query):
    try:
        cursor = file.execute(query)
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise
    keys = [column for column, *_ in cursor.description]
    return [dict(zip(keys, row, strict=True)) for row in cursor]


def read(path):
    """Return the tables of a report, exported first where it must be."""
    if Path(path).suffix != ".nsys-rep":
        return tables(path)
    if not Path(path).is_file():
        raise bench.Refusal(f"{path}: there is no such file")
    if not shutil.which("nsys"):
        raise bench.Refusal(
            f"{path}: only nsys reads this; where it is installed, "
            f"{' '.join(export(path, 'report.sqlite'))}"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.sqlite"
        _run(export(path, out))
        return tables(out)


def _run(words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise bench.Refusal(f"{' '.join(words[:2])} failed: {''.join(last)}")


TECHNIQUES = (nvtx_range, capture, command, export, tables)


def make_step(device, smoke=False):
    """Return a training step whose parts are NVTX ranges."""
    seeding.seed_everything(0)
    width = 64 if smoke or torch.device(device).type == "cpu" else 2048
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(width, width, device=device)

    def step():
        with nvtx_range("forward", device):
            loss = model(inputs).square().mean()
        with nvtx_range("backward", device):
            loss.backward()
        with nvtx_range("update", device):
            optimizer.step()
            optimizer.zero_grad()

    return step


def show(args, found, most=8):
    """Print the tables of a report; return their rows."""
    shown = []
    for title, rows in found.items():
        rows = [r | {"s": r["ns"] / 1e9} for r in rows[:most]]
        columns = ["name", "count", "s"] + ["bytes"] * (title == "Copies")
        if rows:
            shown += bench.report(args, rows, columns, title=title)
    return shown


def flags(parser):
    parser.add_argument(
        "--read", metavar="REPORT", help="a .nsys-rep or its .sqlite"
    )
    parser.add_argument("--profiled", action="store_true", help="the program")


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    if args.profiled:  # what nsys starts
        capture(
            make_step(args.device, args.smoke), WARM_UP, STEPS, args.device
        )
        return []
    if args.read:
        if args.save:
            raise bench.Refusal("--save keeps the lesson's rows, not --read's")
        return show(args, read(args.read))
    words = [sys.executable, "-m", MODULE, "--profiled"]
    words += ["--smoke"] * args.smoke + ["--device", str(args.device)]
    step = make_step(args.device, args.smoke)
    capture(step, 1, 1, args.device)
    timers.synchronize(args.device)
    if args.device.type != "cuda" or not shutil.which("nsys"):
        print(*args.sections, sep="\n")
        shown = command("report", ["python", *words[1:]])
        print("the command:", " \\\n    ".join(shown))
        print("then:", " ".join(export("report.nsys-rep", "report.sqlite")))
        print(f"and:  python -m {MODULE} --read report.sqlite")
        what = "nsys is not installed"
        if args.device.type != "cuda":
            what = "there is no CUDA device"
        bench.left_out(args, f"recording and reading a report: {what}")
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "report")
        _run(command(out, words))
        rows = show(args, read(out + ".nsys-rep"))
    counts = {row["name"]: row["count"] for row in rows}
    if any(counts.get(name) != STEPS for name in RANGES):
        print(f"not {STEPS} of each range: was the capture range missed?")
    return rows


if __name__ == "__main__":
    bench.run(main)
