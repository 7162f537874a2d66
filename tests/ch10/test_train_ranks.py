"""Two ranks train as one process does, and exchange no more than needed.

The functions that run in the ranks stand at the top of this module, so that
other processes can import them. Each starts two processes: several questions
share one start.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ch10_gpt2 import train
from common import gpt, ranks
from common.gpt import IGNORED

pytestmark = pytest.mark.ranks

BASE = train.Config(
    preset="gpt2-tiny", T=16, sequences=8, tokens="once", steps=10
)
SHAPE = gpt.GPTConfig(2, 2, 32, block_size=16, vocab_size=97)


def share(rank, parts=1, rows=2, uneven=True):
    """Make a rank's micro-batches; rank 0 counts 6 targets, rank 1 two."""
    made = []
    for part in range(parts):
        generator = torch.Generator().manual_seed(10 * rank + part)
        ids = torch.randint(97, (rows, 17), generator=generator)
        targets = ids[:, 1:].clone()
        if uneven:
            targets.view(-1)[(6, 2)[rank] + part :] = IGNORED
        made.append((ids[:, :-1], targets))
    return made


def small(run, wrap):
    """Put a small model into a run that has joined the ranks."""
    torch.manual_seed(0)
    model = gpt.GPT(SHAPE)
    run.model = wrap(model, run.device)
    run.optimizer = train.make_optimizer(run.model, run.config)
    return run


def gradient(run):
    """Return the whole gradient, wherever its shards are."""
    grads = [p.grad for p in run.model.parameters()]
    grads = [
        g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads
    ]
    return torch.cat([g.flatten() for g in grads])


