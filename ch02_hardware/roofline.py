"""2.3.4  Key figures · GPU 的關鍵性能指標

Question  How much can this device do at best, and how near do operators come?
Expect    an operator that does few FLOPs per byte is limited by the memory,
          one that does many by the arithmetic: add and large products come
          near 100% of the roof; several passes, exponentials and small sizes
          stay below it
Run       python -m ch02_hardware.roofline [--smoke] [--save]

What is measured here is kept for all other chapters ("% of ceiling"), with
what other sections saw: the machine's file keeps the best of each rate.
"""

import collections
import functools
import textwrap

import torch
import torch.nn.functional as F

from ch02_hardware.key_figures import measure
from ch02_hardware.memory_hierarchy import ORDINARY, room_bytes
from common import bench, ceilings, machine, tables


def roof(intensity, flops_per_s, bytes_per_s):
    """FLOP/s rise with the FLOPs per byte until the lanes are all at work."""
    return min(flops_per_s, intensity * bytes_per_s)


def matmul_work(m, k, n, size):
    """Return (FLOPs, bytes) of (m, k) @ (k, n): each matrix moves once.

    ``size`` is the bytes of a number, here and below.
    """
    return 2 * m * k * n, size * (m * k + k * n + m * n)


def add_work(n, size):
    """Return (FLOPs, bytes) of a sum: two reads and a write for one FLOP."""
    return n, 3 * n * size


def softmax_work(rows, columns, size):
    """Return (FLOPs, bytes): a row stays in the cache between its passes.

    Per number: compare, subtract, exponential (counted as one), add, divide.
    """
    return 5 * rows * columns, 2 * rows * columns * size


def layer_norm_work(rows, columns, size):
    """Return (FLOPs, bytes): one read, one write, and the two weights.

    Per number: add for the mean; subtract, square, add for the variance;
    subtract, scale; multiply and add the weights.
    """
    return 8 * rows * columns, (2 * rows + 2) * columns * size


def attention_work(B, H, T, D, size):
    """Return (FLOPs, bytes) of fused attention that sees all positions.

    Two products of 2 T T D and a softmax over T T per head; only q, k, v and
    the result are in memory.  Written out, the scores would move as well.
    """
    flops = B * H * (4 * T * T * D + 5 * T * T)
    return flops, 4 * B * H * T * D * size


NEAR = 80  # per cent of the roof: what stays below needs a reason
TECHNIQUES = (
    roof,
    matmul_work,
    add_work,
    softmax_work,
    layer_norm_work,
    attention_work,
)


def ceiling_rows(found):
    """Return a row per ceiling: name, what it is, figure."""
    rows = [
        {"name": f"products, {dtype}", "figure": tables.cell(rate, "_flops")}
        for dtype, rate in found["gemm_flops"].items()
    ]
    words = {
        "copy": "memory, torch's copy (read + write)",
        "memmove": "memory, memmove (read + write)",
        "triad": "memory, torch's triad (2 reads + write)",
        "host_to_device": "host to device, pinned",
        "device_to_host": "device to host, pinned",
        "disk_read": "disk, read",
    }
    for key, word in words.items():
        key = f"{key}_bytes_per_s"
        rows.append({"name": word, "figure": tables.cell(found[key], key)})
    ring = found["all_reduce"] or {}
    for key, word in (
        ("latency_s", "latency (best single call)"),
        ("bytes_per_s", "bytes (best single call)"),
    ):
        figure = tables.cell(ring.get(key), f"_{key}")
        name = f"all-reduce of 2 ranks, {word}"
        rows.append({"name": name, "figure": figure})
    return rows


# --- operators --------------------------------------------------------------


def normed(parts, weights, kept):
    """Normalise piece by piece; ``kept`` holds as many results as fit in it.

    The operator takes new memory for each result, and a block of more than
    32 MiB is new pages every time, zeroed first: that is the system's time.
    A piece takes the place of the oldest one that ``kept`` let go.
    """
    for part in parts:
        kept.append(F.layer_norm(part, part.shape[1:], *weights))
    return kept


