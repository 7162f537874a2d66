"""The in-place cross-entropy: right, in place, in one graph, buildable."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from ch09_advanced import custom_op
from ch09_advanced.custom_op import in_place_cross_entropy
from common import gpt
from common.bench import Refusal

N, V = 24, 1003  # V: no multiple of the kernel's 64 lanes
MISSING = custom_op.available("cpu")
built = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def inputs(dtype=torch.float32, spread=3.0, ignored=(0, 7, 8)):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator) * spread
    targets = torch.randint(V, (N,), generator=generator)
    targets[list(ignored)] = gpt.IGNORED
    return logits.to(dtype), targets


def loss_and_gradient(loss, logits, targets, scale=None, by=None):
    leaf = logits.clone().requires_grad_()
    value = loss(leaf * 1, targets, scale)
    value.backward(None if by is None else torch.tensor(by).to(value))
    return value.detach(), leaf.grad


def worst(got, want):
    return (
        (got.double() - want.double()).abs().max() / want.abs().max()
    ).item()


CASES = {
    torch.float32: 1e-6,
    torch.float64: 1e-12,
    torch.bfloat16: 4e-3,  # half a unit in the last place, of the largest
    torch.float16: 1e-3,
}


@built
@pytest.mark.parametrize("scale", [None, 0.125])
@pytest.mark.parametrize("dtype", CASES, ids=str)
def test_equals_the_composite(dtype, scale):
    logits, targets = inputs(dtype)
    scale = None if scale is None else torch.tensor(scale)
    got = loss_and_gradient(in_place_cross_entropy, logits, targets, scale)

    def composite(logits, targets, scale):
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return loss if scale is None else loss * scale

    want = loss_and_gradient(composite, logits.double(), targets, scale)
    loss_tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert worst(got[0], want[0]) <= loss_tolerance
    assert worst(got[1], want[1]) <= CASES[dtype]
    assert got[1].dtype == dtype
    model = gpt.summed_cross_entropy  # the contract it shares
    same = loss_and_gradient(model, logits, targets, scale)
    assert worst(got[0], same[0]) <= 1e-6


@built
def test_a_forgotten_subtraction_would_be_seen():
    logits, targets = inputs()
    _, want = loss_and_gradient(gpt.summed_cross_entropy, logits, targets)
    softmax_only = logits.softmax(1) * (targets >= 0)[:, None]
    assert worst(softmax_only, want) > 0.5


@built
@pytest.mark.parametrize("by", [1.0, 3.0, 65536.0])
def test_the_arriving_gradient_multiplies(by):
    logits, targets = inputs()
    scale = torch.tensor(1 / N)
    _, got = loss_and_gradient(
        in_place_cross_entropy, logits, targets, scale, by
    )
    _, want = loss_and_gradient(
        gpt.summed_cross_entropy, logits, targets, scale, by
    )
    assert worst(got, want) <= 1e-6


@built
def test_nothing_counted_is_zero_and_not_nan():
    logits, targets = inputs(ignored=range(N))
    loss, gradient = loss_and_gradient(
        in_place_cross_entropy, logits, targets, torch.tensor(0.5)
    )
    assert loss == 0 and not gradient.any()
    empty = in_place_cross_entropy(logits[:0].clone(), targets[:0])
    assert empty == 0


@built
def test_large_logits_stay_finite_and_nan_stays_nan():
    logits, targets = inputs(spread=1e4)
    got = loss_and_gradient(in_place_cross_entropy, logits, targets)
    want = loss_and_gradient(
        gpt.summed_cross_entropy, logits.double(), targets
    )
    assert all(t.isfinite().all() for t in got)
    assert worst(got[0], want[0]) <= 1e-6 and worst(got[1], want[1]) <= 1e-6
    logits[1, :5] = -torch.inf  # a vocabulary entry that is switched off
    _, gradient = loss_and_gradient(in_place_cross_entropy, logits, targets)
    assert (gradient[1, :5] == 0).all()
    logits[1, 5] = torch.nan
    loss, gradient = loss_and_gradient(in_place_cross_entropy, logits, targets)
    assert loss.isnan() and gradient[1].isnan().all()
    assert gradient[2:].isfinite().all()


@built
def test_gradcheck_in_double_precision():
    logits = torch.randn(3, 70, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([69, gpt.IGNORED, 2])
    scale = torch.tensor(0.7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: in_place_cross_entropy(x * 1, targets, scale), (logits,)
    )


@built
def test_opcheck():
    logits, targets = inputs()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.library.opcheck(
            custom_op._cross_entropy,
            (logits.to(dtype), targets, torch.tensor(0.5)),
        )
    torch.library.opcheck(custom_op._cross_entropy, (logits, targets, None))


@built
def test_the_gradient_lies_in_the_logits_bytes():
    logits, targets = inputs()
    seen = []
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    x.register_hook(lambda g: seen.append(g.data_ptr()))
    loss = in_place_cross_entropy(x, targets)
    loss.backward()
    assert seen == [x.data_ptr()]
    assert torch.equal(x.detach(), leaf.grad)
    assert x.sum(1).abs().max() < 1e-5  # softmax - 1 at the target


def allocated(run):
    """Bytes of all allocations of at least a row of logits."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    return sum(s for s in sizes if s >= 4 * V)


