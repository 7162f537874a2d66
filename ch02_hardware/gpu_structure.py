"""2.3.2  GPU structure · GPU 的硬體結構

Question  What is a GPU made of, and which peaks follow from the parts?
Expect    FLOP/s = multiprocessors x FLOPs per clock of each x clock; bytes
          per second = wires to the memory x bits per second on each: within
          1% of what the vendor prints, since that is how it is printed
Run       python -m ch02_hardware.gpu_structure [--smoke] [--save]
"""

import torch

from common import bench, machine

GIB, MIB, KIB = 2**30, 2**20, 2**10

# An SM: float32 FLOPs and dense 16-bit matrix FLOPs (float32 sums) per clock,
# threads, blocks, shared KiB at most, registers in KiB.  A GeForce adds up in
# float32 at half the rate.  CUDA C++ programming guide, "arithmetic
# instructions" and "technical specifications per compute capability"; matrix
# rates from the architectures' white papers, as below.
SM = {
    "7.0": (128, 1024, 2048, 32, 96, 256),
    "7.5": (128, 1024, 1024, 16, 64, 256),
    "8.0": (128, 2048, 2048, 32, 164, 256),
    "8.6": (256, 1024, 1536, 16, 100, 256),
    "8.9": (256, 1024, 1536, 24, 100, 256),
    "9.0": (256, 4096, 2048, 32, 228, 256),
    "10.0": (256, 8192, 2048, 32, 228, 256),
    "12.0": (256, 1024, 1536, 24, 100, 256),
}
# capability, SMs, MHz of float32 and of matrices, L2 MiB, bits to the memory,
# Gbit/s on each, memory GiB, GB/s of the link each way (PCIe, 16 lanes)
CARDS = {
    # white papers WP-08608 (Volta), WP-09183 (Turing)
    "V100 SXM2 32GB": ("7.0", 80, 1530, 1530, 6, 4096, 1.754, 32, 15.75),
    "T4": ("7.5", 40, 1590, 1590, 4, 256, 10, 16, 15.75),
    # A100 white paper, and the 80 GB part's data sheet
    "A100 SXM4 40GB": ("8.0", 108, 1410, 1410, 40, 5120, 2.43, 40, 31.5),
    "A100 SXM4 80GB": ("8.0", 108, 1410, 1410, 40, 5120, 3.186, 80, 31.5),
    # GA102 white paper, A10 data sheet
    "A10": ("8.6", 72, 1695, 1695, 6, 384, 12.5, 24, 31.5),
    "GeForce RTX 3090": ("8.6", 82, 1695, 1695, 6, 384, 19.5, 24, 31.5),
    # Ada white paper, L4 and L40S data sheets
    "L4": ("8.9", 58, 2040, 2040, 48, 192, 12.5, 24, 31.5),
    "L40S": ("8.9", 142, 2520, 2490, 96, 384, 18, 48, 31.5),
    "GeForce RTX 4090": ("8.9", 128, 2520, 2520, 72, 384, 21, 24, 31.5),
    # H100 white paper (matrices are printed at a lower clock); the H200 is
    # the same chip, its Gbit/s are the data sheet's 4.8 TB/s by the wires
    "H100 80GB HBM3": ("9.0", 132, 1980, 1830, 50, 5120, 5.238, 80, 63.0),
    "H200": ("9.0", 132, 1980, 1830, 50, 6144, 6.25, 141, 63.0),
    # RTX Blackwell white paper
    "GeForce RTX 5090": ("12.0", 170, 2407, 2407, 96, 512, 28, 32, 63.0),
}
FIELDS = ("capability", "sms", "mhz", "matrix_mhz", "l2", "bus_bits")
FIELDS += ("gbit_per_pin", "memory", "link")


def peak_flops(multiprocessors, flops_per_clock, clock_hz):
    """Every lane of every multiprocessor ends a multiply-add per clock.

    ``flops_per_clock`` is of one multiprocessor, two for a multiply-add.
    """
    return multiprocessors * flops_per_clock * clock_hz


def memory_bytes_per_s(bus_bits, bits_per_s_per_wire):
    """Memory sends one bit at a time over each of very many wires."""
    return bus_bits * bits_per_s_per_wire / 8


def ridge(flops_per_s, bytes_per_s):
    """Below so many FLOPs per byte the lanes wait for the memory."""
    return flops_per_s / bytes_per_s


