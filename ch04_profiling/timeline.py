"""A trace is drawn as one row of bars per stream, and a few per thread.

``lanes`` decides what is in a picture: whole nanoseconds, as the trace has
them.  ``picture`` draws it; what is narrower than a pixel is drawn once.
"""

from dataclasses import dataclass

import numpy as np

from ch04_profiling import accounting
from ch04_profiling import event_names as names
from ch04_profiling.find_bottleneck import COLOURS, shares_over_time

HOST = {
    "range": "#8c6bb1",
    "operator": "#9ebcda",
    "runtime call": "#636363",
    "waiting call": "#ef8a62",
    "loader": "#b2182b",
    "compilation": "#e08214",
    "start-up": "#fdb863",
    "bookkeeping": "#d9d9d9",
}
MEANINGS = {
    names.SYNC: "waiting call",
    names.LOADER: "loader",
    names.COMPILATION: "compilation",
    names.START_UP: "start-up",
}
DARK = {"gemm", "communication", "copy_h2d", "idle_loader", "range"}
DARK |= {"runtime call", "loader"}  # under white letters
SHADE, PIXELS = "#ffd92f", 1380  # of overlap; across a picture
DEPTH, THREADS, STREAMS = 8, 5, 12  # levels of a thread, and rows drawn
BRIEF_NS = 100_000  # a call shorter than this starts nothing up


@dataclass
class Lane:
    """The bars of one stream or thread.

    start, end (ns), depth (0 on top) and name have an entry per bar;
    ``kind`` is a key of ``COLOURS`` or ``HOST``.
    """

    label: str
    on_gpu: bool
    start: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    name: np.ndarray
    kind: np.ndarray

    def levels(self):
        """Return how many rows of bars are drawn for it."""
        return 1 + min(int(self.depth.max(initial=0)), DEPTH - 1)


def depths(start, end):
    """Return how many earlier intervals are still open at each start."""
    order = np.lexsort((-end, start))
    found, open_ends = np.zeros(len(start), int), []
    for at, low, high in zip(
        order.tolist(), start[order].tolist(), end[order].tolist(), strict=True
    ):
        while open_ends and open_ends[-1] <= low:
            open_ends.pop()
        found[at] = len(open_ends)
        open_ends.append(high)
    return found


def lanes(trace, account):
    """Return a trace's Lanes: streams first, then its busiest threads."""
    packed = trace.kind.astype(np.int64) * len(trace.names) + trace.name
    pairs, place = np.unique(packed, return_inverse=True)
    table = [
        _host_kind(kind, trace.names[name])
        for kind, name in (divmod(p, len(trace.names)) for p in pairs.tolist())
    ]
    kinds = np.array(table, object)[place]
    brief = trace.end - trace.start < BRIEF_NS
    kinds[brief & (kinds == "start-up")] = "runtime call"
    kinds[account.gpu] = np.array(names.PARTS, object)[account.work]
    order = np.lexsort((trace.kind, trace.lane))
    place = trace.lane.astype(np.int64)[order] * 2
    place += trace.kind[order] == names.GPU
    found = []
    for events in np.split(order, np.flatnonzero(np.diff(place)) + 1):
        events = np.sort(events)
        on_gpu = bool(trace.kind[events[0]] == names.GPU)
        start, end = trace.start[events], trace.end[events]
        found.append(
            Lane(
                _label(trace.lanes[trace.lane[events[0]]], on_gpu),
                on_gpu,
                start,
                end,
                depths(start, end) * (not on_gpu),
                trace.name[events],
                kinds[events],
            )
        )
    found.sort(key=lambda lane: (not lane.on_gpu, -len(lane.start)))
    return found


def _host_kind(kind, name):
    if kind == names.GPU:
        return "bookkeeping"  # marks without a length
    meaning = names.host_meaning(kind, name)
    if meaning in MEANINGS:
        return MEANINGS[meaning]
    if kind == names.RUNTIME and names.QUERY_NAME.match(name):
        return "start-up"  # the first one, which is long
    if kind in (names.RANGE, names.PYTHON) or names.STEP.match(name):
        return "range"
    return "runtime call" if kind == names.RUNTIME else "operator"


