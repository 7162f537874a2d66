"""Predicted bytes against bytes that a CPU really allocated."""

import os

import pytest
import torch
import torch.distributed as dist
from sharded_job import CONFIG as SHARDED
from sharded_job import sharded_peaks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from ch07_memory import training_memory as memory
from common import bench, gpt, ranks

MIB = 2**20
SMALL = gpt.GPTConfig(2, 4, 128, block_size=64, vocab_size=700)
SCALARS = 128  # numbers turned into 0-dim tensors inside an operator
RNG_STATE = 5056  # checkpoint's copy of the CPU generator, per block

FUSED = {"attention": memory.fused_attention}
AGAIN = {"run_block": memory.recompute_block}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain", {}),
        ("accumulated", {"accumulate": 3}),
        ("recomputed", AGAIN),
        ("fused attention", FUSED),
        ("for-loop", {"optimizer": "for-loop"}),
        ("fused AdamW", {"optimizer": "fused"}),
        (
            "all",
            FUSED | AGAIN | {"optimizer": "for-loop", "accumulate": 2},
        ),
    ],
)
@pytest.mark.parametrize(  # the step's peak, and backward's
    ("micro_batch", "tied"), [(1, True), (16, False)]
)
def test_prediction_is_the_real_peak(name, how, micro_batch, tied):
    config = SMALL.but(tied=tied)
    how = {"micro_batch": micro_batch, "T": 64} | how
    predicted = memory.predict(config, **how)
    measured = memory.live_peak(config, **how)
    unseen = SCALARS
    if "run_block" in how:  # plain memory, no tensor of the model
        unseen += config.n_layer * RNG_STATE
    excess = measured["peak_bytes"] - predicted["peak_bytes"]
    assert 0 <= excess <= unseen, name
    assert measured["end_bytes"] == predicted["rest_bytes"]
    assert predicted["peak_bytes"] == sum(predicted["bytes"].values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_is_predicted_too(dtype):
    predicted = memory.predict(SMALL, micro_batch=4, T=64, dtype=dtype)
    model = gpt.GPT(SMALL)
    adam = memory.adamw(model, "foreach")
    ids = torch.zeros(4, 64, dtype=torch.long)
    batch = (ids, ids.clone(), torch.ones(()))

    def step():
        with torch.autocast("cpu", getattr(torch, dtype)):
            memory.update(model, adam, batch)

    step()
    adam.zero_grad()
    resident = memory.resident_bytes(model, adam, *batch)
    measured = memory.measure_peak(step, resident)["peak_bytes"]
    assert measured == pytest.approx(predicted["peak_bytes"], rel=0.01)
    single = memory.predict(SMALL, micro_batch=4, T=64)["bytes"]
    assert predicted["bytes"]["activations"] < single["activations"]


@pytest.mark.parametrize(
    ("form", "mib"), [("for-loop", 67), ("foreach", 80), ("fused", 64)]
)
def test_forms_of_adamw_hold_what_they_must(form, mib):
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(512, 512)) for _ in range(16)
    )
    adam = memory.adamw(model, form)

    def give_gradients():
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)

    give_gradients()
    adam.step()  # makes the state
    resident = memory.resident_bytes(model, adam)
    assert resident // MIB == 64  # weights, gradients, two moments
    measured = memory.measure_peak(adam.step, resident)
    assert measured["peak_bytes"] / MIB == pytest.approx(mib, abs=0.01)


# --- the formula ------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        FUSED,
        AGAIN,
        FUSED | AGAIN,
        {"accumulate": 2},
        AGAIN | {"accumulate": 2, "optimizer": "for-loop"},
    ],
)
@pytest.mark.parametrize(
    ("vocabulary", "micro_batch", "T"), [(5000, 1, 64), (65, 8, 256)]
)
def test_formula_is_within_5_percent(vocabulary, how, micro_batch, T):
    config = gpt.GPTConfig(3, 4, 256, block_size=256, vocab_size=vocabulary)
    config = config.but(tied=vocabulary != 65)
    how = how | {"micro_batch": micro_batch, "T": T}
    tracked = memory.predict(config, **how)["peak_bytes"]
    flags = memory.as_formula_takes(how)
    found = memory.formula(config, **flags)
    assert found["peak_bytes"] == pytest.approx(tracked, rel=0.05)
    assert found["peak_bytes"] == sum(found["bytes"].values())


