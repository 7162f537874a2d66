"""LOG.md is made of log.json: nothing is lost, nothing is too wide."""

import gzip
import json
import math
import re
import shutil
import sys

import pytest

from ch10_gpt2 import ladder, log, steps, train
from common import bench, gpt, judging, machine, tables


def make_row(step, **values):
    return ladder.empty_row(step, config=train.as_dict(train.Config())) | {
        "verdict": "kept",
        "reason": "faster: 1.20× [1.10, 1.30]",
        "predicted": "about 1.15×: fewer bytes",
        "predicted_ratio": 1.15,
        "tokens_per_s": 12345.6,
        "previous_tokens_per_s": 10288.0,
        "spread": [12000.0, 12600.0],
        "rounds": 12,
        "ratio_previous": 1.2,
        "ratio_interval": [1.1, 1.3],
        "ratio_first": 123.45,
        "peak_bytes": {"tracked": 3 << 30, "rss": 4 << 30},
        "loss": 9.1234,
        "losses": [10.8, 10.1, 9.1234],
        "agreement": {"declared": "close", "tolerance": 2e-4, "worst": 1e-6},
        **values,
    }


@pytest.fixture
def data(tmp_path):
    rows = [make_row(s) for s in steps.MEMORY + steps.SPEED]
    parts = {"parameters": 1 << 28, "activations": 1 << 29}
    for row in rows[:5]:
        row |= {"categories": parts, "predicted_bytes": 3 << 28}
    rows[8] |= {
        "verdict": "not-applicable",
        "reason": "needs a device with memory of its own",
        "tokens_per_s": None,
        "spread": None,
        "ratio_previous": None,
        "ratio_interval": None,
        "ratio_first": None,
        "peak_bytes": {},
        "loss": None,
        "losses": [],
        "agreement": None,
    }
    (tmp_path / "traces").mkdir()
    trace = tmp_path / "traces" / "one.json.gz"
    events = [
        ("cpu_op", "aten::addmm", 0, 900),
        ("cpu_op", "aten::mm", 100, 300),  # inside the first
        ("cpu_op", "aten::nll_loss", 1000, 50),
        ("python_function", "main", 0, 2000),
    ]
    with gzip.open(trace, "wt") as file:
        json.dump(
            {
                "traceEvents": [
                    {"ph": "X", "cat": c, "name": n, "ts": t, "dur": d}
                    | {"tid": 1, "pid": 1}
                    for c, n, t, d in events
                ]
            },
            file,
        )
    rows[5]["trace"] = "traces/one.json.gz"
    config = gpt.preset("gpt2-tiny")
    case = {"case": "gpt2-tiny", "section": "10.3.1", "step": "baseline"}
    case |= {"ranks": 1, "micro_batch": 4, "accumulate": 1}
    card = case | {"T": 1024, "capacity_bytes": 24 * 10**9, "batch": 7}
    return {
        "machine": machine.card("cpu"),
        "peaks": {
            "gemm_flops": {"float32": 1e11},
            "copy_bytes_per_s": 1e10,
        },
        "preset": "gpt2-tiny",
        "command": ["python", "-m", "ch10_gpt2.ladder"],
        "model": log.model_facts(config, config.block_size),
        "rows": rows,
        "predictions": {
            "cases": [case | {"bytes": parts, "peak_bytes": 9 << 20}],
            "largest_batch": [card | {"attention": "plain"}],
            "margin": "1 GiB",
            "torch": "2",
        },
        "final": {"command": "python -m ch10_gpt2.train", "config": {}},
    }


def test_page_holds_every_row_and_picture(data, tmp_path):
    page = log.render(data, tmp_path).read_text("utf-8")
    for row in data["rows"]:
        assert row["section"] in page and row["why"] in page
        assert row["reason"] in page
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert len(pictures) == 5  # two memory, speed, losses, one timeline
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "python -m ch10_gpt2.train" in page
    assert "| plain, 24 GB |" in page