def operators(device, dtypes, elements, smoke):
    """Return (name, dtype, call, (FLOPs, bytes)) of each operator.

    ``elements``: numbers of an array that no cache holds.
    """
    big = device.type == "cuda"
    sizes = (32,) if smoke else (256, 1024, 4096) if big else (64, 256, 1024)
    B, H, T, D = (1, 2, 16, 8) if smoke else (8 if big else 1, 12, 1024, 64)
    C = 64 if smoke else 1024

    def draw(*shape, dtype="float32"):
        generator = torch.Generator(device).manual_seed(0)
        numbers = torch.randn(shape, device=device, generator=generator)
        return numbers.to(getattr(torch, dtype))

    def rows(count):
        return max(1, elements // count)

    found = []
    for dtype in dtypes:
        size = 4 if dtype in ("float32", "tf32") else 2
        for n in sizes:
            a, b = draw(n, n, dtype=dtype), draw(n, n, dtype=dtype)
            call = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
            work = matmul_work(n, n, n, size)
            found.append((f"matmul {n}", dtype, call, work))
    a, b = draw(elements), draw(elements)
    call = functools.partial(torch.add, a, b, out=torch.empty_like(a))
    found.append(("add", "float32", call, add_work(elements, 4)))
    x, gamma, beta = b[: rows(C) * C].view(-1, C), draw(C), draw(C)
    call = functools.partial(
        torch.softmax, x, 1, out=a[: x.numel()].view_as(x)
    )
    found.append(("softmax", "float32", call, softmax_work(rows(C), C, 4)))
    parts = [x] if big else x.split(2**20 // C)  # 4 MiB
    kept = collections.deque(maxlen=len(parts))
    call = functools.partial(normed, parts, (gamma, beta), kept)
    work = layer_norm_work(rows(C), C, 4)
    found.append(("layer_norm", "float32", call, work))
    for dtype in dtypes if big else ["float32"]:
        size = 4 if dtype == "float32" else 2
        q, k, v = (draw(B, H, T, D, dtype=dtype) for _ in "qkv")
        call = functools.partial(F.scaled_dot_product_attention, q, k, v)
        work = attention_work(B, H, T, D, size)
        found.append(("attention", dtype, call, work))
    return found


def timed(found, device, smoke):
    """Return a row per operator: FLOPs, bytes, and the rate it reached."""
    rates = {k: v for k, v in found["gemm_flops"].items() if v and k != "tf32"}
    dtypes = ["float32"]  # and the quickest other, unless it is imitated
    best = max(rates, key=rates.get)
    dtypes += [best] if rates[best] > 1.2 * rates["float32"] else []
    elements = min(found["buffer_bytes"], room_bytes(device) // 3) // 4
    rows = []
    with torch.no_grad():
        for name, dtype, call, work in operators(
            device, dtypes, elements, smoke
        ):
            flops, moved = work
            taken = ceilings.shortest(call, device, 0.0 if smoke else 0.5)
            rows.append(
                {
                    "name": name,
                    "dtype": dtype,
                    "flops": flops,
                    "moved_bytes": moved,
                    "intensity": flops / moved,
                    "taken_s": taken,
                    "reached_flops": flops / taken,
                }
            )
    return rows


def raised(found, rows):
    """Return (ceilings that no operator beats, what was raised in words).

    A rate seen is a rate that can be reached: the ceiling was measured in a
    busier moment.  Bytes count where no cache holds them all, and FLOPs of
    products, which need no convention.
    """
    found, words = found | {"gemm_flops": dict(found["gemm_flops"])}, []

    def lift(table, key, unit, rate, by):
        if rate > table[key]:
            table[key] = rate
            what = key.removesuffix(unit)
            words.append(f"{what} to {tables.cell(rate, unit)} ({by})")

    for row in rows:
        if row["name"].startswith("matmul"):
            rates, reached = found["gemm_flops"], row["reached_flops"]
            lift(rates, row["dtype"], "_flops", reached, row["name"])
        elif row["moved_bytes"] > found["cache_bytes"]:
            key = "triad" if row["name"] == "add" else "copy"
            key, unit = f"{key}_bytes_per_s", "_bytes_per_s"
            rate = row["moved_bytes"] / row["taken_s"]
            lift(found, key, unit, rate, row["name"])
    return found, words


def placed(rows, found):
    """Add to each operator its roof, and the share of it that it reached.

    Under the slope, what the caches hold is limited by them, or by the call
    itself: a roof that nobody measured (None).
    """
    memory = max(found["copy_bytes_per_s"], found["triad_bytes_per_s"])
    done = []
    for row in rows:
        peak = found["gemm_flops"][row["dtype"]]
        top, limit = roof(row["intensity"], peak, memory), "arithmetic"
        if top < peak:
            limit = "memory"
            if row["moved_bytes"] <= found["cache_bytes"]:
                top, limit = None, "cache or call"
        percent = top and 100 * row["reached_flops"] / top
        place = {"limit": limit, "roof_flops": top, "percent": percent}
        done.append(row | place)
    return done


def below(rows):
    """Yield a line for each kind of operator that stays below its roof."""
    reasons = {
        "matmul": "sharing it out and packing its blocks weigh the more, the "
        "smaller it is; where looks at products did not agree, this may have "
        "been a slow moment",
        "softmax": "a row is gone over for its largest number, its sum and "
        "its result, and an exponential, counted as one FLOP, is many",
        "layer_norm": "a row is gone over for its mean and variance and again "
        "for its result",
        "attention": "between its two products stands a softmax, whose "
        "exponentials, counted as one FLOP, are many; and the products are "
        "of small blocks",
    }
    under = [row for row in rows if (row["percent"] or NEAR) < NEAR]
    for kind in dict.fromkeys(row["name"].split()[0] for row in under):
        some = [
            f"{row['name']} ({row['dtype']}) {row['percent']:.0f}%"
            for row in under
            if row["name"].split()[0] == kind
        ]
        reason = reasons.get(kind, "no reason is known: measure again")
        yield f"below {NEAR}% of the roof: {', '.join(some)}: {reason}"


def figure(rows):
    """Draw the roofs of this device, and the operators below them."""
    from matplotlib.figure import Figure

    from common import notebook

    ops = [row for row in rows if "intensity" in row]
    found = next(row["ceilings"] for row in rows if "ceilings" in row)
    memory = max(found["copy_bytes_per_s"], found["triad_bytes_per_s"])
    drawn = Figure(figsize=(8, 4.6), layout="constrained")
    axes = drawn.subplots()
    low, high = 1 / 20, 4 * max(row["intensity"] for row in ops)
    colours = {}
    for dtype in dict.fromkeys(row["dtype"] for row in ops):
        peak = found["gemm_flops"][dtype]
        edge = peak / memory
        high = max(high, 4 * edge)
        word = f"{dtype}: {tables.cell(peak, '_flops')}"
        (line,) = axes.loglog(
            [low, edge, high], [low * memory, peak, peak], label=word
        )
        colours[dtype] = line.get_color()
    handles, _ = axes.get_legend_handles_labels()
    for number, row in enumerate(ops, 1):
        at, colour = (row["intensity"], row["reached_flops"]), row["dtype"]
        word = f"{number}  {row['name']}"
        if row["percent"] is not None:
            word += f"  {row['percent']:.0f}%"
        handles += axes.plot(*at, "o", color=colours[colour], label=word)
        axes.annotate(
            str(number),
            at,
            xytext=(-3, 5),
            ha="right",
            textcoords="offset points",
            fontsize=8,
            bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8},
        )
    slope = tables.cell(memory, "_bytes_per_s")
    handles += axes.plot([], [], " ", label=f"memory: {slope}")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOPs per byte")
    axes.set_ylabel("FLOP/s")
    drawn.legend(handles=handles, loc="outside right center", fontsize=8)
    axes.set_title(
        notebook.label("Roofline · 屋頂線"),
        fontfamily=notebook.fonts()["font.family"],
    )
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    found = measure(args.device, args.smoke)
    ops = timed(found, args.device, args.smoke)
    if not args.smoke:
        found, higher = raised(found, ops)
        if higher:
            machine.keep_peaks(found, args.device)
            words = "ceilings raised to what operators reached in this run: "
            print(textwrap.fill(words + "; ".join(higher), tables.WIDTH))
    rows = bench.report(
        args,
        ceiling_rows(found),
        {"name": "ceiling", "figure": "measured"},
        title="What this device reaches at best",
        extra={"ceilings": found},
    )
    if args.device.type == "cpu":
        key = "memmove_bytes_per_s"
        words = f"memory: the ceilings are {ORDINARY}; memmove, on as many "
        words += "threads, may write past the caches and reaches "
        words += tables.cell(found[key], key)
        print(textwrap.fill(words, tables.WIDTH))
    edge = found["gemm_flops"]["float32"] / found["copy_bytes_per_s"]
    ops = bench.report(
        args,
        placed(ops, found),
        {
            "name": "operator",
            "dtype": "numbers",
            "intensity": "FLOP/B",
            "limit": "limited by",
            "taken_s": "took",
            "reached_flops": "reached",
            "percent": "% of roof",
        },
        title="Operators on the roofline",
        expect=f"limited by memory below {edge:.3g} FLOPs per byte (float32)",
    )
    for line in [] if args.smoke else below(ops):
        print(textwrap.fill(line, tables.WIDTH))
    if args.device.type == "cpu":
        bench.left_out(args, "a GPU's ceilings: there is none here")
    return [*rows, *ops, {"name": "ceilings", "ceilings": found}]


if __name__ == "__main__":
    bench.run(main)
