"""Save a training and go on with it: on other ranks, other devices.

What the next update depends on is in one file: weights, AdamW's averages, the
loss scale, random states and two numbers, updates and place in the data.
"""

import contextlib
import importlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from ch10_gpt2.config import as_dict
from common import seeding
from common.bench import Refusal

# these may differ when training goes on: other ways to the same numbers, or
# where things are
FREE = {
    *("data", "device", "micro_batch", "attention", "loss", "recompute"),
    *("optimizer", "tokens", "workers", "transfer", "compile", "allocator"),
    *("parallel", "threads", "steps", "evaluate_every", "evaluate_batches"),
    *("save_every", "out", "resume"),
}


def checkpoint_library():
    """Import late what costs a second and only checkpoints need."""
    return importlib.import_module("torch.distributed.checkpoint.state_dict")


def save_checkpoint(run) -> None:
    """Write all that the next update depends on, whole or not at all.

    The tensors are gathered on rank 0 under the plain model's names, so any
    number of ranks can load them, whatever they wrap around the model.

    Raises:
        Refusal: the folder cannot be written, or the disk is full.
    """
    dcp = checkpoint_library()
    model, optimizer = dcp.get_state_dict(
        run.model,
        run.optimizer,
        options=dcp.StateDictOptions(full_state_dict=True, cpu_offload=True),
    )
    random = [seeding.rng_state()]
    if run.rank.world > 1:
        random = [None] * run.rank.world
        dist.all_gather_object(random, seeding.rng_state())
    if run.rank.rank:
        return
    path = Path(run.config.out) / "checkpoint.pt"
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            torch.save(
                {
                    "config": as_dict(run.config),
                    "windows": len(run.windows),
                    "updates": run.updates,
                    "position": run.position,
                    "model": model,
                    "optimizer": optimizer,
                    "scaler": run.scaler.state_dict(),
                    "random": random,
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch's writer: RuntimeError
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise Refusal(
            f"cannot write {path}: {str(error).splitlines()[0]}; the last "
            "whole checkpoint, if there is one, is kept"
        ) from error


def refuse_used(out: str) -> None:
    """Refuse to begin anew where a training's checkpoint lies.

    Raises:
        Refusal: there is one.
    """
    path = Path(out) / "checkpoint.pt"
    if path.exists():
        raise Refusal(
            f"--out {out} holds a training: add --resume to go on with it, "
            f"name another folder, or remove {path}"
        )


def load_checkpoint(run) -> None:
    """Put everything back, whatever the number of ranks was.

    Raises:
        Refusal: no checkpoint, a damaged one, or one of another training.
    """
    path = Path(run.config.out) / "checkpoint.pt"
    if not path.exists():
        raise Refusal(f"--resume: there is no {path}; leave --resume away")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        before = saved["config"]
    except Exception as error:  # zip, pickle, key: all mean the same
        raise Refusal(
            f"{path} is damaged or no checkpoint of this program "
            f"({type(error).__name__}); leave --resume away or name another "
            "--out"
        ) from error
    now = as_dict(run.config) | {"windows": len(run.windows)}
    before["windows"] = saved["windows"]
    other = [
        f"{name} {before.get(name)} (now {now[name]})"
        for name in now
        if name not in FREE and before.get(name) != now[name]
    ]
    if other:
        raise Refusal(f"{path} is of another training: {', '.join(other)}")
    # the file's way to walk would win, and AdamW loads its step counts onto
    # the CPU for a loop, onto the device for the fused kernel
    way = {how: run.optimizer.defaults[how] for how in ("foreach", "fused")}
    for group in saved["optimizer"]["param_groups"]:
        group.update(way)
    dcp = checkpoint_library()
    dcp.set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=dcp.StateDictOptions(full_state_dict=True),
    )
    run.scaler.load_state_dict(saved["scaler"])
    run.updates, run.position = saved["updates"], saved["position"]
    if run.rank.rank < len(saved["random"]):  # more ranks: seeded by start
        seeding.restore_rng(saved["random"][run.rank.rank])