def test_tables_are_not_wider_than_a_page(data, tmp_path):
    page = log.render(data, tmp_path).read_text("utf-8")
    for line in page.splitlines():
        if line.startswith("|"):
            assert tables.width(line) <= 115, line


def test_few_rounds_get_the_level_they_deserve():
    row = {"ratio_interval": [1.3, 1.52], "ratio_previous": 1.44}
    for rounds, said in ((6, "97% "), (7, "98% "), (8, ""), (60, "")):
        found = log.interval(row | {"rounds": rounds})
        assert found == f"{said}[1.30, 1.52]"
    assert log.interval(row | {"ratio_interval": None}) == ""


def test_a_row_shows_both_speeds_of_its_turns(data, tmp_path):
    """The machine drifts from row to row: only the same turns compare."""
    row = data["rows"][6]
    assert log.rates(row) == "10,288 → 12,346"
    page = log.render(data, tmp_path).read_text("utf-8")
    assert "| 10,288 → 12,346 | 1.20 [1.10, 1.30] |" in page
    assert log.rates(row | {"previous_tokens_per_s": None}) == "12,346"
    assert log.rates(row | {"tokens_per_s": 2.4e6}) == "10,288 → 2,400k"


@pytest.mark.parametrize(
    ("expected", "ratio", "interval", "held"),
    [
        (1.15, 1.2, [1.1, 1.3], "met"),
        (1.42, 1.2, [1.1, 1.3], "met"),  # 1.3 and a tenth
        (1.44, 1.2, [1.1, 1.3], "missed: 1.20× for 1.44×"),
        (1.01, 1.2, [1.1, 1.3], "met"),
        (0.99, 1.2, [1.1, 1.3], "missed: 1.20× for 0.99×"),
        (0.85, 0.9, None, "met"),  # a pilot
        (1.05, 0.9, None, "missed: 0.90× for 1.05×"),
        (None, 0.9, None, ""),
    ],
)
def test_predictions_are_held_against_what_came(
    expected, ratio, interval, held
):
    row = make_row(steps.SPEED[1], predicted="", predicted_ratio=expected)
    row |= {"ratio_previous": ratio, "ratio_interval": interval}
    assert log.outcome(row) == held
    if expected:  # a record of before
        row |= {"predicted_ratio": None, "predicted": f"about {expected}x: x"}
        assert log.outcome(row) == held


def test_predicted_bytes_are_held_against_the_peak(data, tmp_path):
    row = data["rows"][0]
    assert log.outcome(row) == "missed: 3,072.0 MiB for 768.0"
    row["predicted_bytes"] = 3 << 30
    assert log.outcome(row) == "met"
    page = log.render(data, tmp_path).read_text("utf-8")
    assert "| 3,072.0 met | 3,072.0 |" in page
    assert "| 1.15 met |" in page and "fewer bytes — **met**" in page
    said = "1 of 2 predictions met where a change was predicted; "
    said += "0 of 3 predictions met where none was."
    assert said in page


def test_a_summary_repeats_no_prediction():
    rows = [
        make_row(steps.SPEED[0], predicted="", predicted_ratio=None),
        make_row(steps.SPEED[1], predicted_ratio=1.2),
        make_row(steps.SPEED[2], predicted_ratio=1.5),
        make_row(steps.SPEED[3], predicted_ratio=1.04),
        make_row(steps.SPEED[4], predicted_ratio=0.95),
        make_row(steps.SPEED[5], predicted_ratio=1.2) | {"step": "summary"},
    ]
    assert log.tally(rows) == (
        "1 of 2 predictions met where a change was predicted; "
        "1 of 2 predictions met where none was."
    )
    assert log.tally(rows[:1]) == "Nothing was predicted."


def test_a_product_of_ratios_is_held_against_the_summary():
    rows = [make_row(s) for s in steps.SPEED[:3]]
    rows[2]["ratio_first"] = 5.74
    summary = make_row(steps.SPEED[5], ratio_previous=4.71)
    summary["step"] = "summary"
    said = log.compounded([*rows, summary])
    assert "multiply to 5.74" in said and "gave 4.71 [1.10, 1.30]" in said
    assert log.compounded(rows) == ""  # no summary yet
    assert log.compounded([rows[0], rows[1], summary]) == ""  # no product


