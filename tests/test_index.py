"""The tables of the READMEs are made from the contents and the records."""

import dataclasses
import hashlib
import json
from types import SimpleNamespace

import pytest

from chapters import index, toc
from common import bench


def test_no_table_is_stale():
    stale = [str(path) for path in index.stale()]
    assert not stale, "run `make index` (python -m chapters index)"


def test_every_folder_of_a_chapter_has_a_page():
    for found in toc.load().values():
        if found.kind == "chapter" and toc.folder(found).is_dir():
            assert (toc.folder(found) / "README.md").exists()


def test_a_page_needs_its_markers(tmp_path):
    page = tmp_path / "README.md"
    with pytest.raises(bench.Refusal, match="README.md needs one"):
        index.renewed("no markers", "| a |", page)
    text = f"before\n{index.BEGIN}\nold\n{index.END}\nafter\n"
    new = index.renewed(text, "| a |", page)
    assert new == f"before\n{index.BEGIN}\n| a |\n{index.END}\nafter\n"
    assert index.renewed(new, "| a |", page) == new


def test_ratios():
    assert index.ratio(1.85, [1.8, 1.9]) == "1.85× [1.80, 1.90]"
    assert index.ratio(0.5, [0.4, 0.6]) == "0.50× [0.40, 0.60]"
    assert index.ratio(1.01, [0.98, 1.04]) == "no difference measured"
    assert index.ratio(1.02, [1.005, 1.04]) == "no difference measured"
    assert index.ratio(2.0, None) == "2.00×"
    said = "unsteady: 1.85× [1.80, 1.90]"
    assert index.ratio(1.85, [1.8, 1.9], differs=False) == said


def test_a_ratio_that_nobody_timed_is_no_comparison():
    rows = [{"name": name, "ratio": 19.09} for name in ("L1", "L2")]
    assert index.compared({"rows": rows}) == ("", "recorded")


def test_counts_stand_for_times_without_a_gpu(chapter, monkeypatch):
    rows = [
        {"name": "as written", "ratio": 1.0, "ratio_interval": [1, 1]},
        {"name": "cured", "ratio": 1.3, "ratio_interval": [1.2, 1.4]},
        {"row": "as written", "waits": 7},
        {"row": "cured", "waits": 0},
    ]
    keep(chapter, rows)
    assert "1.30×" in index.chapter_table("1")
    found = toc.load()["1.1"]
    monkeypatch.setitem(
        toc.load(), "1.1", dataclasses.replace(found, counts="waits")
    )
    table = index.chapter_table("1")
    assert "waits: 7 → 0" in table and "1.30×" not in table


