"""2.1.2  CPU · CPU

Question  What do vector instructions, threads and shorter numbers give?
Expect    one call instead of n^3 steps of the interpreter: thousands of
          times; threads up to their number, once there is work for each;
          half the bytes up to twice the rate, where the CPU has the
          instructions, and far less where it imitates them
Run       python -m ch02_hardware.cpu_throughput [--smoke] [--save]
"""

import re
from pathlib import Path

import torch

from ch02_hardware.memory_hierarchy import thread_counts
from common import bench, ceilings, machine, tables

DTYPES = ("float64", "float32", "bfloat16", "float16")
# what Linux calls the instructions that multiply and add short numbers
INSTRUCTIONS = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    "float16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}


def python_loops(a, b):
    """The interpreter takes some 50 instructions around each multiply-add.

    Lists of rows, (n, k) and (k, m): 2 n k m FLOPs.
    """
    columns = list(zip(*b, strict=True))
    result = []
    for row in a:
        sums = []
        for column in columns:
            total = 0.0
            for x, y in zip(row, column, strict=True):
                total += x * y
            sums.append(total)
        result.append(sums)
    return result


def row_by_row(a, b, result):
    """A vector instruction works on 4 to 16 numbers, but b comes n times.

    NumPy arrays or tensors; the interpreter is left with n steps.
    """
    for i in range(len(a)):
        result[i] = a[i] @ b
    return result


def matrix_product(a, b):
    """A block of b stays in the cache, in registers even, for many rows.

    NumPy arrays or tensors; one step for the interpreter.
    """
    return a @ b


def with_threads(count, call, *inputs):
    """Each core has vector units of its own; work must be cut to use them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call(*inputs)
    finally:
        torch.set_num_threads(before)


TECHNIQUES = (python_loops, row_by_row, matrix_product, with_threads)


def product_flops(n, k, m):
    """Count a multiplication and an addition for each of n k m steps."""
    return 2 * n * k * m


def instructions(dtype, flags=None):
    """Say what multiplies numbers of ``dtype`` here.

    Args:
        dtype: its name.
        flags: the CPU's features; None reads them where Linux tells them.
    """
    if dtype not in INSTRUCTIONS:
        return torch.backends.cpu.get_cpu_capability()
    if not machine.card()["native_matmul"][dtype]:
        return "not by oneDNN: converted, or one by one"
    if flags is None:
        try:
            info = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            info = ""
        row = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.M)
        flags = row[1].split() if row else []
    found = next((i for i in INSTRUCTIONS[dtype] if i in flags), None)
    return found or "native, by another name"


def gemm_rows(threads, sizes, budget_s):
    """Return a row per dtype: FLOP/s of a square product by threads."""
    rows = []
    for dtype in DTYPES:
        row = {"name": dtype, "by": instructions(dtype)}
        for count in threads:
            row[f"{count}_flops"] = with_threads(
                count, ceilings.gemm_flops, dtype, "cpu", sizes, budget_s
            )
        rows.append(row)
    return rows


def figure(rows):
    """Draw GEMM rates by threads, and the ways of one product."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    kinds = [row for row in rows if "by" in row]
    threads = [int(k[:-6]) for k in kinds[0] if re.fullmatch(r"\d+_flops", k)]
    for row in kinds:
        rates = [row[f"{count}_flops"] for count in threads]
        if None in rates:
            continue
        (line,) = left.plot(
            threads, [r / 1e9 for r in rates], marker="o", label=row["name"]
        )
        ideal = [rates[0] * count / 1e9 for count in threads]
        left.plot(threads, ideal, color=line.get_color(), linestyle=":")
    left.set_yscale("log")
    left.set_xticks(threads)
    left.set_xlabel("threads (dotted: in proportion)")
    left.set_ylabel("GFLOP/s")
    left.legend(fontsize=8)
    ways = [row for row in rows if "per_call_flops" in row]
    places = range(len(ways))
    rates = [row["per_call_flops"] / row["median_s"] / 1e9 for row in ways]
    right.barh(places, rates, log=True)
    for place, rate in zip(places, rates, strict=True):
        right.text(rate, place, f" {rate:.3g}", va="center", fontsize=8)
    right.set_xlim(min(rates) / 3, 6 * max(rates))
    names = [f"{row['name']}, n = {row['n']}" for row in ways]
    right.set_yticks(places, names)
    right.invert_yaxis()
    right.set_xlabel("GFLOP/s")
    titles = (
        "Matrix products · 矩陣乘法",
        "One product, several ways · 幾種寫法",
    )
    for axes, title in zip((left, right), titles, strict=True):
        fonts = {"fontfamily": notebook.fonts()["font.family"]}
        axes.set_title(notebook.label(title), **fonts)
    return drawn


