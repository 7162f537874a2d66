"""The table of contents is the book's; scripts say what they serve."""

import ast
import hashlib
import os
import signal
import subprocess
import sys

import pytest

from chapters import __main__ as book
from chapters import toc
from common import bench

LEAVES, SUMMARIES, LINES = 115, 6, 160
# SHA-256 of the lines "number<TAB>title in Chinese" of the printed contents
CONTENTS = "87133e87eb1002125a20fdda3a8330e7d797948202801a9242efe17b0366a978"


def digest(sections):
    lines = "".join(f"{s.number}\t{s.title_zh}\n" for s in sections)
    return hashlib.sha256(lines.encode()).hexdigest()


def ready():
    return [s for s in toc.load().values() if s.modules and not s.planned]


def test_the_contents_are_the_books():
    sections = list(toc.load().values())
    kinds = [s.kind for s in sections]
    assert kinds.count("chapter") == 10
    assert kinds.count("leaf") == LEAVES
    assert kinds.count("summary") == SUMMARIES
    assert len(sections) == LINES
    assert digest(sections) == CONTENTS
    assert digest(sections[1:]) != CONTENTS


def test_sections_stand_in_order_and_are_complete():
    def key(number):
        return [int(part) for part in number.split(".")]

    numbers = list(toc.load())
    assert numbers == sorted(numbers, key=key)
    for s in toc.load().values():
        assert s.title and s.title_zh
        for need in s.needs:
            known = need in ("cpu", "cuda", "ranks", "root")
            assert known or need.startswith("tool:"), (s.number, need)
        if s.kind == "leaf":
            assert s.modules, s.number
        if s.kind == "chapter":
            assert s.folder, s.number


def opening(module):
    doc = ast.get_docstring(ast.parse(toc.file_of(module).read_text("utf-8")))
    return (doc or "").split("\n\n")[0].splitlines()


@pytest.mark.parametrize("found", ready(), ids=lambda s: s.number)
def test_a_section_that_is_not_planned_has_its_script(found):
    for module in found.modules:
        assert toc.file_of(module), f"{found.number}: no module {module}"
        if found.kind == "leaf":
            assert found.heading in opening(module), (
                f"the docstring of {module} lacks the line {found.heading!r}"
            )


def test_scripts_serve_the_sections_they_name():
    """No script opens with a section that the contents do not give it."""
    served = {}
    for found in ready():
        for module in found.modules:
            served.setdefault(module, set()).add(found.heading)
    for module, headings in served.items():
        extra = {line for line in opening(module) if line[:1].isdigit()}
        assert extra <= headings, module


def test_how_many_are_planned(capsys):
    planned = [s for s in toc.load().values() if s.planned]
    leaves = [s for s in toc.load().values() if s.kind == "leaf"]
    with capsys.disabled():
        print(f" [{len(planned)} of {len(leaves)} sections planned]", end="")
    assert all(s.kind == "leaf" for s in planned)


def test_numbers_find_their_leaves():
    assert [s.number for s in toc.leaves("1")] == ["1.1", "1.2", "1.3"]
    assert [s.number for s in toc.leaves("10.1")] == ["10.1"]
    assert len(toc.leaves("10")) == 18
    assert [s.number for s in toc.jobs("10")] == ["10"]
    with pytest.raises(bench.Refusal, match="no section '6.9'"):
        toc.section("6.9")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("specialised optimizers", "6.5.2"),
        ("Fused operators", "6.2.2"),
        ("減少CPU 和GPU 間的同步", "6.3"),
        ("hidden_syncs", "6.3"),
        ("overlap COPY", "6.1.3"),
        ("ch06", "6"),
        ("Memory", "2.1.1"),  # in full, though others hold the word
    ],
)
def test_words_find_their_section(words, number):
    assert toc.named(words.split()).number == number


@pytest.mark.parametrize("title", ["title", "title_zh"])
def test_a_leafs_title_finds_it_or_its_namesakes(title):
    leaves = [s for s in toc.load().values() if s.kind == "leaf"]
    for found in leaves:
        try:
            assert toc.named(getattr(found, title).split()) == found
        except bench.Refusal as several:
            assert found.heading in str(several)


def test_the_book_fits_the_terminal():
    lines = book.contents().splitlines()
    assert len(lines) >= LINES
    assert max(columns(line) for line in lines) <= 100


def columns(text):
    import unicodedata

    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["6.9"], "no section '6.9'"),
        (["nothing"], "no section 'nothing'"),
        (["-x"], "no section '-x'"),
        (["find", "bottlenecks"], "(?s)no section.*  4.3.4  Locating"),
        (["memory", "bottleneck", "--smoke"], "no section 'memory bottle"),
        (["copy"], "(?s)several titles.*  6.1.2  Asyn.*  6.1.3  Overlap"),
        (["5"], "planned"),
        (["8.4.1"], "planned"),
        (["6.6"], "summary"),
        (["record", "6.9"], "no section '6.9'"),
        (["record", "--budget", "-3"], "--budget"),
    ],
)
def test_what_cannot_run_is_one_sentence(words, sentence):
    with pytest.raises(bench.Refusal, match=sentence):
        book.main(words)


def test_a_refusal_ends_with_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "chapters", "6.9"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_section_runs_and_shows_its_source(capfd):
    assert book.main(["1.2", "--smoke"]) == 0
    assert "1.2  The challenge of data scale" in capfd.readouterr().out
    assert book.main(["model", "scale", "--source"]) == 0
    assert "def smallest_count" in capfd.readouterr().out
    assert book.main(["§1.1.", "--source"]) == 0
    assert "def smallest_count" in capfd.readouterr().out
    assert book.main(["10.1", "--source"]) == 0
    assert "class GPT(" in capfd.readouterr().out


SLOW_TO_END = """
import sys, time
sys.path.insert(0, {root!r})
from common import bench

def main():
    try:
        print("ready", flush=True)
        time.sleep(300)
    finally:
        time.sleep(1)  # more than subprocess.run would wait
        print("restored", flush=True)

bench.run(main)
"""
STARTS = """
import sys
sys.path.insert(0, {root!r})
import chapters.__main__ as book
from common import bench

words = [sys.executable, "-c", {child!r}]
bench.run(lambda: book.ended(words)[0])
"""


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize(("send", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_what_runs_restores_before_it_ends(send, code):
    """The known wrong version (subprocess.run) kills it at once."""
    child = SLOW_TO_END.format(root=str(toc.ROOT))
    program = STARTS.format(root=str(toc.ROOT), child=child)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        if send == "SIGINT":  # as a terminal does: all of the group
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        assert process.stdout.read() == "restored\n"
        assert process.wait() == code