def test_formula_refuses_what_it_does_not_count():
    with pytest.raises(ValueError, match="dropout"):
        memory.formula(SMALL.but(dropout=0.1), micro_batch=1)


def test_kept_bytes_are_those_that_autograd_saves():
    block = gpt.Block(SMALL, gpt.plain_attention)
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(2, 64, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = sum(s.nbytes() for p, s in kept.items() if p not in weights)
    assert saved == memory.kept_by_block(SMALL, 2, 64)
    assert y.shape == x.shape


def test_peaks_fall_in_the_order_of_the_ladder():
    how, peaks = {"micro_batch": 16, "T": 64}, []
    for change in (
        {},
        {"micro_batch": 2, "accumulate": 8},
        AGAIN,
        {"optimizer": "for-loop"},
    ):
        how |= change
        peaks.append(memory.predict(SMALL, **how)["peak_bytes"])
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) >= 3  # the step's own peak may come twice


# --- sharded ----------------------------------------------------------------


def test_shards_are_a_share_of_everything_at_rest():
    whole = memory.predict(SMALL, micro_batch=2, T=64)["rest"]
    for world in (2, 4):
        part = memory.predict(
            SMALL, micro_batch=2, T=64, world=world, fsdp=True
        )
        for key in ("parameters", "gradients", "optimizer"):
            # each parameter's step counter stays whole
            assert part["rest"][key] == pytest.approx(
                whole[key] / world, abs=1024
            )
        assert part["bytes"]["gathered"] > 0
    assert not dist.is_initialized()


@pytest.mark.ranks
@pytest.mark.parametrize(("accumulate", "recompute"), [(1, False), (2, True)])
def test_prediction_is_a_real_ranks_peak(accumulate, recompute):
    """What gloo frees unseen only adds: the lowest of many peaks is right."""
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    by_rank = ranks.spawn(
        sharded_peaks,
        2,
        4,
        accumulate,
        recompute,
        40,
        env={"PYTHONPATH": path},
        timeout_s=300,
    )
    predicted = memory.predict(
        SHARDED,
        micro_batch=4,
        T=64,
        optimizer="for-loop",
        accumulate=accumulate,
        run_block=memory.recompute_block if recompute else gpt.call_block,
        world=2,
        fsdp=True,
    )["peak_bytes"]
    for peaks in by_rank:
        assert predicted <= min(peaks) <= 1.01 * predicted


def test_a_free_that_went_unseen_is_written_off_at_reuse():
    seen = [(0, 1000, 64), (1, 2000, 64), (2, 2000, -64)]
    assert memory._running_sum(seen) == (128, 64)
    # the block at 1000 went unseen; one of 32 bytes takes its place
    assert memory._running_sum([*seen, (3, 1016, 32)]) == (128, 32)
    # allocated before, freed in the step after all
    assert memory._running_sum([(0, 10, -8), (1, 10, 16)]) == (8, 8)


# --- the largest batch ------------------------------------------------------


def test_largest_batch_is_the_largest_and_grows():
    found = []
    for mib in (4, 20, 60):
        known = {}
        fits = memory.largest_batch(SMALL, 64, mib * MIB, 0.1, known=known)
        usable = mib * MIB - round(mib * MIB * 0.1)
        assert fits["usable_bytes"] == usable
        batch = fits["batch"]
        if batch:
            assert fits["peak_bytes"] <= usable
        assert known[batch + 1] > usable
        assert len(known) <= 9
        found.append(batch)
    assert found[0] == 0
    assert found == sorted(set(found))


