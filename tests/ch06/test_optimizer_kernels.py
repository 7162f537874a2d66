"""AdamW's forms: same weights, passes and peaks counted, wrong ones caught."""

import types
import weakref

import pytest
import torch

from ch06_single_gpu_perf import optimizer_kernels as kernels
from common import answers, bench

CPU = torch.device("cpu")
MIB = 2**20
KINDS = ("for-loop", "foreach", "fused")
SHAPES = [(7, 5), (5,), (3, 4)]


def trained(kind, steps=8, shapes=SHAPES):
    """Return weights and moments after some steps of one form."""
    step, parameters, state, gradients = kernels.stepper(shapes, CPU, kind)
    kernels.train(step, parameters, gradients, steps)
    return {"parameters": parameters, "state": state()}


def trained_wrongly(change, settings=None, reset=None):
    """Train a for-loop AdamW that ``change`` or ``settings`` spoil."""
    parameters, gradients = kernels.problem(SHAPES, CPU)
    optimizer = kernels.adamw(
        parameters, "for-loop", **(kernels.SETTINGS | (settings or {}))
    )
    taken = 0

    def step():
        nonlocal taken
        taken += 1
        change(optimizer, taken)
        optimizer.step()

    kernels.train(step, parameters, gradients)
    state = [
        [optimizer.state[p][name] for p in parameters]
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return {"parameters": parameters, "state": state}


def agree(expected, found, tolerance=kernels.TOLERANCE):
    return answers.agree(
        "found",
        dict(answers.parts(found)),
        "expected",
        dict(answers.parts(expected)),
        tolerance,
    )


def disagrees(expected, found):
    """Weights alone, and with a tolerance 100 times as wide."""
    wide = tuple(100 * t for t in kernels.TOLERANCE)
    with pytest.raises(answers.Mismatch):
        agree(expected["parameters"], found["parameters"], wide)
    return True


def test_smoke(capsys):
    rows = kernels.main(["--smoke"])
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert printed.count("expect: ") == 1
    names = [row["name"] for row in rows if "median_s" in row]
    assert names[:4] == ["written out", *KINDS]
    assert "compiled" in names or "left out: compiled" in printed
    graphs = {r["name"]: r["graphs"] for r in rows if "graphs" in r}
    # a tensor is compiled for once, a float for some or all of its values
    assert graphs["for-loop, lr a tensor"] == 1
    assert graphs["foreach, lr a tensor"] == 1
    assert 2 <= graphs["for-loop, lr a float"] <= 4
    assert 2 <= graphs["foreach, lr a float"] <= 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 25])
def test_weights_are_those_of_the_formula(kind, steps):
    agree(trained("written out", steps), trained(kind, steps))


def test_wrong_steps_are_caught():
    expected = trained("written out")

    def nothing(optimizer, step):
        pass

    agree(expected, trained_wrongly(nothing))
    wrong = {
        "no decay": trained_wrongly(nothing, {"weight_decay": 0.0}),
        "another beta": trained_wrongly(nothing, {"betas": (0.9, 0.999)}),
    }

    def restart(optimizer, step):
        if step == 5:
            optimizer.state.clear()

    def forget_step(optimizer, step):
        for state in optimizer.state.values():
            state["step"].zero_()  # the bias correction starts again

    def decay_the_gradient(optimizer, step):  # Adam with L2, not AdamW
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
            for p in group["params"]:
                p.grad.add_(p.detach(), alpha=0.1)

    for change in (restart, forget_step, decay_the_gradient):
        wrong[change.__name__] = trained_wrongly(change)
    for name, found in wrong.items():
        assert disagrees(expected, found), name


def test_one_gradient_for_ever_would_hide_a_lost_state():
    """Why ``problem`` returns two: with one, a restart changes nothing."""
    found = []
    for restart in (False, True):
        p = torch.ones(4, requires_grad=True)
        p.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
        optimizer = kernels.adamw([p], "for-loop", **kernels.SETTINGS)
        for i in range(8):
            if restart and i == 4:
                optimizer.state.clear()
            optimizer.step()
        found.append(p)
    agree(*found)


@pytest.mark.parametrize(
    ("shape", "count", "peaks"),
    [((512, 512), 16, (67, 80, 64)), ((1024, 1024), 4, (76, 80, 64))],
)
def test_bytes_at_the_peak_of_a_step(shape, count, peaks):
    rows = kernels.count_rows([shape] * count, CPU, KINDS, smoke=True)
    # besides the tensors: the numbers that some operators wrap
    found = [round(row["peak_bytes"] / MIB, 3) for row in rows]
    assert found == pytest.approx(list(peaks), abs=0.01)


