"""2.3.5: what was sent arrives, and the fit finds start and bandwidth."""

import types
import warnings

import pytest
import torch

from ch02_hardware import host_device_copy
from ch02_hardware.host_device_copy import (
    fitted,
    half_way,
    link_bytes_per_s,
)

COUNTS = [2**k for k in range(12, 28, 2)]


def times(start_s, rate, noise=0.0, counts=COUNTS):
    draw = torch.Generator().manual_seed(0)
    off = 1 + noise * (2 * torch.rand(len(counts), generator=draw) - 1)
    clean = torch.tensor([start_s + n / rate for n in counts])
    return (clean * off).tolist()


@pytest.mark.parametrize("start_s", [5e-6, 1e-4, 3e-3])
@pytest.mark.parametrize("rate", [1e7, 2.5e10, 4e11])
def test_the_fit_finds_what_made_the_samples(start_s, rate):
    found = fitted(COUNTS, times(start_s, rate))
    assert found == pytest.approx((start_s, rate), rel=1e-3)


def test_the_fit_stands_noise():
    found = fitted(COUNTS, times(2e-5, 1e10, noise=0.1))
    assert found == pytest.approx((2e-5, 1e10), rel=0.15)


def test_a_plain_least_squares_forgets_the_start():
    """The longest copy's noise is more than the start: weigh relatively."""
    sampled = times(2e-5, 1e10, noise=0.1)
    n = torch.tensor(COUNTS, dtype=torch.float64)
    terms = torch.stack([torch.ones_like(n), n], dim=1)
    t = torch.tensor(sampled, dtype=torch.float64)[:, None]
    start_s = torch.linalg.lstsq(terms, t).solution[0].item()
    assert abs(start_s / 2e-5 - 1) > 1
    assert abs(fitted(COUNTS, sampled)[0] / 2e-5 - 1) < 0.15


def test_impossible_fits_keep_to_one_term():
    start_s, rate = fitted([100, 200], [1.0, 3.0])  # a line from below zero
    assert start_s == 0 and 60 < rate < 100
    start_s, rate = fitted([100, 200], [3.0, 1.0])  # more bytes in less time
    assert 1 < start_s < 3 and rate == float("inf")


def test_half_of_the_time_is_start_at_that_size():
    start_s, rate = 1e-5, 2e10
    n = half_way(start_s, rate)
    assert n / (start_s + n / rate) == pytest.approx(rate / 2)


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [
        (1, 16, 4.0),
        (3, 16, 15.75),
        (4, 16, 31.51),
        (5, 16, 63.02),
        (4, 8, 15.75),
    ],
)
def test_links_as_printed(generation, lanes, gigabytes):
    found = link_bytes_per_s(generation, lanes) / 1e9
    assert found == pytest.approx(gigabytes, abs=0.01)


def test_ways_of_each_device():
    found = host_device_copy.pairs(torch.device("cpu"), 64)
    assert list(found) == [("host to host", "pageable")]
    (there, here), *_ = found.values()
    assert not torch.equal(there, here)


def test_bytes_that_do_not_arrive_are_noticed(monkeypatch):
    monkeypatch.setattr(host_device_copy, "from_pageable", lambda *pair: None)
    with pytest.raises(AssertionError, match="not the bytes"):
        host_device_copy.main(["--smoke", "--device", "cpu"])


