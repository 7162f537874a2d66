"""Execute the chapters' notebooks, each in a kernel of its own, and keep that.

python -m chapters notebooks                execute all, write their outputs
python -m chapters notebooks FILE …         only these
python -m chapters notebooks --smoke        tiny sizes, nothing is written
python -m chapters notebooks --check        look, without executing anything

A notebook's outputs are written here and nowhere else: with the machine they
came from, and in every code cell the hash of what was executed, so that an
edited cell is seen.  Cells that only show what lies in the repository
(`show(…)`, or tagged "replay") say the same in a smoke run; where they do
not, the committed outputs are out of date.
"""

import argparse
import ast
import copy
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from chapters import toc
from common import bench, machine

LIMIT = 500_000  # bytes of a notebook with its outputs
CELL_S = 900  # the longest that one cell may take
HASH = "executed_sha256"
STAMP = "executed_on"
TITLE = re.compile(r"^(#+) +(\d+(?:\.\d+)*) +(.+?) *$", re.MULTILINE)
FILE = re.compile(r"^# (\S+\.py)$", re.MULTILINE)  # above a shown source
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LOAD = re.compile(r"^(?:# )?%load -s (\S+) (\S+)$", re.MULTILINE)
SAID = ("Predict · 預測", "Answer · 解答", "Exercise · 練習")  # in a section
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class Failed(Exception):
    """A notebook that did not run: where, and with which error."""


def notebooks() -> list[Path]:
    """Return the chapters' notebooks, in the order of the book."""
    folders = [s.folder for s in toc.load().values() if s.folder]
    return [p for f in folders for p in sorted(toc.ROOT.glob(f"{f}/*.ipynb"))]


def name_of(path: Path) -> str:
    """Return a path as a reader in the repository would write it."""
    path = path.resolve()
    if path.is_relative_to(toc.ROOT):
        return path.relative_to(toc.ROOT).as_posix()
    return path.name


