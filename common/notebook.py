"""Show in a notebook what lies in scripts: their source, rows and records.

Everything also works outside IPython (text goes to the terminal), so that
a notebook's cells can be tried in any Python.
"""

import contextlib
import functools
import importlib
import inspect
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from common import bench, tables

CJK_FONTS = (
    "Noto Sans CJK TC",
    "Noto Sans TC",
    "Noto Sans CJK JP",  # how Debian's one file for all regions is listed
    "PingFang TC",
    "Microsoft JhengHei",
    "Heiti TC",
    "Droid Sans Fallback",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
)


def in_notebook() -> bool:
    """Say whether IPython displays what we hand it."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def show(*objects: object) -> None:
    """Show the source of functions, classes or modules, and its file.

    In a notebook as Markdown, which every viewer colours in its own way.
    """
    groups: dict[str, list[str]] = {}
    for found in objects:
        # a decorator's wrapper lies in the file of the decorator
        file = Path(inspect.getsourcefile(inspect.unwrap(found))).resolve()
        if file.is_relative_to(bench.ROOT):
            file = file.relative_to(bench.ROOT)
        source = inspect.getsource(found).rstrip()
        groups.setdefault(file.as_posix(), []).append(source)
    text = "\n\n\n".join(
        f"# {file}\n" + "\n\n\n".join(sources)
        for file, sources in groups.items()
    )
    if not in_notebook():
        print(text)
        return
    from IPython.display import Markdown, display

    display(Markdown(f"```python\n{text}\n```"))


@functools.cache
def cjk_font() -> str | None:
    """Return a font of this machine that has Chinese characters, or None."""
    from matplotlib import font_manager

    known = font_manager.fontManager
    found = {font.name for font in known.ttflist}
    if not found & set(CJK_FONTS):  # one installed since the list was made?
        marks = "cjk wqy pingfang jhenghei msjh heiti fallback noto".split()
        for path in font_manager.findSystemFonts():
            if any(mark in Path(path).name.lower() for mark in marks):
                with contextlib.suppress(RuntimeError, OSError):
                    known.addfont(path)
        found = {font.name for font in known.ttflist}
    return next((name for name in CJK_FONTS if name in found), None)


def label(text: str) -> str:
    """Return ``text`` as this machine can draw it.

    Of "English · 中文" only the English part is left without a Chinese
    font; there would be boxes.
    """
    if cjk_font():
        return text
    parts = [p for p in text.split(" · ") if tables.width(p) == len(p)]
    return " · ".join(parts) or text


def fonts() -> dict:
    """Return rcParams that draw Chinese where there is a font for it."""
    return {"font.family": ["DejaVu Sans", *filter(None, [cjk_font()])]}


def by_title(rows: Sequence[Mapping]) -> dict[str | None, list[Mapping]]:
    """Divide a script's rows into its tables, by their titles."""
    tables_: dict[str | None, list[Mapping]] = {}
    for row in rows:
        tables_.setdefault(row.get("title"), []).append(row)
    return tables_


def name_of(row: Mapping) -> str:
    """Return what a row is called: its name, or else its first value."""
    return str(row.get("name", next(iter(row.values()))))


