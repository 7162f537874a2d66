"""Making tensors: equal values, counted allocations, copies and faults."""

import ctypes
import inspect
import json
import subprocess
import sys

import pytest
import torch

from ch06_single_gpu_perf import tensor_creation as script
from common import bench

CPU = torch.device("cpu")
N = 1024


@pytest.mark.parametrize("name", script.predicted(N))
def test_costs_are_those_predicted(name):
    allocations, copies, _ = script.predicted(N)[name]
    cost = script.cost_of(script.ways(N, CPU)[name]())
    assert cost["allocations"] == allocations
    assert cost["allocated_bytes"] == 4 * N * allocations
    assert cost["copies"] == copies
    assert cost["copied_bytes"] == 4 * N * copies


def test_all_make_the_same_numbers():
    expected = torch.arange(N) * 0.5
    for name, factory in script.ways(N, CPU).items():
        assert torch.equal(factory()(), expected), name


def test_the_techniques_run_when_pasted(pasted):
    expected = torch.arange(N) * 0.5
    buffer = torch.full((N,), float("nan"))
    for function in script.TECHNIQUES[:4]:
        assert torch.equal(pasted(function)(N, CPU), expected)
    made = pasted(script.into_a_buffer)(N, buffer)
    assert made is buffer and torch.equal(buffer, expected)


def test_a_buffer_of_another_size_is_not_reused():
    """Wrong version: out= of another size is resized, which allocates."""
    empty = torch.empty(0)
    with pytest.warns(UserWarning, match="resized"):
        script.into_a_buffer(N, torch.empty(4))
    script.into_a_buffer(N, empty)  # silently
    assert empty.numel() == N

    cost = script.cost_of(lambda: script.into_a_buffer(N, torch.empty(0)))
    assert cost["allocations"] > 0


def test_a_buffer_is_one_tensor():
    """The trap of out=: what was made before changes with it."""
    buffer = torch.empty(4)
    first = script.into_a_buffer(4, buffer)
    buffer.zero_()
    assert first.sum() == 0


def test_default_device_ends_with_its_block():
    with torch.device("meta"):
        assert script.on_the_default_device(3, CPU).device == CPU
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device == CPU


def test_the_smoke_run_prints_every_table(capsys):
    rows = script.main(["--smoke"])
    counted = [row for row in rows if "copies" in row]
    assert [row["copies"] for row in counted] == [1, 0, 0, 0, 1]
    assert [row["allocations"] for row in counted] == [2, 1, 1, 0, 2]
    first, *_ = (row["name"] for row in rows if "median_s" in row)
    assert first == "host tensor, then moved"
    ratios = {r["name"]: r["predicted"] for r in rows if "reading" in r}
    assert "list, then moved" not in ratios
    assert len(ratios) == 3 and all(r > 0 for r in ratios.values())
    out = capsys.readouterr().out
    assert "keep" in out or "left out" in out
    assert max(map(len, out.splitlines())) <= 100


PART = {
    "fill_host": 20e-6,
    "empty_host": 1e-6,
    "fill": 10e-6,
    "empty": 2e-6,
    "copy": 5e-6,
    "context": 4e-6,
}


def test_ratios_are_predicted_from_the_parts():
    names = [n for n in script.predicted(N) if "list" not in n]
    times = [
        {
            "name": name,
            "ratio": 2.0,
            "ratio_interval": [1.9, 2.1],
            "differs": True,
            "verdict": "2.00×",
        }
        for name in names
    ]
    rows = {row["name"]: row for row in script.summary(times, PART)}
    assert "host tensor, then moved" not in rows  # the baseline: 28 µs
    on_device, default, reused = rows.values()
    assert on_device["predicted"] == pytest.approx(28 / 12)
    assert default["predicted"] == pytest.approx(28 / 16)
    assert reused["predicted"] == pytest.approx(2.8)
    assert on_device["reading"] == "about as predicted"
    assert reused["reading"] == "less than predicted"

    text = "\n".join(script.explained(list(rows.values()), PART))
    assert "2.00× the speed" in text
    assert "say 3: 6 µs of allocating and copying" in text
    assert "themselves still take 10 µs (on the host 20 µs)" in text
    assert max(map(len, text.split("\n"))) <= 100
    assert "costs 4 µs of Python" in text


