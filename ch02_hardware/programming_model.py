"""2.3.3  Programming model · GPU 程式設計模型及其硬體對應

Question  Which program of a grid handles which element, and when do they run?
Expect    ceil(rows / block) × ceil(columns / block) programs, each element
          written once; time grows in steps: waves = ceil(programs / (SMs ×
          programs that one SM holds))
Run       python -m ch02_hardware.programming_model [--smoke] [--save]
"""

from __future__ import annotations  # tl.constexpr: also without Triton

import contextlib
import math
import os
import statistics
import textwrap

import torch

from ch02_hardware.gpu_structure import resident_warps
from common import bench, tables, timers

try:
    import triton
    import triton.language as tl
except ImportError:  # optional: see grid_model
    triton = tl = None


def doubled(x, y, owner, times, rows, columns, BLOCK: tl.constexpr):
    """A program learns its place in the grid, and works on one block.

    All programs run this same code, in any order.  The last block of a row
    or column reaches beyond the matrix: a mask keeps those lanes from memory.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    row = i * BLOCK + tl.arange(0, BLOCK)[:, None]  # (BLOCK, 1)
    column = j * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    inside = (row < rows) & (column < columns)
    at = row * columns + column
    value = tl.load(x + at, mask=inside)
    tl.store(y + at, 2 * value, mask=inside)
    program = i * tl.num_programs(1) + j
    tl.store(owner + at, program, mask=inside)
    tl.atomic_add(times + at, 1, mask=inside)


def walked(chain, ends, steps, BLOCK: tl.constexpr):
    """A program that waits for memory keeps its place on the SM."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    for _ in range(steps):
        at = tl.load(chain + at)
    tl.store(ends + program * BLOCK + tl.arange(0, BLOCK), at)