def bars(
    rows: Sequence[Mapping],
    value: str = "median_s",
    title: str | None = None,
):
    """Draw rows as horizontal bars, the first on top; a panel per table.

    Args:
        rows: with ``name`` and ``value``; where ``value`` is ``median_s``
            and they have ``q1_s`` and ``q3_s``, the quartiles are marked.
            Rows of several tables carry their ``title``.
        value: the key drawn; its ending gives the unit.
        title: above the bars; "English · 中文".

    Returns:
        A matplotlib Figure that no window or global state holds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get(value) is not None]
    panels = by_title(rows) or {None: []}
    heights = [0.7 + 0.36 * len(group) for group in panels.values()]
    with matplotlib.rc_context(fonts()):
        figure = Figure(
            figsize=(7.5, 0.4 * bool(title) + sum(heights)),
            dpi=100,
            layout="constrained",
        )
        axes = figure.subplots(
            len(panels), squeeze=False, height_ratios=heights
        )
        for place, name in zip(axes[:, 0], panels, strict=True):
            _bars(place, panels[name], value)
            if name:
                place.set_title(label(name), fontsize=10, loc="left")
        if title:
            figure.suptitle(label(title), fontsize=12)
    return figure


def _bars(axes, rows: Sequence[Mapping], value: str) -> None:
    most = max((row[value] for row in rows), default=0)
    size, unit = _unit(most, value)
    if rows and "unit" in rows[0] and value.endswith("_s"):
        unit += f" per {rows[0]['unit']}"
    widths = [row[value] / size for row in rows]
    spread = None
    if value == "median_s" and all("q1_s" in row for row in rows):
        spread = [
            [(row["median_s"] - row["q1_s"]) / size for row in rows],
            [(row["q3_s"] - row["median_s"]) / size for row in rows],
        ]
    axes.barh(range(len(rows)), widths, xerr=spread, capsize=3, height=0.7)
    axes.set_yticks(range(len(rows)), [label(name_of(row)) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    for i, (width, row) in enumerate(zip(widths, rows, strict=True)):
        right = width + (spread[1][i] if spread else 0)
        axes.text(right, i, " " + tables.cell(row[value], value), va="center")
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(most: float, key: str) -> tuple[float, str]:
    """Return the size and the name of the unit that an axis is drawn in."""
    text = tables.cell(float(most), key).split(" ")
    name = key.replace("_", " ")
    if len(text) == 1:  # a number without a unit
        return 1, name
    name = name.rsplit(" per s")[0].rsplit(" ", 1)[0]
    size = most / float(text[0]) if most else 1
    # what is written has few digits: the unit is the nearest power
    step = 1024 if text[1].endswith("iB") else 10
    size = float(step) ** round(math.log(size, step))
    return size, f"{name} ({text[1]})" if name != "median" else text[1]


def lines(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    group: str | None = None,
    title: str | None = None,
    log: bool = False,
):
    """Draw ``y`` over ``x`` as one line, or one for each value of ``group``.

    Args:
        rows: with the keys named; those without a ``y`` are left out.
        x: the key along the bottom, numbers.
        y: the key upwards, numbers.
        group: the key whose values name the lines.
        title: above; "English · 中文".
        log: powers of two along the bottom.

    Returns:
        A matplotlib Figure that no window or global state holds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    groups: dict = {}
    for row in rows:
        if row.get(y) is not None:
            groups.setdefault(row[group] if group else None, []).append(row)
    with matplotlib.rc_context(fonts()):
        figure = Figure(figsize=(7.5, 3.6), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        for name, found in groups.items():
            axes.plot(
                [row[x] for row in found],
                [row[y] for row in found],
                marker="o",
                label=None if name is None else label(str(name)),
            )
        if log:
            axes.set_xscale("log", base=2)
        axes.set_xlabel(x.replace("_", " "))
        axes.set_ylabel(y.replace("_", " "))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        if group:
            axes.legend(frameon=False)
        if title:
            axes.set_title(label(title), fontsize=12)
    return figure


def picture(source, path: str | Path | None = None) -> None:
    """Display a figure or a PNG file in a notebook, in few bytes.

    Args:
        source: a matplotlib Figure, or the path of a PNG.
        path: where to write the PNG, whole or not at all, too.
    """
    import matplotlib
    from PIL import Image

    data = io.BytesIO()
    if hasattr(source, "savefig"):
        with matplotlib.rc_context(fonts()):
            source.savefig(data, format="png")
    else:
        data.write(Path(source).read_bytes())
    # 64 colours are enough for bars and lines, and a third of the bytes
    small = io.BytesIO()
    drawn = Image.open(data).convert("RGB")
    drawn.quantize(64, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    if path is not None:
        bench.write_atomic(path, small.getvalue())
    if in_notebook():
        from IPython.display import Image as Shown
        from IPython.display import display

        display(Shown(data=small.getvalue()))


def plot(
    rows: Sequence[Mapping],
    value: str = "median_s",
    title: str | None = None,
    path: str | Path | None = None,
) -> None:
    """Display ``bars`` in a notebook, and write the PNG to ``path`` if given.

    Args:
        rows: as for ``bars``, like ``value`` and ``title``.
        value: the key drawn.
        title: above the bars.
        path: a file, written whole or not at all.
    """
    picture(bars(rows, value, title), path)


def curve(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    group: str | None = None,
    title: str | None = None,
    log: bool = False,
) -> None:
    """Display ``lines`` in a notebook; the arguments are the same."""
    picture(lines(rows, x, y, group, title, log))


def records(module: str | ModuleType) -> dict[str, dict]:
    """Return a script's records by machine, the newest first.

    Args:
        module: the script, or its dotted name.
    """
    name = _dotted(module)
    found = bench.load_records(bench.ROOT / name.split(".")[0])
    mine = {
        m: entries[name] for m, entries in found.items() if name in entries
    }
    # of two made in one second the order must not depend on the disk's
    newest = sorted(mine, reverse=True)
    newest.sort(key=lambda m: mine[m].get("when", ""), reverse=True)
    return {machine: mine[machine] for machine in newest}


def _dotted(module: str | ModuleType) -> str:
    if isinstance(module, str):
        module = importlib.import_module(module)
    return getattr(module.__spec__, "name", module.__name__)


def recorded(
    module: str | ModuleType,
    columns: Sequence[str] | Mapping[str, str] | None = None,
) -> None:
    """Print a script's newest record, without running the script.

    Args:
        module: the script, or its dotted name.
        columns: as for ``bench.table``; of timed rows those that matter.
    """
    name = _dotted(module)
    for machine, entry in records(name).items():
        old = "" if bench.is_current(entry, name) else ", an older version"
        print(f"recorded on {machine}{old}")
        for title, rows in by_title(entry["rows"]).items():
            shown = columns or entry.get("columns", {}).get(title or "")
            if shown is None and "median_s" in rows[0]:
                unit = rows[0].get("unit", "call")
                shown = {"name": "row", "median_s": f"s per {unit}"}
                shown |= {"iqr_s": "IQR", "verdict": "speed"}
            print("", tables.table(rows, shown, title), sep="\n")
        return
    print(f"no record of {name} yet")


def beside_record(
    rows: Sequence[Mapping],
    module: str | ModuleType,
    value: str = "median_s",
) -> None:
    """Print the reader's rows beside those that were recorded.

    Args:
        rows: what the script's ``main`` returned here.
        module: the script, or its dotted name.
        value: the key compared; a row's ratio follows, where it has one.
    """
    name = _dotted(module)
    found = records(name)
    here = by_title(row for row in rows if value in row)
    for place, (title, group) in enumerate(here.items()):
        columns = {"here": group}
        for machine, entry in found.items():
            measured = [row for row in entry["rows"] if value in row]
            if title is not None:
                measured = by_title(measured).get(title, [])
            columns[machine] = measured
        beside = [{"row": name_of(row)} for row in group]
        for heading, others in columns.items():
            cells = {name_of(row): row for row in others}
            for line in beside:
                line[heading] = _figure(cells.get(line["row"]), value)
        print("\n" * bool(place) + tables.table(beside, title=title))
    for machine, entry in found.items():
        if not bench.is_current(entry, name):
            print(f"{machine}: a record of an older version")
    if not found:
        print(f"no record of {name} yet")


def _figure(row: Mapping | None, value: str) -> str:
    if row is None or row.get(value) is None:
        return "—"
    text = tables.cell(row[value], value)
    if value == "median_s" and row.get("ratio"):
        text += f" ({row['ratio']:.2f}×)"
    return text
