"""What this machine is, what it can do at best, and which code ran on it.

A number is worth what is known about where it was measured: ``card`` names
the hardware and the versions, ``peaks`` measures the ceilings that a
percentage refers to, ``published_peak`` knows the ones vendors print, and
``source`` names the code.  None of them carries a host name, a user or a path.
"""

import argparse
import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

from common import bench, ceilings, gpu_clock
from common.ceilings import published_peak as published_peak

try:
    import psutil
except ImportError:  # memory and clock are then unknown on some systems
    psutil = None

ROOT = Path(__file__).resolve().parent.parent
METHOD = 2  # raise it when a change makes stored peaks incomparable
GIB = 2**30
CGROUP = "/sys/fs/cgroup"
PACKAGES = ("common", "chapters", "benchmarks", "ch[0-9][0-9]_*")
SOURCES = {".py", ".c", ".cpp", ".cu", ".sh", ".toml"}


# --- the card ---------------------------------------------------------------


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _run(*command: str) -> str | None:
    """Return what a command prints; None if it fails or is not there."""
    # a caller's GIT_DIR (set inside hooks) would name another repository
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=10, check=True, env=env
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


@functools.cache
def _cpu_model() -> str:
    name = None
    if platform.system() == "Darwin":
        name = _run("sysctl", "-n", "machdep.cpu.brand_string")
    elif platform.system() == "Linux":
        row = re.compile(r"^model name\s*:\s*(.+)$", re.M | re.I)
        found = row.search(_read("/proc/cpuinfo") or "")
        found = found or row.search(_run("lscpu") or "")  # ARM
        name = found and found[1]
    name = name or platform.processor() or platform.machine() or "unknown CPU"
    return re.sub(r"\((R|TM)\)|\s+@.*", "", " ".join(name.split()))


