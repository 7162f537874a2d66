"""6.1.2: when a copy that nobody waited for may be read, or its source."""

import inspect
import warnings

import pytest
import torch
from late_device import LateDevice

from ch06_single_gpu_perf import async_copy
from ch06_single_gpu_perf.async_copy import (
    copied,
    read_after,
    read_at_once,
    submitted,
)

CPU = torch.device("cpu")
SEEDS = range(40)
NEW, OLD = torch.arange(6.0), torch.full((6,), -1.0)


def changed(function, old, new):
    """Return a technique with one thing done otherwise."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, old
    names = {"torch": torch}
    exec(source.replace(old, new), names)
    return names[function.__name__]


# --- device to host: the trap ------------------------------------------------


def result_read(read, seed, pinned=True):
    """Compute on a device that works late; return what the host reads."""
    with LateDevice(seed) as late:
        there = torch.zeros(6).to(late.device)
        host = late.pin(OLD) if pinned else OLD.clone()
        there.add_(1).mul_(NEW.to(late.device))
        return read(host, there)


def right(read, **how):
    found = [result_read(read, seed, **how) for seed in [None, *SEEDS]]
    return [torch.equal(values, NEW) for values in found]


def after(host, there):
    return read_after(host, there, submitted)


def test_reading_after_the_event_is_right_on_any_schedule():
    assert all(right(after))
    assert all(right(after, pinned=False))


def test_reading_at_once_finds_old_values():
    assert not all(right(read_at_once))
    # nothing has been done before somebody waits: all of it is old
    assert torch.equal(result_read(read_at_once, None), OLD)


def test_pageable_memory_hides_the_trap():
    """The driver makes the host wait, so the careless version works."""
    assert all(right(read_at_once, pinned=False))


def test_moving_to_the_host_without_blocking_is_the_same_trap():
    """``.to("cpu", non_blocking=True)`` pins what it returns."""

    def moved(host, there):
        return there.to("cpu", non_blocking=True).clone()

    assert not all(right(moved))
    assert all(right(lambda host, there: there.cpu()))


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        # the event stands before the copy in its stream
        (
            submitted,
            "    destination.copy_(source, non_blocking=True)\n",
            "    early = module.Event()\n"
            "    early.record(module.current_stream(device))\n"
            "    destination.copy_(source, non_blocking=True)\n"
            "    return early\n",
        ),
        # never recorded: an event that is done before anything has begun
        (
            submitted,
            "arrived.record(module.current_stream(device))",
            "pass",
        ),
        # asked, but not waited for
        (read_after, "arrived.synchronize()", "arrived.query()"),
    ],
)
def test_known_wrong_versions_read_old_values(function, old, new):
    wrong = changed(function, old, new)
    if function is submitted:
        assert not all(right(lambda h, t: read_after(h, t, wrong)))
    else:
        assert not all(right(lambda h, t: wrong(h, t, submitted)))


# --- host to device ----------------------------------------------------------


def refilled(seed, wait):
    """Send batches through one page-locked buffer; return what arrives."""
    with LateDevice(seed) as late:
        staging = late.pin(OLD)
        places = [torch.empty_like(OLD, device=late.device) for _ in range(4)]
        for i, place in enumerate(places):
            staging.fill_(float(i))
            arrived = submitted(place, staging)
            if wait:
                arrived.synchronize()
        return [place.cpu().unique().tolist() for place in places]


def test_a_source_is_not_refilled_before_it_was_copied():
    good = [[0.0], [1.0], [2.0], [3.0]]
    assert all(refilled(seed, True) == good for seed in SEEDS)
    assert not all(refilled(seed, False) == good for seed in SEEDS)
    assert refilled(None, False) == 4 * [[3.0]]


def test_who_makes_the_host_wait():
    def waits(copy, pinned, to_device):
        with LateDevice() as late:
            host = late.pin(NEW) if pinned else NEW.clone()
            there = torch.empty_like(NEW, device=late.device)
            copy(*((there, host) if to_device else (host, there)))
            return late.waits

    for to_device in (True, False):
        assert waits(copied, True, to_device) == 1
        assert waits(copied, False, to_device) == 1
        assert waits(submitted, True, to_device) == 0
        assert waits(submitted, False, to_device) == 1


def test_the_event_stands_behind_the_copy_in_its_stream():
    with LateDevice() as late:
        side = late.Stream()
        there = torch.empty_like(NEW, device=late.device)
        with late.stream(side):
            arrived = submitted(there, late.pin(NEW))
        assert arrived.place == (side, 1) and side.queue[0][0] == "copy"
        assert late.calls == [("record", "side")]
        assert not arrived.query()
        arrived.synchronize()
        assert arrived.query() and late.waits == 1


# --- the same code on a CPU --------------------------------------------------


def test_copies_are_right_on_a_cpu():
    for copy in (copied, submitted):
        place = OLD.clone()
        copy(place, NEW)
        assert torch.equal(place, NEW)
    assert torch.equal(read_at_once(OLD.clone(), NEW), NEW)
    assert torch.equal(after(OLD.clone(), NEW), NEW)


def test_a_module_without_streams_still_has_events(monkeypatch):
    """As MPS: events, no ``current_stream``."""
    recorded = []

    class Event:
        def record(self):
            recorded.append("record")

        def synchronize(self):
            recorded.append("synchronize")

    class Module:
        pass

    Module.Event = Event
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert torch.equal(after(OLD.clone(), NEW), NEW)
    assert recorded == ["record", "synchronize"]


def test_events_of_real_modules_take_these_calls():
    for module in (torch.cuda, torch.xpu, torch.cpu):
        inspect.signature(module.Event.record).bind(None, None)
        inspect.signature(module.Event.synchronize).bind(None)
    inspect.signature(torch.mps.Event.record).bind(None)


# --- the script --------------------------------------------------------------


def test_directions_know_where_bytes_go():
    assert list(async_copy.directions(CPU, 64)) == ["host to host"]
    with LateDevice() as late:
        found = async_copy.directions(late.device, 64)
        kinds = {
            name: [t.device.type for t in memories["pageable"]]
            for name, memories in found.items()
        }
    assert kinds == {
        "host to device": ["cpu", "meta"],
        "device to host": ["meta", "cpu"],
    }


def test_the_prediction_counts_bytes(monkeypatch):
    peaks = {
        "copy_bytes_per_s": 10.0,
        "host_to_device_bytes_per_s": 4.0,
        "device_to_host_bytes_per_s": None,
    }
    monkeypatch.setattr(async_copy.machine, "peaks", lambda device: peaks)
    args = type("Args", (), {"smoke": False, "device": CPU})
    assert async_copy.link_s(args, "host to host", 20) == 4.0
    assert async_copy.link_s(args, "host to device", 20) == 5.0
    assert async_copy.link_s(args, "device to host", 20) is None


def test_a_copy_that_does_nothing_is_caught(monkeypatch):
    monkeypatch.setattr(async_copy, "copied", lambda *tensors: None)
    with pytest.raises(AssertionError, match="disagrees"):
        async_copy.main(["--smoke", "--device", "cpu"])


def test_each_row_changes_one_thing():
    memories = {"pageable": ("a", "b"), "pinned": ("c", "d")}
    rows = async_copy.rows_of(memories)
    assert rows == {
        "pageable, blocking": (False, "a", "b"),
        "pageable, non_blocking": (True, "a", "b"),
        "pinned, non_blocking": (True, "c", "d"),
        "pinned, blocking": (False, "c", "d"),
    }
    del memories["pinned"]
    assert list(async_copy.rows_of(memories)) == list(rows)[:2]


def test_smoke(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing can be pinned here")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = async_copy.main(["--smoke", "--device", "cpu"])
    copies, held, read = rows[:2], rows[2:4], rows[4:]
    assert [row["worst_error"] for row in copies] == [0, 0]
    assert all(0 < row["call_s"] <= row["done_s"] for row in held)
    assert [row["old_percent"] for row in read] == [0, 0]
    shown = capsys.readouterr()
    assert "pin_memory() needs one" in shown.out
    assert not shown.err


def test_techniques_work_when_pasted(pasted):
    for function in (copied, submitted):
        place = OLD.clone()
        pasted(function)(place, NEW)
        assert torch.equal(place, NEW)
    assert torch.equal(pasted(read_at_once)(OLD.clone(), NEW), NEW)
    found = pasted(read_after)(OLD.clone(), NEW, pasted(submitted))
    assert torch.equal(found, NEW)


# --- on a GPU ----------------------------------------------------------------


@pytest.mark.gpu
def test_the_trap_on_a_gpu():
    device = torch.device("cuda")
    async_copy.stale(device, 4096, 1 << 20)  # loads the kernels
    once, later = async_copy.stale(device, 4096, 1 << 20)
    assert once["old_percent"] == 100.0
    assert later["old_percent"] == 0.0


@pytest.mark.gpu
def test_a_call_returns_before_a_pinned_copy_is_done():
    device = torch.device("cuda")
    found = async_copy.directions(device, 1 << 28)
    for memories in found.values():
        source, place = memories["pinned"]
        torch.cuda.synchronize()
        arrived = submitted(place, source)
        assert not arrived.query()
        arrived.synchronize()
        assert torch.equal(place.cpu(), source.cpu())
        place.zero_()
        copied(place, source)
        assert torch.equal(place.cpu(), source.cpu())
