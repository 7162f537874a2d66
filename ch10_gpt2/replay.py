"""Show a recorded log piece by piece, for chapter 10's notebook.

Nothing is timed here: every speed is the record's, from ``results/`` beside
this file or from a log.json of your own.
"""

import json
import tempfile
import textwrap
from pathlib import Path

from ch10_gpt2 import log, predictions, train
from common import bench, machine, notebook, tables

MIB = 2**20
SCRIPT = "ch10_gpt2.ladder"


def load(path=None):
    """Return a log: the newest record, or a log.json that you name.

    A log has rows, machine, peaks, model, preset and final, as log.json
    (``ch10_gpt2.log``), and ``old``, what to say of its age.
    """
    if path is not None:
        try:
            return json.loads(Path(path).read_text("utf-8")) | {"old": ""}
        except (OSError, ValueError) as error:
            raise bench.Refusal(f"{path}: not a log.json ({error})") from None
    for found in notebook.records(SCRIPT).values():
        current = bench.is_current(found, SCRIPT)
        return found | {"old": "" if current else ", an older version"}
    raise bench.Refusal("there is no record yet; `make log` writes a log.json")


def about(found):
    """Print where, when and by what a log was made."""
    print(machine.line(found["machine"]))
    when, source = found.get("when", ""), found.get("source", {})
    commit = source.get("commit", "")[:7]
    made = [when and f"recorded {when[:10]}", commit and f"commit {commit}"]
    print(" · ".join([found["preset"], *filter(None, made)]) + found["old"])


def model(found):
    """Print 10.1's table: parameters, FLOPs and bytes by component."""
    facts = found["model"]
    title = f"{found['preset']}, T = {facts['T']}"
    print(tables.table(log.model_rows(facts), title=title))


def ceilings(found):
    """Print 10.2's table: the machine, and what it can do at best."""
    rows = log.machine_rows(found["machine"], found["peaks"])
    print(tables.table(rows, ["what", "value"]))


def of(found, section):
    """Return the rows of a section; some have two, some none."""
    return [row for row in found["rows"] if row["section"] == section]


def section(found, number):
    """Print what a section's steps changed, promised and brought."""
    rows = of(found, number)
    if not rows:
        print(f"no step of {number} in this log")
    for row in rows:
        print(f"{row['step']}: {row['verdict']}")
        for name, fact in facts(row, _before(found, row)).items():
            if fact:
                print(_wrapped(name, fact))


def facts(row, before):
    """Return what there is to say of a row, in the order of asking.

    ``before`` is the row kept before it, or None.
    """
    said = {"change": _change(before and before["config"], row["config"])}
    held = log.outcome(row)
    said["predicted"] = row["predicted"] + (f"; {held}" if held else "")
    said["measured"] = log.speed(row)
    kinds = row["peak_bytes"].items()
    said["peak"] = ", ".join(f"{k} {n / MIB:,.1f} MiB" for k, n in kinds)
    if row["ratio_previous"]:
        first = row["step"] == "summary"
        said["speed"] = f"{row['ratio_previous']:.2f}× the "
        said["speed"] += "first row" if first else "row kept before"
        if row["ratio_interval"]:
            said["speed"] += f", interval {log.interval(row)}"
    if row["agreement"]:
        a = row["agreement"]
        said["losses"] = (
            f"{len(row['losses'])} updates, {a['worst']:.1e} apart; "
            f"declared {a['declared']} (at most {a['tolerance']:g})"
        )
    return said | {"reason": row["reason"]}


def _before(found, row):
    """Return the row that a row ran against, or None: a summary the first."""
    before = None
    for other in found["rows"]:
        if other is row:
            break
        if other["track"] == row["track"] and other["verdict"] == "kept":
            before = other
            if row["step"] == "summary":
                break
    return before


def _change(before, after):
    if not before or not after:
        return ""
    return ", ".join(
        f"{name} {before.get(name)} → {value}"
        for name, value in after.items()
        if value != before.get(name)
    )


def _wrapped(name, fact):
    return textwrap.fill(
        f"  {name:11}{fact}", tables.WIDTH, subsequent_indent=" " * 13
    )


