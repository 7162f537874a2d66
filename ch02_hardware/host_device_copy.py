"""2.3.5  Host ↔ device transfer · 顯示記憶體與記憶體間的資料傳輸

Question  How long do n bytes take over the link to the GPU, and what decides?
Expect    start + n / bandwidth: below start × bandwidth bytes the start is
          more than half of it; pageable memory adds a copy by the CPU, so
          only pinned memory comes near the link; on a CPU there is no link:
          one place in memory is copied to another, quicker than memory
          while the caches hold both
Run       python -m ch02_hardware.host_device_copy [--smoke] [--save]
"""

import statistics

import torch

from ch02_hardware.memory_hierarchy import room_bytes
from common import bench, machine, tables, timers


def from_pageable(there, host):
    """The driver copies pageable memory to a pinned buffer of its own first.

    The copy engine reads physical addresses, and the system may move or
    swap out a page that is not locked.
    """
    there.copy_(host)
    return there


def pinned_like(host):
    """Pages that are locked stay where they are: the engine reads them."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


def fitted(sizes, times):
    """A transfer costs a start, and then the same for every byte.

    Returns (seconds of the start, bytes per second) with the least squares
    of relative errors, so that the shortest copy counts like the longest.
    """
    n = torch.tensor(sizes, dtype=torch.float64)
    t = torch.tensor(times, dtype=torch.float64)
    scale = n.max()
    terms = torch.stack([torch.ones_like(n), n / scale], dim=1) / t[:, None]
    ones = torch.ones(len(t), 1, dtype=torch.float64)
    start, per = torch.linalg.lstsq(terms, ones).solution.flatten().tolist()
    if start < 0 or per <= 0:  # noise; then one term alone explains it best
        only = terms[:, 1] if start < 0 else terms[:, 0]
        best = (only.sum() / (only * only).sum()).item()
        start, per = (0.0, best) if start < 0 else (best, 0.0)
    return start, scale.item() / per if per else float("inf")


def half_way(start_s, bytes_per_s):
    """At this size the start takes as long as all the bytes that follow."""
    return start_s * bytes_per_s


def link_bytes_per_s(generation, lanes):
    """A PCI Express lane carries so many bits per second, each way.

    Generations 1 and 2 send 10 bits for 8, the later ones 130 for 128 and
    the sixth 256 bytes for 242; packets' headers take some more.
    """
    gigabits = {1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64}[generation]
    share = {1: 8 / 10, 2: 8 / 10, 6: 242 / 256}.get(generation, 128 / 130)
    return lanes * gigabits * 1e9 * share / 8


TECHNIQUES = (from_pageable, pinned_like, fitted, half_way, link_bytes_per_s)


def sizes(args, cache=0, room=2**40):
    """Return the bytes of each copy: by fours, on a CPU three beyond caches.

    ``room``: bytes that source and destination may take together.
    """
    if args.smoke:
        return [2**12, 2**16, 2**20]
    if args.device.type != "cpu":
        return [2**k for k in range(12, 29, 2)]
    first = 1 << (max(cache, 2**26) // 2).bit_length()
    found = [2**k for k in range(12, 27, 2) if 2**k < first]
    beyond = [first << k for k in range(3)]
    return found + [n for n in beyond if n <= min(2**30, room // 2)]


def pairs(device, size):
    """Return {(direction, memory): (destination, source)}, all different."""
    draw = torch.Generator().manual_seed(size)
    host = torch.randint(2**60, (size // 8,), generator=draw)
    if device.type == "cpu":
        return {("host to host", "pageable"): (torch.zeros_like(host), host)}
    there = torch.zeros_like(host, device=device)
    up, down = "host to device", "device to host"
    found = {(up, "pageable"): (there, host)}
    if device.type == "cuda":
        found[up, "pinned"] = torch.zeros_like(there), pinned_like(host)
    resident = host.to(device)
    found[down, "pageable"] = torch.zeros_like(host), resident
    if device.type == "cuda":
        found[down, "pinned"] = pinned_like(torch.zeros_like(host)), resident
    return found


def measured(args, size):
    """Copy ``size`` bytes each way in turn; return a row for each way."""
    found = pairs(args.device, size)
    calls = [
        lambda there=there, host=host: from_pageable(there, host)
        for there, host in found.values()
    ]
    samples = timers.take_turns(
        calls,
        args.device,
        rounds=3 if args.smoke else 20,
        budget_s=0.0 if args.smoke else 0.4,
    )
    rows = []
    for i, (names, (there, here)) in enumerate(found.items()):
        if not torch.equal(there.cpu(), here.cpu()):
            raise bench.Mismatch(f"{names}: not the bytes that were sent")
        copy_s = statistics.median(samples[:, i])
        row = dict(zip(("direction", "memory"), names, strict=True))
        row |= {"copied_bytes": size, "copy_s": copy_s}
        rows.append(row | {"rate_bytes_per_s": size / copy_s})
    return rows


def link(device):
    """Return (bytes per second each way, in words): printed or measured."""
    if device.type == "cuda":
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            chip = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            kind = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(chip)
            lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(chip)
            rate = link_bytes_per_s(kind, lanes)
            return rate, f"PCIe {kind} x{lanes}, as printed"
        except Exception:  # no NVML: ROCm, or a link that is not PCIe
            pass
    peaks = machine.peaks(device)
    if device.type == "cpu":  # a byte that is copied is read and written
        return peaks["copy_bytes_per_s"] / 2, "memory, as measured"
    rate = peaks["host_to_device_bytes_per_s"]
    return rate, "the best pinned copy here"


def fit_row(counts, times):
    """Return the fit of some transfers, and its worst error in per cent."""
    start_s, rate = fitted(counts, times)
    off = [
        abs((start_s + n / rate) / s - 1)
        for n, s in zip(counts, times, strict=True)
    ]
    found = {"start_s": start_s, "fit_bytes_per_s": None, "half_bytes": None}
    found |= {"least_bytes": min(counts)}
    if rate < float("inf"):
        found["fit_bytes_per_s"] = rate
        found["half_bytes"] = half_way(start_s, rate)
    return found | {"off_percent": 100 * max(off)}


def fits(rows, keys, size, took):
    """Return a row for each combination of ``keys``: start and bandwidth."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return [
        dict(zip(keys, values, strict=True))
        | fit_row([row[size] for row in some], [row[took] for row in some])
        for values, some in groups.items()
    ]


