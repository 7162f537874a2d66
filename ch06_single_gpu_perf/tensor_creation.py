"""6.4.1  Tensor creation · 避免張量的建立銷耗

Question  What does a tensor cost that is made anew in every step?
Expect    made on the host and moved: two allocations and a copy, 12 N bytes
          of float32 written and read; on the device: one and none, 4 N;
          reused with out=: neither. The numbers are computed in each case, so
          the ratio is that of the parts' times, not of their bytes. A big
          tensor that a CPU frees goes back to the system, and the next one
          faults in N / page size pages again
Run       python -m ch06_single_gpu_perf.tensor_creation [--smoke] [--save]
"""

import json
import os
import subprocess
import sys
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch06_single_gpu_perf.fused_operators import reading
from common import bench, tables, timers

MIB = 2**20
SETTLING = 12  # tensors


def list_then_moved(n, device):
    """Make n Python numbers, pack them on the host, copy to the device."""
    return torch.tensor([0.5 * i for i in range(n)]).to(device, copy=True)


def host_then_moved(n, device):
    """Write n numbers to the host's memory, copy them to the device.

    ``copy=True`` makes a CPU, where host and device are one, copy as well.
    """
    return torch.arange(0.0, 0.5 * n, 0.5).to(device, copy=True)


def on_the_device(n, device):
    """Let the device write its own memory: nothing crosses the bus."""
    return torch.arange(0.0, 0.5 * n, 0.5, device=device)


def on_the_default_device(n, device):
    """Say once where all tensors of a block are made, also in foreign code."""
    with torch.device(device):
        return torch.arange(0.0, 0.5 * n, 0.5)


def into_a_buffer(n, buffer):
    """Write into memory that is there already: nothing is allocated.

    ``buffer`` holds n numbers; what it held before is gone.
    """
    return torch.arange(0.0, 0.5 * n, 0.5, out=buffer)