def compared(args, n, variants, title, expect):
    """Time ways of one (n, n) product of float64; keep n with the rows."""
    flops = product_flops(n, n, n)
    rows = bench.compare(
        args,
        variants,
        unit="product",
        tolerance=(1e-12, 1e-12),
        expect=expect,
        budget_s=5.0,
        title=f"{title}, n = {n}: {flops / 1e6:,.4g} MFLOP",
        extra={f"flops_{n}": flops},
    )
    return [row | {"n": n, "per_call_flops": flops} for row in rows]


def main(argv=None):
    args = bench.cli(__doc__, argv)
    args.device = torch.device("cpu")  # whatever else this machine has
    threads = thread_counts(machine.cores())
    sizes = (64,) if args.smoke else (1024, 2048)
    budget_s = 0.01 if args.smoke else min(0.5, 4 / len(threads))
    words = [f"{count} thread{'s' * (count > 1)}" for count in threads]
    columns = [f"{count}_flops" for count in threads]
    shown = dict(zip(columns, words, strict=True))
    rows = bench.report(
        args,
        gemm_rows(threads, sizes, budget_s),
        {"name": "numbers", **shown, "by": "multiplied by"},
        title=f"Square matrix products, best of n = {sizes}",
    )
    most = machine.cores()
    if not args.smoke:
        seen = {row["name"]: row[f"{most}_flops"] for row in rows}
        kept = {k: v for k, v in seen.items() if k in ceilings.DTYPES}
        machine.keep_peaks({"gemm_flops": kept}, "cpu", most)

    def pair(n):
        draw = torch.Generator().manual_seed(0)
        return [
            torch.randn(n, n, dtype=torch.float64, generator=draw)
            for _ in "ab"
        ]

    def variant(count, call, *inputs):
        def timed():
            product = with_threads(count, call, *inputs)
            return torch.as_tensor(product, dtype=torch.float64)

        return lambda: timed

    n = 16 if args.smoke else 112
    a, b = pair(n)
    lists, arrays = (a.tolist(), b.tolist()), (a.numpy(), b.numpy())
    ways = {
        "Python loops": variant(1, python_loops, *lists),
        "NumPy, row by row": variant(
            1, row_by_row, *arrays, torch.empty_like(a).numpy()
        ),
        "torch, one call": variant(1, matrix_product, a, b),
        f"one call, {most} threads": variant(most, matrix_product, a, b),
    }
    found = compared(
        args,
        n,
        ways,
        "A small product",
        f"{n:,} interpreted steps instead of {n**3:,}, then one",
    )
    n = 64 if args.smoke else 1024
    a, b = pair(n)
    grown = {
        f"torch, {word}": variant(count, matrix_product, a, b)
        for count, word in zip(threads, words, strict=True)
    }
    best = rows[0][f"{most}_flops"]
    large = compared(
        args,
        n,
        grown,
        "A large product",
        f"{tables.seconds(product_flops(n, n, n) / best)} at the best rate "
        f"of {most} threads above",
    )
    small_gain = found[-2]["median_s"] / found[-1]["median_s"]
    large_gain = large[0]["median_s"] / large[-1]["median_s"]
    print(
        f"{most} threads: {small_gain:.3g} times for the small product, "
        f"{large_gain:.3g} times for the large one"
    )
    return rows + found + large


if __name__ == "__main__":
    bench.run(main)
