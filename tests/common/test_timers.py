"""The timers against a device that finishes late; nothing is waited for."""

import gc
import math
import time

import numpy as np
import pytest
import torch

from common import timers

LAUNCH_S, KERNEL_S, SYNC_S = 0.4e-3, 1e-3, 0.2e-3


class LateDevice:
    """Accepts work in ``LAUNCH_S`` and finishes it ``KERNEL_S`` later."""

    def __init__(self, drift=0.0):
        self.now = self.done = 0.0
        self.waits, self.order, self.drift = 0, [], drift

    def clock(self):
        return self.now

    def sync(self, device=None):
        self.waits += 1
        self.now = max(self.now, self.done) + SYNC_S

    def kernel(self, seconds=KERNEL_S, name=None):
        def call():
            self.order.append(name)
            self.now += LAUNCH_S
            slower = seconds * (1 + self.drift * self.now)
            self.done = max(self.now, self.done) + slower

        return call

    @property
    def how(self):
        return {"clock": self.clock, "sync": self.sync}


def without_sync(call, calls, device, clock, sync):
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def sync_per_call(call, calls, device, clock, sync):
    total = 0.0
    for _ in range(calls):
        sync(device)
        start = clock()
        call()
        sync(device)
        total += clock() - start
    return total / calls


def error_of(timer, calls=100):
    """Return the timer's relative error on a kernel of known time."""
    late = LateDevice()
    took = timer(late.kernel(), calls, None, **late.how)
    return took / KERNEL_S - 1


def test_waiting_at_the_borders_gives_the_true_time():
    assert abs(error_of(timers.wall)) < 0.01


def test_timer_without_sync_fails_the_same_check():
    assert error_of(without_sync) < -0.5


def test_sync_per_call_is_inflated():
    assert error_of(sync_per_call) > 0.5


def test_borders_are_two_waits_for_any_number_of_calls():
    late = LateDevice()
    timers.wall(late.kernel(), 50, None, **late.how)
    assert late.waits == 2


def test_cpu_needs_no_wait_and_events_fall_back():
    calls = []
    timers.synchronize("cpu")
    assert timers.events(lambda: calls.append(1), 3, "cpu") >= 0
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_timers_see_a_kernel_that_the_host_does_not_wait_for():
    def sleep():
        torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds

    now = time.perf_counter
    launched = without_sync(sleep, 5, "cuda", now, None)
    for timer in timers.wall, timers.events:
        assert timer(sleep, 5, "cuda") > 10 * launched


def test_rows_of_like_speed_get_like_samples():
    late = LateDevice()
    ms = [0.5, 0.55, 5.0, 500.0]
    functions = [late.kernel(m * 1e-3) for m in ms]
    calls = timers.calls_per_sample(functions, **late.how)
    assert calls[0] == calls[1] == calls[2] >= 1
    assert calls[3] == 1


def test_a_sample_is_long_enough_for_the_clock():
    late = LateDevice()
    fast = late.kernel(1e-9)
    (calls,) = timers.calls_per_sample([fast], **late.how)
    took = timers.wall(fast, calls, None, **late.how)
    assert took * calls >= timers.SAMPLE_S


def test_turns_are_fair():
    late = LateDevice()
    names = "abc"
    functions = [late.kernel(1.0, name) for name in names]  # a call a sample
    samples = timers.take_turns(functions, rounds=6, budget_s=0.0, **late.how)
    assert samples.shape == (6, 3)
    order = "".join(late.order[-18:])
    turns = [order[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(turn) == list(names) for turn in turns)
    for place in range(3):  # everybody stands everywhere equally often
        assert sorted(turn[place] for turn in turns) == list("aabbcc")


def test_drift_hits_all_rows_alike():
    late = LateDevice(drift=0.02)
    functions = [late.kernel(1.0), late.kernel(1.0)]
    samples = timers.take_turns(functions, rounds=20, budget_s=0.0, **late.how)
    assert samples[-1, 0] > 1.5 * samples[0, 0]
    ratio = np.median(samples[:, 0] / samples[:, 1])
    assert math.isclose(ratio, 1, abs_tol=0.03)


def test_budget_and_limit_of_rounds():
    def take(**limits):
        return len(timers.take_turns([lambda: None], **limits))

    assert take(rounds=5, budget_s=0.0) == 5
    assert take(rounds=5, most_rounds=8, budget_s=60.0) == 8


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_collector_waits_and_comes_back(collecting):
    seen = []

    def call():
        seen.append(gc.isenabled())
        if len(seen) > 20_000:
            raise EOFError

    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(EOFError):
            timers.take_turns([call], most_rounds=10**9, budget_s=60.0)
        assert gc.isenabled() == collecting
        assert not any(seen)
    finally:
        gc.enable()
