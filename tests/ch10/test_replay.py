"""A recorded log, shown piece by piece."""

import json
import sys

import pytest

from ch10_gpt2 import replay, steps, train
from common import bench, machine, notebook


@pytest.fixture
def found():
    try:
        return replay.load()
    except bench.Refusal:
        pytest.skip("no log is recorded")


def row(section, step, verdict="kept", track="speed", **values):
    empty = dict.fromkeys(
        "predicted tokens_per_s spread ratio_previous ratio_interval "
        "ratio_first agreement config categories".split()
    )
    rest = {"peak_bytes": {}, "losses": [], "reason": "", "title": step}
    rest |= {"predicted": "", "rounds": 6}
    names = {"section": section, "step": step, "verdict": verdict}
    return empty | rest | names | {"track": track, "title_zh": ""} | values


LOG = {
    "preset": "gpt2-tiny",
    "machine": machine.card("cpu") | {"id": "x"},
    "rows": [
        row("10.3.1", "memory_baseline", track="memory", config={"a": 9}),
        row(
            "10.4.1",
            "speed_baseline",
            tokens_per_s=500.0,  # in its own race, at another time
            config={"a": 1, "b": 2},
        ),
        row("10.4.2", "larger_batch", "reverted", config={"a": 5, "b": 2}),
        row(
            "10.4.5",
            "compiled_graph",
            config={"a": 1, "b": 3},
            predicted="about 2.00×: half the bytes",
            predicted_ratio=2.0,
            previous_tokens_per_s=823.0,
            tokens_per_s=1234.4,
            spread=[1200.0, 1300.0],
            ratio_previous=1.5,
            ratio_interval=[1.4, 1.6],
            ratio_first=1.5,
            peak_bytes={"tracked": 3 << 20},
            losses=[2.0, 1.0],
            agreement={"worst": 1e-6, "declared": "close", "tolerance": 2e-4},
            reason="faster " * 20,
        ),
        row("10.4.4", "asynchronous_copies", "not-applicable"),
    ],
}


def test_a_section_tells_change_promise_and_result(capsys):
    replay.section(LOG, "10.4.5")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "compiled_graph: kept",
        "  change     b 2 → 3",  # against the kept row, not the reverted one
        "  predicted  about 2.00×: half the bytes; missed: 1.50× for 2.00×",
        "  measured   823 → 1,234 tok/s (quartiles 1,200 to 1,300, 6 rounds)",
        "  peak       tracked 3.0 MiB",
        "  speed      1.50× the row kept before, interval 97% [1.40, 1.60]",
        "  losses     2 updates, 1.0e-06 apart; declared close "
        "(at most 0.0002)",
    ]
    assert max(map(len, lines)) <= 100 and lines[8].startswith(" " * 13 + "f")


