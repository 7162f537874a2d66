"""2.2: every byte of the file is read, once, and nothing is left behind."""

import builtins
import errno
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from ch02_hardware import disk_throughput, key_figures
from ch02_hardware.disk_throughput import (
    checksum,
    drop_from_cache,
    make_files,
    mapped_blocks,
    read_blocks,
    read_files,
    ways_of,
)
from common import bench

TOTAL, BLOCK = 2**16, 2**12


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path, TOTAL, BLOCK)


def test_every_way_reads_the_file_as_it_was_written(files):
    one, many, truth = files
    assert truth[0] == TOTAL == one.stat().st_size
    assert sum(path.stat().st_size for path in many) == TOTAL
    for name, blocks in ways_of(one, many, TOTAL, BLOCK).items():
        assert checksum(blocks()) == truth, name


def test_at_random_is_another_order_of_the_same_blocks(files):
    one, many, _ = files
    ways = ways_of(one, many, TOTAL, BLOCK)
    ordered = list(ways["one file, in order, read"]())
    for name, blocks in ways.items():
        found = list(blocks())
        assert sorted(found) == sorted(ordered), name
        assert (found == ordered) == ("in order" in name), name


class Closed:
    """An open file without ``read``: only its number can be had."""

    def __init__(self, path, *_, **__):
        self.number = os.open(path, os.O_RDONLY)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.number)

    def fileno(self):
        return self.number


def test_a_mapped_file_is_not_read(files, monkeypatch):
    one, many, truth = files
    monkeypatch.setattr(builtins, "open", Closed)
    for name, blocks in ways_of(one, many, TOTAL, BLOCK).items():
        if name.endswith("mmap"):
            assert checksum(blocks()) == truth, name
        else:
            with pytest.raises(AttributeError):
                checksum(blocks())


def test_the_cache_is_dropped_before_each_reading(files, monkeypatch):
    one, many, truth = files
    events = []

    def dropped(paths):
        assert paths == [one]
        events.append("dropped")
        return True

    def timed(blocks):
        events.append("read")
        return 1.0, 0

    monkeypatch.setattr(disk_throughput, "drop_from_cache", dropped)
    monkeypatch.setattr(disk_throughput, "timed", timed)
    ways = ways_of(one, many, TOTAL, BLOCK)
    args = types.SimpleNamespace(smoke=False)
    rows = disk_throughput.measure(args, ways, [one], truth)
    assert len(rows) == 2 * len(ways)
    cold = ["dropped"]  # once, to ask whether it can be
    cold += ["dropped", "read"] * 5 * len(ways)
    assert events == cold + ["read"] * 5 * len(ways)


def test_ways_take_turns_and_keep_what_varies(files, monkeypatch):
    one, many, truth = files
    ways = ways_of(one, many, TOTAL, BLOCK)
    calls = []

    def timed(blocks):
        calls.append(blocks)
        return float(len(calls)), 0

    monkeypatch.setattr(disk_throughput, "timed", timed)
    monkeypatch.setattr(disk_throughput, "drop_from_cache", lambda _: False)
    args = types.SimpleNamespace(smoke=False)
    row, *_ = disk_throughput.measure(args, ways, [one], truth)
    assert calls == list(ways.values()) * 5
    assert (row["least_s"], row["took_s"], row["most_s"]) == (1, 13, 25)
    assert row["read_bytes_per_s"] == TOTAL / 13


def test_a_reversal_within_the_noise_is_called_noise():
    names = list(ways_of("one", ["many"] * 4, 4, 1))
    order, other = ((2.0, 3.0), (4.0, 5.0))

    def rows(**ranges):
        found = []
        for name in names:
            kind = name.split(", ")[0].split()[0]  # one or many
            least, most = ranges[kind]["at random" in name]
            row = {"name": name, "cache": "dropped"}
            found.append(row | {"least_s": least, "most_s": most})
        return found

    words = disk_throughput.not_by_order
    assert not list(words(rows(one=(order, other), many=(order, other))))
    (line,) = words(rows(one=(order, other), many=(other, order)))
    assert line.startswith("many files, in order, read") and "SLOWER" in line
    near = (2.5, 4.0)
    lines = list(words(rows(one=(order, near), many=(near, order))))
    assert len(lines) == 3
    assert all("beyond the noise" in line for line in lines)


def test_a_row_changes_one_thing():
    names = list(ways_of("one", ["many"] * 4, 4, 1))
    parts = [name.split(", ") for name in names]
    for before, after in zip(parts, parts[1:], strict=False):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        # a block is read twice, another never: as many bytes
        lambda one: read_blocks(
            one, [0, *range(0, TOTAL - BLOCK, BLOCK)], BLOCK
        ),
        # the last block is forgotten
        lambda one: read_blocks(one, range(0, TOTAL - BLOCK, BLOCK), BLOCK),
        # the file is mapped and sliced at the wrong place
        lambda one: mapped_blocks(one, range(1, TOTAL, BLOCK), BLOCK),
    ],
)
def test_the_checksum_sees_wrong_reading(files, wrong):
    one, _, truth = files
    assert checksum(wrong(one)) != truth


