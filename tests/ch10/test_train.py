"""One update is right, and the wrong versions people write are caught.

Each check is a function of what it checks, so that it can be run on the
trainer and on a planted wrong version; what is wrong must exceed the
tolerance a hundredfold.
"""

import contextlib
import copy
import io
import json
import pickle
import types
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ch09_advanced import custom_op
from ch10_gpt2 import metrics, train
from common import gpt, ranks, text
from common.bench import Refusal
from common.gpt import IGNORED

BASE = train.Config(
    preset="gpt2-tiny", T=16, sequences=4, tokens="once", steps=10
)


COMPILE = torch.compile


@contextlib.contextmanager
def running(**changes):
    run = train.start(replace(BASE, **changes))
    yield run
    train.finish(run)


@pytest.fixture(scope="module")
def small():
    """A trainer whose model is small in every way but real."""
    run = train.start(BASE)
    shape = gpt.GPTConfig(2, 2, 32, block_size=64, vocab_size=97)
    torch.manual_seed(0)
    run.model = gpt.GPT(shape)
    run.optimizer = train.make_optimizer(run.model, run.config)
    yield run
    train.finish(run)


def batch(rows, T=16, counted=None, seed=0):
    """Make ids and targets, of which only the first ``counted`` count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, (rows, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    if counted is not None:
        targets.view(-1)[counted:] = IGNORED
    return ids[:, :-1], targets


def gradient(run):
    return torch.cat([p.grad.flatten() for p in run.model.parameters()])


def error(run, accumulate, batches, whole):
    """Return the relative error against one backward over the whole."""
    run.optimizer.zero_grad()
    logits = run.model(whole[0]).flatten(0, 1)
    nn.functional.cross_entropy(logits, whole[1].flatten()).backward()
    right = gradient(run)
    accumulate(run, batches)
    return ((gradient(run) - right).norm() / right.norm()).item()


def joined(batches):
    return [torch.cat(side) for side in zip(*batches, strict=True)]


# --- accumulation -----------------------------------------------------------


def zeroed_inside(run, batches):
    for part in batches:
        run.optimizer.zero_grad()
        run.model(*part, torch.tensor(1 / joined(batches)[1].numel())).sum()
        train.accumulate(run, [part])


def one_batch_reused(run, batches):
    train.accumulate(run, [batches[0]] * len(batches))


def not_divided(run, batches):
    run.optimizer.zero_grad()
    for ids, targets in batches:
        run.model(ids, targets, 1 / (targets != IGNORED).sum()).backward()


def mean_of_means(run, batches):
    not_divided(run, batches)
    for parameter in run.model.parameters():
        parameter.grad /= len(batches)


def test_accumulates_to_the_gradient_of_the_whole(small):
    parts = [batch(2, seed=i) for i in range(4)]
    assert error(small, train.accumulate, parts, joined(parts)) < 1e-6
    for wrong in (zeroed_inside, one_batch_reused, not_divided):
        assert error(small, wrong, parts, joined(parts)) > 1e-4, wrong


def test_counts_unequal_micro_batches_by_their_targets(small):
    parts = [batch(2, 64, counted=11), batch(2, 64, counted=101, seed=1)]
    assert error(small, train.accumulate, parts, joined(parts)) < 1e-6
    assert error(small, mean_of_means, parts, joined(parts)) > 1e-4


def test_a_micro_batch_without_counted_targets_changes_nothing(small):
    some, none = batch(2), batch(2, counted=0, seed=1)
    assert error(small, train.accumulate, [some, none], some) < 1e-6
    assert error(small, train.accumulate, [none, some], some) < 1e-6
    loss = train.accumulate(small, [none, none])
    assert loss == 0 and gradient(small).count_nonzero() == 0


def test_a_shorter_last_window_counts_by_its_own_targets(small):
    """Two micro-batches where four are usual, the last one short."""
    parts = [batch(2), batch(1, seed=1)]
    assert error(small, train.accumulate, parts, joined(parts)) < 1e-6

    def scaled_for_four(run, batches):
        train.accumulate(run, batches)
        for parameter in run.model.parameters():
            parameter.grad *= len(batches) / 4

    assert error(small, scaled_for_four, parts, joined(parts)) > 1e-4


def test_update_reports_the_mean_loss_of_all_targets():
    losses = {}
    for size in (1, 2, 4):
        with running(micro_batch=size) as run:
            ids, targets = next(run.batches)
            with torch.no_grad():
                logits = run.model(ids).flatten(0, 1)
            run.batches = iter([(ids, targets)])
            losses[size] = train.update(run)["loss"]
            mean = nn.functional.cross_entropy(logits, targets.flatten())
            assert losses[size] == pytest.approx(mean.item(), rel=1e-6)


def test_nothing_is_read_back_between_micro_batches(small):
    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            read = torch.ops.aten._local_scalar_dense.default
            self.count += function is read
            return function(*args, **(kwargs or {}))

    with Reads() as reads:
        train.accumulate(small, [batch(1), batch(1)])
    assert reads.count == 0
    with Reads() as reads:
        train.accumulate(small, [batch(1)]).item()
    assert reads.count == 1


# --- recomputation ----------------------------------------------------------


def test_recomputation_drops_the_same_activations(small):
    shape = gpt.GPTConfig(2, 2, 32, 64, vocab_size=97, dropout=0.5)
    models = {}

    def other_dropout(block, x):
        return checkpoint(
            block, x, use_reentrant=False, preserve_rng_state=False
        )

    for run_block in (gpt.call_block, train.recompute_block, other_dropout):
        run = copy.copy(small)
        torch.manual_seed(0)
        run.model = gpt.GPT(shape, run_block=run_block)
        torch.manual_seed(1)
        loss = train.accumulate(run, [batch(2)])
        models[run_block] = loss, gradient(run)
    (loss, right), (same_loss, same), (wrong_loss, wrong) = models.values()
    assert loss == same_loss == wrong_loss  # the loss alone shows nothing
    assert torch.equal(right, same)
    assert (wrong - right).norm() > 0.1 * right.norm()


# --- float16 ----------------------------------------------------------------


class Slope(nn.Module):
    """A model whose gradient is known: that of ``slope`` times a weight."""

    def __init__(self, slope):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.slope = slope

    def forward(self, ids, targets, scale):
        return (self.weight * self.slope).sum() * targets.numel() * scale


def sloping(slope, **scaler):
    """Return a run: float16's scaler, SGD, lr 1, clipping at norm 1."""
    model = Slope(slope)
    config = replace(
        BASE, lr=1.0, min_lr=0.5, warmup=0, sequences=1, T=1, clip=1.0
    )
    return types.SimpleNamespace(
        config=config,
        rank=ranks.Rank(0, 1, 0, torch.device("cpu")),
        device=torch.device("cpu"),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        scaler=torch.amp.GradScaler("cpu", init_scale=65536.0, **scaler),
        autocast=contextlib.nullcontext,
        batches=iter([(torch.zeros(1, 1), torch.zeros(1, 1))] * 9),
        updates=0,
        position=0,
    )