def read(path: Path):
    """Read a notebook, or refuse in one sentence."""
    import nbformat

    try:
        text = path.read_text(encoding="utf-8")
        if not {"cells", "nbformat"} <= set(json.loads(text)):
            raise ValueError
        return nbformat.reads(text, as_version=4)
    except OSError as error:
        raise bench.Refusal(f"{path}: {error.strerror.lower()}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bench.Refusal(f"{path} is not a notebook") from None


def source_hash(source: str) -> str:
    """Return the SHA-256 of a cell, the same under any line ending."""
    text = "\n".join(line.rstrip() for line in source.strip().splitlines())
    return hashlib.sha256(text.encode()).hexdigest()


def code_cells(book) -> list:
    """Return the cells that a kernel executes."""
    return [c for c in book.cells if c.cell_type == "code" and c.source]


def begins(cell) -> str:
    """Return how a cell begins, as its name in a message."""
    return textwrap.shorten(cell.source, 60, placeholder=" …")


# ---- executing -------------------------------------------------------------


def environment(folder: Path, smoke: bool) -> dict:
    """Return a kernel's environment: our packages, nobody's settings."""
    env = dict(os.environ) | OFFLINE
    paths = [str(toc.ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    env["PYTHONIOENCODING"] = "utf-8"
    env["IPYTHONDIR"] = str(folder)  # no profile and no start-up files
    env["BENCH_SMOKE"] = "1" if smoke else "0"
    env.pop("BENCH_RESULTS", None)
    return env


def kernel(folder: Path):
    """Return a manager of kernels of this very Python, on this machine only.

    ``folder`` holds the sockets: nothing listens on a port, but on Windows,
    which has no such sockets, on loopback.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    place = {"transport": "ipc", "ip": str(folder / "k")}
    if os.name == "nt":
        place = {"transport": "tcp", "ip": "127.0.0.1"}
    return AsyncKernelManager(
        kernel_name="python3",
        # the one that ipykernel describes: a kernel spec in the user's
        # folder may start another environment's Python
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=str(folder / "kernel.json"),
        **place,
    )


def executed(path: Path, smoke: bool = False, cell_s: int = CELL_S):
    """Execute a notebook from a clean kernel; return it with its outputs.

    Args:
        path: the notebook; its folder is where the kernel starts.
        smoke: set BENCH_SMOKE, which every script heeds.
        cell_s: seconds after which a cell has failed.

    Raises:
        Failed: names the notebook, the cell and the error.
    """
    try:
        from nbclient import NotebookClient, exceptions
    except ImportError:
        raise bench.Refusal(
            "notebooks need Jupyter: pip install -r requirements.txt"
        ) from None
    book = copy.deepcopy(read(path))
    at = {"cell": None}

    def began(cell, cell_index):
        at["cell"] = cell_index

    # a short path, for a socket's has at most about a hundred bytes
    with tempfile.TemporaryDirectory(prefix="nb-") as folder:
        client = NotebookClient(
            book,
            km=kernel(Path(folder)),
            timeout=cell_s,
            startup_timeout=120,
            # a busy machine may be late with what a cell displays, and
            # nbclient by default goes on without it
            iopub_timeout=cell_s,
            raise_on_iopub_timeout=True,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent.resolve())}},
            on_cell_start=began,
        )
        client.owns_km = True  # so that it ends the kernel, come what may
        try:
            client.execute(env=environment(Path(folder), smoke))
        except exceptions.CellExecutionError as error:
            said = f"{error.ename}: {error.evalue}"
        except exceptions.CellTimeoutError:
            said = f"took longer than {cell_s:g} s"
        except exceptions.DeadKernelError:
            said = "the kernel died"
        except AssertionError:
            # nbclient's own handler of Ctrl-C and SIGTERM ends the kernel,
            # and then stumbles over there being none to end
            if client.km is None:
                raise KeyboardInterrupt from None
            raise
        else:
            return book
    source = book.cells[at["cell"]].source if at["cell"] is not None else ""
    first = next(iter(source.splitlines()), "")
    cell = f"cell {at['cell']} ({first!r})" if source else "start"
    raise Failed(f"{name_of(path)}: {cell}: {said}")


# ---- what is kept ----------------------------------------------------------


def plain(text: str) -> str:
    """Take out of an output what says nothing elsewhere, or ever again."""
    temporary = tempfile.gettempdir()
    for path, name in [
        (str(toc.ROOT) + os.sep, ""),
        (str(toc.ROOT), "."),
        (sys.prefix, "<python>"),
        (sys.base_prefix, "<python>"),
        (os.path.realpath(temporary), "<temporary>"),
        (temporary, "<temporary>"),
        (str(Path.home()) + os.sep, "~" + os.sep),
    ]:
        if len(path) > 3:  # neither "/" nor a drive
            text = text.replace(path, name)
    text = re.sub(r"ipykernel_\d+[\\/]\d+\.py", "cell.py", text)
    return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x…", text)


def tidy(book):
    """Return a notebook without what would differ at every execution."""
    book = copy.deepcopy(book)
    kept = {k: book.metadata[k] for k in (STAMP,) if k in book.metadata}
    book.metadata.clear()
    book.metadata.update(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}} | kept
    )
    for cell in book.cells:
        kept = {k: v for k, v in cell.metadata.items() if k in (HASH, "tags")}
        cell.metadata.clear()
        cell.metadata.update(kept)
        cell.source = cell.source.rstrip("\n")
        if shows(cell):
            cell.outputs = [o for o in cell.outputs if "data" in o]
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = plain(output.text)
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/") and isinstance(value, str):
                    output.data[kind] = plain(value)
            if "metadata" in output:
                output.metadata.clear()
    book.nbformat, book.nbformat_minor = 4, 5
    return book


def stamp(book):
    """Write into a notebook where it was executed, and what was."""
    card = machine.card(bench.device_of())
    book.metadata[STAMP] = {
        "machine": card["id"],
        "line": machine.line(card),
        "python": card["python"],
        "torch": card["torch"],
        "source": machine.source(),
    }
    for cell in code_cells(book):
        cell.metadata[HASH] = source_hash(cell.source)
    return book


def write(path: Path, book) -> None:
    """Write a notebook whole or not at all, if it is small enough.

    Raises:
        Failed: it is not.
    """
    import nbformat

    text = nbformat.writes(book).rstrip("\n") + "\n"
    size = len(text.encode())
    if size > LIMIT:
        raise Failed(
            f"{name_of(path)}: {size / 1e3:,.0f} kB with its outputs, more "
            f"than {LIMIT / 1e3:,.0f}: print less, or draw fewer pictures"
        )
    bench.write_atomic(path, text)


# ---- looking ---------------------------------------------------------------


def sections(book) -> dict[str, list]:
    """Return the cells below each numbered heading, by section number."""
    found, here = {}, []
    for cell in book.cells:
        heads = []
        if cell.cell_type == "markdown":
            heads = TITLE.findall(cell.source)
        for _, number, _ in heads:
            here = found.setdefault(number, [])
        here.append(cell)
    return found


def paragraphs(cells: list) -> list[str]:
    """Return the running text of Markdown cells, headings left out."""
    text = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    blocks = (block.strip() for block in text.split("\n\n"))
    return [b for b in blocks if b and not b.startswith("#")]


def misnamed(path: Path, book) -> list[str]:
    """Compare headings with the book's contents: what is wrong or missing.

    Their levels are the book's, so that an outline has its shape.
    """
    contents, found = toc.load(), sections(book)
    said = []
    for cell in book.cells:
        if cell.cell_type != "markdown":
            continue
        for level, number, titles in TITLE.findall(cell.source):
            right = "#" * (1 + number.count("."))
            if level != right:
                said.append(f"{number}: its heading begins with {right}")
            if number not in contents:
                said.append(f"the book has no section {number}")
            elif titles != contents[number].titles:
                said.append(f"{number} is called {contents[number].titles!r}")
    folder = path.resolve().parent.name
    mine = [s for s in contents.values() if s.folder == folder]
    for chapter in mine:
        rest = [s for s in contents.values() if s.chapter == chapter.number]
        for s in rest:
            built = s.kind == "summary" or s.kind == "leaf" and not s.planned
            if built and s.number not in found:
                said.append(f"no heading for {s.number} {s.titles}")
    return said


def unexplained(book) -> list[str]:
    """Name the sections that lack a language, a question or an exercise."""
    said = []
    for number, cells in sections(book).items():
        known = toc.load().get(number)
        if known is None or known.kind not in ("leaf", "summary"):
            continue
        texts = paragraphs(cells)
        chinese = [t for t in texts if len(CHINESE.findall(t)) >= 15]
        english = [t for t in texts if not CHINESE.search(t) and len(t) > 60]
        if not chinese or not english:
            said.append(f"{number}: needs a paragraph in both languages")
        if known.kind == "summary":
            continue
        text = "\n".join(texts)
        said += [f"{number}: no {w!r}" for w in SAID if w not in text]
        if not any(c.cell_type == "code" for c in cells):
            said.append(f"{number}: no code cell")
    return said


def defined(cell) -> bool:
    """Say whether a cell defines what belongs in a script."""
    lines = cell.source.splitlines()
    if lines and lines[0].startswith("%%"):
        return False
    calm = [line for line in lines if not line.lstrip().startswith(("%", "!"))]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    try:
        tree = ast.parse("\n".join(calm))
    except SyntaxError:
        return True
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def unexecuted(book) -> list[str]:
    """Name the cells whose outputs are missing, wrong or another cell's."""
    said, cells = [], code_cells(book)
    stamped = book.metadata.get(STAMP, {})
    if missing := {"machine", "line", "torch", "python"} - set(stamped):
        said.append(f"not stamped ({', '.join(sorted(missing))})")
    if cells and not any(cell.outputs for cell in cells):
        said.append("no outputs")
    for cell in cells:
        first = begins(cell)
        if cell.metadata.get(HASH) != source_hash(cell.source):
            said.append(f"{first!r} is not the cell that was executed")
        if any(o.output_type == "error" for o in cell.outputs):
            said.append(f"{first!r} ended in an error")
    return said


def foreign(book) -> list[str]:
    """Name the sources shown that are not this repository's.

    A decorator's file lies elsewhere on every machine.
    """
    said = []
    for cell in filter(shows, book.cells):
        for file in FILE.findall("\n".join(texts(cell))):
            if "site-packages" in file or not (toc.ROOT / file).is_file():
                said.append(f"{begins(cell)!r} shows {file}, not ours")
    return said


def unloadable(path: Path, book) -> list[str]:
    """Name the ``%load`` lines that would bring nothing into their cell.

    They are comments, so that no execution ever tries them.
    """
    said = []
    for cell in code_cells(book):
        for names, file in LOAD.findall(cell.source):
            script, known = path.parent / file, set()
            if script.is_file():
                tree = ast.parse(script.read_text(encoding="utf-8"))
                known = {getattr(node, "name", None) for node in tree.body}
            for name in sorted(set(names.split(",")) - known):
                said.append(f"{begins(cell)!r}: no {name} in {file}")
    return said


def problems(path: Path) -> list[str]:
    """Return what is wrong with a notebook as it lies there."""
    book = read(path)
    said = misnamed(path, book) + unexplained(book)
    said += unexecuted(book) + foreign(book) + unloadable(path, book)
    for cell in code_cells(book):
        if defined(cell):
            first = begins(cell)
            said.append(f"{first!r} defines something: that is for scripts")
    raw = json.loads(path.read_text(encoding="utf-8"))  # read() mends ids
    ids = [cell.get("id") for cell in raw["cells"]]
    if None in ids or len(set(ids)) < len(ids):
        said.append("cells need ids, each its own")
    size = path.stat().st_size
    if size > LIMIT:
        said.append(f"{size / 1e3:,.0f} kB, more than {LIMIT / 1e3:,.0f}")
    return said


def shows(cell) -> bool:
    """Say whether a cell does nothing but display sources.

    What is printed there is an earlier cell's: of a process or a thread that
    it started, and that was late.
    """
    return cell.cell_type == "code" and cell.source.startswith("show(")


def replays(cell) -> bool:
    """Say whether a cell's text depends on the repository alone."""
    return shows(cell) or "replay" in cell.metadata.get("tags", [])


def texts(cell) -> list[str]:
    """Return what a cell's outputs say, pictures and warnings left out."""
    said = []
    for output in cell.outputs:
        if output.get("name") != "stderr" and not shows(cell):
            said.append(output.get("text", ""))
        data = output.get("data", {})
        said += [
            data[k] for k in ("text/markdown", "text/plain") if k in data
        ][:1]
    return [plain(text) for text in said if text]


def outdated(path: Path, now) -> list[str]:
    """Compare what lies there with an execution: what is not so any more."""
    said = []
    for old, new in zip(read(path).cells, now.cells, strict=True):
        if new.cell_type != "code" or not replays(new):
            continue
        lines = ["\n".join(texts(c)).splitlines() for c in (old, new)]
        if lines[0] != lines[1]:
            was, now_ = next(
                pair
                for pair in itertools.zip_longest(*lines)
                if pair[0] != pair[1]
            )
            said.append(
                f"{begins(old)!r} shows something else today: "
                f"{now_!r}, not {was!r}"
            )
    return said


# ---- the command -----------------------------------------------------------


def flags(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m chapters notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="all, if none")
    add("--smoke", action="store_true", help="tiny sizes, write nothing")
    add("--check", action="store_true", help="execute nothing, only look")
    add("--timeout", type=int, default=CELL_S, help="of a cell, seconds")
    args = parser.parse_args(argv)
    args.smoke |= os.environ.get("BENCH_SMOKE", "0") not in ("", "0")
    if not args.timeout > 0:
        raise bench.Refusal("--timeout: needs whole seconds above 0")
    for path in args.files:
        read(path)  # a name that is wrong, before minutes of the others
    args.files = args.files or notebooks()
    return args


def one(path: Path, args: argparse.Namespace) -> list[str]:
    """Do to one notebook what was asked; return what is wrong with it."""
    if args.check:
        said = problems(path)
        if not args.smoke:
            return said
    try:
        book = executed(path, args.smoke, args.timeout)
        if args.smoke:
            written = any(c.outputs for c in code_cells(read(path)))
            return (said if args.check else []) + (
                outdated(path, book) if written else []
            )
        write(path, tidy(stamp(book)))
    except Failed as failure:
        return [str(failure).removeprefix(f"{name_of(path)}: ")]
    return []


def main(argv: list[str] | None = None) -> int:
    """Take the notebooks one after the other; 1 if one of them failed."""
    args = flags(list(sys.argv[1:] if argv is None else argv))
    failed = False
    done = "looked at" if args.check else "executed"
    if args.smoke:
        done = "executed in a smoke run, nothing written"
    for path in args.files:
        began = time.monotonic()
        said = one(path, args)
        failed |= bool(said)
        seconds = f"{time.monotonic() - began:.0f} s"
        if not said:
            print(f"{name_of(path)}: {done} ({seconds})", flush=True)
        for sentence in said:
            print(f"{name_of(path)}: {sentence}", file=sys.stderr, flush=True)
    if not args.files:
        print("no notebooks yet")
    return int(failed)


if __name__ == "__main__":
    bench.run(main)
