"""Short lists of steps, some of them wrong on purpose, for the ladder."""

from dataclasses import replace

import torch

from ch10_gpt2 import train
from ch10_gpt2.steps import step

MEMORY, SPEED = [], []


@step(MEMORY, "10.3.1", "Baseline", "基準模型")
def memory_baseline(config):
    """Keep everything."""
    return replace(
        config,
        micro_batch=config.sequences,
        optimizer="foreach",
        tokens="once",
    )


@step(MEMORY, "10.3.2", "Accumulation", "梯度累加", agreement="close")
def zero_grad_inside(config):
    """Zero the gradients before every micro-batch: the classic mistake."""

    def accumulate(run, batches):
        counted = sum((t != -100).sum() for _, t in batches)
        total = torch.zeros(())
        for ids, targets in batches:
            run.optimizer.zero_grad(set_to_none=True)
            loss = run.model(ids, targets, 1 / counted)
            loss.backward()
            total += loss.detach()
        return total

    train.accumulate = accumulate
    return replace(config, micro_batch=1)


@step(MEMORY, "10.3.3", "Recomputation", "重算")
def too_large(config):
    """Ask for more memory than there is."""

    def accumulate(run, batches):
        raise torch.OutOfMemoryError("tried to allocate 999 GiB")

    train.accumulate = accumulate
    return config


@step(MEMORY, "10.3.4", "Optimizer", "最佳化器", agreement="close")
def crash(config):
    """End the process in the middle of an update."""

    def accumulate(run, batches):
        raise SystemExit(3)

    train.accumulate = accumulate
    return config


@step(MEMORY, "10.3.5", "Format", "格式", agreement="precision")
def bfloat16(config):
    """Go on in 16 bits."""
    return replace(config, precision="bfloat16")


@step(MEMORY, "10.3.5", "Embedding", "嵌入", agreement="close")
def lost_positions(config):
    """Lose one parameter's gradient where 16 bits could be the excuse."""
    accumulate = train.accumulate

    def without_positions(run, batches):
        loss = accumulate(run, batches)
        run.model.wpe.weight.grad.zero_()
        return loss

    train.accumulate = without_positions
    return config


@step(SPEED, "10.4.1", "Baseline", "基準模型")
def speed_baseline(config):
    """One sequence at a time."""
    return replace(config, micro_batch=1)


@step(SPEED, "10.4.2", "Batch size", "增加 BatchSize", agreement="close")
def larger_batch(config):
    """One large micro-batch."""
    return replace(config, micro_batch=config.sequences)


@step(SPEED, "5.2.3", "Tokenise once", "資料的離線前置處理")
def tokenise_once(config):
    """Slice a file of ids."""
    return replace(config, tokens="once")
