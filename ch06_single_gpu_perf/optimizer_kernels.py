"""6.5.2  Specialised optimizers · 使用性能特化的最佳化器實現

Question  What does an AdamW step cost in its for-loop, foreach and fused form?
Expect    fused 28 bytes per parameter against 80: 2.9 times; foreach the
          same 80 in few launches; beside them what a step of as many tensors
          of one number takes: launches, and Python per tensor
Run       python -m ch06_single_gpu_perf.optimizer_kernels [--smoke] [--save]
"""

import contextlib
import logging
import os
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch06_single_gpu_perf.fused_operators import (
    Traffic,
    copy_rate,
    place,
    reading,
    tensors,
)
from common import bench, tables, timers


@torch.no_grad()
def written_out(parameters, means, squares, step, lr, decay, betas, eps):
    """Move 20 numbers through memory per parameter, in eight operators.

    AdamW as published (Loshchilov & Hutter 2019); ``step`` counts from 1.
    """
    for p, m, v in zip(parameters, means, squares, strict=True):
        p.mul_(1 - lr * decay)  # read and write one tensor: 2
        m.lerp_(p.grad, 1 - betas[0])  # 3
        v.mul_(betas[1])  # 2
        v.addcmul_(p.grad, p.grad, value=1 - betas[1])  # 3
        root = v.sqrt()  # 2
        root /= (1 - betas[1] ** step) ** 0.5  # 2
        root += eps  # 2
        p.addcdiv_(m, root, value=-lr / (1 - betas[0] ** step))  # 4


def adamw(groups, kind, **settings):
    """Launch per tensor and operator, per operator, or once for all.

    ``for-loop`` goes tensor by tensor; ``foreach`` hands all tensors to each
    operator, so all intermediate results live at once; ``fused`` finishes
    each number in registers: 4 reads and 3 writes.  ``groups`` are
    parameters or parameter groups, ``settings`` those of AdamW.
    """
    if kind not in ("for-loop", "foreach", "fused"):
        raise ValueError(f"{kind!r} is not for-loop, foreach or fused")
    return torch.optim.AdamW(
        groups, foreach=kind == "foreach", fused=kind == "fused", **settings
    )


def compiled_step(optimizer):
    """Generate one kernel per tensor from the for-loop's operators.

    The learning rate should be a tensor: a float may be compiled into the
    code, and then each new value costs a compilation.
    """
    return torch.compile(optimizer.step)


# --- counting ---------------------------------------------------------------

# numbers moved per parameter, by hand; compiled at best
PASSES = {
    "written out": 20,
    "for-loop": 20,
    "foreach": 20,
    "fused": 7,
    "compiled": 7,
}


class Live(TorchDispatchMode):
    """Follow the bytes of the tensors that operators create, and their peak.

    Exact to the operator's border, on any device: what a kernel takes for
    itself, and an allocator's rounding, is not seen.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        values = [*args, *(kwargs or {}).values()]
        given = {place(t) for value in values for t in tensors(value)}
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors(result):
            name = place(tensor)
            if name not in given | self.known:
                storage = tensor.untyped_storage()
                self.known.add(name)
                self.now += storage.nbytes()
                weakref.finalize(
                    storage, self.free, name, storage.nbytes()
                ).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def free(self, name, count):
        self.known.discard(name)
        self.now -= count


def transient_bytes(step):
    """Return the most that a step holds beyond what was there before."""
    with Live() as live:
        step()
    return live.peak


# what a CPU computes in, inside of foreach's operators too
ARITHMETIC = {"add", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt"}
ARITHMETIC |= {"fused_adamw"}


def computes(event):
    """Say whether a profiler's event of the CPU is arithmetic."""
    return event.name.removeprefix("aten::").strip("_") in ARITHMETIC


def kernels(events):
    """Count the kernels among a profiler's events; copies are none."""
    found = 0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU:
            # a number is wrapped by one operator, computed with by another
            parent = event.cpu_parent
            found += computes(event) and not (parent and computes(parent))
        elif not getattr(event, "is_user_annotation", False):
            # ranges such as Optimizer.step are drawn on the GPU, too
            found += not event.name.startswith(("Mem", "Optimizer."))
    return found


