"""2.4.3  Storage for many nodes · 分散式系統的資料儲存

Question  How do many ranks read one data set, each sample once?
Expect    every rank reads all: the storage sends the data once per rank;
          slices of one file and a shard per rank: once in all; dealt at
          random: once in all, with one request per sample
Run       python -m ch02_hardware.sharded_reads [--ranks N] [--folder DIR]
"""

import contextlib
import functools
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from ch02_hardware.collective_bandwidth import refuse_crowd
from ch02_hardware.disk_throughput import drop_from_cache, from_storage
from common import bench, machine, ranks, tables


def all_of_one_file(read, path, count, size, rank, world):
    """Storage sends every byte to every rank, which keeps its share."""
    many = max(1, 2**20 // size)  # samples of one request
    for first in range(0, count, many):
        data = read(path, first * size, min(many, count - first) * size)
        for at in range(0, len(data), size):
            if (first + at // size) % world == rank:
                yield data[at : at + size]


def slice_of_one_file(read, path, count, size, rank, world):
    """Each rank reads its part in order; all parts are in one file.

    The borders are products, so that no remainder is left to anybody.
    """
    first, end = rank * count // world, (rank + 1) * count // world
    many = max(1, 2**20 // size)
    for start in range(first, end, many):
        data = read(path, start * size, min(many, end - start) * size)
        for at in range(0, len(data), size):
            yield data[at : at + size]


def shards_of_a_rank(read, paths, size, rank, world):
    """Each rank opens files of its own: no two hosts ask for one file."""
    for path in paths[rank::world]:
        data = read(path, 0, -1)
        for at in range(0, len(data), size):
            yield data[at : at + size]


def dealt(count, seed, epoch, rank, world):
    """Ranks that shuffle alike deal samples like cards: each goes to one.

    The seed is the same on every rank, the offset is not.
    """
    draw = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(count, generator=draw)[rank::world].tolist()


def picked(read, path, indices, size):
    """A sample at a random place costs a request of its own."""
    for i in indices:
        yield read(path, i * size, size)


TECHNIQUES = (
    all_of_one_file,
    slice_of_one_file,
    shards_of_a_rank,
    dealt,
    picked,
)


def misdealt(count, seed, rank, world):
    """Return {what went wrong: the samples that this rank then reads}."""
    alike, own = (
        torch.Generator().manual_seed(s) for s in (seed, seed + rank)
    )
    share = len(range(rank, count, world))
    order = torch.randperm(count, generator=alike)
    drawn = torch.randint(count, (share,), generator=alike)
    shuffled = torch.randperm(count, generator=own)
    return {
        "rank offset forgotten": order[:share].tolist(),
        "each draws at random, seeded alike": drawn.tolist(),
        "each shuffles by a seed of its own": shuffled[rank::world].tolist(),
    }


def deals(count, world, seed=0):
    """Return a row per deal: how often samples are read in one epoch."""
    ways = {"dealt": [dealt(count, seed, 0, r, world) for r in range(world)]}
    for rank in range(world):
        for name, indices in misdealt(count, seed, rank, world).items():
            ways.setdefault(name, []).append(indices)
    return [
        {"name": name} | readings(sum(parts, []), count)
        for name, parts in ways.items()
    ]


def readings(ids, count):
    """Count samples that were read once, more often, and never."""
    times = Counter(ids)
    return {
        "once": sum(n == 1 for n in times.values()),
        "more_often": sum(n > 1 for n in times.values()),
        "never": count - len(times),
    }


# --- files -------------------------------------------------------------------


def sizes(args):
    """Return (samples, bytes of each): prime, so no rank count divides it."""
    return (257, 2**10) if args.smoke else (16381, 2**12)


def sample(i, size, noise):
    """Return sample ``i``: its number, then bytes that differ by sample."""
    start = 997 * i % (len(noise) - size)
    return i.to_bytes(8, "little") + noise[start : start + size - 8]


@contextlib.contextmanager
def stored(args, shards):
    """Write one file, and the same samples as shards; give the job's words.

    Raises:
        Refusal: no such folder, or too little space there.
    """
    count, size = sizes(args)
    parent = args.folder or Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise bench.Refusal(f"--folder {parent}: there is no such folder")
    if shutil.disk_usage(parent).free < 3 * count * size:
        need = tables.cell(2 * count * size, "bytes")
        raise bench.Refusal(
            f"the disk that holds {parent} has too little space: {need} are "
            "needed for a moment; name another with --folder"
        )
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (2**20,), generator=draw, dtype=torch.uint8)
    noise, total = noise.numpy().tobytes(), 0
    with tempfile.TemporaryDirectory(prefix="shards-", dir=parent) as name:
        one = Path(name, "all")
        paths = [Path(name, f"shard{s:03d}") for s in range(shards)]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(p, "wb")) for p in [one, *paths]]
            for i in range(count):
                data = sample(i, size, noise)
                total += zlib.crc32(data)
                files[0].write(data)
                files[1 + i * shards // count].write(data)
            for file in files:  # dirty pages cannot be dropped
                file.flush()
                os.fsync(file.fileno())
        yield {
            "one": str(one),
            "shards": [str(path) for path in paths],
            "count": count,
            "size": size,
            "checksum": total,
        }


class Reader:
    """Reads from files that stay open, and counts what it asked for."""

    def __init__(self):
        self.asked, self.requests, self.files = 0, 0, {}

    def __call__(self, path, start, length):
        if path not in self.files:
            self.files[path] = open(path, "rb", buffering=0)
        self.files[path].seek(start)
        data = self.files[path].read(length)
        self.asked += len(data)
        self.requests += 1
        return data

    def close(self):
        for file in self.files.values():
            file.close()


# --- one rank ----------------------------------------------------------------


def ways_of(data, rank, world):
    """Return {name: read -> samples}; the first row is the baseline."""
    one, count, size = data["one"], data["count"], data["size"]
    whole = {"path": one, "count": count, "size": size}
    place = {"rank": rank, "world": world}
    mine = dealt(count, 0, 0, rank, world)
    paths = data["shards"]
    bind = functools.partial
    return {
        "every rank reads all": bind(all_of_one_file, **whole, **place),
        "slices of one file": bind(slice_of_one_file, **whole, **place),
        "shards of its own": bind(
            shards_of_a_rank, paths=paths, size=size, **place
        ),
        "one file, dealt at random": bind(
            picked, path=one, indices=mine, size=size
        ),
    }


def job(data):
    """Read in every way; return for each what all ranks saw."""
    me = ranks.init()
    found = {}
    for name, way in ways_of(data, me.rank, me.world).items():
        read, before = Reader(), None
        if me.rank == 0:
            drop_from_cache([data["one"], *data["shards"]])
        dist.barrier()
        before, start = from_storage(), time.perf_counter()
        samples = list(way(read))
        took_s = time.perf_counter() - start
        after = from_storage()
        read.close()
        mine = {
            "ids": [int.from_bytes(s[:8], "little") for s in samples],
            "checksum": sum(map(zlib.crc32, samples)),
            "asked_bytes": read.asked,
            "requests": read.requests,
            "storage_bytes": None if before is None else after - before,
            "took_s": took_s,
        }
        found[name] = [None] * me.world
        dist.all_gather_object(found[name], mine)
    return found


def combined(found, data):
    """Return a row per way; all samples must have been read, once.

    Raises:
        Mismatch: a sample was read twice or never, or is not what it was.
    """
    rows = []
    for name, parts in found.items():
        ids = sum((part["ids"] for part in parts), [])
        counts = readings(ids, data["count"])
        if counts["once"] != data["count"]:
            raise bench.Mismatch(
                f"{name}: {counts['more_often']} samples were read more than "
                f"once, {counts['never']} never"
            )
        if sum(part["checksum"] for part in parts) != data["checksum"]:
            raise bench.Mismatch(f"{name}: samples are not what was written")
        row = {"name": name, **counts}
        for key in ("requests", "asked_bytes", "storage_bytes"):
            values = [part[key] for part in parts]
            row[key] = None if None in values else sum(values)
        took_s = max(part["took_s"] for part in parts)
        row |= {
            "took_s": took_s,
            "samples_per_s": round(data["count"] / took_s),
        }
        rows.append(row)
    return rows


def main(argv=None):
    def add(parser):
        parser.add_argument("--ranks", type=int, default=2, metavar="N")
        what = "what all ranks can reach (the system's temporary folder)"
        parser.add_argument("--folder", type=Path, metavar="DIR", help=what)

    args = bench.cli(__doc__, argv, add)
    args.device = torch.device("cpu")
    if args.ranks < 2:
        raise bench.Refusal(f"--ranks {args.ranks}: at least 2 share a file")
    refuse_crowd(args.ranks)
    if "RANK" in os.environ:  # started by torchrun
        me = ranks.init()
        world, told = me.world, [None]
        holder = stored(args, 2 * world) if me.rank == 0 else None
        with holder or contextlib.nullcontext() as told[0]:
            dist.broadcast_object_list(told)
            data, found = told[0], job(told[0])
            dist.barrier()
        ranks.finish()
        if me.rank:
            return []
    else:
        world = args.ranks
        with stored(args, 2 * world) as data:
            found = ranks.spawn(job, world, data)[0]
    total = data["count"] * data["size"]
    cell = tables.cell
    expect = (
        f"{cell(world * total, 'bytes')} asked for when {world} ranks read "
        f"all of {cell(total, 'bytes')}, and {cell(total, 'bytes')} in all "
        "other rows"
    )
    if not args.smoke:
        peaks = machine.peaks("cpu")
        if 2 * total > peaks["cache_bytes"]:  # else no trip to memory is sure
            least_s = 2 * total / peaks["copy_bytes_per_s"]
            expect += f"; memory alone would need {tables.seconds(least_s)}"
    rows = bench.report(
        args,
        combined(found, data),
        {
            "name": "row",
            "requests": "requests",
            "asked_bytes": "asked for",
            "storage_bytes": "from storage",
            "took_s": "slowest rank",
            "samples_per_s": "samples/s",
        },
        title=f"{world} ranks, {data['count']} samples of "
        f"{cell(data['size'], 'bytes')}: each was read exactly once",
        expect=expect,
    )
    rows += bench.report(
        args,
        deals(data["count"], world),
        {
            "name": "row",
            "once": "read once",
            "more_often": "more often",
            "never": "never",
        },
        title="One epoch of samples, dealt rightly and wrongly",
    )
    print(
        "ranks on one host share its page cache: what the first one fetched "
        "the others find there;\non hosts of their own each asks the storage"
    )
    return rows


if __name__ == "__main__":
    bench.run(main)
