"""The agreement check: the true steps pass, lost gradients do not."""

from dataclasses import replace

import pytest

from ch09_advanced import custom_op
from ch10_gpt2 import ladder, race, steps, train, worker

TINY = train.Config(
    preset="gpt2-tiny", T=32, sequences=4, micro_batch=4, tokens="once"
)


def reports(config, spoil=None):
    """Make two updates as the ladder's worker does; spoil each gradient."""
    run = train.start(config)
    accumulate = train.accumulate

    def spoiled(run, batches):
        loss = accumulate(run, batches)
        for name, parameter in run.model.named_parameters():
            spoil(name, parameter.grad)
        return loss

    try:
        if spoil:
            train.accumulate = spoiled
        return worker.updates(run, 2, gradients=True)["updates"]
    finally:
        train.accumulate = accumulate
        train.finish(run)


@pytest.fixture(scope="module")
def honest():
    formats = ("float32", "bfloat16", "float16")
    return {f: reports(replace(TINY, precision=f)) for f in formats}


def without(mark):
    """Zero the gradients of the parameters that ``mark`` names."""

    def spoil(name, gradient):
        if mark in name:
            gradient.zero_()

    return spoil


def too_large(name, gradient):
    gradient.mul_(1.04)


PLANTED = {
    "projections": without("c_attn"),
    "one projection": without("blocks.0.attn.c_attn.weight"),
    "norms": without("ln_"),
    "positions": without("wpe"),
    "4% too large": too_large,
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("planted", PLANTED)
def test_wrong_gradients_fail_in_both_formats(honest, planted, precision):
    wrong = reports(replace(TINY, precision=precision), PLANTED[planted])
    found = race.agreement("close", honest[precision], wrong)
    assert not found["holds"], found
    step = next(s for s in steps.SPEED if s.name == "in_place_loss")
    row = ladder.empty_row(step, agreement=found)
    verdict, reason = ladder.judge(step, row, {})
    assert verdict == "failed" and "does not compute the same" in reason
    # by far: the first loss is the same, the worst gradient is not
    excess = max(
        found["worst_gradient_norm"] / found["gradient_tolerance"],
        found["worst_parameter_norm"] / found["parameter_tolerance"],
    )
    assert excess > 10


def margins(found):
    """Return how many times each tolerance exceeds what was found."""
    return {
        "loss": found["tolerance"] / max(found["worst"], 1e-12),
        "gradient": found["gradient_tolerance"]
        / max(found["worst_gradient_norm"], 1e-12),
        "parameter": found["parameter_tolerance"]
        / max(found["worst_parameter_norm"], 1e-12),
    }


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_another_order_in_16_bits_is_close(precision):
    """The log's model, in one micro-batch and with the custom operator."""
    if reason := custom_op.available():
        pytest.skip(reason)
    config = train.Config(T=96, sequences=4, micro_batch=4, tokens="once")
    config = replace(config, precision=precision)
    before = reports(config)
    after = reports(replace(config, loss="in-place"))
    found = race.agreement("close", before, after)
    assert found["holds"] and min(margins(found).values()) > 3, found


def test_another_format_is_as_near_as_declared(honest):
    for other in ("bfloat16", "float16"):
        both = honest["float32"], honest[other]
        found = race.agreement("precision", *both)
        assert found["holds"] and min(margins(found).values()) > 3, found


def test_precision_is_declared_where_the_format_changes():
    for step in steps.MEMORY + steps.SPEED:
        config = step.change(TINY)
        changes = config.precision != TINY.precision
        assert (step.agreement == "precision") == changes, step.name


def report(loss, norm, **more):
    whole = {"loss": loss, "grad_norm": norm}
    return whole | {"parameter_norms": {"a": norm, "b": 1e-9}} | more


def test_agreement_accepts_what_is_declared():
    a = [report(10.0, 2.0), report(9.0, 2.0)]
    near = [report(10.0, 2.0 + 1e-6), report(9.0 + 1e-6, 2.0)]
    assert race.agreement("exact", a, a)["holds"]
    assert not race.agreement("exact", a, near)["holds"]
    assert race.agreement("close", a, near)["holds"]
    half = [report(10.05, 2.02), report(9.05, 2.0)]
    assert not race.agreement("close", a, half)["holds"]
    assert race.agreement("precision", a, half)["holds"]


def test_agreement_catches_a_gradient_that_the_loss_hides():
    """The first losses agree whatever the gradient is; its norm does not."""
    a = [report(10.0, 2.0)]
    assert not race.agreement("close", a, [report(10.0, 0.7)])["holds"]
    gone = [report(10.0, 2.0, parameter_norms={"b": 1e-9})]
    found = race.agreement("precision", a, gone)
    assert not found["holds"] and found["parameter"] == "a"
    assert found["worst_parameter_norm"] == 1.0
    # what is nothing beside the others may be rounded to nothing
    rounded = [report(10.0, 2.0, parameter_norms={"a": 2.0})]
    assert race.agreement("close", a, rounded)["holds"]
    unknown = [report(10.0, 2.0, parameter_norms=None)]
    assert not race.agreement("precision", a, unknown)["holds"]


def test_agreement_counts_what_is_not_finite():
    a = [report(10.0, 2.0)]
    nan = [report(float("nan"), 2.0)]
    assert not race.agreement("precision", a, nan)["holds"]
    a = [report(10.0, 2.0), report(9.0, 2.0)]
    overflow = [report(10.0, float("inf"), skipped=True), report(9.0, 2.0)]
    assert race.agreement("precision", a, overflow)["holds"]
    # a skipped update excuses no other one
    overflow[1] = report(9.0, 9.0)
    assert not race.agreement("precision", a, overflow)["holds"]
    burst = [report(10.0, float("inf"), skipped=False)]
    assert not race.agreement("precision", a, burst)["holds"]


def test_a_kept_row_remembers_what_is_compared():
    """Memory may not hold both: the new one is held against the row."""
    overflow = report(10.0, float("inf"), skipped=True)
    made = [overflow, report(9.0, 2.0), report(8.0, 1.0)]
    row = {
        "losses": [u["loss"] for u in made],
        "gradient_norms": [u["grad_norm"] for u in made],
        "parameter_norms": race.first_norms(made),
    }
    again = ladder.remembered(row)
    assert race.agreement("exact", again, made)["holds"]
    # a GradScaler may skip one update more than the row did
    later = [made[0], report(9.0, float("inf"), skipped=True), made[2]]
    assert race.agreement("exact", again, later)["holds"]
    later[2] = report(8.0, 1.0, parameter_norms={"a": 1.0, "b": 1.0})
    assert not race.agreement("close", again, later)["holds"]
    made[1] = report(9.0, 2.0, parameter_norms={"a": 2.0, "b": 1.0})
    assert not race.agreement("close", again, made)["holds"]


def test_a_kept_row_stays_short():
    made = [report(10.0, 2.0)] * 12
    overflow = report(10.0, float("inf"), skipped=True)
    assert len(race.first_norms(made)) == 1 + race.SKIPS
    assert len(race.first_norms([overflow, *made])) == 2 + race.SKIPS


def test_norms_are_those_before_clipping():
    run = train.start(replace(TINY, clip=0.5))
    report = worker.updates(run, 1, gradients=True)["updates"][0]
    train.finish(run)
    norms = report["parameter_norms"].values()
    together = sum(n**2 for n in norms) ** 0.5
    assert report["grad_norm"] > 0.5
    assert together == pytest.approx(report["grad_norm"], rel=1e-5)
