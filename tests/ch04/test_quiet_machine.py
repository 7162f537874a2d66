"""4.1.1: a comparer that claims little of nothing, and pins that end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from ch04_profiling import quiet_machine
from ch04_profiling.quiet_machine import (
    differs,
    false_claims,
    jitter,
    threads_pinned,
)
from common import bench, machine

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(
    not quiet_machine.CAN_PIN, reason="needs sched_setaffinity"
)


def affinity():
    tasks = map(int, os.listdir("/proc/self/task"))
    found = {}
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found[task] = os.sched_getaffinity(task)
    return found


def assert_as(before):
    """Threads come and go: each may run where it, or this one, might."""
    mine = before[threading.get_native_id()]
    for task, allowed in affinity().items():
        assert allowed == before.get(task, mine)


@pytest.fixture
def other_thread():
    """A thread that was there before, as torch's are."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield thread.native_id
    done.set()
    thread.join()


# --- the comparer ------------------------------------------------------------


def noise(kind, rng, rounds=20):
    """Return samples (rounds, 2) of one function with itself."""
    samples = 1 + 0.02 * np.abs(rng.standard_normal((rounds, 2)))
    if kind == "interrupted":
        samples *= np.where(rng.random((rounds, 2)) < 0.1, 3, 1)
    if kind == "drifting":
        samples *= np.linspace(1, 1.5, rounds)[:, None]
    if kind == "loud":
        samples = np.exp(0.2 * rng.standard_normal((rounds, 2)))
    return samples


@pytest.mark.parametrize("kind", ["quiet", "interrupted", "drifting", "loud"])
def test_at_most_5_percent_false_claims_on_a_a(kind, pasted):
    rng = np.random.default_rng(0)
    share = pasted(false_claims)(differs, lambda: noise(kind, rng), 300)
    assert share <= 0.05


def two_percent(samples):
    """The usual verdict: the means differ by more than 2%."""
    first, second = samples.mean(axis=0)
    return abs(second / first - 1) > 0.02


def two_errors(samples):
    """The means lie more than a standard error of each apart."""
    first, second = samples.mean(axis=0)
    errors = samples.std(axis=0) / len(samples) ** 0.5
    return abs(second - first) > errors.sum()


@pytest.mark.parametrize("wrong", [two_percent, two_errors])
def test_usual_verdicts_fail_the_same_check(wrong):
    rng = np.random.default_rng(0)
    assert false_claims(wrong, lambda: noise("loud", rng), 400) > 0.05


def test_the_comparer_still_finds_a_true_difference():
    rng = np.random.default_rng(0)
    tenth = [1.0, 1.1]
    found = false_claims(differs, lambda: noise("quiet", rng) * tenth, 100)
    assert found > 0.95


# --- jitter ------------------------------------------------------------------


def test_jitter_by_hand(pasted):
    lengths = iter([1.0] * 98 + [3.0, 9.0])
    now, switches = [0.0], iter([40, 47])

    def loop():
        now[0] += next(lengths)

    found = pasted(jitter)(loop, 100, lambda: now[0], lambda: next(switches))
    median, slow, slowest, taken = found
    assert (median, slowest, taken) == (1.0, 9.0, 7)
    assert 1 < slow <= 9


# --- what is pinned, and undone ----------------------------------------------


def test_smoke_changes_nothing(capsys):
    before = quiet_machine.CAN_PIN and affinity()
    rows = quiet_machine.main(["--smoke", "--device", "cpu"])
    assert rows[-1]["comparisons"] == 3
    if quiet_machine.CAN_PIN:
        assert_as(before)
        assert "taskset" in capsys.readouterr().out
    names = {row.get("name", "") for row in rows}
    assert not any("python" in name for name in names)  # none is recorded


@linux
def test_every_thread_is_pinned_and_put_back(pasted, other_thread):
    before = affinity()
    core = {max(os.sched_getaffinity(0))}
    undo = pasted(threads_pinned)(core)
    try:
        assert set(map(frozenset, affinity().values())) == {frozenset(core)}
    finally:
        undo()
    assert_as(before)


@linux
def test_a_thread_that_started_while_pinned_is_freed(pasted):
    """The known wrong version leaves torch's new threads on one core."""
    before = affinity()
    undo = pasted(threads_pinned)({max(os.sched_getaffinity(0))})
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert len(affinity()[thread.native_id]) == 1
        undo()
        assert_as(before)
    finally:
        undo()
        done.set()
        thread.join()


@linux
def test_pinning_the_caller_alone_leaves_the_others(other_thread):
    """The known wrong version: torch's threads stay where they were."""
    before = affinity()
    if len(before[other_thread]) < 2:
        pytest.skip("needs two cores")
    try:
        os.sched_setaffinity(0, {max(before[other_thread])})
        assert affinity()[other_thread] == before[other_thread]
    finally:
        os.sched_setaffinity(0, before[os.getpid()])


