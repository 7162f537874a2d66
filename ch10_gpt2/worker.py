"""One configuration in a process of its own, told what to do by the ladder.

The ladder writes ``command-<n>.json`` into the worker's folder, every rank
answers with ``reply-<n>-<rank>.json``. Files work on every system, across
torchrun and across network namespaces, and nothing has to listen; a rank
that waits looks every few milliseconds and leaves the cores to the other
configuration.

Run       python -m ch10_gpt2.worker FOLDER   (the ladder does this)
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from ch07_memory import training_memory
from ch10_gpt2 import train
from common import bench, ranks, timers


def configure(order: dict) -> train.Config:
    """Apply the named steps to the base, then what this launch dictates.

    The steps run here, in the process that trains: a step may change
    anything, and the ladder still sees nothing but losses and seconds.
    """
    module = importlib.import_module(order["steps"])
    track = getattr(module, order["track"].upper())
    changes = {step.name: step.change for step in track}
    config = train.Config(**order["base"])
    for name in order["applied"]:
        config = changes[name](config)
    return train.fit_to_ranks(config, order["world"], order["threads"])


def gradient_norms(run, norm: float) -> dict[str, float]:
    """Return each parameter's gradient norm in the last update.

    One norm of all gradients hides a small parameter that has none. Sharded
    gradients are added up over the ranks, so every rank has to call this.

    Args:
        run: from ``train.start``; gradients stay until the next update.
        norm: of all gradients before clipping, which is undone here.
    """
    squares, names = [], []
    for name, parameter in run.model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):  # FSDP: this rank's rows
            gradient = gradient.to_local()
        squares.append(torch.linalg.vector_norm(gradient.float()).square())
        names.append(name.removeprefix("module."))  # as DDP calls it
    squares = torch.stack(squares)
    if run.config.parallel == "fsdp":
        torch.distributed.all_reduce(squares)
    clip = run.config.clip
    clipped = max(1.0, (norm + 1e-6) / clip) if clip else 1.0
    norms = (squares.sqrt() * clipped).tolist()
    return dict(zip(names, norms, strict=True))


def updates(
    run, count: int, untimed: int = 0, gradients: bool = False
) -> dict:
    """Run ``untimed + count`` updates and return what each reported.

    Loader workers fill their queue while the other configuration has its
    turn; the updates that only empty it again say nothing about the speed.
    ``gradients`` adds each parameter's gradient norm, after the clock.
    """
    reports = []
    for _ in range(untimed + count):
        report = train.update(run)
        if gradients:
            norms = gradient_norms(run, report["grad_norm"])
            report["parameter_norms"] = norms
        reports.append(report)
    return {"updates": reports, "untimed": untimed}


def peak_rss() -> int | None:
    """Return this process's largest resident set so far, in bytes.

    Linux's ``ru_maxrss`` would do, but it begins with the parent's: exec
    does not reset it.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    with contextlib.suppress(ImportError):
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    return None


def tracked(run) -> dict:
    """Make one update and follow the CPU's allocations."""
    run.optimizer.zero_grad(set_to_none=True)
    resident = training_memory.resident_bytes(run.model, run.optimizer)
    return training_memory.measure_peak(lambda: train.update(run), resident)


def memory(run, trace: str | None) -> dict:
    """Measure one update's peak; on a CPU under the profiler.

    The optimizer state exists by now, so this is the steady state. Leaves
    the profile as a trace for the log's timeline.
    """
    device = torch.device(run.config.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train.update(run)
        torch.cuda.synchronize()
        peak = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        if trace:
            with torch.profiler.profile() as profile:
                train.update(run)
                torch.cuda.synchronize()
            profile.export_chrome_trace(trace)
    elif device.type == "cpu":
        before = peak_rss()
        # gloo frees what it copied unseen: among ranks, the lowest is right
        measured = min(
            (tracked(run) for _ in range(5 if run.rank.world > 1 else 1)),
            key=lambda found: found["peak_bytes"],
        )
        peak = {"tracked": measured["peak_bytes"], "rss": before}
        if trace:
            measured["profile"].export_chrome_trace(trace)
    else:
        train.update(run)
        peak = {"driver": torch.mps.driver_allocated_memory()}
    return {"peak_bytes": {k: v for k, v in peak.items() if v}}


def pilot(config: train.Config) -> dict:
    """Time forward and backward of one sequence, not compiled.

    Returns:
        The loss at the initial weights and the seconds of the second call.
    """
    config = dataclasses.replace(
        config,
        compile=False,
        micro_batch=1,
        sequences=1,
        workers=0,
        parallel="none",
    )
    run = train.start(config)
    device = torch.device(config.device)
    for _ in range(2):
        timers.synchronize(device)
        begin = time.perf_counter()
        loss = train.trial(run)
        timers.synchronize(device)
        seconds = time.perf_counter() - begin
    train.finish(run)
    return {"loss": loss, "seconds": seconds}


def failure(error: BaseException) -> dict:
    """Say what went wrong in one sentence, and of which kind it is."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    out_of_memory = isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or any(sign in str(error) for sign in signs)
    kind = "error"
    if out_of_memory:
        kind = "out-of-memory"
    elif isinstance(error, bench.Refusal):
        kind = "refusal"
    return {
        "error": kind,
        "text": f"{type(error).__name__}: {text[0]}"[:300]
        if kind == "error"
        else text[0][:300],
    }


def serve(folder: Path) -> None:
    """Carry out the commands in their order until ``stop``."""
    rank = int(os.environ.get("RANK", 0))
    run, number = None, 0
    while True:
        path = folder / f"command-{number}.json"
        while not path.exists():
            time.sleep(0.004)
        order = json.loads(path.read_text())
        reply = folder / f"reply-{number}-{rank}.json"
        number += 1
        try:
            if order["do"] == "stop":
                if run is not None:
                    train.finish(run)
                bench.write_atomic(reply, "{}")
                return
            if order["do"] == "start":
                if run is not None:
                    train.finish(run)
                    run = None
                    gc.collect()
                if "torch._dynamo" in sys.modules:
                    torch._dynamo.reset()  # what another model compiled
                run = train.start(configure(order))
                answer = {"config": train.as_dict(run.config)}
            elif order["do"] == "pilot":
                answer = pilot(configure(order))
            elif order["do"] == "updates":
                how = ("count", "untimed", "gradients")
                given = {name: order[name] for name in how if name in order}
                answer = updates(run, **given)
            elif order["do"] == "memory":
                trace = order["trace"] if rank == 0 else None
                answer = memory(run, trace)
            bench.write_atomic(reply, json.dumps(answer))
        except BaseException as error:
            bench.write_atomic(reply, json.dumps(failure(error)))
            return


def main(argv=None) -> None:
    """Serve the folder given on the command line."""
    ranks.end_with_launcher()  # or it would wait for ever for a dead ladder
    serve(Path((sys.argv[1:] if argv is None else argv)[0]))
    ranks.finish()


if __name__ == "__main__":
    main()