def keep_freed_memory():
    """Keep what tensors free instead of giving it back to the system.

    By default glibc maps large tensors one by one and unmaps them when they
    die; the next one's pages are then faulted in and zeroed again, 4 KiB at
    a time.  For the whole process, and for good; resident memory grows by
    the largest tensors.  False where there is no glibc.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # M_MMAP_MAX = 0: no maps; M_TRIM_THRESHOLD at its largest: no giving back
    return bool(mallopt(-4, 0) and mallopt(-1, 2**31 - 1))


class Copies(TorchDispatchMode):
    """Count the operators, and those that copy tensors as a whole."""

    def __init__(self):
        super().__init__()
        self.operators = self.copies = self.copied_bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is not torch.ops.aten.lift_fresh.default:  # does nothing
            self.operators += 1
        if op.overloadpacket.__name__ in ("_to_copy", "copy_", "clone"):
            self.copies += 1
            self.copied_bytes += out.nbytes
        return out


def cost_of(function):
    """Return operators, copies and allocations of one call.

    Allocations are the profiler's events of all devices' allocators.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it greets on stderr
    function()
    with Copies() as counted:
        function()
    kinds = {torch.profiler.ProfilerActivity.CPU}
    kinds |= torch.profiler.supported_activities()
    with torch.profiler.profile(activities=kinds, profile_memory=True) as p:
        kept = function()
    sizes = [
        event.nbytes()
        for event in p.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    del kept
    made = [size for size in sizes if size > 0]
    return {
        "operators": counted.operators,
        "allocations": len(made),
        "allocated_bytes": sum(made),
        "copies": counted.copies,
        "copied_bytes": counted.copied_bytes,
    }


def predicted(n):
    """Return allocations, copies and bytes written or read, by row."""
    return {
        "host tensor, then moved": (2, 1, 12 * n),
        "on the device": (1, 0, 4 * n),
        "default device": (1, 0, 4 * n),
        "reused with out=": (0, 0, 4 * n),
        "list, then moved": (2, 1, 12 * n),
    }


def ways(n, device):
    """Return {row: factory}: fresh callables that give the same n numbers."""
    buffer = torch.empty(n, device=device)
    functions = {
        "host tensor, then moved": lambda: host_then_moved(n, device),
        "on the device": lambda: on_the_device(n, device),
        "default device": lambda: on_the_default_device(n, device),
        "reused with out=": lambda: into_a_buffer(n, buffer),
        "list, then moved": lambda: list_then_moved(n, device),
    }
    return {name: lambda f=function: f for name, function in functions.items()}


def parts(n, device):
    """Time apart what the rows are made of: {part: seconds}.

    ``fill``: computing and writing the numbers, on the host and on the
    device; ``empty``: an allocation; ``copy``: from host to device;
    ``context``: what a ``torch.device`` block adds to one call.
    """
    cpu = torch.device("cpu")
    host, buffer = torch.empty(n), torch.empty(n, device=device)

    def in_a_block():
        with torch.device(device):
            torch.empty(0)

    works = {
        "fill_host": (lambda: into_a_buffer(n, host), cpu),
        "empty_host": (lambda: torch.empty(n), cpu),
        "fill": (lambda: into_a_buffer(n, buffer), device),
        "empty": (lambda: torch.empty(n, device=device), device),
        "copy": (lambda: buffer.copy_(host), device),
        "block": (in_a_block, device),
        "bare": (lambda: torch.empty(0, device=device), device),
    }
    found = {name: float("inf") for name in works}
    for _ in range(7):  # in turn
        for name, (work, where) in works.items():
            took = timers.wall(work, 100, where)
            found[name] = min(found[name], took)
    found["context"] = max(0.0, found.pop("block") - found.pop("bare"))
    return found


def predicted_s(part):
    """Add up the parts of each row that makes no list."""
    made = part["fill"] + part["empty"]
    moved = part["fill_host"] + part["empty_host"] + part["empty"]
    return {
        "host tensor, then moved": moved + part["copy"],
        "on the device": made,
        "default device": made + part["context"],
        "reused with out=": part["fill"],
    }


def summary(times, part):
    """Return predicted and measured ratios to the first row's, by row."""
    seconds = predicted_s(part)
    first = seconds[times[0]["name"]]
    rows = []
    for row in times[1:]:
        ratio = first / seconds[row["name"]]
        rows.append(
            {
                "name": row["name"],
                "predicted": ratio,
                "measured": row["ratio"],
                "interval": row["ratio_interval"],
                "reading": reading(ratio, row),
            }
        )
    return rows


def explained(rows, part):
    """Say why bytes alone do not give the ratio: lines of text."""
    measured = {row["name"]: row["measured"] for row in rows}
    spared = tables.seconds(part["empty_host"] + part["copy"])
    here, there = (tables.seconds(part[k]) for k in ("fill_host", "fill"))
    yield (
        f"on the device: {measured['on the device']:.2f}× the speed, where "
        f"bytes alone say 3: {spared} of allocating and copying"
    )
    yield (
        f"are spared, but the numbers themselves still take {there} "
        f"(on the host {here})"
    )
    yield (
        f"default device: its block costs {tables.seconds(part['context'])} "
        "of Python for each tensor, whatever its size"
    )


def faults_and_time(size_bytes, times):
    """Make, write and free a tensor; return page faults and seconds of each.

    Medians. The first few are left out: until malloc has settled on one
    place or two, each may be memory that was never used.
    """
    import resource

    faults, seconds = [], []
    for _ in range(SETTLING + times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        torch.empty(size_bytes, dtype=torch.uint8).fill_(1)
        seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        faults.append(after - before)
    faults, seconds = sorted(faults[SETTLING:]), sorted(seconds[SETTLING:])
    return faults[times // 2], seconds[times // 2]


def before_and_after(size_bytes, times):
    """Print faults and seconds without and with ``keep_freed_memory``.

    Run in a process of its own: what mallopt did cannot be undone.
    """
    torch.set_num_threads(1)
    without = faults_and_time(size_bytes, times)
    kept = keep_freed_memory()
    with_it = faults_and_time(size_bytes, times)
    print(json.dumps([without, kept, with_it]))


def in_a_process(size_bytes, times):
    """Run ``before_and_after`` in a child; return what it printed.

    None where the system counts no page faults or has no glibc.
    """
    try:
        import resource  # noqa: F401
    except ImportError:
        return None
    code = (
        "from ch06_single_gpu_perf import tensor_creation; "
        f"tensor_creation.before_and_after({size_bytes}, {times})"
    )
    path = [str(bench.ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    without, kept, with_it = json.loads(done.stdout.splitlines()[-1])
    return (without, with_it) if kept else None


def memory_table(args):
    """Report page faults before and after freed memory is kept."""
    size, times = (64 * MIB, 3) if args.smoke else (64 * MIB, 20)
    found = in_a_process(size, times)
    if found is None:
        print(
            "keep_freed_memory: left out, it is a setting of glibc's malloc "
            "and this system has another"
        )
        return []
    import resource

    pages = size // resource.getpagesize()
    names = "given back when freed", "kept when freed"
    rows = [
        {
            "name": name,
            "page_faults": faults,
            "predicted": most,
            "per_tensor_s": seconds,
        }
        for name, (faults, seconds), most in zip(
            names, found, (pages, 0), strict=True
        )
    ]
    bench.report(
        args,
        rows,
        title=f"A tensor of {size // MIB} MiB made, written and freed, on the "
        "CPU, 1 thread (one process, in this order)",
    )
    first, second = (row["page_faults"] for row in rows)
    if first < pages // 2:
        print(
            f"{first} faults instead of {pages}: this system's pages are "
            "larger, or another malloc is loaded"
        )
    if not args.smoke:
        ratio = rows[0]["per_tensor_s"] / rows[1]["per_tensor_s"]
        print(
            f"{first - second:,} faults fewer per tensor, {ratio:.2f}x the "
            "speed here: chapter 10's trainer has it as --allocator keep"
        )
    return rows


TECHNIQUES = (
    list_then_moved,
    host_then_moved,
    on_the_device,
    on_the_default_device,
    into_a_buffer,
    keep_freed_memory,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    n = 2**10 if args.smoke else 2**14
    if args.device.type != "cpu" and not args.smoke:
        n = 2**22
    awaited = predicted(n)
    variants = ways(n, args.device)
    listed = variants.pop("list, then moved")
    times = bench.compare(
        args,
        variants,
        unit="tensor",
        tolerance=None,
        bytes={name: moved for name, (_, _, moved) in awaited.items()},
        expect="bytes written and read: "
        + ", ".join(
            f"{name} {awaited[name][2] // 1024} KiB" for name in variants
        ),
        budget_s=3.0,
        title=f"{n:,} numbers of float32",
    )
    name = "host tensor, then moved"
    lists = []
    if n <= 2**20:  # else it would take seconds
        lists = bench.compare(
            args,
            {"list, then moved": listed, name: variants[name]},
            unit="tensor",
            tolerance=None,
            budget_s=1.0,
            title=f"{n:,} numbers by way of a Python list",
        )
        variants["list, then moved"] = listed
    part = parts(n, args.device)
    ratios = bench.report(
        args,
        summary(times, part),
        extra={"parts_s": part},
        title="Speed predicted from the parts, each timed apart",
    )
    if not args.smoke:
        print(*explained(ratios, part), "", sep="\n")
    rows = []
    for name, factory in variants.items():
        allocations, copies, _ = awaited[name]
        rows.append(
            {"name": name}
            | cost_of(factory())
            | {"predicted": [allocations, copies]}
        )
    bench.report(
        args,
        rows,
        {
            "name": "row",
            "operators": "operators",
            "allocations": "allocations",
            "allocated_bytes": "allocated",
            "copies": "copies",
            "copied_bytes": "copied",
            "predicted": "predicted",
        },
        title="Counted per tensor; predicted: allocations, copies",
    )
    faults = memory_table(args)
    if args.device.type == "cpu":
        bench.left_out(
            args,
            "the bus between host and device, which a copy crosses only "
            "where there are two memories",
        )
    return times + lists + ratios + rows + faults


if __name__ == "__main__":
    bench.run(main)
