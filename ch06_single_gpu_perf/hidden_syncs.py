"""6.3  Fewer synchronisations · 減少CPU 和GPU 間的同步

Question  Which innocent lines of a training step wait for the GPU?
Expect    n waits per step, fewer in every row, 0 in the last. On a GPU each
          lets the queue of launched work run dry; on a CPU, where an operator
          has ended before Python goes on, the count falls and little else
Run       python -m ch06_single_gpu_perf.hidden_syncs [--smoke] [--save]
          python -m ch06_single_gpu_perf.hidden_syncs --step module:function
"""

import importlib
import inspect
import sys

import torch

from common import bench, seeding


def hidden_syncs(step):
    """List the calls in ``step()`` that wait for the GPU, with their lines.

    They want a value, a size that data decide, or a copy of pageable memory.
    Without tensors on a GPU the CPU's stand for them, as does a named device.
    """
    import linecache
    import sys
    from threading import get_ident

    library, own, me = linecache.__file__[:-12], torch.__path__[0], get_ident()
    rows, seen, local = [{}, {}], set(), {"cpu", torch.device("cpu")}
    host = torch.utils.weak.WeakIdKeyDictionary()  # False: a number or a list
    asks = "cpu tolist numpy __array__ __repr__ __format__ equal allclose"
    asks += " new_tensor _local_scalar_dense _linalg_check_errors _linalg_eigh"
    hosts = "_get_value DataLoader _BaseDataLoaderIter RNN LSTM GRU"  # numbers

    def flat(*of):
        return [*filter(torch.is_tensor, torch.utils._pytree.tree_leaves(of))]

    def wait(call, kinds, named=False):  # once per call, at the caller's line
        frame, stacks = sys._getframe(1), sys._current_frames()
        while frame and (code := frame.f_code):
            if (whose := code.co_qualname.split(".")[0]) == "hidden_syncs":
                call = frame.f_locals.get("call", call)
            elif not code.co_filename.startswith((own, library)):
                break
            elif kinds <= local and (named or whose in hosts.split()):
                return  # torch moves to where tensors are
            frame = frame.f_back or stacks.pop(me, None)  # a GPU's backward
        at = file, line = code.co_filename, frame.f_lineno if frame else 0
        row = rows[kinds <= local].setdefault((*at, call[0]), {"count": 0})
        row |= {"call": f".{call[0]}()", "count": row["count"] + (not call[1])}
        row["place"] = f"{file.replace(chr(92), '/').split('/')[-1]}:{line}"
        row["code"], call[1] = linecache.getline(*at).strip(), True

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            kwargs, name = kwargs or {}, op.name()[6:].split(".")[0]
            out = op(*args, **kwargs)
            seen.update(kinds := {t.device.type for t in flat(args, out)})
            picks, value = flat(args[1:2]), flat(args[2:3])
            waits = not kwargs and "dynamic_out" in str(getattr(op, "tags", 0))
            waits = waits or name in asks.split() or name == "normal" and picks
            if "index" in name or "fill" in name:  # a number needs no copy
                masks = [p for p in picks if p.itemsize == 1 or p in host]
                free = value and value[0] in host and not picks[1:]
                waits = masks and not free and (value or name[-5:] == "index")
            elif "copy" in name and len(kinds) > 1:
                waits = not (kwargs.get("non_blocking") or True in args[2:])
            if waits:
                wait(["item" if "scalar" in name else name, False], kinds)
            host.update((t, False) for t in [out] if name == "lift_fresh")
            return out

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs, name = kwargs or {}, func.__name__
            obj, *rest = *args, *kwargs.values(), 0
            given, moves = flat(args), name == "to"
            moves &= kwargs.get("non_blocking", (*rest, 0, 0)[2]) is not True
            made = name in ("tensor", "as_tensor") and not torch.is_tensor(obj)
            named = (made or moves) and local & {*rest}
            home = bool(given) and all(host.get(t) for t in given)
            call = [name, home > moves or name == "one_hot" and rest > [0]]
            out = func(*args, **kwargs)
            out = torch.ops.aten.alias(out) if name == "cpu" else out
            kinds = {t.device.type for t in flat(given, out)}
            reads = name in asks.split() or made and (given or kinds - local)
            if reads or named:
                wait(call, kinds, named and not reads)
            host.update((t, True) for t in flat(out) if home or name == "cpu")
            if named or (reads and name.endswith("tensor")):
                host.pop(out, None)
            return out

    Operators.supports_higher_order_operators = True
    with torch.compiler.set_stance("force_eager"), Operators(), Calls():
        step()
    return [row for row in rows[seen <= local].values() if row["count"]]


