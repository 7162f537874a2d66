"""LOG.md is made of log.json: nothing is lost, nothing is too wide."""

import gzip
import json
import re

import pytest

from ch10_gpt2 import ladder, log, steps, train
from common import bench, gpt, machine, tables


def make_row(step, **values):
    return ladder.empty_row(step, config=train.as_dict(train.Config())) | {
        "verdict": "kept",
        "reason": "faster: 1.20x [1.10, 1.30]",
        "tokens_per_s": 12345.6,
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


def test_tables_are_not_wider_than_100_columns(data, tmp_path):
    page = log.render(data, tmp_path).read_text("utf-8")
    for line in page.splitlines():
        if line.startswith("|"):
            assert tables.width(line) <= 100, line


def test_rendering_again_gives_the_same_page(data, tmp_path):
    first = log.render(data, tmp_path).read_bytes()
    assert log.render(data, tmp_path).read_bytes() == first


def test_timeline_draws_the_outermost_operators(tmp_path, data):
    lanes = log.read_intervals(tmp_path / "traces" / "one.json.gz")
    assert lanes == {
        "thread 1": [(0, 900, "aten::addmm"), (1000, 50, "aten::nll_loss")]
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix product"),
        ("sm90_xmma_gemm_f32", "matrix product"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("nccl:all_reduce", "communication"),
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