def test_clips_after_the_scale_is_taken_off():
    run = sloping(40.0)
    row = train.update(run)
    assert row["grad_norm"] == pytest.approx(40.0)
    assert run.model.weight.item() == pytest.approx(-1.0, rel=1e-5)

    run = sloping(40.0)
    unscale, calls = run.scaler.unscale_, []

    def too_late(optimizer):  # only when step asks for it
        calls.append(optimizer)
        if len(calls) == 2:
            unscale(optimizer)

    run.scaler.unscale_ = too_late
    row = train.update(run)
    assert row["grad_norm"] == pytest.approx(2_621_440)
    assert abs(run.model.weight.item()) < 2e-5


@pytest.mark.parametrize("enabled", [True, False])
def test_the_scale_is_read_twice_and_only_where_there_is_one(
    enabled, monkeypatch
):
    run, reads = sloping(1.0, enabled=enabled), []
    read = run.scaler.get_scale
    monkeypatch.setattr(
        run.scaler, "get_scale", lambda: reads.append(run.position) or read()
    )
    assert not train.update(run)["skipped"]
    assert reads == ([0, 1] if enabled else [])  # before any work, after all


def holds_still_when_skipped(update):
    """Tell whether an overflow moves the data and nothing else."""
    run = sloping(float("inf"))
    row = update(run)
    assert row["skipped"] and run.scaler.get_scale() == 32768
    run.model.slope = 1.0
    after = update(run)
    return (
        run.position == 2
        and run.updates == 1
        and row["lr"] == after["lr"] == 1.0
        and row["update"] == 0
        and run.model.weight.item() == pytest.approx(-1.0)
    )