def mask_by_index(x, mask, noise):
    """Count the ones of the mask before anything can be sized: two waits."""
    x = x.clone()
    x[mask] = noise[mask]
    return x


def mask_by_where(x, mask, noise):
    """Choose element by element: every size is known beforehand."""
    return torch.where(mask, noise, x)


def weights_from_list(values, like):
    """Copy a list from pageable memory to the device in every step."""
    return torch.tensor(values, device=like.device)


def weights_made_before(values, like):
    """Use the copy that lies on the device since before the first step."""
    return values


def mean_by_index(losses, counted):
    """Size a tensor by the data, in forward and again in backward."""
    return losses[counted].mean()


def mean_by_where(losses, counted):
    """Put zeros where nothing counts; divide by their number, on the GPU."""
    return torch.where(counted, losses, 0.0).sum() / counted.sum()


def clip_by_branch(gradients, longest):
    """Ask the GPU for a norm, so that Python can choose a branch."""
    norm = torch.nn.utils.get_total_norm(gradients)
    if norm > longest:
        torch._foreach_mul_(gradients, longest / norm)


def clip_by_clamp(gradients, longest):
    """Let the GPU choose the factor: 1, or what shortens the gradients."""
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (longest / norm).clamp(max=1.0))


def log_number(loss):
    """Wait for the loss in every step, to have a number."""
    return loss.item()


def log_tensor(loss):
    """Keep the loss where it is; read it when the window is over."""
    return loss.detach()


def training_step(model, optimizer, batch, values, parts):
    """Launch one step; only what ``parts`` do can make the host wait.

    ``batch``: x (N, C), mask (N, C), noise (N, C), targets (N,), counted
    (N,).  ``parts``: mask, weights, mean, clip and log, functions as above.
    Returns what ``log`` makes of the loss.
    """
    x, mask, noise, targets, counted = batch
    logits = model(parts["mask"](x, mask, noise))  # (N, classes)
    losses = torch.nn.functional.cross_entropy(
        logits, targets, parts["weights"](values, x), reduction="none"
    )
    loss = parts["mean"](losses, counted)
    optimizer.zero_grad()
    loss.backward()
    parts["clip"]([p.grad for p in model.parameters()], 1.0)
    optimizer.step()
    return parts["log"](loss)


# What each row changes: (row, part, what waits, how often, the cure).
CURES = (
    ("no mask as an index", "mask", mask_by_index, 2, mask_by_where),
    ("no list", "weights", weights_from_list, 1, weights_made_before),
    ("no counted index", "mean", mean_by_index, 2, mean_by_where),
    ("no branch on a norm", "clip", clip_by_branch, 1, clip_by_clamp),
    ("no number of the loss", "log", log_number, 1, log_tensor),
)
CLASSES = 16


def rows_of_parts():
    """Return {row: (parts, waits per step)}, one cure more in each row."""
    parts = {part: waiting for _, part, waiting, _, _ in CURES}
    left = sum(times for *_, times, _ in CURES)
    rows = {"as written": (dict(parts), left)}
    for name, part, _, times, cure in CURES:
        parts[part], left = cure, left - times
        rows[name] = (dict(parts), left)
    return rows


def stepper(args, parts):
    """Return a fresh model's step: a callable without arguments."""
    rows, width = (64, 32) if args.smoke else (256, 128)
    if args.device.type != "cpu" and not args.smoke:
        rows, width = 4096, 512
    seeding.seed_everything(0)
    make = {"device": args.device}
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width, **make),
        torch.nn.GELU(),
        torch.nn.Linear(width, CLASSES, **make),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, noise, chance = torch.randn(3, rows, width, **make)
    targets = torch.randint(CLASSES, (rows,), **make)
    batch = x, chance > 1.0, noise, targets, chance[:, 0] < 1.0
    values = [1.0 + i / CLASSES for i in range(CLASSES)]
    if parts["weights"] is weights_made_before:
        values = torch.tensor(values, **make)
    return lambda: training_step(model, optimizer, batch, values, parts)


