"""The trainer as a program: kills, resumes and refusals."""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ch10_gpt2 import config as configs
from ch10_gpt2 import metrics, train
from common import bench, gpt, text
from common.bench import Refusal

TINY = [
    *("--preset", "gpt2-tiny", "--T", "16", "--sequences", "4"),
    *("--micro-batch", "2", "--tokens", "once", "--optimizer", "fused"),
]


@pytest.fixture(autouse=True)
def no_peaks(monkeypatch):
    """Do not measure this machine for a training of a second."""
    monkeypatch.setattr(train, "peak_flops", lambda run: (None, ""))


def program(*argv, wait=True, **how):
    command = [sys.executable, "-m", "ch10_gpt2.train", *argv]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    process = subprocess.Popen(command, text=True, **how)
    if wait:
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err
    return process


def refused(argv, capsys):
    """Run in this process; return the sentence that it ends with."""
    with pytest.raises(SystemExit) as end:
        bench.run(lambda: train.main(argv))
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


def read(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "loss" in row]


def test_a_killed_training_goes_on_bitwise(tmp_path):
    """SIGKILL between checkpoints; every number is as if it never was."""
    same = [*TINY, "--steps", "12", "--dropout", "0.1"]
    whole = train.main([*same, "--out", str(tmp_path / "whole")])
    argv = [*same, "--out", str(tmp_path / "cut"), "--save-every", "3"]
    process = program(*argv, wait=False, stdout=subprocess.DEVNULL)
    path = tmp_path / "cut" / "metrics.jsonl"
    stop = time.monotonic() + 100
    while not path.exists() or path.read_text().count("\n") < 5:
        assert process.poll() is None and time.monotonic() < stop
        time.sleep(0.005)
    process.kill()
    process.communicate()
    done = len(read(tmp_path / "cut"))
    assert 5 <= done < 12, "the kill came too late to prove anything"
    with open(path, "a") as file:
        file.write('{"update": 6, "lo')  # a line that a kill cut
    rows = train.main([*argv, "--resume"])
    assert 0 < len(rows) < 12
    right = [row["loss"] for row in whole][-len(rows) :]
    assert [row["loss"] for row in rows] == right
    cut = [(r["update"], r["loss"], r["grad_norm"]) for r in read(path.parent)]
    right = read(tmp_path / "whole")
    assert cut == [(r["update"], r["loss"], r["grad_norm"]) for r in right]


