"""2.4.3: every sample is read exactly once, whoever reads it."""

import argparse
import os
import shutil
import subprocess
import sys

import pytest

from ch02_hardware import sharded_reads
from ch02_hardware.sharded_reads import (
    Reader,
    combined,
    deals,
    dealt,
    misdealt,
    readings,
    stored,
    ways_of,
)
from common import bench

WORLDS = [1, 2, 3, 4, 7]


def private_network():
    """Return a prefix that runs a command where only loopback exists."""
    probe = ["unshare", "--map-root-user", "--net"]
    if shutil.which(probe[0]) is None or subprocess.call([*probe, "true"]):
        return []
    return [*probe, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.fixture
def data(tmp_path):
    args = argparse.Namespace(smoke=True, folder=tmp_path)
    with stored(args, 6) as found:
        yield found


def read_by(data, world, change=lambda name, rank: rank):
    """Return what the ranks of a job would gather, read by one process."""
    found = {}
    for rank in range(world):
        for name in ways_of(data, rank, world):
            as_rank = change(name, rank)
            read = Reader()
            samples = list(ways_of(data, as_rank, world)[name](read))
            read.close()
            part = {
                "ids": [int.from_bytes(s[:8], "little") for s in samples],
                "checksum": sum(map(sharded_reads.zlib.crc32, samples)),
                "asked_bytes": read.asked,
                "requests": read.requests,
                "storage_bytes": None,
                "took_s": 1.0,
            }
            found.setdefault(name, []).append(part)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_is_read_once(data, world):
    rows = combined(read_by(data, world), data)
    total = data["count"] * data["size"]
    assert len(rows) == 4
    for row in rows:
        every = row["name"] == "every rank reads all"
        assert row["asked_bytes"] == (world * total if every else total)
        assert (row["once"], row["more_often"], row["never"]) == (257, 0, 0)
    # 1 MiB a request holds all 257 samples; a shard is one; a card is one
    requests = [row["requests"] for row in rows]
    assert requests == [world, world, len(data["shards"]), data["count"]]


@pytest.mark.parametrize(
    "wrong",
    ["slices of one file", "shards of its own", "one file, dealt at random"],
)
def test_a_rank_that_forgets_its_number_is_caught(data, wrong):
    def forgets(name, rank):
        return 0 if name == wrong else rank

    with pytest.raises(AssertionError, match=f"{wrong}.*more than once"):
        combined(read_by(data, 2, forgets), data)


def test_broken_samples_are_caught(data):
    with open(data["one"], "r+b") as file:
        file.seek(100)
        file.write(b"\0" * 8)
    with pytest.raises(AssertionError, match="not what was written"):
        combined(read_by(data, 2), data)


@pytest.mark.parametrize("world", WORLDS)
def test_dealing_gives_each_sample_to_one_rank(world):
    parts = [dealt(257, 5, 3, rank, world) for rank in range(world)]
    assert sorted(sum(parts, [])) == list(range(257))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_differ_and_can_be_repeated():
    assert dealt(257, 0, 0, 1, 2) != dealt(257, 0, 1, 1, 2)
    assert dealt(257, 0, 1, 1, 2) == dealt(257, 0, 1, 1, 2)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_wrong_deals_read_samples_twice_and_others_never(world):
    for name in misdealt(257, 0, 0, world):
        parts = [misdealt(257, 0, r, world)[name] for r in range(world)]
        counts = readings(sum(parts, []), 257)
        assert counts["more_often"] > 10, name
        assert counts["never"] > 10, name
    assert deals(257, world)[0] == {
        "name": "dealt",
        "once": 257,
        "more_often": 0,
        "never": 0,
    }


def test_readings_are_counted():
    found = readings([0, 0, 1, 3], 6)
    assert found == {"once": 2, "more_often": 1, "never": 3}


def test_no_crowd_of_ranks_is_started(monkeypatch):
    started = []

    def spawn(job, world, data):
        started.append(world)
        raise RuntimeError("none is")

    monkeypatch.setattr(sharded_reads.ranks, "spawn", spawn)
    for cores, most in ((1, 8), (2, 8), (16, 64)):
        monkeypatch.setattr(sharded_reads.machine, "cores", lambda n=cores: n)
        with pytest.raises(bench.Refusal, match=f"serve {most} at most"):
            sharded_reads.main(["--smoke", "--ranks", str(most + 1)])
        with pytest.raises(RuntimeError, match="none is"):
            sharded_reads.main(["--smoke", "--ranks", str(most)])
    assert started == [8, 8, 64]


def test_bad_requests_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(bench.Refusal, match="--ranks 1"):
        sharded_reads.main(["--smoke", "--ranks", "1"])
    with pytest.raises(bench.Refusal, match="--folder nowhere"):
        sharded_reads.main(["--smoke", "--folder", "nowhere"])
    usage = type("Usage", (), {"free": 2**10})
    monkeypatch.setattr(
        sharded_reads.shutil, "disk_usage", lambda folder: usage
    )
    with pytest.raises(bench.Refusal, match="too little space"):
        sharded_reads.main(["--smoke", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_smoke(tmp_path, capsys):
    rows = sharded_reads.main(["--smoke", "--folder", str(tmp_path)])
    assert [row["once"] for row in rows[:5]] == [257] * 5
    assert all(row["more_often"] for row in rows[5:])
    assert rows[0]["asked_bytes"] == 2 * rows[1]["asked_bytes"]
    assert not list(tmp_path.iterdir())
    assert "each was read exactly once" in capsys.readouterr().out


@pytest.mark.ranks
def test_torchrun_starts_the_same_script(tmp_path):
    done = subprocess.run(
        [
            *private_network(),  # torchrun's store listens on every interface
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m", "ch02_hardware.sharded_reads"),
            *("--smoke", "--folder", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every rank reads all") == 1
    assert not list(tmp_path.iterdir())


def test_techniques_work_when_pasted(pasted, data):
    read = Reader()
    size, count = data["size"], data["count"]
    for rank in range(2):
        whole = (read, data["one"], count, size, rank, 2)
        for name in ("all_of_one_file", "slice_of_one_file"):
            way = getattr(sharded_reads, name)
            assert list(pasted(way)(*whole)) == list(way(*whole))
        shards = (read, data["shards"], size, rank, 2)
        way = sharded_reads.shards_of_a_rank
        assert list(pasted(way)(*shards)) == list(way(*shards))
    mine = pasted(dealt)(count, 0, 0, 1, 2)
    assert mine == dealt(count, 0, 0, 1, 2)
    found = list(pasted(sharded_reads.picked)(read, data["one"], mine, size))
    assert [int.from_bytes(s[:8], "little") for s in found] == mine
    read.close()
