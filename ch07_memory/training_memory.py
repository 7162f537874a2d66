"""7.3  What training holds · 訓練過程中的顯示記憶體佔用

Question  Which bytes are alive at the peak of a training step, and which of
          them are known before anything has run?
Expect    16 bytes per parameter at rest (weight, gradient, two moments); the
          activations on top grow with B·T, plain attention's with B·T², and
          a formula of one page finds the peak within 5%
Run       python -m ch07_memory.training_memory [--smoke] [--save]
"""

import bisect
import contextlib
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import bench, gpt

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporary",
    "gathered",  # FSDP: whole weights of the block at work, and buffers
    "other",  # inputs, buffers
)
KEPT_BY_TRACKER = {
    "Parameter": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "Sharded Param": "parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "OptState": "optimizer",
    "Unsharded Param": "gathered",
    "All Gather": "gathered",
    "Reduce Scatter": "gathered",
}
FORMS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Walk over tiles of the scores; the (T, T) matrix is never written."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recompute_block(block: nn.Module, x: Tensor) -> Tensor:
    """Keep the block's input alone and run its forward again in backward."""
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)


# --- by formula -------------------------------------------------------------


def kept_by_block(config, B: int, T: int, fused: bool = False) -> int:
    """Autograd keeps 16 (B, T, C) tensors per block, and plain attention T².

    Block input, ln_1's output, q, k, v, the mixed values, the first sum,
    ln_2's output make 8; the MLP's two (B, T, 4 C) tensors the other 8.
    Plain attention keeps the softmax (B, H, T, T) and its mask of bytes,
    fused attention one logarithm per row; a norm its mean and deviation.

    Returns:
        Bytes, float32, dropout 0.
    """
    one = 4 * B * T * config.n_embd
    scores = 4 * B * config.n_head * T
    return 16 * one + (scores if fused else scores * T + T * T) + 16 * B * T


def step_temporaries(config, optimizer: str) -> int:
    """AdamW's denominators: of all parameters at once, of one, or none.

    The loop holds two of the largest parameter's size, the square root and
    its quotient (three where the parameter before is as large: its
    denominator still has a name).
    """
    counts = gpt.parameter_counts(config)
    C = config.n_embd
    largest = max(counts["wte"], counts["wpe"], 4 * C * C)
    return {
        "foreach": 4 * counts["total"],
        "for-loop": 2 * 4 * largest,
        "fused": 0,
    }[optimizer]


