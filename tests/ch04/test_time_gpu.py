"""4.2.3, 4.2.4: only the right timer is right on a device that is late."""

import inspect

import pytest
import torch

from ch04_profiling import time_gpu
from ch04_profiling.time_gpu import (
    SimulatedGPU,
    between_events,
    cold_cache,
    replayed,
    sync_every_call,
    without_sync,
)
from common import timers

LONG, SHORT, EVICT = 2**29, 2**20, 2**26


def truth(size, rate=SimulatedGPU.memory_rate):
    """Return the seconds that a kernel keeps the device, gap included."""
    return SimulatedGPU.gap_s + size / rate


def by(stopwatch, size, calls=100, **constants):
    """Return what a stopwatch says of a kernel, on a device of its own."""
    gpu = SimulatedGPU()
    vars(gpu).update(constants)
    copy, evict = gpu.kernel(size, "copy"), gpu.kernel(EVICT, "evict")
    copy()
    gpu.synchronize()
    return stopwatch(gpu, copy, evict, calls)


WATCHES = {
    "no wait": lambda gpu, f, _, n: without_sync(f, n, gpu.clock),
    "a wait per call": lambda gpu, f, _, n: sync_every_call(
        f, n, gpu.clock, gpu.synchronize
    ),
    "borders": lambda gpu, f, _, n: timers.wall(
        f, n, clock=gpu.clock, sync=lambda _: gpu.synchronize()
    ),
    "events": lambda gpu, f, _, n: between_events(f, n, gpu),
    "queue filled": lambda gpu, f, evict, n: between_events(
        f, n, gpu, lambda: [evict() for _ in range(n)]
    ),
    "graph": lambda gpu, f, _, n: (
        between_events(replayed(f, n, gpu), 1, gpu) / n
    ),
    "cold": lambda gpu, f, evict, n: cold_cache(f, n, gpu, evict),
}


def right(name, size, rate=SimulatedGPU.memory_rate, **how):
    return abs(by(WATCHES[name], size, **how) / truth(size, rate) - 1) < 0.03


def test_smoke_says_that_it_is_simulated(capsys):
    rows = time_gpu.main(["--smoke", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "4.2.3  Timing GPU code" in out
    assert "4.2.4  Precise GPU timing" in out
    assert out.count("SIMULATED") == 3 and "left out" in out
    assert all(row["simulated"] for row in rows)


@pytest.mark.parametrize(
    "name", ["borders", "events", "queue filled", "graph", "cold"]
)
def test_right_on_a_kernel_longer_than_its_launch(name):
    assert right(name, LONG)


def test_no_wait_times_the_launch():
    took = by(WATCHES["no wait"], LONG)
    assert took == pytest.approx(SimulatedGPU.launch_s)
    assert not right("no wait", LONG)


def test_a_wait_per_call_is_inflated():
    size = 2**25  # 34 µs
    took = by(WATCHES["a wait per call"], size, cache_bytes=0)
    extra = SimulatedGPU.launch_s + SimulatedGPU.wait_s
    assert took == pytest.approx(truth(size) + extra)
    assert not right("a wait per call", size, cache_bytes=0)
    assert right("borders", size, cache_bytes=0)


@pytest.mark.parametrize("name", ["borders", "events", "a wait per call"])
def test_a_kernel_shorter_than_its_launch_is_not_seen_alone(name):
    """The queue runs dry: what lies between is the host's launching."""
    assert not right(name, SHORT, cache_bytes=0)
    took = by(WATCHES[name], SHORT, cache_bytes=0)
    assert took >= SimulatedGPU.launch_s > truth(SHORT)


@pytest.mark.parametrize("name", ["queue filled", "graph"])
def test_without_the_host_a_short_kernel_is(name):
    assert right(name, SHORT, cache_bytes=0)


def test_the_cache_answers_unless_evicted():
    warm = SimulatedGPU.cache_rate
    size = 2**23
    assert right("queue filled", size, warm)
    assert not right("queue filled", size)
    assert right("cold", size)
    assert size / by(WATCHES["queue filled"], size) > SimulatedGPU.memory_rate
    # evicting less than the cache holds leaves the bytes where they are
    small = by(
        lambda gpu, f, _, n: cold_cache(f, n, gpu, gpu.kernel(2**10, "e")),
        size,
    )
    assert small < truth(size)


def test_a_graph_is_one_launch():
    gpu = SimulatedGPU()
    launches = []
    launch = gpu.launch

    def counted(*works):
        launches.append(len(works))
        launch(*works)

    gpu.launch = counted
    replay = replayed(gpu.kernel(SHORT, "copy"), 50, gpu)
    assert launches == [1, 1, 1]  # warm-up, and nothing while capturing
    replay()
    assert launches[3:] == [50]


def recorded(watch):
    """Return the order of events, waits and kernels of a stopwatch."""
    gpu, order = SimulatedGPU(), []
    plain, event = gpu.kernel(LONG, "f"), gpu.Event

    def noted(name, function):
        def call(*args):
            order.append(name)
            return function(*args)

        return call

    def make(enable_timing):
        assert enable_timing
        made = event()
        made.record = noted("event", made.record)
        made.synchronize = noted("wait for event", made.synchronize)
        return made

    gpu.Event = make
    gpu.synchronize = noted("wait", gpu.synchronize)
    watch(gpu, noted("kernel", plain), noted("evict", plain))
    return order


def test_the_order_of_waits_events_and_kernels():
    order = recorded(
        lambda gpu, f, evict: between_events(f, 2, gpu, ahead=evict)
    )
    # the event's own wait ends in the simulated device's
    assert order[:7] == [
        "wait",
        "evict",
        "event",
        "kernel",
        "kernel",
        "event",
        "wait for event",
    ]
    order = recorded(lambda gpu, f, evict: cold_cache(f, 2, gpu, evict))
    assert order == ["evict", "event", "kernel", "event"] * 2 + ["wait"]


def changed(function, old, new):
    source = inspect.getsource(function)
    assert source.count(old) == 1, old
    names = {"torch": torch}
    exec(source.replace(old, new), names)
    return names[function.__name__]


def test_evicting_inside_the_events_is_wrong():
    wrong = changed(
        cold_cache,
        "evict()\n        start.record()",
        "start.record()\n        evict()",
    )
    took = by(lambda gpu, f, evict, n: wrong(f, n, gpu, evict), 2**23)
    assert took > 3 * truth(2**23)


@pytest.mark.parametrize("function", time_gpu.TECHNIQUES)
def test_pasted(function, pasted):
    there = pasted(function)
    gpu = SimulatedGPU()
    kernel, evict = gpu.kernel(LONG, "a"), gpu.kernel(EVICT, "b")
    known = {
        "function": kernel,
        "calls": 3,
        "clock": gpu.clock,
        "sync": gpu.synchronize,
        "module": gpu,
        "evict": evict,
    }
    names = inspect.signature(there).parameters
    found = there(**{n: known[n] for n in names if n in known})
    assert callable(found) or found > 0


@pytest.mark.gpu
def test_stopwatches_agree_on_a_long_copy():
    if torch.version.hip:
        pytest.skip("written for CUDA graphs")
    rows = time_gpu.main(["--smoke", "--device", "cuda"])
    rows = [r for r in rows if r["bytes"] == LONG]
    took = {r["name"]: r["call_s"] for r in rows}
    for name in ("events", "events, graph", "events, queue filled"):
        assert abs(took[name] / took["waits at the borders"] - 1) < 0.1
    assert took["no wait"] < took["events"] / 2
    assert not any(r["simulated"] for r in rows)
