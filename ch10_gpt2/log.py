"""LOG.md and its pictures, written from log.json and nothing else.

A record is a log.json among others: it is written from that as well, but for
the timelines, whose traces are not kept.

Run       python -m ch10_gpt2.log FOLDER     (a log's, or a record's)
"""

import gzip
import importlib.util
import json
import os
import re
import sys
import textwrap
import zlib
from pathlib import Path

from ch10_gpt2 import predictions
from common import bench, gpt, machine, tables

SCRIPT = "ch10_gpt2.ladder"  # whose record a log is
# What reading a file raises that is not what it should be
DAMAGED = AttributeError, IndexError, KeyError, TypeError, ValueError
MIB = 2**20
CATEGORIES = {  # one colour each in every memory picture
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer": "#55a868",
    "activations": "#c44e52",
    "temporary": "#8172b3",
    "gathered": "#64b5cd",
    "other": "#937860",
}
VERDICT_COLOURS = {
    "kept": "#55a868",
    "reverted": "#c8c8c8",
    "failed": "#c44e52",
}
KINDS = {  # of an operator or kernel: a pattern of its name, in lower case
    "optimizer": r"adam|foreach|optimizer|multi_tensor",
    "loss": r"nll|cross_?entropy|log_?softmax|\b_inplace",
    "communication": r"nccl|gloo|all_?reduce|all_?gather|reduce_scatter",
    "other": r"triton_(poi|per|red|fused)",
    "attention": r"attention|flash|softmax|fmha",
    "matrix product": r"(?<![a-z])(add|b|baddb|scaled_)?mm(?![a-z])|mmbackward"
    r"|matmul|gemm|linear|cublas|cutlass|nvjet",
    "embedding": r"embedding",
    "copy": r"memcpy|copy_|to_?copy|sizes_copy|chunk_cat|aten::to$",
}
KIND_COLOURS = {
    "matrix product": "#4c72b0",
    "attention": "#c44e52",
    "loss": "#dd8452",
    "embedding": "#937860",
    "optimizer": "#55a868",
    "communication": "#8172b3",
    "copy": "#64b5cd",
    "other": "#c8c8c8",
}


# --- cards --------------------------------------------------------------


def model_facts(config: gpt.GPTConfig, T: int) -> dict:
    """Return parameters, FLOPs and activation bytes per component (10.1)."""
    return {
        "config": gpt.as_dict(config),
        "T": T,
        "parameters": gpt.parameter_counts(config),
        "flops_per_token": gpt.flops_by_component(config, T),
        "flops_per_token_causal": gpt.flops_per_token(config, T, causal=True),
        "activation_bytes": gpt.activation_bytes(config, 1, T),
    }


def model_rows(facts: dict) -> list[dict]:
    """Return 10.1's table, every value as it is written."""
    return [
        {
            "component": name,
            "parameters": count,
            "share": f"{count / facts['parameters']['total']:.1%}",
            "FLOPs per token": f"{facts['flops_per_token'][name]:,.0f}",
            "kept per sequence": tables.cell(
                facts["activation_bytes"][name], "bytes"
            ),
        }
        for name, count in facts["parameters"].items()
    ]


def model_card(name: str, T: int) -> str:
    """Describe a preset per component, counted on the meta device too."""
    import torch

    config = gpt.preset(name)
    facts = model_facts(config, T)
    with torch.device("meta"):
        model = gpt.GPT(config)
    counted = sum(p.numel() for p in model.parameters())
    if counted != facts["parameters"]["total"]:
        raise AssertionError(
            f"formula {facts['parameters']['total']}, counted {counted}"
        )
    return (
        tables.table(model_rows(facts), title=f"{name}, T = {T}")
        + f"\n{counted:,} parameters by formula and counted in the model; "
        "kept: float32, plain attention\n"
        "FLOPs per trained token 6 N + 12 L C T; attention counted causal: "
        f"{facts['flops_per_token_causal']:,.0f}"
    )


