"""6.2.1: one gradient in parts of any size; work and memory counted."""

import types

import pytest
import torch

from ch06_single_gpu_perf import batch_size as lesson
from ch06_single_gpu_perf import fused_operators
from common import gpt
from common.answers import Mismatch, agree, parts

CONFIG = gpt.GPTConfig(1, 2, 16, 8, 64)
CPU = torch.device("cpu")
T, COUNT = 8, 10


@pytest.fixture
def data():
    return lesson.inputs(CONFIG, COUNT, T, CPU)


def answer(way, data, batch):
    """Return loss and gradients of ``way`` on a fresh model."""
    model = lesson.model_of(CONFIG, CPU)
    loss = way(model, *data, batch)
    return dict(parts({"loss": loss, "gradients": lesson.gradients(model)}))


def sum_without_division(model, ids, targets, batch):
    """Wrong: every part's mean is added at full weight."""
    total = 0.0
    for part, wanted in zip(
        ids.split(batch), targets.split(batch), strict=True
    ):
        scale = 1 / (wanted != gpt.IGNORED).sum().clamp(min=1)
        loss = model(part, wanted, scale)
        loss.backward()
        total += loss.detach()
    return total


def mean_of_means(model, ids, targets, batch):
    """Wrong: parts that count unequally many targets weigh alike."""
    count = len(ids.split(batch))
    total = 0.0
    for part, wanted in zip(
        ids.split(batch), targets.split(batch), strict=True
    ):
        scale = 1 / (wanted != gpt.IGNORED).sum().clamp(min=1) / count
        loss = model(part, wanted, scale)
        loss.backward()
        total += loss.detach()
    return total


def same(found, expected):
    """Check as the script does; returns the worst error."""
    return agree("found", found, "whole", expected, gradients=lesson.GRADIENTS)


def test_smoke(capsys):
    rows = lesson.main(["--smoke"])
    assert [row["batch"] for row in rows] == [1, 2, 4]
    out = capsys.readouterr().out
    assert out.index("at most tokens/s") < out.index("s per token")
    assert max(map(len, out.splitlines())) <= 100
    timed = [row for row in rows if "mfu_percent" in row]
    for row in timed:
        assert row["tokens_per_s"] == round(1 / row["median_s"])
        assert row["sequences_per_s"] == round(1 / row["median_s"] / 8)
        assert row["expected_per_s"] > 0 and row["mfu_percent"] > 0
    assert [bool(row["beyond_s"]) for row in timed] == [True, False, True]
    assert "mm" in timed[0]["beyond_s"]
    assert lesson.figure(rows).get_axes()


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 10])
def test_parts_leave_the_gradient_of_the_whole(data, batch):
    """A last, shorter part and an empty text included."""
    assert (data[1] == gpt.IGNORED).all(dim=1).any()
    found = answer(lesson.gradient_in_parts, data, batch)
    assert same(found, answer(lesson.gradient_in_parts, data, COUNT)) < 1e-5


def test_the_gradient_is_that_of_torchs_own_mean(data):
    model = lesson.model_of(CONFIG, CPU)
    logits = model(data[0]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, data[1].flatten())
    loss.backward()
    expected = {"loss": loss, "gradients": lesson.gradients(model)}
    found = answer(lesson.gradient_in_parts, data, 3)
    assert same(found, dict(parts(expected))) < 1e-5


@pytest.mark.parametrize("wrong", [sum_without_division, mean_of_means])
def test_wrong_means_are_caught_a_hundredfold(data, wrong):
    expected = answer(lesson.gradient_in_parts, data, COUNT)
    found = answer(wrong, data, 3)
    with pytest.raises(Mismatch):
        same(found, expected)
    # by the gradients alone, too, and far from the tolerance
    worst = 0.0
    for path, leaf in expected.items():
        if "gradients" in path:
            relative, absolute = lesson.GRADIENTS
            allowed = absolute + relative * leaf.abs()
            error = (found[path] - leaf).abs() / allowed
            worst = max(worst, error.max().item())
    assert worst > 100


def test_equal_parts_hide_the_mean_of_means(data):
    """Why the lesson's texts differ in length."""
    full = data[0], data[0].roll(-1, 1)
    expected = answer(lesson.gradient_in_parts, full, COUNT)
    assert same(answer(mean_of_means, full, 5), expected) < 1e-5


# --- the work ---------------------------------------------------------------


def test_operators_are_counted_by_hand():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    work = lesson.operator_work(lambda: (a @ b).t().add(1))
    # mm: 2 * 4 * 8 * 2 FLOPs, reads 32 + 16 and writes 8 numbers; t is a view
    assert work == [(128, 4 * (32 + 16 + 8)), (0, 4 * (8 + 8))]


def test_flops_are_the_formulas_without_norms_and_biases(data):
    model = lesson.model_of(CONFIG, CPU)
    work = lesson.operator_work(
        lambda: lesson.gradient_in_parts(model, *data, 5)
    )
    counts = gpt.parameter_counts(CONFIG)
    biases = CONFIG.n_layer * 9 * CONFIG.n_embd + counts["norms"]
    per_token = gpt.flops_per_token(CONFIG, T) - 6 * biases
    assert sum(flops for flops, _ in work) == COUNT * T * per_token


