"""Fused operators: same answers, fewer operators, bytes as counted by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from ch06_single_gpu_perf import fused_operators as fused
from common import answers, gpt, judging

CPU = torch.device("cpu")
LOOSEST = fused.TOLERANCE


def agree(expected, found, tolerance=LOOSEST):
    """Return the worst error; raises Mismatch."""
    return answers.agree(
        "found",
        dict(answers.parts(found)),
        "expected",
        dict(answers.parts(expected)),
        tolerance,
    )


def disagrees(expected, found):
    """The check fails, and still would with a tolerance 100 times as wide."""
    with pytest.raises(answers.Mismatch):
        agree(expected, found, tuple(100 * t for t in LOOSEST))
    return True


def operators(function, *inputs):
    """Return the names of the operators that a forward dispatches."""
    with fused.Traffic() as traffic:
        function(*inputs)
    return [name.removeprefix("aten::") for name, _, _ in traffic.operators]


def heads(B=2, H=3, T=16, D=8):
    torch.manual_seed(1)
    return [torch.randn(B, H, T, D, requires_grad=True) for _ in range(3)]


def batch_norm(C=6):
    """A linear layer and the norm behind it, trained a little."""
    torch.manual_seed(2)
    norm = torch.nn.BatchNorm1d(C)
    layer = torch.nn.Linear(5, C)
    with torch.no_grad():
        layer.weight[0] *= 3e-3  # a channel that hardly varies
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    norm(layer(torch.randn(64, 5)))
    norm.running_var[0] = 1e-5
    return layer, norm.eval()


def folding_arguments(norm):
    return (
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        norm.eps,
    )


def test_smoke(capsys):
    rows = fused.main(["--smoke"])
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert printed.count("expect: ") == 1
    counted = {row["name"]: row for row in rows if "operators" in row}
    assert counted["addcmul"]["predicted"] == 2
    assert [row["reading"] for row in rows if "reading" in row] == [
        "smoke run: not judged"
    ] * 8
    figure = fused.figure(rows)
    assert len(figure.axes[0].patches) == 16


@pytest.mark.parametrize("number", range(6))
def test_outputs_and_gradients_are_those_of_the_first_row(number):
    rows = fused.count_rows(fused.pairs(CPU, smoke=True)[number])
    assert len(rows) >= 2
    for row in rows:
        assert row["worst_error"] < 1e-5
        by_hand = pytest.approx(row["by_hand_bytes"], rel=0.01)
        assert row["forward_bytes"] == by_hand
    # one operator, except for the loss, whose halves are two
    assert rows[-1]["operators"] == 1 + (rows[-1]["name"] == "cross_entropy")
    assert rows[-1]["operators"] < rows[0]["operators"]
    saved = rows[0]["forward_bytes"] - rows[-1]["forward_bytes"]
    assert saved == 0 if rows[-1]["name"] == "linear" else saved > 0


def test_operators_are_those_that_were_meant():
    x, a, b = torch.randn(3, 4, 4)
    w, v = torch.randn(4, 4), torch.randn(4)
    assert operators(fused.separate_multiply_add, x, a, b, 2.0) == [
        "mul",
        "mul",
        "add",
    ]
    assert operators(fused.addcmul, x, a, b, 2.0) == ["addcmul"]
    assert operators(fused.matmul_then_bias, x, w, v) == ["mm", "add"]
    in_place = fused.matmul_then_bias_in_place
    assert operators(in_place, x, w, v) == ["mm", "add_"]
    assert operators(fused.linear, x, w, v) == ["addmm"]
    assert operators(fused.layer_norm, x, v, v, 1e-5) == ["native_layer_norm"]
    (name,) = operators(fused.fused_attention, *heads())
    assert "scaled_dot_product" in name


def test_addcmul_pays_in_backward():
    """The honest part: fused forward, but more bytes backward."""
    pair = fused.pairs(CPU, smoke=True)[0]
    apart, together = fused.count_rows(pair)
    N = pair["inputs"][0].numel()
    assert apart["backward_bytes"] == 4 * 8 * N
    assert together["backward_bytes"] == 4 * 10 * N


def test_attention_keeps_no_matrix_of_scores():
    B, H, T, D = 2, 3, 32, 8
    inputs = heads(B, H, T, D)
    scores, mixed = 4 * B * H * T * T, 4 * B * H * T * D
    *_, plain = fused.counted(fused.plain_attention, inputs)
    *_, kept = fused.counted(fused.fused_attention, inputs)
    assert plain == scores + T * T  # the softmax, and a mask of bytes
    assert mixed < kept < 1.5 * mixed < scores  # the result, and a log per row


def test_attention_takes_the_place_of_the_models():
    """Same signature as the model's hook, same loss, same gradients."""
    config = gpt.GPTConfig(2, 2, 16, block_size=12, vocab_size=50)
    ids = torch.randint(50, (2, 12), generator=torch.manual_seed(0))
    found = []
    for attention in (gpt.plain_attention, fused.fused_attention):
        torch.manual_seed(0)
        model = gpt.GPT(config, attention=attention)
        loss = model(ids, ids)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        found.append({"loss": loss, "gradients": grads})
    agree(*found)


