"""What is drawn is what the file says: the same bars, to the nanosecond."""

import gzip
import json

import numpy as np
import pytest
import synthetic

from ch04_profiling import accounting, draw_trace, timeline, traces
from ch04_profiling import event_names as names
from common import bench


def recording():
    """A step whose copy and collective lie beside a kernel, in µs."""
    made = synthetic.Recording(rank=0, world=2)
    made.step(7, 0, 900)
    made.add("cpu_op", "aten::linear", 10, 80)
    made.add("cpu_op", "aten::addmm", 20, 60)
    made.run(synthetic.GEMM, 30, 10, 100, 400)
    made.run(synthetic.NCCL, 110, 10, 300, 300, lane=synthetic.SIDE)
    made.run(synthetic.ADD, 130, 10, 700, 100)
    made.add("user_annotation", "mine", 5, 600)
    return made


def write(made, path):
    path.write_text(made.text(), encoding="utf-8")
    return path


def opened(path):
    (trace,) = traces.read([path])
    return trace, accounting.account(trace)


def bars(lanes, texts):
    return {
        (lane.on_gpu, texts[name], int(start), int(end))
        for lane in lanes
        for name, start, end in zip(
            lane.name, lane.start, lane.end, strict=True
        )
    }


def test_intervals_drawn_equal_the_traces(tmp_path):
    made = recording()
    trace, account = opened(write(made, tmp_path / "one.json"))
    first = min(event["ts"] for event in made.events)
    expected = {
        (
            event["cat"] == "kernel",
            event["name"],
            1000 * (event["ts"] - first),
            1000 * (event["ts"] + event["dur"] - first),
        )
        for event in made.events
    }
    drawn = timeline.lanes(trace, account)
    assert bars(drawn, trace.names) == expected
    assert sum(len(lane.start) for lane in drawn) == len(made.events)


def rectangles(figure):
    """Return (left, right) ns of the bars that the picture really holds."""
    from matplotlib.collections import PolyCollection

    found = []
    for drawn in figure.axes[1].collections:
        if isinstance(drawn, PolyCollection):
            for path in drawn.get_paths():
                x = path.vertices[:, 0]
                found.append((round(x.min() * 1e6), round(x.max() * 1e6)))
    return found


def test_the_pictures_rectangles_are_the_intervals(tmp_path):
    made = recording()
    trace, account = opened(write(made, tmp_path / "one.json"))
    low, high = trace.window
    figure = timeline.picture(trace, account, low, high)
    drawn = sorted(rectangles(figure))
    expected = [
        (int(s), int(e)) for s, e in zip(trace.start, trace.end, strict=True)
    ]
    both = [(300_000, 500_000)] * 2  # in its own row, and behind the streams
    assert drawn == sorted(expected + both)


def test_overlap_is_what_runs_beside_computing(tmp_path):
    trace, account = opened(write(recording(), tmp_path / "one.json"))
    starts, ends = timeline.overlaps(account)
    assert (starts.tolist(), ends.tolist()) == ([300_000], [500_000])
    assert draw_trace.overlap_ns(account, 0, 400_000) == 100_000
    # the whole collective is no overlap: 100 µs of it are exposed
    exposed = account.parts_ns()["communication"]
    assert exposed == 100_000


def test_levels_are_the_nesting(tmp_path):
    trace, account = opened(write(recording(), tmp_path / "one.json"))
    host = [x for x in timeline.lanes(trace, account) if not x.on_gpu]
    level = {
        trace.names[name]: int(depth)
        for name, depth in zip(host[0].name, host[0].depth, strict=True)
    }
    assert level["ProfilerStep#7"] == 0
    assert level["mine"] == 1
    assert level["aten::linear"] == 2
    assert level["aten::addmm"] == 3