def test_margin_may_be_a_function():
    fits = memory.largest_batch(SMALL, 64, 80 * MIB, lambda size: size // 2)
    half = memory.largest_batch(SMALL, 64, 80 * MIB, 0.5)
    assert fits == half


# --- wrong versions ---------------------------------------------------------


def fake_update(tracker_class, updates, reset=True):
    """Track ``updates`` updates in one go; return the peak's bytes."""
    with FakeTensorMode():
        model = gpt.GPT(SMALL)
        adam = memory.adamw(model, "foreach")
        ids = torch.zeros(16, 64, dtype=torch.long)
        batch = (ids, ids.clone(), torch.ones(()))
        tracker = tracker_class()
        tracker.track_external(model, adam, *batch)
        before = tracker.reset_mod_stats if reset else None
        with tracker:
            for _ in range(updates):
                memory.update(model, adam, batch, 1, before)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


def test_first_update_lacks_the_state_and_is_caught():
    predicted = memory.predict(SMALL, micro_batch=16, T=64)["peak_bytes"]
    state = 8 * gpt.parameter_counts(SMALL)["total"]
    first = fake_update(MemTracker, 1)
    assert predicted - first == pytest.approx(state, rel=0.01)
    real = memory.live_peak(SMALL, micro_batch=16, T=64)["peak_bytes"]
    assert abs(first / real - 1) > 0.01 > abs(predicted / real - 1)


def test_whole_tracker_finds_the_same_peak():
    predicted = memory.predict(SMALL, micro_batch=16, T=64)["peak_bytes"]
    assert fake_update(MemTracker, 2) == predicted


def test_forgotten_reset_is_caught():
    with pytest.raises(NotImplementedError, match="reset_mod_stats"):
        fake_update(MemTracker, 2, reset=False)
    with pytest.raises(NotImplementedError, match="reset_mod_stats"):
        fake_update(memory._private_to_torch(False)[1], 2, reset=False)


def test_gradients_left_over_raise_the_measured_peak():
    """The trap that measure_peak's docstring names, at most its size."""
    model = gpt.GPT(SMALL)
    adam = memory.adamw(model, "for-loop")
    ids = torch.zeros(16, 64, dtype=torch.long)
    batch = (ids, ids.clone(), torch.ones(()))

    def step():
        memory.update(model, adam, batch)

    step()
    resident = memory.resident_bytes(model, adam, *batch)  # with gradients
    measured = memory.measure_peak(step, resident)
    left = memory.resident_bytes(model, adam, *batch)
    gradients = 4 * gpt.parameter_counts(SMALL)["total"]
    assert 0 <= measured["end_bytes"] - left <= gradients


# --- errors of use, smoke ---------------------------------------------------


def test_errors_are_sentences(monkeypatch):
    with pytest.raises(bench.Refusal, match="for-loop, foreach, fused"):
        memory.predict(SMALL, micro_batch=1, optimizer="sgd")
    with pytest.raises(bench.Refusal, match="float64"):
        memory.predict(SMALL, micro_batch=1, dtype="float64")
    with pytest.raises(bench.Refusal, match="start at 1"):
        memory.predict(SMALL, micro_batch=0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(bench.Refusal, match="process of its own"):
        memory.predict(SMALL, micro_batch=1, world=2, fsdp=True)


@pytest.mark.parametrize("fsdp", [False, True])
def test_torch_without_the_tracker_is_refused(monkeypatch, fsdp):
    import sys

    name = "fsdp2_mem_tracker" if fsdp else "mem_tracker"
    monkeypatch.setitem(sys.modules, f"torch.distributed._tools.{name}", None)
    with pytest.raises(bench.Refusal, match="2.11 to 2.13"):
        memory.predict(SMALL, micro_batch=1, fsdp=fsdp)


def test_nothing_is_left_behind():
    state = torch.get_rng_state()
    resize = torch.UntypedStorage.resize_
    memory.predict(SMALL, micro_batch=1, T=64, **AGAIN)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.UntypedStorage.resize_ is resize
    assert torch.ones(2).untyped_storage().data_ptr()  # no longer imagined


def test_smoke(capsys):
    rows = memory.main(["--smoke", "--device", "cpu"])
    assert {"gpt2-tiny", "gpt2-xl"} <= {row["model"] for row in rows}
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
