"""4.1.4: states read from files like Linux's, changed only if asked, undone.

The files are made here, as the kernel lays them out.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ch04_profiling import cpu_clocks
from ch04_profiling.cpu_clocks import (
    after_pause,
    commands,
    cpu_states,
    held,
    per_cpu,
    sleep_states,
)
from common import bench

ROOT = Path(__file__).resolve().parents[2]
INTEL = {
    "intel_pstate/no_turbo": "0",
    "cpuidle/current_driver": "intel_idle",
    "smt/control": "on",
    "cpufreq/policy0/nothing": "",
}
AMD = {"cpufreq/boost": "1", "cpuidle/current_driver": "acpi_idle"}
STATES = [("POLL", 0), ("C1", 2), ("C1E", 10), ("C6", 133)]


def tree(root, files, governors=("powersave", "powersave"), cpufreq=True):
    """Make a folder as Linux shows it for so many CPUs."""
    files = dict(files)
    for cpu, governor in enumerate(governors):
        own = {
            "scaling_driver": "intel_pstate",
            "scaling_governor": governor,
            "scaling_available_governors": "performance powersave",
            "scaling_cur_freq": f"{800_000 + 1_000_000 * cpu}",
            "scaling_min_freq": "800000",
            "scaling_max_freq": "3800000",
            "energy_performance_preference": "balance_performance",
        }
        for name, text in own.items() if cpufreq else ():
            files[f"cpu{cpu}/cpufreq/{name}"] = text
        for number, (name, latency) in enumerate(STATES if cpufreq else ()):
            told = {"name": name, "latency": latency, "usage": 100 * number}
            told["disable"] = int(name == "C1E")
            for key, value in told.items():
                files[f"cpu{cpu}/cpuidle/state{number}/{key}"] = value
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def contents(root):
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {p: p.read_text().strip() for p in files}


@pytest.fixture
def intel(tmp_path):
    return tree(tmp_path, INTEL)


def smoke(*flags, root, **more):
    return cpu_clocks.main(
        ["--smoke", "--device", "cpu", *flags], root=root, **more
    )


def test_on_this_machine_it_changes_nothing(capsys):
    rows = cpu_clocks.main(["--smoke", "--device", "cpu"])
    assert [r["pause_s"] for r in rows[-4:]] == [0, 1e-3, 1e-2, 0.1]
    assert "nothing was changed" in capsys.readouterr().out


def test_states_of_an_intel_cpu(intel, pasted):
    assert pasted(cpu_states)(intel) == {
        "driver": "intel_pstate",
        "governors": "performance powersave",
        "preference": "balance_performance",
        "no_turbo": "0",
        "sleep_driver": "intel_idle",
        "smt": "on",
    }


def test_states_of_a_guest_are_few(tmp_path, pasted):
    assert pasted(cpu_states)(tree(tmp_path, {}, cpufreq=False)) == {}
    assert pasted(sleep_states)(tmp_path) == []
    assert cpu_states(tmp_path / "not there") == {}


def test_no_difference_where_no_sleep_is_shown_is_explained(
    intel, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cpu_clocks.platform, "system", lambda: "Linux")
    said = "no sleep state is shown"
    smoke(root=intel)
    assert said not in capsys.readouterr().out
    smoke(root=tmp_path / "guest")
    assert said in capsys.readouterr().out


def test_cpus_that_do_not_agree_are_seen(tmp_path, pasted):
    tree(tmp_path, AMD, ["powersave"] * 11 + ["performance"])
    found = pasted(per_cpu)(tmp_path, "cpufreq/scaling_governor")
    assert found == {"performance": [11], "powersave": list(range(11))}
    # the known wrong version asks the first CPU only
    first = tmp_path / "cpu0/cpufreq/scaling_governor"
    assert {first.read_text().strip()} != set(found)


def test_sleep_states_in_their_order(intel, pasted):
    rows = pasted(sleep_states)(intel)
    assert [r["name"] for r in rows] == ["POLL", "C1", "C1E", "C6"]
    assert rows[3]["latency_s"] == 133e-6 and rows[3]["entered"] == 300
    assert [r["disabled"] for r in rows] == [False, False, True, False]


def test_ten_and_more_sleep_states_are_sorted_by_number(intel):
    for number in range(4, 12):
        for key, value in {"name": number, "latency": 1, "usage": 0}.items():
            path = intel / f"cpu0/cpuidle/state{number}/{key}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(value))
        (path.parent / "disable").write_text("0")
    assert [r["name"] for r in sleep_states(intel)][4:] == [
        str(n) for n in range(4, 12)
    ]


def test_the_table_of_states(intel):
    rows = smoke(root=intel)
    told = {row["name"]: row["value"] for row in rows if "value" in row}
    assert told["governor"] == "powersave (2 CPUs)"
    assert told["MHz now"] == "800 to 1800"
    assert told["MHz to"] == "3800"
    assert told["sleep state C1E"].endswith("disabled")
    assert "133 µs" in told["sleep state C6"]


@pytest.mark.parametrize(
    ("files", "line", "undo"),
    [(INTEL, "echo 1", "echo 0"), (AMD, "echo 0", "echo 1")],
)
def test_commands_and_how_to_undo_them(tmp_path, files, line, undo):
    tree(tmp_path, files)
    governors = per_cpu(tmp_path, "cpufreq/scaling_governor")
    rows = commands(cpu_states(tmp_path), governors, "Linux")
    assert rows[0]["undo"].endswith("-g powersave")
    assert rows[1]["do"].startswith(line)
    assert rows[1]["undo"].startswith(undo)
    assert rows[2]["undo"].endswith("--enable-all")


def test_other_systems_have_their_own_words():
    (row,) = commands({}, {}, "Darwin")
    assert "pmset" in row["do"]
    (row,) = commands({}, {}, "Windows")
    assert "powercfg" in row["undo"]
    assert commands({}, {}, "Linux") == []


def test_unasked_no_file_is_written(intel, monkeypatch):
    monkeypatch.setattr(Path, "write_text", None)
    before = contents(intel)
    smoke(root=intel)
    assert contents(intel) == before


def watched(monkeypatch, root):
    """Note the files' contents while the second table is measured."""
    seen, pauses = [], cpu_clocks.pauses

    def noted(args, setting):
        seen.append((setting, contents(root)))
        return pauses(args, setting)

    monkeypatch.setattr(cpu_clocks, "pauses", noted)
    return seen


