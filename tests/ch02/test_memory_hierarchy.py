"""Memory: the chain leads through every line, the bytes are those moved."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from test_techniques import foreign
from torch.utils._python_dispatch import TorchDispatchMode

from ch02_hardware import chain, memory_hierarchy
from ch02_hardware.memory_hierarchy import caches, levels, one_cycle
from common import bench, ceilings

WORDS = 8  # of 8 bytes, in a line of 64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def visited(cycle, words=WORDS):
    """Follow a chain from its start until it comes back; count the lines."""
    at, seen = 0, set()
    while at not in seen:
        assert at % words == 0
        seen.add(at)
        at = int(cycle[at])
    return len(seen) if at == 0 else 0


def sattolo(lines, generator):
    """Draw a cycle the slow way: swap each with an earlier one, not itself."""
    order = list(range(lines))
    for i in range(lines - 1, 0, -1):
        j = int(torch.randint(i, (1,), generator=generator))
        order[i], order[j] = order[j], order[i]
    return order


# --- the chain --------------------------------------------------------------


@pytest.mark.parametrize("lines", [2, 3, 64, 1000])
def test_the_chain_visits_every_line_once(lines):
    for seed in range(5):
        cycle = one_cycle(lines, WORDS, seeded(seed))
        assert cycle.shape == (lines * WORDS,) and cycle.dtype == torch.int64
        assert visited(cycle) == lines
        assert int((cycle != 0).sum()) == lines - 1  # one leads to line 0


def test_a_random_permutation_is_caught():
    """What people write: next = randperm, which falls into short cycles."""
    lines, short = 512, 0
    for seed in range(20):
        chain_ = torch.zeros(lines, WORDS, dtype=torch.int64)
        chain_[:, 0] = torch.randperm(lines, generator=seeded(seed)) * WORDS
        short += visited(chain_.view(-1)) < lines
    assert short >= 18


def test_all_cycles_are_as_likely_as_by_sattolo():
    """Of four lines there are six cycles; each comes as often as the next."""

    def counts(draw):
        found = {}
        for seed in range(600):
            key = tuple(draw(seeded(seed)))
            found[key] = found.get(key, 0) + 1
        return found

    ours = counts(lambda g: (one_cycle(4, 8, g)[::8] // 8).tolist())
    theirs = counts(lambda g: sattolo(4, g))
    assert set(ours) == set(theirs) and len(ours) == 6
    assert min(ours.values()) > 60


@pytest.fixture(scope="module")
def follow():
    try:
        return chain.follow()
    except bench.Refusal as refusal:
        pytest.skip(str(refusal))


def test_the_loop_in_c_takes_the_same_way(follow):
    lines = 200
    cycle = one_cycle(lines, WORDS, seeded())
    at, places = 0, set()
    for steps in range(1, lines + 1):
        at = int(cycle[at])
        assert follow(cycle.data_ptr(), 0, steps) == at
        places.add(at)
    assert at == 0 and len(places) == lines
    assert follow(cycle.data_ptr(), 0, 7 * lines) == 0
    assert follow(cycle.data_ptr(), 8, 0) == 8


def test_samples_go_on_where_the_last_one_stopped(monkeypatch):
    """From the start again, the caches would hold what memory should."""
    calls, now = [], [0.0]

    def walk(address, at, steps):
        calls.append((at, steps))
        now[0] += 1e-3
        return at + steps

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(memory_hierarchy, "time", clock)
    found = memory_hierarchy.access_s(2**20, 64, walk, budget_s=0.01)
    assert found == pytest.approx(1e-3 / 2**10)
    assert calls[0] == (0, 2**14)  # once around, to fill the caches
    assert len(calls) > 2
    ends = [at + steps for at, steps in calls]
    assert [at for at, _ in calls[1:]] == ends[:-1]


@pytest.mark.parametrize("access_s", [2e-9, 1e-7])
def test_an_access_is_timed_as_long_as_it_takes(monkeypatch, access_s):
    """A clock that only the walk moves on: so many seconds a step."""
    now = [0.0]

    def walk(address, at, steps):
        now[0] += steps * access_s
        return at

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(memory_hierarchy, "time", clock)
    found = memory_hierarchy.access_s(2**16, 64, walk, budget_s=0.01)
    assert found == pytest.approx(access_s)


# --- building ---------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    chain.follow.cache_clear()
    yield tmp_path
    chain.follow.cache_clear()


def test_without_a_compiler_gathers_say_so(cache, monkeypatch, capsys):
    monkeypatch.setenv("CC", "/nonexistent")
    with pytest.raises(bench.Refusal, match="no C compiler"):
        chain.follow()
    rows = memory_hierarchy.main(["--smoke"])
    assert {r["how"] for r in rows if "how" in r} == {"independent gathers"}
    assert (
        "no C compiler (/nonexistent) on the PATH" in capsys.readouterr().out
    )
    label = memory_hierarchy.figure(rows).axes[0].get_ylabel()
    assert "independent gathers" in label


def test_a_compiler_that_fails_is_one_sentence(cache, monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(3)'")
    with pytest.raises(bench.Refusal, match="cannot build"):
        chain.follow()
    assert not list(cache.glob("ops/chain-*"))


def test_builds_once_and_whole(cache, follow, monkeypatch):
    chain.follow()
    (library,) = cache.glob("ops/chain-*")
    before = library.stat().st_mtime_ns
    chain.follow.cache_clear()
    monkeypatch.setattr(chain, "built", None)  # not called again
    assert chain.follow()(0, 5, 0) == 5
    assert library.stat().st_mtime_ns == before


def test_two_processes_build_at_once(cache, follow):
    code = "from ch02_hardware import chain; print(chain.follow()(0, 3, 0))"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env=os.environ | {"BENCH_CACHE": str(cache)},
        )
        for _ in range(2)
    ]
    assert [run.communicate()[0].strip() for run in runs] == [b"3"] * 2
    assert len(list(cache.glob("ops/*"))) == 1  # and no folder left


def test_a_cache_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "file"))
    chain.follow.cache_clear()
    try:
        assert chain.follow()(0, 9, 0) == 9
    except bench.Refusal as refusal:
        pytest.skip(str(refusal))
    finally:
        chain.follow.cache_clear()


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_folder_that_others_can_write_to_is_passed_over(cache, follow):
    (cache / "ops").mkdir()
    (cache / "ops").chmod(0o777)
    assert chain.follow()(0, 9, 0) == 9
    assert not list((cache / "ops").iterdir())


# --- bytes ------------------------------------------------------------------


class Moved(TorchDispatchMode):
    """Add up the bytes that operators read and write."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = [a for a in args if isinstance(a, torch.Tensor)]
        if func.overloadpacket is torch.ops.aten.copy_:
            read = read[1:]  # the first is overwritten
        written = [result] if isinstance(result, torch.Tensor) else []
        self.bytes += sum(t.nbytes for t in read + written)
        return result

    def __init__(self):
        super().__init__()
        self.bytes = 0


