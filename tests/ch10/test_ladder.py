"""The ladder's rows, verdicts, resumption and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ch10_gpt2 import ladder, steps, train
from common import bench, ranks

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300  # on a machine that others load
KEYS = {
    *("track", "section", "step", "verdict", "reason", "predicted"),
    *("tokens_per_s", "spread", "ratio_previous", "ratio_first"),
    *("peak_bytes", "loss", "agreement"),
}


def search_path():
    """Let children import these steps, after what blocks the network."""
    paths = [os.environ.get("PYTHONPATH"), ROOT, Path(__file__).parent]
    return os.pathsep.join(str(path) for path in paths if path)


def run(*words, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = search_path()
    return subprocess.run(
        [sys.executable, "-m", "ch10_gpt2.ladder", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        **({"timeout": 550} | more),
    )


def read(folder):
    return json.loads((folder / "log.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Run a memory track in which every later step is wrong on purpose."""
    out = tmp_path_factory.mktemp("planted")
    done = run(
        "--smoke", "--track", "memory", "--steps", "planted_steps",
        "--out", out,
    )  # fmt: skip
    return out, done


def test_a_planted_error_fails_the_ladder(planted):
    out, done = planted
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    rows = {r["step"]: r for r in read(out)["rows"]}
    wrong = rows["zero_grad_inside"]
    assert wrong["verdict"] == "failed"
    agreement = wrong["agreement"]
    # a hundredfold beyond the tolerance: no accident of rounding
    assert agreement["worst_gradient_norm"] > (
        100 * agreement["gradient_tolerance"]
    )
    assert "does not compute the same" in wrong["reason"]


def test_16_bits_excuse_no_lost_gradient(planted):
    rows = {r["step"]: r for r in read(planted[0])["rows"]}
    assert rows["bfloat16"]["verdict"] == "kept"
    wrong = rows["lost_positions"]
    assert wrong["config"]["precision"] == "bfloat16"
    assert wrong["verdict"] == "failed"
    agreement = wrong["agreement"]
    assert agreement["declared"] == "close"
    assert agreement["parameter"] == "wpe.weight" in wrong["reason"]
    assert agreement["worst_parameter_norm"] == 1.0


def test_out_of_memory_is_a_verdict(planted):
    out, _ = planted
    row = {r["step"]: r for r in read(out)["rows"]}["too_large"]
    assert row["verdict"] == "reverted"
    assert row["reason"].startswith("out of memory")


def test_a_worker_that_dies_fails_its_row_only(planted):
    out, _ = planted
    rows = {r["step"]: r for r in read(out)["rows"]}
    assert rows["crash"]["verdict"] == "failed"
    assert "summary" in rows  # the track went on
    assert (out / "LOG.md").exists()


def test_rows_have_every_key(planted):
    out, _ = planted
    data = read(out)
    assert data["machine"]["id"]
    for row in data["rows"]:
        assert row.keys() >= KEYS
        assert row["verdict"] in (
            *("kept", "reverted", "not-applicable", "failed"),
        )
        assert row["reason"]


