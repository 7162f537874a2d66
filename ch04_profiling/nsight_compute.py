"""4.4.2  Nsight Compute · Nsight Compute

Question  What bounds one kernel, and which section of ncu answers which
          question about it?
Expect    y = a x + b of n floats: 2 n FLOPs and 8 n bytes, so DRAM near its
          limit and the arithmetic units idle, no faster than 8 n bytes by
          the bandwidth; a product of n × n matrices: 2 n³ FLOPs against
          12 n² bytes, so the other way round
Run       python -m ch04_profiling.nsight_compute [--smoke] [--save]
          [--read OUTPUT.csv]

Where ncu is not installed, or may not read the GPU's counters, that is said
and the exact command is printed. --read shows an output of your own, made
with ncu --csv --page details.
"""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from common import bench, machine

MODULE = "ch04_profiling.nsight_compute"
QUESTIONS = {
    "SpeedOfLight": "is it bound by computing, by memory, or by neither?",
    "MemoryWorkloadAnalysis": "which level of memory, and do caches help?",
    "ComputeWorkloadAnalysis": "how busy are the pipes, tensor cores' too?",
    "Occupancy": "are there enough warps, and what limits their number?",
    "LaunchStats": "which grid, registers and shared memory?",
    "SchedulerStats": "how often has no warp anything to issue?",
    "WarpStateStats": "what do warps wait for?",
}
NO_COUNTERS = (
    "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM): start it "
    "as root, or have the administrator load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0; in a container, it needs "
    "--cap-add=SYS_ADMIN"
)


def measured_range(operation, device, warm_up=3):
    """A profiler of kernels runs each many times: name the one you mean.

    The first calls load code and choose algorithms, and are left out.
    """
    for _ in range(warm_up):
        operation()
    if torch.device(device).type != "cuda":
        return operation()
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range("measured"):
        result = operation()
    torch.cuda.synchronize()
    return result


def command(sections, program):
    """Return the words that measure the kernels of the range "measured".

    Counters do not fit into one run: ncu repeats the kernel for each group
    of them, from the same memory, with caches emptied and clocks fixed, so
    that its durations are comparable, and longer than those of the program.
    """
    words = ["ncu", "--csv", "--page", "details", "--print-units", "base"]
    for section in sections:
        words += ["--section", section]
    words += ["--nvtx", "--nvtx-include", "measured/"]
    return [*words, "--target-processes", "all", *program]


def parse(text):
    """Read ncu's CSV: {(number, kernel): {(section, metric): value}}.

    ncu and the program write other lines before and between; numbers come
    with thousands separators.  A value that is no number stays text; units
    are left out (--print-units base).
    """
    import csv
    import io

    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith('"ID",')]
    if not heads:
        return {}
    table = [line for line in lines[heads[0] :] if line.startswith('"')]
    found = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        if not row.get("Metric Name"):  # a rule's advice, not a metric
            continue
        value = row["Metric Value"].replace(",", "")
        try:
            value = float(value)
        except ValueError:
            pass
        kernel = found.setdefault((row["ID"], row["Kernel Name"]), {})
        kernel[row["Section Name"], row["Metric Name"]] = value
    return found


def bound(compute, memory, least=60.0):
    """What is above 60% of its limit bounds a kernel; if nothing, waiting.

    ``compute`` and ``memory`` are percentages of what the GPU can do.
    """
    if max(compute, memory) < least:
        return "latency"
    return "compute" if compute > memory else "memory"


TECHNIQUES = (measured_range, command, parse, bound)

SPEED = "GPU Speed Of Light Throughput"
METRICS = {
    "compute_percent": [(SPEED, "Compute (SM) Throughput"), (SPEED, "SM [%]")],
    "memory_percent": [(SPEED, "Memory Throughput"), (SPEED, "Memory [%]")],
    "dram_percent": [(SPEED, "DRAM Throughput")],
    "duration_ns": [(SPEED, "Duration")],
    "l2_hit_percent": [("Memory Workload Analysis", "L2 Hit Rate")],
    "occupancy_percent": [("Occupancy", "Achieved Occupancy")],
    "registers": [("Launch Statistics", "Registers Per Thread")],
}


