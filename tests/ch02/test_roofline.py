"""Roofline: FLOPs and bytes by hand, ceilings measured and kept."""

import collections
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_techniques import foreign
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ch02_hardware import collective_bandwidth, key_figures, roofline
from common import ceilings, machine

CPU = torch.device("cpu")


class Moved(TorchDispatchMode):
    """Add up the bytes of what one operator reads and returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        tensors = [a for a in args if isinstance(a, torch.Tensor)] + [first]
        self.bytes += sum(t.nbytes for t in tensors)
        return result


class Counted(float):
    """A number that counts the arithmetic done with it."""

    flops = 0

    def count(operation):
        def counted(self, *others):
            Counted.flops += 1
            numbers = [float(self), *map(float, others)]
            return Counted(operation(*numbers))

        return counted

    __add__ = __radd__ = count(lambda x, y: x + y)
    __sub__ = count(lambda x, y: x - y)
    __mul__ = __rmul__ = count(lambda x, y: x * y)
    __truediv__ = count(lambda x, y: x / y)
    exp = count(math.exp)
    larger = count(max)


def added(numbers):
    total = Counted(0.0)
    for number in numbers:
        total = total + number
    return total


def softmax_by_hand(row):
    top = Counted(-math.inf)
    for x in row:
        top = top.larger(x)
    powers = [(x - top).exp() for x in row]
    total = added(powers)
    return [power / total for power in powers]


def layer_norm_by_hand(row, gamma, beta):
    n = len(row)
    mean = float(added(row)) / n  # once per row: not counted
    squares = [d * d for d in (x - mean for x in row)]
    scale = (float(added(squares)) / n + 1e-5) ** -0.5
    return [
        (x - mean) * scale * g + b
        for x, g, b in zip(row, gamma, beta, strict=True)
    ]


def numbers(*values):
    return [Counted(v) for v in values]


def test_matmul_by_machine():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    with FlopCounterMode(display=False) as counter, Moved() as moved:
        torch.mm(a, b)
    work = counter.get_total_flops(), moved.bytes
    assert roofline.matmul_work(5, 7, 3, 4) == work == (210, 4 * 71)
    assert roofline.matmul_work(5, 7, 3, 2) == (210, 2 * 71)


def test_add_by_machine():
    a, b = torch.ones(10), torch.ones(10)
    with Moved() as moved:
        torch.add(a, b)
    assert roofline.add_work(10, 4) == (10, moved.bytes) == (10, 120)


def test_softmax_by_hand():
    row = [0.5, -1.0, 2.0, 0.25]
    Counted.flops = 0
    found = softmax_by_hand(numbers(*row))
    assert found == pytest.approx(torch.tensor(row).softmax(0).tolist())
    x = torch.randn(3, 4)
    with Moved() as moved:
        torch.softmax(x, 1)
    assert roofline.softmax_work(3, 4, 4) == (3 * Counted.flops, moved.bytes)


def test_layer_norm_by_hand():
    row, gamma, beta = [0.5, -1.0, 2.0, 0.25], [1, 2, 3, 4.0], [4, 3, 2, 1.0]
    Counted.flops = 0
    found = layer_norm_by_hand(*map(lambda v: numbers(*v), (row, gamma, beta)))
    weights = [torch.tensor(v) for v in (gamma, beta)]
    right = F.layer_norm(torch.tensor(row), (4,), *weights)
    assert found == pytest.approx(right.tolist())
    x = torch.randn(3, 4)
    with Moved() as moved:
        torch.native_layer_norm(x, (4,), *weights, 1e-5)
    assert roofline.layer_norm_work(3, 4, 4) == (
        3 * Counted.flops,
        moved.bytes,
    )


def test_attention_by_machine():
    """Products by the counter, the softmax by its own formula."""
    B, H, T, D = 2, 3, 8, 4
    q, k, v = (torch.randn(B, H, T, D) for _ in "qkv")
    with FlopCounterMode(display=False) as counter:
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        scores @ v
    softmax, _ = roofline.softmax_work(B * H * T, T, 4)
    flops, moved = roofline.attention_work(B, H, T, D, 4)
    assert flops == counter.get_total_flops() + softmax
    assert moved == sum(t.nbytes for t in (q, k, v, q))


def test_the_roof_has_two_sides():
    assert roofline.roof(1, 100, 10) == 10
    assert roofline.roof(10, 100, 10) == 100
    assert roofline.roof(1000, 100, 10) == 100


def test_wrong_counts_are_caught():
    """A multiply-add as one FLOP, and scores that reach the memory."""
    assert roofline.matmul_work(4, 4, 4, 4)[0] != 4**3
    _, moved = roofline.attention_work(1, 1, 1024, 64, 4)
    assert moved < 4 * 1024 * 1024


# --- ceilings ---------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def instruments(monkeypatch):
    """Measure nothing; each look finds products quicker than the last."""
    looks = []

    def gemm(dtype="float32", device="cpu", sizes=None, budget_s=0.8):
        looks.append((dtype, sizes, budget_s))
        return None if dtype == "float16" else 1e11 * len(looks)

    def bandwidth(device, room, budget_s=0.4):
        return {
            "copy_bytes_per_s": 1e10 if budget_s < 0.5 else 2e10,
            "triad_bytes_per_s": 3e10 if budget_s < 0.5 else 2e10,
            "buffer_bytes": 2**20,
            "cache_bytes": 2**20,
        }

    monkeypatch.setattr(ceilings, "gemm_flops", gemm)
    monkeypatch.setattr(ceilings, "bandwidth", bandwidth)
    monkeypatch.setattr(machine, "_busy", lambda: 0.0)
    monkeypatch.setattr(key_figures, "memmove_rate", lambda *_: 4e10)
    monkeypatch.setattr(key_figures, "disk_read", lambda *_, **__: 5e8)
    ring = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    monkeypatch.setattr(key_figures, "all_reduce", lambda *_: ring)
    return looks


def test_ceilings_go_where_others_read_them(cache, instruments):
    found = key_figures.measure(CPU, smoke=False)
    count = 3 * (1 + key_figures.LOOKS)  # of three dtypes
    assert len(instruments) == count
    again = machine.peaks("cpu")
    assert len(instruments) == count  # read, not measured
    assert again == found
    (path,) = cache.iterdir()
    assert json.loads(path.read_text()) == found
    assert found["gemm_flops"]["float32"] == 1.3e12  # the best of all looks
    assert found["gemm_flops"]["float16"] is None
    assert found["copy_bytes_per_s"] == 2e10
    assert found["triad_bytes_per_s"] == 3e10  # the first look was better
    assert found["disk_read_bytes_per_s"] == 5e8
    assert found["all_reduce"] == {"latency_s": 1e-4, "bytes_per_s": 1e9}
    assert found["host_to_device_bytes_per_s"] is None


def test_a_smoke_run_keeps_nothing(cache, instruments):
    key_figures.measure(CPU, smoke=True)
    assert not list(cache.iterdir())
    assert {sizes for _, sizes, _ in instruments} == {(64,)}


def test_what_others_saw_is_a_ceiling_here(cache, instruments):
    """A row of another script, on this machine, was better than all looks."""
    machine.keep_peaks({"gemm_flops": {"float32": 9e12}})
    found = key_figures.measure(CPU, smoke=False)
    assert found["gemm_flops"]["float32"] == 9e12
    assert found["copy_bytes_per_s"] == 2e10


@pytest.mark.parametrize("threads", [1, 3])
def test_memmove_moves_every_byte(monkeypatch, threads):
    """Whatever the number of threads; both directions count."""
    moved = []

    def memmove(to, start, count):
        moved.append((to - start, start, count))

    def shortest(call, device, budget_s):
        call()
        return 1.0

    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 2**26)
    monkeypatch.setattr(ceilings, "shortest", shortest)
    monkeypatch.setattr(key_figures.ctypes, "memmove", memmove)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert key_figures.memmove_rate(2**21 + 2, 0.0) == 2 * (2**20 + 1)
    assert len(moved) == threads
    assert len({apart for apart, _, _ in moved}) == 1
    places = sorted((start, count) for _, start, count in moved)
    for (start, count), (after, _) in zip(places, places[1:], strict=False):
        assert start + count == after
    assert sum(count for _, count in places) == 2**20 + 1


def test_a_slow_mode_is_passed_and_named(cache, instruments, monkeypatch):
    """bfloat16 runs at a third in every look but the last."""
    rates = iter([4e11] * key_figures.LOOKS + [1.2e12])

    def gemm(dtype="float32", *_, **__):
        return next(rates) if dtype == "bfloat16" else 3e11

    monkeypatch.setattr(ceilings, "gemm_flops", gemm)
    found = key_figures.measure(CPU, smoke=False)
    assert found["gemm_flops"]["bfloat16"] == 1.2e12


def test_looks_that_do_not_agree_are_named():
    looks = [
        {"gemm_flops": {"float32": rate, "float16": None, "bfloat16": 1e11}}
        for rate in (3e11, 2e11, 2.9e11)
    ]
    (line,) = key_figures.modes(looks)
    assert line.startswith("products, float32: 3 looks reached 200 GFLOP/s")
    assert not list(key_figures.modes(looks[::2]))


def test_every_ceiling_is_shown(cache, instruments):
    found = key_figures.measure(CPU, smoke=False)
    rows = {r["name"]: r["figure"] for r in roofline.ceiling_rows(found)}
    assert rows["products, float32"] == "1.3 TFLOP/s"
    assert rows["products, float16"] == "—"
    assert rows["memory, torch's copy (read + write)"] == "20 GB/s"
    assert rows["memory, memmove (read + write)"] == "40 GB/s"
    assert rows["host to device, pinned"] == "—"
    assert rows["disk, read"] == "500 MB/s"
    ring = "all-reduce of 2 ranks"
    assert rows[f"{ring}, latency (best single call)"] == "100 µs"
    assert rows[f"{ring}, bytes (best single call)"] == "1 GB/s"


def test_latency_and_rate_by_hand():
    fit = key_figures.latency_and_rate
    times = [1e-4 + 4 / 1e9, 1e-4 + 1e6 / 1e9]
    found = fit([4, 10**6], times)
    assert found["latency_s"] == pytest.approx(1e-4)
    assert found["bytes_per_s"] == pytest.approx(1e9)
    assert fit([4, 10**6], [2e-4, 1e-4]) is None  # noise, no rate
    best = fit([4, 10**6, 10**7], [1e-4, 2.1e-3, 5.1e-3])
    assert best["bytes_per_s"] == pytest.approx(2e9, rel=1e-3)
    larger = fit([4, 10**6, 10**7], [1e-4, 1.1e-3, 2e-2])
    assert larger["bytes_per_s"] == pytest.approx(1e9, rel=1e-3)


def test_an_all_reduce_takes_as_long_as_its_slowest_rank(monkeypatch):
    """Two ranks, two calls of each size, all of the large one slower."""

    def spawn(work, world, sizes, repeats, *_, **__):
        one = [[2.0, 5.0], *[[4.0, 7.0] for _ in sizes[1:]]]
        two = [[4.0, 3.0], *[[8.0, 6.0] for _ in sizes[1:]]]
        return [one, two]

    monkeypatch.setattr(key_figures.ranks, "spawn", spawn)
    monkeypatch.setattr(key_figures, "on_speaking_terms", lambda: True)
    found = key_figures.all_reduce(CPU, smoke=True)  # 4 and 4,096 bytes
    assert found["bytes_per_s"] == pytest.approx(4092 / (7 - 4))
    assert found["latency_s"] == pytest.approx(4.0, rel=1e-2)
    assert key_figures.best_calls_s([[[2.0, 5.0]], [[4.0, 3.0]]]) == [4.0]


@pytest.mark.ranks
def test_two_ranks_sum():
    found = key_figures.all_reduce(CPU, smoke=True)
    assert found is None or found["bytes_per_s"] > 0


def test_ranks_that_cannot_talk_are_left_out(monkeypatch, capsys):
    lines = (
        "rank 1 failed with exit code 1; its last lines:\nTraceback\nno lo\n"
    )

    def fails(*_, **__):
        raise RuntimeError(lines)

    monkeypatch.setattr(key_figures.ranks, "spawn", fails)
    assert key_figures.all_reduce(CPU, smoke=True) is None
    assert capsys.readouterr().out == (
        "no all-reduce: rank 1 failed with exit code 1: no lo\n"
    )
    assert key_figures.all_reduce(torch.device("mps"), smoke=True) is None


def test_without_an_interface_no_rank_is_started(monkeypatch, capsys):
    def unreachable(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(key_figures.socket, "create_connection", unreachable)
    monkeypatch.setattr(key_figures.ranks, "spawn", None)  # not called
    assert key_figures.all_reduce(CPU, smoke=True) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no all-reduce: no network interface is up")
    monkeypatch.undo()
    assert key_figures.on_speaking_terms()


def test_the_disk_is_read_whole_and_left_clean(tmp_path, monkeypatch):
    forgotten = []
    monkeypatch.setattr(key_figures, "in_memory", lambda _: False)
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system's cache cannot be told to forget")

    def forget(fd, start, length, advice):
        forgotten.append((os.fstat(fd).st_size, start, length, advice))

    clock = iter([10.0, 12.0, 20.0, 21.0, 30.0, 34.0])
    monkeypatch.setattr(os, "posix_fadvise", forget)
    monkeypatch.setattr(key_figures.time, "perf_counter", lambda: next(clock))
    rate = key_figures.disk_read(tmp_path, 2**20, block=2**18)
    assert rate == 2**20 / 2
    assert forgotten == [(2**20, 0, 0, os.POSIX_FADV_DONTNEED)]
    rate = key_figures.disk_read(tmp_path, 2**20, 2**18, budget_s=4.0)
    assert rate == 2**20 / 1  # the better of two
    assert len(forgotten) == 3
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_measured_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert key_figures.disk_read(tmp_path / "file", 2**20) is None
    monkeypatch.setattr(key_figures, "in_memory", lambda _: True)
    assert key_figures.disk_read(tmp_path, 2**20) is None


def test_a_folder_in_memory_is_no_disk(tmp_path):
    mounts = tmp_path / "mounts"
    place = tmp_path.resolve()
    mounts.write_text(f"a / ext4 rw 0 0\nb {place} tmpfs rw 0 0\n")
    assert key_figures.in_memory(tmp_path / "x", mounts)
    assert not key_figures.in_memory("/", mounts)
    mounts.write_text(f"a / tmpfs rw 0 0\nb {place} ext4 rw 0 0\n")
    assert not key_figures.in_memory(tmp_path / "x", mounts)
    assert not key_figures.in_memory(tmp_path, tmp_path / "nothing")


# --- other sections' rows, and the ceilings they are held against -----------

PACKAGE = Path(roofline.__file__).parent
NOISE = 1.15  # times the ceiling: it and the row were measured apart


def seen(entries, found):
    """Yield (section, what, rate of a row, its ceiling) of one machine.

    Rows that a cache holds, or with another number of threads than the
    ceiling's, are held against nothing.
    """

    def rows(name, key):
        entry = entries.get(f"{PACKAGE.name}.{name}", {})
        if "--folder" not in entry.get("argv", []):  # another disk
            yield from (r for r in entry.get("rows", []) if key in r)

    threads, cache = found["threads"], found["cache_bytes"]
    copy, rates = found["copy_bytes_per_s"], found["gemm_flops"]
    for row in rows("cpu_throughput", f"{threads}_flops"):
        if row["name"] in rates:
            rate, top = row[f"{threads}_flops"], rates[row["name"]]
            yield "2.1.2", row["name"], rate, top
    for row in rows("memory_hierarchy", "threads"):
        if row["threads"] == threads and row["array_bytes"] >= cache:
            for name in ("copy", "triad"):
                key = f"{name}_bytes_per_s"
                yield "2.1.1", name, row[key], found[key]
    for row in rows("disk_throughput", "cache"):
        if (row["storage_bytes"] or 0) >= row["total_bytes"]:
            key = "disk_read_bytes_per_s"
            yield "2.2", row["name"], row["read_bytes_per_s"], found[key]
    for row in rows("roofline", "intensity"):
        if row["name"].startswith("matmul"):
            rate, top = row["reached_flops"], rates[row["dtype"]]
            yield "2.3.4", row["name"], rate, top
    for row in rows("host_device_copy", "rate_bytes_per_s"):
        if 2 * row["copied_bytes"] > cache and row["memory"] == "pageable":
            yield "2.3.5", "copy", 2 * row["rate_bytes_per_s"], copy
    for row in rows("collective_bandwidth", "took_s"):
        ring = row["name"] == "all-reduce" and row["ranks"] == 2
        if ring and row["place"] in collective_bandwidth.LOCAL:
            top = (found["all_reduce"] or {}).get("bytes_per_s")
            rate = row["algorithm_bytes_per_s"]
            yield "2.4.1", f"all-reduce, {row['place']}", rate, top


def beaten(entries):
    """Name the rows of a machine that beat its recorded ceilings."""
    entry = entries.get(f"{PACKAGE.name}.roofline")
    if not entry or entry["device"] != "cpu":
        return []
    return [
        f"{section} {what}: {rate:.4g}, ceiling {top:.4g}"
        for section, what, rate, top in seen(entries, entry["ceilings"])
        if rate and top and rate > NOISE * top
    ]


@pytest.mark.parametrize("record", sorted(PACKAGE.glob("results/*.json")))
def test_no_recorded_row_beats_its_machines_ceiling(record):
    """Record 2.3.4 again: the machine's file has the better rate by then."""
    assert beaten(json.loads(record.read_text(encoding="utf-8"))) == []


