"""A locked clock is unlocked on every way out; seen by a fake driver."""

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from common import gpu_clock

ROOT = Path(__file__).resolve().parents[2]


class NVMLError_NoPermission(Exception):  # noqa: N801 - the driver's name
    """What pynvml raises without administrator's rights."""


class NVMLError_LibraryNotFound(Exception):  # noqa: N801
    """What pynvml raises without a driver."""


class FakeNVML:
    """Records the calls that change something; can fail where told."""

    def __init__(self, fail=None, error=None):
        self.calls, self.fail, self.error = [], fail, error

    def _note(self, name, *args):
        self.calls.append((name, *args))
        if name == self.fail:
            raise self.error

    def nvmlInit(self):
        self._note("init")

    def nvmlShutdown(self):
        self._note("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return "gpu0"

    def nvmlDeviceGetSupportedMemoryClocks(self, handle):
        return [405, 2619]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle, memory):
        return [1980, 1965, 1500, 1200, 345] if memory == 2619 else [345]

    def nvmlDeviceSetGpuLockedClocks(self, handle, low, high):
        self._note("lock", handle, low, high)

    def nvmlDeviceResetGpuLockedClocks(self, handle):
        self._note("unlock", handle)


def locked_at(mhz):
    return [
        ("init",),
        ("lock", "gpu0", mhz, mhz),
        ("unlock", "gpu0"),
        ("shutdown",),
    ]


@pytest.mark.parametrize(
    ("wanted", "mhz"), [(None, 1200), (1700, 1500), (9999, 1980), (1, 345)]
)
def test_locks_a_supported_clock_and_unlocks(wanted, mhz):
    nvml = FakeNVML()
    with gpu_clock.pinned(0, wanted, nvml) as pin:
        assert pin.locked and pin.graphics_mhz == mhz
        assert nvml.calls == locked_at(mhz)[:2]
    assert nvml.calls == locked_at(mhz)
    assert not pin.locked


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_unlocks_after_an_exception(error):
    nvml = FakeNVML()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error), gpu_clock.pinned(0, 1500, nvml):
        raise error
    assert nvml.calls == locked_at(1500)
    assert signal.getsignal(signal.SIGTERM) == before


def test_unlocks_when_interrupted_while_locking():
    """The lock may be set although the call did not return."""
    nvml = FakeNVML("lock", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), gpu_clock.pinned(0, 1500, nvml):
        pass
    assert nvml.calls == locked_at(1500)


@pytest.mark.parametrize(
    ("fail", "error", "words"),
    [
        ("lock", NVMLError_NoPermission(), "administrator"),
        ("init", NVMLError_LibraryNotFound(), "no NVIDIA driver"),
        ("init", ImportError(), "nvidia-ml-py is not installed"),
        ("lock", RuntimeError("Unknown Error"), "Unknown Error"),
    ],
)
def test_says_why_not_and_runs_all_the_same(fail, error, words):
    nvml = FakeNVML(fail, error)
    ran = False
    with gpu_clock.pinned(nvml=nvml) as pin:
        ran = True
        assert not pin.locked and pin.graphics_mhz is None
        assert words in pin.reason
    assert ran
    assert ("shutdown",) in nvml.calls or fail == "init"


def test_an_unlock_that_fails_hides_nothing():
    nvml = FakeNVML("unlock", RuntimeError())
    with pytest.raises(ValueError), gpu_clock.pinned(0, 1500, nvml):
        raise ValueError
    assert nvml.calls == locked_at(1500)


def test_works_in_another_thread():
    nvml, before = FakeNVML(), signal.getsignal(signal.SIGTERM)
    found = []

    def work():
        with gpu_clock.pinned(0, 1500, nvml) as pin:
            found.append(pin.locked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True] and nvml.calls == locked_at(1500)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_earlier_handler_still_gets_sigterm():
    nvml, got = FakeNVML(), []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("earlier"))
    try:
        with gpu_clock.pinned(0, 1500, nvml) as pin:
            signal.raise_signal(signal.SIGTERM)
            assert got == ["earlier"] and not pin.locked
            assert nvml.calls[-1] == ("unlock", "gpu0")
        signal.raise_signal(signal.SIGTERM)
        assert got == ["earlier", "earlier"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_sigterm_stays_ignored():
    nvml = FakeNVML()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with gpu_clock.pinned(0, 1500, nvml) as pin:
            signal.raise_signal(signal.SIGTERM)
            assert pin.locked
        assert nvml.calls == locked_at(1500)
    finally:
        signal.signal(signal.SIGTERM, before)


WAITS = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from test_gpu_clock import FakeNVML
from common import gpu_clock

class Told(FakeNVML):
    def _note(self, name, *args):
        print(name, flush=True)

with {block}:
    print("ready", flush=True)
    time.sleep(60)
"""
RIGHT = "gpu_clock.pinned(0, 1500, Told())"
WRONG = "__import__('test_gpu_clock').only_finally(Told())"


class only_finally:  # noqa: N801 - stands for a with-block
    """The usual version: a finally block, which SIGTERM does not run."""

    def __init__(self, nvml):
        self.nvml = nvml

    def __enter__(self):
        self.nvml.nvmlDeviceSetGpuLockedClocks("gpu0", 1500, 1500)

    def __exit__(self, *_):
        self.nvml.nvmlDeviceResetGpuLockedClocks("gpu0")


def end_by_sigterm(block):
    """Start a process in the block, end it, return what it told and how."""
    code = WAITS.format(
        tests=str(Path(__file__).parent), root=str(ROOT), block=block
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        told = []
        for line in process.stdout:
            told.append(line.strip())
            if told[-1] == "ready":
                process.terminate()
        process.wait(timeout=300)
    return told, process.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_sigterm_unlocks_and_ends_the_process():
    told, code = end_by_sigterm(RIGHT)
    assert told == ["init", "lock", "ready", "unlock"]
    assert code == -signal.SIGTERM


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_finally_block_alone_would_leave_it_locked():
    told, _ = end_by_sigterm(WRONG)
    assert told == ["lock", "ready"]


def test_state_is_empty_without_a_driver():
    error = NVMLError_LibraryNotFound()
    assert gpu_clock.state(0, FakeNVML("init", error)) == {}


def test_state_says_none_for_what_a_device_does_not_tell():
    class Some(FakeNVML):
        def nvmlSystemGetDriverVersion(self):
            return b"580.1"

        def nvmlDeviceGetEnforcedPowerLimit(self, handle):
            return 700_000

    found = gpu_clock.state(0, Some())
    assert found["driver"] == "580.1" and found["power_limit_w"] == 700
    assert found["clocks"]["graphics_mhz"] is None


@pytest.mark.gpu
def test_a_real_gpu_is_as_before():
    pynvml = pytest.importorskip("pynvml")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("needs an NVIDIA GPU")
    with gpu_clock.pinned() as pin:
        assert pin.locked or pin.reason.startswith("clock not locked")
    pynvml.nvmlInit()
    assert gpu_clock.state()["clocks"]["graphics_mhz"] > 0
