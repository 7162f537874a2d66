"""What a device reaches at best, measured with patience and kept.

``machine.peaks`` takes 3 s for products and memory; here they get longer,
and the disk and the exchange between two processes are measured as well.
"""

import contextlib
import functools
import os
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ch02_hardware.memory_hierarchy import room_bytes
from common import ceilings, machine, ranks, timers


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


def disk_read(folder, size, block=2**22):
    """Read a file of ``size`` bytes that no cache holds, in bytes/s.

    None where nothing can be written, or the cache cannot be told to forget.
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
        with open(path, "rb", buffering=0) as file:
            if uncached is not None:
                fcntl.fcntl(file, uncached, 1)
            else:
                forget(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            place, count = bytearray(block), 0
            start = time.perf_counter()
            while got := file.readinto(place):
                count += got
            return count / (time.perf_counter() - start)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def all_reduce_s(sizes, repeats, kind="cpu"):
    """Time sums of ``sizes`` bytes over all ranks, in seconds; in a rank."""
    rank = ranks.init(kind)
    medians = []
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
        medians.append(statistics.median(taken[1:]))
    ranks.finish()
    return medians


def latency_and_rate(sizes, seconds):
    """Fit seconds = latency + size / rate through the ends.

    Returns {latency_s, bytes_per_s}, ``sizes`` ascending; None where a larger
    message took no longer.
    """
    extra = seconds[-1] - seconds[0]
    if extra <= 0:
        return None
    rate = (sizes[-1] - sizes[0]) / extra
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
    sizes = [4, 2**12 if smoke else 2**26]
    repeats = 3 if smoke else 10
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
    slowest = [max(times) for times in zip(*found, strict=True)]
    return latency_and_rate(sizes, slowest)


def measure(device, smoke):
    """Return this device's ceilings, found with more patience than elsewhere.

    ``machine.peaks`` takes 3 s; what a second look finds better is better,
    since interference only takes away.  A smoke run looks at next to nothing.
    """
    found = (
        {"gemm_flops": {}} if smoke else machine.peaks(device, refresh=True)
    )
    # a CPU may be at its best while both matrices are in its caches
    sizes = (256, 512, 1024, 2048)
    if device.type != "cpu":
        sizes = 4096, 8192, 16384
    sizes, budget_s = ((64,), 0.0) if smoke else (sizes, 2.0)
    rates = dict(found["gemm_flops"])
    for dtype in ceilings.DTYPES:
        if dtype == "tf32" and device.type != "cuda":
            continue
        again = ceilings.gemm_flops(dtype, device, sizes, budget_s or 0.01)
        rates[dtype] = max(again or 0, rates.get(dtype) or 0) or None
    room = 2**20 if smoke else room_bytes(device)
    again = ceilings.bandwidth(device, room, budget_s)
    again |= ceilings.transfer(device, 2**20 if smoke else 2**28)
    for key, rate in again.items():
        if key.endswith("_per_s"):
            again[key] = max(rate or 0, found.get(key) or 0) or None
    again["disk_read_bytes_per_s"] = disk_read(
        machine.cache_dir(), 2**22 if smoke else 2**28
    )
    again["all_reduce"] = all_reduce(device, smoke)
    found |= {"gemm_flops": rates} | again
    if not smoke:
        machine.keep_peaks(found, device)
    return found
