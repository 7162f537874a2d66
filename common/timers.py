"""Wait for a device, and time calls on it: at the borders only.

A GPU takes orders and works later.  A clock that is read without waiting
times the ordering; a wait after every call adds its own cost to each and
forbids the next call to be prepared meanwhile.  So: wait, read, call n
times, wait, read.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch


def synchronize(device: str | torch.device = "cpu") -> None:
    """Wait until ``device`` has done all it was told; a CPU always has."""
    device = torch.device(device)
    if device.type == "cpu":
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    else:
        torch.accelerator.synchronize(device)


def wall(
    function: Callable[[], object],
    calls: int = 1,
    device: str | torch.device = "cpu",
    *,
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[object], None] = synchronize,
) -> float:
    """Time ``calls`` calls by the host's clock, waiting before and after.

    Args:
        function: called without arguments; its result is dropped.
        calls: how many calls share one pair of waits.
        device: where the work is done.
        clock: returns seconds; a test gives its own.
        sync: waits for the device; a test gives its own.

    Returns:
        Seconds per call.
    """
    sync(device)
    start = clock()
    for _ in range(calls):
        function()
    sync(device)
    return (clock() - start) / calls


def events(
    function: Callable[[], object],
    calls: int = 1,
    device: str | torch.device = "cuda",
) -> float:
    """Time ``calls`` calls by the GPU's own clock, with two events.

    The events are read on the current stream of ``device``: the time starts
    when the GPU reaches the first one, so the host's start-up is not in it.
    A device without such events is timed by ``wall``.

    Returns:
        Seconds per call.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return wall(function, calls, device)
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


# A sample this long makes the clock's own resolution and cost invisible.
SAMPLE_S = max(1e-3, 1e3 * time.get_clock_info("perf_counter").resolution)
LONG_SAMPLE_S = 20 * SAMPLE_S


def calls_per_sample(
    functions: Sequence[Callable[[], object]],
    device: str | torch.device = "cpu",
    **how,
) -> list[int]:
    """Choose how many calls make one sample of each function.

    The fastest gets as many as fill ``SAMPLE_S``; so do all others whose
    sample stays below ``LONG_SAMPLE_S``: the first call after a change of
    turn finds cold caches, and must weigh alike in what is compared.

    Args:
        functions: called without arguments, warm-up included.
        device: where the work is done.
        how: ``clock`` and ``sync``, as for ``wall``.
    """
    seconds = []
    for function in functions:
        calls = 1
        while (one := wall(function, calls, device, **how)) * calls < SAMPLE_S:
            calls *= 2
        seconds.append(one)
    alike = math.ceil(SAMPLE_S / min(seconds))
    return [max(1, min(alike, int(LONG_SAMPLE_S / one))) for one in seconds]


def take_turns(
    functions: Sequence[Callable[[], object]],
    device: str | torch.device = "cpu",
    *,
    rounds: int = 20,
    most_rounds: int = 200,
    budget_s: float = 6.0,
    **how,
) -> np.ndarray:
    """Time functions in turn, so that whatever drifts hits all alike.

    In each round every function gives one sample; the order turns from
    round to round, backwards in every other one.  The time budget alone
    ends it: stopping when a difference shows would find one too often.
    Python's garbage collector waits until a round is over.

    Args:
        functions: called without arguments.
        device: where the work is done.
        rounds: at least so many, whatever the budget.
        most_rounds: at most so many.
        budget_s: seconds for all of it, warm-up left out.
        how: ``clock`` and ``sync``, as for ``wall``.

    Returns:
        Seconds per call, (rounds, functions); a row's samples are paired.
    """
    names = list(range(len(functions)))
    samples = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        calls = calls_per_sample(functions, device, **how)
        start = time.monotonic()
        while len(samples) < rounds or (
            len(samples) < most_rounds and time.monotonic() - start < budget_s
        ):
            gc.collect(0)  # what the last round left, and no more
            turn = len(samples) // 2 % len(names)
            order = names[turn:] + names[:turn]
            if len(samples) % 2:
                order.reverse()
            took = [0.0] * len(names)
            for i in order:
                took[i] = wall(functions[i], calls[i], device, **how)
            samples.append(took)
    finally:
        if collecting:
            gc.enable()
    return np.array(samples)