def test_a_row_above_its_ceiling_is_seen():
    found = found_ceilings() | {"threads": 2, "disk_read_bytes_per_s": 1e9}
    found["all_reduce"] = {"latency_s": 1e-4, "bytes_per_s": 1e9}

    def rows(share):
        ring = {"name": "all-reduce", "place": "one host", "ranks": 2}
        memory = {"threads": 2, "array_bytes": 2**20}
        cold = {"name": "one file", "cache": "dropped", "total_bytes": 9}
        copy = {"copied_bytes": 2**20, "memory": "pageable"}
        product = {"name": "matmul 64", "dtype": "float32", "intensity": 1}
        return {
            "cpu_throughput": {"name": "float32", "2_flops": share * 1e11},
            "memory_hierarchy": memory
            | {"copy_bytes_per_s": share * 1e10, "triad_bytes_per_s": 1.0},
            "disk_throughput": cold
            | {"storage_bytes": 9, "read_bytes_per_s": share * 1e9},
            "roofline": product | {"reached_flops": share * 1e11},
            "host_device_copy": copy | {"rate_bytes_per_s": share * 5e9},
            "collective_bandwidth": ring
            | {"took_s": 1.0, "algorithm_bytes_per_s": share * 1e9},
        }

    def entries(share):
        made = {
            f"{PACKAGE.name}.{name}": {"argv": [], "rows": [row]}
            for name, row in rows(share).items()
        }
        more = {"device": "cpu", "ceilings": found}
        made[f"{PACKAGE.name}.roofline"] |= more
        return made

    assert beaten(entries(1.1)) == []
    sections = [line.split()[0] for line in beaten(entries(1.2))]
    assert sections == ["2.1.2", "2.1.1", "2.2", "2.3.4", "2.3.5", "2.4.1"]


