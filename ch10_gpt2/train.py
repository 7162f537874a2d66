"""Train GPT-2, alone or on many ranks: every technique of chapter 10's log.

Each is a function of an earlier chapter, a small one here, or one line of
``start``; ``config.Config`` says which are on, ``windows`` brings the data.
The defaults are the log's baseline, an honest first version; the log ends
with the flags that are worth using on your machine.

Run       python -m ch10_gpt2.train --preset gpt2 --data my.txt
          torchrun --nproc-per-node=2 -m ch10_gpt2.train --parallel ddp
Speed     tokens/s = tokens of the updates / seconds of the updates;
          evaluation, checkpoints and start-up are outside.
MFU       tokens/s x FLOPs per token / (ranks x peak), with FLOPs per token
          = 6 (N - wpe) + 12 L C T, and the vendor's dense peak of the GPU,
          or the GEMM rate measured here on a CPU; "n/a" if not known.
"""

import contextlib
import functools
import itertools
import math
import time
import types

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ch06_single_gpu_perf.fused_operators import fused_attention
from ch06_single_gpu_perf.optimizer_kernels import adamw
from ch06_single_gpu_perf.overlap_copies import prefetched
from ch06_single_gpu_perf.tensor_creation import keep_freed_memory
from ch07_memory.training_memory import recompute_block
from ch10_gpt2.checkpoints import (
    load_checkpoint,
    refuse_used,
    save_checkpoint,
)
from ch10_gpt2.config import (  # noqa: F401  (one name for the ladder)
    Config,
    as_dict,
    cannot_compile,
    check,
    command_line,
    fit_to_ranks,
    parse,
)
from ch10_gpt2.metrics import (
    Metrics,
    peak_flops,
    throughput,
    utilisation,
)
from ch10_gpt2.windows import (  # noqa: F401
    Order,
    TokenisedOnce,
    TokenisedOnTheFly,
    blocking,
    make_loader,
    open_data,
)
from common import bench, gpt, machine, ranks, seeding
from common.bench import Refusal
from common.gpt import IGNORED

clock = time.perf_counter  # seconds; replaced in tests


# --- the model's techniques -------------------------------------------------


ATTENTION = {"plain": gpt.plain_attention, "fused": fused_attention}
RECOMPUTE = {"none": gpt.call_block, "blocks": recompute_block}


def make_model(config: Config) -> gpt.GPT:
    """Build the model with its techniques; the seed decides its weights."""
    loss = gpt.summed_cross_entropy
    if config.loss == "in-place":  # built by a compiler: only when asked for
        from ch09_advanced import custom_op

        if reason := custom_op.available(config.device):
            raise Refusal(f"--loss in-place: {reason}")
        loss = custom_op.in_place_cross_entropy
    return gpt.GPT(
        config.model(),
        attention=ATTENTION[config.attention],
        loss=loss,
        run_block=RECOMPUTE[config.recompute],
    )


def shard(model: gpt.GPT, device: torch.device) -> gpt.GPT:
    """Keep 1/W of every tensor on each rank and gather a block at a time.

    Embedding and head are one tensor, so both belong to the root's group.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Keep all on each rank; average gradients in buckets during backward."""
    return nn.parallel.DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # else the gradients exist twice
    )


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW in one of its forms; biases and norms (one dimension) stay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return adamw(groups, config.optimizer, lr=config.lr, betas=(0.9, 0.95))


