"""2.4.1  Many GPUs, one host · 單機多卡的通訊
2.4.2  Many hosts · 多機多卡的通訊

Question  How long does a collective take, and which share of the link is used?
Expect    start + bytes / bandwidth; of S bytes each of n ranks must send
          2 (n - 1) / n S in an all-reduce, (n - 1) / n S in an all-gather, a
          reduce-scatter and an all-to-all, S in a broadcast: so where a link
          decides, the bus bandwidths are alike and the slowest link's
Run       python -m ch02_hardware.collective_bandwidth [--ranks 4] [--smoke]
          python -m ch02_hardware.collective_bandwidth --hosts [--netns]
"""

import functools
import json
import math
import os
import re
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ch02_hardware import host_device_copy
from common import bench, machine, ranks, tables, timers


def all_reduce(numbers):
    """Every rank ends with the sum: each part is summed, then passed on."""
    torch.distributed.all_reduce(numbers)
    return numbers


def all_gather(whole, part):
    """Every rank ends with the parts of all."""
    there = torch.distributed
    name = "all_gather_single"  # until torch 2.12 all_gather_into_tensor
    call = getattr(there, name, None) or there.all_gather_into_tensor
    call(whole, part)
    return whole


def reduce_scatter(part, whole):
    """Every rank ends with its part of the sum."""
    there = torch.distributed
    name = "reduce_scatter_single"  # until torch 2.12 reduce_scatter_tensor
    call = getattr(there, name, None) or there.reduce_scatter_tensor
    call(part, whole)
    return part


def broadcast(numbers):
    """Every rank ends with what rank 0 had."""
    torch.distributed.broadcast(numbers, 0)
    return numbers


def all_to_all(received, sent):
    """Every rank sends each rank another part: a transpose."""
    torch.distributed.all_to_all_single(received, sent)
    return received


def bus_factor(collective, world):
    """A rank must send so many times the message, whatever the algorithm.

    Bandwidths that are multiplied by it can be compared with a link's, and
    between numbers of ranks (the convention of nccl-tests).
    """
    share = (world - 1) / world
    return {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": share,
        "broadcast": 1.0,
        "all-to-all": share,
    }[collective]


TECHNIQUES = (
    all_reduce,
    all_gather,
    reduce_scatter,
    broadcast,
    all_to_all,
    bus_factor,
)
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "broadcast"
COLLECTIVES += ("all-to-all",)
LOCAL = "one host", "two agents"  # the link is this machine's own
NAMESPACES = "two namespaces"
GRADIENT = 4 * 124_439_808  # bytes of GPT-2's, in float32
BUCKET = 25 * 2**20  # bytes of each of DDP's messages
LEAST_RATE = 1e6 / 8  # bytes per second: minutes for all messages


# --- one rank ----------------------------------------------------------------