# --- operators --------------------------------------------------------------


def found_ceilings():
    return {
        "gemm_flops": {"float32": 1e11, "bfloat16": 4e11, "float16": None},
        "copy_bytes_per_s": 1e10,
        "triad_bytes_per_s": 2e10,
        "buffer_bytes": 2**16,
        "cache_bytes": 2**17,
    }


def placed(found):
    return roofline.placed(roofline.timed(found, CPU, smoke=True), found)


def test_operators_are_placed(monkeypatch):
    monkeypatch.setattr(ceilings, "shortest", lambda *_: 1e-6)
    rows = placed(found_ceilings())
    names = [(row["name"], row["dtype"]) for row in rows]
    assert ("matmul 32", "float32") in names
    assert ("matmul 32", "bfloat16") in names
    assert {"add", "softmax", "layer_norm", "attention"} <= {
        name for name, _ in names
    }
    add = next(row for row in rows if row["name"] == "add")
    assert add["flops"] == 2**14 and add["moved_bytes"] == 3 * 2**16
    assert add["limit"] == "memory"
    assert add["roof_flops"] == pytest.approx(2e10 / 12)
    assert add["percent"] == pytest.approx(100 * (2**14 / 1e-6) / (2e10 / 12))
    product = next(row for row in rows if row["dtype"] == "bfloat16")
    assert product["intensity"] == pytest.approx(2 * 32**3 / (2 * 3 * 32**2))


