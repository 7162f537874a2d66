"""Every step of chapter 10 changes one thing and says what it does."""

import dataclasses
import inspect
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ch10_gpt2 import ladder, steps, train
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


AT = {
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


@pytest.mark.parametrize(
    "step", [s for s in EVERY if s.bound], ids=lambda s: s.name
)
def test_bounds_are_seconds_and_words(step):
    before = config_before(step)
    saved, words = step.bound(before, step.change(before), AT)
    assert 0 <= saved < 1 and len(words) > 10


# gpt2-tiny by hand: 2 layers, 2 heads, C 64, V 50,257, block 64
TINY = train.Config("gpt2-tiny", T=32, sequences=8, micro_batch=8)
WTE = 50257 * 64
N = WTE + 64 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
TOKENS = 8 * 32
LOGITS = TOKENS * 50257


def saved(bound, now=TINY, then=TINY, **at):
    seconds, words = bound(now, then, AT | at)
    assert words
    return seconds


def test_counts_by_hand_are_the_model_s():
    assert N == gpt.parameter_counts(TINY.model())["total"]


def test_bound_of_fewer_passes_by_hand():
    before = replace(TINY, micro_batch=2)
    at = {"bytes_per_s": 1.0, "launch_s": 2.0, "operators": 10}
    at |= {"fault_s": 0.5}
    pages = 4 * (N + WTE) / 4096
    found = saved(steps.fewer_passes_over_weights, before, TINY, **at)
    assert found == 3 * (6 * 4 * N + 10 * 2.0 + pages * 0.5)
    kept = replace(before, allocator="keep")
    found = saved(steps.fewer_passes_over_weights, kept, TINY, **at)
    assert found == 3 * (6 * 4 * N + 10 * 2.0)


def test_bounds_of_bytes_by_hand():
    rate = {"bytes_per_s": 1.0}
    scores = 2 * 2 * TOKENS * 32  # layers, heads
    assert saved(steps.no_score_matrix, **rate) == 19 * 4 * scores
    assert saved(steps.one_pass_over_the_state, **rate) == 13 * 4 * N
    pointwise = 6 * 4 * TOKENS * 64 * 2 + 3 * 4 * LOGITS
    assert saved(steps.fused_pointwise, **rate) == pointwise
    loss = steps.two_passes_over_logits
    assert saved(loss, **rate) == (24 - 8) * LOGITS
    half = replace(TINY, precision="bfloat16")
    assert saved(loss, half, **rate) == (36 - 4) * LOGITS
    copied = saved(steps.no_blocking_copies, host_to_device=1.0)
    assert copied == 2 * 8 * TOKENS


def test_bound_of_page_faults_by_hand():
    at = {"fault_s": 4096.0}
    for optimizer, temporaries in (("for-loop", 2), ("fused", 0)):
        now = replace(TINY, micro_batch=4, optimizer=optimizer)
        born = 4 * 4 * LOGITS + 2 * 4 * (N + WTE) + temporaries * 4 * N
        assert saved(steps.no_page_faults, now, **at) == born


def test_bounds_of_compute_by_hand():
    flops = TOKENS * gpt.flops_per_token(TINY.model(), 32)
    half = replace(TINY, precision="bfloat16")
    found = saved(steps.faster_matrix_units, TINY, half)
    assert found == pytest.approx(flops / 1e11 - flops / 4e11)
    divided = steps.divided_compute
    assert saved(divided, world=4, seconds=2.0) == 1.5
    shared = {"shared_cores": True, "bytes_per_s": 1.0}
    fused = replace(TINY, optimizer="fused")
    lost = (6 + 7) * 4 * N + 2 * 4 * N * 4  # walked over again; exchanged
    assert saved(divided, fused, **shared) == -lost


class Passes(TorchDispatchMode):
    """Count bytes read and written, and births, of tensors of one size."""

    looks_up = ("nll_loss_forward", "nll_loss_backward")  # one in a row

    def __init__(self, numel):
        super().__init__()
        self.numel, self.bytes, self.born = numel, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def large(tree):
            return {
                t.untyped_storage()._cdata: t.nbytes
                for t in tree_leaves(tree)
                if isinstance(t, torch.Tensor) and t.numel() == self.numel
            }

        given = large((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = large(result)
        new = {k: n for k, n in made.items() if k not in given}
        in_place = func._schema.is_mutable
        if not new and not in_place and made:
            return result  # a view
        self.born += len(new)
        if func.overloadpacket.__name__ not in self.looks_up:
            self.bytes += sum(given.values())
        elif "backward" not in func.overloadpacket.__name__:
            return result
        self.bytes += sum(made.values())
        return result


def test_passes_over_the_scores_are_counted():
    q, k, v = (torch.randn(1, 2, 48, 8, requires_grad=True) for _ in range(3))
    with Passes(2 * 48 * 48) as passes:
        gpt.plain_attention(q, k, v).sum().backward()
    assert passes.bytes == 19 * 4 * passes.numel


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 24), (torch.bfloat16, 36)]
)
def test_passes_over_the_logits_are_counted(dtype, size):
    logits = torch.randn(12, 50, dtype=dtype, requires_grad=True)
    targets = torch.zeros(12, dtype=torch.long)
    with Passes(12 * 50) as passes:
        gpt.summed_cross_entropy(logits, targets).backward()
    assert passes.bytes == size * passes.numel


def test_passes_and_births_of_the_optimizer_are_counted():
    weight = torch.nn.Parameter(torch.randn(7, 11))
    model = torch.nn.ParameterList([weight])
    optimizer = train.make_optimizer(model, TINY)
    weight.grad = torch.randn(7, 11)
    optimizer.step()
    with Passes(77) as passes:
        optimizer.step()
    assert passes.bytes == 20 * 4 * 77 and passes.born == 2


def test_births_of_a_pass_are_counted():
    """Logits' size 4 times; the tied weight's gradient twice.

    And its sum, which autograd makes in place where nobody watches.
    """
    config = gpt.GPTConfig(1, 2, 16, block_size=8, vocab_size=97)
    model = gpt.GPT(config)
    ids = torch.zeros(3, 8, dtype=torch.long)
    for numel, born in ((3 * 8 * 97, 4), (97 * 16, 2 + 1)):
        model.zero_grad(set_to_none=True)
        with Passes(numel) as passes:
            model(ids, ids).backward()
        assert passes.born == born, numel


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
