"""What a real rank measures, importable by the processes of the test."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ch07_memory import training_memory
from common import gpt, ranks


def sharded_peaks(
    micro_batch: int, accumulate: int, recompute: bool, updates: int
) -> list[int]:
    """Shard a small model over the real ranks, measure later updates.

    Gloo copies what it reduces and its thread frees the copy, unseen by the
    profiler; whether the next copy takes the same address, which writes the
    one before off, is a matter of threads. So a peak may be too high by some
    blocks' gradients and is never too low.

    Returns:
        Bytes at the peak of each of ``updates`` updates.
    """
    rank = ranks.init("cpu")
    torch.manual_seed(0)
    run_block = training_memory.recompute_block if recompute else None
    model = gpt.GPT(CONFIG, run_block=run_block or gpt.call_block)
    mesh = init_device_mesh("cpu", (rank.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = training_memory.adamw(model, "for-loop")
    ids = torch.randint(0, CONFIG.vocab_size, (micro_batch, 64))
    batch = (ids, ids.clone(), torch.tensor(1 / ids.numel()))
    training_memory.update(model, adam, batch, accumulate)
    peaks = []
    for _ in range(updates):
        adam.zero_grad(set_to_none=True)
        resident = training_memory.resident_bytes(model, adam, *batch)
        measured = training_memory.measure_peak(
            lambda: training_memory.update(model, adam, batch, accumulate),
            resident,
        )
        peaks.append(measured["peak_bytes"])
    ranks.finish()
    return peaks


CONFIG = gpt.GPTConfig(4, 4, 128, block_size=64, vocab_size=500)