def resident_warps(threads, registers, shared, sm):
    """A multiprocessor keeps every warp's registers: none is ever saved.

    So switching to a warp whose data have come costs nothing, and warps are
    resident only as long as registers (of 4 bytes) last.  For blocks of so
    many ``threads``, each with ``registers``, and ``shared`` bytes a block.
    ``sm``: threads, blocks, shared_bytes, register_bytes, warp.  Registers
    are given out by 8 per thread.
    """
    warps = -(-threads // sm["warp"])
    each = max(8, -(-registers // 8) * 8) * 4 * sm["warp"]  # bytes of a warp
    blocks = min(
        sm["blocks"],
        sm["threads"] // (warps * sm["warp"]),
        sm["register_bytes"] // each // warps,
        sm["shared_bytes"] // shared if shared else sm["blocks"],
    )
    return blocks * warps


TECHNIQUES = (peak_flops, memory_bytes_per_s, ridge, resident_warps)


def multiprocessor(capability):
    """Return the parts of one SM; None for an unknown capability."""
    if capability not in SM:
        return None
    flops, matrix, threads, blocks, shared, registers = SM[capability]
    return {
        "flops": flops,
        "matrix_flops": matrix,
        "threads": threads,
        "blocks": blocks,
        "shared_bytes": shared * KIB,
        "register_bytes": registers * KIB,
        "warp": 32,
    }


def known(name):
    """Return a card of the table, its peaks computed."""
    card = dict(zip(FIELDS, CARDS[name], strict=True))
    return computed(
        name,
        multiprocessor(card["capability"]),
        sms=card["sms"],
        hz=card["mhz"] * 1e6,
        matrix_hz=card["matrix_mhz"] * 1e6,
        l2_bytes=card["l2"] * MIB,
        bus_bits=card["bus_bits"],
        bits_per_wire=card["gbit_per_pin"] * 1e9,
        memory_bytes=card["memory"] * GIB,
    ) | {"link_bytes_per_s": card["link"] * 1e9}


def here(device, properties=None, clocks=None, bus_bits=None):
    """Return the GPU of this machine, its peaks computed at its top clocks.

    Args:
        device: a CUDA device.
        properties: as ``torch.cuda.get_device_properties`` gives them.
        clocks: max_graphics_mhz and max_memory_mhz, as NVML gives them.
        bus_bits: wires to the memory, where torch does not tell.
    """
    p = properties or torch.cuda.get_device_properties(device)
    clocks = clocks or machine.card(device)["gpu"]["clocks"] or {}
    mhz = clocks.get("max_graphics_mhz")
    mhz = mhz or getattr(p, "clock_rate", 0) / 1e3
    memory_mhz = clocks.get("max_memory_mhz")
    memory_mhz = memory_mhz or getattr(p, "memory_clock_rate", 0) / 1e3
    # AMD numbers its architectures alike, and means others
    kind = None if torch.version.hip else f"{p.major}.{p.minor}"
    unknown = dict.fromkeys(("flops", "matrix_flops", "blocks"))
    sm = multiprocessor(kind) or unknown
    sm |= {
        "threads": p.max_threads_per_multi_processor,
        "shared_bytes": getattr(p, "shared_memory_per_multiprocessor", None),
        "register_bytes": 4 * p.regs_per_multiprocessor,
        "warp": p.warp_size,
    }
    return computed(
        p.name,
        sm,
        sms=p.multi_processor_count,
        hz=mhz * 1e6,
        matrix_hz=mhz * 1e6,
        l2_bytes=getattr(p, "L2_cache_size", None),
        bus_bits=getattr(p, "memory_bus_width", None) or bus_bits,
        bits_per_wire=2 * memory_mhz * 1e6,  # both edges of the clock
        memory_bytes=p.total_memory,
    )


def computed(
    name,
    sm,
    *,
    sms,
    hz,
    matrix_hz,
    l2_bytes,
    bus_bits,
    bits_per_wire,
    memory_bytes,
):
    """Return a row: parts added up over the chip, and the peaks of them.

    What is unknown is None, and so is what would follow from it.
    """
    matrix = sm["matrix_flops"]
    if matrix and "GeForce" in name and sm["flops"] == 256:
        matrix /= 2  # adding up in float32
    found = {
        "name": name,
        "sm": sm,
        "sms": sms,
        "mhz": round(hz / 1e6) or None,
        "threads": sms * sm["threads"],
        "register_bytes": sms * sm["register_bytes"],
        "shared_bytes": sm["shared_bytes"] and sms * sm["shared_bytes"],
        "l2_bytes": l2_bytes,
        "memory_bytes": memory_bytes,
        "float32_flops": None,
        "matrix_flops": None,
        "memory_bytes_per_s": None,
        "ridge": None,
        "printed_flops": machine.published_peak(name, "bfloat16")
        or machine.published_peak(name, "float16"),
    }
    if sm["flops"] and hz:
        found["float32_flops"] = peak_flops(sms, sm["flops"], hz)
        found["matrix_flops"] = peak_flops(sms, matrix, matrix_hz)
    if bus_bits and bits_per_wire:
        rate = memory_bytes_per_s(bus_bits, bits_per_wire)
        found["memory_bytes_per_s"] = rate
        if found["matrix_flops"]:
            found["ridge"] = ridge(found["matrix_flops"], rate)
    return found


def occupancy(sm, registers=(32, 64, 128, 255), threads=(64, 256, 1024)):
    """Return rows: the share of an SM's warps that are resident."""
    most = sm["threads"] // sm["warp"]
    rows = []
    for each in registers:
        row = {"registers": each}
        for block in threads:
            warps = resident_warps(block, each, 0, sm)
            row[f"{block}"] = f"{warps} of {most}" if warps else "cannot start"
        rows.append(row)
    return rows


def bus_width(device):
    """Ask NVML how many wires lead to the memory; None if it is not here."""
    try:
        import pynvml

        from common import gpu_clock

        pynvml.nvmlInit()
        try:
            handle = gpu_clock.handle(pynvml, device)
            return pynvml.nvmlDeviceGetMemoryBusWidth(handle)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no NVIDIA driver, or one that does not tell
        return None


def figure(rows):
    """Draw how much each level of the chips holds."""
    from matplotlib.figure import Figure

    from common import notebook

    rows = [row for row in rows if "l2_bytes" in row]
    kinds = {
        "register_bytes": "registers",
        "shared_bytes": "shared memory",
        "l2_bytes": "L2",
        "memory_bytes": "memory",
    }
    drawn = Figure(figsize=(8, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for i, (key, word) in enumerate(kinds.items()):
        places = [place + 0.2 * (i - 1.5) for place in range(len(rows))]
        sizes = [(row[key] or 0) / MIB for row in rows]
        axes.barh(places, sizes, height=0.2, label=word)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MiB on the whole chip")
    axes.set_title(
        notebook.label("What each level holds · 每一層的容量"),
        fontfamily=notebook.fonts()["font.family"],
    )
    drawn.legend(loc="outside lower center", ncols=4, fontsize=8)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    cards = [known(name) for name in CARDS]
    if args.device.type == "cuda":
        cards.insert(0, here(args.device, bus_bits=bus_width(args.device)))
    first = cards[0] if args.device.type == "cuda" else known("A100 SXM4 80GB")
    for row in cards:
        made, printed = row["matrix_flops"], row["printed_flops"]
        row["of_printed"] = made and printed and f"{made / printed:.1%}"
    rows = bench.report(
        args,
        cards,
        {
            "name": "GPU",
            "sms": "SMs",
            "threads": "threads",
            "register_bytes": "registers",
            "shared_bytes": "shared",
            "l2_bytes": "L2",
            "memory_bytes": "memory",
        },
        title="What a chip holds, all multiprocessors together",
        expect=f"{args.expect}; {first['name']}: {first['sms']} SMs at "
        f"{first['mhz']} MHz",
    )
    bench.report(
        args,
        [{k: v for k, v in row.items() if k != "sm"} for row in cards],
        {
            "name": "GPU",
            "mhz": "MHz",
            "float32_flops": "float32",
            "matrix_flops": "16-bit matrices",
            "of_printed": "of printed",
            "memory_bytes_per_s": "memory",
            "ridge": "FLOP/B",
        },
        title="The peaks that follow, and the FLOPs per byte where they meet",
    )
    if not first["sm"]["blocks"]:
        return rows
    rows += bench.report(
        args,
        occupancy(first["sm"]),
        {
            "registers": "registers per thread",
            **{n: f"blocks of {n}" for n in ("64", "256", "1024")},
        },
        title=f"Warps resident on an SM of {first['name']}",
    )
    if first["l2_bytes"]:
        share = first["register_bytes"] / first["l2_bytes"]
        print(f"its registers hold {share:.2g} times as much as its L2")
    if args.device.type != "cuda":
        bench.left_out(args, "this machine's own GPU: it has none")
    return rows


if __name__ == "__main__":
    bench.run(main)