def launched(step, device):
    """Return how many kernels a step launches, by the profiler.

    On a CPU: how often one of AdamW's operators works through a tensor.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it narrates
    kind = "CUDA" if device.type == "cuda" else "CPU"
    activity = getattr(torch.profiler.ProfilerActivity, kind)
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        timers.synchronize(device)
    return kernels(profile.events())


def launch_s(device):
    """Time the smallest operator there is: one number, in place."""
    one = torch.zeros(1, device=device)
    return min(timers.wall(lambda: one.add_(1), 500, device) for _ in range(5))


def empty_step_s(count, device, kind):
    """Time a step over ``count`` tensors of one number each.

    Hardly a byte moves: what is left are launches and the optimizer's own
    Python, which sorts the tensors and looks up the state of each.
    """
    step, parameters, _, gradients = stepper([(1,)] * count, device, kind)
    train(step, parameters, gradients, 1)
    return min(timers.wall(step, 10, device) for _ in range(5))


def powers(sources):
    """Count the powers in generated C++ that stand in loops over numbers.

    They are those of the bias corrections: the step count is a tensor to
    the compiler, so each vector of numbers computes them anew.
    """
    return sum(source.count("std::pow(") for source in sources)


def compilations(kind, tensor_lr, values=(1e-3, 2e-3, 3e-3, 4e-3)):
    """Count the graphs compiled while the learning rate takes ``values``.

    No kernel is generated (backend aot_eager), so no compiler is needed.
    """
    from torch._dynamo.utils import counters

    parameters, _ = problem([(4,)], torch.device("cpu"))
    settings = {"lr": torch.tensor(1.0) if tensor_lr else 1.0}
    if tensor_lr and kind == "foreach":
        settings["capturable"] = True  # which this combination asks for
    optimizer = adamw(parameters, kind, **settings)
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    step = torch.compile(optimizer.step, backend="aot_eager")
    for value in values:
        if tensor_lr:
            settings["lr"].fill_(value)
        else:
            optimizer.param_groups[0]["lr"] = value
        step()
    graphs = counters["stats"]["unique_graphs"] - before
    torch.compiler.reset()  # or these steps count for the reader's own
    return graphs


@contextlib.contextmanager
def quiet_compiler():
    """Keep from the output that record_function is not compiled."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- what is stepped --------------------------------------------------------

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
EPS = 1e-8  # AdamW's default
WARM = 8  # steps before the first comparison


def gpt2_shapes(C):
    """Return the shapes of GPT-2's 148 tensors, with a width of ``C``."""
    block = [(C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,)]
    block += [(C,), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,)]
    return [(8 * C, C), (4 * C, C), *12 * block, (C,), (C,)]


