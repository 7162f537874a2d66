"""What a device reaches at best, measured with patience and kept.

``machine.peaks`` takes 3 s for products and memory; here they get longer,
and the disk and the exchange between two processes are measured as well.
"""

import contextlib
import ctypes
import functools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from ch02_hardware.memory_hierarchy import room_bytes
from common import ceilings, machine, ranks, tables, timers

# apart in time and with memory of their own: a rate can have two modes
LOOKS = 4
TWO_MODES = 1.15  # times the worst look


def in_memory(folder, mounts="/proc/self/mounts"):
    """Say whether files of a folder are no further away than memory."""
    try:
        lines = Path(mounts).read_text(errors="replace").splitlines()
    except OSError:
        return False
    place, kind = "", ""
    for line in lines:
        at, what = line.split()[1:3]
        if Path(folder).resolve().is_relative_to(at) and len(at) >= len(place):
            place, kind = at, what
    return kind in ("tmpfs", "ramfs")


def disk_read(folder, size, block=2**22, budget_s=0.0):
    """Read a file of ``size`` bytes that no cache holds, in bytes/s.

    The best of several readings, as long as ``budget_s`` lasts.  None where
    nothing can be written, or the cache cannot be told to forget.
    """
    path = folder / f".disk-read-{os.getpid()}.tmp"
    forget = getattr(os, "posix_fadvise", None)
    if in_memory(folder):
        return None
    try:
        import fcntl
    except ImportError:  # Windows
        fcntl = None
    uncached = getattr(fcntl, "F_NOCACHE", None)  # macOS
    if not forget and uncached is None:
        return None
    noise = os.urandom(block)  # zeros might never reach the disk
    try:
        with open(path, "wb", buffering=0) as file:
            if uncached is not None:
                fcntl.fcntl(file, uncached, 1)
            for _ in range(size // block):
                file.write(noise)
            os.fsync(file.fileno())
        best, spent_s, place = 0.0, 0.0, bytearray(block)
        while not best or spent_s < budget_s:
            with open(path, "rb", buffering=0) as file:
                if uncached is not None:
                    fcntl.fcntl(file, uncached, 1)
                else:
                    forget(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                count, start = 0, time.perf_counter()
                while got := file.readinto(place):
                    count += got
                took_s = time.perf_counter() - start
            best, spent_s = max(best, count / took_s), spent_s + took_s
        return best
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def all_reduce_s(sizes, repeats, kind="cpu"):
    """Time single sums over all ranks, each after a barrier; in a rank.

    Returns for each of ``sizes``, in bytes, the seconds of every call.
    """
    rank = ranks.init(kind)
    found = []
    for size in sizes:
        numbers = torch.ones(size // 4, device=rank.device)
        taken = []
        for _ in range(repeats + 1):
            dist.barrier()
            numbers.fill_(1.0)
            call = functools.partial(dist.all_reduce, numbers)
            taken.append(timers.wall(call, 1, rank.device))
        right = bool(torch.all(numbers == rank.world))
        if not right:
            raise RuntimeError("the ranks' sum is wrong")
        found.append(taken[1:])
    ranks.finish()
    return found


def best_calls_s(found):
    """Return the seconds of each size's quickest call.

    ``found``: seconds by rank, size and call.  A call lasts until the slowest
    rank has its sum.
    """
    by_size = zip(*found, strict=True)
    return [min(map(max, zip(*each, strict=True))) for each in by_size]


def latency_and_rate(sizes, seconds):
    """Return {latency_s, bytes_per_s}: seconds = latency + size / rate.

    Lines lead from the smallest message to each larger one; the steepest
    rate counts.  None where no larger message took longer.  ``sizes``
    ascend.
    """
    rates = [
        (size - sizes[0]) / (took - seconds[0])
        for size, took in zip(sizes, seconds, strict=True)
        if took > seconds[0]
    ]
    if not rates:
        return None
    rate = max(rates)
    latency = seconds[0] - sizes[0] / rate
    return {"latency_s": max(latency, 1e-9), "bytes_per_s": rate}


def on_speaking_terms():
    """Say whether two processes of this machine can reach each other."""
    try:
        with socket.socket() as ear:
            ear.bind(("127.0.0.1", 0))
            ear.listen()
            socket.create_connection(ear.getsockname(), 5).close()
    except OSError:
        return False
    return True


def all_reduce(device, smoke):
    """Return {latency_s, bytes_per_s} of two ranks.

    None without two GPUs, or where two processes cannot talk.
    """
    if not dist.is_available() or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    if not on_speaking_terms():
        print("no all-reduce: no network interface is up, not even loopback")
        return None
    sizes = [4, 2**12] if smoke else [4, 2**23, 2**25, 2**26]
    repeats = 3 if smoke else 20
    try:
        found = ranks.spawn(
            all_reduce_s, 2, sizes, repeats, device.type, timeout_s=120
        )
    except (RuntimeError, TimeoutError) as error:
        lines = str(error).strip().splitlines()
        first, *more = lines or [type(error).__name__]
        words = [first.removesuffix("; its last lines:"), *more[-1:]]
        print(f"no all-reduce: {': '.join(words):.160}")
        return None
    return latency_and_rate(sizes, best_calls_s(found))


def memmove_rate(room, budget_s):
    """Copy by the C library's memmove, in bytes/s, on torch's many threads.

    Of a large block it may write past the caches; what torch's copy stores
    is read first.  Bytes read and bytes written count, as for torch's copy.
    """
    size = min(max(ceilings.cache_bytes(), 2**26), room // 2)
    there, here = (torch.ones(size, dtype=torch.uint8) for _ in "ab")
    count = torch.get_num_threads()
    step = -(-size // count)

    def move(at):  # without the interpreter's lock
        to, start = there.data_ptr() + at, here.data_ptr() + at
        ctypes.memmove(to, start, min(step, size - at))

    with ThreadPoolExecutor(count) as pool:

        def call():
            return list(pool.map(move, range(0, size, step)))

        taken_s = ceilings.shortest(call, here.device, budget_s)
    return 2 * size / taken_s


def look(device, sizes, room, budget_s):
    """Measure products, and the memory, once; ``budget_s`` for each."""
    rates = {
        dtype: ceilings.gemm_flops(dtype, device, sizes, budget_s)
        for dtype in ceilings.DTYPES
        if dtype != "tf32" or device.type == "cuda"
    }
    found = ceilings.bandwidth(device, room, budget_s / 2)
    found["memmove_bytes_per_s"] = (
        memmove_rate(room, budget_s / 4) if device.type == "cpu" else None
    )
    return {"gemm_flops": rates} | found


def modes(looks):
    """Yield a line for each dtype whose looks do not agree."""
    for dtype in looks[0]["gemm_flops"]:
        rates = [each["gemm_flops"][dtype] for each in looks]
        if None in rates or max(rates) < TWO_MODES * min(rates):
            continue
        least, most = (tables.cell(f(rates), "_flops") for f in (min, max))
        yield (
            f"products, {dtype}: {len(rates)} looks reached {least} to "
            f"{most}; the best counts"
        )


def measure(device, smoke):
    """Return this device's ceilings, found with more patience than elsewhere.

    ``machine.peaks`` takes 3 s; what another look finds better is better,
    since interference only takes away, and so is what an earlier run found.
    A smoke run looks once, at next to nothing, and keeps nothing.
    """
    found = {} if smoke else machine.peaks(device, refresh=True)
    # a CPU may be at its best while both matrices are in its caches
    sizes = (256, 512, 1024, 2048)
    if device.type != "cpu":
        sizes = 4096, 8192, 16384
    sizes, budget_s = ((64,), 0.01) if smoke else (sizes, 1.0)
    room = 2**20 if smoke else room_bytes(device)
    looks = [look(device, sizes, room, budget_s)]
    others = ceilings.transfer(device, 2**20 if smoke else 2**28)
    others["disk_read_bytes_per_s"] = disk_read(
        machine.cache_dir(),
        2**22 if smoke else 2**28,
        budget_s=0.0 if smoke else 2.0,
    )
    others["all_reduce"] = all_reduce(device, smoke)
    for _ in range(0 if smoke else LOOKS - 1):
        looks.append(look(device, sizes, room, budget_s))
    for line in modes(looks):
        print(line)
    for each in (*looks, others):
        found = machine.better(found, each)
    return found if smoke else machine.keep_peaks(found, device)
