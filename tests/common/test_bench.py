"""The comparer on synthetic samples, its answers check, records, tables."""

import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils import benchmark

from common import answers, bench, judging, machine, tables, timers

ROUNDS = bench.ROUNDS
DOC = """9.9.9  A title · 標題

Question  Which?
Expect    the second
          one
Run       python -m nothing
"""


# ---- judging ---------------------------------------------------------------


def white(draw, rounds):
    return draw.lognormal(0, 0.05, (rounds, 2))


def heavy_tails(draw, rounds):
    return 1 + 0.02 * np.abs(draw.standard_t(2, (rounds, 2)))


def drift(draw, rounds):
    ramp = np.linspace(1, 1.5, rounds)[:, None]
    return ramp * draw.lognormal(0, 0.03, (rounds, 2))


def bursts(draw, rounds):
    """A neighbour that comes and goes and stays for some samples."""
    busy = np.cumsum(draw.random(2 * rounds) < 0.1) % 2
    noise = 0.03 * draw.random(2 * rounds)
    return (1 + noise + busy * draw.uniform(0.3, 1, 2 * rounds)).reshape(-1, 2)


def coarse_clock(draw, rounds):
    return np.round(white(draw, rounds), 2)


NOISE = [white, heavy_tails, drift, bursts, coarse_clock]


def claims(noise, count, slower=1.0, rounds=ROUNDS, in_turn=True):
    """Count the comparisons that claim a difference."""
    found = 0
    for seed in range(count):
        draw = np.random.default_rng(seed)
        samples = noise(draw, rounds)
        if not in_turn:  # all of the first, then all of the second
            samples = samples.T.reshape(-1, 2)
            samples = np.sort(samples, axis=0) if noise is drift else samples
            samples = samples.flatten().reshape(2, rounds).T
        row = judging.judge("ab", samples * [1.0, slower])[1]
        found += row["differs"] and (slower == 1.0 or row["ratio"] < 1)
    return found


@pytest.mark.parametrize("noise", NOISE)
def test_a_a_claims_at_most_5_percent(noise):
    assert claims(noise, 200) <= 10


@pytest.mark.parametrize("noise", [white, heavy_tails, drift, coarse_clock])
def test_planted_10_percent_is_found(noise):
    assert claims(noise, 100, slower=1.1) >= 90


def test_planted_10_percent_is_found_beside_a_neighbour():
    assert claims(bursts, 100, slower=1.1, rounds=100) >= 90


def test_one_after_the_other_would_claim_the_drift():
    assert claims(drift, 50, in_turn=False) > 45


def test_95_percent_interval_claims_too_often():
    def share(level):
        wrong = 0
        for seed in range(400):
            a, b = white(np.random.default_rng(seed), 10).T
            _, low, high = judging.bootstrap_ratio(a, b, level)
            wrong += not low <= 1 <= high
        return wrong / 400

    assert share(0.99) < 0.045 < 0.055 < share(0.95)


def test_ratio_says_how_many_times_faster():
    a = np.full(20, 3.0)
    ratio, low, high = bench.bootstrap_ratio(a, a / 2)
    assert ratio == low == high == 2.0
    rows = judging.judge("ab", np.stack([a, a / 2], axis=1))
    assert rows[1]["verdict"] == "2.00× [2.00, 2.00]"
    assert rows[0]["verdict"] == "baseline"


def test_verdict_of_no_difference_and_of_a_smoke_run():
    samples = white(np.random.default_rng(0), 20)
    row = judging.judge("ab", samples)[1]
    assert row["verdict"] == "no difference measured here"
    row = judging.judge("ab", samples[:3] * [1, 2], smoke=True)[1]
    assert row["differs"] is None and "smoke" in row["verdict"]


def test_half_a_percent_is_not_claimed_however_sure():
    """Fresh copies of one function differ by that: memory placement."""
    a = white(np.random.default_rng(0), 200)[:, 0]
    row = judging.judge("ab", np.stack([a, 1.005 * a], axis=1))[1]
    assert row["ratio_interval"][1] < 1 and row["differs"] is False