def test_what_a_cache_holds_is_not_limited_by_memory():
    """48 KiB of a product of n = 64; the same shape beyond the caches."""
    found = found_ceilings() | {"cache_bytes": 2**20}
    flops, moved = roofline.matmul_work(64, 64, 64, 4)
    few = flops // 100  # per byte so few that the slope is above it
    rows = [
        operator("small", few, moved),
        operator("large", few * 2**10, moved * 2**10),
        operator("dense", flops * 10, moved),
    ]
    small, large, dense = roofline.placed(rows, found)
    assert small["limit"] == "cache or call"
    assert small["roof_flops"] is small["percent"] is None
    assert large["limit"] == "memory" and large["percent"] > 0
    assert dense["limit"] == "arithmetic" and dense["roof_flops"] == 1e11


def test_what_stays_below_its_roof_is_named_with_a_reason():
    shares = {
        "matmul 64": None,  # no roof is known
        "matmul 256": 64.2,
        "matmul 1024": 100.0,
        "add": 79.0,
        "softmax": 56.4,
        "layer_norm": 81.0,
        "attention": 73.6,
    }
    rows = [
        {"name": name, "dtype": "float32", "percent": share}
        for name, share in shares.items()
    ]
    lines = list(roofline.below(rows))
    starts = [line.removeprefix("below 80% of the roof: ") for line in lines]
    assert [line.split(":")[0] for line in starts] == [
        "matmul 256 (float32) 64%",
        "add (float32) 79%",
        "softmax (float32) 56%",
        "attention (float32) 74%",
    ]
    assert "no reason is known" in lines[1]
    assert "exponential" in lines[2]


