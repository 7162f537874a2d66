"""6.3  Fewer synchronisations · 減少CPU 和GPU 間的同步

Question  Which innocent lines of a training step wait for the GPU?
Expect    n waits per step, fewer in every row, 0 in the last. On a GPU each
          lets the queue of launched work run dry; on a CPU, where an operator
          has ended before Python goes on, the count falls and little else
Run       python -m ch06_single_gpu_perf.hidden_syncs [--smoke] [--save]
          python -m ch06_single_gpu_perf.hidden_syncs --step module:function
Limits    without a GPU, tensors from outside the step stand for its tensors,
          also where they would lie on the host, and so does what the step
          computes from them or makes on a named or default device; not seen
          are a storage's own methods and threads that the step starts
"""

import importlib
import inspect
import sys

import torch

from common import bench, seeding

# Which operators and .calls() wait, and when, or how often: at(x) says where
# the tensors in x lie, {"gpu"}, {"host"} or both; given: the arguments, out:
# what is returned.
WAITS = {
    # they read a value, an error code, the number of results
    "_local_scalar_dense equal nonzero argwhere bincount masked_select "
    "_unique _unique2 unique_dim unique_consecutive _ctc_loss "
    "_linalg_check_errors _linalg_eigh _linalg_svd _linalg_eigvals linalg_eig "
    "linalg_pinv linalg_lstsq cholesky embedding_renorm_ _coalesce _to_sparse "
    "barrier .allclose .cpu .tolist .numpy .__array__ .__dlpack__ .__repr__ "
    ".__format__ .untyped_storage .new_tensor": (
        lambda at, given, out: "gpu" in at(given)
    ),
    "repeat_interleave": lambda at, given, out: (
        "gpu" in at(given) and len(given) == 1  # unless told the size
    ),
    ".one_hot": lambda at, given, out: (
        "gpu" in at(given) and given[1:] in ([], [-1])
    ),
    "histc": lambda at, given, out: (  # unless told the range, reads both ends
        2 * ("gpu" in at(given) and len({*[*given, 0, 0][2:4]}) == 1)
    ),
    "masked_fill masked_fill_ index_fill index_fill_ normal": (
        lambda at, given, out: "gpu" in at(given[1:][-1:])
    ),
    # they count the ones of a mask, they copy a list of indices
    "index _unsafe_index index_put index_put_ _index_put_impl_ "
    "_unsafe_index_put": lambda at, given, out: (
        "gpu" in at(given)
        and any(
            index.itemsize == 1 or at(index) == {"host"}
            for index in filter(torch.is_tensor, given[1])
        )
        and not (  # a mask that a number of the host's fills
            sum(map(torch.is_tensor, given[1])) == 1
            and at(given[1]) == {"gpu"}
            and at(given[2:3]) == {"host"}
            and given[2].numel() == 1
        )
    ),
    # they copy between pageable memory and the GPU
    "_to_copy .type_as": lambda at, given, out: (
        len(at(given[0], out)) == 2 and not any(a is True for a in given)
    ),
    ".to": lambda at, given, out: (
        not any(a is True for a in given)  # of non_blocking
        and (
            len(at(given[0], out)) == 2
            or "cpu" in [str(a) for a in given[1:] if not torch.is_tensor(a)]
            and at(given[0]) == {"gpu"}
        )
    ),
    "copy_": lambda at, given, out: (
        len(at(given[:2])) == 2 and given[1].dim() and True not in given[2:]
    ),
    ".new": lambda at, given, out: (
        "gpu" in at(given[:1]) and any(type(a) in (list, tuple) for a in given)
    ),
    ".tensor .as_tensor .asarray": lambda at, given, out: (
        not torch.is_tensor(given[0])
        and ("gpu" in at(out))  # and read what of the list lies there
        + sum(
            x.numel()
            for x in torch.utils._pytree.tree_leaves(given[0])
            if at(x) == {"gpu"}
        )
    ),
}
# Functions of torch that read what lies on the host on any machine: batches,
# an optimizer's count of its steps (not so ASGD's), lengths of sequences.
HOST_WORK = {"DataLoader.__iter__", "_BaseDataLoaderIter.__next__"}
HOST_WORK |= {"_get_value", "RNN.forward", "LSTM.forward", "GRU.forward"}


