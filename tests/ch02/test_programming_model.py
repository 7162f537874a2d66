"""2.3.3: each element belongs to one program, and waves are counted."""

import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch

from ch02_hardware import gpu_structure, programming_model
from ch02_hardware.programming_model import (
    by_kernel,
    check,
    grid_model,
    grid_rows,
    waves,
)
from common import bench

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton"
)
SHAPES = [(6, 9), (8, 8), (1, 1), (5, 17), (16, 3)]


def numbers(rows, columns):
    x = torch.arange(rows * columns, dtype=torch.float32)
    return x.view(rows, columns) + 1


# --- the model ---------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_covers_each_element_once(shape):
    x = numbers(*shape)
    found = grid_model(x, 4)
    check(x, found)
    i, j = torch.meshgrid(
        *(torch.arange(n) // 4 for n in shape), indexing="ij"
    )
    across = -(-shape[1] // 4)
    assert torch.equal(found[1], (i * across + j).to(torch.int32))


def broken(name, x):
    """Return what programs with a known mistake would write."""
    y, owner, times = grid_model(x, 4)
    if name == "no program for the last blocks":  # floor instead of ceil
        y[-1], times[-1] = float("nan"), 0
    elif name == "blocks overlap":  # a stride of half a block
        times[:, 2] = 2
    elif name == "wrong place":
        y = y.roll(1, 0)
    return y, owner, times


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no program for the last blocks", "0 elements .* 9 never"),
        ("blocks overlap", "6 elements .* 0 never"),
        ("wrong place", "not torch's"),
    ],
)
def test_the_check_sees_wrong_grids(name, message):
    x = numbers(6, 9)
    with pytest.raises(bench.Mismatch, match=message):
        check(x, broken(name, x))


def test_rows_count_masked_lanes():
    rows = grid_rows(grid_model(numbers(6, 9), 4)[1], 4)
    assert [row["place"] for row in rows][:4] == [
        "(0, 0)",
        "(0, 1)",
        "(0, 2)",
        "(1, 0)",
    ]
    assert [row["elements"] for row in rows] == [16, 16, 4, 8, 8, 2]
    assert sum(row["masked"] for row in rows) == 6 * 16 - 54


# --- the kernel --------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_does_what_torch_and_the_model_do(shape):
    x = numbers(*shape)
    found = by_kernel(x, 4)
    check(x, found)
    for mine, model in zip(found, grid_model(x, 4), strict=True):
        assert torch.equal(mine, model)


@needs_triton
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # floor instead of ceil, in effect: nobody handles the last row
        ("(row < rows)", "(row < rows - 1)", "never"),
        ("row = i * BLOCK", "row = i * BLOCK // 2", "written more than once"),
        # without a mask a block runs into the next row, and out at the end
        (
            "(column < columns)",
            "(column < BLOCK * 4)",
            "beyond|more than once",
        ),
        ("2 * value", "3 * value", "not torch's"),
    ],
)
def test_kernels_with_known_mistakes_are_caught(tmp_path, old, new, message):
    import inspect

    source = inspect.getsource(programming_model.doubled)
    assert source.count(old) == 1
    file = tmp_path / "wrong.py"  # Triton reads a kernel's file
    head = "from __future__ import annotations\nimport triton.language as tl\n"
    file.write_text(head + source.replace(old, new))
    spec = importlib.util.spec_from_file_location("wrong", file)
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    x = numbers(6, 9)
    with pytest.raises(bench.Mismatch, match=message):
        check(x, by_kernel(x, 4, wrong.doubled))


@needs_triton
def test_interpreting_leaves_the_environment_as_it_was(monkeypatch):
    for before in (None, "0", "1"):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_INTERPRET", before)
        with programming_model.interpreting(True):
            assert os.environ["TRITON_INTERPRET"] == "1"
        assert os.environ.get("TRITON_INTERPRET") == before
        with programming_model.interpreting(False):
            assert os.environ.get("TRITON_INTERPRET") == before


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability):
    """No GPU is needed for that; in a process of its own, as a GPU would."""
    program = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ch02_hardware import programming_model as p

