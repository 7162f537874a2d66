"""2.2  Disk · 硬碟

Question  How many bytes per second come from a disk, and what changes that?
Expect    from the page cache all ways run at memory speed, less one system
          call per block; from the disk, in order: the kernel reads ahead; at
          random: one wait per block; many files: one more wait for each name
Run       python -m ch02_hardware.disk_throughput [--folder DIR] [--smoke]
"""

import errno
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch

from common import bench, machine, tables


def read_blocks(path, starts, size):
    """A read copies a block out of the page cache; what it lacks, it waits.

    Blocks that are asked for in order are fetched before they are asked for.
    """
    with open(path, "rb", buffering=0) as file:
        for start in starts:
            file.seek(start)
            yield file.read(size)


def mapped_blocks(path, starts, size):
    """A mapped file is memory: its first touch of a page asks the kernel."""
    import mmap

    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
    ):
        for start in starts:
            yield memory[start : start + size]


def read_files(paths):
    """A name is looked up and an inode read before the first byte comes."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            yield file.read()


def drop_from_cache(paths):
    """The kernel can forget pages that the disk has, when it is told to.

    Returns False where the system has no such call (macOS, Windows).
    """
    import os

    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return True


TECHNIQUES = (read_blocks, mapped_blocks, read_files, drop_from_cache)


def sizes(args):
    """Return (bytes in all, bytes of a block and of each small file)."""
    return (2**20, 2**14) if args.smoke else (2**26, 2**16)


def checksum(blocks):
    """Return (bytes, a sum that does not depend on the blocks' order)."""
    count = total = 0
    for block in blocks:
        count += len(block)
        total += zlib.crc32(block)
    return count, total


def written(path, blocks):
    """Write a file to the disk itself: dirty pages cannot be dropped."""
    import os

    with open(path, "wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return path


def scratch(folder):
    """Return a folder in ``folder`` that goes when it is left.

    Raises:
        Refusal: files cannot be made there, as in /proc.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="disk-", dir=folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise bench.Refusal(
            f"no files can be made in {folder} ({why}); name a folder on a "
            "disk with --folder"
        ) from None


def make_files(folder, total, block):
    """Write the same bytes as one file and as many; return their paths.

    Raises:
        Refusal: too little space on that disk.
    """
    free = shutil.disk_usage(folder).free
    full = (
        f"the disk that holds {folder} has too little space: "
        f"{tables.cell(2 * total, 'bytes')} are needed for a moment; "
        "name another with --folder"
    )
    if free < 2.5 * total:
        raise bench.Refusal(full)
    draw = torch.Generator().manual_seed(0)  # random: nothing compresses it
    data = torch.randint(256, (total,), generator=draw, dtype=torch.uint8)
    data = data.numpy().data
    parts = [data[at : at + block] for at in range(0, total, block)]
    small = folder / "small"
    try:
        small.mkdir()
        one = written(folder / "one", parts)
        many = [written(small / f"{i:05d}", [p]) for i, p in enumerate(parts)]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", 0)):
            raise
        raise bench.Refusal(full) from None
    return one, many, checksum(parts)


def ways_of(one, many, total, block):
    """Return {name: () -> blocks}; each row changes one thing."""
    order = torch.randperm(
        total // block, generator=torch.Generator().manual_seed(1)
    )
    ordered = range(0, total, block)
    shuffled = (order * block).tolist()
    files = [many[i] for i in order.tolist()]
    return {
        "one file, in order, read": lambda: read_blocks(one, ordered, block),
        "one file, in order, mmap": lambda: mapped_blocks(one, ordered, block),
        "one file, at random, mmap": lambda: mapped_blocks(
            one, shuffled, block
        ),
        "one file, at random, read": lambda: read_blocks(one, shuffled, block),
        "many files, at random, read": lambda: read_files(files),
        "many files, in order, read": lambda: read_files(many),
    }


def from_storage():
    """Return the bytes that this process had fetched from disks, or None."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:  # no Linux, or a container that hides it
        return None
    return int(text.split("read_bytes:")[1].split()[0])


def timed(blocks):
    """Return (seconds, bytes from storage or None) to read all blocks."""
    before = from_storage()
    start = time.perf_counter()
    for _ in blocks():
        pass
    took = time.perf_counter() - start
    return took, None if before is None else from_storage() - before


def measure(args, ways, paths, truth):
    """Return a row per way and state of the page cache.

    The ways take turns, so that what drifts hits all alike.
    """
    total = truth[0]
    states = {"dropped": lambda: drop_from_cache(paths), "warm": lambda: True}
    if not drop_from_cache(paths):
        del states["dropped"]
    rows = []
    for cache, prepare in states.items():
        taken = {name: [] for name in ways}
        for name, blocks in ways.items():
            if checksum(blocks()) != truth:  # the first reading of "warm"
                raise bench.Mismatch(f"{name}: not the bytes of the file")
        start = time.perf_counter()
        for turn in range(1 if args.smoke else 5):
            if turn > 2 and time.perf_counter() - start > 5:
                break
            for name, blocks in ways.items():
                prepare()
                taken[name].append(timed(blocks))
        for name, samples in taken.items():
            seconds = [took_s for took_s, _ in samples]
            took_s = statistics.median(seconds)
            rows.append(
                {
                    "name": name,
                    "cache": cache,
                    "total_bytes": total,
                    "took_s": took_s,
                    "least_s": min(seconds),
                    "most_s": max(seconds),
                    "read_bytes_per_s": total / took_s,
                    "storage_bytes": samples[-1][1],
                }
            )
    return rows


def not_by_order(rows):
    """Yield a line for each way that was no quicker in order, from the disk.

    Only where the slowest reading in order beats the quickest at random was
    a difference measured.
    """
    cold = {row["name"]: row for row in rows if row["cache"] == "dropped"}
    for name, row in cold.items():
        if "in order" not in name:
            continue
        other = cold[name.replace("in order", "at random")]
        if row["most_s"] < other["least_s"]:
            continue
        words = "is no quicker than at random beyond the noise"
        if row["least_s"] > other["most_s"]:
            words = "is SLOWER than at random"
        yield f"{name}, page cache dropped: {words}"


def seen(rows, folder):
    """Return the ceiling of the disk that holds the cache, as rows saw it.

    Empty if the folder is on another, or nothing came from a disk for sure.
    """
    rates = [
        row["total_bytes"] / row["least_s"]
        for row in rows
        if row["cache"] == "dropped"
        and (row["storage_bytes"] or 0) >= row["total_bytes"]
    ]
    same = folder.stat().st_dev == machine.cache_dir().stat().st_dev
    return {"disk_read_bytes_per_s": max(rates)} if rates and same else {}


def not_dropped(rows, system=sys.platform):
    """Say in words why a row may come from memory all the same, or None."""
    cold = [row for row in rows if row["cache"] == "dropped"]
    if not cold:
        return (
            f"page cache dropped: left out, {system} has no call for it "
            "(posix_fadvise); every figure is the page cache's"
        )
    found = [row["storage_bytes"] for row in cold]
    if None in found:
        return (
            "nobody here counts what came from the disk, so a row with the "
            "cache dropped may still be the cache's"
        )
    if min(found) < 0.5 * cold[0]["total_bytes"]:
        return (
            "the page cache was told to forget and has not: the folder may "
            "be memory itself (tmpfs); name one on a disk with --folder"
        )
    return None


def figure(rows):
    """Draw the bytes per second of each way, from cache and from disk."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = drawn.subplots()
    names = list(dict.fromkeys(row["name"] for row in rows))
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    for i, cache in enumerate(caches):
        some = {r["name"]: r for r in rows if r["cache"] == cache}
        rates = [some[name]["read_bytes_per_s"] / 1e9 for name in names]
        places = [
            n + 0.38 * (i - (len(caches) - 1) / 2) for n in range(len(names))
        ]
        bars = axes.barh(places, rates, 0.36, label=f"page cache {cache}")
        axes.bar_label(bars, [f"{r:.2f}" for r in rates], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("GB/s")
    axes.legend(frameon=False, loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    axes.set_title(notebook.label("Reading · 讀取"), **fonts)
    return drawn


def main(argv=None):
    def add(parser):
        what = "where to put test files (the system's temporary folder)"
        parser.add_argument("--folder", type=Path, metavar="DIR", help=what)

    args = bench.cli(__doc__, argv, add)
    args.device = torch.device("cpu")
    total, block = sizes(args)
    folder = args.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise bench.Refusal(f"--folder {folder}: there is no such folder")
    expect = None
    if not args.smoke:  # the copies, a block at a time, stay in its caches
        least_s = total / machine.peaks("cpu")["copy_bytes_per_s"]
        expect = f"{tables.cell(total, 'bytes')} from the page cache in at "
        expect += f"least {tables.seconds(least_s)}, going by memory's rate; "
        expect += "from the disk at most what its maker prints"
    with scratch(folder) as name:
        one, many, truth = make_files(Path(name), total, block)
        ways = ways_of(one, many, total, block)
        found = measure(args, ways, [one, *many], truth)
    rows = bench.report(
        args,
        found,
        {
            "cache": "page cache",
            "name": "row",
            "took_s": "took",
            "least_s": "from",
            "most_s": "to",
            "read_bytes_per_s": "rate",
            "storage_bytes": "from storage",
        },
        title=f"Reading {tables.cell(total, 'bytes')} by blocks of "
        f"{tables.cell(block, 'bytes')}",
        expect=expect,
    )
    print("all rows read the same bytes (count and checksum)")
    if not args.smoke:
        machine.keep_peaks(seen(rows, folder))
    words = not_dropped(rows)
    if words:
        print(words)
    else:
        for line in [] if args.smoke else not_by_order(rows):
            print(line)
        print(
            "what lies below the page cache may be a cache as well: a "
            "controller's, or a virtual machine's host"
        )
    return rows


if __name__ == "__main__":
    bench.run(main)