def test_wrong_reading_stops_the_script(monkeypatch, tmp_path):
    monkeypatch.setattr(
        disk_throughput, "read_files", lambda paths: read_files(paths[1:])
    )
    with pytest.raises(AssertionError, match="many files.*not the bytes"):
        disk_throughput.main(["--smoke", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_smoke(tmp_path, capsys):
    rows = disk_throughput.main(["--smoke", "--folder", str(tmp_path)])
    caches = {"dropped", "warm"} if hasattr(os, "posix_fadvise") else {"warm"}
    assert {row["cache"] for row in rows} == caches
    assert len(rows) == 6 * len(caches)
    assert {row["total_bytes"] for row in rows} == {2**20}
    assert not list(tmp_path.iterdir())
    assert "count and checksum" in capsys.readouterr().out
    assert disk_throughput.figure(rows).axes


def test_a_system_that_cannot_drop_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert drop_from_cache([]) is False
    rows = disk_throughput.main(["--smoke", "--folder", str(tmp_path)])
    assert {row["cache"] for row in rows} == {"warm"}
    assert "page cache dropped: left out" in capsys.readouterr().out
    assert disk_throughput.figure(rows).axes


def test_a_cache_that_did_not_forget_is_named():
    row = {"cache": "dropped", "total_bytes": 100}
    words = disk_throughput.not_dropped
    assert words([row | {"storage_bytes": 100}]) is None
    assert "tmpfs" in words([row | {"storage_bytes": 0}])
    assert "nobody here counts" in words([row | {"storage_bytes": None}])


@pytest.mark.skipif(
    disk_throughput.from_storage() is None, reason="needs /proc/self/io"
)
def test_storage_is_asked_when_the_cache_was_dropped(files, tmp_path):
    if key_figures.in_memory(tmp_path):
        pytest.skip("the temporary folder is memory")
    one, _, _ = files

    def read():
        return read_blocks(one, range(0, TOTAL, BLOCK), BLOCK)

    assert drop_from_cache([one])
    _, cold = disk_throughput.timed(read)
    assert cold >= TOTAL
    assert disk_throughput.timed(read)[1] == 0


def test_the_disks_ceiling_is_raised_by_what_came_from_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))
    row = {"cache": "dropped", "total_bytes": 8, "storage_bytes": 8}
    rows = [row | {"least_s": least_s} for least_s in (4.0, 2.0)]
    rows.append(row | {"least_s": 1.0, "storage_bytes": 7})
    rows.append(row | {"least_s": 1.0, "storage_bytes": None})
    rows.append(row | {"least_s": 1.0, "cache": "warm"})
    found = disk_throughput.seen(rows, tmp_path)
    assert found == {"disk_read_bytes_per_s": 4.0}
    assert disk_throughput.seen(rows[2:], tmp_path) == {}
    if os.path.ismount("/proc"):
        assert disk_throughput.seen(rows, Path("/proc")) == {}


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(path, blocks):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_throughput, "written", full)
    with pytest.raises(bench.Refusal, match="too little space.*--folder"):
        disk_throughput.main(["--smoke", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_seen_beforehand(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(
        disk_throughput.shutil, "disk_usage", lambda folder: usage
    )
    with pytest.raises(bench.Refusal, match="2 MiB are needed"):
        disk_throughput.main(["--smoke", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_a_sentence():
    with pytest.raises(bench.Refusal, match="--folder nowhere"):
        disk_throughput.main(["--smoke", "--folder", "nowhere"])


def test_a_folder_that_takes_no_files_is_a_sentence(tmp_path, monkeypatch):
    """As /proc does: it is a folder, and nothing can be made in it."""

    def none(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(disk_throughput.tempfile, "TemporaryDirectory", none)
    with pytest.raises(bench.Refusal, match="no files can be made in .*disk"):
        disk_throughput.main(["--smoke", "--folder", str(tmp_path)])


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number, tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-m", "ch02_hardware.disk_throughput"]
        + ["--device", "cpu", "--folder", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"BENCH_SMOKE": "0"},
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob("*/one")) and time.monotonic() < end:
        time.sleep(0.02)
    assert list(tmp_path.iterdir())
    job.send_signal(number)
    errors = job.communicate(timeout=120)[1]
    assert job.returncode == 128 + number, errors
    assert b"Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_techniques_work_when_pasted(pasted, files):
    one, many, truth = files
    starts = range(0, TOTAL, BLOCK)
    assert checksum(pasted(read_blocks)(one, starts, BLOCK)) == truth
    assert checksum(pasted(mapped_blocks)(one, starts, BLOCK)) == truth
    assert checksum(pasted(read_files)(many)) == truth
    dropped = pasted(drop_from_cache)([one])
    assert dropped == hasattr(os, "posix_fadvise")