def test_noisy_rows_are_marked():
    draw = np.random.default_rng(0)
    samples = np.stack(
        [draw.lognormal(0, 0.01, 50), draw.lognormal(0, 0.2, 50)], axis=1
    )
    assert [row["noisy"] for row in judging.judge("ab", samples)] == [0, 1]


def test_same_seed_same_interval():
    a, b = white(np.random.default_rng(0), 20).T
    once = bench.bootstrap_ratio(a, b)
    assert once == bench.bootstrap_ratio(a, b)
    assert once != bench.bootstrap_ratio(a, b, seed=1)


def test_median_and_iqr_are_those_of_torch_utils_benchmark():
    times = heavy_tails(np.random.default_rng(0), 51)[:, 0]
    task = benchmark.utils.common.TaskSpec("f()", "")
    peer = benchmark.Measurement(1, times.tolist(), task)
    (row,) = judging.judge(["f"], times[:, None])
    assert row["median_s"] == pytest.approx(peer.median, rel=1e-6)
    assert row["iqr_s"] == pytest.approx(peer.iqr, rel=1e-6)


# ---- answers ---------------------------------------------------------------


def check(expected, found, **limits):
    return answers.agree(
        "other",
        dict(answers.parts(found)),
        "first",
        dict(answers.parts(expected)),
        **limits,
    )


def test_equal_answers_of_any_shape_pass():
    x = torch.randn(3, 4)
    tree = {"loss": 1.5, "parts": [x, (x.bool(), None)], "name": "a"}
    assert check(tree, {**tree}) == 0
    assert check(x, x.bfloat16(), tolerance=(1e-2, 1e-2)) > 0
    assert check(x, x.numpy()) == 0
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    assert check(nan, nan.clone()) == 0
    assert check(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize(
    "found",
    [
        torch.tensor([1.0, 2.1]),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, float("inf")]),
        torch.tensor([[1.0, 2.0]]),
        {"result": torch.tensor([1.0, 2.0])},
        None,
        "1, 2",
    ],
)
def test_wrong_answers_are_caught(found):
    with pytest.raises(bench.Mismatch, match="'other'"):
        check(torch.tensor([1.0, 2.0]), found)


def test_integers_are_compared_exactly():
    with pytest.raises(bench.Mismatch):
        check(torch.tensor([10**6]), torch.tensor([10**6 + 1]))


def test_exact_means_the_same_bits_and_type():
    x = torch.tensor([1.0])
    with pytest.raises(bench.Mismatch):
        check(x, x + 1e-7, tolerance=None)
    with pytest.raises(bench.Mismatch):
        check(x, x.double(), tolerance=None)


def test_complex_parts():
    x = torch.tensor([1 + 1j])
    check(x, x.clone())
    with pytest.raises(bench.Mismatch):
        check(x, x.conj().resolve_conj())


def test_right_loss_with_wrong_gradient_is_caught():
    """As recomputation does that loses the dropout's random state."""
    loss, gradient = torch.tensor(2.0), torch.ones(4)
    right = {"loss": loss, "gradients": {"weight": gradient}}
    wrong = {"loss": loss, "gradients": {"weight": 1.846 * gradient}}
    with pytest.raises(bench.Mismatch, match="weight"):
        check(right, wrong)
    check(right, wrong, gradients=(1.0, 0.0))


# ---- comparing -------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Flags as a script in a chapter folder of its own gets them."""
    monkeypatch.delenv("BENCH_SMOKE", raising=False)
    monkeypatch.delenv("BENCH_RESULTS", raising=False)
    script = tmp_path / "ch99_demo" / "demo.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")

    def parse(*argv):
        args = bench.cli(DOC, ["--device", "cpu", *argv])
        args.file, args.script = script, "ch99_demo.demo"
        return args

    return parse