def test_launches_go_with_the_parts_and_flops_do_not(data):
    def counted(batch):
        model = lesson.model_of(CONFIG, CPU)
        work = lesson.operator_work(
            lambda: lesson.gradient_in_parts(model, *data, batch)
        )
        return len(work), *map(sum, zip(*work, strict=True))

    two, five = counted(5), counted(2)
    assert two[0] / 2 == pytest.approx(five[0] / 5, rel=0.1)
    assert two[1] == five[1]  # FLOPs
    assert two[2] < five[2]  # bytes: the weights are read for every part


def test_roofline_by_hand():
    work = [(100, 1), (1, 100), (0, 50)]  # peak 10, 5 bytes/s
    times = lesson.roofline(work, 2.0, 10, 5, queued=False)
    assert times == {"launches": 6, "bytes": 30, "FLOPs": 10, "total": 46}
    times = lesson.roofline(work, 2.0, 10, 5, queued=True)
    assert times["total"] == 40
    assert lesson.roofline(work, 20.0, 10, 5, queued=True)["total"] == 60


@pytest.mark.parametrize("batch", [1, 4])
def test_kept_bytes_are_the_formulas(data, batch):
    part = [t[-batch:] for t in data]
    found = lesson.memory(CONFIG, part, CPU)
    # the formula leaves out the loss's own scalars
    assert 0 <= found["kept_bytes"] - found["formula_bytes"] <= 64
    weights = 4 * gpt.parameter_counts(CONFIG)["total"]
    assert found["peak_bytes"] >= weights + found["kept_bytes"]


def test_kept_bytes_count_a_storage_once_and_known_ones_not():
    w = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(8, 4)
    y = x * 1.0  # (8, 4), kept twice: by the product and by the square
    assert lesson.kept_bytes(lambda: (y @ w).sum(), [w]) == 128
    assert lesson.kept_bytes(lambda: (y @ w).sum(), [w, y]) == 0
    assert lesson.kept_bytes(lambda: (y @ w + y @ w).sum(), [w]) == 128


def test_peak_memory_does_not_depend_on_the_order(data):
    def peaks(batches):
        return {
            batch: lesson.memory(CONFIG, [t[-batch:] for t in data], CPU)[
                "peak_bytes"
            ]
            for batch in batches
        }

    assert peaks([1, 4, 8]) == peaks([8, 4, 1])
    found = peaks([2, 4, 8])
    assert found[8] - found[4] == pytest.approx(
        2 * (found[4] - found[2]), rel=0.3
    )


# --- the words --------------------------------------------------------------


def test_saturation():
    assert lesson.saturates({1: 10, 2: 50, 4: 95, 8: 100}) == 4
    assert lesson.saturates({1: 10, 2: 20, 4: 40}) is None
    assert lesson.saturates({1: 99, 2: 100}) == 1


def test_conclusions_follow_the_rows():
    def row(batch, rate, expected):
        return {
            "name": f"batch {batch}",
            "batch": batch,
            "tokens_per_s": rate,
            "expected_per_s": expected,
            "launches_share": 1 / (1 + batch),
            "kept_bytes": 100 * batch,
            "beyond_s": {"mm": 2e-3, "add": 1e-6, "gelu": -1.0},
        }

    text = "\n".join(
        lesson.conclusion([row(1, 10, 20), row(4, 95, 50), row(8, 100, 100)])
    )
    assert "saturates here at batch 4 (95% of the best)" in text
    assert "by the roofline nowhere up to batch 8" in text
    for batch in (1, 8):
        most = f"most above it at batch {batch}, timed apart: "
        assert most + "mm 2 ms, add 1 µs" in text
    assert "gelu" not in text
    assert "50% at batch 1, 11% at batch 8" in text
    assert "10.0× the rate, 8× the activations" in text


def test_what_exceeds_the_roofline_is_the_operators_time(monkeypatch):
    """A clock that ticks once per look: each operator takes one second."""
    ticks = iter(range(1000))
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(fused_operators, "time", clock)
    x = torch.ones(4, 4)  # 64 bytes
    here = {"peak": 1e3, "bandwidth": 1e3, "launch_s": 0.25}
    found = lesson.beyond(lambda: (x @ x).exp().exp(), here, CPU)
    mm = 1 - 2 * 4**3 / 1e3 - 0.25  # as many bytes
    # x is read once by the product, whose result is 64 bytes
    assert found == pytest.approx({"mm": mm, "exp": 2 * (1 - 0.128 - 0.25)})
    assert list(found) == ["exp", "mm"]


def test_a_launch_is_timed_without_work():
    assert lesson.launch_seconds(CONFIG, CPU) > 0
    assert lesson.bandwidth_at(4096, CPU) > 0


def test_techniques_work_when_pasted(pasted, data):
    model = lesson.model_of(CONFIG, CPU)
    grow = pasted(lesson.gradient_in_parts)
    work = pasted(lesson.operator_work)(lambda: grow(model, *data, 4))
    assert sum(flops for flops, _ in work) > 0
    times = pasted(lesson.roofline)(work, 1e-6, 1e11, 1e10, False)
    assert times["total"] > 0
    weights = list(model.parameters())
    kept = pasted(lesson.kept_bytes)(lambda: model(*data), weights)
    assert kept > 0


@pytest.mark.gpu
def test_on_a_gpu():
    rows = lesson.main(["--smoke", "--device", "cuda"])
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows)
