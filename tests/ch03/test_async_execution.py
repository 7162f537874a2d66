"""3.5: a launch is not a completion; the calls that wait are named."""

import threading

import pytest
import torch

from ch03_pytorch_basics import async_execution
from ch03_pytorch_basics.async_execution import (
    CALLS,
    SimulatedDevice,
    has_waited,
    launch_and_done,
    queue_depths,
)
from common import bench

CPU = torch.device("cpu")
WAITS = {
    "x.cpu()",
    "x.tolist()",
    "x.sum().item()",
    "if x.sum() > 0",
    "x.nonzero()",
    "x[x > 0]",
    "x.unique()",
    "torch.equal(x, x + 1)",
}


class Late:
    """A device on a clock of its own: work ends later than it is ordered."""

    def __init__(self, launch_s=1.0, work_s=10.0):
        self.now = self.free = 0.0
        self.launch_s, self.work_s = launch_s, work_s

    def clock(self):
        return self.now

    def work(self):
        self.now += self.launch_s
        self.free = max(self.free, self.now) + self.work_s

    def synchronize(self):
        self.now = max(self.now, self.free)


# --- launch and completion --------------------------------------------------


def test_launch_and_completion_of_a_late_device():
    late = Late()
    late.work()  # earlier work is not this call's
    found = launch_and_done(late.work, late.synchronize, late.clock)
    assert found == (1.0, 11.0)


def test_a_clock_read_without_waiting_is_wrong():
    late = Late()
    late.work()

    def unsynchronized(work, synchronize, clock):
        start = clock()
        work()
        return clock() - start, clock() - start

    def unsynchronized_before(work, synchronize, clock):
        start = clock()
        work()
        returned = clock()
        synchronize()
        return returned - start, clock() - start

    for wrong in (unsynchronized, unsynchronized_before):
        late = Late()
        late.work()
        found = wrong(late.work, late.synchronize, late.clock)
        assert found != (1.0, 11.0)


def test_a_synchronous_device_is_done_when_it_returns():
    late = Late(launch_s=10.0, work_s=0.0)
    found = launch_and_done(late.work, late.synchronize, late.clock)
    assert found == (10.0, 10.0)


# --- the queue --------------------------------------------------------------


class Event:
    def __init__(self, done, place):
        self.done, self.place = done, place

    def query(self):
        return self.done[0] >= self.place


def test_depths_are_what_is_not_done():
    done, launched = [0], [0]

    def launch():
        launched[0] += 1
        if launched[0] == 4:
            done[0] = 3  # the device catches up

    found = queue_depths(launch, lambda: Event(done, launched[0]), 6)
    assert found == [1, 2, 3, 1, 2, 3]


def test_the_simulated_queue_is_as_long_as_it_says():
    for limit in (1, 2, 5):
        with SimulatedDevice(limit) as late:
            late.hold()
            for _ in range(limit - 1):
                late.launch(lambda: None)
            assert (late.waits, late.launched - late.done) == (0, limit)
            late.launch(lambda: None)  # waits for room: the hold ends
            assert late.waits == 1


def test_depths_of_the_script():
    simulated, real = async_execution.depths(CPU, 20)
    assert (simulated["deepest"], simulated["full"]) == (8, True)
    assert real["deepest"] == 0


# --- the simulated device ---------------------------------------------------


def test_values_are_those_of_the_cpu():
    values = torch.linspace(-2, 2, 12)

    def program(x):
        y = (x.view(3, 4) @ x.view(4, 3)).relu()
        y[0].mul_(2)  # through a view
        z = torch.where(y > 1, y, -y).sort(-1)
        return z.values + y.mean(0) + x[x > 0].sum()

    with SimulatedDevice() as late:
        found = program(late.tensor(values.clone())).cpu()
    assert torch.equal(found, program(values))


def test_work_is_done_in_order_by_another_thread():
    seen = []
    with SimulatedDevice() as late:
        late.hold()
        for i in range(5):
            late.launch(lambda i=i: seen.append((i, threading.get_ident())))
        assert not seen
        late.synchronize()
    assert [i for i, _ in seen] == list(range(5))
    assert {thread for _, thread in seen} == {late.thread.ident}


def test_an_error_comes_with_the_next_wait_and_once():
    with SimulatedDevice() as late:
        x = late.tensor(torch.ones(4))
        late.hold()
        x.index_select(0, late.tensor(torch.tensor([9])))
        (x + 1).sum()  # goes on
        with pytest.raises(IndexError, match="out of range"):
            late.synchronize()
        late.synchronize()
        assert (x + 1).tolist() == [2.0] * 4
    assert "out of range" in async_execution.late_error()