def formula(
    config: gpt.GPTConfig,
    *,
    micro_batch: int,
    T: int | None = None,
    fused: bool = False,
    recompute: bool = False,
    optimizer: str = "foreach",
    accumulate: int = 1,
) -> dict:
    """Bytes at the peak of one float32 training update, on one page.

    The peak is the largest of a few moments: the loss's backward (three
    logit-sized tensors), the last block's backward (everything is still
    kept), the first block's (all gradients are there), the embedding's,
    and the optimizer's step.

    Args:
        config: dropout must be 0.
        micro_batch: sequences per forward, B.
        T: tokens per sequence; ``block_size`` unless given.
        fused: the attention never writes its scores.
        recompute: each block keeps its input only.
        optimizer: AdamW's form, ``for-loop``, ``foreach`` or ``fused``.
        accumulate: micro-batches per update.

    Returns:
        ``bytes`` by category and ``peak_bytes``, as ``predict``;
        ``moment``, the name of the peak; ``rest_bytes`` after an update.
    """
    if config.dropout:
        raise ValueError("the formula counts no dropout masks: dropout 0")
    counts = gpt.parameter_counts(config)
    B, T = micro_batch, T or config.block_size
    C, L = config.n_embd, config.n_layer
    one = 4 * B * T * C
    logits = 4 * B * T * config.vocab_size
    scores = 0 if fused else 4 * B * config.n_head * T * T
    block = kept_by_block(config, B, T, fused)
    kept = L * one + (block - one) if recompute else L * block
    forward = L * (one if recompute else block) + 2 * one + 8 * B * T
    weights = 4 * counts["total"]
    head = 4 * config.vocab_size * C
    embedding = 4 * counts["wte"]
    tied = embedding * config.tied  # two gradients and their sum, at last
    mlp = 16 * C * C  # bytes of one MLP matrix: (C, 4 C) float32
    of_block = 4 * (counts["attention"] + counts["mlp"]) // L
    again = accumulate > 1
    all_but_first = weights - of_block - embedding

    in_mlp = 5 * one + mlp
    in_attention = 2 * scores - 8 * one + mlp
    work = max(in_mlp, in_attention)
    #  moment: (gradients, activations, temporary)
    moments = {
        "loss backward": (weights * again, forward + logits, 2 * logits),
        "last block backward": (weights if again else head, kept, work),
        "first block backward": (
            weights if again else all_but_first,
            block,
            work,
        ),
        "embedding backward": (
            weights - tied * (not again),
            0,
            (3 * tied or embedding) + 2 * one,
        ),
        "step": (weights, 0, step_temporaries(config, optimizer)),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradients, activations, temporary = moments[moment]
    held = dict.fromkeys(CATEGORIES, 0) | {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": 2 * weights,
        "activations": activations,
        "temporary": temporary,
        "other": 16 * B * T,
    }
    return {
        "bytes": held,
        "peak_bytes": sum(held.values()),
        "moment": moment,
        "rest_bytes": 4 * weights + 16 * B * T,
    }


# --- by tracking tensors that have no memory --------------------------------


def adamw(model: nn.Module, form: str) -> torch.optim.Optimizer:
    """AdamW in one of its three forms; the numbers agree, the bytes differ.

    Raises:
        bench.Refusal: for an unknown form.
    """
    if form not in FORMS:
        raise bench.Refusal(
            f"optimizer {form!r} is unknown; known: {', '.join(FORMS)}"
        )
    return torch.optim.AdamW(model.parameters(), **FORMS[form])


def update(model, optimizer, batch, accumulate=1, before_forward=None):
    """One optimizer update: gradients dropped first, then K micro-batches.

    Args:
        batch: (ids, targets, scale), the same for every micro-batch.
        before_forward: called before each micro-batch.
    """
    optimizer.zero_grad(set_to_none=True)
    for _ in range(accumulate):
        if before_forward:
            before_forward()
        model(*batch).backward()
    optimizer.step()


def _private_to_torch(fsdp: bool) -> tuple[type, type]:
    """Return torch's mode of fake tensors and its tracker, made quicker.

    Each module's own peak would cost a walk over all modules at each
    operator: 42 s instead of 8 for 36 blocks.
    """
    try:  # private to torch, in the same place since 2.11 at least
        from torch._subclasses.fake_tensor import FakeTensorMode

        if fsdp:
            from torch.distributed._tools.fsdp2_mem_tracker import (
                FSDPMemTracker as Tracker,
            )
        else:
            from torch.distributed._tools.mem_tracker import (
                MemTracker as Tracker,
            )
    except ImportError as error:
        raise bench.Refusal(
            f"torch {torch.__version__} lacks the memory tracker that torch "
            f"2.11 to 2.13 have ({error}); peaks cannot be predicted here, "
            "use one of those versions"
        ) from error

    class PeakOfAll(Tracker):
        moment = "rest"

        def _update_peak_stats(self, peak_state):
            for device, now in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < now["Total"]:
                    self._peak_mem[device] = now["Total"]
                    self._peak_mem_snap[device] = dict(now)
                    in_backward = self._mod_tracker.is_bw
                    self.moment = "backward" if in_backward else "forward"
                    if self._in_opt:
                        self.moment = "step"

    return FakeTensorMode, PeakOfAll


@contextlib.contextmanager
def _imagined_ranks(world: int):
    """Open a process group of ``world`` ranks, of which only 0 exists."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise bench.Refusal(
            "FSDP's bytes are predicted with a process group of imagined "
            "ranks, and this process already has a real one; call predict "
            "in a process of its own"
        )
    try:  # registers the backend called "fake"
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise bench.Refusal(
            f"torch {torch.__version__} lacks the process group of imagined "
            f"ranks that torch 2.11 to 2.13 have ({error}); predict without "
            "fsdp=True, or use one of those versions"
        ) from error
    dist.init_process_group(
        "fake", rank=0, world_size=world, store=FakeStore()
    )
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def _storages(things) -> dict[int, int]:
    """Map the storages of modules, optimizers, tensors to their bytes."""
    found = {}

    def add(tensor):
        if isinstance(tensor, Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()

    for thing in things:
        if isinstance(thing, nn.Module):
            for tensor in (*thing.parameters(), *thing.buffers()):
                add(tensor)
                add(tensor.grad)
        elif isinstance(thing, torch.optim.Optimizer):
            for state in thing.state.values():
                for value in state.values():
                    add(value)
        else:
            add(thing)
    return found


def resident_bytes(*things) -> int:
    """Sum what modules (with gradients), optimizers and tensors hold.

    A storage that several share, as a tied head does, counts once; of a
    sharded tensor this rank's part counts.
    """
    return sum(_storages(things).values())


def _by_category(snapshot: dict, state_bytes: int) -> dict[str, int]:
    """Sort a tracker's snapshot of one device into our categories."""
    held = dict.fromkeys(CATEGORIES, 0)
    for kind, count in snapshot.items():
        kind = getattr(kind, "value", kind)
        if kind != "Total":
            held[KEPT_BY_TRACKER.get(kind, "other")] += count
    # what the step allocates on top of its state is temporary
    held["temporary"] += held["optimizer"] - state_bytes
    held["optimizer"] = state_bytes
    return held


def predict(
    config: gpt.GPTConfig,
    *,
    micro_batch: int,
    T: int | None = None,
    attention: Callable = gpt.plain_attention,
    loss: Callable = gpt.summed_cross_entropy,
    run_block: Callable = gpt.call_block,
    optimizer: str = "foreach",
    accumulate: int = 1,
    world: int = 1,
    fsdp: bool = False,
    dtype: str = "float32",
) -> dict:
    """Tensors without memory go through two updates; a tracker counts them.

    The shapes, lifetimes and sharing are those of the real run on a CPU,
    and so is the peak. The second update counts, because the first has no
    optimizer state during forward and backward. A GPU adds what no tensor
    shows: its context (some 0.5 GiB), library workspaces (cuBLAS: 8 to
    32 MiB), rounding to 512 bytes, fragmentation, kernels that differ from
    the CPU's (fused attention, dropout masks), and under FSDP gathers that
    run ahead on a stream of their own. DDP's buckets (one more copy of
    the gradients, unless they are views) are not counted either.

    Args:
        config: the model.
        micro_batch: sequences per forward on this rank.
        T: tokens per sequence; ``block_size`` unless given.
        attention, loss, run_block: as ``common.gpt.GPT`` takes them.
        optimizer: AdamW's form, ``for-loop``, ``foreach`` or ``fused``.
        accumulate: micro-batches per update on this rank.
        world: ranks; matters with ``fsdp`` only.
        fsdp: shard each block, then the rest; this is rank 0's account.
        dtype: ``float32``, or autocast's ``bfloat16``, ``float16``.

    Returns:
        ``bytes`` by category at the peak and ``peak_bytes``, their sum;
        ``moment`` (``forward``, ``backward`` or ``step``); and between two
        updates, gradients still there: ``rest`` by category and
        ``rest_bytes``.

    Raises:
        bench.Refusal: a torch without the tracker, an unknown optimizer or
            dtype, sizes below 1.
    """
    precision = getattr(torch, dtype, None)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise bench.Refusal(
            f"dtype {dtype!r} cannot be predicted; use float32, bfloat16 or "
            "float16"
        )
    if min(micro_batch, accumulate, world) < 1:
        raise bench.Refusal("micro_batch, accumulate and world start at 1")
    shape = (micro_batch, T or config.block_size)
    FakeTensorMode, Tracker = _private_to_torch(fsdp)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(_imagined_ranks(world)) if fsdp else None
        stack.enter_context(FakeTensorMode())
        stack.enter_context(
            torch.autocast(
                "cpu",
                None if dtype == "float32" else precision,
                enabled=dtype != "float32",
            )
        )
        model = gpt.GPT(config, attention, loss, run_block)
        if fsdp:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        adam = adamw(model, optimizer)
        batch = (
            torch.zeros(shape, dtype=torch.long),
            torch.zeros(shape, dtype=torch.long),
            torch.ones(()),
        )
        update(model, adam, batch)  # makes the optimizer's state
        if fsdp:
            tracker = Tracker(model, adam)
            tracker.track_inputs(batch)
        else:
            tracker = Tracker()
            tracker.track_external(model, adam, *batch)
        with tracker:
            # or the tracker takes the next forward for a mistake
            ready = tracker.reset_mod_stats
            # the third micro-batch repeats the second
            update(model, adam, batch, min(accumulate, 2), ready)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        (rest,) = tracker.get_tracker_snapshot("current").values()
        state = resident_bytes(adam)
    held, rest = _by_category(peak, state), _by_category(rest, state)
    return {
        "bytes": held,
        "peak_bytes": sum(held.values()),
        "moment": tracker.moment,
        "rest": rest,
        "rest_bytes": sum(rest.values()),
    }


def largest_batch(
    config: gpt.GPTConfig,
    T: int | None,
    capacity_bytes: int,
    margin: Callable[[int], int] | float = 0.0,
    *,
    known: dict[int, int] | None = None,
    **how,
) -> dict:
    """The largest micro-batch whose predicted peak a device can hold.

    The peak is a maximum of straight lines in the batch, so a line through
    two known points finds the next guess; the result and the batch above
    it are always predicted themselves.

    Args:
        config: the model.
        T: tokens per sequence; None takes ``block_size``.
        capacity_bytes: what the device has.
        margin: what to leave free: a share of the capacity, or a function
            from capacity to bytes.
        known: peaks by batch found before for the same ``how``; extended.
        how: the rest of ``predict``'s arguments.

    Returns:
        ``batch`` (0: not even one fits), its ``peak_bytes`` (of batch 1
        when none fits) and ``usable_bytes``.
    """
    known = {} if known is None else known
    free = margin if callable(margin) else lambda size: round(size * margin)
    usable = capacity_bytes - free(capacity_bytes)

    def peak(batch: int) -> int:
        if batch not in known:
            found = predict(config, micro_batch=batch, T=T, **how)
            known[batch] = found["peak_bytes"]
        return known[batch]

    for batch in (16, 64):
        peak(batch)
    while True:
        low = max((n for n in known if known[n] <= usable), default=0)
        high = min((n for n in known if known[n] > usable), default=None)
        if high == low + 1:
            break
        one, two = sorted(known, key=lambda n: abs(known[n] - usable))[:2]
        rise = (known[two] - known[one]) / (two - one)
        guess = one + int((usable - known[one]) // rise) if rise else 2 * low
        peak(max(low + 1, min(guess, high - 1 if high else guess)))
    return {
        "batch": low,
        "peak_bytes": known[max(low, 1)],
        "usable_bytes": usable,
    }


# --- by measuring -----------------------------------------------------------


def _allocations(profile) -> list[tuple[int, int, int]]:
    """Return the CPU's (time, address, bytes); freed bytes are negative."""
    found = []
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                where = fields.ptr, fields.alloc_size
                found.append((event.start_time_ns, *where))
    return sorted(found, key=lambda one: one[0])


def _running_sum(allocations) -> tuple[int, int]:
    """Return the highest and the last sum of live bytes.

    A block that overlaps an older one proves that the older was freed in
    a thread that is not profiled, as gloo's do with what they received.
    """
    starts, size, now, peak = [], {}, 0, 0
    for _, address, count in allocations:
        first = bisect.bisect_left(starts, address)
        if count < 0:
            if size.pop(address, None):
                starts.pop(first)
            now += count
            continue
        if first and starts[first - 1] + size[starts[first - 1]] > address:
            first -= 1
        while first < len(starts) and starts[first] < address + count:
            now -= size.pop(starts.pop(first))
        starts.insert(first, address)
        size[address] = count
        now += count
        peak = max(peak, now)
    return peak, now


def measure_peak(step: Callable[[], object], resident: int) -> dict:
    """The CPU's allocator reports every allocation; the sum has a peak.

    Works whatever ran the step, compiled code included. Two things go
    unreported: memory allocated before and freed in the step (drop
    gradients beforehand), and what threads free that are not profiled, as
    gloo's do with buffers of collectives. Both are written off when their
    addresses are used again; until then the sum is that much too high.

    Args:
        step: one update.
        resident: bytes alive before and after (``resident_bytes``).

    Returns:
        ``peak_bytes``; ``end_bytes`` after the step; ``profile``, the
        profiler's object, whose trace can be exported once.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a line per profile
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    peak, now = _running_sum(_allocations(profile))
    return {
        "peak_bytes": resident + peak,
        "end_bytes": resident + now,
        "profile": profile,
    }


def live_peak(config, *, micro_batch: int, T: int, optimizer="foreach", **how):
    """Train a small model on this CPU and measure its second update.

    Args:
        config: the model, with memory this time.
        micro_batch, T, optimizer: as ``predict``.
        how: ``attention``, ``loss``, ``run_block``, ``accumulate``.

    Returns:
        ``measure_peak``'s result.
    """
    accumulate = how.pop("accumulate", 1)
    model = gpt.GPT(config, **how)
    adam = adamw(model, optimizer)
    ids = torch.randint(0, config.vocab_size, (micro_batch, T))
    batch = (ids, ids.clone(), torch.tensor(1 / ids.numel()))
    update(model, adam, batch, accumulate)
    adam.zero_grad(set_to_none=True)
    resident = resident_bytes(model, adam, *batch)
    return measure_peak(
        lambda: update(model, adam, batch, accumulate), resident
    )


# --- the table --------------------------------------------------------------

TIGHT = {"run_block": recompute_block, "optimizer": "for-loop"}
CASES = [  # (preset, micro-batch, T, name, what predict takes)
    ("gpt2", 4, 1024, "plain", {}),
    ("gpt2", 4, 1024, "fused attention", {"attention": fused_attention}),
    ("gpt2", 4, 1024, "recompute", {"run_block": recompute_block}),
    ("gpt2", 1, 1024, "4 micro-batches", {"accumulate": 4}),
    ("gpt2", 1, 128, "foreach AdamW", {}),
    ("gpt2", 1, 128, "for-loop AdamW", {"optimizer": "for-loop"}),
    ("book-large", 32, 128, "plain", {}),
]
BY_FORMULA = ("gpt2-medium", "gpt2-large", "gpt2-xl")
SMOKE = [
    ("gpt2-tiny", 4, 64, "plain", {}),
    ("gpt2-tiny", 4, 64, "recompute, loop", TIGHT),
]


def as_formula_takes(how: dict) -> dict:
    """Translate ``predict``'s callables into the formula's flags."""
    flags = dict(how)
    flags["fused"] = flags.pop("attention", None) is fused_attention
    flags["recompute"] = flags.pop("run_block", None) is recompute_block
    return flags


def row(name, B, T, label, how, track=True) -> dict:
    """Set the formula's peak beside the tracked one.

    Raises:
        bench.Mismatch: when they are more than 5% apart.
    """
    config = gpt.preset(name)
    found = by_formula = formula(
        config, micro_batch=B, T=T, **as_formula_takes(how)
    )
    error = None
    if track:
        found = predict(config, micro_batch=B, T=T, **how)
        error = by_formula["peak_bytes"] / found["peak_bytes"] - 1
        if abs(error) > 0.05:
            raise bench.Mismatch(
                f"{name}, {label}: the formula is {error:+.1%} off the "
                "tracked peak"
            )
    held = {key: found["bytes"][key] for key in CATEGORIES[:5]}
    held |= {"peak": found["peak_bytes"], "rest": found["rest_bytes"]}
    return {
        "model": name,
        "B·T": f"{B}·{T}",
        "change": label,
        **{f"{key}_mib": round(held[key] / 2**20, 1) for key in held},
        "formula": "alone" if error is None else f"{error:+.2%}",
        "moment": by_formula["moment"],
    }


def measured_row() -> dict:
    """Run a small model for real and set its peak beside the prediction."""
    config = gpt.preset("gpt2-tiny").but(vocab_size=1000)
    sizes = {"micro_batch": 8, "T": 64}
    tracked = predict(config, **sizes)["peak_bytes"]
    measured = live_peak(config, **sizes)["peak_bytes"]
    if abs(measured - tracked) > 0.01 * tracked:
        raise bench.Mismatch(
            f"a small model's peak is {measured} bytes, {tracked} predicted"
        )
    return {"measured_bytes": measured, "predicted_bytes": tracked}


def main(argv=None):
    args = bench.cli(__doc__, argv)
    rows = [row(*case) for case in (SMOKE if args.smoke else CASES)]
    rows += [row(name, 4, 1024, "plain", {}, False) for name in BY_FORMULA]
    columns = {
        "model": "MiB",
        "B·T": "B·T",
        "change": "change",
        "parameters_mib": "weights",
        "gradients_mib": "grads",
        "optimizer_mib": "state",
        "activations_mib": "kept",
        "temporary_mib": "temp",
        "peak_mib": "peak",
        "formula": "formula",
    }
    cells = [
        {k: f"{v:,.0f}" if k.endswith("_mib") else v for k, v in r.items()}
        for r in rows
    ]
    real = measured_row()
    print(bench.table(cells, columns, title="\n".join(args.sections)))
    print(
        f"a small model really run on this CPU: {real['measured_bytes']:,} "
        f"bytes at its peak, {real['predicted_bytes']:,} predicted"
    )
    bench.record(args, rows, extra={"measured": real})
    return rows


if __name__ == "__main__":
    bench.run(main)