def test_parts_are_timed_apart():
    part = script.parts(N, CPU)
    assert part.keys() == PART.keys()
    assert all(seconds >= 0 for seconds in part.values())


def has_mallopt():
    try:
        return bool(ctypes.CDLL(None).mallopt)
    except (AttributeError, OSError, TypeError):
        return False


@pytest.mark.skipif(not has_mallopt(), reason="needs glibc")
def test_kept_memory_is_not_faulted_in_again():
    size = 64 * 2**20
    (without, _), (kept, _) = script.in_a_process(size, 5)
    assert kept < 16
    assert without > 8 * max(kept, 1)  # 32 faults where pages are 2 MiB


@pytest.mark.skipif(not has_mallopt(), reason="needs glibc")
def test_page_faults_are_those_predicted():
    import resource

    args = bench.cli(script.__doc__, ["--smoke", "--device", "cpu"])
    given_back, kept = script.memory_table(args)
    pages = 64 * 2**20 // resource.getpagesize()
    assert (given_back["predicted"], kept["predicted"]) == (pages, 0)
    assert kept["page_faults"] <= pages / 100


@pytest.mark.skipif(not has_mallopt(), reason="needs glibc")
def test_a_heap_that_is_kept_does_not_keep_maps():
    """Wrong version: no giving back, but big tensors are still mapped."""
    code = inspect.getsource(script.keep_freed_memory)
    both = "mallopt(-4, 0) and mallopt(-1, 2**31 - 1)"
    assert both in code
    run = (
        "from ch06_single_gpu_perf import tensor_creation as script\n"
        "import torch\ntorch.set_num_threads(1)\n"
        "assert keep_freed_memory()\n"
        "print(script.faults_and_time(64 * 2**20, 3)[0])"
    )
    found = []
    for settings in (both, "mallopt(-1, 2**31 - 1)"):
        done = subprocess.run(
            [sys.executable, "-c", code.replace(both, settings) + "\n" + run],
            capture_output=True,
            text=True,
            check=True,
            cwd=bench.ROOT,
        )
        found.append(int(done.stdout))
    kept, mapped = found
    assert kept < 16 < mapped


@pytest.mark.skipif(not has_mallopt(), reason="needs glibc")
def test_keep_freed_memory_pasted_in_a_process_of_its_own():
    """It cannot be undone, so not in this one."""
    code = inspect.getsource(script.keep_freed_memory)
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(keep_freed_memory())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"


def test_without_glibc_it_says_so(monkeypatch, capsys):
    class Nothing:
        def __init__(self, name):
            pass

    monkeypatch.setattr(ctypes, "CDLL", Nothing)
    assert script.keep_freed_memory() is False
    monkeypatch.setattr(
        script.subprocess,
        "run",
        lambda *a, **k: subprocess.CompletedProcess(
            a, 0, json.dumps([[1, 1.0], False, [1, 1.0]])
        ),
    )
    args = bench.cli(script.__doc__, ["--smoke"])
    assert script.memory_table(args) == []
    assert "glibc" in capsys.readouterr().out


def test_without_page_faults_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    args = bench.cli(script.__doc__, ["--smoke"])
    assert script.memory_table(args) == []
    assert "left out" in capsys.readouterr().out


@pytest.mark.gpu
def test_allocations_and_copies_on_a_gpu():
    device = torch.device("cuda")
    for name, factory in script.ways(N, device).items():
        allocations, copies, _ = script.predicted(N)[name]
        cost = script.cost_of(factory())
        assert cost["copies"] == copies, name
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        made = factory()()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert made.device.type == "cuda"
        on_gpu = after - before  # the buffer was made with the factories
        assert on_gpu == min(allocations, 1), name
