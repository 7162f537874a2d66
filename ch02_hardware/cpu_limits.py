"""2.3.1  What a CPU cannot do · CPU 的局限性

Question  From which size on is a GPU quicker, its copies included?
Expect    n x n products: copies grow with n^2, arithmetic with n^3, so there
          is a size; sums: both grow alike, so a GPU gains nothing unless its
          link is quicker than what holds them here (a cache or the memory),
          or the data stay there
Run       python -m ch02_hardware.cpu_limits [--gpu H200] [--smoke] [--save]
"""

import functools
import math
import textwrap

import torch

from ch02_hardware import gpu_structure
from common import bench, ceilings, machine, tables, timers

# what ordering a kernel and waiting for it takes at least, and a copy before
# its first byte, where no GPU is at hand to ask; host clocks of tiny kernels
# and of tiny copies show 5 to 20 µs
ORDER_S = START_S = 1e-5
SIZES = [round(2 ** (k / 4)) for k in range(16, 57)]  # 16 to 16384
MOST = 2048  # n of the largest operands that are measured
SHOWN = 64, 256, 1024, MOST
# n: (function, FLOPs, matrices that go there, matrices that come back)
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


def copies(name):
    """Return how many copies an operator takes: one for each matrix."""
    return sum(OPERATORS[name][2:])


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
        "start_s": START_S,
    }


def measured_gpu(device):
    """Return the ceilings of this machine's GPU, as measured."""
    peaks = machine.peaks(device)
    one, here = torch.ones(1, device=device), torch.ones(1)

    def least(call):
        call()
        return min(timers.wall(call, 1, device) for _ in range(20))

    return {
        "name": torch.cuda.get_device_name(device),
        "flops_per_s": peaks["gemm_flops"]["float32"],
        "bytes_per_s": peaks["copy_bytes_per_s"],
        "in_per_s": peaks["host_to_device_bytes_per_s"],
        "out_per_s": peaks["device_to_host_bytes_per_s"],
        "order_s": least(lambda: one.add_(1)),
        "start_s": least(lambda: here.to(device)),
    }


def predicted(name, n, card):
    """Return seconds on the GPU, and of the copies there and back."""
    flops, inward, outward = work(name, n)
    rates = card["flops_per_s"], card["bytes_per_s"]
    there = card["order_s"] + least_s(flops, inward + outward, *rates)
    moved = inward / card["in_per_s"] + outward / card["out_per_s"]
    return there, copies(name) * card["start_s"] + moved


def crossing(card, here):
    """Return a row: from which n on this GPU overtakes each operator.

    ``here``: {operator: {n: seconds measured on this CPU}}.  How quick it is
    while a cache holds the operands no formula here knows, so nothing is said
    beyond the largest n measured.  Uses are counted at that n.
    """
    row = {"name": card["name"], "link_bytes_per_s": card["in_per_s"]}
    for name, times in here.items():
        sizes, last = sorted(times), max(times)
        here_s = [times[n] for n in sizes]
        found = {n: predicted(name, n, card) for n in sizes}
        there = {
            "copied": {n: sum(pair) for n, pair in found.items()},
            "resident": {n: pair[0] for n, pair in found.items()},
        }
        for kind, there_s in there.items():
            at = overtaken_at(sizes, here_s, list(there_s.values()))
            row[f"{name} {kind}"] = at or f"not by {last}"
            start = card["order_s"]
            if kind == "copied":
                start += copies(name) * card["start_s"]
            row[f"{name} {kind} by start"] = bool(at) and (
                start > there_s[at] / 2
            )
        there_s, copy_s = found[last]
        row[f"{name} uses"] = uses_per_copy(copy_s, times[last], there_s)
    return row


def starts(rows):
    """Return a sentence on the crossings that launches decide, or None."""
    cases = []
    for name in OPERATORS:
        for kind in ("copied", "resident"):
            some = [row for row in rows if row[f"{name} {kind} by start"]]
            if some:
                words = {"copied": "copied", "resident": "data there"}[kind]
                cases.append(f"{name}, {words} ({len(some)} of {len(rows)})")
    if not cases:
        return None
    return (
        "more than half of the GPU's time there is starts, of a kernel and of "
        f"the copies, if any, which alone decide: {'; '.join(cases)}"
    )


def assumed(cuda):
    """Return a sentence on what the copies' price leaves out."""
    start = tables.seconds(START_S)
    source = "as measured here, or " * cuda + f"{start} by assumption"
    return (
        "each matrix that crosses is priced at the start of a copy "
        f"({source}, as for a kernel) and at the link's rate, which only "
        "pinned memory reaches: there_and_back's .to() copies pageable "
        "memory, which takes longer"
    )