target = GPUTarget("cuda", {capability}, 32)
kinds = dict(x="*fp32", y="*fp32", owner="*i32", times="*i32")
kinds |= dict(rows="i32", columns="i32", BLOCK="constexpr")
source = ASTSource(triton.jit(p.doubled), kinds, {{"BLOCK": 4}})
assert "atom" in triton.compile(source, target=target).asm["ptx"]
kinds = dict(chain="*i32", ends="*i32", steps="i32", BLOCK="constexpr")
source = ASTSource(triton.jit(p.walked), kinds, {{"BLOCK": p.THREADS}})
warps = {{"num_warps": p.THREADS // 32}}
built = triton.compile(source, target=target, options=warps)
assert "ld.global" in built.asm["ptx"] and built.metadata.shared == 0
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


# --- waves -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "sms", "held", "expected"),
    [
        (1, 132, 4, 1),
        (528, 132, 4, 1),
        (529, 132, 4, 2),
        (1056, 132, 4, 2),
        (1057, 132, 4, 3),
        (7, 2, 1, 4),
    ],
)
def test_waves_are_rounded_up(programs, sms, held, expected):
    assert waves(programs, sms, held) == expected


A100 = gpu_structure.multiprocessor("8.0")


def test_the_formula_in_rows():
    rows = programming_model.by_formula(132, 4)
    full = [row for row in rows if row["busy_percent"] == 100]
    assert [row["programs"] for row in full] == [528, 1056]
    assert rows[3]["waves"] == 2 and 50 < rows[3]["busy_percent"] < 51


def test_the_staircase_on_a_gpu_that_keeps_to_the_formula(monkeypatch):
    """Its code, with a device whose waves take a second each."""
    launched = []
    built = types.SimpleNamespace(
        n_regs=16, metadata=types.SimpleNamespace(shared=0)
    )

    class Kernel:
        def __getitem__(self, grid):
            def launch(chain, ends, steps, BLOCK, num_warps):
                assert ends.numel() >= grid[0] * BLOCK
                assert int(chain.max()) < chain.numel()
                launched.append(grid[0])
                return built

            return launch

    def events(call, calls, device):
        call()
        return float(waves(launched[-1], 3, 4))

    fake = types.SimpleNamespace(jit=lambda function: Kernel())
    monkeypatch.setattr(programming_model, "triton", fake)
    monkeypatch.setattr(programming_model.timers, "events", events)
    args = types.SimpleNamespace(device=torch.device("cpu"), smoke=True)
    rows, held = programming_model.staircase(args, A100 | {"sms": 3})
    assert held == 4
    assert all(row["took_s"] == row["predicted_s"] for row in rows)
    assert {12, 13, 48, 49} <= {row["programs"] for row in rows}
    assert programming_model.stairs(rows).axes


# --- the script --------------------------------------------------------------


def smoke(capsys):
    rows = programming_model.main(["--smoke", "--device", "cpu"])
    grid = [row for row in rows if "elements" in row]
    assert sum(row["elements"] for row in grid) == 54
    shown = capsys.readouterr().out
    assert "each element was written exactly once" in shown
    assert "left out: the staircase" in shown
    return shown


def test_smoke_without_triton(capsys, monkeypatch):
    monkeypatch.setattr(programming_model, "triton", None)
    shown = smoke(capsys)
    assert "Triton is not installed" in shown
    assert "modelled in torch" in shown
    assert "no kernel ran" in shown and "kernel's answer" not in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


@needs_triton
def test_smoke_in_the_interpreter(capsys):
    shown = smoke(capsys)
    assert "in Triton's interpreter" in shown
    assert "the kernel's answer is torch's" in shown


def test_import_does_not_ask_for_the_interpreter():
    """Else a GPU's kernels would be interpreted for the whole process."""
    program = "import os\nimport ch02_hardware.programming_model\n"
    program += "assert 'TRITON_INTERPRET' not in os.environ"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


def test_the_picture():
    drawn = programming_model.figure(grid_model(numbers(6, 9), 4)[1], 4)
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts[-1] == "5\n(1, 2)" and len(texts) == 6


def test_techniques_work_when_pasted(pasted):
    x = numbers(6, 9)
    check(x, pasted(grid_model)(x, 4))
    assert pasted(waves)(529, 132, 4) == 2


@pytest.mark.gpu
@needs_triton
def test_the_kernel_on_a_gpu():
    x = numbers(10, 14).cuda()
    found = by_kernel(x, 4)
    check(x, found)
    assert torch.equal(found[1].cpu(), grid_model(x.cpu(), 4)[1])


@pytest.mark.gpu
@needs_triton
def test_one_program_more_than_a_wave_takes_twice_as_long():
    device = torch.device("cuda")
    args = types.SimpleNamespace(device=device, smoke=False)
    rows, held = programming_model.staircase(
        args, programming_model.chip_of(device)
    )
    took = {row["programs"]: row["took_s"] for row in rows}
    places = programming_model.chip_of(device)["sms"] * held
    assert took[places + 1] > 1.5 * took[places]
    assert took[places // 4] > 0.5 * took[places]