def test_a_table_says_what_the_record_says():
    for found in toc.load().values():
        if found.kind != "chapter":
            continue
        for scripts in index.entries(toc.folder(found)).values():
            for entry in scripts.values():
                for row in entry["rows"]:
                    if row.get("differs") is None:
                        continue
                    said = index.ratio(
                        row["ratio"], row["ratio_interval"], row["differs"]
                    )
                    assert row["verdict"].startswith(said), row


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    """A chapter of one section, with a script and a record of it."""
    folder = tmp_path / "ch01_x"
    (folder / "results").mkdir(parents=True)
    script = folder / "copies.py"
    script.write_text('"""1.1  Copies · 拷貝\n\nQuestion  Which?\n"""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    chapter = toc.Section("1", "One", "一", "chapter", folder="ch01_x")
    leaf = toc.Section("1.1", "Copies", "拷貝", modules=("ch01_x.copies",))
    book = {"1": chapter, "1.1": leaf}
    monkeypatch.setattr(toc, "load", lambda: book)
    monkeypatch.setattr(toc, "ROOT", tmp_path)
    monkeypatch.setattr(index.machine, "line", lambda card: card["id"])
    return SimpleNamespace(folder=folder, script=script)


def entry(script, rows):
    return {
        "machine": {"id": "box-1"},
        "method": bench.METHOD,
        "script_sha256": bench.script_hash(script),
        "rows": rows,
    }


def keep(chapter, rows, **more):
    record = {"ch01_x.copies": entry(chapter.script, rows) | more}
    path = chapter.folder / "results" / "box-1.json"
    path.write_text(json.dumps(record), encoding="utf-8")


def test_a_record_reaches_the_table(chapter):
    assert "×" not in index.chapter_table("1")
    assert "Which?" in index.chapter_table("1")
    rows = [
        {"name": "pageable", "ratio": 1.0, "ratio_interval": [1, 1]},
        {"name": "pinned", "ratio": 1.5, "ratio_interval": [1.4, 1.6]},
    ]
    keep(chapter, rows)
    table = index.chapter_table("1")
    assert "pageable → pinned ([`copies`](copies.py))" in table
    assert "| 1.50× [1.40, 1.60] |" in table  # one machine: said once, below
    assert table.endswith("\n\nRecorded on `box-1`: box-1")
    assert index.recorded(toc.load()["1.1"]) == {"box-1": ""}
    rows.append({"name": "two streams", "ratio": 2, "ratio_interval": [2, 3]})
    keep(chapter, rows)
    table = index.chapter_table("1")
    assert "pinned 1.50× [1.40, 1.60]; two streams 2.00× [2.00, 3.00]" in table

    chapter.script.write_text('"""1.1  Copies\n\nQuestion  Other\n"""')
    assert "of an older version" in index.chapter_table("1")


def test_of_several_machines_each_ratio_names_its_own(chapter):
    rows = [
        {"name": "pageable", "ratio": 1.0, "ratio_interval": [1, 1]},
        {"name": "pinned", "ratio": 1.5, "ratio_interval": [1.4, 1.6]},
    ]
    keep(chapter, rows)
    record = (chapter.folder / "results" / "box-1.json").read_text("utf-8")
    other = chapter.folder / "results" / "box-2.json"
    other.write_text(record.replace("box-1", "box-2"), encoding="utf-8")
    table = index.chapter_table("1")
    assert table.count("1.50× [1.40, 1.60] (`box-") == 2
    assert table.count("Recorded on") == 0 and "`box-2`: box-2" in table


def test_what_no_machine_made_is_left_out(chapter):
    path = chapter.folder / "results" / "predictions.json"
    path.write_text('{"cases": [], "margin": "a tenth"}', encoding="utf-8")
    assert index.recorded(toc.load()["1.1"]) == {}
    assert "tenth" not in index.chapter_table("1")


def row(section, step, verdict="kept", ratio=None, peak=None, track="speed"):
    return {
        "section": section,
        "step": step,
        "track": track,
        "title": step.title(),
        "verdict": verdict,
        "ratio_previous": ratio,
        "ratio_interval": ratio and [ratio - 0.1, ratio + 0.1],
        "peak_bytes": peak and {"tracked": peak},
    }


def test_a_log_reaches_the_table(chapter):
    steps = chapter.folder / "steps.py"
    steps.write_text("one = 1\n", encoding="utf-8")
    digest = hashlib.sha256(b"one = 1\n").hexdigest()[:16]
    key = {"sources": {"ch01_x.steps": digest}}
    rows = [
        row("1.0", "plain", track="memory", peak=100),
        row("1.0", "fatter", "reverted", peak=900, track="memory"),
        row("1.1", "halved", track="memory", peak=50, ratio=0.8),
        row("1.1", "half", "reverted", ratio=0.5),
        row("1.1", "gpus", "not-applicable"),
    ]
    keep(chapter, rows, key=key)
    table = index.chapter_table("1")
    assert "Halved: memory -50%, speed 0.80× [0.70, 0.90]; " in table
    assert "Half: speed 0.50× [0.40, 0.60], reverted; " in table
    assert "Gpus: not-applicable |" in table
    assert "older" not in table
    assert index.recorded(toc.load()["1.1"]) == {"box-1": ""}

    rows[3]["steady"] = False  # not in every third of the rounds
    keep(chapter, rows, key=key)
    said = "Half: speed unsteady: 0.50× [0.40, 0.60], reverted"
    assert said in index.chapter_table("1")

    steps.write_text("one = 2\n", encoding="utf-8")
    assert "of an older version" in index.chapter_table("1")
    keep(chapter, rows[:2], key=key)  # the section is not in it
    assert index.recorded(toc.load()["1.1"]) == {}