def test_a_skipped_step_moves_only_the_data():
    assert holds_still_when_skipped(train.update)

    def schedule_goes_on(run):
        row = train.update(run)
        run.updates += row["skipped"]
        return row

    assert not holds_still_when_skipped(schedule_goes_on)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_follows_float32(precision):
    with running(micro_batch=2) as run:
        right = [train.update(run) for _ in range(2)]
    for optimizer in ("for-loop", "fused"):
        with running(precision=precision, optimizer=optimizer) as run:
            rows = [train.update(run) for _ in range(2)]
            assert run.scaler.is_enabled() == (precision == "float16")
        for row, wanted in zip(rows, right, strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            norm = pytest.approx(wanted["grad_norm"], rel=2e-2)
            assert row["grad_norm"] == norm and not row["skipped"]


# --- the model's techniques -------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "fused"},
        {"recompute": "blocks"},
        {"optimizer": "foreach"},
        {"optimizer": "fused"},
        {"micro_batch": 4},
        {"transfer": "prefetch"},
        {"tokens": "on-the-fly"},
        {"workers": 2},
    ],
    ids=str,
)
def test_a_technique_leaves_the_losses(change):
    rows = []
    for changes in ({}, change):
        with running(**changes) as run:
            rows.append([train.update(run) for _ in range(3)])
    for right, row in zip(*rows, strict=True):
        assert row["loss"] == pytest.approx(right["loss"], rel=1e-6)
        norm = pytest.approx(right["grad_norm"], rel=1e-5)
        assert row["grad_norm"] == norm


@pytest.mark.skipif(
    custom_op.available() is not None, reason="needs a C++ compiler"
)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_in_place_loss_leaves_the_losses(precision):
    rows = []
    for loss in ("plain", "in-place"):
        with running(loss=loss, precision=precision) as run:
            rows.append([train.update(run) for _ in range(2)])
            rows[-1].append({"loss": train.evaluate(run), "grad_norm": 1})
    near = 1e-5 if precision == "float32" else 1e-3
    for right, row in zip(*rows, strict=True):
        assert row["loss"] == pytest.approx(right["loss"], rel=near)
        norm = pytest.approx(right["grad_norm"], rel=10 * near)
        assert row["grad_norm"] == norm


def test_decays_matrices_only_and_the_tied_one_once():
    with running() as run:
        matrices, vectors = run.optimizer.param_groups
        assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0
        assert {p.dim() for p in vectors["params"]} == {1}
        count = sum(
            p.numel() for g in run.optimizer.param_groups for p in g["params"]
        )
        shape = run.config.model()
        assert count == gpt.parameter_counts(shape)["total"]
        assert run.model.lm_head.weight is run.model.wte.weight