@pytest.mark.parametrize(
    ("files", "turbo", "off"),
    [
        (INTEL, "intel_pstate/no_turbo", "1"),
        (AMD, "cpufreq/boost", "0"),
        ({"cpu1/cpufreq/boost": "1"}, "cpu1/cpufreq/boost", "0"),
    ],
)
def test_asked_it_sets_all_cpus_and_undoes_it(
    tmp_path, monkeypatch, files, turbo, off
):
    root = tree(tmp_path / "cpu", files, ["powersave", "performance"])
    before, seen = contents(root), watched(monkeypatch, root)
    latency = tmp_path / "latency"
    flags = ["--governor", "performance", "--no-turbo", "--awake"]
    rows = smoke(*flags, root=root, latency=latency)
    (_, first), (setting, during) = seen
    assert first == before == contents(root)
    assert setting == "performance, no turbo, awake"
    for cpu in (0, 1):
        path = root / f"cpu{cpu}/cpufreq/scaling_governor"
        assert during[path] == "performance"
    assert during[root / turbo] == off
    assert latency.read_bytes() == b"\0\0\0\0"
    assert rows[-1]["setting"] == setting


def test_what_is_not_there_is_refused_before_anything(tmp_path):
    root = tree(tmp_path, {})
    with pytest.raises(bench.Refusal, match="performance, powersave"):
        smoke("--governor", "warp", root=root)
    with pytest.raises(bench.Refusal, match="--no-turbo"):
        smoke("--no-turbo", root=root)
    guest = tree(tmp_path / "guest", {}, cpufreq=False)
    with pytest.raises(bench.Refusal, match="a guest"):
        smoke("--governor", "performance", root=guest)


