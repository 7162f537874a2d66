"""Draw rows of measurements as text: units by key, Chinese aligned."""

import unicodedata
from collections.abc import Mapping, Sequence

WIDTH = 100  # columns, at most


def width(text: str) -> int:
    """Count the terminal columns of ``text``: Chinese characters take two."""
    columns = 0
    for character in text:
        if not unicodedata.combining(character):
            wide = unicodedata.east_asian_width(character) in "WF"
            columns += 2 if wide else 1
    return columns


def fit(text: str, columns: int, right: bool = False) -> str:
    """Pad ``text`` to so many columns, or cut it and show the cut."""
    if width(text) > columns:
        while width(text) > columns - 1:
            text = text[:-1]
        text += "…"
    space = " " * (columns - width(text))
    return space + text if right else text + space


def seconds(value: float) -> str:
    """Write a time with three digits: ``1.23 ms``."""
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size or not value:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def scaled(value: float, units: str, step: float) -> str:
    """Write ``value`` in the largest of ``units`` that leaves it above 1."""
    names = units.split()
    while abs(value) >= step and len(names) > 1:
        value, names = value / step, names[1:]
    return f"{value:.4g} {names[0]}"


def cell(value: object, key: str = "") -> str:
    """Write one value as its key's unit asks (``_s``, ``_bytes`` …)."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(cell(v, key) for v in value) + "]"
    if not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("_bytes_per_s"):
        return scaled(value, "B/s kB/s MB/s GB/s TB/s", 1e3)
    if key.endswith("_flops"):
        return scaled(value, "FLOP/s kFLOP/s MFLOP/s GFLOP/s TFLOP/s", 1e3)
    if key == "bytes" or key.endswith("_bytes"):
        return scaled(value, "B KiB MiB GiB TiB", 1024)
    if key == "s" or key.endswith("_s") and not key.endswith("_per_s"):
        return seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def table(
    rows: Sequence[Mapping],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    title: str | None = None,
) -> str:
    """Draw rows as text of at most 100 columns; Chinese stays aligned.

    Args:
        rows: dicts; a value is written as the end of its key says: ``_s``
            seconds, ``_bytes`` in powers of 1024, ``_bytes_per_s`` of 1000,
            ``_flops`` per second.
        columns: keys to show, or ``{key: heading}``; None shows all.
        title: a line above.

    Returns:
        The lines, joined; the widest column gives way first.
    """
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    if not isinstance(columns, Mapping):
        columns = {key: key.replace("_", " ") for key in columns}
    lines = [list(columns.values())]
    lines += [[cell(row.get(key), key) for key in columns] for row in rows]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    right = [
        all(isinstance(row.get(key), (int, float, type(None))) for row in rows)
        for key in columns
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    while excess > 0 and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
        excess -= 1
    drawn = [
        "  ".join(map(fit, line, widths, right)).rstrip() for line in lines
    ]
    drawn.insert(1, "  ".join("─" * columns for columns in widths))
    return "\n".join(([title] if title else []) + drawn)