def test_tracks_do_not_mix_and_gaps_are_said(capsys):
    replay.section(LOG, "10.4.1")
    assert "change" not in capsys.readouterr().out
    replay.section(LOG, "10.4.9")
    assert capsys.readouterr().out == "no step of 10.4.9 in this log\n"
    replay.pictured(LOG, "10.4.4")
    assert "did not run" in capsys.readouterr().out
    replay.track(LOG, "speed")
    out = capsys.readouterr().out
    assert "memory_baseline" not in out and "1.50 97% [1.40, 1.60]" in out
    assert "2.00 missed" in out and "823 → 1,234" in out
    assert max(map(len, out.splitlines())) <= 100 and "…" not in out
    assert "0 of 1 predictions met" in out
    replay.speed(LOG)
    assert "too few rows" in capsys.readouterr().out


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: (rows, value, title) of each picture."""
    pictures = []
    monkeypatch.setattr(notebook, "plot", lambda *args: pictures.append(args))
    return pictures


def test_bars_stand_in_for_a_timeline(drawn):
    replay.pictured(LOG, "10.4.5")
    ((rows, value, title),) = drawn
    assert value == "tokens_per_s"
    assert title == "compiled_graph: 1.50× 97% [1.40, 1.60] · "
    assert [(r["name"], r[value]) for r in rows] == [
        ("speed_baseline", 823.0),
        ("compiled_graph", 1234.4),
    ]
    assert not any("title" in r for r in rows)


def test_each_of_two_steps_has_its_own_before(drawn):
    speeds = {"half": (100.0, 90.0, 0.9), "other_half": (120.0, 240.0, 2.0)}
    log = LOG | {"rows": LOG["rows"][:2]}
    for step, (before, after, ratio) in speeds.items():
        new = row("10.4.6", step, "reverted", tokens_per_s=after)
        new |= {"previous_tokens_per_s": before, "ratio_previous": ratio}
        log["rows"] = [*log["rows"], new]
    log["rows"].append(row("10.4.6", "quarter", "not-applicable"))
    replay.pictured(log, "10.4.6")
    rows = drawn[0][0]
    assert [(r["title"], r["name"], r["tokens_per_s"]) for r in rows] == [
        ("half: 0.90×", "speed_baseline", 100.0),
        ("half: 0.90×", "half", 90.0),
        ("other_half: 2.00×", "speed_baseline", 120.0),
        ("other_half: 2.00×", "other_half", 240.0),
    ]


def test_a_summary_stands_beside_the_first_row(drawn, capsys):
    last = row("10.4.10", "summary", tokens_per_s=30.0, config={"a": 7})
    last |= {"previous_tokens_per_s": 10.0, "ratio_previous": 3.0}
    log = LOG | {"rows": [*LOG["rows"], last]}
    replay.pictured(log, "10.4.10")
    assert [r["name"] for r in drawn[0][0]] == ["speed_baseline", "summary"]
    replay.section(log, "10.4.10")
    assert "change     a 1 → 7\n" in capsys.readouterr().out


def test_bars_are_the_speeds_that_the_text_tells(found, drawn, monkeypatch):
    monkeypatch.setattr(
        notebook, "picture", lambda *_: pytest.fail("a timeline")
    )
    found = found | {"machine": found["machine"] | {"id": "elsewhere"}}
    for step in found["rows"]:
        if step["track"] == "memory" or not step["previous_tokens_per_s"]:
            continue
        drawn.clear()
        replay.pictured(found, step["section"])
        told = replay.log.speed(step)
        rates = [r["tokens_per_s"] for r in drawn[0][0]]
        before = step["previous_tokens_per_s"]
        assert rates[rates.index(before) + 1] == step["tokens_per_s"]
        assert told.startswith(f"{before:,.0f} → ")


def test_without_matplotlib_words_stand_in(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    replay.pictured(LOG, "10.4.5")
    replay.losses(LOG)
    missing = "No pictures: matplotlib is not installed.\n"
    assert capsys.readouterr().out == 2 * missing


def test_every_section_of_the_record_can_be_shown(found, capsys):
    replay.about(found)
    replay.model(found)
    replay.ceilings(found)
    for section in {r["section"] for r in found["rows"]}:
        replay.section(found, section)
        replay.pictured(found, section)
    for name in ("memory", "speed"):
        replay.track(found, name)
    for draw in (replay.speed, replay.losses, replay.memory):
        draw(found)
    replay.book_memory()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100


def test_a_change_is_tried_at_once(capsys):
    config = train.Config(
        "gpt2-tiny", T=16, sequences=2, micro_batch=2, steps=2, warmup=1
    )
    rows = replay.alike(config, steps.accumulate_gradients)
    assert [r["name"] for r in rows] == ["as it was", "accumulate_gradients"]
    assert rows[1]["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4)
    assert "accumulate_gradients" in capsys.readouterr().out


def test_a_log_of_the_readers_own(tmp_path, found):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(LOG))
    assert replay.load(path)["preset"] == "gpt2-tiny"
    path.write_text("{")
    with pytest.raises(bench.Refusal, match="not a log.json"):
        replay.load(path)
