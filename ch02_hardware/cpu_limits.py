"""2.3.1  What a CPU cannot do · CPU 的局限性

Question  From which size on is a GPU quicker, its copies included?
Expect    n x n products: copies grow with n^2, arithmetic with n^3, so there
          is a size; sums: both grow alike, so a GPU gains nothing unless its
          link is quicker than the CPU's memory, or the data stay there
Run       python -m ch02_hardware.cpu_limits [--gpu H200] [--smoke] [--save]
"""

import functools

import torch

from ch02_hardware import gpu_structure
from common import bench, ceilings, machine, timers

# what ordering a kernel and waiting for it takes at least, where no GPU is
# at hand to ask; host clocks of tiny kernels show 5 to 20 µs
ORDER_S = 1e-5
SIZES = [round(2 ** (k / 4)) for k in range(16, 57)]  # 16 to 16384
USED = 2048  # n at which uses are counted
# n: (function, FLOPs, numbers that go there, numbers that come back)
OPERATORS = {
    "a + b": (torch.add, lambda n: n**2, 2, 1),
    "a @ b": (torch.mm, lambda n: 2 * n**3, 2, 1),
}


def intensity(flops, moved):
    """A unit of data is fetched once: so many FLOPs are done with a byte."""
    return flops / moved


def least_s(flops, moved, flops_per_s, bytes_per_s):
    """Arithmetic and memory work at once: the slower of the two decides."""
    return max(flops / flops_per_s, moved / bytes_per_s)


def there_and_back(call, device, *inputs):
    """What a GPU works on, and what it found out, must cross the link."""
    there = [tensor.to(device) for tensor in inputs]
    return call(*there).cpu()


def overtaken_at(sizes, here_s, there_s):
    """From some size on more arithmetic pays for the copies.

    Returns the first size from which ``there`` stays below ``here`` (lists
    of seconds), or None.
    """
    found = None
    for size, here, there in zip(sizes, here_s, there_s, strict=True):
        if there >= here:
            found = None
        elif found is None:
            found = size
    return found


def uses_per_copy(copy_s, here_s, there_s):
    """A copy is paid once and used often: the uses that earn it back.

    Seconds of the copies, and of one use here and there; None: never.
    """
    gain = here_s - there_s
    return -int(-copy_s // gain) if gain > 0 else None


TECHNIQUES = (
    intensity,
    least_s,
    there_and_back,
    overtaken_at,
    uses_per_copy,
)


def work(name, n):
    """Return (FLOPs, bytes there, bytes back) of (n, n) float32 operands."""
    _, flops, inward, outward = OPERATORS[name]
    return flops(n), 4 * inward * n**2, 4 * outward * n**2


def gpu(name):
    """Return the ceilings of a card by its data sheet: nothing beats them."""
    card = gpu_structure.known(name)
    return {
        "name": name,
        "flops_per_s": card["float32_flops"],
        "bytes_per_s": card["memory_bytes_per_s"],
        "in_per_s": card["link_bytes_per_s"],
        "out_per_s": card["link_bytes_per_s"],
        "order_s": ORDER_S,
    }


def measured_gpu(device):
    """Return the ceilings of this machine's GPU, as measured."""
    peaks = machine.peaks(device)
    one = torch.ones(1, device=device)
    order = functools.partial(timers.wall, lambda: one.add_(1), 1, device)
    order()
    return {
        "name": torch.cuda.get_device_name(device),
        "flops_per_s": peaks["gemm_flops"]["float32"],
        "bytes_per_s": peaks["copy_bytes_per_s"],
        "in_per_s": peaks["host_to_device_bytes_per_s"],
        "out_per_s": peaks["device_to_host_bytes_per_s"],
        "order_s": min(order() for _ in range(20)),
    }


def predicted(name, n, cpu, card):
    """Return seconds: here, on the GPU, and of the copies there and back."""
    flops, inward, outward = work(name, n)
    moved = inward + outward
    here = least_s(flops, moved, *cpu)
    rates = card["flops_per_s"], card["bytes_per_s"]
    there = card["order_s"] + least_s(flops, moved, *rates)
    copies = inward / card["in_per_s"] + outward / card["out_per_s"]
    return here, there, copies


def crossing(card, cpu, sizes=SIZES):
    """Return a row: where each operator is overtaken by this GPU."""
    row = {"name": card["name"], "link_bytes_per_s": card["in_per_s"]}
    for name in OPERATORS:
        times = [predicted(name, n, cpu, card) for n in sizes]
        here = [h for h, _, _ in times]
        resident = [t for _, t, _ in times]
        copied = [t + c for _, t, c in times]
        row[f"{name} copied"] = overtaken_at(sizes, here, copied) or "never"
        row[f"{name} resident"] = overtaken_at(sizes, here, resident)
        here_s, there_s, copy_s = predicted(name, USED, cpu, card)
        row[f"{name} uses"] = uses_per_copy(copy_s, here_s, there_s)
    return row


def inputs(n):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, n, generator=draw) for _ in "ab"]


def on_this_cpu(cpu, sizes, budget_s):
    """Return rows: what bounds each operator here, and how near it comes."""
    rows = []
    for name in OPERATORS:
        for n in sizes:
            flops, inward, outward = work(name, n)
            a, b = inputs(n)
            out = torch.empty_like(a)
            call = functools.partial(OPERATORS[name][0], a, b, out=out)
            taken = ceilings.shortest(call, a.device, budget_s)
            bound = least_s(flops, inward + outward, *cpu)
            arithmetic = flops / cpu[0] == bound
            rows.append(
                {
                    "name": name,
                    "n": n,
                    "flops": flops,
                    "moved_bytes": inward + outward,
                    "intensity": intensity(flops, inward + outward),
                    "limit": "arithmetic" if arithmetic else "memory",
                    "least_s": bound,
                    "taken_s": taken,
                }
            )
    return rows


