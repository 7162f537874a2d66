"""The book's table of contents, executable.

python -m chapters                    the book: what runs, what is recorded
python -m chapters SECTION [FLAG …]   run a section or a chapter
python -m chapters SECTION --source   show its source instead
python -m chapters WORD [WORD …]      run the one section with these words
python -m chapters record --help      run everything and keep records
python -m chapters index [--check]    renew the tables of the READMEs
python -m chapters notebooks --help   execute the notebooks
"""

import subprocess
import sys

from chapters import index, notebooks, record, toc
from common import bench


def runs_here(found: toc.Section) -> str:
    """Say in a few words whether a leaf runs on this machine."""
    if found.planned:
        return "planned"
    missing = [index.NEEDS.get(n, n[5:]) for n in toc.missing(found)]
    return f"in part: no {', '.join(missing)}" if missing else "yes"


def contents() -> str:
    """Return the book as a table of at most 100 columns, and its machines."""
    rows, letters = [], {}
    for found in toc.load().values():
        if found.kind == "chapter" and rows:
            rows.append({})
        row = {"section": found.number, "title": found.titles}
        if found.kind == "leaf":
            row["here"] = runs_here(found)
            words = []
            for name, age in index.recorded(found).items():
                letter = letters.setdefault(name, f"[{len(letters) + 1}]")
                words.append(f"{letter}{' older' if age else ''}")
            row["recorded"] = " ".join(words)
        rows.append(row)
    columns = {
        "section": "",
        "title": "title",
        "here": "runs here",
        "recorded": "recorded",
    }
    blank = dict.fromkeys(columns, "")
    table = bench.table([blank | row for row in rows], columns)
    machines = [f"{letter} {name}" for name, letter in letters.items()]
    if any("older" in row.get("recorded", "") for row in rows):
        machines.append("older: the script has changed since")
    return "\n".join([table, "", *machines])


def show(number: str) -> None:
    """Print the source of a section's scripts, or of what it names."""
    names = []
    for found in toc.jobs(number):
        names += [found.source] if found.source else found.modules
    for name in dict.fromkeys(names):
        path = toc.file_of(name)
        if path is None:
            raise bench.Refusal(f"{number}: there is no module {name}")
        print(f"# {path.relative_to(toc.ROOT).as_posix()}")
        print(path.read_text(encoding="utf-8"))


def start(number: str, extra: list[str]) -> int:
    """Run a section's commands in turn; return the first bad exit code."""
    found = toc.jobs(number)
    several = sum(len(section.modules) for section in found) > 1
    worst, ran = 0, set()
    for section in found:
        for command in toc.commands(section):
            if command in ran:
                continue
            ran.add(command)
            if several:
                print(f"── {' '.join(command)}", flush=True)
            words = [sys.executable, "-m", *command, *extra]
            code, interrupted = ended(words)
            worst = worst or code
            if interrupted:
                return worst
    return worst


def ended(words: list[str]) -> tuple[int, bool]:
    """Run a command until it has ended by itself, whatever interrupts us.

    It restores clocks, removes networks and keeps finished rows: it is never
    killed, as ``subprocess.run`` would.  Ctrl-C reaches it from the terminal;
    SIGTERM, and a second Ctrl-C, are handed on.

    Returns:
        (its exit code, whether it was interrupted).
    """
    child = subprocess.Popen(words, env=record.environment(None))
    interrupted = False
    while True:
        try:
            return child.wait(), interrupted
        except KeyboardInterrupt:
            if interrupted:
                child.terminate()
            interrupted = True
        except SystemExit:  # SIGTERM, by bench.run
            child.terminate()
            interrupted = True


def main(argv: list[str] | None = None) -> int:
    """Do what the first word says."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        print(contents())
        return 0
    first, *rest = argv
    first = first.strip(" §.") or first
    if first in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if first == "record":
        return record.main(rest)
    if first == "index":
        return index.main(rest)
    if first == "notebooks":
        return notebooks.main(rest)
    if first[:1].isdigit() or first.startswith("-"):
        found = toc.section(first)
    else:
        flags = (i for i, word in enumerate(argv) if word.startswith("-"))
        end = next(flags, len(argv))
        found, rest = toc.named(argv[:end]), argv[end:]
        print(found.heading, flush=True)
    if found.kind == "summary":
        raise bench.Refusal(f"{found.heading}: a summary, there is no script")
    if not toc.jobs(found.number):
        raise bench.Refusal(f"{found.heading}: planned, nothing runs yet")
    if "--source" in rest:
        show(found.number)
        return 0
    return start(found.number, rest)


if __name__ == "__main__":
    bench.run(main)