def test_bytes_are_counted_as_they_move():
    n = 1000
    a, b, c = (torch.ones(n) for _ in "abc")
    calls = {
        "read": lambda: memory_hierarchy.summed(b),
        "copy": lambda: memory_hierarchy.copied(a, b),
        "triad": lambda: memory_hierarchy.triad(a, b, c),
    }
    assert calls.keys() == memory_hierarchy.ARRAYS.keys()
    for name, call in calls.items():
        with Moved() as moved:
            call()
        right = memory_hierarchy.ARRAYS[name] * 4 * n
        assert right <= moved.bytes <= right + 4, name  # a sum is 4 bytes


def test_rates_are_bytes_by_seconds(monkeypatch):
    threads = []

    def shortest(call, device, budget_s):
        threads.append(torch.get_num_threads())
        return 1e-3 if len(threads) % 9 in (7, 8, 0) else 2e-3  # third look

    monkeypatch.setattr(ceilings, "shortest", shortest)
    before = torch.get_num_threads()
    rows = memory_hierarchy.bandwidth_rows([1, 2], 4000, 0.0)
    assert torch.get_num_threads() == before
    assert threads == [1] * 9 + [2] * 9  # read, copy, triad: three looks
    assert [row["threads"] for row in rows] == [1, 2]
    for row in rows:
        assert row["read_bytes_per_s"] == 4e6
        assert row["copy_bytes_per_s"] == 8e6
        assert row["triad_bytes_per_s"] == pytest.approx(12e6)
        assert row["copy_least_bytes_per_s"] == 4e6


