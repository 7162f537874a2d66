"""Regenerate the tables of the READMEs from the contents and the records.

A table stands between ``<!-- index:begin -->`` and ``<!-- index:end -->``;
everything around it is written by hand and stays.
"""

import argparse
import ast
import importlib
import re
import textwrap
from pathlib import Path

from chapters import toc
from common import bench, judging, machine

BEGIN, END = "<!-- index:begin -->", "<!-- index:end -->"
NEEDS = {"cuda": "GPU", "ranks": "processes", "root": "root"}
WORDS = {
    "en": ("chapter", "built", "recorded on", "title", "notebook"),
    "zh": ("章", "已完成", "記錄所用機器", "title_zh", "筆記本"),
}


# ---- what was recorded ---------------------------------------------------


def entries(folder: Path) -> dict[str, dict[str, dict]]:
    """Return a chapter's records, ``{machine: {script: entry}}``.

    What else lies in ``results`` (predictions, which no machine made) is
    left out.
    """
    if not (folder / "results").is_dir():
        return {}
    found = {}
    for name, record in bench.load_records(folder).items():
        measured = {
            script: entry
            for script, entry in record.items()
            if isinstance(entry, dict) and "machine" in entry
        }
        if measured:
            found[name] = measured
    return found


def steps_of(entry: dict, number: str | None = None) -> list[dict]:
    """Return the rows of a log (all, or a section's); others have none."""
    rows = [row for row in entry["rows"] if "section" in row]
    return [row for row in rows if number in (None, row["section"])]


def age(entry: dict, script: str) -> str:
    """Return what to say of a record's age: nothing, or that it is old."""
    today = bench.is_current(entry, script)
    sources = entry.get("key", {}).get("sources", {})
    for name, digest in sources.items():  # a log is made by many files
        path = bench.ROOT / name if "/" in name else toc.file_of(name)
        today = today and bool(path) and path.exists()
        today = today and bench.script_hash(path).startswith(digest)
    return "" if today else " (of an older version)"


def served(found: toc.Section) -> list[tuple[str, str, dict]]:
    """Return (machine, script, entry) of all records of a section."""
    return [
        (name, module, record[module])
        for name, record in entries(toc.folder(found)).items()
        for module in found.modules
        if module in record
        and (
            not steps_of(record[module])
            or steps_of(record[module], found.number)
        )
    ]


def recorded(found: toc.Section) -> dict[str, str]:
    """Return the machines that recorded a section, with the records' age."""
    return {name: age(entry, m) for name, m, entry in served(found)}


# ---- tables --------------------------------------------------------------


def ratio(
    value: float, interval: list | None, differs: bool | None = None
) -> str:
    """Write a ratio with its interval, or that no difference was seen.

    Args:
        value: baseline over variant.
        interval: (low, high), where there is one.
        differs: what the comparer said, where the record has it.
    """
    if not interval:
        return f"{value:.2f}×"
    words = judging.verdict(value, interval, differs is not False)[1]
    return words.removesuffix(" here")