def test_a_killed_ladder_goes_on_where_it_was(tmp_path):
    words = [
        *("--smoke", "--track", "speed", "--steps", "planted_steps"),
        *("--out", str(tmp_path)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = search_path()
    process = subprocess.Popen(
        [sys.executable, "-m", "ch10_gpt2.ladder", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    log = tmp_path / "log.json"
    kept, until = False, time.monotonic() + DEADLINE_S
    while not kept and time.monotonic() < until and process.poll() is None:
        kept = log.exists() and bool(read(tmp_path)["rows"])
        time.sleep(0.02)
    ended = process.poll() is not None
    process.kill()
    process.wait()
    assert not ended, "it ended before it could be killed"
    assert kept, f"no row was kept within {DEADLINE_S} s"
    before = read(tmp_path)["rows"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    after = read(tmp_path)["rows"]
    assert after[: len(before)] == before
    names = [r["step"] for r in after]
    assert names == ["speed_baseline", "larger_batch", "tokenise_once"] + [
        "summary"
    ]
    again = run(*words)  # a finished log repeats nothing at all
    assert again.returncode == 0
    assert read(tmp_path)["rows"] == after


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--preset", "gpt5"], "unknown preset"),
        (["--device", "cuda:9"], "--device cuda:9"),
        (["--only", "9.9"], "known: "),
        (["--only", "10.5"], "known: "),
        (["--until", "10.5"], "--until 10.5"),
        (["--diff", "magic"], "no such step"),
        (["--data", "/no/such.txt"], "/no/such.txt"),
        (["--steps", "no_such_module"], "--steps no_such_module"),
        (["--sequences", "0"], "--sequences"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(words, says, tmp_path):
    done = run("--smoke", "--out", tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 25
    assert not list(tmp_path.iterdir())  # and leaves nothing behind


def test_a_folder_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    done = run("--smoke", "--out", occupied)
    assert done.returncode == 2
    assert str(occupied) in done.stderr and "Traceback" not in done.stderr


def test_diff_shows_the_step_and_what_it_turns_on(capsys):
    ladder.main(["--diff", "fused_attention"])
    shown = capsys.readouterr().out
    assert 'attention="fused"' in shown
    assert "scaled_dot_product_attention" in shown


def test_diff_of_a_section_shows_all_its_steps(capsys):
    ladder.main(["--diff", "10.4.6"])
    shown = capsys.readouterr().out
    assert "float16_autocast" in shown and "bfloat16_autocast" in shown


def test_a_summary_is_not_named_after_a_step(capsys):
    summary = replace(steps.SPEED[5], section="10.4.10", title="Summary")
    ladder.announce(ladder.empty_row(summary))
    assert capsys.readouterr().out == "10.4.10 Summary (summary)\n"


def row(**values):
    step = steps.SPEED[5]
    config = train.as_dict(train.Config())
    filled = ladder.empty_row(step, config=config, smoke=False) | values
    filled["agreement"] = {"holds": True}
    return filled


@pytest.mark.parametrize(
    ("interval", "rounds", "verdict", "words"),
    [
        ([1.1, 1.3], 8, "kept", "faster: 1.20× [1.10, 1.30]"),
        ([1.1, 1.3], 6, "kept", "faster: 1.20× 97% [1.10, 1.30]"),
        ([0.9, 1.1], 8, "reverted", "no difference measured here: 1.00×"),
        # two copies of one function differ by so much
        ([1.01, 1.03], 8, "reverted", "no difference measured here: 1.02×"),
        ([0.7, 0.9], 8, "reverted", "slower here: 0.80× [0.70, 0.90]"),
        (None, 1, "kept", "faster: 1.20× (one after the other"),
    ],
)
def test_speed_needs_an_interval_beyond_one(interval, rounds, verdict, words):
    ratio = sum(interval) / 2 if interval else 1.2
    measured = row(ratio_previous=ratio, ratio_interval=interval)
    measured["rounds"] = rounds
    said = ladder.judge(steps.SPEED[5], measured, row())
    assert said[0] == verdict and said[1].startswith(words)


def test_speed_that_does_not_last_is_not_kept():
    measured = row(ratio_previous=1.2, ratio_interval=[1.1, 1.3], rounds=8)
    said = ladder.judge(steps.SPEED[5], measured | {"steady": True}, row())
    assert said == ("kept", "faster: 1.20× [1.10, 1.30]")
    said = ladder.judge(steps.SPEED[5], measured | {"steady": False}, row())
    assert said == ("reverted", "unsteady: 1.20× [1.10, 1.30]")


def test_memory_needs_a_smaller_peak():
    step = steps.MEMORY[2]
    before = row(peak_bytes={"tracked": 1000})
    for peak, verdict in ((800, "kept"), (999, "reverted")):
        measured = row(
            ratio_previous=0.8,
            ratio_interval=[0.7, 0.9],
            peak_bytes={"tracked": peak},
        )
        assert ladder.judge(step, measured, before)[0] == verdict


def test_failed_rows_are_tried_again(tmp_path):
    plan = ladder.Plan(
        {}, "planted_steps", True, 1, 2, False, 1.0, tmp_path, {}
    )
    header = {"key": "k"}
    kept = {"track": "speed", "step": "a", "section": "1", "verdict": "kept"}
    failed = kept | {"step": "b", "verdict": "failed"}
    bench.write_atomic(
        tmp_path / "log.json",
        json.dumps(header | {"rows": [kept, failed], "updates": 5}),
    )
    book = ladder.Book(plan, header, fresh=False)
    assert book.data["rows"] == [kept] and plan.updates == 5
    other = ladder.Book(plan, {"key": "another"}, fresh=False)
    assert other.data["rows"] == []
    assert list(tmp_path.glob("log-*.json"))  # the other log is not lost


def test_a_log_cut_short_is_put_aside(tmp_path):
    (tmp_path / "log.json").write_text('{"key": "k", "rows": [')
    plan = ladder.Plan(
        {}, "planted_steps", True, 1, 2, False, 1.0, tmp_path, {}
    )
    assert ladder.Book(plan, {"key": "k"}, fresh=False).data["rows"] == []
    assert list(tmp_path.glob("log-*.json"))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_no_process_and_keeps_rows(tmp_path):
    import psutil

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = search_path()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ch10_gpt2.ladder", "--smoke"),
            *("--steps", "planted_steps", "--track", "speed"),
            *("--out", str(tmp_path)),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + DEADLINE_S
    children = []
    while time.monotonic() < until and process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        if children:
            break
        time.sleep(0.02)
    if not children:
        process.kill()
    assert children, f"no worker was started within {DEADLINE_S} s"
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in words
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run both tracks once, in namespaces where this machine allows it."""
    out = tmp_path_factory.mktemp("whole")
    netns = [] if ranks.can_netns() else ["--netns"]
    return out, netns, run("--smoke", "--out", out, *netns, timeout=550)


@pytest.mark.ranks
def test_every_row_is_filled(whole):
    out, netns, done = whole
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    rows = read(out)["rows"]
    wanted = [(s.section, s.name) for s in steps.MEMORY]
    wanted += [("10.3.6", "summary")]
    wanted += [(s.section, s.name) for s in steps.SPEED]
    wanted += [("10.4.10", "summary")]
    assert [(r["section"], r["step"]) for r in rows] == wanted
    for row in rows:
        assert row["verdict"] in ("kept", "reverted", "not-applicable")
        assert row["reason"]
        if row["agreement"]:
            assert row["agreement"]["holds"], row


@pytest.mark.ranks
def test_predicted_peaks_are_the_measured_ones(whole):
    """Fake tensors and the allocator's events count the same bytes."""
    rows = {r["step"]: r for r in read(whole[0])["rows"]}
    for step in steps.MEMORY[:4]:  # FSDP's gathers are timed by the wire
        row = rows[step.name]
        measured = row["peak_bytes"]["tracked"]
        assert measured == pytest.approx(row["predicted_bytes"], rel=0.01)


@pytest.mark.ranks
def test_the_log_ends_with_a_command_that_trains(whole, tmp_path):
    data = read(whole[0])
    words = data["final"]["command"].split()
    assert words[:3] == ["python", "-m", "ch10_gpt2.train"]
    assert "--out" in words  # or what it trains would be lost
    done = subprocess.run(
        [sys.executable, *words[1:], "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": search_path()},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.root
@pytest.mark.ranks
def test_two_hosts_were_two_namespaces(whole):
    out, netns, _ = whole
    if not netns:
        pytest.skip(ranks.can_netns())
    row = {r["step"]: r for r in read(out)["rows"]}["two_hosts"]
    assert row["reason"].startswith("two agents, two network namespaces")
    assert row["agreement"]["holds"]