def machine_card(device) -> str:
    """Describe the machine and its measured ceilings (10.2)."""
    card = machine.card(device)
    rows = machine_rows(card, machine.peaks(device))
    return machine.line(card) + "\n" + tables.table(rows, ["what", "value"])


def machine_rows(card: dict, peaks: dict) -> list[dict]:
    """Return 10.2's table, every value as it is written."""
    gpu = card.get("gpu") or {}
    rows = [
        {"what": key, "value": card.get(key)}
        for key in ("cpu", "cores", "threads", "governor", "memory_gib", "os")
    ]
    rows += [{"what": f"GPU {k}", "value": v} for k, v in gpu.items()]
    rows += [
        {"what": key, "value": card.get(key)} for key in ("python", "torch")
    ]
    rows += [
        {"what": f"GEMM {dtype}", "value": tables.cell(rate, "_flops")}
        for dtype, rate in peaks["gemm_flops"].items()
    ]
    for name in ("copy", "triad", "host_to_device"):
        rate = peaks.get(f"{name}_bytes_per_s")
        if rate:
            rows.append(
                {
                    "what": name.replace("_", " "),
                    "value": tables.cell(rate, "_bytes_per_s"),
                }
            )
    return [r for r in rows if r["value"] not in (None, "", [])]


# --- pictures -------------------------------------------------------------


def cannot_draw() -> str | None:
    """Say why there are no pictures; a log is worth having without them."""
    if importlib.util.find_spec("matplotlib") is None:
        return "No pictures: matplotlib is not installed."
    return None


def _figure(width: float, height: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure, path: Path) -> str:
    beside = path.with_suffix(f".{os.getpid()}")
    figure.savefig(beside, dpi=110, format="png")
    beside.replace(path)
    return path.name


def _of(rows: list[dict], track: str) -> list[dict]:
    return [r for r in rows if r["track"] == track]


def model_and_machine(data: dict) -> str:
    """Name what every picture of a log is of."""
    return f"{data['preset']} · {machine.line(data['machine'])}"


def draw_speed(rows: list[dict], about: str, path: Path) -> str | None:
    """Draw each step's speed against the baseline, the reverted ones grey."""
    rows = [r for r in _of(rows, "speed") if r["ratio_first"]]
    if len(rows) < 2 or cannot_draw():
        return None
    figure, axes = _figure(9, 0.36 * len(rows) + 1.3)
    for i, row in enumerate(rows):
        colour = VERDICT_COLOURS[row["verdict"]]
        axes.barh(i, row["ratio_first"], color=colour, height=0.7)
        label = f" {row['ratio_first']:.2f}×"
        if row["step"] != "summary" and row["ratio_previous"]:
            label += f"   (×{_ratio(row)})"
        axes.text(row["ratio_first"], i, label, va="center", fontsize=8)
    names = [f"{r['section']}  {r['step']}" for r in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 1.5 * max(r["ratio_first"] for r in rows))
    axes.set_xlabel(
        "speed / speed of the baseline (in brackets: against the row kept "
        "before, with its interval: 99% where no other level is written)",
        fontsize=8,
    )
    axes.set_title(
        f"Speed track: green kept, grey reverted\n{about}", fontsize=9
    )
    return _save(figure, path)