def cells(text: str) -> str:
    """Keep a text inside one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def doc_line(module: str, word: str) -> str:
    """Return one labelled entry of a script's docstring, e.g. Question."""
    path = toc.file_of(module)
    if path is None:
        return ""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.search(rf"^{word}\s+(.+(?:\n[ \t]+.+)*)", doc, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def link(module: str, folder: Path) -> str:
    """Link a script by its name, relative to its chapter's README."""
    path = toc.file_of(module)
    name = f"`{module.split('.')[-1]}`"
    if path is None or not path.is_relative_to(folder):
        return name
    return f"[{name}]({path.relative_to(folder).as_posix()})"


def needs(found: toc.Section) -> str:
    """Write the needs of a section for people."""
    return ", ".join(
        NEEDS.get(need, need.removeprefix("tool:")) for need in found.needs
    )


def compared(entry: dict) -> tuple[str, str]:
    """Return what changes from row to row, and the ratios, of a record.

    Where a script made several tables, their titles say what changes.
    """
    tables: dict = {}
    for row in entry["rows"]:
        if row.get("ratio") is not None and "ratio_interval" in row:
            tables.setdefault(row.get("title"), []).append(row)
    tables = {t: rows for t, rows in tables.items() if len(rows) > 1}
    if not tables:
        return "", "recorded"
    changes, words = [], []
    for title, rows in tables.items():
        names = [str(row["name"]) for row in rows]
        ratios = [
            ratio(row["ratio"], row.get("ratio_interval"), row.get("differs"))
            for row in rows[1:]
        ]
        if len(rows) > 2:
            pairs = zip(names[1:], ratios, strict=True)
            ratios = ["; ".join(f"{n} {r}" for n, r in pairs)]
        if any(row.get("noisy") for row in rows):
            ratios[0] += " (noisy)"
        changes.append(" → ".join(names))
        words.append(f"{title}: {ratios[0]}" if title else ratios[0])
    return "; ".join(changes), "<br>".join(words)


def counted(entry: dict, column: str) -> str:
    """Return what a record counted from row to row; the times left out."""
    found = [row[column] for row in entry["rows"] if column in row]
    return f"{column}: {' → '.join(map(str, found))}" if found else "recorded"


def memory_change(row: dict, before: dict | None) -> str:
    """Write by how much a memory step changed the peak before it."""
    for kind in ("allocated", "tracked"):
        old = ((before or {}).get("peak_bytes") or {}).get(kind)
        new = (row.get("peak_bytes") or {}).get(kind)
        if old and new:
            return f"memory {round(100 * (new / old - 1)):+d}%"
    return ""


def climbed(entry: dict, number: str) -> tuple[str, str]:
    """Return the steps of a section of a log, and their ratios."""
    titles, words, before, first = [], [], {}, {}
    for row in steps_of(entry):
        track = row["track"]
        first.setdefault(track, row)
        if row["step"] == "summary":  # the first against the last
            before[track] = first[track]
        if row["section"] == number:
            said = []
            if track == "memory":
                said.append(memory_change(row, before.get(track)))
            if row.get("ratio_previous"):
                interval = row.get("ratio_interval")
                steady = row.get("steady")
                speed = ratio(row["ratio_previous"], interval, steady)
                said.append(f"speed {speed}")
            if row["verdict"] != "kept":
                said.append(row["verdict"])
            titles.append(row["title"])
            words.append(", ".join(w for w in said if w) or row["verdict"])
        if row["verdict"] == "kept":
            before[track] = row
    if len(words) > 1:
        words = [f"{t}: {w}" for t, w in zip(titles, words, strict=True)]
    return "", "; ".join(words)


def section_row(found: toc.Section, folder: Path) -> list[str]:
    """Return a section's line of its chapter's table."""
    if found.planned:
        return [found.number, found.titles, "planned", "", needs(found)]
    change, ratios = "", []
    for name, module, entry in served(found):
        if steps_of(entry):
            changes, text = climbed(entry, found.number)
        else:
            changes, text = compared(entry)
            if found.counts and not entry["machine"].get("gpu"):
                text = counted(entry, found.counts)
        change = change or changes
        where = f" (`{name}`)" if len(entries(folder)) > 1 else ""
        ratios.append(f"{text}{age(entry, module)}{where}")
    change = found.shows or change or doc_line(found.modules[0], "Question")
    scripts = ", ".join(link(m, folder) for m in found.modules)
    change = cells(f"{change} ({scripts})")
    ratios = cells("<br>".join(ratios))
    return [found.number, found.titles, change, ratios, needs(found)]


def chapter_table(number: str) -> str:
    """Return the table of a chapter's README."""
    folder = toc.folder(toc.section(number))
    rows = [section_row(found, folder) for found in toc.leaves(number)]
    head = ["section", "idea", "what changes", "ratio", "needs"]
    lines = cards(folder)
    if len(lines) == 1:  # then no ratio names its machine
        lines = [f"Recorded on {lines[0]}"]
    return "\n\n".join([markdown(head, rows), *lines])


def cards(folder: Path) -> list[str]:
    """Return one line per recorded machine of a chapter."""
    return [
        f"`{name}`: {machine.line(next(iter(record.values()))['machine'])}"
        for name, record in entries(folder).items()
    ]


def answered(module: str, entry: dict) -> list[list[str]]:
    """Return the lines of a benchmark's record: what, the answer, the bar."""
    try:
        lines = importlib.import_module(module).answers(entry)
    except KeyError:  # of a version that kept other rows
        return [["", "recorded", ""]]
    return [
        [cells(what), f"{why}: {found}" if why else found, bar]
        for what, found, bar, why in lines
    ]


def benchmark_table() -> str:
    """Return each benchmark's question, and what its records answer."""
    folder, pieces = toc.ROOT / "benchmarks", []
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        module = f"benchmarks.{path.stem}"
        pieces.append(f"## {link(module, folder)}")
        pieces.append(textwrap.fill(doc_line(module, "Question"), 79))
        for name, record in entries(folder).items():
            if entry := record.get(module):
                head = [f"`{name}`{age(entry, module)}", "answer", "bar"]
                pieces.append(markdown(head, answered(module, entry)))
    return "\n\n".join([*pieces, "## Machines", *cards(folder)])


def book_table(language: str) -> str:
    """Return the table of the chapters, for the front page."""
    chapter, built, where, title, word = WORDS[language]
    rows = []
    for found in toc.load().values():
        if found.kind != "chapter":
            continue
        leaves = toc.leaves(found.number)
        ready = sum(not leaf.planned for leaf in leaves)
        path = toc.folder(found)
        name = getattr(found, title)
        if (path / "README.md").exists():
            name = f"[{name}]({found.folder}/README.md)"
        for notebook in sorted(path.glob("*.ipynb")):
            name += f" ([{word}]({found.folder}/{notebook.name}))"
        machines = dict.fromkeys(m for leaf in leaves for m in recorded(leaf))
        rows.append(
            [
                found.number,
                name,
                f"{ready}/{len(leaves)}",
                ", ".join(f"`{name}`" for name in machines),
            ]
        )
    return markdown(["", chapter, built, where], rows)


# ---- files ---------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return every README that has a table, with the table it should have."""
    tables = {
        toc.ROOT / "README.md": lambda: book_table("en"),
        toc.ROOT / "README.zh-TW.md": lambda: book_table("zh"),
        toc.ROOT / "benchmarks" / "README.md": benchmark_table,
    }
    for found in toc.load().values():
        if found.kind == "chapter":
            path = toc.folder(found) / "README.md"
            tables[path] = lambda n=found.number: chapter_table(n)
    return {path: make() for path, make in tables.items() if path.exists()}


def renewed(text: str, table: str, path: Path) -> str:
    """Return a page with its table put between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise bench.Refusal(f"{path} needs one {BEGIN} and one {END} line")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def stale() -> dict[Path, str]:
    """Return the pages whose table is not what it should be, renewed."""
    found = {}
    for path, table in pages().items():
        text = path.read_text(encoding="utf-8")
        new = renewed(text, table, path)
        if new != text:
            found[path] = new
    return found


def main(argv: list[str]) -> int:
    """Rewrite the stale pages; with ``--check`` only name them."""
    parser = argparse.ArgumentParser(prog="python -m chapters index")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    found = stale()
    for path, text in found.items():
        name = path.relative_to(toc.ROOT).as_posix()
        print(f"{'stale' if args.check else 'renewed'}: {name}")
        if not args.check:
            bench.write_atomic(path, text)
    if not found:
        print("every table is up to date")
    return 1 if found and args.check else 0