def test_bandwidth_by_working_set_counts_what_is_in_it(monkeypatch):
    """A copy of a working set of n bytes reads half of it, writes half."""
    held = []

    def shortest(call, device, budget_s):
        assert torch.get_num_threads() == 1
        arrays = [*call.args]
        held.append(sum(a.untyped_storage().nbytes() for a in arrays[-1:]))
        assert sum(a.nbytes for a in arrays) == held[-1]
        return 1e-3

    monkeypatch.setattr(ceilings, "shortest", shortest)
    before = torch.get_num_threads()
    rows = memory_hierarchy.set_rows([2**12, 2**20], 0.0)
    assert torch.get_num_threads() == before
    assert held == [2**12, 2**12, 2**20, 2**20]
    for row in rows:
        rate = row["set_bytes"] / 1e-3
        assert row["read_bytes_per_s"] == row["copy_bytes_per_s"] == rate


def test_memory_raises_the_machines_ceilings(monkeypatch, capsys):
    kept, threads = [], memory_hierarchy.thread_counts(1)

    def rates(counts, size, budget_s):
        row = {f"{k}_bytes_per_s": 2e10 for k in memory_hierarchy.ARRAYS}
        return [row | {"threads": n, "array_bytes": size} for n in counts]

    def keep(*seen):
        kept.append(seen)

    monkeypatch.setattr(memory_hierarchy, "access_s", lambda *_: 1e-9)
    monkeypatch.setattr(memory_hierarchy, "working_sets", lambda *_: [2**12])
    monkeypatch.setattr(memory_hierarchy, "set_rows", lambda *_: [])
    monkeypatch.setattr(memory_hierarchy, "bandwidth_rows", rates)
    monkeypatch.setattr(memory_hierarchy.machine, "cores", lambda: 1)
    monkeypatch.setattr(memory_hierarchy.machine, "keep_peaks", keep)
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 2**20)
    memory_hierarchy.main([])
    pair = {"copy_bytes_per_s": 2e10, "triad_bytes_per_s": 2e10}
    assert kept == [(pair, "cpu", threads[-1])]
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 2**50)
    memory_hierarchy.main([])  # no array is larger than these
    memory_hierarchy.main(["--smoke"])
    assert len(kept) == 1


def test_thread_counts_end_with_the_machine():
    assert memory_hierarchy.thread_counts(1) == [1]
    assert memory_hierarchy.thread_counts(2) == [1, 2]
    assert memory_hierarchy.thread_counts(6) == [1, 2, 4, 6]
    assert memory_hierarchy.thread_counts(8) == [1, 2, 4, 8]


# --- what the machine reports -----------------------------------------------


def plant(folder, entries):
    for i, (level, kind, size) in enumerate(entries):
        index = folder / f"index{i}"
        index.mkdir(parents=True)
        for name, value in zip(
            ("level", "type", "size"), (level, kind, size), strict=True
        ):
            (index / name).write_text(f"{value}\n")


@pytest.fixture
def linux(monkeypatch):
    monkeypatch.setattr(memory_hierarchy.platform, "system", lambda: "Linux")


def test_caches_as_linux_tells_them(linux, tmp_path):
    plant(
        tmp_path / "cache",
        [
            (1, "Data", "48K"),
            (1, "Instruction", "32K"),
            (2, "Unified", "2048K"),
            (3, "Unified", "300M"),
        ],
    )
    found = caches(tmp_path / "cache", tmp_path / "cpuinfo")
    assert found == {"L1": 48 * 2**10, "L2": 2**21, "L3": 300 * 2**20}
    line = tmp_path / "cache" / "index0" / "coherency_line_size"
    line.write_text("128\n")
    assert memory_hierarchy.line_bytes(tmp_path / "cache") == 128