def grid_model(x, block):
    """A grid covers a matrix with blocks; the mask cuts the last ones off.

    Returns (2 x, the program of each element, how often it was written): what
    the kernel does, one program after another.
    """
    rows, columns = x.shape
    y = torch.empty_like(x)
    owner = torch.full(x.shape, -1, dtype=torch.int32)
    times = torch.zeros(x.shape, dtype=torch.int32)
    down, across = -(-rows // block), -(-columns // block)
    for program in range(down * across):
        i, j = program // across, program % across
        row = i * block + torch.arange(block)[:, None]  # (block, 1)
        column = j * block + torch.arange(block)[None, :]  # (1, block)
        inside = (row < rows) & (column < columns)
        at = (row * columns + column)[inside]
        y.view(-1)[at] = 2 * x.reshape(-1)[at]
        owner.view(-1)[at] = program
        times.view(-1)[at] += 1
    return y, owner, times


def waves(programs, sms, held):
    """Programs that find no free place wait until a wave has ended.

    ``held``: how many one SM has places for.
    """
    return -(-programs // (sms * held))


TECHNIQUES = (grid_model, waves)  # and the kernels, where is Triton


@contextlib.contextmanager
def interpreting(wanted):
    """Let Triton run kernels as Python meanwhile: a CPU has no compiler."""
    before = os.environ.get("TRITON_INTERPRET")
    if wanted:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if wanted:
            del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def by_kernel(x, block, function=doubled):
    """Return what ``grid_model`` does, written by a Triton kernel.

    A block has a power of two of rows.  What a kernel writes beyond the
    matrix lands in a border of its own and raises Mismatch.
    """
    rows, columns = x.shape
    grid = math.ceil(rows / block), math.ceil(columns / block)
    whole = grid[0] * block * (grid[1] * block + columns)
    kinds = (x.dtype, float("nan")), (torch.int32, -1), (torch.int32, 0)
    places = [
        torch.full((whole,), fill, dtype=kind, device=x.device)
        for kind, fill in kinds
    ]
    with interpreting(x.device.type == "cpu"):
        kernel = triton.jit(function)
        kernel[grid](x, *places, rows, columns, BLOCK=block)
    if places[2][x.numel() :].any():
        raise bench.Mismatch("the kernel wrote beyond the matrix")
    return tuple(place[: x.numel()].view(x.shape) for place in places)


def check(x, found):
    """Raise Mismatch unless all is doubled, each element written once."""
    y, _, times = found
    if not (times == 1).all():
        more, never = (times > 1).sum().item(), (times == 0).sum().item()
        raise bench.Mismatch(
            f"{more} elements were written more than once, {never} never"
        )
    if not torch.equal(y, 2 * x):
        raise bench.Mismatch("the kernel's answer is not torch's")


def grid_rows(owner, block):
    """Return a row per program: its place, and how many lanes it masked."""
    rows, columns = owner.shape
    across = math.ceil(columns / block)
    ids, counts = owner.unique(return_counts=True)
    return [
        {
            "program": program,
            "place": f"({program // across}, {program % across})",
            "elements": count,
            "masked": block**2 - count,
        }
        for program, count in zip(ids.tolist(), counts.tolist(), strict=True)
    ]


def figure(owner, block):
    """Draw which program handles which element, and the masked lanes."""
    from matplotlib.figure import Figure

    from common import notebook

    rows, columns = owner.shape
    down, across = math.ceil(rows / block), math.ceil(columns / block)
    drawn = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = drawn.subplots()
    shown = torch.full((down * block, across * block), float("nan"))
    shown[:rows, :columns] = owner % 10
    axes.imshow(shown.numpy(), cmap="tab10", vmin=-0.5, vmax=9.5, alpha=0.55)
    for program in range(down * across):
        i, j = program // across, program % across
        corner = j * block - 0.5, i * block - 0.5
        axes.add_patch(_box(corner, block, block, fill=False))
        seen = min(block, columns - j * block), min(block, rows - i * block)
        middle = corner[0] + seen[0] / 2, corner[1] + seen[1] / 2
        text = f"{program}\n({i}, {j})"
        axes.text(*middle, text, ha="center", va="center", fontsize=9)
    for corner, width, height in (
        ((columns - 0.5, -0.5), across * block - columns, down * block),
        ((-0.5, rows - 0.5), columns, down * block - rows),
    ):
        axes.add_patch(
            _box(corner, width, height, hatch="///", fill=False, lw=0)
        )
    edge = _box((-0.5, -0.5), columns, rows, fill=False, lw=2.5)
    axes.add_patch(edge)
    axes.set_xlabel("column (hatched: masked lanes)")
    axes.set_ylabel("row")
    title = "program of each element · 每個元素由哪個 program 處理"
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    axes.set_title(notebook.label(title), **fonts)
    return drawn


def _box(corner, width, height, **look):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, edgecolor="k", **look)


# --- the staircase -----------------------------------------------------------

THREADS = 512  # of a program of the staircase: 16 warps


def chip_of(device):
    """Return what an SM of this GPU has to give, for ``resident_warps``."""
    p = torch.cuda.get_device_properties(device)
    return {
        "sms": p.multi_processor_count,
        "threads": p.max_threads_per_multi_processor,
        "register_bytes": 4 * p.regs_per_multiprocessor,
        "shared_bytes": p.shared_memory_per_multiprocessor,
        "warp": p.warp_size,
        "blocks": 16,  # at least, on every GPU since 2012
    }


def staircase(args, chip):
    """Time growing grids; return (rows, programs that an SM holds)."""
    device, steps = args.device, 64 if args.smoke else 2048
    most = 4 * chip["sms"] * (chip["threads"] // THREADS)
    length = most * THREADS + THREADS  # some MiB: they stay in the L2 cache
    order = torch.randperm(length)
    chain = torch.empty(length, dtype=torch.int32)
    chain[order] = order.roll(-1).to(torch.int32)
    chain = chain.to(device)
    kernel = triton.jit(walked)

    def launch(programs, ends):
        return kernel[(programs,)](
            chain, ends, steps, BLOCK=THREADS, num_warps=THREADS // 32
        )

    ends = torch.empty(length, dtype=torch.int32, device=device)
    built = launch(1, ends)
    warps = resident_warps(THREADS, built.n_regs, built.metadata.shared, chip)
    held = warps // (THREADS // chip["warp"])
    places = chip["sms"] * held
    points = {k * places + d for k in range(1, 5) for d in (0, 1)}
    points |= set(range(places // 4, 4 * places, places // 4))
    rows = []
    for programs in sorted(points):
        launch(programs, ends)
        took = [
            timers.events(lambda n=programs: launch(n, ends), 1, device)
            for _ in range(3 if args.smoke else 9)
        ]
        row = {"programs": programs, "waves": waves(programs, places, 1)}
        rows.append(row | {"took_s": statistics.median(took)})
    one_s = next(r["took_s"] for r in rows if r["programs"] == places)
    for row in rows:
        row["predicted_s"] = row["waves"] * one_s
    return rows, held


def stairs(rows):
    """Draw the time of a grid by its number of programs."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "predicted_s" in row]
    counts = [row["programs"] for row in rows]
    took, wanted = (
        [1e3 * row[key] for row in rows] for key in ("took_s", "predicted_s")
    )
    drawn = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = drawn.subplots()
    axes.step(counts, wanted, label="waves × one wave")
    axes.plot(counts, took, "o", label="measured")
    axes.set(xlabel="programs in the grid", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False)
    return drawn


def by_formula(sms, held):
    """Return rows round a full wave: what the formula says of each."""
    places = sms * held
    return [
        {
            "programs": n,
            "waves": waves(n, sms, held),
            "busy_percent": 100 * n / (waves(n, sms, held) * places),
        }
        for n in (
            1,
            places // 2,
            places,
            places + 1,
            2 * places,
            8 * places + 1,
        )
    ]


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device, on_gpu = args.device, args.device.type == "cuda"
    if device.type == "mps":
        raise bench.Refusal("--device mps: Triton has no backend for it")
    block = 4
    rows, columns = (6, 9) if args.smoke else (10, 14)
    x = torch.arange(rows * columns, dtype=torch.float32, device=device)
    x = x.view(rows, columns)
    how = "one program after another, modelled in torch"
    compared = "the kernel's answer is torch's"
    if triton is None:
        words = "Triton is not installed (on Linux: pip install triton; for "
        words += "Windows there is a separate project, triton-windows): no "
        words += "kernel runs, a model of the grid does the same in torch"
        print(textwrap.fill(words, tables.WIDTH))
        compared = "no kernel ran: the model of the grid gives torch's answer"
        found = grid_model(x.cpu(), block)
    else:
        found = by_kernel(x, block)
        how = "compiled" if on_gpu else "in Triton's interpreter"
        model = grid_model(x.cpu(), block)
        if not torch.equal(found[1].cpu(), model[1]):
            raise bench.Mismatch("kernel and model deal elements differently")
    check(x.to(found[0].device), found)
    count = math.ceil(rows / block) * math.ceil(columns / block)
    table = bench.report(
        args,
        grid_rows(found[1].cpu(), block),
        {
            "program": "program",
            "place": "(i, j)",
            "elements": "elements",
            "masked": "masked lanes",
        },
        title=f"({rows}, {columns}) by blocks of ({block}, {block}), {how}",
        expect=f"{count} programs; {count * block**2 - rows * columns} of "
        f"{count * block**2} lanes masked",
        extra={"owner": found[1].tolist(), "block": block},
    )
    print(f"{compared}; each element was written exactly once")
    columns = {"programs": "programs", "waves": "waves"}
    if not on_gpu or triton is None:
        table += bench.report(
            args,
            by_formula(132, 4),
            columns | {"busy_percent": "% of places in use"},
            title="By the formula, not measured: 132 SMs hold 4 programs each",
        )
        bench.left_out(
            args, "the staircase of waves: it needs a GPU, and Triton"
        )
        return table
    chip = chip_of(device)
    found, held = staircase(args, chip)
    table += bench.report(
        args,
        found,
        columns | {"predicted_s": "waves × one wave", "took_s": "measured"},
        title=f"{chip['sms']} SMs hold {held} programs of {THREADS} threads",
    )
    ends = [
        row for row in found if row["programs"] % (chip["sms"] * held) == 1
    ]
    if ends:
        before = found[found.index(ends[0]) - 1]["took_s"]
        took = tables.seconds(ends[0]["took_s"])
        print(f"one program more: {tables.seconds(before)} become {took}")
    return table


if __name__ == "__main__":
    bench.run(main)