def cores() -> int:
    """Return how many cores this process may use at once.

    Affinity and a container's CPU quota count: a container with two of 64
    cores has 2, and threads beyond them only wait.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        usable = len(os.sched_getaffinity(0))
    else:
        usable = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    limit = (_read(f"{CGROUP}/cpu.max") or "").split()
    if not limit:  # version 1
        files = (
            f"{CGROUP}/cpu/cpu.cfs_quota_us",
            f"{CGROUP}/cpu/cpu.cfs_period_us",
        )
        limit = [_read(f) or "" for f in files]
    if all(v.isdigit() for v in limit) and int(limit[1]):
        usable = min(usable, math.ceil(int(limit[0]) / int(limit[1])))
    return max(1, usable)


def memory_bytes() -> int | None:
    """Return the main memory that this process may use, in bytes."""
    total = None
    if psutil is not None:
        total = psutil.virtual_memory().total
    elif platform.system() == "Darwin":
        total = int(_run("sysctl", "-n", "hw.memsize") or 0) or None
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _read(f"{CGROUP}/{name}") or ""
        if total and limit.isdigit():
            total = min(total, int(limit))
    return total


def _native_matmul(dtype: str) -> bool:
    """Say whether the CPU multiplies such matrices without emulation."""
    try:
        return bool(
            getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")()
        )
    except (AttributeError, RuntimeError):
        return False


def _gpu(device: torch.device) -> dict | None:
    if device.type == "mps" and torch.backends.mps.is_available():
        memory = torch.mps.recommended_max_memory() / GIB
        found = {"name": _cpu_model(), "memory_gib": round(memory, 1)}
    elif device.type == "cuda" and torch.cuda.is_available():
        index = device.index or 0
        p = torch.cuda.get_device_properties(index)
        found = {
            "name": p.name,
            "memory_gib": round(p.total_memory / GIB, 1),
            "sm_count": p.multi_processor_count,
            "count": torch.cuda.device_count(),
            "capability": p.gcnArchName
            if torch.version.hip
            else f"{p.major}.{p.minor}",
        } | ({} if torch.version.hip else gpu_clock.state(index))
    else:
        return None
    keys = "sm_count", "count", "capability", "driver", "clocks"
    return dict.fromkeys((*keys, "power_limit_w")) | found


def card(device: str | torch.device = "cpu") -> dict:
    """Describe the machine a measurement ran on, as plain JSON.

    The GPU is asked only when ``device`` is one: a question starts CUDA,
    and a process that did so can no longer fork its workers.

    Args:
        device: where the work runs; ``gpu`` is None for the CPU.

    Returns:
        id, cpu, isa, native_matmul, cores, threads, governor, cpu_mhz,
        memory_gib, gpu, os, python, torch, cuda, hip, versions.
    """
    device = torch.device(device)
    memory = memory_bytes()
    governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    mhz = None
    with contextlib.suppress(Exception):  # absent on some ARM systems
        mhz = round(psutil.cpu_freq().current)
    versions = {}
    for name in ("numpy", "tiktoken", "datasets", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = {
        "id": None,
        "cpu": _cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "native_matmul": {
            "bfloat16": _native_matmul("bf16"),
            "float16": _native_matmul("fp16"),
        },
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "governor": _read(governor),
        "cpu_mhz": mhz,
        "memory_gib": round(memory / GIB, 1) if memory else None,
        "gpu": _gpu(device),
        "os": f"{platform.system()} {platform.release()}".strip(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "versions": versions,
    }
    found["id"] = _identity(found)
    return found


def _words(name: str) -> str:
    """Shorten a model name: "AMD EPYC 7763 64-Core Processor", epyc-7763."""
    name = re.sub(r"\d+-core|\d+th gen|with .*", "", name.lower())
    noise = "intel amd nvidia cpu processor geforce tesla instinct graphics"
    words = re.findall(r"[a-z0-9]+", name)
    return "-".join([w for w in words if w not in noise.split()][:3]) or "cpu"


def _identity(found: dict) -> str:
    gpu = found["gpu"] or {}
    memory = round(found["memory_gib"] or 0)
    facts = [found["cpu"], found["cores"], memory, found["os"].split()[0]]
    facts += [found["arch"], gpu.get("name"), round(gpu.get("memory_gib", 0))]
    tail = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:6]
    name = _words(gpu.get("name") or found["cpu"])
    return f"{name}-{found['cores']}c-{memory}g-{tail}"


def identity(device: str | torch.device = "cpu") -> str:
    """Return hardware words and a short hash, alike on equal machines.

    Clocks, threads, versions and free memory are not in it.
    """
    return card(device)["id"]


def line(found: dict | None = None) -> str:
    """Return a card in one line of at most 100 columns."""
    found = found or card()
    gpu = found["gpu"]
    parts = [
        f"{found[key]} {key}" if found[key] != 1 else f"1 {key[:-1]}"
        for key in ("cores", "threads")
    ]
    parts += [f"{found['memory_gib']} GiB", found["os"].split()[0]]
    parts += [f"torch {found['torch']}", found["id"].rsplit("-", 1)[-1]]
    tail = " · ".join(parts)
    name = f"{gpu['name']} + {found['cpu']}" if gpu else found["cpu"]
    room = 100 - len(tail) - 3
    if len(name) > room:
        name = name[: room - 1] + "…"
    return f"{name} · {tail}"[:100]


# --- which code -------------------------------------------------------------


def cache_dir() -> Path:
    """Return the user's cache folder, made if possible; never raises.

    ``BENCH_CACHE`` overrides it.  Writing into it may still fail.
    """
    system, env = platform.system(), os.environ
    named = env.get(
        "LOCALAPPDATA" if system == "Windows" else "XDG_CACHE_HOME"
    )
    inside = "Library/Caches" if system == "Darwin" else ".cache"
    if env.get("BENCH_CACHE"):
        folder = Path(env["BENCH_CACHE"])
    else:
        try:
            base = Path(named) if named else Path.home() / inside
        except RuntimeError:  # nobody's home
            return _homeless_cache(tempfile.gettempdir())
        folder = base / "native-pytorch-performance"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _homeless_cache(shared: str) -> Path:
    """Return this user's folder inside a folder that others write to.

    Its name can be guessed, so somebody may have made it before us: then a
    folder that lives as long as the process takes its place.
    """
    user = getattr(os, "getuid", lambda: "user")()
    folder = Path(shared) / f"native-pytorch-performance-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        if not only_ours(folder):
            folder = Path(tempfile.mkdtemp(dir=shared))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def only_ours(path: Path) -> bool:
    """Tell whether nobody else can have written a file, or into a folder.

    What runs as code is loaded from such places alone.  Owner and mode are
    asked on POSIX only: elsewhere a user's folders are the user's by default.
    """
    if os.name != "posix":
        return True
    try:
        found = path.lstat()  # a link is no place of ours, wherever it leads
    except OSError:
        return False
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    link = stat.S_ISLNK(found.st_mode)
    return found.st_uid == os.geteuid() and not others and not link


def source() -> dict:
    """Name the code that ran; quick, and never raises.

    Returns:
        ``{"commit": sha, "dirty": bool}`` in a git checkout (dirty: tracked
        source differs; results, notebooks and Markdown do not count), else
        ``{"sources": sha256}`` over the files of our packages.
    """
    git = functools.partial(_run, "git", "-C", str(ROOT))
    # a copy without git may lie inside somebody's other repository
    if git("ls-files", "--error-unmatch", "common/machine.py"):
        commit = git("rev-parse", "HEAD")
        names = git("diff", "--name-only", "--no-renames", "-z", "HEAD")
        if commit and names is not None:
            changed = [Path(n) for n in names.split("\0") if n]
            return {"commit": commit, "dirty": any(map(_is_source, changed))}
    digest = hashlib.sha256()
    with contextlib.suppress(OSError):
        for path in sorted(
            p for k in PACKAGES for p in ROOT.glob(f"{k}/**/*")
        ):
            name = path.relative_to(ROOT)
            if path.suffix in SOURCES and _is_source(name):
                text = path.read_bytes().replace(b"\r\n", b"\n")
                digest.update(f"{name.as_posix()} {len(text)} ".encode())
                digest.update(text)
    return {"sources": digest.hexdigest()}


def _is_source(path: Path) -> bool:
    generated = path.suffix in {".ipynb", ".md"} or "results" in path.parts
    return not generated


# --- ceilings ---------------------------------------------------------------

QUIET = 0.3  # share of the CPU in use up to which ceilings are believed
_again: set[Path] = set()  # measured a second time by this process


def _busy() -> float | None:
    """Return the share of the CPU in use, waiting 0.1 s; None unknown."""
    if psutil is None:
        return None
    return round(psutil.cpu_percent(0.1) / 100, 2)


def _stored(path: Path, key: dict) -> dict:
    """Return a file's figures; empty if it is cut short or of another kind."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rates = [v for k, v in found.items() if k.endswith("_per_s")]
        rates += found["gemm_flops"].values()
        rates += (found.get("all_reduce") or {}).values()
        good = all(r is None or 0 < float(r) < math.inf for r in rates)
        good = good and 0 <= float(found.get("busy") or 0) <= 1
        good = good and {k: found[k] for k in key} == key
        return found if good and int(found["threads"]) > 0 else {}
    except (AttributeError, KeyError, OSError, RecursionError, TypeError):
        return {}
    except ValueError:  # cut short, or no JSON
        return {}