def track(found, name):
    """Print the table of a whole track, "memory" or "speed"."""
    rows = [row for row in found["rows"] if row["track"] == name]
    memory = name == "memory"
    columns = ["§", "step", "predicted", "peak MiB", "tok/s", "× previous"]
    columns += ["× first", "verdict"]
    columns.remove("× first" if memory else "peak MiB")  # too wide
    lines = log.steps_rows(rows, memory)
    for line in lines:
        line["verdict"] = line["verdict"].replace("not-applicable", "n/a")
    print(tables.table(lines, columns, title=found["preset"]))
    print(textwrap.fill(f"{log.tally(rows)} {log.HELD}", tables.WIDTH))


def drawn(draw, *args):
    """Display a picture that one of ``ch10_gpt2.log``'s functions draws."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        if draw(*args, path):
            notebook.picture(path)
        else:
            few = "This log has too few rows for the picture."
            print(log.cannot_draw() or few)


def speed(found):
    """Display every step's speed against the baseline."""
    drawn(log.draw_speed, found["rows"], log.model_and_machine(found))


def losses(found):
    """Display how far each step's losses are from the baseline's."""
    drawn(log.draw_losses, found["rows"], log.model_and_machine(found))


def memory(found):
    """Display the peak bytes by category of each memory step."""
    bars = [
        (f"{row['section']} {row['step']}", row["categories"])
        for row in found["rows"]
        if row["track"] == "memory" and row["categories"]
    ]
    drawn(log.draw_memory, bars, f"{found['preset']}, by category")


def book_memory():
    """Display the same steps, predicted for the book's own model."""
    record = predictions.load()
    cases = record["cases"]
    names = predictions.case_rows(record)
    bars = [
        (f"{name['§']} {name['step']}", case["bytes"])
        for name, case in zip(names, cases, strict=True)
    ]
    drawn(log.draw_memory, bars, f"Predicted: {cases[0]['case']}")


def pictured(found, number):
    """Display a section's recorded timeline, or bars of before and after."""
    rows = [row for row in of(found, number) if row["tokens_per_s"]]
    if not rows:
        print(f"{number}: did not run on this machine, nothing to draw")
        return
    if missing := log.cannot_draw():
        print(missing)
        return
    folder = Path(log.__file__).parent / "results" / found["machine"]["id"]
    last = rows[-1]
    name = f"timeline-{last['track']}-{number}-{last['step']}.png"
    if (folder / name).exists():
        notebook.picture(folder / name)
        return
    value = "peak_bytes" if last["track"] == "memory" else "tokens_per_s"
    bars = [bar for row in rows for bar in _pair(found, row)]
    title = rows[0]["title"]
    if len(rows) == 1:  # else a panel for each
        title = bars[0]["title"]
        bars = [{k: v for k, v in b.items() if k != "title"} for b in bars]
    notebook.plot(bars, value, f"{title} · {rows[0]['title_zh']}")


def _pair(found, row):
    """Return a row's opponent and the row, as they ran in the same turns.

    The opponent's own race was at another time, on a machine that has
    changed its speed since.
    """
    before, title = _before(found, row), row["title"]
    if row["track"] == "speed" and row["ratio_previous"]:
        title += f": {row['ratio_previous']:.2f}× {log.interval(row)}".rstrip()
    sides = [(row, row["tokens_per_s"])]
    if before:
        sides.insert(0, (before, row.get("previous_tokens_per_s")))
    return [
        {
            "name": side["step"],
            "title": title,
            "tokens_per_s": speed,
            "peak_bytes": (log.main_peak(side) or [None, None])[1],
        }
        for side, speed in sides
    ]


def alike(config, *changes, updates=2):
    """Train a little before and after each change, and lay losses together.

    Prints a table and returns its rows. The times are of a few small updates
    of a process that has just started: only the losses mean something.
    """
    rows = []
    for name, tried in {
        "as it was": config,
        **{change.__name__: change(config) for change in changes},
    }.items():
        run = train.start(tried)
        losses = [train.update(run)["loss"] for _ in range(updates)]
        train.finish(run)
        first = rows[0]["losses"] if rows else losses
        apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        rows.append({"name": name, "losses": losses, "apart": apart})
    print(
        tables.table(
            [
                {
                    "configuration": row["name"],
                    "losses": ", ".join(f"{x:.5f}" for x in row["losses"]),
                    "apart": f"{row['apart']:.1e}",
                }
                for row in rows
            ]
        )
    )
    return rows