def test_wrong_attention_is_caught():
    q, k, v = heads()
    expected = fused.plain_attention(q, k, v)
    agree(expected, fused.fused_attention(q, k, v))
    attend = F.scaled_dot_product_attention
    assert disagrees(expected, attend(q, k, v))  # is_causal forgotten
    assert disagrees(expected, attend(q, k, v, is_causal=True, scale=1.0))
    upside_down = torch.ones(16, 16, dtype=torch.bool).triu()
    assert disagrees(expected, attend(q, k, v, attn_mask=upside_down))
    heads_last = [t.transpose(1, 2) for t in (q, k, v)]  # (B, T, H, D)
    mixed_up = attend(*heads_last, is_causal=True).transpose(1, 2)
    assert disagrees(expected, mixed_up)


def test_wrong_folding_is_caught():
    layer, norm = batch_norm()
    x = torch.randn(20, 5)
    expected = norm(layer(x))
    mean, variance, gamma, beta, eps = folding_arguments(norm)
    fold = fused.fold_batch_norm
    good = fold(layer.weight, layer.bias, mean, variance, gamma, beta, eps)
    agree(expected, F.linear(x, *good))
    wrong = {
        "eps": fold(
            layer.weight, layer.bias, mean, variance, gamma, beta, 0.0
        ),
        "bias": fold(layer.weight, None, mean, variance, gamma, beta, eps),
        "deviation": fold(
            layer.weight, layer.bias, mean, variance.sqrt(), gamma, beta, eps
        ),
        "columns": (layer.weight * gamma.mean(), good[1]),
    }
    y = layer(x)
    wrong["batch statistics"] = fold(
        layer.weight, layer.bias, y.mean(0), y.var(0), gamma, beta, eps
    )
    for name, folded in wrong.items():
        assert disagrees(expected, F.linear(x, *folded)), name
    assert disagrees(expected, norm.train()(layer(x)))  # not in eval mode


def test_the_scripts_own_channels_show_a_forgotten_eps():
    pair = fused.pairs(CPU, smoke=True)[2]
    function, _ = pair["rows"]["linear, batch norm"]
    x = pair["inputs"][0]
    norm = [t for t in pair["held"][:6]]
    expected = function(x)
    agree(expected, F.linear(x, *fused.fold_batch_norm(*norm, 1e-5)))
    forgotten = fused.fold_batch_norm(*norm, 0.0)
    assert disagrees(expected, F.linear(x, *forgotten))


@pytest.mark.parametrize("bias", [True, False])
def test_folding_a_convolution(bias):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 5, 3, padding=1, bias=bias)
    norm = torch.nn.BatchNorm2d(5)
    norm(layer(torch.randn(8, 3, 9, 9)))
    norm.eval()
    x = torch.randn(2, 3, 9, 9)
    weight, shift = fused.fold_batch_norm(
        layer.weight, layer.bias, *folding_arguments(norm)
    )
    agree(norm(layer(x)), F.conv2d(x, weight, shift, padding=1))


def test_wrong_losses_are_caught():
    torch.manual_seed(0)
    logits, targets = torch.randn(8, 20), torch.randint(20, (8,))
    expected = fused.softmax_log_gather(logits, targets)
    agree(expected, fused.cross_entropy(logits, targets))
    agree(expected, fused.log_softmax_gather(logits, targets))
    twice = fused.cross_entropy(logits.softmax(-1), targets)
    assert disagrees(expected, twice)
    summed = F.cross_entropy(logits, targets, reduction="sum")
    assert disagrees(expected, summed)
    # what the first row cannot do: a probability that underflows
    steep = torch.tensor([[0.0, 200.0]])
    assert fused.softmax_log_gather(steep, torch.tensor([0])).isinf()
    assert fused.cross_entropy(steep, torch.tensor([0])) == 200


def test_layer_norm_of_the_wrong_variance_is_caught():
    torch.manual_seed(0)
    x, gamma, beta = torch.randn(9, 7), torch.randn(7), torch.randn(7)
    expected = fused.layer_norm_by_hand(x, gamma, beta, 1e-5)
    agree(expected, fused.layer_norm(x, gamma, beta, 1e-5))
    centred = x - x.mean(-1, keepdim=True)
    sample = centred / x.std(-1, keepdim=True) * gamma + beta  # n - 1
    assert disagrees(expected, sample)