def _place(device: torch.device, threads: int) -> tuple[Path, dict, dict]:
    """Return the file of this machine's ceilings, its key and content."""
    key = {"id": identity(device), "method": METHOD}
    key["torch"] = torch.__version__
    path = cache_dir() / f"peaks-{key['id']}.json"
    found = _stored(path, key)
    if device.type == "cpu" and found and found["threads"] != threads:
        # the first number of threads has the plain name, others stand beside
        path = path.with_name(f"{path.stem}-{threads}t.json")
        found = _stored(path, key | {"threads": threads})
    return path, key, found


def better(old: dict, found: dict) -> dict:
    """Return the figures of both, and of each rate the greater.

    Interference only takes away: the best ever seen is the nearest to what
    the hardware can do.

    Args:
        old: what ``peaks`` returns, or some of it.
        found: likewise; decides where a figure is no rate.
    """
    both = old | found
    for name in old.keys() & found.keys():
        before, after = old[name], found[name]
        if before is None or after is None:  # one was not measured
            both[name] = before if after is None else after
        elif isinstance(after, dict):
            both[name] = better(before, after)
        elif name.endswith("latency_s"):
            both[name] = min(before, after)
        elif name.endswith("_per_s") or name in ceilings.DTYPES:
            both[name] = max(before, after)
    return both