def right_gradient(world=2, **how):
    """Compute in one process what the ranks should arrive at."""
    torch.manual_seed(0)
    model = gpt.GPT(SHAPE)
    parts = [part for rank in range(world) for part in share(rank, **how)]
    ids, targets = (torch.cat(side) for side in zip(*parts, strict=True))
    logits = model(ids).flatten(0, 1)
    nn.functional.cross_entropy(logits, targets.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def plain_average(run, batches):
    """Divide by the rank's own targets; let DDP average the ranks."""
    run.optimizer.zero_grad()
    ids, targets = batches[0]
    run.model(ids, targets, 1 / (targets != IGNORED).sum()).backward()


def flag_after_forward(run, batches):
    """Decide about the exchange when forward has decided already."""
    run.optimizer.zero_grad()
    counted = sum((t != IGNORED).sum() for _, t in batches)
    dist.all_reduce(counted)
    for i, (ids, targets) in enumerate(batches):
        loss = run.model(ids, targets, run.rank.world / counted)
        run.model.require_backward_grad_sync = i == len(batches) - 1
        loss.backward()
    run.model.require_backward_grad_sync = True


def round_backward_only(run, batches):
    """Give the same numbers for K exchanges instead of one."""
    run.optimizer.zero_grad()
    counted = sum((t != IGNORED).sum() for _, t in batches)
    dist.all_reduce(counted)
    for i, (ids, targets) in enumerate(batches):
        run.model.require_backward_grad_sync = True
        loss = run.model(ids, targets, run.rank.world / counted)
        run.model.require_backward_grad_sync = i == len(batches) - 1
        loss.backward()
    run.model.require_backward_grad_sync = True


def count_rounds(state, bucket):
    """Count a bucket, then average it as DDP does without a hook.

    In this thread: a future's ``then`` would run Python in one of gloo's,
    which aborts when the interpreter ends before it has let go.
    """
    state.append(bucket.index())
    averaged = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(averaged)
    done = torch.futures.Future()
    done.set_result(averaged)
    return done


def data_parallel_job(folder):
    """Answer everything that is asked about DDP, and go on from a file."""
    run = train.start(replace(BASE, parallel="ddp", micro_batch=2, out=folder))
    losses = [train.update(run) for _ in range(2)]
    held_out = train.evaluate(run)
    train.finish(run)
    run = train.start(
        replace(BASE, parallel="ddp", micro_batch=4, out=folder, resume=True)
    )
    resumed = train.update(run)

    rank, out = run.rank.rank, {}
    for name, accumulate, how in (
        ("uneven", train.accumulate, {}),
        ("plain average", plain_average, {}),
        ("parts", train.accumulate, {"parts": 4}),
        ("flag after forward", flag_after_forward, {"parts": 4}),
        ("round backward only", round_backward_only, {"parts": 4}),
    ):
        small(run, train.replicate)
        buckets = []
        run.model.register_comm_hook(buckets, count_rounds)
        accumulate(run, share(rank, **how))
        out[name] = gradient(run), len(buckets), len(set(buckets))
    return losses, held_out, resumed, out


def sharded_job(folder):
    """Answer everything that is asked about FSDP; leave a checkpoint."""
    run = train.start(
        replace(BASE, parallel="fsdp", micro_batch=2, out=folder)
    )
    losses = [train.update(run) for _ in range(2)]
    held_out = train.evaluate(run)
    train.save_checkpoint(run)
    tied = run.model.lm_head.weight is run.model.wte.weight
    local = sum(p.to_local().numel() for p in run.model.parameters())
    later = train.update(run)
    train.finish(run)

    run = train.start(replace(BASE, parallel="fsdp", precision="float16"))
    accumulate = train.accumulate

    def overflow_on_rank_0(run, batches):
        loss = accumulate(run, batches)
        if run.rank.rank == 0:
            first = next(run.model.parameters()).grad
            first.to_local().view(-1)[0] = float("inf")
        return loss

    train.accumulate = overflow_on_rank_0
    skipped = train.update(run)["skipped"]
    train.accumulate = accumulate
    train.finish(run)

    run = train.start(replace(BASE, parallel="fsdp"))
    small(run, train.shard)
    train.accumulate(run, share(run.rank.rank, parts=4))
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    whole = norm.full_tensor().item()
    return {
        "losses": losses,
        "held_out": held_out,
        "later": later,
        "tied": tied,
        "local": local,
        "skipped": skipped,
        "gradient": gradient(run),
        "norm": whole,
        "shard's norm": nn.utils.get_total_norm(
            [p.grad.to_local() for p in run.model.parameters()]
        ).item(),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a single process's updates, and its checkpoint's folder."""
    folder = str(tmp_path_factory.mktemp("alone"))
    run = train.start(replace(BASE, micro_batch=8, out=folder))
    rows = [train.update(run) for _ in range(2)]
    held_out = train.evaluate(run)
    train.save_checkpoint(run)
    rows.append(train.update(run))
    train.finish(run)
    return rows, held_out, folder


@pytest.fixture(scope="module")
def replicated(alone):
    return ranks.spawn(data_parallel_job, 2, alone[2], timeout_s=240)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sharded"))
    return ranks.spawn(sharded_job, 2, folder, timeout_s=240), folder


def error(found, right):
    return ((found - right).norm() / right.norm()).item()


def agree(rows, right):
    for row, wanted in zip(rows, right, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        norm = pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert row["grad_norm"] == norm
        assert row["tokens"] == wanted["tokens"] == 8 * 16


def test_ddp_trains_as_one_process_does(alone, replicated):
    rows, held_out, _ = alone
    for losses, held, _, _ in replicated:
        agree(losses, rows[:2])
        assert held == pytest.approx(held_out, rel=1e-6)


def test_ddp_counts_unequal_ranks_by_their_targets(replicated):
    right = right_gradient()
    for *_, out in replicated:
        assert error(out["uneven"][0], right) < 1e-6
        assert error(out["plain average"][0], right) > 1e-4


def test_ddp_exchanges_once_per_update(replicated):
    right = right_gradient(parts=4)
    for *_, out in replicated:
        found, exchanged, buckets = out["parts"]
        assert error(found, right) < 1e-6
        assert exchanged == buckets  # one round, whatever the buckets
        found, exchanged, buckets = out["round backward only"]
        assert error(found, right) < 1e-6  # the same numbers
        assert exchanged == 4 * buckets


def test_ddp_flag_covers_forward(replicated):
    right = right_gradient(parts=4)
    (*_, first), (*_, second) = replicated
    assert torch.equal(first["parts"][0], second["parts"][0])
    wrong = [out["flag after forward"][0] for out in (first, second)]
    assert max(error(found, right) for found in wrong) > 1e-4
    assert error(wrong[0], wrong[1]) > 1e-4  # and the ranks drift apart


def test_two_ranks_go_on_from_one(alone, replicated):
    for _, _, resumed, _ in replicated:
        agree([resumed], alone[0][2:])


def test_fsdp_trains_as_one_process_does(alone, sharded):
    rows, held_out, _ = alone
    whole = gpt.parameter_counts(BASE.model())["total"]
    for out in sharded[0]:
        agree([*out["losses"], out["later"]], rows)
        assert out["held_out"] == pytest.approx(held_out, rel=1e-6)
        assert out["tied"]
        assert out["local"] == pytest.approx(whole / 2, rel=0.01)


def test_fsdp_has_the_gradient_and_norm_of_one_process(sharded):
    right = right_gradient(parts=4)
    for out in sharded[0]:
        assert error(out["gradient"], right) < 1e-6
        norm = right.norm().item()
        assert out["norm"] == pytest.approx(norm, rel=1e-5)
        assert out["shard's norm"] != pytest.approx(norm, rel=1e-2)


def test_an_overflow_on_one_shard_skips_the_step_on_all(sharded):
    assert [out["skipped"] for out in sharded[0]] == [True, True]


def test_one_process_goes_on_from_two_shards(sharded):
    answers, folder = sharded
    run = train.start(replace(BASE, micro_batch=8, out=folder, resume=True))
    agree([train.update(run)], [answers[0]["later"]])
    train.finish(run)