def test_gpus_attention_flops_are_halved_for_the_mask():
    q, k, v = heads(2, 3, 16, 8)
    answer, forward, backward, _ = fused.counted(
        fused.fused_attention, [q, k, v]
    )
    pairs = 2 * 3 * 16 * 16
    assert forward.flops == 2 * 2 * pairs * 8 / 2
    assert backward.flops == 5 * 2 * pairs * 8 / 2


def test_traffic_counts_what_is_touched():
    x = torch.randn(4, 6)
    with fused.Traffic() as traffic:
        x.t().view(6, 4).detach()
        torch.empty_like(x)
    assert traffic.operators == []
    with fused.Traffic() as traffic:
        x + torch.ones(1, 1).expand(4, 6)  # ones 4, read 96 + 4, write 96
    assert traffic.bytes == 4 + 96 + 4 + 96
    with fused.Traffic() as traffic:
        x.mul_(2)
        x * x  # read once
        torch.mul(x, x, out=torch.empty(4, 6))
        torch.nn.functional.linear(x, torch.empty(5, 6))
    moved = [moved for _, moved, _ in traffic.operators]
    assert moved == [192, 192, 192, 96 + 120 + 80]
    assert traffic.flops == 2 * 4 * 6 * 5


def test_bound_takes_the_slower_of_bytes_and_flops():
    work = [("mm", 100, 8000), ("add", 200, 0)]
    assert fused.bound_s(work) == 300
    assert fused.bound_s(work, 1000, 10) == 10 + 20
    assert fused.bound_s(work, 100, 10) == 80 + 20


@pytest.mark.parametrize(
    ("predicted", "interval", "says"),
    [
        (2.0, [1.9, 2.1], "about as predicted"),
        (2.0, [1.5, 1.75], "about as predicted"),  # 1.73 is near enough
        (2.0, [1.5, 1.72], "less than predicted"),
        (2.0, [2.3, 3.0], "more than predicted"),
        (2.0, [0.9, 1.1], "less than predicted"),
        (1.04, [0.99, 1.02], "no difference measured here"),
        (2.167, [1.01, 50], "too noisy to judge"),
        (2.167, [1.05, 2.0], "too noisy to judge"),
        (2.167, [1.22, 2.0], "too noisy to judge"),
        (6.0, [1.05, 2.0], "less than predicted"),  # noisy, and far off
        (1.0, [0.5, 3.0], "too noisy to judge"),
        (1.0, [0.99, 1.01], "no difference measured here"),
        (1.04, [1.114, 1.131], "more than predicted"),
        (1.04, [1.03, 1.06], "about as predicted"),
        (0.5, [0.55, 0.6], "about as predicted"),
        (0.1, [0.3, 0.35], "more than predicted"),
    ],
)
def test_reading(predicted, interval, says):
    differs, verdict = judging.verdict(1.5, interval)
    row = {"ratio_interval": interval, "differs": differs, "verdict": verdict}
    assert fused.reading(predicted, row) == says


def test_a_reading_leaves_open_what_the_verdict_left_open():
    for verdict in ("baseline", "smoke run: not judged", "unsteady: 2.0×"):
        row = {"ratio_interval": [1.9, 2.1], "verdict": verdict}
        row["differs"] = False if "unsteady" in verdict else None
        assert fused.reading(2.0, row) == verdict


def test_a_cpus_linear_copies_its_bias_first():
    """Why the linear row moves as many bytes as the rows apart."""
    x, weight, bias = torch.randn(6, 8), torch.randn(7, 8), torch.randn(7)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile:
        fused.linear(x, weight, bias)
    copies = [e for e in profile.events() if e.name == "aten::copy_"]
    assert [e.cpu_parent.name for e in copies] == ["aten::addmm"]

    with fused.Traffic() as traffic:
        fused.linear(x, weight, bias)
    result = 4 * 6 * 7
    # written by the copy; read and written by the product
    assert traffic.within == [("aten::addmm", result, 0)]
    assert traffic.bytes == 4 * (6 * 8 + 7 * 8 + 7) + 3 * result


