"""Calls, FLOPs and ranges in the profile are those of a known step."""

import json

import pytest
import torch

from ch04_profiling import profile_ops


def recorded(steps=2, wait=2, warm_up=1, layers=3):
    step = profile_ops.make_step("cpu", 8, 16, layers)
    return profile_ops.profiled(step, wait, warm_up, steps)


def test_the_smoke_run_finds_what_it_predicts(capsys):
    rows = profile_ops.main(["--smoke", "--device", "cpu"])
    counts = [row for row in rows if "predicted_calls" in row]
    assert [row["name"] for row in counts] == [
        "aten::addmm",
        "aten::mm",
        *profile_ops.RANGES,
    ]
    for row in counts:
        assert row["calls"] == row["predicted_calls"], row
        assert row["work"] == row["predicted_work"], row
    assert profile_ops.figure(rows).axes
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_our_ranges_and_counts_are_in_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    recorded(steps=2).export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = [e["name"] for e in events if e.get("ph") == "X"]
    for name in profile_ops.RANGES:
        assert names.count(name) == 2
    # waiting and warming up leave nothing: steps 3 and 4 are recorded
    marks = [n for n in names if n.startswith("ProfilerStep")]
    assert sorted(marks) == ["ProfilerStep#3", "ProfilerStep#4"]
    assert names.count("aten::addmm") == 2 * 3
    shapes = [
        e["args"]["Input Dims"] for e in events if e["name"] == "aten::addmm"
    ]
    assert shapes[0][1:3] == [[8, 16], [16, 16]]


def test_operators_lie_inside_our_ranges(tmp_path):
    path = tmp_path / "trace.json"
    recorded(steps=1).export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    forward = [e for e in events if e["name"] == "forward"]
    for event in events:
        if event["name"] == "aten::addmm":
            inside = [
                r
                for r in forward
                if r["ts"] <= event["ts"]
                and event["ts"] + event["dur"] <= r["ts"] + r["dur"]
            ]
            assert len(inside) == 1


def test_self_times_add_up_and_total_times_count_twice():
    profile = recorded(steps=3)
    rows = profile_ops.operators(profile, 3)
    marks = [r for r in rows if r["name"].startswith("ProfilerStep")]
    span = sum(row["total_s"] for row in marks)
    own = sum(row["self_s"] for row in rows)
    assert own == pytest.approx(span, rel=0.01)
    assert sum(row["total_s"] for row in rows) > 1.5 * span


def test_shapes_divide_the_calls():
    profile = recorded()
    whole = profile_ops.operators(profile, 2)
    parts = profile_ops.operators(profile, 2, by_shape=True)
    for name in ("aten::addmm", "aten::mm"):
        calls = [row["calls"] for row in whole if row["name"] == name]
        found = [row["calls"] for row in parts if row["name"] == name]
        assert sum(found) == sum(calls)
        work = sum(row["work"] for row in parts if row["name"] == name)
        assert work == calls[0] * 2 * 8 * 16 * 16


def test_without_a_schedule_the_first_steps_are_in_the_profile():
    """The wrong way: the check on calls sees the cold steps."""
    step = profile_ops.make_step("cpu", 8, 16, 3)
    with torch.profiler.profile(with_flops=True) as profile:
        for _ in range(3 + 2):
            step()
    rows = profile_ops.operators(profile, 2)
    counts = profile_ops.checked(rows, profile_ops.predicted(8, 16, 3))
    assert all(row["calls"] != row["predicted_calls"] for row in counts)


def test_a_missing_range_is_seen():
    rows = profile_ops.operators(recorded(), 2)
    rows = [row for row in rows if row["name"] != "update"]
    counts = profile_ops.checked(rows, profile_ops.predicted(8, 16, 3))
    assert [r["name"] for r in counts if r["calls"] != r["predicted_calls"]]


def test_techniques_can_be_pasted(pasted):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pasted(profile_ops.named_step)
    profile = pasted(profile_ops.profiled)(
        lambda: step(model, optimizer, torch.ones(2, 4)), 1, 1, 2
    )
    rows = pasted(profile_ops.operators)(profile, 2)
    calls = {row["name"]: row["calls"] for row in rows}
    assert calls["aten::addmm"] == calls["forward"] == 1


@pytest.mark.gpu
def test_gpu_time_comes_first():
    step = profile_ops.make_step("cuda", 256, 256, 3)
    rows = profile_ops.operators(profile_ops.profiled(step, 2, 1, 2), 2)
    assert rows[0]["on_gpu"]
    counts = profile_ops.checked(rows, profile_ops.predicted(256, 256, 3))
    for row in counts[:2]:
        assert row["calls"] == row["predicted_calls"]
