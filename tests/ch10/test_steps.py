"""Every step of chapter 10 changes one thing and says what it does."""

import dataclasses
import inspect
import platform
import subprocess
import sys

import pytest

from ch10_gpt2 import ladder, race, steps, train
from common import gpt

EVERY = steps.MEMORY + steps.SPEED


def config_before(wanted):
    track = steps.MEMORY if wanted.track == "memory" else steps.SPEED
    config = train.Config(preset="gpt2-tiny", sequences=8)
    for step in track:
        if step is wanted:
            return config
        config = step.change(config)
    raise AssertionError(wanted)


@pytest.mark.parametrize("step", EVERY, ids=lambda s: s.name)
def test_changes_one_field(step):
    before = config_before(step)
    after = step.change(before)
    changed = {
        f.name
        for f in dataclasses.fields(before)
        if getattr(before, f.name) != getattr(after, f.name)
    }
    if step in (steps.MEMORY[0], steps.SPEED[0]):
        return  # where a track starts
    if step.name == "two_hosts":  # the same configuration, started otherwise
        assert step.hosts and changed <= {"parallel"}
        return
    assert len(changed) == 1, changed


@pytest.mark.parametrize("step", EVERY, ids=lambda s: s.name)
def test_is_short_and_says_why(step):
    lines = inspect.getsource(step.change).split('"""')[-1].strip().split("\n")
    assert len(lines) <= 10
    assert len(step.why) > 60
    assert step.agreement in steps.TOLERANCE
    for name in step.shows:
        assert callable(ladder.resolve(name))


def test_order_is_the_book_s():
    memory = [s.section for s in steps.MEMORY]
    assert memory == [f"10.3.{i}" for i in range(1, 6)]
    speed = [s.section for s in steps.SPEED]
    own = [s for s in speed if s.startswith("10.4")]
    assert list(dict.fromkeys(own)) == [f"10.4.{i}" for i in range(1, 10)]
    extra = [s for s in speed if not s.startswith("10.4")]
    assert extra == ["5.2.3", "6.2.2", "6.4.1", "6.5.2"]
    assert speed.index("6.5.2") < speed.index("10.4.5")


def test_the_update_never_changes():
    """Tokens per update, data order and seed stay fixed in both tracks."""
    fixed = ("sequences", "seed", "T", "lr", "warmup", "steps", "data")
    for step in EVERY:
        before = config_before(step)
        after = step.change(before)
        for name in fixed:
            assert getattr(after, name) == getattr(before, name), step.name
        assert after.dropout == 0
        assert after.sequences % after.micro_batch == 0


@pytest.mark.parametrize(
    "step", [s for s in EVERY if s.bound], ids=lambda s: s.name
)
def test_bounds_are_seconds_and_words(step):
    at = {
        "bytes_per_s": 1e10,
        "launch_s": 1e-6,
        "fault_s": 1e-7,
        "operators": 100,
        "host_to_device": 1e10,
        "flops": {"float32": 1e11, "float16": 4e11, "bfloat16": 4e11},
        "world": 2,
        "shared_cores": False,
        "seconds": 1.0,
        "data_s": 0.1,
    }
    before = config_before(step)
    saved, words = step.bound(before, step.change(before), at)
    assert 0 <= saved < 1 and len(words) > 10


def test_bound_of_fewer_passes_by_hand():
    before = train.Config(preset="gpt2-tiny", sequences=8, micro_batch=2)
    after = dataclasses.replace(before, micro_batch=8)
    saved, _ = steps.fewer_passes_over_weights(
        before, after, {"bytes_per_s": 1.0, "launch_s": 2.0, "operators": 10}
    )
    n = gpt.parameter_counts(before.model())["total"]
    assert saved == (4 - 1) * (5 * 4 * n + 10 * 2.0)


def report(loss, norm, **more):
    return {"loss": loss, "grad_norm": norm, **more}


def test_agreement_accepts_what_is_declared():
    a = [report(10.0, 2.0), report(9.0, 2.0)]
    near = [report(10.0, 2.0 + 1e-6), report(9.0 + 1e-6, 2.0)]
    assert race.agreement("exact", a, a, "float32")["holds"]
    assert not race.agreement("exact", a, near, "float32")["holds"]
    assert race.agreement("close", a, near, "float32")["holds"]
    half = [report(10.05, 2.05), report(9.05, 2.0)]
    assert not race.agreement("close", a, half, "float32")["holds"]
    assert race.agreement("precision", a, half, "float32")["holds"]
    # after a step to 16 bits, close means close in 16 bits
    assert race.agreement("close", a, half, "bfloat16")["holds"]


def test_agreement_catches_a_gradient_that_the_loss_hides():
    """The first losses agree whatever the gradient is; its norm does not."""
    a = [report(10.0, 2.0)]
    assert not race.agreement("close", a, [report(10.0, 0.7)], "float32")[
        "holds"
    ]


def test_agreement_counts_what_is_not_finite():
    a = [report(10.0, 2.0)]
    nan = [report(float("nan"), 2.0)]
    assert not race.agreement("precision", a, nan, "float32")["holds"]
    a = [report(10.0, 2.0), report(9.0, 2.0)]
    overflow = [report(10.0, float("inf"), skipped=True), report(9.0, 2.0)]
    assert race.agreement("precision", a, overflow, "float32")["holds"]
    overflow[1]["grad_norm"] = 9.0  # a skipped update excuses no other one
    assert not race.agreement("precision", a, overflow, "float32")["holds"]
    burst = [report(10.0, float("inf"), skipped=False)]
    assert not race.agreement("precision", a, burst, "float32")["holds"]


def test_operators_are_counted():
    """Every layer adds the same number of operators."""
    twelve = ladder.operators(train.Config(preset="gpt2"))
    two = ladder.operators(train.Config(preset="gpt2-tiny"))
    assert two > 100 and (twelve - two) % 10 == 0
    assert 40 < (twelve - two) / 10 < two


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="glibc's malloc only"
)
def test_kept_memory_is_not_faulted_in_again():
    """Count the page faults of a large tensor that is born again and again."""
    program = """
import resource, sys, torch
from ch10_gpt2 import train
if sys.argv[1] == "keep":
    assert train.keep_freed_memory()
for turn in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(1 << 26, dtype=torch.uint8).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for how in ("default", "keep"):
        done = subprocess.run(
            [sys.executable, "-c", program, how],
            capture_output=True,
            text=True,
            check=True,
        )
        faults[how] = int(done.stdout)
    assert faults["keep"] < 100
    if faults["default"] < 1000:
        pytest.skip("huge pages hide the faults here")
    assert faults["default"] > 10 * faults["keep"]
