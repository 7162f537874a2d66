"""Run every script with ``--save`` under one budget of time.

Each script runs in a process of its own, gets its share of what is left, and
is ended when it takes far more than that.  What is done is kept in a small
file by script hash and machine, so that the same command goes on where the
last one stopped, a log that spent its own budget included.  With ``--out``
the records leave as one archive, to be unpacked in the root of a checkout.
"""

import argparse
import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from chapters import toc
from common import bench, machine

GRACE_S = 10  # from being asked to end to being ended
PATIENCE = 3  # shares of time after which a script is ended …
AT_LEAST_S = 60  # … but not before this many seconds, if there are as many
# Exit code of a program that spent its budget before its end: it recorded
# nothing, and goes on behind what it has done
UNFINISHED = 3


@dataclass(frozen=True)
class Job:
    """One command of the table of contents."""

    module: str
    args: tuple[str, ...]
    budget: bool = False
    weight: int = 1

    @property
    def name(self) -> str:
        return " ".join((self.module, *self.args))

    def fingerprint(self) -> str:
        """Hash the command and its chapter's sources (scripts import them)."""
        path = toc.file_of(self.module)
        digest = hashlib.sha256(self.name.encode())
        sources = [path]
        if self.budget:  # a program of several files
            sources = sorted(path.parent.glob("*.py"))
        for source in sources:
            digest.update(bench.script_hash(source).encode())
        return digest.hexdigest()[:16]


def jobs(numbers: list[str]) -> list[Job]:
    """Return the distinct commands of some sections, or of the book."""
    if not numbers:
        numbers = [
            s.number for s in toc.load().values() if "." not in s.number
        ]
    found = {}
    for number in numbers:
        chapter = toc.load()[toc.section(number).chapter]
        if chapter.modules:  # recorded as a whole
            number = chapter.number
        for section in toc.jobs(number):
            for module, *args in toc.commands(section):
                job = Job(module, tuple(args), section.budget, section.weight)
                found[job.name] = job
    return list(found.values())


class State:
    """What was done on this machine, on disk after every script."""

    def __init__(self, path: Path):
        self.path, self.done = path, {}
        try:
            self.done = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass  # none yet, or one that cannot be read: begin anew

    def finished(self, job: Job) -> bool:
        entry = self.done.get(job.name, {})
        same = entry.get("hash") == job.fingerprint()
        return same and entry.get("exit_code") == 0

    def keep(self, job: Job, code: int | str, seconds: float) -> None:
        self.done[job.name] = {
            "hash": job.fingerprint(),
            "exit_code": code,
            "seconds": round(seconds, 1),
        }
        bench.write_atomic(self.path, json.dumps(self.done, indent=1) + "\n")


def share(job: Job, left: list[Job], seconds: float) -> float:
    """Divide the time that is left by weight."""
    return seconds * job.weight / sum(other.weight for other in left)


