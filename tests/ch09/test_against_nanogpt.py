"""The comparison with nanoGPT, held against a stand-in of the same shape."""

import pytest

from benchmarks import against_nanogpt
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