def contradictions(row, lines):
    """Return a sentence per operator that was measured otherwise than ``row``.

    ``lines``: rows of ``curves``, of the same GPU.
    """
    found = {}
    for line in lines:
        name, here_s, there_s = line["curve"], line["cpu_s"], line.get("gpu_s")
        if not here_s or not there_s:
            continue
        at = row[f"{name} copied"]
        wins = isinstance(at, int) and line["n"] >= at
        if wins != (there_s < here_s):
            found.setdefault(name, []).append(str(line["n"]))
    return [
        f"measured otherwise than this table says ({row['name']}, copies "
        f"included): {name} at n = {', '.join(sizes)}"
        for name, sizes in found.items()
    ]


def inputs(n):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, n, generator=draw) for _ in "ab"]


def swept(sizes, budget_s, rounds):
    """Return {operator: {n: seconds}} on this CPU, the least of some rounds.

    Less work never takes longer: a neighbour's burst that hit a small n
    shows where a larger one was quicker, and that one's time is taken.
    """
    taken = {name: dict.fromkeys(sizes, math.inf) for name in OPERATORS}
    for _ in range(rounds):
        for name, times in taken.items():
            least = math.inf
            for n in sorted(sizes, reverse=True):
                a, b = inputs(n)
                call = functools.partial(
                    OPERATORS[name][0], a, b, out=torch.empty_like(a)
                )
                took = ceilings.shortest(call, a.device, budget_s)
                times[n] = least = min(least, times[n], took)
    return taken


def on_this_cpu(cpu, here, shown):
    """Return rows: what bounds each operator here, and how near it comes."""
    rows = []
    for name, times in here.items():
        for n in shown:
            flops, inward, outward = work(name, n)
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
                    "taken_s": times[n],
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
        for key, word, style in (
            ("here_s", "CPU, predicted", "C0-"),
            ("copied_s", "GPU, copies included", "C1-"),
            ("there_s", "GPU, data there", "C1--"),
            ("cpu_s", "CPU, measured", "C0."),
            ("gpu_s", "GPU, measured", "C1o"),
        ):
            some = [row for row in lines if row.get(key)]
            if some:
                taken = [row[key] for row in some]
                n = [row["n"] for row in some]
                axes.loglog(n, taken, style, label=word)
        key, drawn_gpu = f"{name} copied", lines[0]["name"]
        some = [r for r in rows if key in r and r["name"] == drawn_gpu]
        at = some[0][key]
        if isinstance(at, int):
            axes.axvline(at, color="0.6", linestyle=":")
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


def curves(cpu, card, device, here, budget_s):
    """Return rows: predicted seconds by size, beside those measured.

    What this CPU takes is predicted where its arithmetic decides, and where
    the caches are too small for the data, so that the memory's rate does.
    """
    rows, cache = [], ceilings.cache_bytes()
    for name, (call, *_) in OPERATORS.items():
        for n in SIZES:
            flops, inward, outward = work(name, n)
            moved = inward + outward
            there_s, copy_s = predicted(name, n, card)
            bound = least_s(flops, moved, *cpu)
            # no formula here knows how quick a cache is
            unknown = moved <= cache and bound > flops / cpu[0]
            row = {"curve": name, "name": card["name"], "n": n}
            row["here_s"] = None if unknown else bound
            row |= {"there_s": there_s, "copied_s": there_s + copy_s}
            row["cpu_s"] = here[name].get(n)
            if device.type == "cuda" and n in here[name]:
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
    sizes = SIZES[:3] if args.smoke else [n for n in SIZES if n <= MOST]
    shown = sizes if args.smoke else SHOWN
    budget_s = 0.0 if args.smoke else 0.02
    here = swept(sizes, budget_s, 1 if args.smoke else 4)
    rows = bench.report(
        args,
        on_this_cpu(cpu, here, shown),
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
    lines = curves(cpu, card, args.device, here, budget_s)
    found = [crossing(c, here) for c in cards]
    rows += bench.report(
        args,
        found,
        {
            "name": "GPU",
            "link_bytes_per_s": "link",
            "a @ b copied": "a @ b, copied",
            "a @ b resident": "data there",
            "a + b copied": "a + b, copied",
            "a + b resident": "data there",
            "a + b uses": "uses per copy",
        },
        title="The n from which a GPU is quicker than this CPU (as measured): "
        + ("the first's ceilings, others" if cuda else "GPUs")
        + " by their data sheets",
        extra={"curves": lines},
    )
    notes = [assumed(cuda)] + [starts(found)] * bool(starts(found))
    if cuda:
        notes += contradictions(found[0], lines)
    for note in notes:
        print(textwrap.fill(note, tables.WIDTH))
    if cuda:
        for n in shown[1:]:
            rows += on_both(args, n)
    else:
        bench.left_out(args, "the same measured on a GPU: there is none here")
    return rows + lines


if __name__ == "__main__":
    bench.run(main)
