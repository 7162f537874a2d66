"""The log on disk: one ladder at a time writes it, and it is continued.

After every row log.json is written whole. A ladder that was killed goes on
behind its last finished row, if all that makes the figures is as it was.
"""

import contextlib
import importlib
import itertools
import json
import os
import time
from pathlib import Path

import torch

from ch07_memory import training_memory
from ch10_gpt2.race import Plan
from common import bench, machine, text


def make_folder(out: Path) -> None:
    """Make the log's folder; only what is not refused leaves one behind."""
    try:
        (out / "traces").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bench.Refusal(
            f"--out {out}: cannot write there ({error.strerror}); "
            "name another folder"
        ) from None


def _taken(file) -> bool:
    """Ask the system for the file's lock; say whether another has it.

    A process loses its locks when it ends, however it ends, so none is ever
    stale. A file system without locks guards nothing.
    """
    try:
        import fcntl
    except ImportError:  # Windows locks bytes, and nobody reads this one
        import msvcrt

        file.seek(1 << 20)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return True
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def alone_in(folder: Path):
    """Refuse a folder that another ladder writes into at this time.

    The file stays behind: to remove it would let two processes lock two
    files of one name.
    """
    with open(folder / "lock", "a+b", buffering=0) as file:
        if _taken(file):
            file.seek(0)
            owner = file.read(20).decode(errors="replace").strip()
            raise bench.Refusal(
                f"--out {folder}: {f'process {owner}'.strip()} is writing a "
                "log there; wait for it or name another folder"
            )
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        try:
            yield
        finally:
            file.truncate(0)


def sources() -> list[Path]:
    """Return the files that decide what a row measures."""
    own = ("race", "steps", "worker", "train", "checkpoints", "config")
    lent = ("gpt", "judging", "ranks", "seeding", "text")
    found = [bench.ROOT / "ch10_gpt2" / f"{n}.py" for n in (*own, "windows")]
    found += [bench.ROOT / "common" / f"{name}.py" for name in lent]
    operator = bench.ROOT / "ch09_advanced" / "custom_op"
    found += [operator / "cross_entropy.cpp"]
    module = importlib.import_module("ch10_gpt2.steps")
    shown = [
        name.partition(":")[0]
        for step in module.MEMORY + module.SPEED
        for name in step.shows
        if ":" in name
    ]
    found += [Path(importlib.import_module(name).__file__) for name in shown]
    return list(dict.fromkeys([*found, Path(training_memory.__file__)]))


def key(plan: Plan) -> dict:
    """Return what must be equal for a log to be continued."""
    steps = importlib.import_module(plan.steps).__file__
    return {
        "base": plan.base,
        "steps": plan.steps,
        "sources": bench.digests(
            p.relative_to(bench.ROOT).as_posix()
            for p in sources()
            if p.exists()
        )
        | {plan.steps: bench.script_hash(steps)[:16]},
        "torch": torch.__version__,
        "data": text.open_tokens(text.tokenize(plan.base["data"])).digest,
        "threads": plan.threads,
        "world": plan.world,
        "netns": plan.netns,
        "machine": machine.identity(plan.device),
    }


def is_finished(row: dict) -> bool:
    """Say whether a row need not be tried again.

    What stands behind one that must be was measured without it, so a log
    is continued from there.
    """
    return row["verdict"] != "failed" and not row.get("not_reached")


class Book:
    """The log on disk: written after every row, read back after a kill."""

    def __init__(self, plan: Plan, header: dict, fresh: bool):
        self.path = plan.out / "log.json"
        self.data = header | {"rows": []}
        old = None if fresh else self.read()
        if old and old.get("key") == header["key"]:
            for track in plan.tracks():
                rows = [r for r in old["rows"] if r["track"] == track]
                rows = list(itertools.takewhile(is_finished, rows))
                if rows and rows[0]["verdict"] == "kept":
                    self.data["rows"] += rows  # else it has no baseline
            plan.updates = old.get("updates")
        elif self.path.exists():
            aside = self.path.with_name(f"log-{int(time.time())}.json")
            self.path.replace(aside)
            print(f"a log of another run is kept as {aside}")
        self.plan = plan

    def read(self) -> dict | None:
        """Return the log, or nothing if there is none that can be read."""
        try:
            data = json.loads(self.path.read_text("utf-8"))
            for row in data["rows"]:
                row["track"], row["step"], row["section"], row["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return data

    def row(self, track: str, name: str, section: str) -> dict | None:
        """Return the finished row of a step."""
        wanted = (track, name, section)
        for row in self.data["rows"]:
            if (row["track"], row["step"], row["section"]) == wanted:
                return row
        return None

    def add(self, row: dict) -> None:
        """Append a row and write the log."""
        self.data["rows"].append(row)
        self.save()

    def save(self) -> None:
        """Write the log beside and rename it."""
        self.data["updates"] = self.plan.updates
        text = json.dumps(self.data, indent=1, ensure_ascii=False)
        bench.write_atomic(self.path, text + "\n")