def problem(shapes, device):
    """Return parameters, and two lists of gradients that take turns.

    With the same gradient at each step AdamW would forget nothing worth
    remembering, and a lost state would not show.
    """
    torch.manual_seed(0)
    parameters = [
        torch.randn(shape).to(device).requires_grad_() for shape in shapes
    ]
    gradients = [
        [torch.randn(shape).to(device) for shape in shapes] for _ in range(2)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters, gradients


def train(step, parameters, gradients, count=WARM):
    """Take ``count`` steps, the gradients in turn, in the same storage."""
    for i in range(count):
        for parameter, gradient in zip(
            parameters, gradients[i % 2], strict=True
        ):
            parameter.grad.copy_(gradient)
        step()


def stepper(shapes, device, kind):
    """Return (step, parameters, state, gradients) of one form of AdamW.

    ``state`` is a function: the moments, parameter by parameter.
    """
    parameters, gradients = problem(shapes, device)
    if kind == "written out":
        moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
        taken = 0

        def step():
            nonlocal taken
            taken += 1
            written_out(
                parameters,
                *moments,
                taken,
                SETTINGS["lr"],
                SETTINGS["weight_decay"],
                SETTINGS["betas"],
                EPS,
            )

        return step, parameters, lambda: moments, gradients
    settings = dict(SETTINGS)
    if kind == "compiled":
        settings["lr"] = torch.tensor(settings["lr"], device=device)
        settings["capturable"] = device.type == "cuda"  # counts steps there
        optimizer = adamw(parameters, "for-loop", **settings)
        step = compiled_step(optimizer)
    else:
        optimizer = adamw(parameters, kind, **settings)
        step = optimizer.step

    def state():
        return [
            [optimizer.state[p][name] for p in parameters]
            for name in ("exp_avg", "exp_avg_sq")
        ]

    return step, parameters, state, gradients


def variant(shapes, device, kind):
    """Return the callable that is timed: a step, after ``WARM`` others."""
    step, parameters, state, gradients = stepper(shapes, device, kind)
    train(step, parameters, gradients)

    def one():
        step()
        return {"parameters": parameters, "state": state()}

    return one


def count_rows(shapes, device, kinds, smoke=False):
    """Count one step of each form, and predict its time.

    Predicted: the bytes at the rate of a copy as large as the parameters,
    and ``host_s``, an empty step; compiled, a launch per kernel.  A GPU works
    through the bytes meanwhile.  ``least_s`` are 28 bytes each at that rate.
    """
    numbers = count_numbers(shapes)
    if not smoke:
        each, rate = launch_s(device), copy_rate(4 * numbers, device)
    rows = []
    for kind in kinds:
        by_hand = 4 * PASSES[kind] * numbers
        row = {"name": kind, "by_hand_bytes": by_hand}
        if kind == "compiled":  # its kernels are no operators
            count, moved = len(shapes), by_hand
        else:
            step, parameters, _, gradients = stepper(shapes, device, kind)
            train(step, parameters, gradients, 1)  # makes the state
            with Traffic() as traffic:
                step()
            count, moved = launched(step, device), traffic.bytes
            row |= {
                "operators": len(traffic.operators),
                "kernels": count,
                "step_bytes": moved,
                "peak_bytes": 16 * numbers + transient_bytes(step),
            }
        if not smoke:
            host = count * each
            if kind != "compiled":  # one more compilation for its own
                host = empty_step_s(len(shapes), device, kind)
            join = sum if device.type == "cpu" else max
            row["host_s"], row["bytes_s"] = host, moved / rate
            row["predicted_s"] = join((host, moved / rate))
            row["least_s"] = 4 * PASSES["fused"] * numbers / rate
        rows.append(row)
    return rows


def count_numbers(shapes):
    """Return how many parameters ``shapes`` have together."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def lists(device, smoke=False):
    """Return (title, shapes, forms of AdamW) of each comparison."""
    size = 0 if smoke else 1 if device.type == "cpu" else 2
    small = gpt2_shapes((8, 64, 64)[size])
    large = ([(32, 32)] * 2, [(1024, 1024)] * 4, [(4096, 1024)] * 16)[size]
    three = ["for-loop", "foreach", "fused"]
    many = f"{count_numbers(small):,} numbers in {len(small)} tensors"
    few = f"{count_numbers(large):,} numbers in {len(large)} tensors"
    return [
        (many, small, ["written out", *three]),
        (few, large, [*three, "compiled"]),
    ]


def explained(row, count, powers_each):
    """Say of a missed prediction what was expected, and what is not in it.

    Args:
        row: of the summary.
        count: of ``count_rows``.
        powers_each: powers per tensor in the compiled loop.
    """
    if "than predicted" not in row["reading"]:
        return None
    said = (
        f"{row['name']}, {row['reading']}: expected "
        f"{tables.seconds(count['host_s'])} of the host and "
        f"{tables.seconds(count['bytes_s'])} for the bytes, it takes "
        f"{tables.seconds(row['median_s'])}"
    )
    if row["name"] == "compiled" and powers_each:
        said += (
            f";\nnot in the prediction: {powers_each:g} powers per tensor, "
            "computed anew for every vector of numbers"
        )
    return said


def compare_forms(args, title, shapes, kinds):
    """Count and time the forms of AdamW on one list of tensors."""
    kinds, ready, sources = list(kinds), {}, []
    if "compiled" in kinds:
        try:
            with quiet_compiler():
                from torch._inductor.utils import run_and_get_code

                ready["compiled"], sources = run_and_get_code(
                    variant, shapes, args.device, "compiled"
                )
        except Exception as error:  # whatever a toolchain has to say
            kinds.remove("compiled")
            why = str(error).strip().split("\n")[0][:60]
            print(f"left out: compiled, torch.compile fails here: {why}")
    counts = count_rows(shapes, args.device, kinds, args.smoke)
    bench.report(args, counts, COLUMNS, title=f"One step, {title}")
    rows = bench.compare(
        args,
        {
            kind: lambda kind=kind: (
                ready.get(kind) or variant(shapes, args.device, kind)
            )
            for kind in kinds
        },
        unit="step",
        tolerance=TOLERANCE,
        budget_s=3.0,
        title=title,
    )
    if args.smoke:
        return []
    summary = []
    for count, row in zip(counts, rows, strict=True):
        predicted = counts[0]["predicted_s"] / count["predicted_s"]
        share = count["least_s"] / row["median_s"]
        summary.append(
            {
                "tensors": len(shapes),
                "name": row["name"],
                "predicted": predicted,
                "measured": row["ratio"],
                "interval": row["ratio_interval"],
                "reading": reading(predicted, row),
                "ceiling_percent": round(100 * share),
            }
        )
        said = explained(
            summary[-1] | {"median_s": row["median_s"]},
            count,
            powers(sources) / len(shapes),
        )
        if said:
            print(said)
    return summary


TOLERANCE = (1e-5, 1e-6)
COLUMNS = {
    "name": "row",
    "operators": "operators",
    "kernels": "kernels",
    "by_hand_bytes": "by hand",
    "step_bytes": "bytes moved",
    "peak_bytes": "held at peak",
    "host_s": "host s",
    "predicted_s": "predicted s",
}

TECHNIQUES = (written_out, adamw, compiled_step)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    summary = []
    for title, shapes, kinds in lists(args.device, args.smoke):
        summary += compare_forms(args, title, shapes, kinds)
    if summary:
        bench.report(
            args,
            summary,
            {key: key for key in summary[0]}
            | {"ceiling_percent": "% ceiling"},
            title="Predicted from an empty step and bytes; ceiling: 28 bytes "
            "per parameter at a copy's rate",
        )
    with quiet_compiler():
        graphs = [
            {
                "name": f"{kind}, lr a {'tensor' if tensor else 'float'}",
                "graphs": compilations(kind, tensor),
            }
            for kind in ("for-loop", "foreach")
            for tensor in (False, True)
        ]
    bench.report(
        args, graphs, title="Graphs compiled while lr takes four values"
    )
    return args.rows


if __name__ == "__main__":
    bench.run(main)
