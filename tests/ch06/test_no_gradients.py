"""Gradients that nobody reads: bytes saved, products done, what is refused."""

import pytest
import torch
from torch import nn

from ch06_single_gpu_perf import no_gradients as script
from common import bench


@pytest.fixture
def args():
    return bench.cli(script.__doc__, ["--smoke", "--device", "cpu"])


def model_and_input():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)


def test_saved_bytes_and_products_are_those_predicted(args):
    for variants in (script.evaluations(args), script.trainings(args)):
        for row in script.counted(variants):
            assert row["saved_bytes"] == row["predicted_bytes"], row
            assert row["products"] == row["predicted_products"], row


def test_flops_of_the_products_predict_the_ratio(args):
    """Four wide layers: 11 products against 4; the head's are tiny."""
    variants = script.trainings(args)
    row = {"ratio": 2.0, "ratio_interval": [1.9, 2.1], "differs": True}
    times = [row | {"name": name, "verdict": "2.00×"} for name in variants]
    frozen, behind = script.summary(times, variants)
    rows, width = 32, 16
    square, head = rows * width * width, rows * width * script.CLASSES
    # forward, its weights' gradients, and the inputs' of all but the first
    everything = 11 * square + 3 * head
    expected = everything / (4 * square + 2 * head)
    assert frozen["predicted"] == behind["predicted"] == expected
    assert frozen["reading"] == "less than predicted"


def test_flops_of_a_product_are_those_of_its_sizes():
    x, w, b = torch.ones(3, 5), torch.ones(7, 5), torch.ones(7)
    for function in (
        lambda: x @ w.T,
        lambda: nn.functional.linear(x, w),
        lambda: nn.functional.linear(x, w, b),
    ):
        assert script.product_flops(function) == 2 * 3 * 5 * 7
    with torch.inference_mode():  # linear, in one piece
        assert script.product_flops(function) == 2 * 3 * 5 * 7


def test_what_is_timed_does_not_switch_again(monkeypatch, args):
    """Switching walks through all modules: it would be timed as forward."""
    evaluate = script.evaluations(args)["eval mode alone"][0]()
    evaluate()

    def switched(model):
        raise AssertionError("switched again")

    monkeypatch.setattr(nn.Module, "eval", switched)
    evaluate()


def test_inference_mode_is_not_no_grad(args):
    made = {n: make() for n, (make, _) in script.evaluations(args).items()}
    assert made["inference_mode"]().is_inference()
    assert not made["no_grad"]().is_inference()
    assert not made["no_grad"]().requires_grad


def test_only_without_a_graph_nothing_is_saved(args):
    saved = {
        row["name"]: row["saved_bytes"]
        for row in script.counted(script.evaluations(args))
    }
    assert saved["grad"] > 0
    assert saved["no_grad"] == saved["inference_mode"] == 0
    # the wrong version: it switches layers, and saves everything still
    assert saved["eval mode alone"] == saved["grad"]


def test_outputs_are_equal_bit_by_bit(args):
    results = [make()() for make, _ in script.evaluations(args).values()]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_the_bytes_counted_are_those_of_the_storages():
    x = torch.randn(1000, requires_grad=True)
    assert script.saved_bytes(lambda: x.exp()) == (4000, 1)
    # one storage, saved by both factors
    assert script.saved_bytes(lambda: x * x) == (4000, 2)
    # a slice keeps the whole
    assert script.saved_bytes(lambda: x[:10].sin())[0] == 4000


def test_the_pasted_forwards_agree(pasted):
    model, x = model_and_input()
    forwards = script.TECHNIQUES[:4]
    results = [pasted(function)(model, x) for function in forwards]
    for result in results:
        assert torch.equal(result, results[0])
    assert [r.requires_grad for r in results] == [True, True, False, False]
    assert results[3].is_inference() and not results[2].is_inference()
    assert not model.training  # and so it stays: who evaluates must switch
    assert torch.is_grad_enabled()


def gradients(train, frozen, pasted):
    backbone, x = model_and_input()
    head = nn.Linear(8, 3)
    if frozen:
        pasted(script.freeze)(backbone)
    loss = pasted(train)(backbone, head, x, torch.arange(4) % 3)
    assert not loss.requires_grad
    own = [p.grad for p in head.parameters()]
    return own, [p.grad for p in backbone.parameters()]