def test_a_ratio_far_from_the_medians_quotient_is_explained(arguments, capsys):
    """Rounds get slower, b's the other way round: 1.63 above 1.92."""
    a = np.array([1.0, 1.0, 1.0, 4.0, 4.0] * 4)
    b = np.array([0.5, 2.0, 0.5, 2.0, 2.0] * 4)
    samples = np.stack([a, b, a], axis=1)
    rows = judging.judge(["a", "b", "c"], samples)
    assert rows[1]["median_s"] == 2 and rows[1]["ratio"] == 2
    bench.report(arguments("--device", "cpu"), rows, ["name", "ratio"])
    out = capsys.readouterr().out
    assert "b: the ratio is the median of the rounds' ratios" in out
    assert max(map(len, out.splitlines())) <= 100
    rows = judging.judge(["a", "c"], samples[:, [0, 2]])
    bench.report(arguments("--device", "cpu"), rows, ["name", "ratio"])
    assert "the ratio is" not in capsys.readouterr().out


def test_compare_prints_a_judged_table(arguments, capsys, monkeypatch):
    ticks = itertools.count()  # each sample takes 2 ms
    monkeypatch.setattr(
        timers.wall,
        "__kwdefaults__",
        {
            "clock": lambda: 2e-3 * next(ticks),
            "sync": timers.synchronize,
        },
    )
    monkeypatch.setattr(
        machine, "peaks", lambda *_: {"gemm_flops": {"float32": 1e9}}
    )
    made = []
    x = torch.ones(4)

    def factory(name):
        def build():
            made.append(name)
            return lambda: x + 1

        return build

    rows = bench.compare(
        arguments(),
        {"one": factory("one"), "二": factory("二")},
        per_call=2,
        unit="row",
        flops={"one": 1e6},
        budget_s=0.0,
    )
    assert made == ["one", "二"]
    assert [row["rounds"] for row in rows] == [ROUNDS] * 2
    assert rows[0]["median_s"] == pytest.approx(1e-3)
    assert rows[0]["ceiling"] == pytest.approx(0.5)
    assert rows[1]["ceiling"] is None
    assert rows[1]["differs"] is False
    text = capsys.readouterr().out
    for words in (
        "9.9.9  A title · 標題",
        "expect: the second one",
        "no difference measured here",
        "s per row",
        "% of ceiling",
        machine.line(machine.card()),
    ):
        assert words in text
    assert max(map(tables.width, text.splitlines())) <= 100


def test_memory_is_no_ceiling_for_what_a_cache_holds(monkeypatch):
    known = {"gemm_flops": {"float32": 1e9}, "copy_bytes_per_s": 1e9}
    known |= {"cache_bytes": 1000}
    monkeypatch.setattr(machine, "peaks", lambda *_: known)
    cpu = torch.device("cpu")
    assert bench._bound_s(None, 1000, "float32", cpu) is None
    assert bench._bound_s(None, 2000, "float32", cpu) == 2000 / 1e9
    assert bench._bound_s(10, 1000, "float32", cpu) == 10 / 1e9


def test_wrong_variant_is_never_timed(arguments, monkeypatch):
    monkeypatch.setattr(timers, "take_turns", pytest.fail)
    x = torch.ones(4)
    variants = {"right": lambda: lambda: x, "wrong": lambda: lambda: x * 2}
    with pytest.raises(bench.Mismatch, match=r"'wrong'.*result.*worst"):
        bench.compare(arguments("--smoke"), variants)
    with pytest.raises(bench.Mismatch):
        limits = {"right": (9.0, 9.0)}  # of another row
        bench.compare(arguments("--smoke"), variants, tolerance=limits)


def test_tolerance_per_row(arguments):
    x = torch.rand(64)
    rows = bench.compare(
        arguments("--smoke"),
        {"float32": lambda: lambda: x, "half": lambda: lambda: x.half()},
        tolerance={"half": (1e-3, 1e-3)},
    )
    assert 0 < rows[1]["worst_error"] < 1e-3