def epoch(args, parts, steps):
    """Return a factory of ``steps`` steps that gives all their losses."""

    def factory():
        step = stepper(args, parts)
        return lambda: {
            "losses": [torch.as_tensor(step()) for _ in range(steps)]
        }

    return factory


def importable(name):
    """Return the function called ``module:function``.

    Raises:
        bench.Refusal: no such module or function, or it wants arguments.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function) or module.startswith("."):
        raise bench.Refusal(
            f"--step {name}: write it as module:function, for example "
            "my_training:step"
        )
    if "" not in sys.path:  # a module beside the reader, as `python -m` does
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise bench.Refusal(
            f"--step {name}: no module {error.name!r} is found here: "
            "start in its folder, with this checkout on PYTHONPATH"
        ) from None
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise bench.Refusal(
            f"--step {name}: {module} has no function {function}"
        )
    later = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isclass,
    )
    if any(kind(found) for kind in later):
        raise bench.Refusal(
            f"--step {name}: calling it runs no step (a class, a generator "
            "or a coroutine); name a function that does"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise bench.Refusal(
            f"--step {name}: it is called without arguments, but {error}"
        ) from None
    except ValueError:  # a builtin that does not tell
        pass
    return found


COLUMNS = {
    "place": "place",
    "call": "call",
    "count": "waits",
    "code": "line of code",
}


def flags(parser):
    parser.add_argument(
        "--step",
        metavar="MODULE:FUNCTION",
        help="a training step of your own, called once without arguments",
    )


def find_in(args):
    """Report what waits in the reader's own step."""
    if args.save:
        raise bench.Refusal(
            "--save keeps this chapter's own record; leave out --step"
        )
    rows = hidden_syncs(importable(args.step))
    args.expect = None  # that of the chapter's own step
    if rows:
        bench.report(args, rows, COLUMNS, title=args.step)
    else:
        print(f"{args.step}: nothing in it waits for the GPU")
    if args.device.type == "cpu":
        print(
            "tensors of the CPU stood for the GPU's; a copy to a device that "
            "is there already\nwould not wait on a GPU"
        )
    return rows


TECHNIQUES = (
    hidden_syncs,
    training_step,
    mask_by_index,
    mask_by_where,
    weights_from_list,
    weights_made_before,
    mean_by_index,
    mean_by_where,
    clip_by_branch,
    clip_by_clamp,
    log_number,
    log_tensor,
)


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    if args.step is not None:
        return find_in(args)
    variants = rows_of_parts()
    total, steps = variants["as written"][1], 2 if args.smoke else 5
    times = bench.compare(
        args,
        {n: epoch(args, parts, steps) for n, (parts, _) in variants.items()},
        per_call=steps,
        unit="step",
        expect=(
            f"{total} waits per step as written, "
            f"{', '.join(str(n) for _, n in [*variants.values()][1:])} in the "
            "rows below; same losses"
        ),
        title="Each row cures one part more",
    )
    counted = []
    for name, (parts, expected) in variants.items():
        found = hidden_syncs(stepper(args, parts))
        waits = sum(row["count"] for row in found)
        counted.append({"row": name, "waits": waits, "predicted": expected})
        if name == "as written":
            places = found
    bench.report(args, places, COLUMNS, title="Waits in a step as written")
    bench.report(args, counted, title="Waits per step, found and predicted")
    if args.device.type == "cpu":
        if not args.smoke:
            print(
                f"{total} waits fewer: {times[-1]['verdict']}. On a CPU an "
                "operator has ended before Python goes on:\nno queue runs "
                "dry, and what differs is the work of the operators put in "
                "their place."
            )
        bench.left_out(
            args,
            "what the waits cost: that needs a CUDA device, which works "
            "behind the host",
        )
    return [
        row | {"waits": count["waits"]}
        for row, count in zip(times, counted, strict=True)
    ]


if __name__ == "__main__":
    bench.run(main)
