"""Show in a notebook what lies in scripts: their source, rows and records.

Everything also works outside IPython (text goes to the terminal), so that
a notebook's cells can be tried in any Python.
"""

import functools
import importlib
import inspect
import io
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
    """Show the source of functions, classes or modules, in colours if any."""
    source = "\n\n".join(inspect.getsource(o).rstrip() for o in objects)
    if not in_notebook():
        print(source)
        return
    from IPython.display import Code, display

    display(Code(source, language="python"))


@functools.cache
def cjk_font() -> str | None:
    """Return a font of this machine that has Chinese characters, or None."""
    from matplotlib import font_manager

    found = {font.name for font in font_manager.fontManager.ttflist}
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


def bars(
    rows: Sequence[Mapping],
    value: str = "median_s",
    title: str | None = None,
):
    """Draw rows as horizontal bars, the first on top.

    Args:
        rows: with ``name`` and ``value``; where ``value`` is ``median_s``
            and they have ``q1_s`` and ``q3_s``, the quartiles are marked.
        value: the key drawn; its ending gives the unit.
        title: above the bars; "English · 中文".

    Returns:
        A matplotlib Figure that no window or global state holds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get(value) is not None]
    heights = [row[value] for row in rows]
    spread = None
    if value == "median_s" and all("q1_s" in row for row in rows):
        spread = [
            [row["median_s"] - row["q1_s"] for row in rows],
            [row["q3_s"] - row["median_s"] for row in rows],
        ]
    with matplotlib.rc_context(fonts()):
        figure = Figure(figsize=(7, 0.8 + 0.4 * len(rows)), dpi=100)
        axes = figure.add_subplot()
        axes.barh(range(len(rows)), heights, xerr=spread, capsize=3)
        names = [label(str(row["name"])) for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        for i, height in enumerate(heights):
            text = " " + tables.cell(height, value)
            right = height + (spread[1][i] if spread else 0)
            axes.text(right, i, text, va="center")
        unit = rows[0].get("unit") if rows else None
        axes.set_xlabel(f"s per {unit}" if unit else value.replace("_", " "))
        axes.spines[["top", "right"]].set_visible(False)
        if title:
            axes.set_title(label(title))
        figure.tight_layout()
    return figure


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
    import matplotlib

    picture = io.BytesIO()
    with matplotlib.rc_context(fonts()):
        bars(rows, value, title).savefig(picture, format="png")
    if path is not None:
        bench.write_atomic(path, picture.getvalue())
    if in_notebook():
        from IPython.display import Image, display

        display(Image(data=picture.getvalue()))


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
    if isinstance(module, str):
        module = importlib.import_module(module)
    name = getattr(module.__spec__, "name", module.__name__)
    chapter = bench.ROOT / name.split(".")[0]
    columns, notes = {"here": rows}, []
    for machine, entries in bench.load_records(chapter).items():
        entry = entries.get(name)
        if entry is None:
            continue
        columns[machine] = entry["rows"]
        if not bench.is_current(entry, name):
            notes.append(f"{machine}: a record of an older version")
    beside = [{"row": row["name"]} for row in rows]
    for heading, group in columns.items():
        found = {row["name"]: row for row in group}
        for line in beside:
            line[heading] = _figure(found.get(line["row"]), value)
    print(tables.table(beside))
    if len(columns) == 1:
        notes.append(f"no record of {name} yet")
    print("\n".join(notes), end="\n" if notes else "")


def _figure(row: Mapping | None, value: str) -> str:
    if row is None or row.get(value) is None:
        return "—"
    text = tables.cell(row[value], value)
    if value == "median_s" and row.get("ratio"):
        text += f" ({row['ratio']:.2f}×)"
    return text