@built
def test_no_bytes_beside_the_logits():
    logits, targets = inputs()
    x = (logits.requires_grad_() * 1).detach().requires_grad_()

    def both(loss):
        loss(x, targets, torch.tensor(0.5)).backward()
        x.grad = None

    assert allocated(lambda: both(in_place_cross_entropy)) == 0
    assert allocated(lambda: both(gpt.summed_cross_entropy)) >= 2 * 4 * N * V


def head(loss):
    def run(hidden, weight, targets, scale):
        return loss(hidden @ weight.T, targets, scale)

    return run


@built
def test_one_graph_and_no_clone_under_compile():
    torch._dynamo.reset()
    _, targets = inputs()
    hidden = torch.randn(N, 8)
    weight = torch.randn(V, 8, requires_grad=True)
    scale = torch.tensor(1 / N)
    compiled = torch.compile(head(in_place_cross_entropy), fullgraph=True)

    def update(run, by=1.0):
        weight.grad = None
        loss = run(hidden, weight, targets, scale)
        (loss * by).backward()
        return loss.detach(), weight.grad

    for by in (1.0, 3.0):
        got = update(compiled, by)
        want = update(head(gpt.summed_cross_entropy), by)
        assert worst(got[0], want[0]) <= 1e-6
        assert worst(got[1], want[1]) <= 1e-5
    # one buffer for the logits and the gradient; the weight's is smaller
    assert allocated(lambda: update(compiled)) < 2 * 4 * N * V