def test_predicted_rows_say_when_they_peak(data, tmp_path):
    """Rows of one peak are explained by its moment and the micro-batches."""
    data["predictions"]["cases"][0] |= {"moment": "step", "accumulate": 8}
    page = log.render(data, tmp_path).read_text("utf-8")
    assert "| § | step | micro | peak | moment |" in page
    assert "| baseline | 8 × 4 | 9 | step |" in page


def test_a_log_says_why_it_has_its_size(data, tmp_path):
    assert "Why this size" not in log.render(data, tmp_path).read_text("utf-8")
    data |= {"size": "it fits", "sequences": 4}
    page = log.render(data, tmp_path).read_text("utf-8")
    assert "4 sequences of 64 tokens. Why this size: it fits." in page


def test_a_damaged_trace_is_left_out(data, tmp_path, capsys):
    trace = tmp_path / "traces" / "one.json.gz"
    whole = trace.read_bytes()
    missing = "No picture: `one.json.gz` is missing or damaged."
    for damaged in (whole[:-9], whole[:40], b"no gzip", b""):
        trace.write_bytes(damaged)
        page = log.render(data, tmp_path).read_text("utf-8")
        assert missing in page and "timeline" not in page
        assert missing in capsys.readouterr().out
    trace.unlink()
    assert missing in log.render(data, tmp_path).read_text("utf-8")
    trace.write_bytes(whole)
    assert "timeline" in log.render(data, tmp_path).read_text("utf-8")


def test_a_record_is_rendered_again(data, tmp_path, capsys):
    """By its file or its folder: the same page, which names the record."""
    results = tmp_path / "results"
    folder = results / "box-1"
    folder.mkdir(parents=True)
    record = results / "box-1.json"
    record.write_text(json.dumps({"ch10_gpt2.ladder": data}), "utf-8")
    for name in (record, folder):
        log.main([str(name)])
        page = (folder / "LOG.md").read_text("utf-8")
        assert "comes from `ch10_gpt2.ladder` in `../box-1.json`" in page
        assert "is missing or damaged" in page  # its trace was not kept
        assert "timeline" not in page
    row = data["rows"][5]
    name = f"timeline-{row['track']}-{row['section']}-{row['step']}.png"
    (folder / name).write_bytes(b"drawn when the trace was there")
    log.main([str(record)])
    assert f"({name})" in (folder / "LOG.md").read_text("utf-8")
    assert f"{folder / 'LOG.md'}: 19 rows" in capsys.readouterr().out


