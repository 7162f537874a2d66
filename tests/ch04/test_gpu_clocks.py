"""4.1.3: what the driver is asked, what it is told, and that it is undone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ch04_profiling import gpu_clocks
from ch04_profiling.gpu_clocks import (
    clock_at_work,
    free_and_pinned,
    limits,
    supported_clocks,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


class NVMLError_NoPermission(Exception):  # noqa: N801 - the driver's name
    """What pynvml raises without administrator's rights."""


class Driver:
    """An NVML whose clock follows its lock; notes what changes something."""

    def __init__(self, permitted=True, say=None):
        self.calls, self.mhz, self.permitted = [], 1980, permitted
        self.say = say or (lambda name: None)

    def note(self, *call):
        self.calls.append(call)
        self.say(call[0])

    def nvmlInit(self):
        self.note("init")

    def nvmlShutdown(self):
        self.note("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return "gpu0"

    def nvmlDeviceGetSupportedMemoryClocks(self, gpu):
        return [2619, 405]

    def nvmlDeviceGetSupportedGraphicsClocks(self, gpu, memory):
        return [1980, 1485, 345] if memory == 2619 else [345]

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        self.say("read")
        return self.mhz if kind == 0 else 2619

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return 0x4 if self.mhz == 1980 else 0x2

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return 700_000

    def nvmlDeviceSetGpuLockedClocks(self, gpu, low, high):
        self.note("lock", low, high)
        if not self.permitted:
            raise NVMLError_NoPermission
        self.mhz = high

    def nvmlDeviceResetGpuLockedClocks(self, gpu):
        self.note("unlock")
        self.mhz = 1980

    def named(self):
        return [call[0] for call in self.calls]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    class NoDriver:
        def nvmlInit(self):
            raise RuntimeError("NVML Shared Library Not Found")

    rows = gpu_clocks.main(["--smoke", "--device", "cpu"], NoDriver())
    out = capsys.readouterr().out
    assert "no NVIDIA GPU or driver here" in rows[0]["value"]
    assert "-rgc" in out and "left out" in out
    monkeypatch.setitem(sys.modules, "pynvml", None)
    rows = gpu_clocks.main(["--smoke", "--device", "cpu", "--pin"])
    assert "not installed" in rows[0]["value"]
    assert "nothing was locked" in capsys.readouterr().out


def test_unasked_it_changes_nothing(capsys):
    driver = Driver()
    rows = gpu_clocks.main(["--smoke", "--device", "cpu"], driver)
    assert driver.named() == ["init", "shutdown"]
    told = {row["name"]: row.get("value") for row in rows}
    assert told["graphics, memory at 2619 MHz"] == "345 to 1980 MHz in 3 steps"
    assert told["graphics now"] == "1980 MHz"
    assert told["limited by"] == "power limit"
    assert told["temperature"] == "not told"
    assert "nothing was changed" in capsys.readouterr().out


def test_a_gpu_without_a_list_of_clocks_says_why(monkeypatch):
    def refuse(*args):
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(Driver, "nvmlDeviceGetSupportedMemoryClocks", refuse)
    rows = gpu_clocks.state_rows(Driver(), "gpu0")
    told = {row["name"]: row["value"] for row in rows}
    assert told["graphics"] == "no list of clocks (Not Supported)"
    assert told["graphics now"] == "1980 MHz"


def test_asked_it_locks_measures_and_unlocks():
    driver = Driver()
    argv = ["--smoke", "--device", "cpu", "--pin", "1500"]
    rows = gpu_clocks.main(argv, driver)
    assert driver.calls == [
        ("init",),
        ("init",),
        ("lock", 1485, 1485),
        ("unlock",),
        ("shutdown",),
        ("shutdown",),
    ]
    free, _, pinned, copy = rows[-4:]
    assert free["graphics_mhz"] == 1980 and free["times"] == 1
    assert pinned["clock"] == "locked at 1485 MHz"
    assert pinned["graphics_mhz"] == 1485
    assert pinned["limited"] == "application clocks"
    assert pinned["expected_times"] == pytest.approx(1980 / 1485)
    assert copy["expected_times"] == 1


def test_not_permitted_is_said_and_the_rest_measured(capsys):
    driver = Driver(permitted=False)
    rows = gpu_clocks.main(["--smoke", "--device", "cpu", "--pin"], driver)
    assert "administrator's rights" in capsys.readouterr().out
    assert {r["clock"] for r in rows if "clock" in r} == {"free"}
    assert driver.named().count("unlock") == 1  # it may have been set


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_unlocks_when_the_work_is_interrupted(error, monkeypatch):
    driver, timed = Driver(), gpu_clocks.timed

    def interrupted(*args):
        if driver.mhz != 1980:
            raise error
        return timed(*args)

    monkeypatch.setattr(gpu_clocks, "timed", interrupted)
    with pytest.raises(error):
        free_and_pinned(driver, "gpu0", CPU, 1500, True)
    assert driver.named()[-2:] == ["unlock", "shutdown"]
    assert driver.mhz == 1980


CHILD = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from test_gpu_clocks import Driver
from ch04_profiling import gpu_clocks
from common import bench

driver = Driver(say=lambda name: print(name, flush=True))
def waits(*args):
    if driver.mhz != 1980:
        print("ready", flush=True)
        time.sleep(60)
    return {{}}
gpu_clocks.timed = waits
bench.run(lambda: gpu_clocks.main(["--smoke", "--pin"], driver))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_sigterm_unlocks():
    number = signal.SIGTERM
    code = CHILD.format(tests=str(Path(__file__).parent), root=str(ROOT))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        told = []
        for line in process.stdout:
            told.append(line.strip())
            if told[-1] == "ready":
                process.send_signal(number)
        process.wait(timeout=300)
    assert "unlock" in told[told.index("ready") :]
    assert process.returncode in (128 + number, -number)


def test_supported_clocks(pasted):
    found = pasted(supported_clocks)(Driver(), "gpu0")
    assert found == {405: (345, 345, 1), 2619: (345, 1980, 3)}


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, "nothing"),
        (0x4, "power limit"),
        (0x41, "idle, temperature, by hardware"),
        (0x4 | 0x8000, "power limit, 0x8000"),
    ],
)
def test_limits_in_words(mask, words, pasted):
    assert pasted(limits)(mask) == words


def test_the_clock_is_read_while_the_gpu_works(pasted):
    order = []
    driver = Driver(say=order.append)
    found = pasted(clock_at_work)(
        driver,
        "gpu0",
        lambda: order.append("work"),
        lambda: order.append("wait"),
    )
    assert order == ["work", "read", "read", "wait"]
    assert found == (1980, 2619, 0x4)


@pytest.mark.gpu
def test_a_real_gpu_tells_its_clocks_and_keeps_them():
    pytest.importorskip("pynvml")
    if torch.version.hip:
        pytest.skip("needs an NVIDIA GPU")
    rows = gpu_clocks.main(["--smoke", "--device", "cuda", "--pin"])
    told = {row["name"]: row.get("value") for row in rows}
    assert told["graphics now"].endswith("MHz")