def figure(rows):
    """Draw predicted seconds against size, and where the lines cross."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(drawn.subplots(1, 2), OPERATORS, strict=True):
        lines = [r for r in rows if r.get("curve") == name]
        n = [row["n"] for row in lines]
        for key, word, style in (
            ("here_s", "CPU, predicted", "C0-"),
            ("copied_s", "GPU, copies included", "C1-"),
            ("there_s", "GPU, data there", "C1--"),
        ):
            axes.loglog(n, [row[key] for row in lines], style, label=word)
        dots = [r for r in rows if r["name"] == name and "taken_s" in r]
        taken = [row["taken_s"] for row in dots]
        axes.loglog(
            [r["n"] for r in dots], taken, "C0o", label="CPU, measured"
        )
        dots = [r for r in lines if r.get("gpu_s")]
        if dots:
            taken = [row["gpu_s"] for row in dots]
            axes.loglog(
                [r["n"] for r in dots], taken, "C1o", label="GPU, measured"
            )
        where = [row["n"] for row in lines if row["copied_s"] < row["here_s"]]
        if where:
            axes.axvline(where[0], color="0.6", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("n")
        axes.set_ylabel("s")
        axes.set_title(f"{name}: {lines[0]['name']}", fontsize=10)
        axes.legend(fontsize=8)
    title = notebook.label("From which size on? · 多大才值得？")
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    drawn.suptitle(title, **fonts)
    return drawn


def on_both(args, n):
    """Compare the product here, there and back, and with the data there."""
    a, b = inputs(n)
    there = [t.to(args.device) for t in (a, b)]

    def copied():
        return there_and_back(torch.mm, args.device, a, b)

    return bench.compare(
        args,
        {
            "CPU": lambda: functools.partial(torch.mm, a, b),
            "GPU, copies included": lambda: copied,
            "GPU, data there": lambda: functools.partial(torch.mm, *there),
        },
        tolerance=(1e-4, 1e-3),
        budget_s=2.0,
        title=f"a @ b, n = {n}",
    )


def cpu_ceilings(smoke=False):
    """Return this CPU's FLOP/s of float32 and bytes per second."""
    if smoke:  # measuring well takes 3 s
        rates = ceilings.bandwidth(torch.device("cpu"), 2**20, 0.0)
        flops_per_s = ceilings.gemm_flops(sizes=(64,), budget_s=0.01)
        return flops_per_s, rates["copy_bytes_per_s"]
    peaks = machine.peaks("cpu")
    return peaks["gemm_flops"]["float32"], peaks["copy_bytes_per_s"]


def curves(cpu, card, device, sizes, budget_s):
    """Return rows: predicted seconds by size, measured ones on a GPU."""
    rows = []
    for name, (call, *_) in OPERATORS.items():
        for n in SIZES:
            here_s, there_s, copy_s = predicted(name, n, cpu, card)
            row = {"curve": name, "name": card["name"], "n": n}
            row |= {"here_s": here_s, "there_s": there_s}
            row["copied_s"] = there_s + copy_s
            if device.type == "cuda" and n in sizes:
                crossed = functools.partial(
                    there_and_back, call, device, *inputs(n)
                )
                row["gpu_s"] = ceilings.shortest(crossed, device, budget_s)
            rows.append(row)
    return rows


def main(argv=None):
    def add(parser):
        names = list(gpu_structure.CARDS)
        parser.add_argument("--gpu", choices=names, default="A100 SXM4 80GB")

    args = bench.cli(__doc__, argv, add)
    cuda, cpu = args.device.type == "cuda", cpu_ceilings(args.smoke)
    sizes = SIZES[:3] if args.smoke else (64, 256, 1024, 2048)
    budget_s = 0.0 if args.smoke else 0.4
    here = bench.report(
        args,
        on_this_cpu(cpu, sizes, budget_s),
        {
            "name": "operator",
            "n": "n",
            "intensity": "FLOP/B",
            "limit": "limited by",
            "least_s": "at least",
            "taken_s": "measured",
        },
        title="On this CPU (what a cache holds may be quicker than memory)",
        expect=f"{args.expect}; this CPU is limited by its memory below "
        f"{cpu[0] / cpu[1]:.3g} FLOP/B",
    )
    cards = [gpu(name) for name in gpu_structure.CARDS]
    if cuda:
        cards.insert(0, measured_gpu(args.device))
    card = cards[0] if cuda else gpu(args.gpu)
    lines = curves(cpu, card, args.device, sizes, budget_s)
    rows = here + bench.report(
        args,
        [crossing(c, cpu) for c in cards],
        {
            "name": "GPU",
            "link_bytes_per_s": "link",
            "a @ b copied": "a @ b, copied",
            "a @ b resident": "data there",
            "a + b copied": "a + b, copied",
            "a + b resident": "data there",
            "a + b uses": "uses per copy",
        },
        title="The n from which a GPU is quicker than this CPU: "
        + ("the first as measured, others" if cuda else "GPUs")
        + " by their data sheets",
        extra={"curves": lines},
    )
    if cuda:
        for n in sizes[1:]:
            rows += on_both(args, n)
    else:
        bench.left_out(args, "the same measured on a GPU: there is none here")
    return rows + lines


if __name__ == "__main__":
    bench.run(main)
