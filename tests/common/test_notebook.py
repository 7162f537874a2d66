"""What notebooks show: source, bars, rows beside records."""

import json
import sys
import warnings

import pytest
import torch

from common import bench, notebook, timers

ROWS = [
    {
        "name": "one stream",
        "median_s": 2e-3,
        "q1_s": 1.9e-3,
        "q3_s": 2.2e-3,
        "ratio": 1.0,
        "unit": "batch",
    },
    {
        "name": "two streams",
        "median_s": 1e-3,
        "q1_s": 0.9e-3,
        "q3_s": 1.3e-3,
        "ratio": 2.0,
        "unit": "batch",
    },
]


def test_show_prints_the_source(capsys):
    notebook.show(timers.synchronize, timers.wall)
    text = capsys.readouterr().out
    assert text.startswith("# common/timers.py\ndef synchronize(")
    assert "\n\n\ndef wall(" in text


def test_show_names_the_file_of_what_a_decorator_wraps(capsys):
    """Not the decorator's, which lies elsewhere on every machine."""
    notebook.show(decorated)
    text = capsys.readouterr().out
    assert "# tests/common/test_notebook.py\n@torch.no_grad()" in text


@torch.no_grad()
def decorated():
    pass


def test_show_and_plot_display_in_ipython(monkeypatch, capsys):
    ipython = pytest.importorskip("IPython")
    shown = []
    monkeypatch.setattr(ipython, "get_ipython", lambda: object())
    monkeypatch.setattr("IPython.display.display", shown.append)
    notebook.show(timers.wall)
    notebook.plot(ROWS)
    code, image = shown
    assert code.data.startswith("```python\n# common/timers.py\ndef wall(")
    assert code.data.endswith("\n```")
    assert image.data.startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


def test_import_is_light():
    import subprocess

    code = (
        "import sys, common.notebook\n"
        "print([m for m in ('IPython', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_bars_have_heights_and_quartiles():
    axes = notebook.bars(ROWS, title="Streams · 流").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2, 1]
    (segments,) = [
        c.get_segments() for c in axes.collections if hasattr(c, "get_paths")
    ]
    ends = [sorted(point[0] for point in s) for s in segments]
    assert ends == [pytest.approx([1.9, 2.2]), pytest.approx([0.9, 1.3])]
    assert axes.get_xlabel() == "ms per batch"
    assert [t.get_text() for t in axes.texts] == [" 2 ms", " 1 ms"]


@pytest.mark.parametrize(
    ("value", "key", "unit"),
    [
        (2.0, "median_s", (1, "s")),
        (9.999e-4, "median_s", (1e-6, "µs")),
        (41e9, "state_bytes", (2**30, "state (GiB)")),
        (17e9, "copy_bytes_per_s", (1e9, "copy (GB/s)")),
        (1500, "tokens_per_s", (1, "tokens per s")),
        (0, "syncs", (1, "syncs")),
    ],
)
def test_an_axis_has_the_unit_that_is_written(value, key, unit):
    size, name = notebook._unit(value, key)
    assert (pytest.approx(size), name) == unit