def test_linear_is_predicted_to_gain_half_an_addition():
    """Where FLOPs outweigh bytes, the copied bias is read behind them."""
    pair = fused.pairs(CPU, smoke=True)[1]
    assert [row["predicted"] for row in fused.count_rows(pair)] == [1] * 3
    seconds = []
    for function in (fused.matmul_then_bias, fused.linear):
        _, forward, *_ = fused.counted(function, pair["inputs"])
        seconds.append(fused.bound_s(forward.work, 1.0, 100.0))
    (M, _), (C, _) = (t.shape for t in pair["inputs"][:2])
    assert seconds[0] - seconds[1] == pytest.approx(4 * (M * C + C) / 100)


def test_adding_in_place_makes_one_result():
    x, w, b = torch.randn(64, 8), torch.randn(32, 8), torch.randn(32)
    made = []
    for function in (fused.matmul_then_bias, fused.matmul_then_bias_in_place):
        with torch.profiler.profile(profile_memory=True) as profile:
            kept = function(x, w, b)
        sizes = [
            event.nbytes()
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        made.append(sizes.count(kept.nbytes))
    assert made == [2, 1]


def test_a_missed_prediction_names_the_operator(monkeypatch):
    """Times are given: softmax takes three times its bound, others none."""

    def clock():
        running = fused.time.running
        fused.time.now += 3 * 64 if running == "aten::_softmax" else 1
        return fused.time.now

    x = torch.randn(2, 4)
    pair = {
        "rows": {"a": (lambda x: x.exp(), 0), "b": (softmax_and_exp, 0)},
        "inputs": [x.requires_grad_()],
        "backward": False,
    }
    found = fused.Traffic.__torch_dispatch__

    class Clock:
        now, running = 0, None
        perf_counter = staticmethod(clock)

    def dispatch(self, operator, *rest):
        Clock.running = operator._schema.name
        return found(self, operator, *rest)

    monkeypatch.setattr(fused, "time", Clock)
    monkeypatch.setattr(fused.Traffic, "__torch_dispatch__", dispatch)
    row = {"name": "b", "against": "a", "reading": "less than predicted"}
    assert fused.because(row, pair, (1.0, 1.0)) == (
        "b, less than predicted: _softmax in 'b' takes 3.0 times what its "
        "bytes and FLOPs ask for"
    )
    row["reading"] = "more than predicted"
    assert "exp in 'a'" in fused.because(row, pair, (1.0, 1.0))
    row["reading"] = "too noisy to judge"
    assert fused.because(row, pair, (1.0, 1.0)) is None


def softmax_and_exp(x):
    return x.exp().softmax(-1)


def test_techniques_work_when_pasted(pasted):
    q, k, v = (t.detach() for t in heads())
    norm = torch.rand(5, 4) + 0.5
    x, w = torch.randn(6, 3), torch.randn(4, 3)
    logits, targets = torch.randn(6, 9), torch.randint(9, (6,))
    calls = {
        fused.separate_multiply_add: (x, x, x, 0.5),
        fused.addcmul: (x, x, x, 0.5),
        fused.matmul_then_bias: (x, w, norm[0]),
        fused.matmul_then_bias_in_place: (x, w, norm[0]),
        fused.linear: (x, w, norm[0]),
        fused.linear_then_batch_norm: (x, w, *norm, 1e-5),
        fused.fold_batch_norm: (w, *norm, 1e-5),
        fused.layer_norm_by_hand: (x, *norm[:2, :3], 1e-5),
        fused.layer_norm: (x, *norm[:2, :3], 1e-5),
        fused.plain_attention: (q, k, v),
        fused.fused_attention: (q, k, v),
        fused.softmax_log_gather: (logits, targets),
        fused.log_softmax_gather: (logits, targets),
        fused.cross_entropy: (logits, targets),
    }
    assert set(calls) == set(fused.TECHNIQUES)
    for function, inputs in calls.items():
        agree(function(*inputs), pasted(function)(*inputs), None)


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda")
    for pair in fused.pairs(device, smoke=True):
        rows = fused.count_rows(pair)  # answers and gradients agree
        assert rows[-1]["forward_bytes"] < rows[0]["forward_bytes"]


@pytest.mark.gpu
def test_fused_attention_saves_a_gpus_memory():
    B, H, T, D = 1, 4, 1024, 64
    peaks = []
    for function in (fused.plain_attention, fused.fused_attention):
        q, k, v = (
            torch.randn(B, H, T, D, device="cuda", requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(q, k, v).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    scores = 4 * B * H * T * T
    assert peaks[0] > 2 * scores
    assert peaks[1] < scores


def test_scale_is_one_over_the_root_of_the_width():
    q, k, v = heads(1, 1, 2, 4)
    weight = (q[0, 0, 1] @ k[0, 0].T / math.sqrt(4)).softmax(-1)
    agree(weight @ v[0, 0], fused.plain_attention(q, k, v)[0, 0, 1])