def test_learning_rate_rises_and_follows_a_cosine():
    config = replace(BASE, lr=1.0, min_lr=0.2, warmup=4, steps=14)
    rates = [train.learning_rate(config, u) for u in range(15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[9] == pytest.approx(0.6) and rates[14] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def frames(monkeypatch, evaluate):
    """Count what is compiled in three updates and an evaluation."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(
        torch, "compile", lambda f, **_: COMPILE(f, backend=counter)
    )
    monkeypatch.setattr("ch10_gpt2.train.cannot_compile", lambda device: None)
    with running(compile=True, micro_batch=2, evaluate_batches=3) as run:
        assert all("_orig_mod" not in n for n, _ in run.model.named_modules())
        rates = [train.update(run)["lr"] for _ in range(3)]
        assert len(set(rates)) == 3
        evaluate(run)
        train.update(run)
    torch._dynamo.reset()
    return counter.frame_count


def test_compiles_two_frames_whatever_the_rate(monkeypatch):
    import torch._dynamo.testing

    def shorter_last_batch(run):
        ids, targets = (t[None] for t in run.windows[run.trained])
        with torch.no_grad():
            run.model(ids, targets, torch.ones(()))
        train.evaluate(run)

    assert frames(monkeypatch, train.evaluate) <= 2
    assert frames(monkeypatch, shorter_last_batch) > 2


# --- data -------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Short documents, so that a window touches several."""
    path = tmp_path_factory.mktemp("text") / "lines.jsonl"
    plays = "".join(text.corpus())[:30_000]
    lines = [
        f'{{"text": "{word * 3}"}}'
        for word in plays.split()[:400]
        if word.isalpha()
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_tokenised_on_the_fly_gives_the_same_ids(documents):
    rank = ranks.Rank(0, 1, 0, torch.device("cpu"))
    config = replace(BASE, data=documents)
    once = train.open_data(config, rank)
    fly = train.open_data(replace(config, tokens="on-the-fly"), rank)
    assert len(once) == len(fly) > 50
    for i in range(len(once)):
        for a, b in zip(once[i], fly[i], strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype == torch.int64
    assert any((once[i][0] == text.EOT).any() for i in range(len(once)))


def test_long_runs_of_spaces_give_the_same_ids_on_the_fly(tmp_path):
    rank = ranks.Rank(0, 1, 0, torch.device("cpu"))
    path = tmp_path / "spaces.jsonl"
    spaces, lines = " " * 12_000, " " + "\n" * 11_999
    rows = ["a", f"b{spaces}c", f"{spaces}d", f"e{lines}f"] * 9
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))

    def pair(data):
        config = replace(BASE, data=str(data))
        once = train.open_data(config, rank)
        return once, train.open_data(
            replace(config, tokens="on-the-fly"), rank
        )

    for data in (path, text.tokenize(path, tmp_path / "spaces.tokens")):
        once, fly = pair(data)
        assert len(once) == len(fly)
        for i in range(0, len(once), max(1, len(once) // 200)):
            assert torch.equal(torch.stack(once[i]), torch.stack(fly[i]))
    uncut = text.encoding().encode_ordinary(rows[3])
    assert [*uncut, text.EOT] != text.document_ids(rows[3]).tolist()


def test_a_token_file_that_ends_in_mid_word_is_not_tokenised_again(tmp_path):
    rank = ranks.Rank(0, 1, 0, torch.device("cpu"))
    path = tmp_path / "a.txt"
    path.write_text("word " * 40 + "第")  # a character of several tokens
    count = len(text.document_ids(path.read_text())) - 2
    config = replace(
        BASE, data=str(text.tokenize(path, tmp_path / "a.tokens", count))
    )
    assert len(train.open_data(config, rank))
    with pytest.raises(Refusal, match="a.tokens ends in .*--tokens once"):
        train.open_data(replace(config, tokens="on-the-fly"), rank)


def test_datasets_travel_to_spawned_workers(documents):
    rank = ranks.Rank(0, 1, 0, torch.device("cpu"))
    for tokens in ("once", "on-the-fly"):
        config = replace(BASE, data=documents, tokens=tokens)
        data = train.open_data(config, rank)
        sent = pickle.dumps(data)
        assert torch.equal(pickle.loads(sent)[3][0], data[3][0])
        if tokens == "once":
            assert len(sent) < 2000  # a path, not the contents


def order(config, count, rank=0, world=1, first=0, length=37):
    who = ranks.Rank(rank, world, rank, torch.device("cpu"))
    stream = iter(train.Order(config, length, who, first))
    return [next(stream) for _ in range(count)]


def test_order_depends_on_nothing_but_seed_and_update():
    config = replace(BASE, sequences=6)
    whole = order(config, 13)
    assert order(replace(config, micro_batch=3, workers=2), 13) == whole
    assert order(config, 5, first=8) == whole[8:]
    shares = [order(config, 13, rank, 3) for rank in range(3)]
    assert [sum(parts, []) for parts in zip(*shares, strict=True)] == whole
    flat = sum(whole, [])
    first, second = flat[:37], flat[37:74]
    assert sorted(first) == sorted(second) == list(range(37))  # none dropped
    assert first != second
    assert order(replace(config, seed=1), 13) != whole


def test_workers_and_prefetching_bring_the_same_batches():
    streams = []
    for changes in (
        {},
        {"workers": 2, "transfer": "prefetch"},
        {"tokens": "on-the-fly", "workers": 1},
    ):
        with running(**changes) as run:
            streams.append([next(run.batches) for _ in range(5)])
    for other in streams[1:]:
        for a, b in zip(streams[0], other, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_the_loader_asks_for_nothing_that_is_not_there():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for changes in ({}, {"workers": 1}):
            config = replace(BASE, transfer="prefetch", **changes)
            who = ranks.Rank(0, 1, 0, torch.device("cpu"))
            data = train.open_data(config, who)
            loader = train.make_loader(
                config, data, train.Order(config, 99, who, 0)
            )
            assert not loader.pin_memory
            if not config.workers:
                next(iter(loader))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_trains_on_a_gpu_as_on_the_cpu(precision):
    with running() as run:
        right = [train.update(run)["loss"] for _ in range(3)]
    with running(
        device="cuda",
        transfer="prefetch",
        attention="fused",
        optimizer="fused",
        precision=precision,
    ) as run:
        rows = [train.update(run)["loss"] for _ in range(3)]
    near = 1e-5 if precision == "float32" else 2e-2
    assert rows == pytest.approx(right, rel=near)


# --- evaluation -------------------------------------------------------------


def test_evaluates_held_out_windows_exactly():
    found = {}
    for size in (1, 4):
        with running(micro_batch=size, evaluate_batches=1000) as run:
            run.windows.windows = run.trained + 7  # no multiple of 4
            state = torch.get_rng_state()
            found[size] = train.evaluate(run)
            assert torch.equal(state, torch.get_rng_state())
            assert run.model.training
            rows = [run.windows[run.trained + i] for i in range(7)]
            ids, targets = map(torch.stack, zip(*rows, strict=True))
            with torch.no_grad():
                logits = run.model.eval()(ids).flatten(0, 1)
            right = nn.functional.cross_entropy(logits, targets.flatten())
            assert found[size] == pytest.approx(right.item(), rel=1e-6)
            seen = {run.trained + i for i in range(7)}
            order = train.Order(run.config, run.trained, run.rank, 0)
            stream = iter(order)
            trained = {i for _ in range(2000) for i in next(stream)}
            assert not seen & trained


# --- speed ------------------------------------------------------------------


class Clock:
    """Time that passes only where the test says so."""

    now = 0.0

    def __call__(self):
        return self.now

    def passing(self, function, seconds):
        def call(*args):
            result = function(*args)
            self.now += seconds
            return result

        return call


@pytest.fixture
def measured_rate(monkeypatch):
    """Return the tokens/s of a training: 1 s per update, 9 per evaluation."""
    clock = Clock()
    zero = torch.zeros(())
    monkeypatch.setattr(train, "clock", clock)
    monkeypatch.setattr(
        train, "accumulate", clock.passing(lambda run, batches: zero, 1.0)
    )
    monkeypatch.setattr(train, "evaluate", clock.passing(lambda run: 1.0, 9.0))
    monkeypatch.setattr(train, "peak_flops", lambda run: (None, ""))
    monkeypatch.setattr(
        nn.utils, "clip_grad_norm_", lambda parameters, most: zero
    )

    def rate(evaluate_every):
        batches = iter([(torch.zeros(4, 1000),) * 2] * 99)
        with running(
            evaluate_every=evaluate_every, sequences=4, micro_batch=1
        ) as run:
            run.config = replace(run.config, preset="gpt2", T=1000)
            run.batches = clock.passing(lambda: batches, 20.0)()  # start-up
            return train.throughput(train.train(run))

    return rate, clock


def test_speed_is_that_of_the_updates(measured_rate, monkeypatch, capsys):
    rate, clock = measured_rate
    assert {rate(every) for every in (0, 1, 2, 5)} == {4000.0}
    assert "MFU n/a" in capsys.readouterr().out  # no peak, no guess
    update = train.update

    def from_update_to_update(run):
        last = getattr(run, "last", clock.now)
        row = update(run)
        run.last = clock.now
        return row | {"seconds": clock.now - last}

    monkeypatch.setattr(train, "update", from_update_to_update)
    assert {rate(every) for every in (1, 2, 5)} != {4000.0}

    def one_micro_batch(run):
        return update(run) | {"tokens": 1000}

    monkeypatch.setattr(train, "update", one_micro_batch)
    assert rate(0) == 1000.0


def test_utilisation_states_the_published_case():
    flops = gpt.flops_per_token(gpt.preset("gpt2"), 1024)
    assert flops == pytest.approx(8.5517e8, rel=1e-4)
    assert metrics.utilisation(142_156, flops, 312e12) == "39.0%"
    assert metrics.utilisation(142_156, flops, None) == "n/a"


def test_peak_of_an_unknown_device_is_not_guessed(monkeypatch):
    run = sloping(1.0)
    run.device = torch.device("cuda")
    run.rank = ranks.Rank(0, 8, 0, run.device)
    run.config = replace(run.config, precision="bfloat16")
    names = iter(["Some Card 9000", "NVIDIA A100-SXM4-80GB"])
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: next(names)
    )
    assert metrics.peak_flops(run)[0] is None
    assert metrics.peak_flops(run)[0] == 8 * 312e12  # eight GPUs, dense


# --- checkpoints ------------------------------------------------------------


def losses(run, count):
    return [train.update(run)["loss"] for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1},
        {"optimizer": "fused", "workers": 1},
        {"optimizer": "foreach", "precision": "float16"},
    ],
    ids=str,
)
def test_resumes_bitwise(tmp_path, changes):
    changes |= {"out": str(tmp_path)}
    with running(**changes) as run:
        losses(run, 2)
        train.save_checkpoint(run)
        right = losses(run, 3)
    with running(**changes, resume=True) as run:
        assert run.updates == run.position == 2
        assert losses(run, 3) == right
    with running(**changes) as run:  # weights alone are not enough
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        run.model.load_state_dict(saved["model"])
        assert losses(run, 3) != right
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt"]


def test_resumes_after_a_skipped_step_at_the_right_data(tmp_path):
    changes = {"precision": "float16", "out": str(tmp_path)}
    with running(**changes) as run:
        run.scaler.scale(torch.ones(()))
        run.scaler.update(2.0**100)
        rows = [train.update(run) for _ in range(2)]
        assert rows[0]["skipped"] and run.position == 2 > run.updates
        train.save_checkpoint(run)
        right = losses(run, 2)
    with running(**changes, resume=True) as run:
        assert run.position == 2 > run.updates
        assert losses(run, 2) == right


def test_other_ways_to_the_same_numbers_may_go_on(tmp_path):
    with running(out=str(tmp_path)) as run:
        losses(run, 2)
        train.save_checkpoint(run)
        right = losses(run, 2)
    with running(
        out=str(tmp_path),
        resume=True,
        optimizer="fused",
        micro_batch=4,
        attention="fused",
        workers=1,
        steps=99,
    ) as run:
        groups = run.optimizer.param_groups
        assert all(g["fused"] and not g["foreach"] for g in groups)
        assert losses(run, 2) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("before", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("after", ["for-loop", "foreach", "fused"])
def test_the_optimizer_knows_its_way_before_it_loads(
    tmp_path, monkeypatch, before, after
):
    """AdamW puts the loaded step counts where this way wants them."""
    with running(out=str(tmp_path), optimizer=before) as run:
        losses(run, 1)
        train.save_checkpoint(run)
    load, seen = torch.optim.AdamW.load_state_dict, []

    def watched(optimizer, state_dict):
        seen.extend(state_dict["param_groups"])
        load(optimizer, state_dict)

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", watched)
    with running(out=str(tmp_path), resume=True, optimizer=after) as run:
        assert len(seen) == len(run.optimizer.param_groups) == 2
        for group in (*seen, *run.optimizer.param_groups):
            assert group["fused"] == (after == "fused")
            assert group["foreach"] == (after == "foreach")


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("after", ["for-loop", "foreach", "fused"])
def test_step_counts_are_where_the_resumed_optimizer_wants_them(
    tmp_path, before, after
):
    changes = {"device": "cuda", "out": str(tmp_path)}
    with running(**changes, optimizer=before) as run:
        losses(run, 2)
        train.save_checkpoint(run)
        right = losses(run, 2)
    with running(**changes, resume=True, optimizer=after) as run:
        kinds = {s["step"].device.type for s in run.optimizer.state.values()}
        assert kinds == {"cuda" if after == "fused" else "cpu"}
        assert losses(run, 2) == pytest.approx(right, rel=1e-5)


def test_saved_under_plain_names_and_loaded_into_any_nesting(tmp_path):
    with running(out=str(tmp_path)) as run:
        plain = run.model
        run.model = torch.compile(run.model, backend="eager")
        losses(run, 1)
        wrapped = run.model.state_dict()
        train.save_checkpoint(run)
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert saved["model"].keys() == plain.state_dict().keys()
        plain.load_state_dict(saved["model"], strict=True)
        run.config = replace(run.config, resume=True)
        before = copy.deepcopy(plain.state_dict())
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
        train.load_checkpoint(run)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, before[name])
        assert plain.lm_head.weight is plain.wte.weight
        # what people save instead: every key is missing, and nothing says so
        found = plain.load_state_dict(wrapped, strict=False)
        assert len(found.missing_keys) == len(saved["model"])


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    with running(out=str(tmp_path)) as run:
        train.save_checkpoint(run)
        kept = (tmp_path / "checkpoint.pt").read_bytes()

        def full(value, file):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(Refusal, match="No space left.*kept"):
            train.save_checkpoint(run)
        assert (tmp_path / "checkpoint.pt").read_bytes() == kept
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_runs_no_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return io.open, (str(tmp_path / "made"), "w")

    torch.save({"config": Harmful()}, tmp_path / "checkpoint.pt")
    with pytest.raises(Refusal, match="damaged or no checkpoint"):
        train.start(replace(BASE, out=str(tmp_path), resume=True))
    assert not (tmp_path / "made").exists()
