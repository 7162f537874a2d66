"""The planted function is on top, in a fixture and in a real run."""

import json
import sys

import pytest
import torch

from ch04_profiling import planted_loader, py_spy
from common import bench

RAW = """\
<module> (a.py:9);import_all (b.py:1) 500
<module> (a.py:9);main (a.py:7);train (a.py:5);load (x/y.py:3);decode (a.py:1) 60
<module> (a.py:9);main (a.py:7);train (a.py:5);load (x/y.py:3);decode (a.py:2) 15
<module> (a.py:9);main (a.py:7);train (a.py:5);load (x/y.py:4) 5
<module> (a.py:9);main (a.py:7);train (a.py:6);C.step (<frozen m>:8) 20
a line that is none
"""  # noqa: E501


def test_the_raw_format_is_read():
    found = py_spy.stacks(RAW)
    assert sum(count for _, count in found) == 600
    assert found[1] == (["<module>", "main", "train", "load", "decode"], 60)
    assert found[4][0][-1] == "C.step"


def test_self_and_total_are_told_apart():
    counts = py_spy.functions(py_spy.stacks(RAW), "train")
    assert counts["decode"] == [75, 75]
    assert counts["load"] == [5, 80]
    assert counts["train"] == [0, 100]
    assert "import_all" not in counts  # start-up
    assert py_spy.hottest(counts) == "decode"


def test_wrong_ways_miss_the_planted_function():
    """By total time callers win; with start-up the imports do."""
    found = py_spy.stacks(RAW)
    counts = py_spy.functions(found, "train")
    assert max(counts, key=lambda name: counts[name][1]) != "decode"
    everything = py_spy.functions(found, "<module>")
    assert py_spy.hottest(everything) == "import_all"


def test_a_function_that_calls_itself_counts_once():
    counts = py_spy.functions([(["f", "g", "f", "g"], 3)], "f")
    assert counts == {"f": [0, 3], "g": [3, 3]}


def test_boxes_of_a_flame_graph_fill_their_parents():
    found = py_spy.boxes(py_spy.stacks(RAW))
    assert found[("train",)] == (0, 100)
    children = [v for stack, v in found.items() if len(stack) == 2]
    assert sorted(children) == [(0, 20), (20, 80)]
    assert found[("train", "load", "decode")] == (20, 75)


def test_both_decoders_agree():
    raw = bytes(range(256)) * 16
    torch.testing.assert_close(
        planted_loader.decode_by_pixel(raw), planted_loader.decode_whole(raw)
    )


def test_the_command_is_whole():
    words = py_spy.command("py-spy", ["python", "x.py"], "out", "raw", 50)
    assert words[:2] == ["py-spy", "record"]
    assert words[-3:] == ["--", "python", "x.py"]
    assert words[words.index("--rate") + 1] == "50"
    assert words[words.index("--output") + 1] == "out"


def test_without_the_tool_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(py_spy, "tool", lambda: None)
    assert py_spy.main(["--smoke", "--device", "cpu"]) == []
    assert "pip install py-spy" in capsys.readouterr().out
    with pytest.raises(bench.Refusal, match="needs py-spy"):
        py_spy.main(["--device", "cpu", "--out", "flame.svg"])
    with pytest.raises(bench.Refusal, match="end it in .svg"):
        py_spy.main(["--device", "cpu", "--out", "flame.gif"])
    with pytest.raises(bench.Refusal, match="no such folder"):
        py_spy.main(["--device", "cpu", "--out", "absent/flame.svg"])


def test_a_tool_without_permission_is_no_failure(
    monkeypatch, capsys, tmp_path
):
    """Stands for py-spy where it may not read other processes."""
    script = tmp_path / "denied.py"
    script.write_text("import sys; sys.exit('Error: Permission Denied')")
    monkeypatch.setattr(py_spy, "tool", lambda: sys.executable)
    real = py_spy.command
    monkeypatch.setattr(
        py_spy,
        "command",
        lambda tool, *rest: [tool, str(script), *real(tool, *rest)[1:]],
    )
    assert py_spy.main(["--smoke", "--device", "cpu"]) == []
    said = capsys.readouterr().out
    assert "left out: py-spy wrote nothing (Error: Permission Denied)" in said


@pytest.mark.skipif(py_spy.tool() is None, reason="needs py-spy")
def test_the_planted_function_is_on_top(capsys, tmp_path):
    out = tmp_path / "flame.json"
    rows = py_spy.main(["--smoke", "--device", "cpu", "--out", str(out)])
    if not rows:
        pytest.skip(capsys.readouterr().out.strip().splitlines()[0])
    planted, cured = rows[:2]
    assert planted["hottest"] == "decode_by_pixel"
    assert planted["self_percent"] > 50
    assert cured["hottest"] != "decode_by_pixel"
    assert cured["loader_percent"] < planted["loader_percent"]
    speedscope = json.loads(out.read_text(encoding="utf-8"))
    names = {frame["name"] for frame in speedscope["shared"]["frames"]}
    assert "decode_by_pixel" in names


def test_the_flame_graph_is_drawn():
    figure = py_spy.figure(RAW)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"train", "decode"} <= set(texts)


def test_techniques_can_be_pasted(pasted):
    found = pasted(py_spy.stacks)(RAW)
    counts = pasted(py_spy.functions)(found, "train")
    assert pasted(py_spy.hottest)(counts) == "decode"
    assert pasted(py_spy.command)("py-spy", [], "x")[0] == "py-spy"