def unresolved(rows, fitting):
    """Yield a line for each start that is lost in the error of its fit."""
    for fit in (row for row in rows if "start_s" in row):
        names = fit["direction"], fit["memory"]
        shortest_s = min(
            row["copy_s"]
            for row in fitting
            if (row["direction"], row["memory"]) == names
        )
        if fit["start_s"] <= fit["off_percent"] / 100 * shortest_s:
            yield (
                f"{', '.join(names)}: the start is not resolved, the fit is "
                "further off than that"
            )


def figure(
    rows,
    panel="direction",
    line="memory",
    size="copied_bytes",
    rate="rate_bytes_per_s",
):
    """Draw bytes per second by size, with the lines that the fits predict."""
    from matplotlib.figure import Figure

    from common import notebook

    found = [row for row in rows if "start_s" in row]
    names = list(dict.fromkeys(row[panel] for row in found))
    wide = 4.2 * len(names) + 1
    drawn = Figure(figsize=(wide, 3.8), layout="constrained")
    panels = drawn.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        points = [r for r in rows if rate in r and r[panel] == name]
        counts = sorted({row[size] for row in points})
        for i, fit in enumerate(r for r in found if r[panel] == name):
            some = [row for row in points if row[line] == fit[line]]
            places = [row[size] for row in some]
            rates = [row[rate] / 1e9 for row in some]
            axes.loglog(places, rates, f"C{i}o", label=fit[line])
            per = 1 / (fit["fit_bytes_per_s"] or float("inf"))
            own = [n for n in counts if n >= fit["least_bytes"]]
            curve = [n / (fit["start_s"] + n * per) / 1e9 for n in own]
            axes.plot(own, curve, f"C{i}")
        axes.set_xscale("log", base=2)
        shown, apart = counts[:1], (counts[-1] / counts[0]) ** 0.19
        for n in counts[1:]:  # so far apart that no label touches another
            shown += [n] * (n >= apart * shown[-1])
        axes.set_xticks(shown, [tables.cell(n, "bytes") for n in shown])
        axes.set_xlabel("bytes")
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel("GB/s")
    panels[0].legend(frameon=False, fontsize=8)
    title = "measured (points), fitted (lines) · 實測（點）與擬合（線）"
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    drawn.suptitle(notebook.label(title), **fonts)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    expect, rate, cache = None, None, 0
    on_cpu = args.device.type == "cpu"
    if not args.smoke:
        rate, words = link(args.device)
        if rate:
            expect = f"at most {tables.cell(rate, 'x_bytes_per_s')} ({words})"
            if on_cpu:
                cache = machine.peaks("cpu")["cache_bytes"]
                words = tables.cell(cache, "bytes")
                expect += f", and more while the caches ({words}) hold both"
    counts = sizes(args, cache, room_bytes() if on_cpu else 0)
    copies = [row for size in counts for row in measured(args, size)]
    copies.sort(key=lambda row: (row["direction"], row["memory"]))
    for row in copies:
        row["link_percent"] = rate and 100 * row["rate_bytes_per_s"] / rate
    rows = bench.report(
        args,
        copies,
        {
            "direction": "direction",
            "memory": "host memory",
            "copied_bytes": "bytes",
            "copy_s": "one copy",
            "rate_bytes_per_s": "rate",
            "link_percent": "% of memory's rate" if on_cpu else "% of link",
        },
        title="A copy, by its size (the bytes arrived as they were sent)",
        expect=expect,
    )
    fitting = [row for row in copies if 2 * row["copied_bytes"] > cache]
    title = "Fitted: start + bytes / bandwidth"
    if len({row["copied_bytes"] for row in fitting}) < 2:
        print("no room for copies beyond the caches: theirs are fitted, too")
        fitting = copies
    elif on_cpu and not args.smoke:
        least = tables.cell(fitting[0]["copied_bytes"], "bytes")
        title += f", from {least} on: no cache holds both"
    rows += bench.report(
        args,
        fits(fitting, ("direction", "memory"), "copied_bytes", "copy_s"),
        {
            "direction": "direction",
            "memory": "host memory",
            "start_s": "start",
            "fit_bytes_per_s": "then",
            "half_bytes": "half of the time is start at",
            "off_percent": "worst error, %",
        },
        title=title,
    )
    for words in unresolved(rows, fitting):
        print(words)
    worst = max(row["off_percent"] for row in rows if "start_s" in row)
    if worst > 50:
        print(
            f"a straight line is {worst:.0f}% off somewhere: it has no place "
            "for caches, nor for noise"
        )
    if args.device.type != "cuda":
        bench.left_out(
            args,
            "the link to a GPU, and pinned memory, which only a GPU's copy "
            "engine reads",
        )
    return rows


if __name__ == "__main__":
    bench.run(main)
