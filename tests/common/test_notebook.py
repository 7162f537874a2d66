"""What notebooks show: source, bars, rows beside records."""

import json
import sys
import warnings

import pytest

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
    assert text.startswith("def synchronize(") and "def wall(" in text


def test_show_and_plot_display_in_ipython(monkeypatch, capsys):
    ipython = pytest.importorskip("IPython")
    shown = []
    monkeypatch.setattr(ipython, "get_ipython", lambda: object())
    monkeypatch.setattr("IPython.display.display", shown.append)
    notebook.show(timers.wall)
    notebook.plot(ROWS)
    code, image = shown
    assert "def wall(" in code.data
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
    assert [bar.get_width() for bar in axes.patches] == [2e-3, 1e-3]
    (segments,) = [
        c.get_segments() for c in axes.collections if hasattr(c, "get_paths")
    ]
    ends = [sorted(point[0] for point in s) for s in segments]
    assert ends == [pytest.approx([1.9e-3, 2.2e-3]), [0.9e-3, 1.3e-3]]
    assert axes.get_xlabel() == "s per batch"
    assert [t.get_text() for t in axes.texts] == [" 2 ms", " 1 ms"]


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
    }
    old = entry | {"script_sha256": "0"}
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