def test_half_a_copy_is_noticed(monkeypatch):
    def half(there, host):
        there[: len(host) // 2].copy_(host[: len(host) // 2])

    monkeypatch.setattr(host_device_copy, "from_pageable", half)
    with pytest.raises(AssertionError, match="not the bytes"):
        host_device_copy.main(["--smoke", "--device", "cpu"])


def test_a_copy_takes_the_median_of_its_samples(monkeypatch):
    def take_turns(calls, device, rounds, budget_s):
        for call in calls:
            call()
        return torch.tensor([[3.0], [1.0], [2.0]]).numpy()

    monkeypatch.setattr(host_device_copy.timers, "take_turns", take_turns)
    args = types.SimpleNamespace(device=torch.device("cpu"), smoke=True)
    (row,) = host_device_copy.measured(args, 2**12)
    assert row["copy_s"] == 2.0
    assert row["rate_bytes_per_s"] == 2**11
    assert row["copied_bytes"] == 2**12


def test_smoke(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing can be pinned here")

    monkeypatch.setattr(host_device_copy, "pinned_like", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = host_device_copy.main(["--smoke", "--device", "cpu"])
    copies = [row for row in rows if "copied_bytes" in row]
    assert [row["copied_bytes"] for row in copies] == [2**12, 2**16, 2**20]
    assert len(rows) == len(copies) + 1
    assert "left out: the link to a GPU" in capsys.readouterr().out
    drawn = host_device_copy.figure(rows)
    assert len(drawn.axes[0].lines) == 2


def sized(device, **how):
    args = types.SimpleNamespace(device=torch.device(device), smoke=False)
    return host_device_copy.sizes(args, **how)


def test_three_sizes_lie_beyond_the_caches():
    """Both places together: half of the cache is not enough for each."""
    for cache in (2**20, 2**26 + 1, 300 * 2**20):
        found = sized("cpu", cache=cache)
        assert found == sorted(set(found)) and found[0] == 2**12
        assert len([n for n in found if 2 * n > max(cache, 2**26)]) == 3
    most = sized("cpu", cache=300 * 2**20, room=2**30)
    assert most[-1] == 2**29  # and as much again for the other place
    assert sized("cuda") == [2**k for k in range(12, 29, 2)]


def test_the_fit_is_of_what_no_cache_holds(monkeypatch, capsys):
    """Ten times quicker in the caches: a fit of all would find neither."""
    rate, cache = 1e10, 300 * 2**20

    def measured(args, size):
        taken = size / rate / (10 if 2 * size <= cache else 1)
        row = {"direction": "host to host", "memory": "pageable"}
        row |= {"copied_bytes": size, "copy_s": taken}
        return [row | {"rate_bytes_per_s": size / taken}]

    peaks = {"copy_bytes_per_s": 2 * rate, "cache_bytes": cache}
    monkeypatch.setattr(host_device_copy.machine, "peaks", lambda _: peaks)
    monkeypatch.setattr(host_device_copy, "room_bytes", lambda: 2**32)
    monkeypatch.setattr(host_device_copy, "measured", measured)
    rows = host_device_copy.main(["--device", "cpu"])
    shown = capsys.readouterr().out
    assert "% of memory's rate" in shown and "% of link" not in shown
    assert "from 256 MiB on: no cache holds both" in shown
    assert "the start is not resolved" in shown
    fit = rows[-1]
    assert fit["fit_bytes_per_s"] == pytest.approx(rate)
    assert fit["least_bytes"] == 2**28 and fit["off_percent"] < 1
    assert rows[-2]["link_percent"] == pytest.approx(100)
    line = host_device_copy.figure(rows).axes[0].lines[1]
    assert list(line.get_xdata()) == [2**28, 2**29, 2**30]
    monkeypatch.setattr(host_device_copy, "room_bytes", lambda: 2**29)
    host_device_copy.main(["--device", "cpu"])
    assert "no room for copies beyond the caches" in capsys.readouterr().out


def test_the_table_compares_with_the_link(monkeypatch, capsys):
    peaks = {"copy_bytes_per_s": 2e10}
    monkeypatch.setattr(
        host_device_copy.machine, "peaks", lambda device: peaks
    )
    rate, words = host_device_copy.link(torch.device("cpu"))
    assert rate == 1e10 and "memory" in words


def test_techniques_work_when_pasted(pasted):
    there, host = torch.zeros(5), torch.arange(5.0)
    assert pasted(host_device_copy.from_pageable)(there, host) is there
    assert torch.equal(there, host)
    found = pasted(fitted)(COUNTS, times(1e-4, 1e9))
    assert found == pytest.approx((1e-4, 1e9), rel=1e-3)
    assert pasted(half_way)(2.0, 3.0) == 6.0
    assert pasted(link_bytes_per_s)(2, 1) == 5e8


@pytest.mark.gpu
def test_ways_of_a_gpu():
    found = host_device_copy.pairs(torch.device("cuda"), 2**20)
    for (direction, memory), (there, here) in found.items():
        host = here if direction == "host to device" else there
        assert host.is_pinned() == (memory == "pinned")
        there.copy_(here)
        assert torch.equal(there.cpu(), here.cpu())
    assert len(found) == 4


@pytest.mark.gpu
def test_smoke_on_a_gpu():
    rows = host_device_copy.main(["--smoke", "--device", "cuda"])
    assert sum("start_s" in row for row in rows) == 4
