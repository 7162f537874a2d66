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
    assert [row["copies"] for row in counted] == [1, 1, 0, 0, 0]
    assert [row["allocations"] for row in counted] == [2, 2, 1, 1, 0]
    out = capsys.readouterr().out
    assert "keep" in out or "left out" in out


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