def test_in_place_variants_are_compared_by_their_first_answers(arguments):
    def counter():
        x = torch.zeros(3)
        return lambda: x.add_(1)

    rows = bench.compare(arguments("--smoke"), {"a": counter, "b": counter})
    assert [row["rounds"] for row in rows] == [bench.SMOKE_ROUNDS] * 2
    assert rows[1]["verdict"].startswith("smoke")


def test_variants_without_answers_are_said_to_be_unchecked(arguments, capsys):
    bench.compare(arguments("--smoke"), {"a": lambda: lambda: None})
    assert "none compared" in capsys.readouterr().out


# ---- command lines ---------------------------------------------------------


def test_flags(arguments, monkeypatch):
    args = arguments()
    assert (args.smoke, args.save, args.device.type) == (False, False, "cpu")
    assert args.sections == ["9.9.9  A title · 標題"]
    monkeypatch.setenv("BENCH_SMOKE", "1")
    assert arguments().smoke
    monkeypatch.setenv("BENCH_SMOKE", "0")
    assert not arguments().smoke
    args = bench.cli(
        DOC, ["--depth", "3"], lambda p: p.add_argument("--depth", type=int)
    )
    assert args.depth == 3
    assert args.script == __name__
    assert args.file.samefile(__file__)


def test_help_shows_the_question(capsys):
    with pytest.raises(SystemExit):
        bench.cli(DOC, ["--help"])
    assert "Question  Which?" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cuda:99", "warp", "xpu:7"])
