"""Where the trainer's numbers go: a bar or lines, JSON lines, TensorBoard."""

import contextlib
import json
import math
from pathlib import Path

import torch

from common import bench, machine


def throughput(rows: list[dict]) -> float:
    """Return tokens/s: of the updates only, whatever happened in between."""
    rows = rows[1:] or rows  # the first one warms up, and may compile
    return sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows)


def peak_flops(run) -> tuple[float | None, str]:
    """Return FLOP/s of all ranks at best, and where the figure is from."""
    precision, world = run.config.precision, run.rank.world
    if run.device.type == "cuda":
        name = torch.cuda.get_device_name(run.device)
        peak = machine.published_peak(name, precision)
        return peak and peak * world, f"{name}'s published dense peak"
    if run.device.type == "cpu" and world == 1:  # ranks would share cores
        peak = machine.peaks("cpu")["gemm_flops"].get(precision)
        return peak, f"the {precision} GEMM rate measured here"
    return None, ""


def utilisation(rate: float, flops: float, peak: float | None) -> str:
    """Return the MFU: tokens/s x FLOPs per token / peak, never a guess."""
    return f"{rate * flops / peak:.1%}" if peak else "n/a"


class Metrics:
    """Rank 0's progress bar and, in a folder, metrics.jsonl and curves.

    A resumed training first drops the lines of updates that came after the
    checkpoint, which a kill may also have left half-written.
    """

    def __init__(self, run):
        config = run.config
        self.speaks = run.rank.rank == 0
        self.every = max(1, config.steps // 200)  # lines, where no bar is
        self.bar = self.file = self.curves = None
        if not self.speaks:
            return
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            self.bar = tqdm(
                total=config.steps,
                initial=run.updates,
                unit="update",
                disable=None,  # where stderr is not a terminal
            )
        if config.out:
            try:
                self.open(run, Path(config.out))
            except OSError as error:
                raise bench.Refusal(
                    f"--out {config.out}: cannot write there "
                    f"({error.strerror}); name another folder"
                ) from error

    def open(self, run, folder: Path) -> None:
        """Open the files of a folder, which is made if need be."""
        path, kept = folder / "metrics.jsonl", []
        if run.config.resume and path.exists():
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept = [
                line
                for line in lines
                if line.endswith("\n")
                and json.loads(line)["position"] <= run.position
            ]
        bench.write_atomic(path, "".join(kept))
        self.file = open(path, "a", encoding="utf-8", buffering=1)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(
                str(folder / "tensorboard"), purge_step=run.position
            )
        except ImportError:
            self.say("no TensorBoard curves: pip install tensorboard")

    def say(self, line: str) -> None:
        """Print a line without tearing the bar."""
        if self.bar is not None:
            self.bar.write(line)
        elif self.speaks:
            print(line, flush=True)

    def update(self, row: dict, words: str) -> None:
        """Keep an update's row and show it."""
        self.keep(row)
        if self.bar is not None and not self.bar.disable:
            self.bar.update(row["update"] - self.bar.n)
            self.bar.set_postfix_str(words)
        elif row["update"] % self.every == 0:
            self.say(f"update {row['update']}: {words}")

    def keep(self, row: dict) -> None:
        """Write a row to the file and the curves; JSON has no infinity."""
        row = {
            name: value if math.isfinite(value) else None
            for name, value in row.items()
        }
        if self.file:
            self.file.write(json.dumps(row) + "\n")
        if self.curves:
            for name, value in row.items():
                if value is not None:
                    self.curves.add_scalar(name, value, row["position"])

    def close(self) -> None:
        """Close what is open."""
        for thing in (self.bar, self.file, self.curves):
            if thing is not None:
                thing.close()
