"""4.3.4  Locating a bottleneck · 如何定位性能瓶頸

Question  Where does the time of a PyTorch program go, and which chapter has
          the cure?
Expect    where a batch takes longer than its step, most of the span is
          waiting for data; a loader that is quick is not accused
Run       python -m ch04_profiling.find_bottleneck [TRACE… | FOLDER]
          [--json] [--plot OUT.png] [--against OTHER] [--smoke] [--save]

TRACE is a Chrome trace of torch.profiler (.json, .json.gz, a .tar.gz of
ranks) or a folder of them, of this or older versions.  Without one, a small
program with a planted fault is profiled, and its cure.  In Python,
``find_bottleneck.profile(step)`` profiles and reads a step of your own.
"""

import io
import json
import os
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import torch

from ch04_profiling import event_names as names
from ch04_profiling import traces, verdicts
from common import bench

COLOURS = {
    "gemm": "#1b7837",
    "attention": "#5aae61",
    "optimizer": "#a6dba0",
    "elementwise": "#d9f0d3",
    "other_kernel": "#bdbdbd",
    "communication": "#762a83",
    "copy_h2d": "#2166ac",
    "copy_d2h": "#67a9cf",
    "copy_d2d": "#d1e5f0",
    "idle_loader": "#b2182b",
    "idle_sync": "#ef8a62",
    "idle_host": "#fddbc7",
    "idle_compilation": "#e08214",
    "idle_start_up": "#fdb863",
    "idle_unknown": "#f0f0f0",
}


# ---- reading -------------------------------------------------------------


def read(*paths):
    """Read traces and return their report, as ``--json`` prints it.

    Args:
        paths: files or folders; each rank is read, judged together.

    Returns:
        {"ranks": [...], "findings": [...], "warnings": [...]}: times in µs,
        shares and gains from 0 to 1 of the span.

    Raises:
        bench.Refusal: nothing there, or no trace.
    """
    return verdicts.judge(verdicts.number(traces.read(paths)))