def learning_rate(config: Config, update: int) -> float:
    """Rise linearly during warm-up, then follow half a cosine."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    low = config.lr / 10 if config.min_lr is None else config.min_lr
    span = max(1, config.steps - config.warmup)
    done = min(1.0, (update - config.warmup) / span)
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * done))


# --- one optimizer update ---------------------------------------------------


def start(config: Config) -> types.SimpleNamespace:
    """Build everything that an update needs; every rank calls it.

    Returns:
        A namespace: config, rank, device, model, optimizer, scaler,
        autocast, windows (dataset), trained (how many of them, the rest is
        held out), batches (iterator of ids and targets, (sequences / world,
        T) each, on the device), updates (applied so far), position (batches
        consumed so far, skipped ones included).

    Raises:
        Refusal: a configuration, device, file or folder that will not do.
    """
    bench.device_of(config.device)
    if config.allocator == "keep" and not keep_freed_memory():
        raise Refusal("--allocator keep: needs glibc's malloc; leave it out")
    rank = ranks.init(config.device)
    check(config, rank.world)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = rank.device
    windows = open_data(config, rank)
    trained = len(windows) - max(1, len(windows) // 20)
    if trained < config.sequences:
        raise Refusal(
            f"{config.data} has {max(0, trained)} windows of "
            f"{config.context()} tokens to train on, an update takes "
            f"--sequences {config.sequences}: give more text or fewer"
        )
    seeding.seed_everything(config.seed)  # the same weights on every rank
    model = make_model(config)
    if config.compile:  # in place: no `_orig_mod.` in the names
        if reason := cannot_compile(device):
            raise Refusal(f"--compile: {reason}")
        whole = config.parallel != "fsdp"  # which gathers between blocks
        for module in [model] if whole else model.blocks:
            module.compile()
    if config.parallel == "fsdp":
        model = shard(model, device)
    else:
        model = model.to(device)
    if config.parallel == "ddp":
        model = replicate(model, device)
    half = config.precision != "float32"
    run = types.SimpleNamespace(
        config=config,
        rank=rank,
        device=device,
        model=model,
        optimizer=make_optimizer(model, config),
        scaler=torch.amp.GradScaler(
            device.type, enabled=config.precision == "float16"
        ),
        autocast=functools.partial(
            torch.autocast, device.type, getattr(torch, config.precision)
        )
        if half
        else contextlib.nullcontext,
        windows=windows,
        trained=trained,
        updates=0,
        position=0,
    )
    seeding.seed_everything(config.seed + rank.rank)  # other dropout on each
    if config.resume:
        load_checkpoint(run)
    order = Order(config, trained, rank, run.position)
    move = prefetched if config.transfer == "prefetch" else blocking
    loader = make_loader(config, windows, order)
    batches = move(loader, device)
    first = next(batches)  # workers have started when the clock starts
    run.batches = itertools.chain([first], batches)
    return run


def accumulate(run, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradient of one update over its micro-batches.

    Each micro-batch's *sum* of losses counts by the counted targets of the
    whole update on all ranks, so unequal ones need no special care; times
    world, because DDP and FSDP divide by it. FSDP adds up its shards after
    every micro-batch: whole gradients would need the memory it saves.

    Args:
        run: from ``start``.
        batches: (ids, targets) on the device, (micro batch, T) each; at
            least one, the same number on every rank.

    Returns:
        This rank's part of the mean loss, times world, 0-dim.
    """
    run.optimizer.zero_grad(set_to_none=True)
    counted = sum((targets != IGNORED).sum() for _, targets in batches)
    if run.rank.world > 1:
        dist.all_reduce(counted)
    scale = run.rank.world / counted.clamp(min=1)  # all ignored: 0, not NaN
    # float16: lifted here and not after the loss, whose own gradient is 16 bit
    lifted = run.scaler.scale(scale)
    total = torch.zeros((), device=run.device)
    for i, (ids, targets) in enumerate(batches):
        if run.config.parallel == "ddp":  # read by forward *and* backward
            run.model.require_backward_grad_sync = i == len(batches) - 1
        with run.autocast():
            loss = run.model(ids, targets, lifted)
        loss.backward()
        total += loss.detach()
    return total * (scale / lifted)


def update(run) -> dict:
    """Make one optimizer update and say what came of it.

    A float16 overflow skips the optimizer: weights, lr and ``updates`` stay,
    the data moves on.

    Returns:
        update (applied so far), loss (mean per counted target, all ranks),
        grad_norm (before clipping), lr, skipped, tokens (all ranks), seconds
        (until the loss is known here), data_s (of these, waiting for data).
    """
    began, config = clock(), run.config
    # a GPU has nothing left to do here, so that reading does not wait
    scale = run.scaler.get_scale() if run.scaler.is_enabled() else 0.0
    lr = learning_rate(config, run.updates)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    ids, targets = next(run.batches)
    data_s = clock() - began
    size = config.micro_batch
    loss = accumulate(
        run, list(zip(ids.split(size), targets.split(size), strict=True))
    )
    run.position += 1
    run.scaler.unscale_(run.optimizer)  # before clipping, or it clips 65536x
    norm = nn.utils.clip_grad_norm_(
        run.model.parameters(), config.clip or math.inf
    )
    if hasattr(norm, "full_tensor"):  # FSDP: each rank has its shards' part
        norm = norm.full_tensor()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if run.rank.world > 1:
        dist.all_reduce(loss)
    loss, norm = torch.stack([loss / run.rank.world, norm]).tolist()
    skipped = run.scaler.is_enabled() and run.scaler.get_scale() < scale
    run.updates += not skipped
    return {
        "update": run.updates,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "skipped": skipped,
        "tokens": config.sequences * config.context(),
        "seconds": clock() - began,
        "data_s": data_s,
    }