def test_passes_over_memory():
    numbers = 4 * 64 * 64
    rows = kernels.count_rows(
        [(64, 64)] * 4, CPU, ["written out", *KINDS], smoke=True
    )
    for row in rows:
        # step counts are 4 bytes per tensor, read and written
        assert row["step_bytes"] == pytest.approx(
            row["by_hand_bytes"], abs=4 * 4 * 4
        )
    moved = {row["name"]: row["step_bytes"] for row in rows}
    assert round(moved["for-loop"] / numbers) == 80
    assert round(moved["fused"] / numbers) == 28


def test_a_step_is_predicted_from_the_host_and_the_bytes(monkeypatch):
    """Rates are given: 80 and 28 bytes for each of 2 x 1000 numbers."""
    monkeypatch.setattr(kernels, "copy_rate", lambda count, device: 1e6)
    monkeypatch.setattr(kernels, "launch_s", lambda device: 0.5)
    asked = []

    def empty_step(count, device, kind):
        asked.append((count, kind))
        return {"for-loop": 3.0, "foreach": 2.0, "fused": 1.0}[kind]

    monkeypatch.setattr(kernels, "empty_step_s", empty_step)
    rows = kernels.count_rows([(1000,)] * 2, CPU, [*KINDS, "compiled"])
    assert asked == [(2, kind) for kind in KINDS]
    found = [row["predicted_s"] for row in rows]
    assert found == pytest.approx([3.16, 2.16, 1.056, 1.056], rel=1e-3)
    assert [row["host_s"] for row in rows] == [3, 2, 1, 1]


def test_an_empty_step_is_one_of_as_many_tensors():
    asked = []
    real = kernels.stepper

    def stepper(shapes, device, kind):
        asked.append((len(shapes), kernels.count_numbers(shapes), kind))
        return real(shapes, device, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "stepper", stepper)
        assert kernels.empty_step_s(3, CPU, "fused") > 0
    assert asked == [(3, 3, "fused")]


def test_a_missed_prediction_says_what_is_not_in_it():
    count = {"host_s": 1e-3, "bytes_s": 2e-3}
    row = {"name": "compiled", "reading": "less than predicted"}
    row["median_s"] = 6e-3
    said = kernels.explained(row, count, 2)
    assert "expected 1 ms of the host and 2 ms for the bytes" in said
    assert "it takes 6 ms;\nnot in the prediction: 2 powers per tensor" in said
    assert "powers" not in kernels.explained(row | {"name": "fused"}, count, 2)
    assert "powers" not in kernels.explained(row, count, 0)
    row["reading"] = "about as predicted"
    assert kernels.explained(row, count, 2) is None


def test_the_compiled_loop_computes_powers():
    """The reason given is there: two bias corrections for each tensor."""
    utils = pytest.importorskip("torch._inductor.utils")
    shapes = [(64, 64)] * 2
    try:
        with kernels.quiet_compiler():
            _, sources = utils.run_and_get_code(
                kernels.variant, shapes, CPU, "compiled"
            )
    except Exception as error:
        pytest.skip(f"torch.compile fails here: {error}")
    if "std::pow(" not in "".join(sources):
        pytest.skip("this compiler writes them otherwise")
    assert kernels.powers(sources) == 2 * len(shapes)


def test_operators_and_kernels():
    few, many = (
        {
            row["name"]: row
            for row in kernels.count_rows([(8,)] * n, CPU, KINDS, smoke=True)
        }
        for n in (2, 20)
    )
    assert many["for-loop"]["operators"] == 10 * few["for-loop"]["operators"]
    for kind in ("foreach", "fused"):  # however many tensors
        assert many[kind]["operators"] == few[kind]["operators"] < 12
    # inside of foreach's operators a CPU works through them one by one
    assert many["foreach"]["kernels"] == many["for-loop"]["kernels"]
    assert many["fused"]["kernels"] == 1 + 20  # and a step count each


