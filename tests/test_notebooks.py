"""Notebooks are what was executed, complete, and run from a clean kernel."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from chapters import index, notebooks, toc
from common import bench

ROOT = Path(__file__).resolve().parent.parent
EVERY = notebooks.notebooks()
NAMES = [path.stem for path in EVERY]
every = pytest.mark.parametrize("path", EVERY, ids=NAMES)


def test_every_chapter_that_is_built_has_one():
    found = [path.parent.name for path in EVERY]
    chapters = [s for s in toc.load().values() if s.kind == "chapter"]
    for chapter in chapters:
        if not any(leaf.planned for leaf in toc.leaves(chapter.number)):
            assert found.count(chapter.folder) == 1, chapter.heading
    assert len(set(found)) == len(found)


@every
def test_it_is_what_was_executed_and_complete(path):
    assert not notebooks.problems(path)


@every
def test_its_chapters_page_leads_to_it(path):
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"[notebook]({path.name})" in page.split(index.BEGIN)[0]


@every
def test_it_is_linted_and_formatted(path):
    for words in ["check"], ["format", "--check"]:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, str(path)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if "No module named ruff" in done.stderr:
            pytest.skip("ruff is not installed")
        assert done.returncode == 0, done.stdout


@every
def test_executing_again_changes_no_line_but_results(path):
    """What lies there is tidy: nothing volatile is in it."""
    book = notebooks.read(path)
    text = path.read_text(encoding="utf-8")
    assert nbformat.writes(notebooks.tidy(book)).rstrip("\n") + "\n" == text
    assert str(Path.home()) + os.sep not in text or Path.home() == Path("/")


@every
def test_it_runs_from_a_clean_kernel_and_shows_todays_sources(path):
    before = path.read_bytes()
    book = notebooks.executed(path, smoke=True, cell_s=300)
    assert not notebooks.outdated(path, book)
    assert path.read_bytes() == before


# ---- the checks see what they are for --------------------------------------


def cell(source, outputs=(), **metadata):
    """Return a code cell that says it was executed as it is."""
    return nbformat.v4.new_code_cell(
        source,
        outputs=list(outputs),
        metadata={notebooks.HASH: notebooks.source_hash(source)} | metadata,
    )


def said(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def shown(text):
    return nbformat.v4.new_output("display_data", data={"text/markdown": text})


def good():
    """Return a complete notebook of chapter 1."""
    cells = [nbformat.v4.new_markdown_cell(f"# 1 {titles('1')}")]
    for number in ("1.1", "1.2", "1.3"):
        english = "A paragraph in English, as long as a thought needs to be."
        english += " A second sentence."
        chinese = "這裡是一段足夠長的中文說明文字，內容與上面的英文段落相同。"
        asked = "**Predict · 預測** what?\n\n**Answer · 解答** that.\n\n"
        asked += "**Exercise · 練習** do."
        text = f"## {number} {titles(number)}\n\n{english}\n\n{chinese}"
        cells.append(nbformat.v4.new_markdown_cell(f"{text}\n\n{asked}"))
        cells.append(cell(f"print({number})", [said(number + "\n")]))
    book = nbformat.v4.new_notebook(cells=cells)
    keys = ("machine", "line", "torch", "python")
    book.metadata[notebooks.STAMP] = dict.fromkeys(keys, "x")
    return book


def titles(number):
    return toc.load()[number].titles


def put(folder, book, name="ch01_large_models"):
    path = folder / "chapters" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(book), encoding="utf-8")  # mends nothing
    return path


def edit(book):
    book.cells[2].source += "  # edited"


def clear(book):
    for code in notebooks.code_cells(book):
        code.outputs = []


def end_in_an_error(book):
    error = nbformat.v4.new_output(
        "error", ename="KeyError", evalue="'x'", traceback=[]
    )
    book.cells[2].outputs.append(error)


def define(source):
    def add(book):
        book.cells.append(cell(source))

    add.__name__ = source.split()[0].strip("%@")
    return add


def lose_the_stamp(book):
    del book.metadata[notebooks.STAMP]


def lose_a_section(book):
    del book.cells[3:5]


def rename_a_section(book):
    book.cells[1].source = book.cells[1].source.replace(titles("1.1"), "Size")


def invent_a_section(book):
    book.cells[0].source = "# 1.7 More"


def raise_a_heading(book):
    book.cells[1].source = book.cells[1].source.replace("## 1.1", "### 1.1")


def leave_out_chinese(book):
    text = book.cells[1].source
    book.cells[1].source = "\n\n".join(
        part for part in text.split("\n\n") if not part.startswith("這裡")
    )


def ask_nothing(book):
    text = book.cells[1].source
    book.cells[1].source = text.replace("Predict · 預測", "Look · 觀察")


def answer_nothing(book):
    text = book.cells[3].source
    book.cells[3].source = text.replace("**Answer · 解答** that.", "")


def show_a_decorators_file(book):
    text = "```python\n# <python>/lib/x.py\ndef f(): ...\n```"
    book.cells.append(cell("show(f)", [shown(text)]))


def lose_the_ids(book):
    for part in book.cells:
        del part["id"]
    book.nbformat_minor = 4


def repeat_an_id(book):
    book.cells[1].id = book.cells[2].id


def grow(book):
    book.cells[2].outputs.append(said("x" * notebooks.LIMIT))


BAD = {
    edit: "is not the cell that was executed",
    clear: "no outputs",
    end_in_an_error: "ended in an error",
    define("def f():\n    pass"): "defines something",
    define("class A:\n    pass"): "defines something",
    define("f = lambda x: x"): "defines something",
    define("%matplotlib inline\nasync def f():\n    pass"): "defines",
    lose_the_stamp: "not stamped",
    lose_a_section: "no heading for 1.2",
    rename_a_section: "1.1 is called",
    invent_a_section: "no section 1.7",
    raise_a_heading: "1.1: its heading begins with ##",
    leave_out_chinese: "both languages",
    ask_nothing: "no 'Predict",
    answer_nothing: "no 'Answer",
    show_a_decorators_file: "shows <python>/lib/x.py, not ours",
    lose_the_ids: "need ids",
    repeat_an_id: "need ids",
    grow: "more than 500",
}


def test_a_good_one_has_no_problems(tmp_path):
    assert not notebooks.problems(put(tmp_path, good()))


@pytest.mark.parametrize("spoil", BAD, ids=[f.__name__ for f in BAD])
@pytest.mark.filterwarnings("ignore")  # nbformat's, of ids
def test_a_bad_one_is_caught(spoil, tmp_path):
    book = good()
    spoil(book)
    found = notebooks.problems(put(tmp_path, book))
    assert any(BAD[spoil] in sentence for sentence in found), found


def test_what_a_cell_offers_to_load_must_be_there(tmp_path):
    book = good()
    book.cells.append(cell("# %load -s f,Tape ../lab/x.py"))
    path, script = put(tmp_path, book), tmp_path / "lab" / "x.py"
    gone = "no f in ../lab/x.py"
    assert any(s.endswith(gone) for s in notebooks.problems(path))
    script.parent.mkdir()
    script.write_text("from y import f\n\n\nclass Tape:\n    pass\n")
    (said,) = notebooks.problems(path)  # a name that is imported has no source
    assert said.endswith(gone)
    script.write_text("def f():\n    pass\n\n\nclass Tape:\n    pass\n")
    assert not notebooks.problems(path)


def test_shown_sources_must_be_todays(tmp_path):
    book = good()
    book.cells.append(cell("show(\n    f,\n)", [shown("def f(): old")]))
    book.cells.append(cell("print(2)", [said("a time\n")]))
    book.cells.append(cell("again()", [said("2.0")], tags=["replay"]))
    path, now = put(tmp_path, book), copy.deepcopy(book)
    assert not notebooks.outdated(path, now)
    now.cells[-3].outputs = [shown("def f(): new")]
    for place in (-1, -2):
        now.cells[place].outputs = [said("now something else")]
    found = notebooks.outdated(path, now)
    assert [s.split("'")[1] for s in found] == ["show( f, )", "again()"]
    now.cells[-3].outputs = []
    assert "today: None, not" in notebooks.outdated(path, now)[0]


def test_what_an_earlier_cells_child_prints_is_not_what_a_cell_shows(tmp_path):
    book = good()
    book.cells.append(cell("show(f)", [shown("def f()")]))
    path, now = put(tmp_path, book), copy.deepcopy(book)
    now.cells[-1].outputs.insert(0, said("a child's last words"))
    assert not notebooks.outdated(path, now)
    assert notebooks.tidy(now).cells[-1] == book.cells[-1]


# ---- executing and writing ------------------------------------------------


def test_executing_writes_outputs_stamp_and_hashes(tmp_path, monkeypatch):
    """Real kernels: one that works, one that fails; none is in the way."""
    book = good()
    book.cells[2].source = (
        "import os\nimport pathlib\nimport sys\n\n"
        "import chapters.toc\n\n"
        "print(os.environ['BENCH_SMOKE'], chapters.toc.ROOT)\n"
        "print(os.getcwd() == str(pathlib.Path().resolve()), object())\n"
        "print(sys.executable)"
    )
    for code in notebooks.code_cells(book):
        code.outputs, code.metadata = [], {"execution": {"x": "now"}}
    del book.metadata[notebooks.STAMP]
    book.metadata["language_info"] = {"name": "python", "version": "3.0.0"}
    works = put(tmp_path, book)
    broken = copy.deepcopy(book)
    broken.cells[4].source = "1 / 0"
    fails = put(tmp_path, broken, "a_broken")
    before = fails.read_bytes()
    code = notebooks.main([str(fails), str(works)])
    assert code == 1 and fails.read_bytes() == before
    assert not notebooks.problems(works)
    kept = notebooks.read(works)
    text = works.read_text(encoding="utf-8")
    assert kept.cells[2].outputs[0].text.splitlines()[:2] == [
        "0 .",
        "True <object object at 0x…>",
    ]
    assert str(ROOT) not in text and sys.executable not in text
    assert (
        '"version"' not in text and "execution" not in kept.cells[2].metadata
    )
    stamp = kept.metadata[notebooks.STAMP]
    assert set(stamp) == {"machine", "line", "python", "torch", "source"}
    # again: only what was printed may differ, and here nothing is
    assert notebooks.main([str(works)]) == 0
    assert works.read_text(encoding="utf-8") == text


def test_an_error_names_notebook_cell_and_error(tmp_path, capsys):
    book = good()
    book.cells[2].source = "rows = {}\nrows['missing']"
    path = put(tmp_path, book)
    assert notebooks.main(["--smoke", str(path)]) == 1
    line = capsys.readouterr().err.strip()
    assert "ch01_large_models.ipynb: cell 2 ('rows = {}'): KeyError" in line


def test_a_cell_that_hangs_or_kills_its_kernel_is_named(tmp_path, capsys):
    book = good()
    book.cells[2].source = "import time\ntime.sleep(60)"
    hangs = put(tmp_path, book)
    assert notebooks.main(["--smoke", "--timeout", "1", str(hangs)]) == 1
    assert "took longer than 1 s" in capsys.readouterr().err
    book.cells[2].source = "import os\nos._exit(7)"
    dies = put(tmp_path, book)
    assert notebooks.main(["--smoke", str(dies)]) == 1
    assert "cell 2 ('import os'): the kernel died" in capsys.readouterr().err


def test_a_large_result_is_refused(tmp_path, monkeypatch, capsys):
    path = put(tmp_path, good())
    before = path.read_bytes()
    large = good()
    grow(large)
    monkeypatch.setattr(notebooks, "executed", lambda *_: large)
    assert notebooks.main([str(path)]) == 1
    assert "more than 500: print less" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_smoke_run_writes_nothing(tmp_path, monkeypatch):
    path = put(tmp_path, good())
    before = path.read_bytes()
    seen = []

    def executed(path, smoke, seconds):
        seen.append(smoke)
        return good()

    monkeypatch.setattr(notebooks, "executed", executed)
    monkeypatch.setenv("BENCH_SMOKE", "1")
    assert notebooks.main([str(path)]) == 0
    assert seen == [True] and path.read_bytes() == before


def test_errors_of_use_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(bench.Refusal, match="no such file"):
        notebooks.main([str(tmp_path / "x.ipynb")])
    for text in "hello", json.dumps({"a": 1}), "[]":
        (tmp_path / "x.ipynb").write_text(text)
        with pytest.raises(bench.Refusal, match="is not a notebook"):
            notebooks.main([str(tmp_path / "x.ipynb")])
    with pytest.raises(bench.Refusal, match="--timeout"):
        notebooks.main(["--timeout", "0"])


def test_the_command_is_wired(capsys):
    done = subprocess.run(
        [sys.executable, "-m", "chapters", "notebooks", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "--smoke" in done.stdout