def trial(run) -> float:
    """Run forward and backward of one micro-batch; return its mean loss."""
    ids, targets = next(run.batches)
    size = run.config.micro_batch
    return accumulate(run, [(ids[:size], targets[:size])]).item()


@torch.no_grad()
def evaluate(run) -> float:
    """Return the mean loss over held-out windows, the same on every rank.

    Every forward has the shape of training, or it would be compiled again:
    rows beyond the last window are ignored, and so is all of a rank's share
    when only others have windows left.
    """
    config, rank, size = run.config, run.rank, run.config.micro_batch
    held = range(run.trained, len(run.windows))
    held = held[: config.evaluate_batches * config.sequences]
    one = torch.ones((), device=run.device)
    summed = torch.zeros(2, dtype=torch.float64)  # loss, counted targets
    run.model.eval()
    for begin in range(0, len(held), size * rank.world):
        begin += size * rank.rank
        rows = range(begin, begin + size)
        pairs = [run.windows[held[min(row, len(held) - 1)]] for row in rows]
        ids, targets = (torch.stack(side) for side in zip(*pairs, strict=True))
        targets[torch.tensor(rows) >= len(held)] = IGNORED
        with run.autocast():
            loss = run.model(ids.to(run.device), targets.to(run.device), one)
        counted = (targets != IGNORED).sum()
        summed += torch.stack([loss.cpu().double(), counted])
    run.model.train()
    if rank.world > 1:
        dist.all_reduce(summed)
    return (summed[0] / summed[1]).item()


def finish(run) -> None:
    """Stop the loader's workers and drop the model; ranks stay connected."""
    run.__dict__.clear()


# --- the command line -------------------------------------------------------


def train(run) -> list[dict]:
    """Update, evaluate and save until ``steps``; return the updates' rows."""
    config, rows, metrics = run.config, [], Metrics(run)
    flops = gpt.flops_per_token(config.model(), config.context())
    gpus = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # measuring a peak draws numbers
        peak, of = peak_flops(run)
    of = f"of {peak:.3g} FLOP/s, {of}" if peak else "n/a: peak not known"
    metrics.say(f"MFU: tokens/s x {flops:.5g} FLOPs per token, {of}")
    try:
        while run.updates < config.steps:
            row = update(run) | {"position": run.position}
            rows.append(row)
            rate = throughput(rows[-20:])
            metrics.update(
                row,
                f"loss {row['loss']:.4f}, norm {row['grad_norm']:.2f}, "
                f"lr {row['lr']:.1e}, {rate:,.0f} tokens/s, "
                f"MFU {utilisation(rate, flops, peak)}",
            )
            if row["skipped"]:
                continue
            if not math.isfinite(row["loss"]):
                raise Refusal(
                    f"the loss is {row['loss']} at update {run.updates}: "
                    "lower --lr and resume from the last checkpoint"
                )
            if due(run, config.evaluate_every):
                held_out = evaluate(run)
                metrics.say(f"update {run.updates}: held out {held_out:.4f}")
                metrics.keep({"position": run.position, "held_out": held_out})
            last = run.updates == config.steps
            if config.out and (last or due(run, config.save_every)):
                save_checkpoint(run)
    finally:
        metrics.close()
    return rows


def due(run, every: int) -> bool:
    """Tell whether something that happens ``every`` updates happens now."""
    return every > 0 and run.updates % every == 0


def main(argv=None) -> list[dict]:
    """Train as the flags say; return one row per update."""
    config = parse(__doc__, argv)
    if config.out and not config.resume:
        refuse_used(config.out)
    run = start(config)
    try:
        if run.rank.rank == 0:
            print(machine.line(machine.card(run.device)), flush=True)
        rows = train(run)
    finally:
        finish(run)
    ranks.finish()
    return rows


if __name__ == "__main__":
    bench.run(main)