@built
def test_a_second_backward_pass_is_right_or_refused():
    logits, targets = inputs()
    leaf = logits.clone().requires_grad_()
    loss = in_place_cross_entropy(leaf * 1, targets)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward(torch.tensor(3.0), retain_graph=True)
    assert worst(leaf.grad, 4 * once) <= 1e-6
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@built
def test_who_else_needs_the_logits_is_told():
    logits, targets = inputs()
    x = logits.requires_grad_() * 1
    other = x.exp().sum() + x.pow(2).sum()  # pow saves x
    loss = in_place_cross_entropy(x, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        (loss + other).backward()


@built
def test_any_number_of_threads_gives_the_same_bits():
    logits, targets = inputs()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x = logits.clone()
            results.append((in_place_cross_entropy(x, targets), x))
    finally:
        torch.set_num_threads(before)
    for loss, x in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(x, results[0][1])


@built
def test_in_the_model():
    config = gpt.preset("gpt2-tiny").but(vocab_size=300, n_layer=1)
    ids = torch.randint(300, (2, 16))
    targets = torch.randint(300, (2, 16))
    scale, results = torch.tensor(1 / 32), []
    for loss in (gpt.summed_cross_entropy, in_place_cross_entropy):
        torch.manual_seed(0)
        model = gpt.GPT(config, loss=loss)
        value = model(ids, targets, scale)
        value.backward()
        results.append((value.detach(), model.wte.weight.grad))
    (value, gradient), (got_value, got_gradient) = results
    assert worst(got_value, value) <= 1e-6
    assert worst(got_gradient, gradient) <= 1e-5


def test_fake_tensors_need_no_compiler(monkeypatch):
    monkeypatch.setattr(custom_op, "load", None)  # would raise if called
    with FakeTensorMode():
        logits = torch.empty(8, 50, requires_grad=True)
        loss = in_place_cross_entropy(
            logits * 1, torch.zeros(8, dtype=torch.int64), torch.tensor(0.1)
        )
        loss.backward()
        assert loss.shape == () and logits.grad.shape == (8, 50)


@built
@pytest.mark.parametrize("bad", [-1, V, -99])
def test_a_target_out_of_range_is_named_and_nothing_written(bad):
    logits, targets = inputs()
    targets[5], before = bad, logits.clone()
    with pytest.raises(RuntimeError, match=rf"target {bad} of row 5"):
        in_place_cross_entropy(logits, targets)
    assert torch.equal(logits, before)


def test_what_it_does_not_take_is_said():
    logits, targets = inputs()
    scale = torch.tensor(1.0)
    for error, words, arguments in [
        (ValueError, "contiguous", (logits.T.contiguous().T, targets)),
        (ValueError, "contiguous", (logits[None], targets)),
        (TypeError, "int64", (logits, targets.int())),
        (ValueError, r"\(24,\)", (logits, targets[:3])),
        (TypeError, "int32", (logits.int(), targets)),
        (ValueError, "0-dim", (logits, targets, scale[None])),
        (Refusal, "meta", (logits.to("meta"), targets)),
    ]:
        with pytest.raises(error, match=words):
            in_place_cross_entropy(*arguments)
    assert "cuda" in custom_op.available("cuda")


def test_no_compiler_is_one_clear_line(tmp_path):
    ask = "from ch09_advanced import custom_op as o; print(o.available())"
    told = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"CXX": "/nonexistent", "BENCH_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert told.returncode == 0 and not told.stderr.strip()
    assert len(told.stdout.splitlines()) == 1
    assert "CXX=/nonexistent" in told.stdout


@pytest.mark.parametrize(
    ("CXX", "words"),
    [
        ("", "no C.. compiler found"),
        (sys.executable, "cannot build the C.. operator .*; set CXX"),
    ],
)
def test_no_way_to_build_is_refused(CXX, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", CXX)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(custom_op, "_loaded", None)
    logits, targets = inputs()
    with pytest.raises(Refusal, match=words) as refused:
        in_place_cross_entropy(logits, targets)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("build-*"))


@built
def test_two_builds_at_once_leave_one_library(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    commands = custom_op._commands(custom_op._compiler())
    made, compiled = [], custom_op.load().read_bytes()

    def pretend(commands, folder, suffix):  # seconds of compiling, copied
        together.wait(timeout=30)
        (folder / f"made{suffix}").write_bytes(compiled)
        return folder / f"made{suffix}"

    monkeypatch.setattr(custom_op, "_compile", pretend)
    together = threading.Barrier(2)

    def build():
        made.append(custom_op._build(commands, "0" * 16))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1] and made[0].read_bytes() == compiled
    assert list((tmp_path / "ops").iterdir()) == [made[0]]


@built
def test_a_cache_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("no folder can be made inside a file")
    monkeypatch.setenv("BENCH_CACHE", str(file / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    commands = custom_op._commands(custom_op._compiler())

    def pretend(commands, folder, suffix):
        return Path(shutil.copy(custom_op.load(), folder / f"made{suffix}"))

    monkeypatch.setattr(custom_op, "_compile", pretend)
    library = custom_op._build(commands, "0" * 16)
    assert library.is_relative_to(tmp_path)
    assert library.read_bytes() == custom_op.load().read_bytes()


@pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="needs owners and modes"
)
def test_a_library_that_others_may_have_written_is_not_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    compiled = []

    def pretend(commands, folder, suffix):
        made = folder / f"made{suffix}"
        made.write_bytes(b"ours")
        made.chmod(0o777)  # as under a umask of 0
        compiled.append(made)
        return made

    monkeypatch.setattr(custom_op, "_compile", pretend)
    place = custom_op._build([], "0" * 16)
    assert place.stat().st_mode & 0o777 == 0o700
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert custom_op._build([], "0" * 16) == place and len(compiled) == 1

    place.write_bytes(b"planted")
    place.chmod(0o666)
    assert custom_op._build([], "0" * 16) == place
    assert place.read_bytes() == b"ours" and len(compiled) == 2

    place.write_bytes(b"planted")
    place.parent.chmod(0o777)
    private = custom_op._build([], "0" * 16)
    assert private != place and private.read_bytes() == b"ours"
    assert private.parent.stat().st_mode & 0o777 == 0o700


@built
def test_the_library_is_for_this_source_and_machine(monkeypatch):
    commands = custom_op._commands(custom_op._compiler())
    key = custom_op._key(commands)
    assert key == custom_op._key(commands)
    assert key != custom_op._key(commands[1:])
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert key != custom_op._key(commands)