def running_line(thread):
    """Return place and code of a step's line, and torch's calls inside it."""
    import linecache
    import os
    import sys
    import traceback

    owners = {torch.__file__.removesuffix("__init__.py"): "torch"}
    owners |= {"site-packages": "package", "dist-packages": "package"}
    owners |= {linecache.__file__.removesuffix("linecache.py"): "python"}
    # a GPU's backward runs in a thread of its own, which the step's awaits
    stacks = sys._getframe(1), sys._current_frames()[thread]
    frames = [at for stack in stacks for at in traceback.walk_stack(stack)]
    lines, left = [], False
    for frame, line in dict.fromkeys(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        whose = next((owners[at] for at in owners if at in file), "reader")
        if name.split(".")[0] not in ("hidden_syncs", "DeviceContext"):
            lines.append(("caller" if left else whose, file, line, name))
        left = left or name == "hidden_syncs"
    order = ["reader", "package", "caller", "torch", "python"]
    _, file, line, _ = min(lines, key=lambda at: order.index(at[0]))
    place, code = os.path.basename(file), linecache.getline(file, line)
    torchs = [name if whose == "torch" else "" for whose, *_, name in lines]
    return f"{place}:{line}", code.strip(), torchs


def hidden_syncs(step):
    """List the calls in ``step()`` that wait for the GPU, with their lines.

    Where there is none, the tensors from outside the step stand for a GPU's.
    """
    import threading
    from unittest.mock import patch

    from torch.utils._device import _device_constructors as makers

    rules = {name: WAITS[names] for names in WAITS for name in names.split()}
    places = torch.utils.weak.WeakIdKeyDictionary()  # where there is no GPU
    rows, below, gpus, thread = {}, [], [], threading.get_ident()

    def at(*tree, put=None):
        leaves = torch.utils._pytree.tree_leaves(tree)
        given = [t for t in leaves if torch.is_tensor(t) and not t.is_meta]
        if not gpus and not all(t.is_cpu for t in given):
            gpus.append(True)
            rows.clear()  # nothing stands for a GPU's tensor any more
        if gpus:
            return {"host" if t.is_cpu else "gpu" for t in given}
        places.update((t, put) for t in given if put)
        return {places.get(t, "gpu") for t in given}

    def count(call, waits, host=False):
        place, code, via = running_line(thread)
        row = {"place": place, "call": f".{call}()", "code": code}
        own = HOST_WORK & {*via} and "ASGD.step" not in via or host and via[0]
        pickled = "Tensor._reduce_ex_internal" in via
        if (gpus or not own) and (pickled or call != "untyped_storage"):
            rows.setdefault(str(row), row | {"count": 0})["count"] += waits

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            given = [*args, *(kwargs or {}).values()]
            out, name = op(*args, **(kwargs or {})), op.__name__.split(".")[0]
            on_gpu = "gpu" in at(given) and name != "lift_fresh"  # of a list
            base = on_gpu and getattr(out, "_base", None)
            at(out, base, put=at(given) and ("gpu" if on_gpu else "host"))
            waits = name in rules and int(rules[name](at, given, out))
            if below:
                below[-1] += waits
            elif waits:
                count(name, waits)
            return out

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name, kwargs = func.__name__, kwargs or {}
            given = [*args, *(kwargs[k] for k in kwargs if k != "copy")]
            words = [a for a in given if isinstance(a, (str, torch.device))]
            for mode in torch.overrides._get_current_function_mode_stack():
                words += [getattr(mode, "device", None)] * (func in makers())
            named = not gpus and "cpu" in map(str, words)
            moves = name in ("cpu", "to", "type_as", "new", "new_tensor")
            like = at(given[1:]) or at(given[:1])
            put = "gpu" if named or "gpu" in like and name != "cpu" else "host"
            below.append(0)  # how often its operators wait
            out = func(*args, **kwargs)
            if moves and at(given[:1]) != {put}:
                out = out.view_as(out)  # a copy is a tensor of its own
            at(out, put=(moves or named or not at(given)) and put)
            waits, rule = below.pop(), rules.get(f".{name}")
            if waits := int(rule(at, given, out)) if rule else waits:
                count(name, waits, named and (moves or "cpu" in words))
            return out

    seen, lift, real = Calls(), torch.ops.aten.lift_fresh, torch.from_numpy

    def backward(*args, engine=torch.autograd._engine_run_backward, **kwargs):
        with seen:  # hooks make calls, too
            return engine(*args, **kwargs)

    Operators.supports_higher_order_operators = True
    with patch.object(torch.autograd, "_engine_run_backward", backward):
        with patch.object(torch, "from_numpy", lambda a: lift(real(a))):
            with torch.compiler.set_stance("force_eager"), Operators(), seen:
                step()
    return list(rows.values())


def warned_syncs(step):
    """Let the host's waits for a GPU warn as they happen; return their places.

    Needs CUDA. The place is Python's nearest line, in a backward torch's own.
    """
    import os
    import warnings

    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # else a line warns once
            step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return [
        f"{os.path.basename(warning.filename)}:{warning.lineno}"
        for warning in said
        if "called a synchronizing" in str(warning.message)
    ]


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
        help="a training step of your own, called without arguments: once, "
        "on CUDA a second time under CUDA's own check",
    )


def warned(args, step):
    """Return where CUDA's own check warns, or None where there is no CUDA."""
    return warned_syncs(step) if args.device.type == "cuda" else None


def find_in(args):
    """Report what waits in the reader's own step."""
    if args.save:
        raise bench.Refusal(
            "--save keeps this chapter's own record; leave out --step"
        )
    step = importable(args.step)
    rows = hidden_syncs(step)
    args.expect = None  # that of the chapter's own step
    if rows:
        bench.report(args, rows, COLUMNS, title=args.step)
    else:
        print(f"{args.step}: nothing in it waits for the GPU")
    places = warned(args, step)
    if places is not None:
        found = sum(row["count"] for row in rows)
        print(f"waits found: {found}; CUDA itself warns of {len(places)}")
        if len(places) != found:
            print("it warns at", ", ".join(dict.fromkeys(places)))
    if args.device.type == "cpu":
        print(
            "tensors of the CPU stood for the GPU's, except what the step "
            "made without\na device, computed from that alone, or did in a "
            "DataLoader; a copy to a\ndevice that is there already would not "
            "wait on a GPU"
        )
    return rows


TECHNIQUES = (
    hidden_syncs,
    warned_syncs,
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
        step = stepper(args, parts)
        found = hidden_syncs(step)
        waits = sum(row["count"] for row in found)
        counted.append({"row": name, "waits": waits, "predicted": expected})
        places = warned(args, step)
        if places is not None:
            counted[-1]["CUDA warns"] = len(places)
        if name == "as written":
            lines = found
    bench.report(args, lines, COLUMNS, title="Waits in a step as written")
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
