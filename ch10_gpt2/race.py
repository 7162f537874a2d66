"""Two configurations in processes of their own that take turns.

On a machine that other people use too, the time of one run says little; the
ratio of two runs that alternate every few updates says a lot. The ladder
(``ladder.py``) decides what runs; here it is run and timed.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ch10_gpt2 import train
from ch10_gpt2.steps import TOLERANCE, Step
from common import judging, ranks

# Norms of the first update's gradients: of all together, and the worst of
# one parameter. Where 16 bits are summed in another order they move by up to
# 4e-5 and 2e-4 (7e-4 in a tiny model), by 2e-3 and 3e-3 where they begin
GRADIENT_TOLERANCE = {"exact": 0.0, "close": 1e-3, "precision": 2e-2}
PARAMETER_TOLERANCE = {"exact": 0.0, "close": 5e-3, "precision": 5e-2}
# n rounds all lean one way by luck in 2^(1 - n) of comparisons: 3%
FEWEST_ROUNDS = 6
# A later row's GradScaler may skip so many updates more, halving its scale
SKIPS = 3


class WorkerError(Exception):
    """What a worker reported instead of an answer; ``kind`` as it said."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Worker:
    """Ranks that hold one configuration and do what the ladder asks."""

    def __init__(self, plan: "Plan", step: Step, world: int):
        self.kind, self.world, self.number = (world, step.hosts), world, 0
        self.config: dict = {}
        self.stopping = False
        self.stack = contextlib.ExitStack()
        self.folder = Path(
            self.stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="ladder-", ignore_cleanup_errors=True
                )
            )
        )
        output = self.stack.enter_context(open(self.folder / "out", "wb"))
        options = {
            "threads": max(1, plan.threads // world),
            "env": {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            "stdout": output,
        }
        program = "ch10_gpt2.worker", [str(self.folder)]
        try:
            if step.hosts:
                hosts = ranks.hosts(*program, netns=plan.netns, **options)
                self.processes = self.stack.enter_context(hosts)
            else:
                self.processes = ranks.launch(*program, world, **options)
                for process in self.processes:
                    self.stack.callback(process.end)
        except BaseException:
            self.stack.close()
            raise

    def tell(self, **command) -> None:
        """Give the next command without waiting for its answer."""
        path = self.folder / f"command-{self.number}.json"
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(command))
        beside.replace(path)
        self.number += 1

    def hear(self, timeout_s: float = 900) -> dict:
        """Wait for every rank's answer; return rank 0's with ``all``.

        Raises:
            WorkerError: when a rank fails, dies or stays silent.
        """
        replies, until = {}, time.monotonic() + timeout_s
        while len(replies) < self.world:
            for rank in set(range(self.world)) - set(replies):
                name = f"reply-{self.number - 1}-{rank}.json"
                path = self.folder / name
                if path.exists():
                    replies[rank] = json.loads(path.read_text())
            failed = [r for r in replies.values() if "error" in r]
            if failed:
                self.number = -1
                raise WorkerError(failed[0]["error"], failed[0]["text"])
            ended = [p for p in self.processes if p.poll() is not None]
            if ended:
                code, self.number = ended[0].returncode, -1
                # the kernel's own answer to a lack of memory is SIGKILL
                kind = "out-of-memory" if code in (-9, 137) else "error"
                said = [line for line in ended[0].tail if line.strip()]
                said = said[-1][:300] if said else "it said nothing"
                raise WorkerError(kind, f"a rank ended with {code}: {said}")
            if time.monotonic() > until:
                raise WorkerError("error", f"no answer in {timeout_s:.0f} s")
            time.sleep(0.004)
        return replies[0] | {"all": [replies[r] for r in sorted(replies)]}

    def ask(self, **command) -> dict:
        """Give a command and wait for its answer."""
        self.tell(**command)
        return self.hear()

    def stop(self) -> None:
        """Ask the ranks to end, once; wait for nothing."""
        if not self.stopping:
            self.stopping = True
            self.tell(do="stop")

    def close(self) -> None:
        """Stop the ranks, by force if need be, and remove the folder."""
        try:
            if self.number >= 0:  # else they have ended, or are to be ended
                self.stop()
                for process in self.processes:
                    process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self.stack.close()


@dataclasses.dataclass
class Plan:
    """Everything that stays the same through both tracks."""

    base: dict
    steps: str
    smoke: bool
    threads: int
    world: int
    netns: bool
    budget_s: float
    out: Path
    ceilings: dict
    updates: int | None = None
    why: str = ""  # this size
    spares: list = dataclasses.field(default_factory=list)
    compiling: list = dataclasses.field(default_factory=list)
    overheads: list = dataclasses.field(default_factory=list)
    begun: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """The device that every configuration runs on."""
        return torch.device(self.base["device"])

    def tracks(self) -> dict[str, list[Step]]:
        """Return the two lists of steps."""
        module = importlib.import_module(self.steps)
        return {"memory": module.MEMORY, "speed": module.SPEED}

    def ranks_of(self, config: train.Config) -> int:
        """Return how many processes hold this configuration."""
        return 1 if config.parallel == "none" else self.world

    def configure(self, track: str, applied: list[str]) -> train.Config:
        """Apply the named steps to the base."""
        changes = {s.name: s.change for s in self.tracks()[track]}
        config = train.Config(**self.base)
        for name in applied:
            config = changes[name](config)
        world = self.ranks_of(config)
        threads = max(1, self.threads // world)
        return train.fit_to_ranks(config, world, threads)

    @property
    def shares(self) -> bool:
        """Whether processes are handed on from row to row.

        A smoke run proves nothing about memory or speed, and importing torch
        is what takes long. Steps of somebody's own may change anything in
        their process, so they never share one.
        """
        return self.smoke and self.steps == "ch10_gpt2.steps"

    def worker(self, step: Step, world: int) -> Worker:
        """Start the ranks of a configuration: fresh processes, or spare."""
        if self.compiling and "compiler" in step.needs:
            worker = self.compiling[-1]
            try:
                worker.hear()  # Ctrl-C meanwhile: ``close`` still knows it
            except WorkerError:  # the row will see it, too
                self.compiling.remove(worker)
                worker.close()
            else:
                self.compiling.remove(worker)
                return worker
        for spare in self.spares:
            if spare.kind == (world, step.hosts):
                self.spares.remove(spare)
                return spare
        return Worker(self, step, world)

    def prepare(self, step: Step) -> None:
        """Let the ranks of a later row import torch meanwhile."""
        kinds = [spare.kind for spare in self.spares]
        if self.shares and (self.world, step.hosts) not in kinds:
            self.spares.append(Worker(self, step, self.world))

    def compile(self, step: Step, applied: list[str]) -> None:
        """Let a later row's graph be compiled meanwhile."""
        self.compiling.append(Worker(self, step, 1))
        self.compiling[-1].tell(**self.order("start", step.track, applied))
        self.compiling[-1].tell(do="updates", count=1)

    def release(self, worker: Worker) -> None:
        """End a worker, or keep it for the next configuration."""
        if self.shares and worker.number >= 0:
            self.spares.append(worker)
        else:
            worker.close()

    def close(self) -> None:
        """End the workers that were kept."""
        kept = self.spares + self.compiling
        self.spares, self.compiling = [], []
        for worker in kept:
            with contextlib.suppress(OSError):
                worker.stop()
        for worker in kept:
            worker.close()

    def order(self, do: str, track: str, applied: list[str]) -> dict:
        """Return the command that makes a worker hold this configuration."""
        world = self.ranks_of(self.configure(track, applied))
        return {
            "do": do,
            "steps": self.steps,
            "track": track,
            "base": self.base,
            "applied": applied,
            "world": world,
            "threads": max(1, self.threads // world),
        }


def start(plan: Plan, pairs: list) -> list[Worker]:
    """Start workers side by side and wait until each holds its model."""
    workers = []
    try:
        for step, track, applied in pairs:
            order = plan.order("start", track, applied)
            workers.append(plan.worker(step, order["world"]))
            workers[-1].tell(**order)
        for worker in workers:
            worker.config = worker.hear()["config"]
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def queue_of(worker: Worker) -> int:
    """Return how many updates the worker's loader prepares ahead."""
    return 2 * worker.config["workers"]


def race(plan: Plan, old: Worker | None, new: Worker, seconds: float) -> dict:
    """Let two configurations take turns of a few updates.

    Both start from the same weights and see the same batches, so update i of
    one is compared with update i of the other. The first two updates of
    each (allocation, compilation) run side by side: compared, not timed.
    Who begins changes from round to round: what drifts hits both alike.

    Returns:
        ``old`` and ``new``: the updates' reports; ``rounds``: per-round
        seconds per update of both.
    """
    begun = time.monotonic()
    contenders = [w for w in (old, new) if w is not None]
    reports = [[] for _ in contenders]
    for worker in contenders:  # side by side: this is not timed
        worker.tell(do="updates", count=2, gradients=True)
    for i, worker in enumerate(contenders):
        reports[i] += worker.hear()["updates"]
    slowest = max(r[-1]["seconds"] for r in reports)
    if plan.updates is None:
        room = seconds / (2.2 * slowest)
        plan.updates = 3 if plan.smoke else int(min(12, max(6, room)))
    waits = max(u["data_s"] / u["seconds"] for r in reports for u in r[1:])
    hidden = waits > 0.02 and not plan.smoke  # what a full queue can hide
    queued = [hidden * queue_of(w) for w in contenders]
    turn = 1 if plan.smoke else max(1, min(8, math.ceil(0.2 / slowest)))
    turn = max(turn, *queued)
    rounds = []
    while True:
        late = time.monotonic() - begun > seconds
        fewest = 1 if plan.smoke else FEWEST_ROUNDS
        enough = len(reports[-1]) >= plan.updates
        enough = enough and len(rounds) >= fewest
        if enough and (late or plan.smoke or len(rounds) >= 60):
            break
        times = [0.0] * len(contenders)
        turns = list(enumerate(contenders))
        for i, worker in reversed(turns) if len(rounds) % 2 else turns:
            done = worker.ask(
                do="updates",
                count=turn,
                untimed=queued[i],
                gradients=len(reports[i]) < plan.updates,
            )
            reports[i] += done["updates"]
            timed = done["updates"][queued[i] :]
            times[i] = statistics.fmean(u["seconds"] for u in timed)
            # until its queue is full again, or that disturbs the other
            time.sleep(min(1.0, 2 * queued[i] * timed[-1]["data_s"]))
        rounds.append(times)
    return {
        "old": reports[0] if old is not None else None,
        "new": reports[-1],
        "rounds": rounds,
    }


def apart(a: float, b: float, least: float = 1e-12) -> float:
    """Return the difference relative to the larger, or to ``least``."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), least)


def furthest(a: dict, b: dict) -> tuple[float, str]:
    """Return how far apart the gradients of one parameter are, and which.

    Both are norms by name of one update; a parameter that only one of them
    has is as far apart as can be. What is a ten-thousandth of all gradients
    together counts no more than that.
    """
    least = 1e-4 * math.hypot(*a.values())
    return max(
        (apart(a.get(name, 0.0), b.get(name, 0.0), least), name)
        for name in a.keys() | b.keys()
    )


def agreement(kind: str, old: list, new: list) -> dict:
    """Compare two runs' losses, and the gradients of their first update.

    The losses of one update hide a wrong gradient; its norm does not, and
    each parameter's norm shows one that is small beside the others. A
    GradScaler's overflow skips an update: the first that neither skipped
    counts. Where the format stays, ``close`` is close in 16 bits, too: what
    is rounded differently is far fewer than all numbers.
    """
    pairs = list(zip(old, new, strict=False))
    worst = max(apart(a["loss"], b["loss"]) for a, b in pairs)
    gradient, parameter, name = math.inf, math.inf, ""
    for a, b in pairs:
        if not (a.get("skipped") or b.get("skipped")):
            gradient = apart(a["grad_norm"], b["grad_norm"])
            norms = [x.get("parameter_norms") for x in (a, b)]
            if all(norms):
                parameter, name = furthest(*norms)
            break
    return {
        "declared": kind,
        "tolerance": TOLERANCE[kind],
        "worst": worst,
        "worst_gradient_norm": gradient,
        "gradient_tolerance": GRADIENT_TOLERANCE[kind],
        "worst_parameter_norm": parameter,
        "parameter": name,
        "parameter_tolerance": PARAMETER_TOLERANCE[kind],
        "holds": worst <= TOLERANCE[kind]
        and gradient <= GRADIENT_TOLERANCE[kind]
        and parameter <= PARAMETER_TOLERANCE[kind],
    }


def quartiles(values: list[float]) -> list[float]:
    """Return the first and third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def first_norms(reports: list[dict]) -> list[dict]:
    """Return each parameter's gradient norms of the first updates.

    Up to the first that was made, and those that may stand in for it.
    """
    skipped = [bool(u.get("skipped")) for u in reports]
    made = skipped.index(False) + 1 if False in skipped else len(skipped)
    return [u["parameter_norms"] for u in reports[: made + SKIPS]]


def measured(plan: Plan, result: dict, config: train.Config) -> dict:
    """Turn a race into the row's figures.

    ``round_seconds`` holds seconds per update of a round, (old, new) or
    (new,), and ``steady`` what ``judging.lasts`` says of their ratios.
    """
    tokens = config.sequences * config.context()
    # as they are kept, so that the ratio can be found again from the log
    rounds = [[round(t, 7) for t in times] for times in result["rounds"]]
    times = [r[-1] for r in rounds]
    rates = [tokens / t for t in times]
    seen = result["new"][: plan.updates]
    losses = [u["loss"] for u in seen]
    values = {
        "tokens_per_s": statistics.median(rates),
        "spread": quartiles(rates),
        "rounds": len(times),
        "round_seconds": rounds,
        "seconds": statistics.median(times),
        "data_s": statistics.median(u["data_s"] for u in result["new"][2:]),
        "loss": losses[-1],
        "losses": losses,
        "gradient_norms": [u["grad_norm"] for u in seen],
        "parameter_norms": first_norms(seen),
        "skipped": sum(bool(u.get("skipped")) for u in seen),
        "config": train.as_dict(config),
    }
    if result["old"] is not None:
        others = [r[0] for r in rounds]
        ratio, low, high = judging.bootstrap_ratio(others, times)
        values["ratio_previous"] = ratio
        values["previous_tokens_per_s"] = tokens / statistics.median(others)
        if len(times) >= FEWEST_ROUNDS:
            values["ratio_interval"] = [low, high]
            values["steady"] = judging.lasts(np.divide(others, times))
    return values


def measure_memory(worker: Worker, trace: Path | None) -> dict:
    """Ask every rank for its peak; report the largest by kind."""
    answer = worker.ask(do="memory", trace=str(trace) if trace else None)
    kinds: dict[str, int] = {}
    for reply in answer["all"]:
        for kind, value in reply["peak_bytes"].items():
            kinds[kind] = max(kinds.get(kind, 0), value)
    return kinds