def call_of(collective, size, me):
    """Return (a call that fills what it returns, the right answer).

    ``size``: bytes of the message as nccl-tests count it: of the whole, where
    ranks hold parts.  Rank r sends (r + 1) times a pattern of small integers.
    """
    n = max(1, size // 4 // me.world) * me.world
    pattern = torch.arange(n, device=me.device, dtype=torch.float32) % 61
    mine, parts = (me.rank + 1) * pattern, pattern.view(me.world, -1)
    total = me.world * (me.world + 1) / 2 * parts  # what the sums are
    each = torch.arange(1, me.world + 1, device=me.device)[:, None]
    own, place = mine.view(parts.shape)[me.rank], torch.empty_like(pattern)
    cut, bind = place[: n // me.world], functools.partial
    return {
        "all-reduce": (bind(all_reduce, mine), total.view(-1)),
        "all-gather": (bind(all_gather, place, own), (each * parts).view(-1)),
        "reduce-scatter": (bind(reduce_scatter, cut, mine), total[me.rank]),
        "broadcast": (bind(broadcast, mine), pattern),
        "all-to-all": (
            bind(all_to_all, place, mine),
            (each * parts[me.rank]).view(-1),
        ),
    }[collective]


def slowest(seconds, me):
    """Return the times of the slowest rank, alike on all."""
    times = torch.tensor(seconds, dtype=torch.float64, device=me.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def sent():
    """Return the bytes sent over an interface that is this rank's, or None.

    In a namespace nobody else uses it; loopback carries everything.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
    if not alone or not ranks.NAMESPACE.fullmatch(name):
        return None
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(name))
    return int(line.split(":")[1].split()[8])


def warm_calls(size):
    """Return how many calls use up a shaper's credit."""
    return min(64, max(1, 2**20 // size))


def timed(collective, size, me, smoke, budget_s=0.15):
    """Return what all ranks see of one collective at one size."""
    call, right = call_of(collective, size, me)
    wrong = float(not torch.equal(call(), right))
    first_s = timers.wall(call, warm_calls(size), me.device)
    first_s, wrong = slowest([first_s, wrong], me)
    rounds = 3 if smoke or first_s > budget_s / 3 else 7
    calls = 1 if smoke else max(1, int(budget_s / rounds / first_s))
    dist.barrier()  # a call ends here before its bytes have left
    samples, before = [], sent()
    for _ in range(rounds):
        dist.barrier()
        samples.append(timers.wall(call, calls, me.device))
    dist.barrier()
    times = None if before is None else (sent() - before) / size
    samples = slowest(samples, me)
    took_s = statistics.median(samples)
    return {
        "name": collective,
        "ranks": me.world,
        "right": not wrong,
        "message_bytes": size,
        "took_s": took_s,
        "least_s": min(samples),
        "most_s": max(samples),
        "algorithm_bytes_per_s": size / took_s,
        "bus_bytes_per_s": size / took_s * bus_factor(collective, me.world),
        "sent_times": times and times / rounds / calls,
    }


def job(device, sizes, smoke):
    """Time every collective at every size; the same rows on every rank."""
    me = ranks.init(device)
    rows = [timed(c, n, me, smoke) for c in COLLECTIVES for n in sizes]
    biggest = rows[len(sizes) - 1]  # of the all-reduces
    about_s = GRADIENT * biggest["took_s"] / biggest["message_bytes"]
    room = (machine.memory_bytes() or 0) / 8
    if not smoke and about_s < 3 and me.world * GRADIENT < room:
        numbers = torch.zeros(GRADIENT // 4, device=me.device)
        call = functools.partial(all_reduce, numbers)
        taken = [timers.wall(call, 1, me.device) for _ in range(3)]
        rows.append({"gradient_s": min(slowest(taken, me))})
    return rows


# --- sizes and rates ---------------------------------------------------------


def rate_of(text):
    """Return bytes per second of a rate as ``tc`` spells it.

    Raises:
        Refusal: another spelling.
    """
    found = re.fullmatch(r"([\d.]+)([kmgt]?)(bit|bps)", text.lower())
    try:
        number = float(found[1])
    except (TypeError, ValueError):
        raise bench.Refusal(
            f"--rate {text}: write it like 100mbit or 2.5gbit"
        ) from None
    scale = 1000 ** " kmgt".index(found[2] or " ")
    return number * scale * (1 if found[3] == "bps" else 1 / 8)


def sizes_for(smoke, rate=None):
    """Return the bytes of the messages, by factors of 32 or 4.

    Over a slow link the largest takes about half a second, and is still
    several times what the shaper lets pass at once (256 KiB).
    """
    if rate:
        top = 2 ** int(math.log2(rate * (0.2 if smoke else 0.5)))
        top = min(max(top, 2**20), 2**24)
        return [top // 16, top // 4, top]
    return [2**10, 2**16] if smoke else [2**k for k in range(10, 26, 5)]


def least_s(sizes, rate, world):
    """Return the seconds for which a job keeps a slow link busy, at least."""
    calls = [1 + warm_calls(size) + 3 for size in sizes]  # see timed
    total = sum(n * size for n, size in zip(calls, sizes, strict=True))
    return total * sum(bus_factor(c, world) for c in COLLECTIVES) / rate


# --- what it means -----------------------------------------------------------


def fits(rows, rate):
    """Return a row per place and collective: start, bandwidths, error."""
    keys = "place", "name", "ranks"
    found = host_device_copy.fits(rows, keys, "message_bytes", "took_s")
    for row in found:
        then = row["fit_bytes_per_s"]
        bus = then and then * bus_factor(row["name"], row["ranks"])
        row |= {"bus_bytes_per_s": bus, "link_percent": None}
        if rate and bus and row["place"] == NAMESPACES:
            row["link_percent"] = 100 * bus / rate
    return found


def predicted_s(fit, total, message=None):
    """Return the seconds for ``total`` bytes, in messages of that size."""
    count = math.ceil(total / message) if message else 1
    per = 1 / (fit["fit_bytes_per_s"] or float("inf"))
    return count * fit["start_s"] + total * per


def gradient_rows(found, measured):
    """Return what GPT-2's gradient costs, going by the all-reduce's fit."""
    return [
        {
            "place": fit["place"],
            "sent_bytes": GRADIENT * bus_factor("all-reduce", fit["ranks"]),
            "predicted_s": predicted_s(fit, GRADIENT),
            "buckets_s": predicted_s(fit, GRADIENT, BUCKET),
            "measured_s": measured.get(fit["place"]),
        }
        for fit in found
        if fit["name"] == "all-reduce"
    ]


def figure(rows):
    """Draw bytes per second by message size, as measured and as fitted."""
    keys = "place", "name", "message_bytes", "algorithm_bytes_per_s"
    return host_device_copy.figure(rows, *keys)


# --- the script --------------------------------------------------------------


def over_hosts(args, rate):
    """Run ``job`` under two torchrun agents; return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "rows.json")
        words = ["--device", args.device.type, "--into", into]
        words += ["--smoke"] if args.smoke else []
        words += ["--rate", args.rate] if rate else []
        with ranks.hosts(
            "ch02_hardware.collective_bandwidth",
            words,
            world_per_host=args.ranks // 2,
            netns=args.netns,
            rate=args.rate,
        ) as agents:
            ranks.wait(agents, 600)
        return json.loads(into.read_text(encoding="utf-8"))


def flags(parser):
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="in all (2)")
    add("--hosts", action="store_true", help="and over two torchrun agents")
    add("--netns", action="store_true", help="in network namespaces (root)")
    add("--rate", metavar="R", help="of the link between them: 100mbit")
    add("--into", type=Path, help="(of a rank: where its rows go)")


def refuse_crowd(count):
    """Refuse more ranks than cores can serve: each is a process with torch.

    Raises:
        Refusal: more than four for each core, and more than 8.
    """
    most = max(8, 4 * machine.cores())
    if count > most:
        raise bench.Refusal(
            f"--ranks {count}: {machine.cores()} cores serve {most} at most"
        )


def told(args):
    """Refuse what cannot be met, and return the link's rate or None."""
    rate = None if args.rate is None else rate_of(args.rate)
    if rate is not None and rate < LEAST_RATE:
        raise bench.Refusal(
            f"--rate {args.rate}: the messages would take longer than anybody "
            "waits; 1mbit is the least"
        )
    if args.ranks < 2 or args.hosts and args.ranks % 2:
        raise bench.Refusal(
            f"--ranks {args.ranks}: at least 2, and an even number on 2 hosts"
        )
    refuse_crowd(args.ranks)
    if args.netns and not args.hosts:
        raise bench.Refusal("--netns joins two hosts: add --hosts")
    if rate and not args.into and not args.netns:
        raise bench.Refusal("--rate slows a link of ours: add --hosts --netns")
    reason = ranks.can_netns() if args.netns else None
    if reason:
        raise bench.Refusal(f"--netns: {reason}")
    chosen = any(word.startswith("--device") for word in args.argv)
    if args.device.type == "cuda" and not chosen:
        if torch.cuda.device_count() < args.ranks:
            print(f"fewer than {args.ranks} GPUs here: CPU ranks, over gloo")
            args.device = torch.device("cpu")
    return rate


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    rate = told(args)
    sizes, smoke = sizes_for(args.smoke, rate), args.smoke
    if "RANK" in os.environ:  # started by torchrun, ours or another
        found = job(args.device, sizes, smoke)
        me = dist.get_rank()
        ranks.finish()
        if args.into and me == 0:
            bench.write_atomic(args.into, json.dumps(found))
        if args.into or me:
            return []
        return shown(args, {"torchrun": found}, rate)
    local = sizes_for(smoke)
    found = ranks.spawn(job, args.ranks, str(args.device), local, smoke)[0]
    measured = {LOCAL[0]: found}
    if args.hosts:
        place = NAMESPACES if args.netns else LOCAL[1]
        slow_s = least_s(sizes, rate, args.ranks) if rate else 0
        if slow_s > 30:
            words = tables.seconds(slow_s)
            print(f"the messages need {words} at {args.rate}", flush=True)
        measured[place] = over_hosts(args, rate)
    return shown(args, measured, rate)


def shown(args, measured, rate):
    """Print and return the rows of all places, and what they predict."""
    gradients, rows = {}, []
    for place, found in measured.items():
        for row in found:
            if "gradient_s" in row:
                gradients[place] = row["gradient_s"]
            else:
                rows.append({"place": place} | row)
    wrong = [f"{r['place']}: {r['name']}" for r in rows if not r["right"]]
    if wrong:
        raise bench.Mismatch(f"wrong sums or parts ({', '.join(wrong)})")
    if not args.smoke:
        machine.keep_peaks(seen(rows), args.device)
    expect = None
    if rate:
        least = tables.seconds(GRADIENT / rate)
        expect = f"GPT-2's gradient needs at least {least} at {args.rate}"
    columns = {"place": "place", "name": "collective"}
    bus, counted = {"bus_bytes_per_s": "bus"}, {}
    if any(row["sent_times"] for row in rows):
        counted = {"sent_times": "sent ×"}
    more = {"message_bytes": "message", "took_s": "took"}
    more |= {"least_s": "from", "most_s": "to"}
    more |= {"algorithm_bytes_per_s": "algorithm"}
    title = f"{rows[0]['ranks']} ranks (all sums and parts are right)"
    bench.report(
        args, rows, columns | more | bus | counted, None, title, expect
    )
    found = fits(rows, rate)
    more = {"start_s": "start, in a row", "fit_bytes_per_s": "then"} | bus
    more |= {"link_percent": f"% of {args.rate}"} if rate else {}
    more |= {"off_percent": "worst error, %"}
    title = "Fitted: start + bytes / bandwidth, to medians of calls in a row "
    title += "(2.3.4: best of single calls)"
    bench.report(args, found, columns | more, None, title)
    cost = bench.report(
        args,
        gradient_rows(found, gradients),
        {
            "place": "place",
            "sent_bytes": "each sends",
            "predicted_s": "one message",
            "buckets_s": "25 MiB each",
            "measured_s": "measured (one)",
        },
        title="GPT-2's gradient (124M, float32): predicted by the fit",
    )
    for line in in_words(args, rows, found):
        print(line)
    return rows + found + cost


def seen(rows):
    """Return this machine's all-reduce of two ranks, as rows saw it."""
    some = [r for r in rows if r["name"] == "all-reduce" and r["ranks"] == 2]
    some = [r for r in some if r["place"] in LOCAL]
    if not some:
        return {}
    least = min(row["took_s"] for row in some)
    most = max(row["algorithm_bytes_per_s"] for row in some)
    return {"all_reduce": {"latency_s": least, "bytes_per_s": most}}


def apart(args, rows, found):
    """Yield where bus bandwidths are not alike though all sums are right."""
    counted = {row["place"] for row in rows if row["sent_times"]}
    for place in dict.fromkeys(fit["place"] for fit in found):
        buses = {
            fit["name"]: fit["bus_bytes_per_s"]
            for fit in found
            if fit["place"] == place and fit["bus_bytes_per_s"]
        }
        if place in counted or len(buses) < 2:
            continue  # bytes that were counted say it better
        least, most = (f(buses, key=buses.get) for f in (min, max))
        if buses[most] < 2 * buses[least]:
            continue
        low, high = (
            tables.cell(buses[name], "bus_bytes_per_s")
            for name in (least, most)
        )
        yield (
            f"{place}: the bus bandwidths are NOT alike, {low} ({least}) to "
            f"{high} ({most})"
        )
        if args.device.type == "cpu":
            yield (
                "  no link is the slowest here: processors copy, and the "
                "factor counts no copies. gloo's\n"
                "  reduce-scatter clones the message, sums all of it as an "
                "all-reduce does, and keeps a part;\n"
                "  its all-gather gathers into a buffer and copies from there"
            )


def in_words(args, rows, found):
    """Yield what the figures say."""
    worst = max(fit["off_percent"] for fit in found)
    if worst > 50:
        yield (
            f"a straight line is {worst:.0f}% off somewhere: it has no place "
            "for caches, nor for noise"
        )
    yield from apart(args, rows, found)
    for fit in found:
        if fit["link_percent"] and fit["name"] == "all-reduce":
            right = abs(fit["link_percent"] / 100 - 1) <= 0.2
            yield (
                f"the all-reduce's fit finds {fit['link_percent']:.0f}% of "
                f"{args.rate}, {'' if right else 'NOT '}within 20%"
            )
    largest = {row["name"]: row for row in rows if row["sent_times"]}
    for name, row in largest.items():
        factor, times = bus_factor(name, row["ranks"]), row["sent_times"]
        if times > 1.5 * factor:
            yield (
                f"{name} sends {times:.2f} times the message where "
                f"{factor:.2f} would do: such is this backend's algorithm"
            )
    if args.hosts and not args.netns:
        yield (
            "two agents as on two hosts, but their link is this machine's "
            "memory;\n--netns gives each a network of its own (root)"
        )


if __name__ == "__main__":
    bench.run(main)