def test_the_heads_gradients_are_equal(pasted):
    everything, others = gradients(script.train_everything, False, pasted)
    assert all(g is not None and g.any() for g in everything + others)
    for train, frozen in (
        (script.train_everything, True),
        (script.train_behind_no_grad, False),
    ):
        own, others = gradients(train, frozen, pasted)
        for a, b in zip(own, everything, strict=True):
            assert torch.equal(a, b)
        assert others == [None, None]


def test_freezing_after_the_forward_saves_nothing(args):
    """A wrong version: the graph was planned when forward ran."""

    def late(backbone, head, x, targets):
        features = backbone(x)
        script.freeze(backbone)
        return nn.functional.cross_entropy(head(features), targets)

    backbone, x = model_and_input()
    head, targets = nn.Linear(8, 3), torch.arange(4) % 3
    saved, _ = script.saved_bytes(lambda: late(backbone, head, x, targets))
    frozen, _ = script.saved_bytes(
        lambda: script.train_everything(backbone, head, x, targets)
    )
    assert saved > frozen


def test_an_optimizer_step_alone_does_not_freeze(args):
    """A wrong version: only the head is stepped, all is differentiated."""
    rows = script.counted(script.trainings(args))
    assert rows[0]["products"] > 2 * rows[1]["products"]
    assert rows[1]["products"] == rows[2]["products"]
    assert rows[1]["saved_bytes"] == rows[2]["saved_bytes"]


def test_grad_left_switched_off_is_noticed():
    """A wrong version: a bare call where a block is meant."""

    def evaluate(model, x):
        torch.set_grad_enabled(False)
        return model(x)

    model, x = model_and_input()
    before, _ = script.saved_bytes(lambda: model(x))
    try:
        evaluate(model, x)
        after, _ = script.saved_bytes(lambda: model(x))
        assert before > 0 == after
        with pytest.raises(RuntimeError, match="does not require grad"):
            model(x).sum().backward()
    finally:
        torch.set_grad_enabled(True)
    script.forward_without_grad(model, x)
    assert script.saved_bytes(lambda: model(x))[0] == before


def test_an_inference_tensor_is_refused_in_training():
    refused, cloned, without = script.inference_tensor_in_training()
    assert refused.startswith("Inference tensors cannot be saved for backward")
    assert cloned == without == [1.0, 2.0, 3.0]


def test_an_inference_tensor_forbids_in_place_outside_too():
    with torch.inference_mode():
        x = torch.zeros(3)
        x += 1  # inside, it is a tensor like others
    with pytest.raises(RuntimeError, match="[Ii]nplace update to inference"):
        x += 1
    with pytest.raises(RuntimeError, match="version counter"):
        x._version  # noqa: B018
    x.clone().add_(1)  # a clone is a tensor like others


def test_the_smoke_run_explains_the_refusal(capsys):
    rows = script.main(["--smoke"])
    assert sum("saved_bytes" in row for row in rows) == 7
    out = capsys.readouterr().out
    assert "Inference tensors cannot be saved for backward" in out
    assert "gradient [1.0, 2.0, 3.0]" in out


def test_other_gradients_are_a_mismatch(monkeypatch):
    """Detaching the features' mean instead: the answers are compared."""

    def wrong(backbone, head, x, targets):
        with torch.no_grad():
            features = backbone(x) * 0.9
        loss = nn.functional.cross_entropy(head(features), targets)
        loss.backward()
        return loss.detach()

    monkeypatch.setattr(script, "train_behind_no_grad", wrong)
    with pytest.raises(bench.Mismatch, match="backbone under no_grad"):
        script.main(["--smoke"])


@pytest.mark.gpu
def test_counts_hold_on_a_gpu():
    args = bench.cli(script.__doc__, ["--smoke", "--device", "cuda"])
    for row in script.counted(script.evaluations(args)):
        assert row["saved_bytes"] == row["predicted_bytes"], row
    everything, frozen, behind = script.counted(script.trainings(args))
    assert frozen["products"] == behind["products"] < everything["products"]
    refused, cloned, without = script.inference_tensor_in_training("cuda")
    assert refused and cloned == without
