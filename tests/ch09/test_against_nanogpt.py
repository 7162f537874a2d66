"""The comparison with nanoGPT, held against a stand-in of the same shape."""

import json

import pytest

from benchmarks import against_nanogpt
from common import bench
from common.bench import Mismatch, Refusal

# the names of nanoGPT's model, our arithmetic
STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from common import gpt

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        given = vars(config).copy()
        assert given.pop("bias")
        model = gpt.GPT(gpt.GPTConfig(**given))
        self.transformer = nn.ModuleDict(
            {"wte": model.wte, "wpe": model.wpe, "h": model.blocks,
             "ln_f": model.ln_f})
        self.lm_head, self.model = model.lm_head, [model]

    def forward(self, ids, targets):
        n = torch.tensor(SCALE / ids.numel())
        return None, self.model[0](ids, targets, n)
"""


def run(tmp_path, scale):
    (tmp_path / "model.py").write_text(STAND_IN.replace("SCALE", str(scale)))
    return against_nanogpt.main(
        ["--nanogpt", str(tmp_path), "--smoke", "--no-compile"]
        + ["--vocab-size", "50304", "--device", "cpu"]
    )


def test_rows_and_shares(tmp_path, capsys):
    rows = run(tmp_path, 1)
    assert [row["name"] for row in rows] == [
        "nanoGPT, eager",
        "trainer, eager",
    ]
    for row in rows:
        assert 0 < row["share_causal"] < row["share"] < 1.5
        assert row["tokens_per_s"] == 512 / row["median_s"]
    said = capsys.readouterr().out
    assert "V 50304" in said and "512 tokens per update" in said


def test_the_record_of_the_log_is_a_second_case(tmp_path, capsys):
    """Its last configuration, whatever precision it ended with."""
    last = {"preset": "gpt2-tiny", "sequences": 4, "micro_batch": 2}
    last |= {"T": 32, "precision": "bfloat16", "optimizer": "fused"}
    record = tmp_path / "record.json"
    record.write_text(
        json.dumps({"ch10_gpt2.ladder": {"final": {"config": last}}})
    )
    (tmp_path / "model.py").write_text(STAND_IN.replace("SCALE", "1"))
    rows = against_nanogpt.main(
        ["--nanogpt", str(tmp_path), "--log", str(record), "--smoke"]
        + ["--no-compile", "--vocab-size", "50304", "--device", "cpu"]
    )
    assert len(rows) == 4
    assert rows[2]["tokens_per_s"] == 4 * 32 / rows[2]["median_s"]
    said = capsys.readouterr().out
    assert "128 tokens per update, 2 sequences" in said
    assert "as the log ends, in float32" in said
    config = against_nanogpt.last_of(record)
    assert config.precision == "bfloat16"  # which main replaces


def test_its_age_is_that_of_the_trainer():
    files = bench.digests(against_nanogpt.SOURCES)
    assert all(len(digest) == 16 for digest in files.values())
    assert "ch10_gpt2/train.py" in files


def test_another_model_is_noticed(tmp_path):
    with pytest.raises(Mismatch, match="not the same model"):
        run(tmp_path, 1.02)


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(Refusal, match=r"no model\.py"):
        against_nanogpt.main(["--nanogpt", str(tmp_path), "--smoke"])
    (tmp_path / "model.py").write_text("x = 1")
    with pytest.raises(Refusal, match=r"not nanoGPT's model\.py"):
        against_nanogpt.main(["--nanogpt", str(tmp_path), "--smoke"])
    (tmp_path / "model.py").write_text(STAND_IN)
    log = tmp_path / "log.json"
    log.write_text("{}")
    with pytest.raises(Refusal, match=r"no finished log\.json"):
        against_nanogpt.main(
            ["--nanogpt", str(tmp_path), "--log", str(log), "--smoke"]
        )


def test_the_bar_takes_the_better_of_both_sides():
    rows = [
        {"name": "theirs", "median_s": 1.0, "share": 0.5},
        {"name": "ours", "median_s": 0.9, "share": 0.8},
        {"name": "ours too", "median_s": 1.2, "share": 0.6},
    ]
    rounds = {row["name"]: [row["median_s"]] * 8 for row in rows}
    ours = ["ours", "ours too"]
    found = against_nanogpt.verdict(rows, ours, ["theirs"], rounds)
    assert found["ours"] == "ours" and found["holds"]
    rows[1]["share"] = 0.7
    assert not against_nanogpt.verdict(rows, ours, ["theirs"], rounds)["holds"]