def test_kernels_on_a_gpu_are_told_from_copies_and_ranges():
    gpu = torch.autograd.DeviceType.CUDA
    events = [
        ("multi_tensor_apply_kernel", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
        ("Memcpy HtoD (Pageable -> Device)", False),
        ("Memset (Device)", False),
        ("Optimizer.step#AdamW.step", True),
        ("Optimizer.step#AdamW.step", False),
    ]
    events = [
        types.SimpleNamespace(
            name=name, device_type=gpu, is_user_annotation=annotation
        )
        for name, annotation in events
    ]
    assert kernels.kernels(events) == 2


def test_live_bytes_rise_and_fall():
    with kernels.Live() as live:
        a = torch.zeros(1024)
        b = a.view(32, 32)  # the same storage
        assert live.now == 4096
        c = b + 1
        del a, b
        assert live.now == 4096
        c.add_(1)
        del c
    assert (live.now, live.peak) == (0, 8192)


def test_live_bytes_keep_nothing_alive():
    with kernels.Live():
        tensor = torch.zeros(4)
        storage = weakref.ref(tensor.untyped_storage())
        del tensor
    assert storage() is None


def test_groups_and_settings_reach_the_optimizer():
    """What a trainer needs: groups, settings, one word for the form."""
    matrix = torch.ones(2, 2, requires_grad=True)
    vector = torch.ones(2, requires_grad=True)
    for kind in KINDS:
        groups = [  # anew: the optimizer fills them with its defaults
            {"params": [matrix], "weight_decay": 0.5},
            {"params": [vector], "weight_decay": 0.0},
        ]
        optimizer = kernels.adamw(groups, kind, lr=0.1, betas=(0.9, 0.95))
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]
        for group in optimizer.param_groups:
            assert group["foreach"] == (kind == "foreach")
            assert group["fused"] == (kind == "fused")
            assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.95))
    with pytest.raises(ValueError, match="for-loop, foreach or fused"):
        kernels.adamw(groups, "apex")


def test_gpt2_has_148_tensors():
    from common import gpt

    shapes = kernels.gpt2_shapes(24)
    config = gpt.GPTConfig(12, 2, 24, block_size=96, vocab_size=192)
    with torch.device("meta"):
        model = gpt.GPT(config)
    assert sorted(shapes) == sorted(tuple(p.shape) for p in model.parameters())
    assert len(shapes) == 148


def test_without_a_compiler_the_others_still_run(monkeypatch, capsys):
    def no_compiler(optimizer):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(kernels, "compiled_step", no_compiler)
    args = bench.cli(kernels.__doc__, ["--smoke"])
    kernels.compare_forms(args, "some", SHAPES, ["for-loop", "compiled"])
    printed = capsys.readouterr().out
    assert "left out: compiled" in printed
    assert "No working C++ compiler found" in printed
    assert "and more" not in printed
    assert [r["name"] for r in args.rows if "median_s" in r] == ["for-loop"]


def test_techniques_work_when_pasted(pasted):
    assert kernels.TECHNIQUES == (
        kernels.written_out,
        kernels.adamw,
        kernels.compiled_step,
    )
    expected = trained("written out", 1)
    parameters, gradients = kernels.problem(SHAPES, CPU)
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    settings = kernels.SETTINGS
    kernels.train(
        lambda: pasted(kernels.written_out)(
            parameters,
            *moments,
            1,
            settings["lr"],
            settings["weight_decay"],
            settings["betas"],
            kernels.EPS,
        ),
        parameters,
        gradients,
        1,
    )
    agree(expected, {"parameters": parameters, "state": moments})
    parameters, gradients = kernels.problem(SHAPES, CPU)
    optimizer = pasted(kernels.adamw)(parameters, "fused", **settings)
    kernels.train(optimizer.step, parameters, gradients, 1)
    agree(expected["parameters"], parameters)
    assert callable(pasted(kernels.compiled_step)(optimizer))


@pytest.mark.gpu
def test_on_a_gpu_foreach_launches_less():
    device = torch.device("cuda")
    rows = kernels.count_rows([(64, 64)] * 50, device, KINDS)
    loop, foreach, fused = (row["kernels"] for row in rows)
    assert loop > 5 * foreach > 5 * fused > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpus_allocator_confirms_the_peak(kind):
    device = torch.device("cuda")
    step, parameters, _, gradients = kernels.stepper(
        [(512, 512)] * 16, device, kind
    )
    kernels.train(step, parameters, gradients, 1)
    counted = kernels.transient_bytes(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    assert abs(measured - counted) < MIB / 4


@pytest.mark.gpu
def test_a_gpus_compiled_step_gives_the_same_weights():
    device = torch.device("cuda")
    found = []
    for kind in ("for-loop", "compiled"):
        step, parameters, state, gradients = kernels.stepper(
            SHAPES, device, kind
        )
        kernels.train(step, parameters, gradients)
        found.append({"parameters": parameters, "state": state()})
    agree(*found)
