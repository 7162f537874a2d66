"""What hardware reaches at best: printed by its vendor, or measured here.

A percentage needs a ceiling.  A published peak is arithmetic at a clock that
no long run holds; a measured one is what a large, regular piece of work gets
on this machine.  ``machine.peaks`` keeps the measured ones in a file.
"""

import functools
import math
import re
import time
from pathlib import Path

import torch

# Dense matrix peaks in 1e12 FLOP/s: float32, tf32, bfloat16, float16 (these
# two accumulating in float32).  Vendors' data sheets; where one prints only
# the figure with sparsity, half of it.  The first row counts whose words are
# all in the device's name; a row without figures is a name that says too
# little.
PUBLISHED = {
    "mig": None,  # a slice of a GPU
    "grid": None,  # likewise
    "laptop": None,  # same name, another chip and power limit
    "max q": None,
    "gb200": (80, 1250, 2500, 2500),
    "b200": (75, 1125, 2250, 2250),
    "gh200": (67, 494.7, 989.4, 989.4),
    "h200 nvl": (60, 417.5, 835.5, 835.5),
    "h200": (67, 494.7, 989.4, 989.4),
    "h100 pcie": (51.2, 378, 756, 756),
    "h100 nvl": (60, 417.5, 835.5, 835.5),
    "h100 hbm3": (67, 494.7, 989.4, 989.4),  # how the SXM part calls itself
    "h100 sxm5": (67, 494.7, 989.4, 989.4),
    "a100 64gb": None,  # made for one computer, with more cores
    "a100": (19.5, 156, 312, 312),
    "a30": (10.3, 82, 165, 165),
    "a40": (37.4, 74.8, 149.7, 149.7),
    "a10": (31.2, 62.5, 125, 125),
    "a10g": (35, 35, 70, 70),
    "a6000": (38.7, 77.4, 154.8, 154.8),
    "l4": (30.3, 60, 121, 121),
    "l40": (90.5, 90.5, 181, 181),
    "l40s": (91.6, 183, 362, 362),
    "t4": (8.1, None, None, 65),
    "v100 pcie": (14, None, None, 112),
    "v100 sxm2": (15.7, None, None, 125),
    "v100 sxm3": (15.7, None, None, 125),
    "v100s pcie": (16.4, None, None, 130),
    "rtx 3090 ti": (40, 40, 80, 80),
    "rtx 3090": (35.6, 35.6, 71, 71),
    "rtx 4080 super": (52.2, 52.2, 104.4, 104.4),
    "rtx 4080": (48.7, 48.7, 97.5, 97.5),
    "rtx 4090 d": None,
    "rtx 4090": (82.6, 82.6, 165.2, 165.2),
    "rtx 5090 d": None,
    "rtx 5090": (104.8, 104.8, 209.5, 209.5),
    "rtx 6000 ada": (91.1, 182.1, 364.2, 364.2),
    "mi210": (45.3, None, 181, 181),
    "mi250x mi250": None,
    "mi250": (45.3, None, 181, 181),  # torch sees each half as one device
    "mi250x": (47.9, None, 191.5, 191.5),
    "mi300x": (163.4, 653.7, 1307.4, 1307.4),
    "mi325x": (163.4, 653.7, 1307.4, 1307.4),
}
DTYPES = ("float32", "tf32", "bfloat16", "float16")


def published_peak(gpu_name: str, dtype: str | torch.dtype) -> float | None:
    """Return a GPU's dense matrix peak in FLOP/s, as its vendor prints it.

    Args:
        gpu_name: the full name, as ``torch.cuda.get_device_name`` gives it.
        dtype: float32, tf32, bfloat16 or float16.

    Returns:
        None for an unknown or ambiguous device or dtype: never a guess.
    """
    dtype = str(dtype).removeprefix("torch.")
    words = re.findall(r"[a-z0-9]+", str(gpu_name or "").lower())
    if any(re.fullmatch(r"\d{1,3}[abcq]", w) for w in words):
        return None  # a virtual GPU's profile, such as A100-10C
    for row, figures in PUBLISHED.items():
        if set(row.split()) <= set(words):
            if not figures or dtype not in DTYPES:
                return None
            figure = figures[DTYPES.index(dtype)]
            return figure and figure * 1e12
    return None


def shortest(call, device: torch.device, budget_s: float) -> float:
    """Return the shortest of a warm call's times, in seconds.

    Interference only ever adds time, so the shortest is the hardware's.  A
    first call, which loads kernels and makes cuBLAS's workspace, is done and
    waited for before; then at least two are timed, whatever the budget.
    """
    cuda = device.type == "cuda"
    call()
    if cuda:
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    best, end = math.inf, time.perf_counter() + budget_s
    for turn in range(10_000):
        if cuda:  # events leave out the launch
            start, stop = (
                torch.cuda.Event(enable_timing=True) for _ in range(2)
            )
            start.record()
            call()
            stop.record()
            stop.synchronize()
            took = start.elapsed_time(stop) / 1e3
        else:
            before = time.perf_counter()
            call()
            if device.type == "mps":
                torch.mps.synchronize()
            took = time.perf_counter() - before
        best = min(best, took)
        if turn and time.perf_counter() > end:
            break
    return best