def rows_of(text):
    """Return a row per measured kernel, from ncu's output.

    Raises:
        bench.Refusal: no permission, nothing measured, or no such output.
    """
    if "ERR_NVGPUCTRPERM" in text:
        raise bench.Refusal(NO_COUNTERS)
    kernels = parse(text)
    if not kernels:
        wrong = [x for x in text.splitlines() if x.startswith("==ERROR==")]
        said = f" ({wrong[0][9:].strip()})" if wrong else ""
        if "No kernels were profiled" in text:
            said = " (no kernel was launched in the measured range)"
        raise bench.Refusal(
            f"no metric in ncu's output{said}; it is read as CSV: "
            "ncu --csv --page details"
        )
    rows = []
    for (_, kernel), metrics in kernels.items():
        row = {"name": _short(kernel)}
        for key, places in METRICS.items():
            values = [metrics[p] for p in places if p in metrics]
            numbers = [v for v in values if isinstance(v, float)]
            row[key] = numbers[0] if numbers else None
        if None not in (row["compute_percent"], row["memory_percent"]):
            row["bound_by"] = bound(
                row["compute_percent"], row["memory_percent"]
            )
        else:
            row["bound_by"] = None
        ns = row.pop("duration_ns")
        rows.append(row | {"duration_s": ns and ns / 1e9})
    return rows


def _short(kernel):
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if len(name) <= 40 else name[:39] + "…"


def operations(device, smoke=False):
    """Return {name: (operation, bytes, FLOPs)}: one kernel each."""
    on_gpu = torch.device(device).type == "cuda"
    n = 2**26 if on_gpu and not smoke else 2**16
    width = 4096 if on_gpu and not smoke else 64
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=draw).to(device)
    a = torch.randn(width, width, generator=draw).to(device)
    return {
        "add": (lambda: torch.add(x, x, alpha=2.0), 8 * n, 2 * n),
        "product": (lambda: a @ a, 12 * width**2, 2 * width**3),
    }


def predictions(args, found):
    """Return what each operation should be bound by, from its sizes."""
    if args.smoke:  # measuring peaks takes seconds
        return [
            {"name": name, "bytes": size, "work": work}
            for name, (_, size, work) in found.items()
        ]
    peaks, rows = machine.peaks(args.device), []
    for name, (_, size, work) in found.items():
        memory_s = size / peaks["copy_bytes_per_s"]
        compute_s = work / peaks["gemm_flops"]["float32"]
        kind = "compute" if compute_s > memory_s else "memory"
        rows.append(
            {
                "name": name,
                "bytes": size,
                "work": work,
                "memory_s": memory_s,
                "compute_s": compute_s,
                "predicted_bound": kind,
            }
        )
    return rows


def show(args, rows):
    columns = {
        "name": "kernel",
        "duration_s": "duration",
        "compute_percent": "compute %",
        "memory_percent": "memory %",
        "dram_percent": "DRAM %",
        "l2_hit_percent": "L2 hits %",
        "occupancy_percent": "occup. %",
        "registers": "registers",
        "bound_by": "bound by",
    }
    return bench.report(args, rows, columns, title="Measured by ncu")


def flags(parser):
    parser.add_argument("--read", metavar="CSV", help="an output of ncu --csv")
    parser.add_argument("--profiled", metavar="NAME", help="what ncu starts")


def output_of(path):
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise bench.Refusal(f"--read {path}: {error.strerror}") from None


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    if args.read:
        if args.save:
            raise bench.Refusal("--save keeps the lesson's rows, not --read's")
        return show(args, rows_of(output_of(args.read)))
    found = operations(args.device, args.smoke)
    if args.profiled:
        if args.profiled not in found:
            raise bench.Refusal(f"--profiled: one of {', '.join(found)}")
        measured_range(found[args.profiled][0], args.device)
        return []
    rows = predictions(args, found)
    bench.report(args, rows, title="Predicted from sizes and measured peaks")
    asked = [{"section": k, "question": v} for k, v in QUESTIONS.items()]
    print(bench.table(asked, title="\nWhich section answers which question"))
    shown = ["python", "-m", MODULE, "--profiled", "add"]
    shown = " ".join(command(["SpeedOfLight"], shown))
    print("\nthe command:", textwrap.fill(shown, 80).replace("\n", " \\\n  "))
    missing = None if shutil.which("ncu") else "ncu is not installed"
    if args.device.type != "cuda":
        missing = "there is no CUDA device"
    if missing:
        bench.left_out(args, f"counters of a kernel: {missing}")
        return rows
    for name in found:
        words = [sys.executable, "-m", MODULE, "--profiled", name]
        words += ["--smoke"] * args.smoke + ["--device", str(args.device)]
        done = subprocess.run(
            command(QUESTIONS, words), capture_output=True, text=True
        )
        try:
            measured = rows_of(done.stdout + done.stderr)
        except bench.Refusal as refusal:  # the prediction stands without
            bench.left_out(args, f"counters of a kernel: {refusal}")
            return rows
        rows += show(args, measured)
    return rows


if __name__ == "__main__":
    bench.run(main)