def test_plot_of_bytes_writes_a_png(tmp_path):
    rows = [{"name": "a", "peak_bytes": 1 << 20}, {"name": "b"}]
    notebook.plot(rows, "peak_bytes", path=tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("font", [None, "Noto Sans TC"])
def test_labels_are_english_without_a_chinese_font(font, monkeypatch):
    monkeypatch.setattr(notebook, "cjk_font", lambda: font)
    title = "Two streams · 兩個流"
    assert notebook.label(title) == (title if font else "Two streams")
    assert notebook.label("plain") == "plain"
    assert notebook.fonts()["font.family"][1:] == ([font] if font else [])


def test_drawing_a_bilingual_title_never_warns(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notebook.plot(ROWS, title="Streams · 流", path=tmp_path / "x.png")


def test_font_is_one_of_this_machine():
    from matplotlib import font_manager

    font = notebook.cjk_font()
    names = {f.name for f in font_manager.fontManager.ttflist}
    assert font in names if font else not names & set(notebook.CJK_FONTS)


def test_rows_beside_the_record(tmp_path, monkeypatch, capsys):
    chapter = tmp_path / "ch98_demo"
    (chapter / "results").mkdir(parents=True)
    script = chapter / "streams.py"
    script.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    entry = {
        "rows": [ROWS[0] | {"median_s": 5e-3}],
        "method": bench.METHOD,
        "script_sha256": bench.script_hash(script),
        "when": "2026-02-01",
    }
    old = entry | {"script_sha256": "0", "when": "2026-01-01"}
    for machine, found in ("new-4c", entry), ("old-2c", old), ("x", None):
        entries = {"ch98_demo.streams": found} if found else {}
        text = json.dumps(entries)
        (chapter / "results" / f"{machine}.json").write_text(text)
    notebook.beside_record(ROWS, "ch98_demo.streams")
    assert capsys.readouterr().out.splitlines() == [
        "row          here          new-4c        old-2c",
        "───────────  ────────────  ────────────  ────────────",
        "one stream   2 ms (1.00×)  5 ms (1.00×)  5 ms (1.00×)",
        "two streams  1 ms (2.00×)  —             —",
        "old-2c: a record of an older version",
    ]


def test_no_record_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    notebook.beside_record(ROWS, timers)
    assert "no record of common.timers yet" in capsys.readouterr().out


def test_each_table_has_its_panel():
    titled = [row | {"title": "Copies · 拷貝"} for row in ROWS]
    titled += [row | {"title": "Compute"} for row in ROWS[:1]]
    first, second = notebook.bars(titled, title="Both").axes
    assert first.get_title(loc="left").startswith("Copies")
    assert second.get_title(loc="left") == "Compute"
    assert (len(first.patches), len(second.patches)) == (2, 1)


def test_rows_without_a_name_are_called_by_their_first_value():
    axes = notebook.bars([{"call": "item", "syncs": 2}], "syncs").axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["item"]


def test_lines_of_a_group():
    rows = [
        {"batch": n, "rate": n * k, "name": f"times {k}"}
        for k in (1, 2)
        for n in (1, 2, 4)
    ]
    rows.append({"batch": 8, "rate": None, "name": "times 1"})
    axes = notebook.lines(rows, "batch", "rate", "name", log=True).axes[0]
    drawn = [
        (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    ]
    assert drawn == [([1, 2, 4], [1, 2, 4]), ([1, 2, 4], [2, 4, 8])]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "times 1",
        "times 2",
    ]
    assert len(notebook.lines(rows[:3], "batch", "rate").axes[0].lines) == 1


def test_pictures_are_small_and_alike(tmp_path):
    for name in "ab":
        notebook.plot(ROWS, title="Streams", path=tmp_path / name)
    a, b = ((tmp_path / name).read_bytes() for name in "ab")
    assert a == b and len(a) < 15_000
    notebook.picture(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def streams(tmp_path, monkeypatch):
    """A script with two tables and records of two machines."""
    chapter = tmp_path / "ch98_demo"
    (chapter / "results").mkdir(parents=True)
    (chapter / "tables.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    rows = [
        ROWS[0] | {"title": "A", "iqr_s": 0.0, "verdict": "baseline"},
        ROWS[0] | {"title": "B", "median_s": 9e-3},
        {"title": "C", "name": "one stream", "peak_bytes": 1024},
    ]
    for machine, when in ("old", "2026-01-01"), ("new", "2026-02-01"):
        entry = {"rows": rows, "when": when, "columns": {"C": ["peak_bytes"]}}
        text = json.dumps({"ch98_demo.tables": entry})
        (chapter / "results" / f"{machine}.json").write_text(text)
    return "ch98_demo.tables"


def test_tables_are_compared_one_by_one(streams, capsys):
    rows = [ROWS[0] | {"title": "A"}, ROWS[0] | {"title": "B"}]
    notebook.beside_record(rows, streams)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "A" and out[5] == "B"
    assert out[3].split("  ") == ["one stream", *["2 ms (1.00×)"] * 3]
    assert "9 ms" in out[8]


def test_the_newest_record_is_shown_without_a_run(streams, capsys):
    assert list(notebook.records(streams)) == ["new", "old"]
    notebook.recorded(streams)
    out = capsys.readouterr().out
    assert out.startswith("recorded on new, an older version\n\nA\n")
    assert "old\n" not in out and "s per batch" in out
    assert "C\npeak bytes\n──────────\n     1 KiB\n" in out
    notebook.recorded(timers)
    assert capsys.readouterr().out == "no record of common.timers yet\n"