def _label(lane, on_gpu):
    process, thread = lane
    if on_gpu:
        return f"GPU {process} stream {thread.removeprefix('stream ')}"
    return f"thread {thread.removeprefix('thread ')}"


def overlaps(account):
    """Return merged (starts, ends): computing beside copies or collectives."""
    unions = account.unions
    none = np.empty(0, np.int64)

    def union(parts):
        pairs = [unions.get(part, (none, none)) for part in parts]
        return accounting.merge(
            *(np.concatenate(side) for side in zip(*pairs, strict=True))
        )

    one = union(names.COMPUTE)
    other = union(["communication", *names.COPIES])
    edges = np.unique(np.concatenate([*one, *other]))
    both = accounting.inside(one, edges[:-1])
    both &= accounting.inside(other, edges[:-1])
    return accounting.merge(edges[:-1][both], edges[1:][both])


def visible(lane, low, high):
    """Return which bars of a lane to draw between two times.

    All that are wider than a pixel; of narrower ones, one for each pixel,
    level and kind.
    """
    level = np.minimum(lane.depth, DEPTH - 1)
    inside = np.flatnonzero((lane.end > low) & (lane.start < high))
    pixel = max((high - low) / PIXELS, 1)
    wide = (lane.end - lane.start)[inside] >= pixel
    narrow = inside[~wide]
    _, kind = np.unique(lane.kind[narrow].astype(str), return_inverse=True)
    column = ((lane.start[narrow] - low) // pixel).astype(np.int64)
    keys = np.stack([column, level[narrow], kind.reshape(-1)])
    _, first = np.unique(keys, axis=1, return_index=True)
    return np.sort(np.concatenate([inside[wide], narrow[first]]))


def picture(trace, account, low, high, title=""):
    """Draw what lies between two times (ns) of a trace.

    On top the whole recording, by what owns its time, and the part that is
    drawn below; then streams, then threads.  Where computing overlaps
    copies or communication, the streams are shaded.

    Returns:
        A matplotlib Figure, 1500 pixels wide.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    inside = [x for x in lanes(trace, account) if len(visible(x, low, high))]
    streams = [x for x in inside if x.on_gpu][:STREAMS]
    threads = [x for x in inside if not x.on_gpu][:THREADS]
    rows = 3 + 1.6 * len(streams) + sum(x.levels() + 0.6 for x in threads)
    figure = Figure(
        figsize=(15, 2.2 + 0.24 * rows), dpi=100, layout="constrained"
    )
    above, axes = figure.subplots(2, height_ratios=[1, max(rows / 4, 1)])
    _overview(above, account, low, high, trace.window)
    above.set_title(title, loc="left", fontsize=10)
    owned = account.parts_ns()
    seen = {part: COLOURS[part] for part in names.PARTS if owned[part]}
    at, ticks = 0.0, []
    if streams:
        both = overlaps(account)
        size = 0.7 + 1.6 * len(streams)
        _shade(axes, both, low, high, size, seen)
        ticks.append((0.25, "overlap"))
        at = 0.7
    for lane in streams + threads:
        height = 1.4 if lane.on_gpu else 0.92
        _draw(axes, lane, trace.names, low, high, at, height, seen)
        size = 1.4 if lane.on_gpu else lane.levels()
        ticks.append((at + size / 2, lane.label))
        at += size + (0.2 if lane.on_gpu else 0.6)
    for name, start, end in account.steps:
        if low <= start < high:
            axes.axvline(start / 1e6, color="k", lw=0.8, ls=":")
            if end - start > 0.04 * (high - low):
                axes.text(start / 1e6, -0.2, f" {name}", fontsize=8)
    left = len(inside) - len(streams) - len(threads)
    more = f" (and {left} more streams and threads, not drawn)" if left else ""
    axes.set_yticks([y for y, _ in ticks], [x for _, x in ticks], fontsize=8)
    axes.set(xlim=(low / 1e6, high / 1e6), ylim=(max(at, 1), -1))
    axes.set_xlabel(f"ms into the trace{more}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    device = "GPU" if account.on_gpu else "CPU"
    for place, title, kinds in (
        ("upper", f"the {device}'s time: who owns it", COLOURS),
        ("lower", "what a thread does", HOST),
    ):
        shown = {kind: seen[kind] for kind in seen if kind in kinds}
        if place == "upper" and "overlap" in seen:
            shown["overlap"] = SHADE
        if shown:
            figure.legend(
                [Patch(color=colour) for colour in shown.values()],
                [kind.replace("_", " ") for kind in shown],
                title=title,
                ncols=8,
                loc=f"outside {place} center",
                fontsize=8,
                title_fontsize=8,
                frameon=False,
            )
    return figure


def _overview(axes, account, low, high, window):
    columns = np.linspace(*window, 701).astype(np.int64)
    axes.stackplot(
        (columns[:-1] + columns[1:]) / 2e6,
        shares_over_time(account, columns),
        colors=[COLOURS[name] for name in names.PARTS],
    )
    edges = [edge / 1e6 for edge in window]
    axes.set(xlim=edges, ylim=(0, 1), yticks=[0.5])
    axes.set_yticklabels(["whole recording"], fontsize=8)
    if (low, high) != tuple(window):
        axes.axvspan(low / 1e6, high / 1e6, fc="none", ec="k", lw=2)


def _boxes(axes, left, right, top, bottom, **look):
    """Draw rectangles: times in ns, top and bottom in rows."""
    from matplotlib.collections import PolyCollection

    x = np.stack([left, right, right, left], axis=1) / 1e6
    y = np.stack(np.broadcast_arrays(top, top, bottom, bottom), axis=-1)
    y = np.broadcast_to(y, x.shape)
    axes.add_collection(PolyCollection(np.stack([x, y], axis=2), **look))


def _shade(axes, both, low, high, bottom, seen):
    left, right = np.maximum(both[0], low), np.minimum(both[1], high)
    left, right = left[left < right], right[left < right]
    right = np.maximum(right, left + 1.5 * (high - low) / PIXELS)
    _boxes(axes, left, right, 0.0, 0.5, facecolors=SHADE)
    _boxes(axes, left, right, 0.5, bottom, facecolors=SHADE, alpha=0.3)
    if len(left):
        seen["overlap"] = SHADE


def _draw(axes, lane, texts, low, high, at, height, seen):
    chosen = visible(lane, low, high)
    pixel = (high - low) / PIXELS
    left = np.maximum(lane.start[chosen], low)
    right = np.minimum(lane.end[chosen], high)
    right = np.maximum(right, left + 1.5 * pixel)  # or some would vanish
    top = at + np.minimum(lane.depth[chosen], DEPTH - 1)
    kinds, colours = lane.kind[chosen], COLOURS | HOST
    seen |= {kind: colours[kind] for kind in kinds}
    wide = right - left > 5 * pixel
    _boxes(
        axes,
        left,
        right,
        top,
        top + height,
        facecolors=[colours[kind] for kind in kinds],
        edgecolors=["white" if w else "none" for w in wide],
        linewidths=0.5,
    )
    room = ((right - left) / pixel / 5.8).astype(int) - 1  # characters
    last = np.flatnonzero(lane.depth[chosen] >= DEPTH - 1)
    room[last[:-1][right[last[:-1]] > left[last[1:]]]] = 0  # under another
    for bar in np.flatnonzero(room >= 4)[:300].tolist():
        text = texts[lane.name[chosen[bar]]].removeprefix("void ")
        axes.text(
            (left[bar] + right[bar]) / 2e6,
            top[bar] + height / 2,
            text[: room[bar]].replace("$", "\\$"),
            ha="center",
            va="center",
            fontsize=7,
            color="white" if kinds[bar] in DARK else "black",
            clip_on=True,
        ).set_in_layout(False)