def test_the_picture_of_an_operator_without_a_roof():
    found = found_ceilings()
    rows = roofline.placed([operator("softmax", 1e3, 1e4)], found)
    assert rows[0]["percent"] is None
    drawn = roofline.figure([*rows, {"ceilings": found}])
    assert len(drawn.axes[0].texts) == 1


def test_imitated_dtypes_are_not_placed(monkeypatch):
    monkeypatch.setattr(ceilings, "shortest", lambda *_: 1e-6)
    found = found_ceilings()
    found["gemm_flops"] = {"float32": 1e11, "bfloat16": 1e9}
    assert {row["dtype"] for row in placed(found)} == {"float32"}


def operator(name, flops, moved, dtype="float32", taken_s=1.0):
    return {
        "name": name,
        "dtype": dtype,
        "flops": flops,
        "moved_bytes": moved,
        "intensity": flops / moved,
        "taken_s": taken_s,
        "reached_flops": flops / taken_s,
    }


def test_no_operator_stays_above_the_roof_it_shows_to_be_too_low():
    found = found_ceilings()
    rows = [
        operator("matmul 1024", 2e11, 1e8),
        operator("matmul 256", 1e11, 1e8, "bfloat16"),  # no more than known
        operator("add", 3e9, 3.6e10),
        operator("softmax", 1e9, 1.5e10),
        operator("layer_norm", 1e9, 1.2e10),
        operator("attention", 9e11, 1e7),
        operator("softmax", 1e3, 1e5, taken_s=1e-9),  # a cache holds it
    ]
    higher, words = roofline.raised(found, rows)
    assert higher["gemm_flops"]["float32"] == 2e11
    assert higher["gemm_flops"]["bfloat16"] == 4e11
    assert higher["triad_bytes_per_s"] == 3.6e10
    assert higher["copy_bytes_per_s"] == 1.5e10
    assert words == [
        "float32 to 200 GFLOP/s (matmul 1024)",
        "triad to 36 GB/s (add)",
        "copy to 15 GB/s (softmax)",
    ]
    assert found == found_ceilings()  # the caller's are left alone
    shown = {r["name"]: r["percent"] for r in roofline.placed(rows, higher)}
    assert shown["matmul 1024"] == shown["add"] == pytest.approx(100)
    assert roofline.raised(higher, rows) == (higher, [])