@linux
def test_a_core_that_is_not_there_changes_nothing():
    before = affinity()
    with pytest.raises(OSError):
        threads_pinned({4000})
    assert affinity() == before


@linux
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_asked_it_pins_and_undoes_after_an_exception(error, monkeypatch):
    before, seen = affinity(), []

    def interrupted(*args):
        seen.append(os.sched_getaffinity(0))
        raise error

    monkeypatch.setattr(quiet_machine, "a_a", interrupted)
    core = max(os.sched_getaffinity(0))
    argv = ["--smoke", "--device", "cpu", "--pin", str(core)]
    with pytest.raises(error):
        quiet_machine.main(argv)
    assert seen == [{core}]
    assert_as(before)


@linux
@pytest.mark.parametrize("words", ["x", "1-", "4000", "-1", "2-1"])
def test_cores_that_cannot_be_had_are_refused(words):
    with pytest.raises(bench.Refusal, match="this process may use"):
        quiet_machine.cores_of(words)


@linux
def test_cores_in_words(monkeypatch):
    allowed = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert quiet_machine.cores_of("0,2-4") == {0, 2, 3, 4}


@linux
def test_a_pinned_run_belongs_to_the_same_machine(capsys, monkeypatch):
    """The known wrong version files it under a machine with fewer cores."""
    seen, card = [], machine.card

    def noted(device):
        seen.append(card(device)["id"])
        return card(device)

    monkeypatch.setattr(machine, "card", noted)
    core = max(os.sched_getaffinity(0))
    here = machine.card("cpu")["id"]
    quiet_machine.main(["--smoke", "--device", "cpu", "--pin", str(core)])
    assert set(seen) == {here}
    assert f"pinned to core {core}" in capsys.readouterr().out


def test_without_affinity_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(quiet_machine, "CAN_PIN", False)
    rows = quiet_machine.main(["--smoke", "--device", "cpu", "--pin"])
    assert "pins no threads" in capsys.readouterr().out
    assert len(rows) == 2


CHILD = """
import os, sys, time
sys.path.insert(0, {root!r})
from ch04_profiling import quiet_machine
from common import bench

def waits(*args):
    print("ready", flush=True)
    time.sleep(60)

undone = quiet_machine.threads_pinned
def told(cores):
    undo = undone(cores)
    def tell():
        undo()
        print("undone", len(os.sched_getaffinity(0)), flush=True)
    return tell
quiet_machine.threads_pinned = told
quiet_machine.a_a = waits
quiet_machine.cpu_users = lambda seconds: []
bench.run(lambda: quiet_machine.main(["--smoke", "--pin"]))
"""


@linux
def test_sigterm_undoes_it():
    command = [sys.executable, "-c", CHILD.format(root=str(ROOT))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        told = []
        for line in process.stdout:
            told.append(line.strip())
            if told[-1] == "ready":
                process.terminate()
        process.wait(timeout=300)
    assert f"undone {len(os.sched_getaffinity(0))}" in told
    assert process.returncode == 128 + signal.SIGTERM


# --- who uses the machine ----------------------------------------------------


def test_a_busy_process_is_on_the_list():
    pytest.importorskip("psutil")
    code = "while True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        rows = quiet_machine.cpu_users(0.3, most=1000)
    finally:
        process.kill()
        process.wait()
    assert process.pid in {row["pid"] for row in rows}
    used = [row["core_percent"] for row in rows]
    assert used == sorted(used, reverse=True)


def test_without_psutil_it_says_so(monkeypatch):
    monkeypatch.setattr(quiet_machine, "psutil", None)
    assert quiet_machine.cpu_users(0) is None
    assert quiet_machine._name(1) == "not told"


class Driver:
    def __init__(self, error=None):
        self.error, self.calls = error, []

    def nvmlInit(self):
        self.calls.append("init")

    def nvmlShutdown(self):
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        if self.error:
            raise self.error
        made = types.SimpleNamespace
        return [made(pid=os.getpid(), usedGpuMemory=2**30)]


def test_who_uses_the_gpu(monkeypatch):
    driver = Driver()
    (row,) = quiet_machine.gpu_users(driver)
    assert row["pid"] == os.getpid() and row["memory_bytes"] == 2**30
    assert driver.calls == ["init", "shutdown"]
    driver = Driver(RuntimeError("Not Supported"))
    assert "does not tell" in quiet_machine.gpu_users(driver)
    assert driver.calls == ["init", "shutdown"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in quiet_machine.gpu_users()