RECORDS = [
    path
    for path in sorted((bench.ROOT / "ch10_gpt2" / "results").glob("*.json"))
    if path.with_suffix("").is_dir()
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_committed_page_is_what_its_record_says(record, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(record, tmp_path)
    folder = record.with_suffix("")
    shutil.copytree(folder, tmp_path / folder.name)
    log.main([str(tmp_path / record.name)])
    found = (tmp_path / folder.name / "LOG.md").read_text("utf-8")
    assert found == (folder / "LOG.md").read_text("utf-8"), (
        f"python -m ch10_gpt2.log {folder.relative_to(bench.ROOT)}"
    )


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_ratio_follows_from_its_rounds(record):
    rows = json.loads(record.read_text("utf-8"))[log.SCRIPT]["rows"]
    for row in rows:
        rounds = row.get("round_seconds")  # of before they were kept: none
        if rounds and len(rounds[0]) == 2:
            old, new = zip(*rounds, strict=True)
            ratio, low, high = judging.bootstrap_ratio(old, new)
            assert row["ratio_previous"] == ratio
            assert row["ratio_interval"] in (None, [low, high])


def test_a_log_without_matplotlib_has_no_pictures(
    data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = log.render(data, tmp_path).read_text("utf-8")
    missing = "No pictures: matplotlib is not installed."
    assert missing in page and capsys.readouterr().out == missing + "\n"
    assert "![" not in page and not list(tmp_path.glob("*.png"))
    for row in data["rows"]:
        assert row["reason"] in page


def test_pictures_name_model_and_machine(data, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        log, "_save", lambda figure, path: said.append(figure.axes[0])
    )
    log.draw_speed(data["rows"], log.model_and_machine(data), tmp_path)
    log.draw_losses(data["rows"], log.model_and_machine(data), tmp_path)
    for axes in said:
        title = axes.get_title()
        assert "gpt2-tiny" in title and data["machine"]["cpu"][:10] in title


def test_no_number_is_not_drawn_as_equal():
    assert log.distance(2.0, 2.0) == log.BIT
    assert log.distance(2.2, 2.0) == pytest.approx(0.1)
    assert math.isnan(log.distance(math.nan, 2.0))


def test_losses_are_drawn_as_distances(data, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(log, "_save", lambda figure, _: drawn.append(figure))
    data["rows"][7]["losses"] = [10.8, 10.1, 9.1234 * (1 + 1e-5)]
    log.draw_losses(data["rows"], "", tmp_path)
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == "log"
    curves = [line.get_ydata() for line in axes.lines]
    same, other, tolerance = curves  # all that are equal are one
    assert list(same) == [log.BIT] * 3
    assert other[-1] == pytest.approx(1e-5) and list(tolerance) == [2e-4] * 2


def test_rendering_again_gives_the_same_page(data, tmp_path):
    first = log.render(data, tmp_path).read_bytes()
    assert log.render(data, tmp_path).read_bytes() == first


def test_timeline_draws_the_outermost_operators(tmp_path, data):
    lanes = log.read_intervals(tmp_path / "traces" / "one.json.gz")
    assert lanes == {
        "thread 1": [(0, 900, "aten::addmm"), (1000, 50, "aten::nll_loss")]
    }


def test_a_root_of_the_optimizer_is_the_optimizer_s(tmp_path):
    path = tmp_path / "trace.json"
    events = [
        ("user_annotation", "Optimizer.step#AdamW.step", 100, 50),
        ("cpu_op", "aten::sqrt", 10, 5),
        ("cpu_op", "aten::sqrt", 110, 5),
    ]
    events = [
        {"ph": "X", "cat": c, "name": n, "ts": t, "dur": d, "tid": 1}
        for c, n, t, d in events
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    (lane,) = log.read_intervals(path).values()
    assert [log.kind_of(name) for *_, name in lane] == ["other", "optimizer"]


ENGINE = "autograd::engine::evaluate_function: "


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix product"),
        ("sm90_xmma_gemm_f32", "matrix product"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("nccl:all_reduce", "communication"),
        ("gloo:comm", "communication"),
        ("c10d::comm_hook", "other"),
        ("aten::mm", "matrix product"),
        ("aten::_scaled_mm", "matrix product"),
        ("aten::baddbmm", "matrix product"),
        (f"{ENGINE}AddmmBackward0", "matrix product"),
        ("_InPlace", "loss"),
        (f"{ENGINE}_InPlaceBackward", "loss"),
        (f"{ENGINE}ToCopyBackward0", "copy"),
        ("aten::to", "copy"),
        (f"{ENGINE}EmbeddingBackward0", "embedding"),
        ("aten::gelu", "other"),
    ],
)
def test_kinds(name, kind):
    assert log.kind_of(name) == kind


def test_model_card_counts_what_it_says(capsys):
    card = log.model_card("gpt2", 1024)
    assert "124,439,808" in card
    assert all(tables.width(line) <= 100 for line in card.splitlines())


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(bench.Refusal, match="log.json"):
        log.main([str(tmp_path)])
    (tmp_path / "log.json").write_text("[1, 2")
    with pytest.raises(bench.Refusal, match="not a log"):
        log.main([str(tmp_path)])
