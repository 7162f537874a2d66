"""The model, tokens per update and budget that suit a machine."""

from dataclasses import dataclass

import torch

from common import gpt, machine

# (preset, sequences per update, tokens per sequence), the largest first
ON_A_CPU = (
    ("gpt2", 4, 96),
    ("gpt2-small-cpu", 4, 256),
    ("gpt2-small-cpu", 4, 96),
    ("gpt2-small-cpu", 4, 32),
)
# Of matrix products in an update: on two cores of 340 GFLOP/s the third of
# the list needs 0.13 s, so that every row has its turns in eight minutes
MOST_S = 0.22
PROCESS_BYTES = 400 * 2**20  # of Python and torch, before there is a model


@dataclass(frozen=True)
class Size:
    """What a log is made of; ``T`` None is the preset's own context."""

    preset: str
    sequences: int
    T: int | None
    budget_s: float
    why: str


def fits(config: gpt.GPTConfig, sequences: int, T: int, room: float) -> bool:
    """Say whether two configurations, alive at once, fit into ``room``.

    Each needs its state and, for the memory baseline, all activations of an
    update with their gradients.
    """
    state = gpt.state_bytes(config)["total"] * 1.25  # foreach's temporaries
    sequence = gpt.activation_bytes(config, 1, T)["total"] * 1.5
    return 2 * (state + sequences * sequence) <= room


def on_a_cpu(flops: float, memory: float) -> Size:
    """Choose by the rate of float32 GEMMs and the bytes of memory."""
    for preset, sequences, T in ON_A_CPU:
        config = gpt.preset(preset)
        work = sequences * T * gpt.flops_per_token(config, T)
        room = memory / 2 - 2 * PROCESS_BYTES
        if work <= MOST_S * flops and fits(config, sequences, T, room):
            break
    else:
        preset, sequences, T = "gpt2-tiny", 4, None
    why = (
        f"the largest of {len(ON_A_CPU) + 1} sizes whose update needs at "
        f"most {MOST_S:g} s of matrix products at the measured "
        f"{flops / 1e9:,.0f} GFLOP/s, and of which two fit in half of "
        f"{memory / 2**30:,.1f} GiB of memory"
    )
    if T is None:
        why = "the smallest size; not " + why
    return Size(preset, sequences, T, 600 if preset == "gpt2" else 390, why)


def size(
    device: torch.device,
    smoke: bool,
    peaks: dict | None = None,
    memory: float | None = None,
) -> Size:
    """Choose what a device can train, two configurations at once.

    Args:
        device: that trains.
        smoke: whether the figures mean nothing.
        peaks: of ``machine.peaks``, for a CPU; None asks it.
        memory: in bytes, of the machine or the GPU; None asks it.
    """
    if smoke:
        return Size("gpt2-tiny", 4, 32, 20, "a smoke run takes the smallest")
    if device.type == "cpu":
        peaks = machine.peaks(device) if peaks is None else peaks
        memory = machine.memory_bytes() if memory is None else memory
        flops = peaks["gemm_flops"].get("float32") or 0
        return on_a_cpu(flops, memory or 0)
    if device.type != "cuda":
        why = "the same on every device of this kind"
        return Size("gpt2-small-cpu", 4, 96, 600, why)
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory
    room = f"fit in {memory / 2**30:,.0f} GiB of memory"
    for sequences in (8, 4, 2):
        if fits(gpt.preset("gpt2"), sequences, 1024, 0.85 * memory):
            why = f"the most sequences, up to 8, of which two models {room}"
            return Size("gpt2", sequences, None, 600, why)
    return Size("gpt2-small-cpu", 8, 96, 600, f"no two models of gpt2 {room}")
