"""3.2.2  Operators and allocation · PyTorch 運算元的記憶體分配

Question  How much memory does one expression ask for, by the way it is
          written?
Expect    relu(x w + b) of N float32: three results of 4 N bytes as
          written, one with in-place operators or fused ones, none into
          buffers given by out=; autograd refuses out=
Run       python -m ch03_pytorch_basics.operator_allocation [--smoke] [--save]
"""

import os
import textwrap

import torch

from common import bench, machine, tables


def allocations(function):
    """Every result asks the allocator for memory, and the profiler notes it.

    Returns:
        {"count": blocks that ``function()`` asked for, "bytes": of all of
        them, "peak_bytes": the most that lived at once}; empty blocks do
        not count.
    """
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(
        activities=[cpu], profile_memory=True, acc_events=True
    ) as profiler:
        result = function()  # kept: it must outlive the profile
    found = profiler.profiler.kineto_results.events()
    memory = [event for event in found if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    count = total = alive = peak = 0
    for event in memory:
        count += event.nbytes() > 0
        total += max(event.nbytes(), 0)
        alive += event.nbytes()
        peak = max(peak, alive)
    del result
    return {"count": count, "bytes": total, "peak_bytes": peak}


def new_results(x, w, b):
    """Give every operator a result of its own."""
    return torch.relu(x * w + b)


def in_place(x, w, b):
    """Write the second and third result over the first."""
    return (x * w).add_(b).relu_()


def into_buffers(x, w, b, out):
    """Write all three results into memory that was there before."""
    torch.mul(x, w, out=out)
    torch.add(out, b, out=out)
    return torch.clamp_min(out, 0, out=out)


def fused(x, w, b):
    """Never write the product to memory: it lives in a register."""
    return torch.addcmul(b, x, w).relu_()


# --- what is run ------------------------------------------------------------

# blocks of 4 N bytes: asked for, alive at once; numbers moved per element
BY_HAND = {
    "new results": (3, 2, 3 + 3 + 2),
    "in place": (1, 1, 3 + 3 + 2),
    "out=": (0, 0, 3 + 3 + 2),
    "fused": (1, 1, 4 + 2),
}


def variants(x, w, b):
    """Return {row: call of no arguments}."""
    out = torch.empty_like(x)
    return {
        "new results": lambda: new_results(x, w, b),
        "in place": lambda: in_place(x, w, b),
        "out=": lambda: into_buffers(x, w, b, out),
        "fused": lambda: fused(x, w, b),
    }


def inputs(size, device, grad=False):
    """Return x, w and b of ``size`` float32."""
    torch.manual_seed(0)
    return [
        torch.randn(size, device=device, requires_grad=grad) for _ in range(3)
    ]


def page_faults(call):
    """Count the pages that the system maps while ``call`` runs.

    A large block goes back to the system when it is freed; the next one's
    pages are mapped, and cleared, when they are first written.

    Returns:
        Faults without disk access; None where the system does not tell.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def counted(size, device):
    """Count what each row asks for, against what was counted by hand.

    Raises:
        Mismatch: a block more or less, or another size.
    """
    rows = []
    for name, call in variants(*inputs(size, device)).items():
        call()  # what is made once is not the expression's
        found = allocations(call)
        blocks, alive, moved = BY_HAND[name]
        block = block_bytes(4 * size, device)
        expected = {
            "count": blocks,
            "bytes": blocks * block,
            "peak_bytes": alive * block,
        }
        alike = found == expected
        if device.type != "cpu":  # a cached block may be larger than asked
            alike = found["count"] == blocks
            alike &= found["bytes"] >= expected["bytes"]
        if not alike:
            raise bench.Mismatch(f"{name}: {found}, by hand {expected}")
        rows.append(
            {
                "name": name,
                "allocations": blocks,
                "allocated_bytes": expected["bytes"],
                "peak_bytes": expected["peak_bytes"],
                "moved_bytes": 4 * moved * size,
                "page_faults": page_faults(call),
            }
        )
    return rows


def block_bytes(size, device):
    """Return what the allocator hands out for so many bytes.

    CUDA's rounds up to 512 bytes; the CPU's gives what was asked for.
    """
    return size if device.type == "cpu" else -(-size // 512) * 512


def with_gradient(size, device):
    """Count forward's blocks where autograd must be able to go back.

    In-place operators may write over what nobody needs: the product is not
    needed to go back through the sum, and relu goes back from its own
    result.  What is needed and overwritten, autograd refuses.
    """
    rows, expected = [], None
    for name, call in variants(*inputs(size, device, grad=True)).items():
        try:
            answer = call()
        except RuntimeError as error:
            rows.append({"name": name, "autograd": "refused"})
            rows[-1]["says"] = str(error)
            continue
        x, w, b = inputs(size, device, grad=True)
        found = allocations(variants(x, w, b)[name])
        answer = variants(x, w, b)[name]()
        gradients = torch.autograd.grad(answer.sum(), [x, w, b])
        if expected is None:
            expected = gradients
        for one, other in zip(gradients, expected, strict=True):
            if not torch.allclose(one, other):
                raise bench.Mismatch(f"{name}: other gradients")
        rows.append(
            {
                "name": name,
                "allocations": found["count"],
                "allocated_bytes": found["bytes"],
                "autograd": "same gradients",
            }
        )
    return rows


TECHNIQUES = (allocations, new_results, in_place, into_buffers, fused)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a line per profile
    device = args.device
    size = 1 << (10 if args.smoke else 23 if device.type == "cpu" else 26)
    rows = counted(size, device)
    bench.report(
        args,
        rows,
        title=f"relu(x w + b), {size:,} float32: blocks seen by the profiler, "
        "counted by hand",
    )
    trained = bench.report(
        args,
        with_gradient(min(size, 1 << 16), device),
        ["name", "allocations", "allocated_bytes", "autograd"],
        title="the same where x, w and b want gradients, of fewer numbers",
    )
    for row in trained:
        if row["autograd"] == "refused":
            words = f"{row['name']} is refused: {row['says']}"
            print(textwrap.fill(words, tables.WIDTH))
    amounts = {row["name"]: row["moved_bytes"] for row in rows}
    expect = "time follows the bytes moved, and the memory asked for"
    if not args.smoke:
        peaks = machine.peaks(device)
        bounds = ", ".join(
            f"{tables.seconds(moved / peaks['copy_bytes_per_s'])} ({name})"
            for name, moved in amounts.items()
            if moved > peaks["cache_bytes"]
        )
        if bounds:
            expect = f"at least {bounds}, and the page faults of new memory"
    x, w, b = inputs(size, device)
    bench.compare(
        args,
        {
            name: lambda name=name: variants(x, w, b)[name]
            for name in variants(x, w, b)
        },
        bytes=amounts,
        budget_s=4.0,
        expect=expect,
        title=f"time of relu(x w + b), {size:,} float32",
    )
    return args.rows


if __name__ == "__main__":
    bench.run(main)