def end(process: subprocess.Popen) -> None:
    """End a script and what it started: ask first, so that it can restore."""
    if os.name == "nt":
        tree = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(tree, capture_output=True)
    else:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(GRACE_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def run(command: list[str], output: Path, seconds: float, env: dict):
    """Run a command, its words going to ``output``; return its exit code.

    Returns:
        The exit code, or "ended" when it took longer than ``seconds``.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=os.name != "nt",
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "ended"
        finally:
            end(process)


def environment(results: Path | None) -> dict:
    """Return a script's environment: our packages, and where records go."""
    env = dict(os.environ)
    paths = [str(toc.ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    env["PYTHONIOENCODING"] = "utf-8"
    if results:
        env["BENCH_RESULTS"] = str(results)
    return env


def seed(results: Path, name: str) -> None:
    """Start from the tree's own records of this machine: they are merged."""
    for path in toc.ROOT.glob(f"*/results/{name}.json"):
        copy = results / path.parent.parent.name / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def pack(work: Path, archive: Path) -> None:
    """Put records, output and state into one archive, whole or not at all.

    Records go under ``<chapter>/results/``: unpacked in the root of a
    checkout they are where they belong.
    """
    results = work / "results"
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for path in sorted(p for p in work.rglob("*") if p.is_file()):
            inside = Path("runs") / work.name / path.relative_to(work)
            if path.is_relative_to(results):
                chapter, *rest = path.relative_to(results).parts
                inside = Path(chapter, "results", *rest)
            tar.add(path, inside.as_posix())
    bench.write_atomic(archive, data.getvalue())


def tail(output: Path, lines: int = 6) -> str:
    """Return the end of a script's output, indented."""
    text = output.read_text(encoding="utf-8", errors="replace")
    return "".join(f"\n      {line}" for line in text.splitlines()[-lines:])


def flags(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m chapters record", description=__doc__
    )
    add = parser.add_argument
    add("numbers", nargs="*", metavar="SECTION", help="all, if none is named")
    add("--budget", type=float, metavar="SECONDS", help="of all together")
    add("--out", type=Path, metavar="DIR", help="leave one archive there")
    add("--device", help="handed to every script")
    add("--smoke", action="store_true", help="run all quickly; save nothing")
    args = parser.parse_args(argv)
    args.smoke |= os.environ.get("BENCH_SMOKE", "0") not in ("", "0")
    if args.smoke and args.out:
        raise bench.Refusal(
            "--out: a smoke run saves nothing that could be carried home; "
            "leave out one of the two (or unset BENCH_SMOKE)"
        )
    if args.budget is not None and not args.budget > 0:
        raise bench.Refusal("--budget: needs a number of seconds above 0")
    return args


def command(job: Job, args: argparse.Namespace, seconds: float) -> list[str]:
    """Return the words that run a job."""
    words = [sys.executable, "-m", job.module, *job.args]
    words += ["--smoke"] if args.smoke else ["--save"]
    words += ["--device", args.device] if args.device else []
    if job.budget and seconds < math.inf:
        words += ["--budget", f"{max(1.0, seconds):.0f}"]
    return words


def main(argv: list[str]) -> int:
    """Run what is not done yet; 1 if a script failed, else 0."""
    args = flags(argv)
    begun = time.monotonic()
    todo = jobs(args.numbers)
    device = bench.device_of(args.device)
    if not args.smoke and machine.source().get("dirty"):
        raise bench.Refusal(
            "tracked source has uncommitted changes, so no record could say "
            "what it measured; commit them first, or use --smoke"
        )
    name = machine.identity(device)
    away = args.out is not None and not args.smoke
    kind = "smoke" if args.smoke else "archive" if away else "record"
    work = toc.ROOT / "runs" / f"{kind}-{name}"
    archive = away and args.out / f"records-{name}.tar.gz"
    results = work / "results" if away else None
    if away:
        seed(results, name)
    state = State(work / "state.json")
    left = [j for j in todo if args.smoke or not state.finished(j)]
    left.sort(key=lambda job: job.name in state.done)  # tried ones last
    print(f"{name}: {len(left)} of {len(todo)} scripts to run", flush=True)
    failed, budget = [], args.budget or math.inf
    for place, job in enumerate(left):
        rest = budget - (time.monotonic() - begun)
        if rest <= 0:
            break
        mine = share(job, left[place:], rest)
        limit = min(rest, max(PATIENCE * mine, AT_LEAST_S))
        output = work / "output" / f"{job.name.replace(' ', '_')}.txt"
        started = time.monotonic()
        code = run(
            command(job, args, mine),
            output,
            limit if limit < math.inf else None,
            environment(results),
        )
        seconds = time.monotonic() - started
        said = "done" if code == 0 else f"exit code {code}{tail(output)}"
        over = job.budget and code == UNFINISHED
        if over:
            said = "its budget is spent: nothing recorded yet, it goes on"
        if code == "ended":
            said = f"ended after {limit:.0f} s: its time was over"
        print(f"{job.name}: {said} ({seconds:.0f} s)", flush=True)
        if not args.smoke:
            state.keep(job, code, seconds)
        if code not in (0, "ended") and not over:
            failed.append(job.name)
        if away:  # after each: a machine may be taken away at any time
            pack(work, archive)
    if not args.smoke:
        waiting = [job.name for job in todo if not state.finished(job)]
        print(f"{len(todo) - len(waiting)} of {len(todo)} recorded")
        if waiting:
            print("the same command goes on with: " + ", ".join(waiting))
    if away:
        pack(work, archive)
        print(f"archive: {archive}; unpack it in the root of a checkout")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