def test_writes_metrics_curves_and_checkpoint(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    rows = train.main(
        [*TINY, "--steps", "3", "--out", str(out), "--evaluate-every", "2"]
    )
    assert [r["update"] for r in rows] == [1, 2, 3]
    assert rows[-1]["loss"] < rows[0]["loss"] + 1
    names = {p.name for p in out.iterdir()}
    assert names == {"checkpoint.pt", "metrics.jsonl", "tensorboard"}
    lines = (out / "metrics.jsonl").read_text().splitlines()
    held = [json.loads(x) for x in lines if "held_out" in x]
    assert len(held) == 1 and 5 < held[0]["held_out"] < 15
    said = capsys.readouterr().out
    assert "tokens/s" in said and "MFU n/a" in said and "held out" in said


def test_works_without_bar_and_curves(tmp_path, monkeypatch, capsys):
    for name in ("tqdm", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    train.main([*TINY, "--steps", "2", "--out", str(tmp_path)])
    assert "pip install tensorboard" in capsys.readouterr().out
    assert len(read(tmp_path)) == 2


def test_shows_a_bar_on_a_terminal(monkeypatch, capsys):
    run = train.start(configs.parse("", [*TINY, "--steps", "2"]))
    bar = pytest.importorskip("tqdm")
    shown = bar.tqdm(total=2, file=sys.stderr)
    monkeypatch.setattr(bar, "tqdm", lambda **how: shown)
    train.train(run)
    train.finish(run)
    assert shown.n == 2
    assert "update 1:" not in capsys.readouterr().out


def test_metrics_are_json_even_where_a_norm_is_infinite(tmp_path):
    run = train.start(configs.parse("", TINY))
    run.config = replace(run.config, out=str(tmp_path))
    kept = metrics.Metrics(run)
    kept.keep({"position": 1, "grad_norm": float("inf")})
    kept.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"position": 1, "grad_norm": None}


def test_an_infinite_loss_ends_the_training(monkeypatch):
    monkeypatch.setattr(
        train, "accumulate", lambda run, b: torch.tensor(float("nan"))
    )
    run = train.start(configs.parse("", TINY))
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(Refusal, match="loss is nan at update 1.*--lr"):
        train.train(run)


def test_the_program_refuses_in_one_sentence():
    """Really start it: exit code 2, one line, no traceback."""
    code, out, err = program("--preset", "gpt3")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "gpt3" in err and "gpt2-medium" in err


def test_the_program_trains_a_file_by_itself(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("".join(text.corpus())[:40_000])
    env = os.environ | {"BENCH_SMOKE": "1"}
    code, out, err = program("--data", str(path), env=env, cwd=tmp_path)
    assert code == 0, err
    assert "update 3" in out and "nan" not in out
    assert [p.name for p in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--attention", "flash"], "flash.*known: plain, fused"),
        (["--sequences", "5"], "--sequences 5 is no multiple"),
        (["--micro-batch", "8"], "no multiple of --micro-batch 8"),
        (["--micro-batch", "0"], "--micro-batch 0: give 1 to"),
        (["--steps", "0"], "--steps 0: give 1 to"),
        (["--threads", "-1"], "--threads -1: give 1 to 1024"),
        (["--threads", "1025"], "--threads 1025: give 1 to 1024"),
        (["--workers", "-1"], "--workers -1: give 0 to"),
        (["--seed", "-1"], "--seed -1: give 0 to 4294967295"),
        (["--seed", "4294967296"], "--seed 4294967296: give 0"),
        (["--lr", "nan"], "--lr nan: give 0 to 1000"),
        (["--lr", "inf"], "--lr inf: give 0 to 1000"),
        (["--min-lr", "nan"], "--min-lr nan: give 0 to --lr"),
        (["--min-lr", "-1"], "--min-lr -1.0: give 0 to --lr"),
        (["--min-lr", "0.1"], "--min-lr 0.1: .* which is 0.0006"),
        (["--weight-decay", "-1"], "--weight-decay -1.0: give 0"),
        (["--weight-decay", "nan"], "--weight-decay nan: give 0"),
        (["--weight-decay", "inf"], "--weight-decay inf: give 0"),
        (["--weight-decay", "2000"], "more than a whole weight"),
        (["--clip", "nan"], "--clip nan: give 0 or more"),
        (["--dropout", "nan"], "--dropout nan"),
        (["--T", "65"], "--T 65.*1 to 64"),
        (["--T", "-1"], "--T -1"),
        (["--dropout", "1"], "--dropout 1"),
        (["--device", "gpu"], "--device gpu"),
        (["--parallel", "ddp"], "needs ranks: torchrun"),
        (["--resume"], "--out FOLDER"),
        (["--save-every", "2"], "--out FOLDER"),
        (["--data", "no/such.txt"], "no/such.txt does not exist"),
        (["--vocab-size", "65"], "--vocab-size 50257"),
        (["--sequences", "99998"], "windows of 16 tokens"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refuses(argv, words, capsys):
    import re

    assert re.search(words, refused([*TINY, *argv], capsys))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_refuses_a_gpu_that_is_not_there(capsys):
    assert "--device cuda" in refused([*TINY, "--device", "cuda"], capsys)


def test_refuses_more_ranks_than_it_was_told_of():
    config = configs.parse("", TINY)
    with pytest.raises(Refusal, match="add --parallel ddp"):
        configs.check(config, 2)


def test_refuses_data_that_is_damaged_or_of_another_kind(tmp_path, capsys):
    whole = text.tokenize("embedded", tmp_path / "whole.tokens", 5000)
    short = tmp_path / "short.tokens"
    short.write_bytes(whole.read_bytes()[:-100])
    other = tmp_path / "picture.png"
    other.write_bytes(b"\x89PNG")
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"text": "whole"}\n{"text": "cu')
    for path, words in (
        (short, "cut short"),
        (other, "kind that is not read"),
        (cut, "not JSON"),
    ):
        sentence = refused([*TINY, "--data", str(path)], capsys)
        assert path.name in sentence and words in sentence
    train.main([*TINY, "--data", str(whole), "--steps", "1"])


def test_refuses_a_checkpoint_that_does_not_fit(tmp_path, capsys):
    argv = [*TINY, "--steps", "1", "--out", str(tmp_path)]
    sentence = refused([*argv, "--resume"], capsys)
    assert "there is no" in sentence and "checkpoint.pt" in sentence
    train.main(argv)
    kept = read(tmp_path)
    assert "holds a training: add --resume" in refused(argv, capsys)
    sentence = refused([*argv, "--resume", "--lr", "1"], capsys)
    assert "another training: lr 0.0006 (now 1.0)" in sentence
    sentence = refused([*argv, "--resume", "--T", "8"], capsys)
    assert "T 16 (now 8)" in sentence
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refused([*argv, "--resume"], capsys)
    assert read(tmp_path) == kept


def test_refuses_a_folder_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("not a folder")
    for out in (file, file / "below"):
        sentence = refused([*TINY, "--out", str(out)], capsys)
        assert f"--out {out}: cannot write there" in sentence


@pytest.mark.root
def test_a_full_disk_ends_in_a_sentence(tmp_path, capsys):
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path],
        check=True,
    )
    try:
        argv = [*TINY, "--steps", "2", "--out", str(tmp_path)]
        sentence = refused(argv, capsys)
        assert "cannot write" in sentence and "checkpoint.pt" in sentence
        assert len(read(tmp_path)) == 2  # what was measured is kept
        assert not list(tmp_path.glob("checkpoint*"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_without_a_compiler_compile_is_refused(monkeypatch, capsys):
    from torch._inductor import cpp_builder

    def none():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    sentence = refused([*TINY, "--compile"], capsys)
    assert "--compile" in sentence and "C++ compiler" in sentence


def test_without_the_operator_its_loss_is_refused(monkeypatch, capsys):
    from ch09_advanced import custom_op

    monkeypatch.setattr(custom_op, "available", lambda device: "no compiler")
    sentence = refused([*TINY, "--loss", "in-place"], capsys)
    assert "--loss in-place: no compiler" in sentence


def test_every_field_is_a_flag_and_comes_back():
    config = train.Config(
        **{"preset": "gpt2", "T": 64, "compile": True, "tied": False},
        **{"parallel": "ddp", "out": "a folder", "lr": 1e-4, "threads": 3},
    )
    command = train.command_line(config, 2)
    assert command.startswith("torchrun --standalone --nproc-per-node=2 -m")
    argv = shlex.split(command)
    back = configs.parse("", argv[argv.index("ch10_gpt2.train") + 1 :])
    assert back == config
    assert train.command_line(train.as_dict(train.Config())) == (
        "python -m ch10_gpt2.train"
    )


def test_a_smoke_run_changes_only_what_was_not_given(capsys):
    config = configs.parse("", ["--smoke"])
    assert config == train.Config(preset="gpt2-tiny", steps=3, sequences=2)
    config = configs.parse("", ["--smoke", "--preset", "gpt2-xl"])
    assert (config.preset, config.steps) == ("gpt2-xl", 3)
    said = capsys.readouterr().out.splitlines()
    begin = "smoke run as if with "
    assert said[0].startswith(f"{begin}--preset gpt2-tiny --steps 3 --seq")
    assert said[1].startswith(f"{begin}--steps 3 --sequences 2:")
    given = [*TINY, "--steps", "5"]
    assert configs.parse("", [*given, "--smoke"]) == configs.parse("", given)
    assert "of the sizes that were given" in capsys.readouterr().out


def test_a_smoke_run_of_the_logs_last_command_trains(capsys):
    """Written for a larger model, whose context the tiny one lacks."""
    last = train.Config(T=96, sequences=4, micro_batch=4, steps=2, warmup=2)
    argv = shlex.split(train.command_line(last))[3:]
    assert len(train.main([*argv, "--smoke"])) == 2
    said = capsys.readouterr().out
    assert "as if with --preset gpt2-tiny --T 64:" in said
    longer = ["--preset", "gpt2-tiny", "--T", "96", "--smoke"]
    assert "--T 96" in refused(longer, capsys)


@pytest.mark.parametrize("world", ["1", "2", "4"])
def test_a_smoke_runs_update_is_a_multiple_of_what_was_given(
    world, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", world)
    for micro_batch in (1, 3, 8):
        config = configs.parse("", ["--smoke", f"--micro-batch={micro_batch}"])
        assert config.sequences % (micro_batch * int(world)) == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fitting_to_ranks_keeps_the_update(world):
    for micro_batch in (1, 2, 4, 8):
        config = train.Config(sequences=8, micro_batch=micro_batch)
        fitted = train.fit_to_ranks(config, world, 1)
        assert fitted.sequences == 8 and fitted.threads == 1
        assert 8 % (fitted.micro_batch * world) == 0
        assert fitted.micro_batch == min(micro_batch, 8 // world)


@pytest.mark.skipif(os.name == "nt", reason="Triton brings its compiler")
def test_what_compiling_for_a_gpu_lacks_is_named(tmp_path, monkeypatch):
    here = {"Triton": True, "gcc": True, "Python.h": True}
    monkeypatch.setattr(
        "torch.utils._triton.has_triton", lambda: here["Triton"]
    )
    monkeypatch.setattr(
        configs.shutil, "which", lambda name: here.get(name) and f"/{name}"
    )
    monkeypatch.setattr(
        configs.sysconfig, "get_path", lambda *_: str(tmp_path)
    )
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").write_text("")
    cuda = torch.device("cuda")
    assert configs.cannot_compile(cuda) is None
    monkeypatch.setenv("CC", "mine")
    assert "a C compiler (mine; see CC)" in configs.cannot_compile(cuda)
    monkeypatch.delenv("CC")
    here["gcc"] = False
    assert configs.cannot_compile(cuda) == (
        "torch.compile needs a C compiler (gcc, clang; see CC); not found"
    )
    here["clang"] = True
    assert configs.cannot_compile(cuda) is None
    (tmp_path / "Python.h").unlink()
    here["Triton"] = False
    reason = configs.cannot_compile(cuda)
    assert "needs Triton and Python's headers" in reason


def test_largest_micro_batch_divides_the_update(monkeypatch):
    config = train.Config(preset="gpt2", sequences=12)
    monkeypatch.setattr(configs.machine, "memory_bytes", lambda: 1 << 42)
    assert config.largest_micro_batch() == 12
    monkeypatch.setattr(configs.machine, "memory_bytes", lambda: 32 << 30)
    assert config.largest_micro_batch() in (2, 3, 4)
    monkeypatch.setattr(configs.machine, "memory_bytes", lambda: 1 << 30)
    assert config.largest_micro_batch() == 1


def test_the_largest_micro_batch_leaves_room_for_another_process(monkeypatch):
    """The ladder's own may hold the same configuration at the same time."""
    config = train.Config(preset="gpt2", sequences=12)
    shape, T = config.model(), config.context()
    kept = 12 * (32 * 768 + 4 * 12 * T) + 4 * shape.vocab_size
    sequence = 4 * T * kept
    fixed = 16 * gpt.parameter_counts(shape)["total"]
    for fit, most in ((2.5, 2), (3.5, 3), (4.5, 4)):
        memory = int((fit * sequence + fixed) / 0.4)
        monkeypatch.setattr(
            configs.machine, "memory_bytes", lambda m=memory: m
        )
        assert config.largest_micro_batch() == most
        assert 2 * (most * sequence + fixed) < 0.8 * memory


@pytest.mark.ranks
def test_runs_under_torchrun(tmp_path):
    """The command of the docstring, on two ranks of this machine."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=2", "-m", "ch10_gpt2.train", *TINY),
        *("--parallel", "ddp", "--steps", "2", "--out", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update 2:") == 1  # rank 0 speaks alone
    alone = train.main([*TINY, "--steps", "2"])
    found = [row["loss"] for row in read(tmp_path)]
    assert found == pytest.approx([r["loss"] for r in alone], rel=1e-6)