def gemm_flops(
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    sizes: tuple[int, ...] | None = None,
    budget_s: float = 0.8,
) -> float | None:
    """Multiply square matrices and return the best rate, in FLOP/s.

    An emulated dtype is slow by a factor of 50: a size that would not fit
    the budget, going by a first small product, is left out.

    Args:
        dtype: float32 (in full precision), tf32, bfloat16 or float16.
        device: where; a CPU uses torch's present number of threads.
        sizes: n of the (n, n) matrices, ascending.
        budget_s: about how long it may take.

    Returns:
        None where the device has no such product.
    """
    device = torch.device(device)
    sizes = sizes or ((1024, 2048) if device.type == "cpu" else (4096, 8192))
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(
        "high" if dtype == "tf32" else "highest"
    )

    def rate(n, budget_s):
        own = torch.Generator(device)  # the caller's numbers stay as they are
        a, b = (
            torch.randn(n, n, device=device, generator=own).to(kind)
            for _ in "ab"
        )
        call = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        return 2 * n**3 / shortest(call, device, budget_s)

    try:
        probe = rate(512, 0.02)
        fit = [n for n in sizes if 4 * n**3 / probe < budget_s]  # the timed
        return max([rate(n, budget_s / len(fit)) for n in fit] or [probe])
    except (RuntimeError, TypeError):
        return None
    finally:
        torch.set_float32_matmul_precision(before)


def cache_bytes() -> int:
    """Return the CPU's last-level caches added up, in bytes.

    A machine with several sockets or dies has one for each.  64 MiB is
    assumed where the system does not tell.
    """
    found = {}

    def read(file):
        try:
            return file.read_text().strip()
        except OSError:
            return ""

    for index in Path("/sys/devices/system/cpu").glob(
        "cpu[0-9]*/cache/index*"
    ):
        size, level = read(index / "size"), read(index / "level")
        if level.isdigit() and size[:-1].isdigit():
            unit = {"K": 2**10, "M": 2**20}.get(size[-1], 1)
            shared = read(index / "shared_cpu_list")
            found[int(level), shared] = int(size[:-1]) * unit
    top = max((level for level, _ in found), default=0)
    return sum(s for (k, _), s in found.items() if k == top) or 2**26


def bandwidth(device: torch.device, room: int, budget_s: float = 0.4) -> dict:
    """Copy and add arrays that the caches do not hold.

    Bytes read and bytes written both count (McCalpin's STREAM does the
    same); that a CPU reads a line before it overwrites it does not.

    Args:
        device: whose memory.
        room: bytes that the three arrays may take together.
        budget_s: for each of the two.

    Returns:
        copy_bytes_per_s, triad_bytes_per_s; buffer_bytes (of each array)
        and cache_bytes, so that a reader sees whether memory was reached.
    """
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        cache = getattr(chip, "L2_cache_size", 2**26)
        size = 2**30
    else:
        cache = cache_bytes()
        size = max(cache, 2**26)
    size = max(2**20, min(size, room // 3)) // 4 * 4
    a, b, c = (torch.ones(size // 4, device=device) for _ in "abc")
    copy = functools.partial(a.copy_, b)
    triad = functools.partial(torch.add, b, c, alpha=2.0, out=a)
    return {
        "copy_bytes_per_s": 2 * size / shortest(copy, device, budget_s),
        "triad_bytes_per_s": 3 * size / shortest(triad, device, budget_s),
        "buffer_bytes": size,
        "cache_bytes": cache,
    }


def transfer(device: torch.device, size: int = 2**27) -> dict:
    """Copy between pinned host memory and the GPU, each way, in bytes/s."""
    keys = "host_to_device_bytes_per_s", "device_to_host_bytes_per_s"
    if device.type != "cuda":
        return dict.fromkeys(keys)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    calls = [
        functools.partial(there.copy_, host, non_blocking=True),
        functools.partial(host.copy_, there, non_blocking=True),
    ]
    rates = [size / shortest(call, device, 0.1) for call in calls]
    return dict(zip(keys, rates, strict=True))


def measure(device: torch.device, known: dict, room: int) -> dict:
    """Measure what ``known`` lacks, about 3 seconds in all.

    Args:
        device: whose arithmetic and memory.
        known: figures that need no measuring.
        room: bytes of main memory that may be used.

    Returns:
        gemm_flops {dtype: FLOP/s or None} and what ``bandwidth`` and
        ``transfer`` return, as far as it was missing.
    """
    rates = dict(known.get("gemm_flops", {}))
    for dtype, budget_s in zip(DTYPES, (1.0, 0.4, 0.5, 0.4), strict=True):
        if dtype not in rates and (dtype != "tf32" or device.type == "cuda"):
            rates[dtype] = gemm_flops(dtype, device, budget_s=budget_s)
    found = {"gemm_flops": rates}
    keys = "copy_bytes_per_s", "triad_bytes_per_s", "cache_bytes"
    if any(known.get(key) is None for key in keys):
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0] // 4
        found |= bandwidth(device, room)
    if "device_to_host_bytes_per_s" not in known:
        found |= transfer(device)
    return found