def test_bars_within_a_pixel_are_drawn_once():
    count = 100_000
    start = np.arange(count) * 10
    lane = timeline.Lane(
        "GPU 0 7",
        True,
        start,
        start + 5,
        np.zeros(count, int),
        np.zeros(count, int),
        np.array(["gemm", "elementwise"] * (count // 2), object),
    )
    drawn = timeline.visible(lane, 0, 10 * count)
    assert len(drawn) <= 2 * (timeline.PIXELS + 1)
    assert set(lane.kind[drawn]) == {"gemm", "elementwise"}
    assert len(timeline.visible(lane, 0, 1000)) == 100  # near: every one


def test_the_middle_step_is_drawn_with_the_work_it_launched(tmp_path):
    made = synthetic.Recording()
    for number in range(3):
        at = 1000 * number
        made.step(number, at, 900)
        made.run(synthetic.GEMM, at + 10, 5, at + 800, 300)
    trace, account = opened(write(made, tmp_path / "three.json"))
    low, high = draw_trace.chosen_window(trace, account, None, None)
    assert (low, high) == (1_000_000, 2_100_000)
    assert draw_trace.chosen_window(trace, account, 0.5, None) == (
        500_000,
        trace.window[1],
    )


@pytest.mark.parametrize("name", ["one.json", "one.json.gz"])
def test_a_file_is_drawn(name, tmp_path, capsys):
    text = recording().text().encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    out = tmp_path / "out.png"
    rows = draw_trace.main([str(path), "--out", str(out)])
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert [row["name"] for row in rows[:2]] == [
        "GPU 0 stream 7",
        "GPU 0 stream 20",
    ]
    assert [row["bars"] for row in rows] == [2, 1, 7]
    said = capsys.readouterr().out
    assert "ui.perfetto.dev" in said
    assert "for 0.200 ms" in said
    assert {p.name for p in tmp_path.iterdir()} == {name, "out.png"}


def test_every_kind_of_small_trace_is_drawn(tmp_path):
    files = sorted((synthetic.FOLDER).glob("*.json"))
    assert len(files) > 5
    for path in files:
        draw_trace.main([str(path), "--out", str(tmp_path / "out.svg")])
        text = (tmp_path / "out.svg").read_text(encoding="utf-8")
        assert "<svg" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["absent.json"], "no such file"),
        (["one.json", "--from-ms", "9"], "nothing to draw there"),
        (["one.json", "--from-ms", "nan", "--to-ms", "1"], "nothing to draw"),
        (["one.json", "--rank", "5"], "only 0 is in"),
        (["one.json", "--out", "one.json"], "end it in .png"),
        (["one.json", "--out", "absent/x.png"], "no such folder"),
        (["one.json", "--save"], "leave out TRACE|uncommitted"),
        (["text.json"], "not JSON"),
        (["empty.json"], "no timed events"),
        (["--out", "x.txt"], "end it in .png"),
    ],
)
def test_bad_input_is_a_sentence(words, sentence, tmp_path, monkeypatch):
    write(recording(), tmp_path / "one.json")
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bench.Refusal, match=sentence):
        draw_trace.main(words)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_lesson_counts_its_ranges_and_keeps_its_trace(tmp_path, capsys):
    out = tmp_path / "step.png"
    rows = draw_trace.main(["--smoke", "--device", "cpu", "--out", str(out)])
    for row in rows[:3]:
        assert row["bars"] == row["predicted"] == 2
    capsys.readouterr()
    kept = tmp_path / "step.json.gz"
    events = json.loads(gzip.decompress(kept.read_bytes()))["traceEvents"]
    found = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for name in draw_trace.RANGES:
        assert found.count(name) == 2
    figure = draw_trace.figure(kept)
    assert len(figure.axes) == 2


def test_techniques_can_be_pasted(pasted, tmp_path):
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pasted(draw_trace.named_step)
    path = str(tmp_path / "pasted.json")
    pasted(draw_trace.exported)(
        lambda: step(model, optimizer, torch.ones(2, 4)), 3, path
    )
    trace, account = opened(tmp_path / "pasted.json")
    assert len(account.steps) == 3
    assert names.STEP.match("ProfilerStep#1")


@pytest.mark.gpu
def test_kernels_lie_on_a_stream(tmp_path):
    path = tmp_path / "gpu.json"
    draw_trace.record("cuda", 2, 64, path)
    trace, account = opened(path)
    lanes = timeline.lanes(trace, account)
    assert lanes[0].on_gpu and len(lanes[0].start) >= 2 * 6
    assert account.on_gpu