def test_caches_of_a_container_without_sysfs(linux, tmp_path):
    assert caches(tmp_path, tmp_path / "cpuinfo") == {}
    assert memory_hierarchy.line_bytes(tmp_path) == 64
    (tmp_path / "cpuinfo").write_text("a\t: b\ncache size\t: 512 KB\n")
    assert caches(tmp_path, tmp_path / "cpuinfo") == {"last cache": 2**19}


def test_caches_as_macos_tells_them(monkeypatch, tmp_path):
    told = {
        "hw.l1dcachesize": "65536",
        "hw.perflevel0.l1dcachesize": "131072",
        "hw.perflevel0.l2cachesize": "16777216",
        "hw.l3cachesize": "0",
        "hw.cachelinesize": "128",
    }
    monkeypatch.setattr(memory_hierarchy.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(memory_hierarchy, "said", lambda p: told.get(p, ""))
    assert caches(tmp_path, "x") == {"L1": 2**17, "L2": 2**24}
    assert memory_hierarchy.line_bytes() == 128


def test_working_sets_reach_beyond_the_last_cache():
    found = {"L1": 2**15, "L2": 2**20, "L3": 2**25}
    sets = memory_hierarchy.working_sets(found, room=2**40)
    assert sets[0] == 2**12 and sets[-1] == 2**27
    assert memory_hierarchy.working_sets(found, room=2**24)[-1] == 2**24
    big = memory_hierarchy.working_sets({"L3": 2**30}, room=2**40)
    assert big[-1] == 2**30  # and no further, in the time there is


def test_a_level_is_read_well_inside_it():
    found = {"L1": 48 * 2**10, "L2": 2**21}
    points = {2**k: float(k) for k in range(12, 25)}
    rows = {row["name"]: row for row in levels(found, points)}
    assert rows["L1"]["access_s"] == 13.5  # 4 to 32 KiB
    assert rows["L2"]["access_s"] == 18.5  # 128 KiB to 1 MiB
    assert rows["memory"]["access_s"] == 23.0  # 4 to 16 MiB
    assert rows["memory"]["size_bytes"] is None
    assert (rows["L2"]["least_s"], rows["L2"]["most_s"]) == (17.0, 20.0)
    (only,) = levels({}, points)
    assert only["name"] == "memory"
    assert levels({"L1": 2**30}, points)[1]["access_s"] is None


KIB, MIB = 2**10, 2**20
# a virtual machine: no step at the socket's L3, one where its share ends
CURVE = {16 * KIB: 2.0, 32 * KIB: 2.0, 64 * KIB: 6.0, 128 * KIB: 6.1}
CURVE |= {256 * KIB: 6.2, 512 * KIB: 6.3, MIB: 7.0, 2 * MIB: 40.0}
CURVE |= {4 * MIB: 46.0, 8 * MIB: 65.0, 16 * MIB: 158.0, 32 * MIB: 280.0}
CURVE |= {64 * MIB: 300.0, 128 * MIB: 310.0}


def test_steps_are_where_an_access_becomes_slower():
    found = memory_hierarchy.steps(CURVE)
    assert [step[:2] for step in found] == [
        (32 * KIB, 64 * KIB),
        (MIB, 2 * MIB),
        (8 * MIB, 32 * MIB),  # two rises, one after the other
    ]
    assert found[-1][2] == pytest.approx(280 / 65)
    assert memory_hierarchy.steps(dict.fromkeys(CURVE, 1.0)) == []


def test_reported_and_found_steps_are_told_apart():
    told = {"L1": 48 * KIB, "L2": 2 * MIB, "L3": 100 * MIB, "L4": 2**30}
    rows = memory_hierarchy.borders(told, CURVE)
    assert [(row["name"], row["words"]) for row in rows] == [
        ("L1", "as reported"),
        ("L2", "as reported"),
        (None, "seen, not reported"),
        ("L3", "reported, not seen"),
        ("L4", "reported, beyond what was measured"),
    ]
    assert rows[0]["ratio"] == 3.0 and rows[0]["below_bytes"] == 32 * KIB
    assert rows[2]["above_bytes"] == 32 * MIB
    assert "ratio" not in rows[3]
    assert len(memory_hierarchy.borders({}, CURVE)) == 3


def test_the_script_says_what_was_not_reported(monkeypatch, capsys):
    times = iter(CURVE.values())
    monkeypatch.setattr(memory_hierarchy, "access_s", lambda *_: next(times))
    monkeypatch.setattr(
        memory_hierarchy, "working_sets", lambda *_: list(CURVE)
    )
    told = {"L1": 48 * KIB, "L2": 2 * MIB, "L3": 100 * MIB}
    monkeypatch.setattr(memory_hierarchy, "caches", lambda: told)
    rows = memory_hierarchy.main(["--smoke"])
    shown = capsys.readouterr().out
    assert "reported, not seen: a virtual machine" in shown
    assert "seen, not reported: what this machine gets" in shown
    assert "their ordinary stores" in shown
    spans = memory_hierarchy.figure(rows).axes[0].patches
    assert len(spans) == 3


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = memory_hierarchy.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert shown.out.startswith("2.1.1  Memory · 記憶體")
    points = [row for row in rows if "working_bytes" in row]
    assert [row["working_bytes"] for row in points] == [
        2**k for k in range(12, 17)
    ]
    assert all(row["access_s"] > 0 for row in points)
    rates = [row for row in rows if "threads" in row]
    assert rates and all(row["copy_bytes_per_s"] > 0 for row in rates)
    sets = [row["set_bytes"] for row in rows if "set_bytes" in row]
    assert sets == [row["working_bytes"] for row in points]
    left, middle, right = memory_hierarchy.figure(rows).axes
    assert len(left.lines[0].get_xdata()) == 5
    read, copy, *_ = middle.lines
    assert list(read.get_xdata()) == list(copy.get_xdata()) == sets
    assert len(right.lines) == 3


def test_the_figure_marks_what_the_machine_reports():
    points = [
        {"working_bytes": 2**k, "access_s": 1e-9 * k, "how": "dependent loads"}
        for k in range(12, 20)
    ]
    reported = [
        {"name": "L1", "size_bytes": 2**15, "access_s": 1e-9},
        {"name": "L2", "size_bytes": 2**18, "access_s": 1e-9},
        {"name": "L3", "size_bytes": 2**30, "access_s": None},  # not reached
        {"name": "memory", "size_bytes": None, "access_s": None},
    ]
    drawn = memory_hierarchy.figure(points + reported)
    axes = drawn.axes[0]
    marks = [line.get_xdata()[0] for line in axes.lines[1:]]
    assert marks == [2**15, 2**18]
    assert [t.get_text().strip() for t in axes.texts] == [
        "L1 32 KiB",
        "L2 256 KiB",
    ]


@pytest.mark.parametrize("function", memory_hierarchy.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    assert foreign(function) is None
    alone = pasted(function)
    a, b, c = (torch.full((4,), float(i)) for i in range(3))
    if function is one_cycle:
        assert visited(alone(16, WORDS)) == 16
    elif function is memory_hierarchy.gathered:
        assert alone(torch.arange(9), torch.tensor([8, 1])).tolist() == [8, 1]
    elif function is memory_hierarchy.summed:
        assert float(alone(b)) == 4.0
    elif function is memory_hierarchy.copied:
        assert alone(a, b).tolist() == [1.0] * 4
    else:
        assert alone(a, b, c).tolist() == [5.0] * 4


def test_the_c_source_is_where_it_is_looked_for():
    assert chain.SOURCE.exists() and Path(chain.SOURCE).suffix == ".c"
