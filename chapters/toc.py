"""Read the table of contents, and ask what of it can run here."""

import difflib
import functools
import importlib.util
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common import bench

ROOT = Path(__file__).resolve().parent.parent
TOC = Path(__file__).with_name("toc.toml")
SHOWN = 12  # titles, of those that hold a word


@dataclass(frozen=True)
class Section:
    """One line of the book; ``toc.toml`` explains the fields."""

    number: str
    title: str
    title_zh: str
    kind: str = "leaf"  # chapter, group, leaf, summary
    folder: str | None = None
    modules: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    shows: str | None = None
    counts: str | None = None
    source: str | None = None
    needs: tuple[str, ...] = ("cpu",)
    budget: bool = False
    weight: int = 1
    planned: bool = False

    @property
    def chapter(self) -> str:
        return self.number.split(".")[0]

    @property
    def heading(self) -> str:
        """The line that opens the docstring of a script of this section."""
        return f"{self.number}  {self.titles}"

    @property
    def titles(self) -> str:
        return f"{self.title} · {self.title_zh}"


@functools.cache
def load(path: Path = TOC) -> dict[str, Section]:
    """Return every section by its number, in the order of the book."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    found = {}
    for number, fields in data.items():
        if "." not in number:
            kind = "chapter"
        else:
            inside = any(other.startswith(number + ".") for other in data)
            kind = "group" if inside else "leaf"
        lists = {k: tuple(v) for k, v in fields.items() if type(v) is list}
        found[number] = Section(number, **({"kind": kind} | fields | lists))
    return found


def section(number: str) -> Section:
    """Return the section, or refuse in one sentence."""
    if number not in load():
        raise bench.Refusal(
            f"the book has no section {number!r}; `python -m chapters` "
            "lists all of them"
        )
    return load()[number]


def named(words: list[str]) -> Section:
    """Return the one section whose titles and scripts hold every word.

    A title in full finds its section, however many others hold it, too.
    """
    text = " ".join(words).casefold()
    found = [
        s
        for s in load().values()
        if all(word in _words(s) for word in text.split())
    ]
    whole = [s for s in found if text in (s.title.casefold(), s.title_zh)]
    found = whole if len(whole) == 1 else found
    if len(found) == 1:
        return found[0]
    said = f"{text!r} is in several titles; which one?"
    if not found:
        titles = {s.title.casefold(): s for s in load().values()}
        close = difflib.get_close_matches(text, titles)
        found = [titles[title] for title in close]
        said = (
            f"the book has no section {text!r}; "
            "`python -m chapters` lists all of them"
        )
    lines = [f"  {s.heading}" for s in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    raise bench.Refusal("\n".join([said, *lines]))


def _words(found: Section) -> str:
    """Return what a section may be found by."""
    scripts = " ".join(m.split(".")[-1] for m in found.modules)
    return f"{found.heading} {scripts} {found.folder or ''}".casefold()


def leaves(number: str) -> list[Section]:
    """Return the leaves of a chapter or group; of a leaf, itself."""
    return [
        s
        for s in load().values()
        if s.kind == "leaf" and f"{s.number}.".startswith(f"{number}.")
    ]


def folder(found: Section) -> Path:
    """Return the folder of the section's chapter."""
    return ROOT / load()[found.chapter].folder


def jobs(number: str) -> list[Section]:
    """Return what runs for a number: its leaves, or a chapter as a whole.

    A chapter with modules of its own (chapter 10's log) is one job.
    """
    found = section(number)
    if found.modules:
        return [] if found.planned else [found]
    return [leaf for leaf in leaves(number) if not leaf.planned]


def commands(found: Section) -> list[tuple[str, ...]]:
    """Return the (module, argument, …) that the section runs."""
    return [(module, *found.args) for module in found.modules]


def file_of(module: str) -> Path | None:
    """Return a module's file without running it; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its folder is not there
        return None
    return Path(spec.origin) if spec and spec.origin else None


@functools.cache
def has(need: str) -> bool:
    """Say whether this machine meets one of a section's needs."""
    if need.startswith("tool:"):
        return shutil.which(need.removeprefix("tool:")) is not None
    if need == "root":
        root = getattr(os, "geteuid", lambda: 1)() == 0
        return root and shutil.which("ip") is not None
    import torch

    if need == "cuda":
        return torch.cuda.is_available()
    if need == "ranks":
        return torch.distributed.is_available()
    return need == "cpu"


def missing(found: Section) -> list[str]:
    """Return the needs of the full experiment that are not met here."""
    return [need for need in found.needs if not has(need)]