def test_absent_devices_are_refused(name):
    with pytest.raises(bench.Refusal, match=name):
        bench.cli(DOC, ["--device", name])


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(bench.Refusal, match="--device cpu"):
        bench.device_of("cuda")


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, code, words",
    [
        (bench.Refusal("no such file: x.txt"), 2, "no such file: x.txt"),
        (bench.Mismatch("row 'b' disagrees"), 1, "row 'b' disagrees"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left", "/full/x"), 2, "/full/x"),
        (PermissionError(13, "Permission denied", "/no/x"), 2, "/no/x"),
        (OSError(30, "Read-only file system", "/ro/x"), 2, "/ro/x"),
    ],
)
def test_errors_of_use_are_one_sentence(error, code, words, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.run(raising(error))
    assert exit.value.code == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_bugs_keep_their_traceback():
    with pytest.raises(ValueError):
        bench.run(raising(ValueError("a bug")))
    with pytest.raises(FileNotFoundError):
        bench.run(raising(FileNotFoundError(2, "missing")))


@pytest.mark.parametrize("result, code", [(None, 0), ([{}], 0), (3, 3)])
def test_exit_code_of_a_main_that_returns(result, code):
    with pytest.raises(SystemExit) as exit:
        bench.run(lambda: result)
    assert exit.value.code == code


@pytest.mark.skipif(os.name == "nt", reason="no SIGPIPE")
def test_closed_pipe_is_quiet():
    code = (
        "from common import bench\n"
        "bench.run(lambda: [print('x' * 100) for _ in range(10**5)])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


# ---- records ---------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.setattr(
        machine, "source", lambda: {"commit": "c0ffee", "dirty": False}
    )


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True
    )


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small copy of the tree in a git repository of its own."""
    if not shutil.which("git"):
        pytest.skip("no git")
    root = tmp_path / "copy"
    (root / "common" / "results").mkdir(parents=True)
    for name in ("machine.py", "README.md", "results/m.json"):
        (root / "common" / name).write_text("1\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    monkeypatch.setattr(machine, "ROOT", root)
    return root


def test_save_refuses_a_tree_with_changed_source(checkout, arguments):
    arguments("--save")  # clean
    for name in ("README.md", "results/m.json"):
        (checkout / "common" / name).write_text("2\n")
    (checkout / "untracked.py").write_text("2\n")
    arguments("--save")  # results, text and untracked files do not count
    (checkout / "common" / "machine.py").write_text("2\n")
    with pytest.raises(bench.Refusal, match="uncommitted"):
        arguments("--save")


def test_save_refuses_what_became_dirty_while_measuring(checkout, arguments):
    args = arguments("--save")
    (checkout / "common" / "machine.py").write_text("2\n")
    with pytest.raises(bench.Refusal, match="uncommitted"):
        bench.record(args, [])
    assert not (args.file.parent / "results").exists()


def test_without_git_the_sources_are_hashed(checkout, arguments):
    shutil.rmtree(checkout / ".git")
    path = bench.record(arguments("--save"), [])
    entry = json.loads(path.read_text())["ch99_demo.demo"]
    assert len(entry["source"]["sources"]) == 64


def test_save_refuses_smoke(arguments, clean, monkeypatch):
    with pytest.raises(bench.Refusal, match="smoke"):
        arguments("--save", "--smoke")
    monkeypatch.setenv("BENCH_SMOKE", "1")
    with pytest.raises(bench.Refusal, match="BENCH_SMOKE"):
        arguments("--save")


def test_nothing_is_written_unless_asked(arguments):
    args = arguments()
    assert bench.record(args, [{"a": 1}]) is None
    assert not (args.file.parent / "results").exists()


def test_a_record_says_what_it_was(arguments, clean):
    args = arguments("--save")
    path = bench.record(args, [{"a": np.float32(1)}], {"more": 2})
    assert path == args.file.parent / "results" / f"{machine.identity()}.json"
    (entries,) = bench.load_records(args.file.parent).values()
    entry = entries["ch99_demo.demo"]
    assert entry["rows"] == [{"a": 1.0}] and entry["more"] == 2
    assert entry["argv"] == ["--device", "cpu", "--save"]
    assert entry["source"]["commit"] == "c0ffee"
    assert entry["method"] == bench.METHOD
    assert entry["machine"]["torch"] == torch.__version__
    assert entry["when"].endswith("+00:00")
    # beside the entries of other scripts
    args.script = "ch99_demo.other"
    bench.record(args, [])
    (entries,) = bench.load_records(args.file.parent / "results").values()
    assert sorted(entries) == ["ch99_demo.demo", "ch99_demo.other"]


def test_several_tables_make_one_record(arguments, clean, capsys):
    args = arguments("--save")
    bench.report(args, [{"name": "a", "n_bytes": 1}], title="First")
    path = bench.report(args, [{"name": "b", "n": 2}], ["name"], title="Last")
    printed = capsys.readouterr().out
    assert printed.count("9.9.9") == printed.count("torch 2") == 1
    assert printed.index("First") < printed.index("Last")
    (entries,) = bench.load_records(args.file.parent).values()
    entry = entries["ch99_demo.demo"]
    assert [row["title"] for row in entry["rows"]] == ["First", "Last"]
    assert entry["columns"] == {"First": None, "Last": ["name"]}
    assert path[0]["title"] == "Last"


def test_what_is_left_out_is_shown_from_a_record(arguments, clean, capsys):
    args = arguments("--save")
    bench.left_out(args, "the copy: no GPU")
    said = capsys.readouterr().out
    assert "left out: the copy: no GPU" in said
    assert "no record of a machine with CUDA yet" in said
    bench.report(args, [{"name": "copied", "n": 7}], ["name"], title="T")
    capsys.readouterr()
    bench.left_out(args, "the copy", kind="cpu")
    said = capsys.readouterr().out
    assert (
        "recorded on" in said and "copied" in said and "n  title" not in said
    )
    assert "no record" not in said


def test_records_can_be_sent_elsewhere(
    arguments, clean, tmp_path, monkeypatch
):
    args = arguments("--save")
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path / "out"))
    path = bench.record(args, [])
    assert path.parent == tmp_path / "out" / "ch99_demo"
    assert not (args.file.parent / "results").exists()


def test_a_damaged_record_is_refused_and_kept(arguments, clean):
    args = arguments("--save")
    path = bench.record(args, [])
    path.write_text("{")
    with pytest.raises(bench.Refusal, match=path.name):
        bench.record(args, [])
    with pytest.raises(bench.Refusal, match=path.name):
        bench.load_records(args.file.parent)
    assert path.read_text() == "{"


def test_a_changed_script_makes_a_record_old(arguments, clean, monkeypatch):
    args = arguments("--save")
    monkeypatch.syspath_prepend(args.file.parent.parent)
    path = bench.record(args, [])
    entry = json.loads(path.read_text())[args.script]
    assert bench.is_current(entry, args.script)
    assert not bench.is_current(entry | {"method": 0}, args.script)
    args.file.write_bytes(b"print(1)\r\n")  # only checked out elsewhere
    assert bench.is_current(entry, args.script)
    args.file.write_text("print(2)\n")
    assert not bench.is_current(entry, args.script)
    assert not bench.is_current(entry, "ch99_demo.absent")
    assert not bench.is_current(entry, "absent.absent")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(failing, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    bench.write_atomic(path, "old 舊\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError) as error:
        bench.write_atomic(path, b"new")
    assert error.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == "old 舊\n"
    assert os.listdir(tmp_path) == ["x.json"]


# ---- tables ----------------------------------------------------------------


def test_chinese_stays_aligned():
    rows = [
        {"name": "兩個流", "took_s": 1.5e-3, "peak_bytes": 3 << 20},
        {"name": "one", "took_s": None, "peak_bytes": 5},
    ]
    lines = bench.table(rows, title="T").splitlines()
    assert lines[0] == "T"
    assert lines[1:] == [
        "name    took s  peak bytes",
        "──────  ──────  ──────────",
        "兩個流  1.5 ms       3 MiB",
        "one          —         5 B",
    ]
    assert len({tables.width(line) for line in lines[2:]}) == 1


def test_wide_tables_are_cut_to_100_columns():
    rows = [{"a": "中" * 80, "b": "x" * 90, "c": 1}]
    lines = bench.table(rows, {"a": "名", "b": "B", "c": "C"}).splitlines()
    assert max(map(tables.width, lines)) <= 100
    assert "…" in lines[2] and lines[2].endswith("1")


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("s", 0.0, "0 s"),
        ("t_s", 12.3456, "12.3 s"),
        ("t_s", 2.5e-9, "2.5 ns"),
        ("copy_bytes_per_s", 12.34e9, "12.34 GB/s"),
        ("gemm_flops", 1.5e12, "1.5 TFLOP/s"),
        ("peak_bytes", 1536, "1.5 KiB"),
        ("count", 1234567, "1,234,567"),
        ("equal", True, "yes"),
        ("ratio_interval", [1.0, 1.25], "[1, 1.25]"),
        ("x", float("nan"), "nan"),
    ],
)
def test_cells(key, value, text):
    assert tables.cell(value, key) == text


def test_an_empty_table_is_its_head():
    assert bench.table([], ["a", "b"]).splitlines()[0] == "a  b"


def test_a_burst_is_no_difference():
    """One of two equals is hit for a third of the time: nothing lasts."""
    ratios = np.concatenate([np.full(34, 1.08), np.full(26, 1.05)])
    ratios = np.concatenate([ratios, np.full(20, 1.0)])
    assert not judging.lasts(ratios)
    assert judging.lasts(np.full(60, 0.9))
    samples = np.stack([ratios, np.ones_like(ratios)], 1)
    row = judging.judge(["a", "b"], samples)[1]
    assert row["ratio_interval"][0] > 1 + judging.SMALLEST
    assert row["differs"] is False  # the interval alone would claim it
    assert row["verdict"].startswith("unsteady: 1.0")  # and is not hidden