def peaks(
    device: str | torch.device = "cpu",
    threads: int | None = None,
    refresh: bool = False,
) -> dict:
    """Return what this machine reaches at best; measure what is missing.

    Some 3 seconds the first time; afterwards ``peaks-<id>.json`` in the cache
    folder is read.  It keeps the best of each rate that any run has seen
    (``better``, ``keep_peaks``); delete it to begin anew, say after a change
    of clocks.  A ceiling found beside a busy neighbour is too low: where the
    file says so and the neighbour has become quieter, a process measures
    again, once.

    Args:
        device: whose arithmetic and memory.
        threads: of the CPU; None is torch's present number.
        refresh: measure again, too, whatever is stored.

    Returns:
        id, method, torch, threads; gemm_flops {dtype: FLOP/s or None},
        copy_bytes_per_s, triad_bytes_per_s, buffer_bytes, cache_bytes,
        host_to_device_bytes_per_s, device_to_host_bytes_per_s, all_reduce;
        busy, the share of the CPU in use just before (None unknown).

    Raises:
        Refusal: when the device is not there.
    """
    device = bench.device_of(str(device))
    before = torch.get_num_threads()
    threads = threads or before
    path, key, stored = _place(device, threads)
    found, loud = stored, stored.get("busy") or 0
    if refresh:
        found = {}
    elif loud > QUIET and path not in _again and (_busy() or 0) < loud:
        _again.add(path)
        found = {}
    found = {**key, "threads": threads, "gemm_flops": {}} | found
    room = (memory_bytes() or GIB) // 4
    if psutil is not None:
        room = min(room, psutil.virtual_memory().available // 2)
    if "busy" not in found:
        found["busy"] = _busy()
    try:
        torch.set_num_threads(threads)
        found |= ceilings.measure(device, found, room)
    finally:
        torch.set_num_threads(before)
    found.setdefault("all_reduce", None)  # needs ranks: see keep_peaks
    return found if found == stored else keep_peaks(found, device, threads)


def keep_peaks(
    found: dict, device: str | torch.device = "cpu", threads: int | None = None
) -> dict:
    """Add figures to this machine's file; without room it stays as it was.

    A script that sees a rate above its ceiling says so here, for a rate that
    was seen can be reached.

    Args:
        found: what ``peaks`` returns, or some of it, such as
            ``{"all_reduce": {"latency_s": ..., "bytes_per_s": ...}}``.
        device: as given to ``peaks``.
        threads: as given to ``peaks``.

    Returns:
        all figures, the ``better`` of those in the file and those found.
    """
    threads = threads or torch.get_num_threads()
    path, key, old = _place(torch.device(device), threads)
    blank = {**key, "threads": threads, "gemm_flops": {}}
    found = better(blank | old, found)
    with contextlib.suppress(OSError):
        bench.write_atomic(path, json.dumps(found, indent=1) + "\n")
    return found


def main(argv: list[str] | None = None) -> dict:
    """Print the card, and with ``--peaks`` the ceilings."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", help="cpu, cuda or mps")
    parser.add_argument("--peaks", action="store_true")
    args = parser.parse_args(argv)
    device = bench.device_of(args.device)
    found = card(device)
    print(line(found), end="\n\n")
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        print(f"{name:14} {'-' if value is None else value}")
    if args.peaks:
        print("\n" + json.dumps(peaks(device), indent=1))
    return found


if __name__ == "__main__":
    bench.run(main)