def draw_memory(bars: list[tuple[str, dict]], title: str, path: Path):
    """Draw stacked bars of peak bytes by category.

    Args:
        bars: (label, {category: bytes}) from top to bottom.
        title: what is shown.
        path: the PNG.
    """
    if not bars or cannot_draw():
        return None
    figure, axes = _figure(9, 0.42 * len(bars) + 1.6)
    most = max(sum(parts.values()) for _, parts in bars)
    seen = {c for _, parts in bars for c in parts if parts[c] > most / 500}
    order = [c for c in CATEGORIES if c in seen]
    order += sorted(seen - set(order))
    unit, name = (2**30, "GiB") if most > 4 * 2**30 else (MIB, "MiB")
    for i, (_, parts) in enumerate(bars):
        left = 0.0
        for category in order:
            size = parts.get(category, 0) / unit
            axes.barh(
                i,
                size,
                left=left,
                height=0.7,
                color=CATEGORIES.get(category, "#bbbbbb"),
                label=category if i == 0 else None,
            )
            left += size
        axes.text(left, i, f" {left:,.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [b[0] for b in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * most / unit)
    axes.set_xlabel(f"{name} at the peak of an update, per rank", fontsize=8)
    figure.legend(fontsize=7, ncols=6, loc="outside lower center")
    axes.set_title(title, fontsize=10)
    return _save(figure, path)


BIT = 1e-9  # drawn where the distance is nothing: a logarithm has no zero


def distance(loss: float, other: float) -> float:
    """Return how far apart two losses are; a loss that is no number is far.

    It is left out of the drawing, and not drawn as equal.
    """
    apart = abs(loss / other - 1)
    return BIT if apart < BIT else apart


def draw_losses(rows: list[dict], about: str, path: Path) -> str | None:
    """Draw how far each step's losses are from its track's baseline."""
    rows = [r for r in rows if len(r["losses"]) > 1]
    if not rows or cannot_draw():
        return None
    first: dict[str, list] = {}
    curves: dict[tuple, list[str]] = {}  # those that are equal, once
    for row in rows:
        known = first.setdefault(row["track"], row["losses"])
        pairs = zip(row["losses"], known, strict=False)
        apart = tuple(distance(a, b) for a, b in pairs)
        name = f"{row['section']} {row['step']}"
        curves.setdefault(apart, []).append(name)
    figure, axes = _figure(9, 3.6 + 0.25 * len(curves))
    for i, (apart, names) in enumerate(curves.items()):
        axes.plot(
            range(1, len(apart) + 1),
            apart,
            marker="o+x^vs*Dd1234"[i % 13],
            markersize=5,
            linewidth=0.8,
            label=textwrap.fill(", ".join(names), 110),
        )
    declared = [r["agreement"] for r in rows if r["agreement"]]
    for name, limit in {
        a["declared"]: a["tolerance"] for a in declared
    }.items():
        if limit:
            axes.axhline(limit, color="black", linewidth=0.8)
            axes.text(1, limit, f"declared: {name}", va="bottom", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(bottom=BIT / 5)
    axes.text(1, BIT / 3, "equal bit for bit", fontsize=7)
    axes.set_xlabel("optimizer update")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("|loss / the baseline's - 1|")
    axes.set_title(
        f"How far the losses are from their track's baseline\n{about}",
        fontsize=9,
    )
    figure.legend(fontsize=7, loc="outside lower left")
    return _save(figure, path)


def kind_of(name: str) -> str:
    """Return the kind of work that an operator's or kernel's name tells."""
    name = name.lower()
    for kind, pattern in KINDS.items():
        if re.search(pattern, name):
            return kind
    return "other"


def read_intervals(trace: Path) -> dict[str, list[tuple]]:
    """Read a Chrome trace's outermost operators, and all GPU kernels.

    Returns:
        per thread or stream (start µs, duration µs, name), by start.
    """
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    lanes: dict[str, list[tuple]] = {}
    steps = [
        (event["tid"], event["ts"], event["ts"] + event.get("dur", 0))
        for event in events
        if event.get("name", "").startswith("Optimizer.step")
        and event.get("cat") == "user_annotation"
    ]
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat", ""), event["name"]
        if kind == "cpu_op":
            lane = f"thread {event['tid']}"
            for tid, begin, end in steps:
                if event["tid"] == tid and begin <= event["ts"] < end:
                    name = f"optimizer: {name}"  # a root tells nothing itself
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            lane = f"stream {event['tid']}"
        else:
            continue
        lanes.setdefault(lane, []).append(
            (event["ts"], event.get("dur", 0), name)
        )
    outermost = {}
    for lane, found in lanes.items():
        found.sort(key=lambda e: (e[0], -e[1]))
        kept, end = [], float("-inf")
        for start, duration, name in found:
            if start >= end:
                kept.append((start, duration, name))
                end = start + duration
        outermost[lane] = kept
    return outermost


def draw_timeline(trace: Path, title: str, path: Path) -> str | None:
    """Draw one update: a lane per thread or stream, coloured by kind."""
    if cannot_draw():
        return None
    lanes = read_intervals(trace)
    lanes = {k: v for k, v in lanes.items() if sum(e[1] for e in v) > 0}
    if not lanes:
        return None
    busiest = sorted(lanes, key=lambda k: -sum(e[1] for e in lanes[k]))[:4]
    begin = min(lanes[k][0][0] for k in busiest)
    figure, axes = _figure(10, 0.45 * len(busiest) + 1.5)
    totals = dict.fromkeys(KIND_COLOURS, 0.0)
    for i, lane in enumerate(busiest):
        for kind, colour in KIND_COLOURS.items():
            spans = [
                ((start - begin) / 1e3, duration / 1e3)
                for start, duration, name in lanes[lane]
                if kind_of(name) == kind
            ]
            totals[kind] += sum(s[1] for s in spans)
            axes.broken_barh(spans, (i - 0.4, 0.8), color=colour, linewidth=0)
    for kind, colour in KIND_COLOURS.items():
        if totals[kind]:
            label = f"{kind} {totals[kind]:.0f} ms"
            axes.barh(0, 0, color=colour, label=label)
    axes.set_yticks(range(len(busiest)), busiest, fontsize=7)
    axes.set_xlabel("ms, under the profiler", fontsize=8)
    axes.set_title(title, fontsize=9)
    figure.legend(fontsize=7, ncols=7, loc="outside lower center")
    return _save(figure, path)


# --- the page ---------------------------------------------------------------


def _markdown(headings: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(headings) + " |"]
    lines.append("|" + "|".join(" --- " for _ in headings) + "|")
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def main_peak(row: dict) -> tuple[str, int] | None:
    """Return the kind and bytes of the peak that decides."""
    for kind in ("allocated", "tracked", "driver", "rss"):
        if row["peak_bytes"].get(kind):
            return kind, row["peak_bytes"][kind]
    return None


def interval(row: dict) -> str:
    """Write the interval of a ratio, with its level where that is not 99%.

    n rounds that all lean one way do so by luck in 2^(1 - n) of cases.
    """
    if not row["ratio_interval"]:
        return ""
    low, high = row["ratio_interval"]
    level = 1 - 2.0 ** (1 - row.get("rounds", 60))
    few = f"{100 * level:.0f}% " if level < 0.99 else ""
    return f"{few}[{low:.2f}, {high:.2f}]"


def _ratio(row: dict) -> str:
    if row["ratio_previous"] is None:
        return "—"
    after = " (pilot)" if row.get("pilot") else f" {interval(row)}"
    return f"{row['ratio_previous']:.2f}{after}".rstrip()


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else f"{value / 1e3:,.0f}k"


def rates(row: dict) -> str:
    """Write the speed, after the opponent's in the same turns."""
    if not row["tokens_per_s"]:
        return "—"
    before = row.get("previous_tokens_per_s")
    before = f"{_rate(before)} → " if before else ""
    return before + _rate(row["tokens_per_s"])


def speed(row: dict) -> str:
    """Write the measured speed with its quartiles."""
    if not row["tokens_per_s"]:
        return ""
    text = f"{rates(row)} tok/s"
    if row["spread"]:
        low, high = row["spread"]
        text += f" (quartiles {low:,.0f} to {high:,.0f}, "
        text += f"{row.get('rounds', 0)} rounds)"
    return text


NEAR = 1.1  # how far a prediction may be from what it is held against
HELD = (
    "A prediction is met where it lies within the measured interval widened "
    "by 10%, or within 10% of what was measured without one. Within 10% of "
    "the row kept before, no change was predicted."
)


def expected_ratio(row: dict) -> float | None:
    """Return the predicted ratio; older records have it in words only."""
    if row.get("predicted_ratio"):
        return row["predicted_ratio"]
    found = re.match(r"about ([\d.]+)[x×]:", row["predicted"])
    return float(found[1]) if found else None


def outcome(row: dict) -> str:
    """Hold a row's prediction against what was measured: met or missed."""
    if row["track"] == "memory":
        peak, expected = main_peak(row), row.get("predicted_bytes")
        if not peak or not expected:
            return ""
        if abs(expected / peak[1] - 1) <= NEAR - 1:
            return "met"
        return f"missed: {peak[1] / MIB:,.1f} MiB for {expected / MIB:,.1f}"
    expected, ratio = expected_ratio(row), row["ratio_previous"]
    if not expected or not ratio:
        return ""
    low, high = row["ratio_interval"] or (ratio, ratio)
    if low / NEAR <= expected <= high * NEAR:
        return "met"
    return f"missed: {ratio:.2f}× for {expected:.2f}×"


def tally(rows: list[dict]) -> str:
    """Count how many predictions of a track were met.

    That nothing changes is easily met where the noise is large, so it is
    counted apart, a first row's bytes with the changes; a summary repeats
    what its rows predicted.
    """
    met: dict[str, list[bool]] = {"a change was predicted": [], "none was": []}
    kept = None
    for row in rows:
        expected, size = expected_ratio(row), row.get("predicted_bytes")
        if row["track"] == "memory":
            expected = size / kept if size and kept else None
        if outcome(row) and row["step"] != "summary":
            same = expected and 1 / NEAR <= expected <= NEAR
            where = "none was" if same else "a change was predicted"
            met[where].append(outcome(row) == "met")
        if row["verdict"] == "kept":
            kept = size
    said = [
        f"{sum(held)} of {len(held)} predictions met where {where}"
        for where, held in met.items()
        if held
    ]
    return ("; ".join(said) or "Nothing was predicted") + "."


def compounded(rows: list[dict]) -> str:
    """Say why a summary is not the product of the ratios above it."""
    kept = [row for row in rows[:-1] if row["verdict"] == "kept"]
    direct = rows[-1]["step"] == "summary" and rows[-1]["ratio_previous"]
    if len(kept) < 3 or not direct:  # nothing is multiplied
        return ""
    return (
        f"The kept ratios multiply to {kept[-1]['ratio_first']:.2f}, the "
        f"first configuration and the last in turns gave {_ratio(rows[-1])}: "
        "a product compounds the noise of every row, so the summary counts."
    )


def steps_rows(rows: list[dict], memory: bool) -> list[dict]:
    """Return a track's table, every value as it is written.

    Args:
        rows: of one track.
        memory: whether the prediction is one of bytes.
    """
    lines = []
    for row in rows:
        peak, first = main_peak(row), row["ratio_first"]
        if memory:
            expected = (row.get("predicted_bytes") or 0) / MIB
            expected = f"{expected:,.1f}" if expected else ""
        else:
            expected = expected_ratio(row)
            expected = f"{expected:.2f}" if expected else ""
        held = outcome(row).partition(":")[0]
        lines.append(
            {
                "§": row["section"],
                "step": row["step"],
                "predicted": f"{expected} {held}".strip() or "—",
                "peak MiB": f"{peak[1] / MIB:,.1f}" if peak else "—",
                "tok/s": rates(row),
                "× previous": _ratio(row),
                "× first": f"{first:.{2 * (first < 100)}f}" if first else "—",
                "verdict": row["verdict"],
            }
        )
    return lines


def _size(data: dict) -> list[str]:
    """Say what an update is and why; older logs do not know."""
    if not data.get("size"):
        return []
    return [
        "",
        f"An update is {data['sequences']} sequences of {data['model']['T']} "
        f"tokens. Why this size: {data['size']}.",
    ]


def _steps_table(rows: list[dict], memory: bool) -> str:
    lines = steps_rows(rows, memory)
    table = _markdown(list(lines[0]), [list(line.values()) for line in lines])
    return f"{table}\n\n{tally(rows)} {HELD}"


def _agreement(row: dict) -> str:
    a = row["agreement"]
    if not a:
        return ""
    worst = "bit for bit" if a["worst"] == 0 else f"{a['worst']:.1e} apart"
    said = f"Losses: declared {a['declared']} (≤ {a['tolerance']:g}), {worst}"
    if a.get("worst_parameter_norm"):
        norm = a["worst_parameter_norm"]
        said += f"; first gradients {norm:.1e} (`{a['parameter']}`)"
    return said + "."


def _details(row: dict, picture: str | None) -> str:
    lines = [
        f"### {row['section']}  {row['title']} · {row['title_zh']}",
        "",
        f"`{row['step']}`: {row['why']}",
        "",
    ]
    if row["predicted"]:
        held = outcome(row)
        held = f" — **{held}**" if held else ""
        lines.append(f"* predicted: {row['predicted']}{held}")
    if row["tokens_per_s"]:
        lines.append(f"* measured: {speed(row)}")
    if row["peak_bytes"]:
        peaks = ", ".join(
            f"{kind} {value / MIB:,.1f} MiB"
            for kind, value in row["peak_bytes"].items()
        )
        lines.append(f"* peak per process: {peaks}")
    if row["loss"] is not None:
        lines.append(f"* loss {row['loss']:.4f}. {_agreement(row)}".rstrip())
    lines.append(f"* **{row['verdict']}**: {row['reason']}")
    if picture:
        lines += ["", f"![one update, {row['step']}]({picture})"]
    return "\n".join(lines)


SHORT = {"parameters": "param.", "activations": "activ.", "temporary": "temp."}


def _predictions(found: dict, folder: Path) -> list[str]:
    """Tell what the memory steps are worth on the book's own model."""
    if not found or not found.get("cases"):
        return ["No predictions are recorded; `--predict --save` makes them."]
    cases = found["cases"]
    shape = gpt.preset(cases[0]["case"])
    sequences = cases[0]["micro_batch"] * cases[0]["accumulate"]
    lines = [
        f"`{cases[0]['case']}`: {shape.n_layer} layers, C = {shape.n_embd}, "
        f"vocabulary {shape.vocab_size}, T = {shape.block_size}, "
        f"{sequences} sequences per update, "
        f"{'tied' if shape.tied else 'untied'} head. Nothing here was "
        "measured: tensors without memory went through two updates and a "
        "tracker counted them (`ch07_memory/training_memory.py`, torch "
        f"{found['torch']}). MiB per rank at the peak.",
        "",
    ]
    rows = [
        row | {"moment": case.get("moment", "—")}
        for row, case in zip(predictions.case_rows(found), cases, strict=True)
    ]
    parts = [k for k in CATEGORIES if {r.get(k, "0") for r in rows} != {"0"}]
    headings = ["§", "step", "micro", "peak", "moment", *parts]
    lines += [
        _markdown(
            [SHORT.get(name, name) for name in headings],
            [[row.get(name, 0) for name in headings] for row in rows],
        ),
        "",
        "micro: micro-batches × sequences in each; moment: of the peak. At "
        "the optimizer's step its temporary copies make it, and fewer "
        "activations do not lower it.",
        "",
    ]
    if found.get("book"):
        book = found["book"]
        lines += [
            f"At rest {book['rest_mib_predicted']:,} MiB are predicted; the "
            f"book's recorded run rests at {book['rest_mib_recorded']:,}.",
            "",
        ]
    picture = draw_memory(
        [
            (f"{row['§']} {row['step']}", c["bytes"])
            for row, c in zip(rows, cases, strict=True)
        ],
        f"Predicted, not measured: {cases[0]['case']}",
        folder / "memory-predicted.png",
    )
    if picture:
        lines += [f"![predicted memory by category]({picture})", ""]
    return lines + _largest(found)


def _largest(found: dict) -> list[str]:
    if not found.get("largest_batch"):
        return []
    first, rows = found["largest_batch"][0], predictions.batch_rows(found)
    headings = list(dict.fromkeys(name for row in rows for name in row))
    return [
        f"The largest micro-batch of `{first['case']}` at T = {first['T']} "
        "that a card holds, by attention and card, predicted too:",
        "",
        _markdown(
            headings,
            [[row.get(name, "—") for name in headings] for row in rows],
        ),
        "",
        f"Left free: {found.get('margin')}.",
        "",
    ]


def _timeline(row: dict, folder: Path) -> tuple[str | None, str]:
    """Draw a row's trace; return the picture's name, or what is missing.

    Beside a record lie the pictures that were drawn, and no traces.
    """
    name = f"timeline-{row['track']}-{row['section']}-{row['step']}.png"
    trace = folder / row["trace"]
    if not trace.exists() and (folder / name).exists():
        return name, ""
    title = f"{row['section']} {row['step']}"
    try:
        return draw_timeline(trace, title, folder / name), ""
    except (OSError, EOFError, zlib.error, *DAMAGED):
        missing = f"No picture: `{trace.name}` is missing or damaged."
        print(missing)
        return None, missing


def render(data: dict, folder: Path, source: str = "`log.json`") -> Path:
    """Write LOG.md and its pictures into ``folder``; return its path.

    Args:
        data: the content of log.json.
        folder: where ``traces/`` may lie; pictures go beside LOG.md.
        source: where the page's reader finds ``data``.
    """
    rows = data["rows"]
    memory, speed = _of(rows, "memory"), _of(rows, "speed")
    pages = [
        f"# The optimisation log of {data['preset']}",
        "",
        machine.line(data["machine"]),
        "",
        f"Written by `{' '.join(data['command'])}`; every figure comes from "
        f"{source}. Each row was measured in turns with the row kept "
        "before it, in processes of their own: tok/s shows the two of the "
        "same turns, for the machine's speed changes from row to row. "
        "× previous is the median of the turns' ratios, not the quotient of "
        "the two speeds, each a median of its own, with its 99% interval "
        "(fewer than 8 turns deserve the level that is written before it), "
        "× first the product of the kept ratios (in the summaries: measured "
        "directly). A ratio is unsteady, and claims nothing, where not every "
        "third of the turns shows it.",
    ]
    if data.get("smoke"):
        pages += ["", "**A smoke run: the figures mean nothing.**"]
    if missing := cannot_draw():
        print(missing)
        pages += ["", missing]
    pages += ["", "## 10.1  The model · GPT 模型結構簡介", ""]
    pages.append(
        _markdown(
            list(model_rows(data["model"])[0]),
            [
                [tables.cell(v) for v in r.values()]
                for r in model_rows(data["model"])
            ],
        )
    )
    pages += [
        "",
        f"T = {data['model']['T']}. FLOPs per trained token: 6 N + 12 L C T, "
        "kept: float32 activations of one sequence with plain attention.",
        *_size(data),
        "",
        "## 10.2  The machine · 實驗環境與機器配置",
        "",
        _markdown(
            ["what", "value"],
            [
                [r["what"], tables.cell(r["value"])]
                for r in machine_rows(data["machine"], data["peaks"])
            ],
        ),
        "",
        "## 10.3  Memory · 顯示記憶體最佳化",
        "",
    ]
    if memory:
        kind = next((main_peak(r)[0] for r in memory if main_peak(r)), "—")
        pages += [
            _steps_table(memory, memory=True),
            "",
            f"Peak: `{kind}`, of one update and one rank.",
            "",
        ]
        bars = [
            (f"{r['section']} {r['step']}", r["categories"])
            for r in memory
            if r["categories"]
        ]
        picture = draw_memory(
            bars,
            f"{data['preset']} on this machine, predicted by category",
            folder / "memory.png",
        )
        if picture:
            pages += [f"![memory by category]({picture})", ""]
    pages += ["### The same steps, predicted for the book's own case", ""]
    pages += _predictions(data.get("predictions") or {}, folder)
    pages += ["## 10.4  Speed · 性能最佳化", ""]
    about = model_and_machine(data)
    if speed:
        pages += [_steps_table(speed, memory=False), ""]
        pages += [f"{compounded(speed)}\n"] * bool(compounded(speed))
    for picture, alt in (
        (draw_speed(rows, about, folder / "speed.png"), "speed of each step"),
        (draw_losses(rows, about, folder / "losses.png"), "their losses"),
    ):
        if picture:
            pages += [f"![{alt}]({picture})", ""]
    pages += ["## Step by step", ""]
    for row in rows:
        picture, said = None, ""
        if row["trace"] and not missing and not data.get("smoke"):
            picture, said = _timeline(row, folder)
        pages += [_details(row, picture), ""]
        pages += [said, ""] * bool(said)
    if data.get("final"):
        pages += [
            "## Use it · 在這台機器上使用",
            "",
            "The configuration that was kept; it trains with:",
            "",
            "```",
            data["final"]["command"],
            "```",
            "",
        ]
    path = folder / "LOG.md"
    bench.write_atomic(path, "\n".join(pages).rstrip() + "\n")
    return path


def _beside(record: Path) -> Path:
    """Return the folder of a record's page and pictures."""
    return record.with_suffix("")


def _named(record: Path) -> str:
    """Name a record as the reader of its page finds it."""
    return f"`{SCRIPT}` in `../{record.name}`"


def save(args, data: dict, out: Path) -> None:
    """Keep the log as a record, with LOG.md and its pictures beside it."""
    extra = {k: v for k, v in data.items() if k not in ("rows", "machine")}
    extra.pop("predictions", None)  # a record of their own
    path = bench.record(args, data["rows"], extra)
    folder = _beside(path)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    rows = [
        r | {"trace": r["trace"] and str((out / r["trace"]).resolve())}
        for r in data["rows"]
    ]
    page = render(data | {"rows": rows}, folder, _named(path))
    print(f"and as text in {page}")


def read(path: Path) -> tuple[dict, Path, str]:
    """Find a log by its folder or file, its record by either as well.

    Returns:
        Its content, the folder of its page and the page's word for it.
    """
    if path.is_dir():
        record = path.parent / f"{path.name}.json"
        own = path / "log.json"
        path = record if record.exists() and not own.exists() else own
    try:
        data = json.loads(path.read_text("utf-8"))
        if SCRIPT in data:
            return data[SCRIPT], _beside(path), _named(path)
        data["rows"]
    except OSError as error:
        raise bench.Refusal(f"{path}: {error.strerror}") from None
    except DAMAGED:
        raise bench.Refusal(f"{path}: not a log of the ladder") from None
    return data, path.parent, f"`{path.name}`"


def main(argv=None) -> None:
    """Render a log, or a record of one, again."""
    paths = sys.argv[1:] if argv is None else argv
    if len(paths) != 1:
        raise bench.Refusal(
            "give one folder that holds a log.json, or results/MACHINE.json"
        )
    data, folder, source = read(Path(paths[0]))
    data.setdefault("predictions", predictions.load())
    try:
        folder.mkdir(exist_ok=True)
        page = render(data, folder, source)
    except DAMAGED:
        raise bench.Refusal(
            f"{paths[0]}: rows of a log are missing or damaged; run the "
            "ladder with --restart"
        ) from None
    print(f"{page}: {len(data['rows'])} rows")


if __name__ == "__main__":
    bench.run(main)