def test_raised_ceilings_are_kept(cache, instruments, monkeypatch, capsys):
    monkeypatch.setattr(ceilings, "shortest", lambda *_: 1e-9)
    monkeypatch.setattr(
        roofline,
        "operators",
        lambda *_: [("matmul 9", "float32", None, (1e4, 100))],
    )
    roofline.main(["--device", "cpu"])
    shown = capsys.readouterr().out
    assert "ceilings raised to what operators reached in this run" in shown
    assert "10 TFLOP/s" in shown
    assert machine.peaks("cpu")["gemm_flops"]["float32"] == 1e13


def test_results_of_pieces_take_turns_in_memory():
    """As many results are kept as pieces: none is new memory for long."""
    ops = roofline.operators(CPU, ["float32"], 2**21, smoke=False)
    call = next(call for name, _, call, _ in ops if name == "layer_norm")
    first = list(call())
    kept = call()
    assert len(kept) == len(first) == 2
    assert all(part.nbytes == 2**22 for part in kept)
    places = {part.data_ptr() for part in first}
    assert not places & {part.data_ptr() for part in kept}  # ``first`` lives
    x, weights = torch.randn(7, 5), (torch.randn(5), torch.randn(5))
    kept = roofline.normed(x.split(3), weights, collections.deque(maxlen=3))
    right = F.layer_norm(x, (5,), *weights)
    assert torch.equal(torch.cat(list(kept)), right)