def test_not_permitted_is_one_sentence_and_undone(intel, monkeypatch):
    before, write = contents(intel), Path.write_text

    def deny(self, text):
        if self.name == "no_turbo" and text == "1":
            raise PermissionError(13, "Permission denied", str(self))
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", deny)
    with pytest.raises(bench.Refusal, match="no_turbo cannot be set"):
        smoke("--governor", "performance", "--no-turbo", root=intel)
    assert contents(intel) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_undone_after_an_exception(intel, error):
    path = intel / "intel_pstate/no_turbo"
    ends = signal.SIGTERM, signal.SIGINT
    handlers = [signal.getsignal(number) for number in ends]
    with pytest.raises(error), held({path: "1"}):
        assert path.read_text() == "1"
        raise error
    assert path.read_text() == "0\n"
    assert [signal.getsignal(number) for number in ends] == handlers


def test_one_that_cannot_be_undone_keeps_no_other(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a")
    second.write_text("b")
    with held({first: "1", second: "2"}):
        second.unlink()
        second.mkdir()
    assert first.read_text() == "a"
    assert "second was 'b'" in capsys.readouterr().err


def test_another_thread_is_refused_before_anything(intel):
    path, caught = intel / "intel_pstate/no_turbo", []

    def work():
        try:
            with held({path: "1"}):
                caught.append("entered")
        except ValueError:
            caught.append("refused")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == ["refused"] and path.read_text() == "0\n"


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from ch04_profiling import cpu_clocks
from common import bench

def waits(args, setting):
    if setting != "as found":
        print("ready", flush=True)
        time.sleep(60)
    return []
cpu_clocks.pauses = waits
argv = ["--smoke", "--governor", "performance", "--no-turbo"]
run = lambda: cpu_clocks.main(argv, root=Path({tree!r}))
{call}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize(
    ("number", "call"),
    [
        (signal.SIGTERM, "bench.run(run)"),
        (signal.SIGTERM, "run()"),
        (signal.SIGINT, "bench.run(run)"),
    ],
)
def test_a_signal_undoes_it(intel, number, call):
    before = contents(intel)
    code = CHILD.format(root=str(ROOT), tree=str(intel), call=call)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.strip() == "ready":
                assert contents(intel) != before
                process.send_signal(number)
        process.wait(timeout=300)
    assert contents(intel) == before
    assert process.returncode in (128 + number, -number)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_second_ctrl_c_does_not_stop_the_undoing(tmp_path):
    class Impatient(type(tmp_path)):
        def write_text(self, text):
            if text == "old":
                signal.raise_signal(signal.SIGINT)
            return Path(self).write_text(text)

    paths = [Impatient(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_text("old")
    with pytest.raises(KeyboardInterrupt), held(dict.fromkeys(paths, "1")):
        signal.raise_signal(signal.SIGINT)
    assert {Path(path).read_text() for path in paths} == {"old"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_finally_block_alone_would_leave_it_set(tmp_path):
    """The known wrong version: SIGTERM ends Python without finally."""
    path = tmp_path / "no_turbo"
    path.write_text("0")
    code = (
        "import pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    path.write_text('1')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "finally:\n"
        "    path.write_text('0')\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        process.wait(timeout=300)
    assert path.read_text() == "1"


def test_the_work_after_a_pause_and_nothing_else_is_timed(pasted):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def work():
        now[0] += 3

    found = pasted(after_pause)(work, 100, 5, lambda: now[0], sleep)
    assert found == 3
