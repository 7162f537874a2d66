"""6.1.2  Asynchronous copies · 使用非同步介面提交資料傳輸任務

Question  What does non_blocking=True change, and what must the host then do?
Expect    from pinned memory the call returns at once and the copy takes
          bytes / bandwidth of the link; from pageable memory the driver
          copies everything once more, and the host waits whatever it asked
          for; on a CPU the flag changes nothing
Run       python -m ch06_single_gpu_perf.async_copy [--smoke] [--save]
"""

import statistics
import time

import torch

from common import bench, machine, tables, timers


def copied(destination, source):
    """The host waits until the last byte has arrived."""
    destination.copy_(source)


def submitted(destination, source):
    """The copy engine reads page-locked memory while the host goes on.

    The event behind the copy in its stream says when the bytes are there.
    """
    device = destination.device
    if device.type == "cpu":
        device = source.device
    module = torch.get_device_module(device)
    destination.copy_(source, non_blocking=True)
    arrived = module.Event()
    if hasattr(module, "current_stream"):
        arrived.record(module.current_stream(device))
    else:  # MPS has one stream
        arrived.record()
    return arrived


def read_at_once(host, source):
    """The host reads its memory before the copy engine has written it."""
    host.copy_(source, non_blocking=True)
    return host.clone()


def read_after(host, source, submit):
    """An event lets the host work on, and wait no longer than it must."""
    arrived = submit(host, source)
    arrived.synchronize()
    return host.clone()


TECHNIQUES = (copied, submitted, read_at_once, read_after)


def sizes(args):
    """Return (bytes of a copy, width of the matrices that delay one)."""
    if args.smoke:
        return 2**20, 64
    return (2**25, 512) if args.device.type == "cpu" else (2**26, 4096)


def directions(device, size):
    """Return {direction: {memory: source}} and where copies go to."""
    draw = torch.Generator().manual_seed(0)
    host = torch.randint(2**40, (size // 8,), generator=draw)
    if device.type == "cpu":
        return {"host to host": {"pageable": (host, torch.empty_like(host))}}
    there = host.to(device)
    back = torch.empty_like(host)
    found = {
        "host to device": {"pageable": (host, torch.empty_like(there))},
        "device to host": {"pageable": (there, back)},
    }
    if device.type == "cuda":
        pinned = host.pin_memory()
        place = torch.empty_like(there)
        found["host to device"]["pinned"] = (pinned, place)
        place = torch.empty_like(pinned, pin_memory=True)
        found["device to host"]["pinned"] = (there, place)
    return found


def usable(flag, source, destination):
    """Return a factory of calls after which the bytes can be used."""

    def factory():
        destination.zero_()  # a copy that does nothing must not agree

        def call():
            if flag:
                submitted(destination, source).synchronize()
            else:
                copied(destination, source)
            return destination

        return call

    return factory


def durations(flag, source, destination, device, repeats):
    """Return the medians of (seconds until the call returns, until done)."""
    returned, done = [], []
    for _ in range(repeats):
        timers.synchronize(device)
        start = time.perf_counter()
        destination.copy_(source, non_blocking=flag)
        returned.append(time.perf_counter() - start)
        timers.synchronize(device)
        done.append(time.perf_counter() - start)
    return statistics.median(returned), statistics.median(done)


def link_s(args, direction, size):
    """Return the seconds that the bytes need at this machine's best rate.

    Between two places of one memory each byte is read and written.
    """
    if args.smoke:
        return None
    peaks = machine.peaks(args.device)
    if direction == "host to host":
        return 2 * size / peaks["copy_bytes_per_s"]
    rate = peaks[f"{direction.replace(' ', '_')}_bytes_per_s"]
    return rate and size / rate


def cached(args, size):
    """Say whether a CPU's cache holds both sides: memory is no bound then."""
    if args.smoke or args.device.type != "cpu":
        return False
    return machine.peaks("cpu")["cache_bytes"] > 2 * size


def stale(device, width, elements):
    """Return rows: the share of old values that the host reads.

    The device is kept busy first, so that the copy is late.
    """
    matrix = torch.full((width, width), 1 / width, device=device)
    source = torch.zeros(elements, device=device)
    host = torch.zeros(elements, pin_memory=device.type == "cuda")
    ways = {
        "read at once": read_at_once,
        "read after the event": lambda h, s: read_after(h, s, submitted),
    }
    rows = []
    for name, read in ways.items():
        for value in (1.0, 2.0):  # the first turn loads kernels
            source.zero_()
            host.zero_()
            timers.synchronize(device)
            for _ in range(20):
                matrix = matrix @ matrix
            source.fill_(value)
            found = read(host, source)
            timers.synchronize(device)
        wrong = (found != value).float().mean().item()
        rows.append({"name": name, "old_percent": 100 * wrong})
    return rows


def rows_of(memories):
    """Return {row: (flag, source, destination)}, each changing one thing."""
    order = [("pageable", False), ("pageable", True)]
    if "pinned" in memories:
        order += [("pinned", True), ("pinned", False)]
    return {
        f"{memory}, {'non_blocking' if flag else 'blocking'}": (
            flag,
            *memories[memory],
        )
        for memory, flag in order
    }


def host_held(args, direction, copies, best_s):
    """Return rows: how long each call keeps the host, and the copy takes."""
    repeats = 3 if args.smoke else 20
    rows = []
    for name, copy in copies.items():
        call_s, done_s = durations(*copy, args.device, repeats)
        row = {"name": name, "direction": direction}
        row |= {"call_s": call_s, "done_s": done_s}
        row["held_percent"] = 100 * call_s / done_s
        row["rate_percent"] = best_s and 100 * best_s / done_s
        rows.append(row)
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device, (size, width) = args.device, sizes(args)
    rows, held = [], []
    for direction, memories in directions(device, size).items():
        copies = rows_of(memories)
        expect, best_s = None, link_s(args, direction, size)
        if best_s:
            expect = f"{size >> 20} MiB {direction} in at least "
            expect += tables.seconds(best_s)
            if cached(args, size):
                best_s, expect = None, f"{expect}, were there no cache"
        rows += bench.compare(
            args,
            {name: usable(*copy) for name, copy in copies.items()},
            unit="copy",
            tolerance=None,
            expect=expect,
            title=f"Until the bytes can be used, {direction}",
            budget_s=2.5,
        )
        held += host_held(args, direction, copies, best_s)
    bench.report(
        args,
        held,
        {
            "direction": "copy",
            "name": "row",
            "call_s": "call returns",
            "done_s": "copy done",
            "held_percent": "% host held",
            "rate_percent": "% of best rate",
        },
        title="How long the call holds the host",
    )
    early = [r for r in held if r["held_percent"] < 50]
    names = [f"{r['direction']}, {r['name']}" for r in early]
    print("returned before half of the copy was done:")
    print("\n".join(names) or "none")
    read = bench.report(
        args,
        stale(device, width, size // 4),
        {"name": "row", "old_percent": "% old values read"},
        title="What the host finds in a result it copies from a busy device",
    )
    if device.type != "cuda":
        bench.left_out(
            args,
            "pinned memory and the link to a GPU: pin_memory() needs one; "
            "there, reading at once finds old values",
        )
    return rows + held + read


if __name__ == "__main__":
    bench.run(main)
