"""Chapter 1: counts, hand-computed cases, decisions."""

import math

import pytest
import torch

from chapters import scale
from common import bench, gpt

GIB = 2**30


@pytest.mark.parametrize("name", scale.MODELS)
def test_counts_equal_the_model_on_the_meta_device(name):
    config = scale.MODELS[name]
    with torch.device("meta"):
        model = gpt.GPT(config)
    counted = sum(p.numel() for p in model.parameters())
    (row,) = scale.sizes([name], {})
    assert row["parameters"] == counted
    assert row["state_bytes"] == gpt.state_bytes(config)["total"]


def test_published_sizes():
    rows = {row["model"]: row for row in scale.sizes(scale.MODELS, {})}
    assert rows["gpt2"]["parameters"] == 124_439_808
    assert rows["gpt2-xl"]["parameters"] == 1_557_611_200
    for name, billions in (
        ("gpt3-2.7b", 2.7),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13),
        ("gpt3-175b", 175),
    ):
        counted = rows[name]["parameters"] / 1e9
        assert counted == pytest.approx(billions, rel=0.02)


def test_bytes_by_hand():
    assert scale.state_bytes(10) == 160
    # one block, 8 channels, 3 words, 4 tokens: 34*4*8 + 4*4*(8+3)
    assert scale.activation_bytes(1, 8, 3, 4) == 1088 + 176
    # two blocks recomputed: their inputs 2*(2*4*8), one block in full
    assert scale.activation_bytes(2, 8, 3, 4, True) == 128 + 1088 + 176


@pytest.mark.parametrize(
    ("state", "activations", "memory", "count"),
    [
        (100, 0, 100, 1),
        (101, 0, 100, 2),
        (100, 60, 100, 3),  # 40 left on each: 2.5
        (100, 100, 100, None),
        (100, 150, 100, None),
        (1, 0, 100, 1),
    ],
)
def test_smallest_count(state, activations, memory, count):
    found = scale.smallest_count(state, activations, memory)
    assert found == count
    if found:
        assert state / found + activations <= memory
        if found > 1:
            assert state / (found - 1) + activations > memory


def test_days_by_hand():
    # 8.64e18 FLOPs on 10 GPUs of 1e15 at 10%: 8640 s
    assert scale.training_days(8.64e18, 10, 1e15, 0.1) == pytest.approx(0.1)
    # GPT-3: the paper's table D.1 has 3.14e23 FLOPs for 300 B tokens, by
    # 6 N D; ours adds the attention, which is 2.7% of N at T = 2048
    (row,) = scale.sizes(["gpt3-175b"], {})
    (time,) = scale.durations([row], 3e11, 312e12, 0.5, 2.0)
    assert time["FLOPs"] == pytest.approx(3.14e23, rel=0.04)
    seconds = time["FLOPs"] / (1024 * 312e12 * 0.5)
    assert time["days"][1024] == pytest.approx(seconds / 86400)
    assert time["days"][1] == pytest.approx(1024 * time["days"][1024])
    assert time["cost"] == pytest.approx(time["days"][1] * 24 * 2.0)


def test_data_grow_with_the_model():
    """Twice the parameters at 20 tokens each: four times the FLOPs."""
    rows = [{"model": "a", "parameters": 10, "per_token": 60}]
    rows += [{"model": "b", "parameters": 20, "per_token": 120}]
    a, b = scale.durations(rows, None, 1.0, 1.0, 1.0)
    assert (a["tokens"], b["tokens"]) == (200, 400)
    assert b["FLOPs"] == 4 * a["FLOPs"]


def sections(needs):
    return [section for section, _ in needs]


@pytest.mark.parametrize(
    ("state", "kept", "recomputed", "gpus", "sequences", "needed"),
    [
        (10, 10, 2, 1, 1, []),
        (10, 10, 2, 1, 9, []),
        (10, 10, 2, 1, 10, ["7.5.1"]),
        (95, 10, 2, 1, 1, ["7.5.2"]),
        (95, 10, 2, 1, 4, ["7.5.2", "7.5.1"]),
        (200, 10, 2, 1, 1, ["7.5.3"]),  # a quarter stays: 50 + 10
        (200, 60, 2, 1, 1, ["7.5.3", "7.5.2"]),
        (500, 10, 2, 1, 1, ["8.4.2"]),  # on 6: 83.3 + 10
        (500, 20, 2, 1, 1, ["8.4.2", "7.5.2"]),
        (200, 10, 2, 8, 1, ["8.4.2"]),
        (200, 80, 2, 8, 1, ["8.4.2", "7.5.2"]),
        (10, 200, 100, 64, 1, ["8.4.1"]),
    ],
)
def test_memory_decisions(state, kept, recomputed, gpus, sequences, needed):
    needs = scale.memory_needs(state, kept, recomputed, 100, gpus, sequences)
    assert sections(needs) == needed


def test_memory_says_how_many_gpus():
    (need,) = scale.memory_needs(500, 10, 2, 100, 1, 1)
    assert need[1].endswith("on at least 6 GPUs")


def test_time_decisions():
    assert scale.time_needs(1, 8, 8, 1) == []
    assert sections(scale.time_needs(1, 9, 8, 1)) == ["9.1.3"]
    needs = scale.time_needs(20, 300, 8, 4)
    assert sections(needs) == ["9.1.3", "8.3"]
    assert "about 10 GPUs" in needs[1][1]


def test_data_decisions():
    assert sections(scale.data_needs(50, 100)) == ["5.2.3"]
    assert sections(scale.data_needs(51, 100)) == ["5.2.3", "5.2.4"]


def test_units_for_people():
    assert scale.span(400) == "1.1 y"
    assert scale.span(2) == "2 d"
    assert scale.span(0.5) == "12 h"
    assert scale.span(1 / 48) == "30 min"
    assert scale.span(1 / 864000) == "0.1 s"
    assert scale.short(124_439_808) == "124 M"
    assert scale.short(12) == "12"


def test_the_script_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "ROOT", tmp_path)
    rows = scale.main(["--smoke"])
    out = capsys.readouterr().out
    assert [row["model"] for row in rows] == list(scale.MODELS)
    assert "First for gpt2-xl on 8 x H100" in out
    assert (tmp_path / "runs" / "scale.png").stat().st_size > 10_000


@pytest.mark.parametrize("model", scale.MODELS)
@pytest.mark.parametrize("gpu", scale.GPUS)
def test_every_choice_has_a_decision(model, gpu):
    peaks = [1e15, 1e14]
    args = scale.bench.cli(
        scale.__doc__, ["--model", model, "--gpu", gpu], scale.flags
    )
    rows = scale.decide(args, peaks, scale.GPUS[gpu][1] * GIB)
    assert rows[-1]["section"].startswith("5.2")
    assert [row["order"] for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("flag", ["--tokens", "--mfu", "--days", "--price"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_flags_are_checked(flag, value, capsys):
    with pytest.raises(SystemExit) as end:
        scale.main([flag, value])
    assert end.value.code == 2


def test_shares_are_checked():
    with pytest.raises(bench.Refusal, match="--gpus"):
        scale.main(["--gpus", "0"])
    with pytest.raises(bench.Refusal, match="--mfu"):
        scale.main(["--mfu", "1.5"])


def test_peaks_are_published():
    for name, _ in scale.GPUS.values():
        peak = scale.machine.published_peak(name, "float16")
        assert peak and math.isfinite(peak)
        assert scale.machine.published_peak(name, "float32")