def test_a_copy_that_nobody_waited_for_is_not_there():
    with SimulatedDevice() as late:
        x = late.tensor(torch.ones(4))
        late.hold()
        there = x.to("cpu", non_blocking=True)
        there.fill_(-1.0)  # what the memory held before
        assert there.tolist() == [-1.0] * 4
        late.synchronize()
        assert there.tolist() == [1.0] * 4


def test_leaving_releases_a_held_device():
    with SimulatedDevice() as late:
        late.hold()
    assert not late.thread.is_alive()


# --- which calls wait -------------------------------------------------------


def test_synchronising_calls_are_listed():
    rows = async_execution.waiting_calls(CPU)
    assert {row["name"] for row in rows if row["simulated"]} == WAITS
    assert {name for name, (_, waits) in CALLS.items() if waits} == WAITS
    assert len(rows) == len(CALLS) > len(WAITS) + 5


def test_a_call_that_waits_in_passing_is_found():
    with SimulatedDevice() as late:
        x = late.tensor(torch.arange(4.0))

        def step():
            y = x * 2
            return y / y.max().item()

        assert has_waited(step, late.hold, late.event)

    with SimulatedDevice() as late:
        x = late.tensor(torch.arange(4.0))

        def launched():
            y = x * 2
            return y / y.max()

        assert not has_waited(launched, late.hold, late.event)


def test_a_device_that_works_at_once_is_no_model(monkeypatch):
    """On a synchronous device every call seems to have waited."""

    class Prompt(SimulatedDevice):
        def launch(self, job):
            super().launch(job)
            self.synchronize()

    monkeypatch.setattr(async_execution, "SimulatedDevice", Prompt)
    rows = async_execution.waiting_calls(CPU)
    assert all(row["simulated"] for row in rows if row["name"] != "x.shape")
    with pytest.raises(bench.Mismatch):
        async_execution.main(["--smoke", "--device", "cpu"])


def test_a_rule_that_forgets_sizes_is_noticed(monkeypatch):
    right = async_execution.data_decide

    def forgetful(op, args):
        return op is torch.ops.aten._local_scalar_dense.default

    monkeypatch.setattr(async_execution, "data_decide", forgetful)
    with pytest.raises(Exception):  # noqa: B017 (meta cannot know the size)
        async_execution.waiting_calls(CPU)
    monkeypatch.setattr(async_execution, "data_decide", right)
    async_execution.waiting_calls(CPU)


def test_the_event_is_behind_the_work(monkeypatch):
    """Work, record, call, query: in this order, on the device's module."""
    calls = []

    class Recorded:
        def record(self):
            calls.append("record")

        def query(self):
            calls.append("query")
            return False

    class Module:
        Event = Recorded

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    waited = has_waited(
        lambda: calls.append("call"),
        lambda: calls.append("busy"),
        lambda: async_execution.event_behind(torch.device("cuda")),
    )
    assert calls == ["busy", "record", "call", "query"]
    assert waited is False


def test_waits_of_two_programs():
    rows = async_execution.host_and_device(3, 0.0, 0.0)
    assert [row["waits"] for row in rows] == [1, 3]
    assert [row["value"] for row in rows] == [3.0, 3.0]
    rows = async_execution.host_and_device(2, 0.002, 0.003)
    assert [row["predicted_s"] for row in rows] == [0.008, 0.01]
    for row in rows:
        for times in row["timeline"]:
            order = ("asked_s", "start_s", "end_s")
            assert sorted(order, key=times.__getitem__) == list(order)
            assert times["asked_s"] <= times["returned_s"]


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = async_execution.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert not shown.err
    assert "launch = completion, a CPU is synchronous" in shown.out
    assert "left out: launch times" in shown.out
    assert shown.out.count("SIMULATED") == 2
    assert not any("real" in row for row in rows)
    drawn = async_execution.figure(rows)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [
        "wait at the end",
        "wait after each",
    ]


@pytest.mark.parametrize("function", async_execution.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone = pasted(function)
    if function is launch_and_done:
        late = Late()
        assert alone(late.work, late.synchronize, late.clock) == (1.0, 11.0)
    elif function is queue_depths:
        assert alone(lambda: None, lambda: Event([0], 1), 2) == [1, 2]
    else:
        assert alone(lambda: None, lambda: None, lambda: Event([1], 1))


# --- on a GPU ---------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_returns_before_it_is_done(capsys):
    rows = async_execution.main(["--device", "cuda"])
    large = next(row for row in rows if row["name"] == "4096 × 4096")
    assert large["held_percent"] < 50
    queue = next(row for row in rows if row["name"].startswith("cuda"))
    assert queue["deepest"] > 100
    assert "synchronous" not in capsys.readouterr().out.split("Launch and")[1]


@pytest.mark.gpu
def test_the_calls_that_wait_for_a_gpu():
    rows = async_execution.waiting_calls(torch.device("cuda"))
    assert {row["name"] for row in rows if row["real"]} == WAITS
