"""3.1.4: who shares storage, when reshape copies, what a view keeps."""

import copy
import io
import json
import random

import pytest
import torch

from ch03_pytorch_basics import views
from ch03_pytorch_basics.views import (
    compact,
    held_bytes,
    saved_bytes,
    shares_storage,
    strides_after_reshape,
)
from common import bench

CPU = torch.device("cpu")


def test_who_shares_storage():
    rows = {row["name"]: row for row in views.sharing(CPU)}
    assert rows["x.t()"]["memory"] == "shared"
    assert rows["x.t().reshape(24)"]["memory"] == "own"
    assert rows["x[:, :4].reshape(4, 2, 2)"]["memory"] == "shared"
    assert rows["x[:1].repeat(3, 1)"]["memory"] == "own"


def test_a_wrong_belief_about_sharing_is_caught(monkeypatch):
    wrong = [("x.t().reshape(24)", torch.ones(4, 6).t().reshape(24), True)]
    monkeypatch.setattr(views, "operations", lambda x: wrong)
    with pytest.raises(bench.Mismatch, match="reshape"):
        views.sharing(CPU)


def factors(draw, count):
    shape = []
    while count > 1:
        n = draw.choice([n for n in range(1, count + 1) if count % n == 0])
        shape.append(n)
        count //= n
    return shape


def test_the_rule_of_reshape_is_torchs():
    """On random shapes, strides (0 among them) and wanted shapes."""
    draw, seen = random.Random(0), set()
    for _ in range(3000):
        shape = factors(draw, draw.choice([1, 2, 4, 6, 12, 24]))
        if draw.random() < 0.5:
            steps = [draw.choice([0, 1, 2, 3, 4, 6, 12]) for _ in shape]
            x = torch.zeros(2000).as_strided(shape, steps)
        else:
            order = draw.sample(range(len(shape)), len(shape))
            x = torch.zeros(shape).permute(order)
        wanted = factors(draw, x.numel())
        if draw.random() < 0.3:
            wanted.insert(draw.randrange(len(wanted) + 1), 1)
        try:
            expected = x.view(wanted).stride()
        except RuntimeError:
            expected = None
        found = strides_after_reshape(x.shape, x.stride(), wanted)
        assert found == expected, (x.shape, x.stride(), wanted)
        assert (found is None) == (
            not shares_storage(x, x.reshape(wanted)) and x.numel() > 0
        )
        seen.add(found is None)
    assert seen == {True, False}


def test_a_rule_that_is_wrong_is_caught(monkeypatch):
    monkeypatch.setattr(views, "strides_after_reshape", lambda *_: None)
    with pytest.raises(bench.Mismatch, match="predicted None"):
        views.reshapes(CPU)


def test_1000_of_a_million_float32():
    """The bytes of the book's case, and the cures that are none."""
    view = torch.arange(1e6)[:1000]
    assert view.dtype == torch.float32
    limit = 4 * 1000 + 2048
    assert saved_bytes(view) > 4_000_000
    assert 4000 < saved_bytes(compact(view)) < limit
    assert held_bytes(view) == 4_000_000
    assert held_bytes(compact(view)) == 4000
    for wrong in (torch.Tensor.contiguous, torch.Tensor.detach, copy.deepcopy):
        assert saved_bytes(wrong(view)) > 100 * limit
        assert held_bytes(wrong(view)) == 4_000_000


def test_what_is_loaded_is_what_was_shown():
    rows = views.keeping(CPU)
    loaded = {row["name"]: row["loaded_holds_bytes"] for row in rows}
    assert loaded["x[:1000]"] == 4_000_000
    assert loaded["… .clone()"] == 4000


def test_a_cure_that_does_not_cure_is_caught(monkeypatch):
    monkeypatch.setattr(views, "compact", torch.Tensor.contiguous)
    monkeypatch.setattr(views, "CURES", {"contiguous": views.compact})
    with pytest.raises(bench.Mismatch, match="contiguous"):
        views.keeping(CPU)


def test_the_large_storage_goes_when_its_last_view_goes():
    x = torch.ones(1000)
    storage = x.untyped_storage()
    view, cured = x[:10], compact(x[:10])
    assert shares_storage(x, view) and not shares_storage(x, cured)
    assert held_bytes(view) == storage.nbytes() == 4000
    assert torch.equal(view, cured)


def test_gradients_pass_a_view_and_a_copy_alike():
    found = []
    for take in (lambda x: x[:2], lambda x: compact(x[:2])):
        x = torch.ones(4, requires_grad=True)
        (take(x) ** 2).sum().backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1] == [2.0, 2.0, 0.0, 0.0]


def test_smoke(capsys):
    rows = views.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    drawn = views.figure(json.loads(json.dumps(rows)))
    assert len(drawn.axes) == len(views.DRAWN) + 1
    caption = drawn.get_suptitle()
    for word in ("green: x's", "orange: the result's own", "numbers: the"):
        assert word in caption
    drawn.savefig(io.BytesIO())


@pytest.mark.parametrize("function", views.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x = pasted(function), torch.ones(100)
    if function is shares_storage:
        assert alone(x, x[1:]) and not alone(x, x.clone())
    elif function is strides_after_reshape:
        assert alone((4, 6), (6, 1), (24,)) == (1,)
        assert alone((6, 4), (1, 6), (24,)) is None
    elif function is compact:
        assert alone(x[:1]).untyped_storage().nbytes() == 4
    else:
        assert 400 <= alone(x[:1]) < 400 + 2048