def profile(step, steps=4, warm_up=2, path=None):
    """Profile ``step()`` and return the report of what bounds it.

    Args:
        step: called without arguments: one step of your program, its data
            loading included.
        steps: how many are recorded.
        warm_up: how many run before.
        path: where to keep the trace; by default nowhere.

    Returns:
        What ``read`` returns; of a step that does nothing the marks alone,
        of which no bottleneck can be told.

    Raises:
        Exception: whatever ``step`` raises, as it is; nothing is kept then.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it narrates
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(warm_up):
        step()
    _wait_for_devices()
    with torch.profiler.profile(activities=kinds, record_shapes=True) as run:
        for number in range(steps):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
        _wait_for_devices()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        run.export_chrome_trace(str(file))
        if path:
            bench.write_atomic(path, file.read_bytes())
        return read(file)


def _wait_for_devices():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- two recordings ------------------------------------------------------


def against(new, old):
    """Compare two recordings, per step (and per sample, if batches differ).

    Args:
        new: list of Rank of the recording to judge.
        old: of the one it is compared with.

    Returns:
        {"unit", "new_us", "old_us", "speed", "parts": {name: [old, new]},
        "cured", "appeared", "devices", "batches"}: µs of one unit, from
        the first event to the end of the last GPU work, mean over ranks;
        whether the files tell that batches are alike.
    """
    sides = [_one_side(new), _one_side(old)]
    unit, divisors = _unit(sides)
    us = [s["us"] / d for s, d in zip(sides, divisors, strict=True)]
    parts = {
        name: [
            sides[1]["parts"][name] / divisors[1],
            sides[0]["parts"][name] / divisors[0],
        ]
        for name in names.PARTS
    }
    kinds = [{f["kind"] for f in verdicts.several(r)} for r in (new, old)]
    return {
        "unit": unit,
        "new_us": us[0],
        "old_us": us[1],
        "speed": us[1] / us[0] if us[0] else None,
        "parts": parts,
        "cured": sorted(kinds[1] - kinds[0]),
        "appeared": sorted(kinds[0] - kinds[1]),
        "devices": [verdicts.device(r[0].trace) for r in (old, new)],
        "batches": all(side["batch"] or side["copied"] for side in sides),
    }


def _one_side(ranks):
    """Return what one recording did, as a mean over its ranks."""
    count, low = len(ranks), 0
    parts = dict.fromkeys(names.PARTS, 0.0)
    us = copied = 0.0
    steps = []
    for rank in ranks:
        high = rank.span
        if rank.account.on_gpu:
            high = rank.gpu_window()[1]
        us += (high - low) / 1e3 / count
        for name, ns in rank.account.parts_ns(low, high).items():
            parts[name] += ns / 1e3 / count
        row = verdicts.copies(rank).get("copy_h2d", {})
        copied += (row.get("bytes") or 0) / count
        steps.append(verdicts.steps_of(rank))
    batch = {rank.trace.batch for rank in ranks}
    return {
        "us": us,
        "parts": parts,
        "steps": min(steps),
        "copied": copied,
        "batch": batch.pop() if len(batch) == 1 else None,
    }


def _unit(sides):
    """Return the unit of comparison and how many of it each side did."""
    if not all(side["steps"] for side in sides):
        return "recording", [1, 1]
    steps = [side["steps"] for side in sides]
    batches = [side["batch"] for side in sides]
    if all(batches) and batches[0] != batches[1]:
        pairs = zip(steps, batches, strict=True)
        return "sample", [count * batch for count, batch in pairs]
    copied = [s["copied"] / s["steps"] for s in sides]
    if not all(batches) and all(copied):
        if abs(copied[0] / copied[1] - 1) > 0.05:
            return "MB copied to the GPU", [s["copied"] / 1e6 for s in sides]
    return "step", steps


# ---- showing -------------------------------------------------------------


def part_rows(report):
    """Return one row per part, one column per rank, in % of its span."""
    rows = []
    for name in names.PARTS:
        row = {"part": name.replace("_", " ")}
        shown = False
        for at, rank in enumerate(report["ranks"]):
            share = 100 * rank["parts"][name] / max(rank["span_us"], 1e-3)
            row[f"at{at}"] = f"{share:.1f}"
            hidden = rank["hidden"].get(name, 0)
            covered = 100 * hidden / max(rank["span_us"], 1e-3)
            if covered >= 0.1:
                row[f"at{at}"] += f" (+{covered:.1f})"
            shown |= share >= 0.05 or covered >= 0.1
        if shown:
            rows.append(row)
    return rows


GROUPS = {
    "computing": names.COMPUTE,
    "communication": ["communication"],
    "copies": names.COPIES,
    **{name: [name] for name in names.IDLE},
}


def rank_rows(report):
    """Return one row per rank, with the parts in groups, in %."""
    rows = []
    for rank in report["ranks"]:
        row = {"rank": rank["rank"], "span_s": rank["span_us"] / 1e6}
        for group, members in GROUPS.items():
            us = sum(rank["parts"][name] for name in members)
            row[group] = round(100 * us / max(rank["span_us"], 1e-3), 1)
        rows.append(row)
    return rows


def show(report, most=3):
    """Print a report: parts of each rank, findings, warnings."""
    ranks = report["ranks"]
    if len(ranks) > most:
        head = {"rank": "rank", "span_s": "span", "communication": "commun."}
        groups = {name: name.removeprefix("idle_") for name in GROUPS}
        print(bench.table(rank_rows(report), head | groups | head))
        print("parts in % of the span; exposed time, what is hidden: --json")
    else:
        head = {"part": "% of the span (+hidden)"}
        for at, rank in enumerate(ranks):
            head[f"at{at}"] = f"rank {rank['rank']}"
        print(bench.table(part_rows(report), head))
        for rank in ranks:
            device = rank["device"] or "no GPU named"
            line = (
                f"rank {rank['rank']}: {rank['span_us'] / 1e3:,.1f} ms, "
                f"marked steps: {len(rank['steps'])}, {device}, "
                f"{os.path.basename(rank['file'])}"
            )
            _wrapped(line, "")
    print()
    for finding in report["findings"]:
        gain = finding["gain_bound"]
        print(
            f"{finding['kind']} (rank {finding['rank']}): "
            f"{100 * finding['share_of_span']:.0f}% of the span, at most "
            f"{100 * gain:.0f}% to gain"
        )
        _wrapped(finding["evidence"])
        _wrapped(f"see {finding['section']}, {_script(finding['script'])}")
    if not report["findings"]:
        print("nothing notable found")
    for warning in report["warnings"]:
        _wrapped(f"{warning['kind']}: {warning['text']}", "note ")


def _script(name):
    """Say of a script that is not written yet that it is planned."""
    if (bench.ROOT / Path(*name.split("."))).with_suffix(".py").exists():
        return name
    return "in the book (its script is planned)"


def _plain(text):
    """Leave out what a file could make a terminal do."""
    return "".join(c if c.isprintable() else " " for c in text)


def _wrapped(text, first="  "):
    text = _plain(text)
    print(
        textwrap.fill(
            text, 98, initial_indent=first, subsequent_indent="     "
        )
    )


def show_against(found):
    """Print what changed between two recordings."""
    rows = [
        {
            "part": name.replace("_", " "),
            "old_s": old / 1e6,
            "new_s": new / 1e6,
            "change_s": (new - old) / 1e6,
        }
        for name, (old, new) in found["parts"].items()
        if max(old, new) > 0.002 * max(found["new_us"], found["old_us"])
    ]
    rows.sort(key=lambda row: -abs(row["change_s"]))
    head = {"part": "part", "old_s": "old", "new_s": "new"}
    head["change_s"] = "change"
    print(bench.table(rows, head, f"\nper {found['unit']}, old → new"))
    speed = found["speed"]
    if speed:
        print(
            f"\none {found['unit']}: {found['old_us'] / 1e3:,.3f} → "
            f"{found['new_us'] / 1e3:,.3f} ms, {speed:.3f}× the speed"
        )
    if found["unit"] == "step" and not found["batches"]:
        _wrapped("batch sizes are not in the files: steps are compared", "")
    devices = found["devices"]
    if all(devices) and devices[0] != devices[1]:
        _wrapped(
            f"the devices differ, {devices[0]} → {devices[1]}: times and "
            "findings are theirs as much as the program's",
            "",
        )
    # a wait also disappears behind work that takes longer
    slower = speed and speed < 1
    words = {"cured": "no longer found" if slower else "cured"}
    for word in ("cured", "appeared"):
        if found[word]:
            print(f"{words.get(word, word)}: {', '.join(found[word])}")


def starts_ms(ranks):
    """Return when each recording begins, in ms after the earliest one.

    By the recorders' clocks; where these have no moment in common, the
    ranks cannot be set against each other and all begin at 0.
    """
    begins = np.array([rank.trace.base_us for rank in ranks]) / 1e3
    ends = begins + [rank.span / 1e6 for rank in ranks]
    if begins.max() >= ends.min():
        return np.zeros(len(ranks)), False
    return begins - begins.min(), True


def plot(ranks, path):
    """Draw each rank's time from left to right, coloured by its owner."""
    import matplotlib.pyplot as plt

    ranks = ranks[:16]
    begins, aligned = starts_ms(ranks)
    last = max(b + r.span / 1e6 for b, r in zip(begins, ranks, strict=True))
    figure, axes = plt.subplots(
        len(ranks),
        1,
        figsize=(11, 1.4 + 1.3 * len(ranks)),
        squeeze=False,
        layout="constrained",
    )
    seen = set()
    for axis, rank, begin in zip(axes[:, 0], ranks, begins, strict=True):
        columns = np.linspace(0, rank.span, 501).astype(np.int64)
        table = shares_over_time(rank.account, columns)
        x = begin + (columns[:-1] + columns[1:]) / 2e6
        seen |= set(np.flatnonzero(table.sum(axis=1)).tolist())
        axis.stackplot(
            x, table, colors=[COLOURS[name] for name in names.PARTS]
        )
        axis.set(
            ylabel=f"rank {rank.number}",
            xlim=(0, last),
            ylim=(0, 1),
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.axvspan(begin, begin + rank.span / 1e6, fc="none", ec="k", lw=0.8)
    label = "ms into the trace"
    if len(ranks) > 1:
        label = "ms after the first event of any rank, by their clocks"
        if not aligned:
            label = "ms into each trace (their clocks have no time in common)"
    axes[-1, 0].set_xlabel(label)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=COLOURS[names.PARTS[code]])
        for code in sorted(seen)
    ]
    labels = [names.PARTS[code].replace("_", " ") for code in sorted(seen)]
    figure.legend(
        handles, labels, ncols=5, loc="outside upper center", fontsize=8
    )
    kind, drawn = Path(path).suffix[1:] or "png", io.BytesIO()
    try:
        figure.savefig(drawn, format=kind, dpi=120)
    except ValueError as error:
        raise bench.Refusal(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
    try:
        bench.write_atomic(path, drawn.getvalue())
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise bench.Refusal(f"--plot {path}: {why}") from None


def shares_over_time(account, columns):
    """Return each part's share (parts, columns - 1) of equal time slices."""
    edges = np.union1d(account.bounds, columns)
    owner = account.owner[
        np.clip(
            np.searchsorted(account.bounds, edges[:-1], side="right") - 1,
            0,
            len(account.owner) - 1,
        )
    ]
    place = np.searchsorted(columns, edges[:-1], side="right") - 1
    place = np.clip(place, 0, len(columns) - 2)
    table = np.zeros((len(names.PARTS), len(columns) - 1))
    np.add.at(table, (owner, place), np.diff(edges))
    return table / np.maximum(np.diff(columns), 1)


# ---- the lesson: a planted fault and its cure ----------------------------


class Photographs(torch.utils.data.Dataset):
    """Items that take a given time to make, as reading and decoding does."""

    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError
        if self.seconds:  # sleep(0) would hand the core to a neighbour
            time.sleep(self.seconds)
        return torch.full((256,), float(index))


def training_step(seconds, device, items=4, calls=12, workers=0):
    """Return a step that loads ``items`` samples and trains on them."""
    data = Photographs(items * calls, seconds)
    loader = torch.utils.data.DataLoader(
        data, batch_size=items, num_workers=workers
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(loader)

    def step():
        inputs = next(batches).to(device)
        model(inputs.repeat(16, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lesson(args):
    """Profile a step with a slow loader, and one with a quick loader."""
    wait_s = 0.01 if args.smoke else 0.03
    rows = []
    for name, seconds in (("slow loader", wait_s), ("quick loader", 0.0)):
        report = profile(training_step(seconds, args.device), steps=4)
        (rank,) = report["ranks"]
        loader = rank["parts"]["idle_loader"] / rank["span_us"]
        rows.append(
            {
                "name": name,
                "loader_percent": round(100 * loader, 1),
                "findings": ", ".join(f["kind"] for f in report["findings"]),
                "gain_bound": max(
                    (f["gain_bound"] for f in report["findings"]), default=0
                ),
                "span_s": rank["span_us"] / 1e6,
            }
        )
    return bench.report(args, rows)


# ---- command line --------------------------------------------------------


def _flags(parser):
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--plot", metavar="PNG", help="draw the timelines")
    parser.add_argument(
        "--against", metavar="OTHER", help="what changed since this recording"
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, add=_flags)
    if not args.traces:
        for flag in ("json", "plot", "against"):
            if getattr(args, flag):
                raise bench.Refusal(f"--{flag} needs a trace to read")
        return lesson(args)
    if args.save:
        raise bench.Refusal(
            "--save keeps the lesson's rows; to keep a reading of a trace "
            "redirect --json into a file"
        )
    if args.plot and not os.path.isdir(os.path.dirname(args.plot) or "."):
        raise bench.Refusal(f"--plot {args.plot}: there is no such folder")
    ranks = verdicts.number(traces.read(args.traces))
    report = verdicts.judge(ranks)
    if args.against:
        old = verdicts.number(traces.read([args.against]))
        report["against"] = against(ranks, old)
    if args.plot:
        plot(ranks, args.plot)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
        return report["findings"]
    show(report)
    if args.against:
        show_against(report["against"])
    if args.plot:
        print(f"drawn in {args.plot}")
    return report["findings"]


if __name__ == "__main__":
    bench.run(main)
