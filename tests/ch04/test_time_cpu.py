"""4.2.1: what clocks say of sleeps and spins that are known."""

import itertools
import time

import pytest
import torch

from ch04_profiling import time_cpu
from ch04_profiling.time_cpu import (
    between_readings,
    enough_calls,
    reading_cost,
    smallest_step,
    spin,
    three_clocks,
)

REAL = time.perf_counter, time.process_time, time.thread_time
COARSE = time.get_clock_info("thread_time").resolution > 1e-3


class Machine:
    """A clock that moves only when something is done, in whole ticks."""

    def __init__(self, tick=1, reading=0):
        self.now, self.tick, self.reading = 0, tick, reading
        self.process = self.thread = 0

    def wall(self):
        self.now += self.reading
        return self.now // self.tick * self.tick

    def cpu(self):
        return self.process

    def own(self):
        return self.thread

    def work(self, wall, process=0, thread=0):
        def call():
            self.now += wall
            self.process += process
            self.thread += thread

        return call


def test_smoke():
    rows = time_cpu.main(["--smoke", "--device", "cpu"])
    assert [r["name"] for r in rows[:5]] == [
        f"time.{name}()" for name in time_cpu.CLOCKS
    ]
    assert all(r["step_s"] > 0 for r in rows[:5])
    sleep = next(r for r in rows if r.get("name") == "sleep")
    assert sleep["wall_s"] >= 0.9 * sleep["known_wall_s"]
    assert rows[-1]["calls"] == 100


@pytest.mark.parametrize("tick", [1, 7, 100])
def test_the_step_is_the_clock_s(tick, pasted):
    machine = Machine(tick=tick, reading=1)
    assert pasted(smallest_step)(machine.wall, 5) == tick


def test_the_cost_of_a_reading(pasted):
    machine = Machine(reading=3)
    plain = Machine()

    def clock():
        plain.now += 3

    assert pasted(reading_cost)(clock, plain.wall, 100) == 3
    assert reading_cost(lambda: None, machine.wall, 100) == 0


def test_each_clock_gets_its_own_column(pasted):
    machine = Machine()
    work = machine.work(5, process=8, thread=2)
    clocks = machine.wall, machine.cpu, machine.own
    assert pasted(three_clocks)(work, *clocks) == (5, 8, 2)


def test_a_sleep_costs_no_cpu_time():
    wall, process, thread = three_clocks(lambda: time.sleep(0.05), *REAL)
    assert wall >= 0.045  # Windows wakes up to a tick early
    assert thread < wall / 2
    # the known wrong timer: a CPU clock does not see what it waited for
    assert process < 0.045 or COARSE


def test_a_spin_costs_as_much_as_was_asked():
    _, process, thread = three_clocks(lambda: spin(0.05), *REAL)
    assert thread >= 0.05 or COARSE
    assert process >= 0.05 or COARSE


def test_two_threads_add_up_and_are_not_the_caller_s():
    work = time_cpu.in_threads(lambda: spin(0.05), 2)
    _, process, thread = three_clocks(work, *REAL)
    assert process >= 0.1 or COARSE
    assert thread < process / 2


def test_calls_share_a_pair_of_readings(pasted):
    for calls in (1, 10, 100):
        machine = Machine(reading=40)
        took = pasted(between_readings)(machine.work(10), calls, machine.wall)
        assert took == 10 + 40 / calls


def test_enough_calls_hide_a_step(pasted):
    machine = Machine(tick=1000)
    calls = pasted(enough_calls)(machine.work(10), machine.wall, 1000, 0.01)
    assert calls * 10 >= 1000 / 0.01
    took = between_readings(machine.work(10), calls, machine.wall)
    assert abs(took / 10 - 1) <= 0.01
    # one call is below a step of this clock: it seems to take nothing
    alone = [
        between_readings(machine.work(10), 1, machine.wall) for _ in range(9)
    ]
    assert all(abs(took / 10 - 1) > 0.9 for took in alone)


def test_a_clock_that_is_set_back_gives_a_negative_time():
    """Why time.time() is no stopwatch; the others promise not to do it."""
    set_back = itertools.chain([100.0], itertools.repeat(40.0))
    assert between_readings(lambda: None, 1, lambda: next(set_back)) < 0
    adjustable = [
        name
        for name in time_cpu.CLOCKS
        if time.get_clock_info(name).adjustable
    ]
    assert adjustable == ["time"]


def test_thread_counts_are_put_back():
    before = torch.get_num_threads()
    time_cpu.matmul(8, before + 1)()
    assert torch.get_num_threads() == before