def test_what_runs_is_what_was_counted():
    """Each operator's tensors are as large as its formula says."""
    ops = roofline.operators(CPU, ["float32"], 2**12, smoke=True)
    for name, _, call, (_, moved) in ops:
        if name.startswith("matmul"):
            n = int(name.split()[1])
            assert call().shape == (n, n)
        elif name in ("add", "softmax"):
            assert call().numel() == 2**12, name
        elif name == "layer_norm":
            assert sum(part.numel() for part in call()) == 2**12
        else:
            assert 4 * call().nbytes == moved


def test_smoke(cache, capsys):
    rows = roofline.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert "left out: a GPU's ceilings" in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert not list(cache.glob("peaks-*"))
    drawn = roofline.figure(rows)
    ops = [row for row in rows if "intensity" in row]
    assert len(drawn.axes[0].texts) == len(ops) > 4


@pytest.mark.parametrize("function", roofline.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    assert foreign(function) is None
    alone = pasted(function)
    arguments = {
        "roof": (1, 10, 2),
        "matmul_work": (1, 2, 3, 4),
        "add_work": (1, 4),
        "softmax_work": (1, 2, 4),
        "layer_norm_work": (1, 2, 4),
        "attention_work": (1, 1, 2, 2, 4),
    }[function.__name__]
    assert alone(*arguments) == function(*arguments)


@pytest.mark.gpu
def test_ceilings_of_a_gpu(cache):
    rows = roofline.main(["--smoke", "--device", "cuda"])
    found = next(row["ceilings"] for row in rows if "ceilings" in row)
    assert found["host_to_device_bytes_per_s"] > 0
    assert found["gemm_flops"]["tf32"] > 0
    roofline.figure(rows)
