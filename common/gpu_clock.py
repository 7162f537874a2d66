"""Hold a GPU at one clock while something is timed, and let it go again.

A GPU raises and lowers its clock with load, heat and power, by a factor of
two and more; two timings compare only at the same clock.  NVML can lock it,
which needs administrator's rights on most machines.  The lock outlives the
process, so it is undone on every way out that a process can see: the end of
the block, an exception, Ctrl-C and SIGTERM (not SIGKILL).

Source: NVML API reference, nvmlDeviceSetGpuLockedClocks.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass
class Pin:
    """What became of the request; ``reason`` says why not, or what."""

    locked: bool = False
    reason: str = ""
    graphics_mhz: int | None = None


def handle(nvml: ModuleType, device: int | torch.device = 0):
    """Return NVML's handle of a CUDA device.

    NVML numbers all GPUs of the machine, CUDA only the visible ones and in
    an order of its own: the UUID is what both agree on.
    """
    index = getattr(device, "index", device) or 0
    try:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
    except (RuntimeError, AssertionError, AttributeError):
        return nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(uuid)


def state(
    device: int | torch.device = 0, nvml: ModuleType | None = None
) -> dict:
    """Return {driver, clocks, power_limit_w}; empty without NVML.

    Clocks are in MHz, the limit in watts; what a device does not tell is
    None.
    """

    def ask(function, *args):
        try:
            return getattr(nvml, function)(*args)
        except Exception:  # this device does not tell
            return None

    try:
        nvml = nvml or _library()
        nvml.nvmlInit()
    except Exception:
        return {}
    try:
        gpu = handle(nvml, device)
        driver = ask("nvmlSystemGetDriverVersion")
        watts = ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
        clocks = {}
        for name, kind in (("graphics", 0), ("memory", 2)):
            now = ask("nvmlDeviceGetClockInfo", gpu, kind)
            clocks[f"{name}_mhz"] = now
            top = ask("nvmlDeviceGetMaxClockInfo", gpu, kind)
            clocks[f"max_{name}_mhz"] = top
        return {
            "driver": driver.decode() if hasattr(driver, "decode") else driver,
            "clocks": clocks,
            "power_limit_w": watts / 1000 if watts else None,
        }
    except Exception:
        return {}
    finally:
        ask("nvmlShutdown")


def _library() -> ModuleType:
    import pynvml

    return pynvml


@contextlib.contextmanager
def pinned(
    device: int | torch.device = 0,
    graphics_mhz: int | None = None,
    nvml: ModuleType | None = None,
) -> Iterator[Pin]:
    """Lock the graphics clock for the block, and always unlock it.

    Args:
        device: the CUDA device, by number.
        graphics_mhz: wanted clock; the highest supported one not above it is
            taken.  None takes three quarters of the highest, which a GPU
            holds without reaching its power limit.
        nvml: a module with NVML's functions; None is ``pynvml``.

    Yields:
        A ``Pin``; without a GPU, a driver or the right to do so
        ``.locked`` is False and ``.reason`` one sentence.  The block runs
        all the same.
    """
    pin = Pin()
    with contextlib.ExitStack() as undo:
        try:
            nvml = nvml or _library()
            nvml.nvmlInit()
            undo.callback(_quietly, nvml.nvmlShutdown)
            gpu = handle(nvml, device)
            mhz = _choose(nvml, gpu, graphics_mhz)

            def unlock():
                _quietly(nvml.nvmlDeviceResetGpuLockedClocks, gpu)
                pin.locked = False

            # the undoing first: a signal may fall between any two lines
            undo.enter_context(_before_sigterm(unlock))
            undo.callback(unlock)
            nvml.nvmlDeviceSetGpuLockedClocks(gpu, mhz, mhz)
            pin.locked, pin.graphics_mhz = True, mhz
            pin.reason = f"graphics clock locked at {mhz} MHz"
        except ImportError:
            pin.reason = "clock not locked: nvidia-ml-py is not installed"
        except Exception as error:  # NVML's errors are made at run time
            pin.reason = _sentence(error)
        yield pin


def _choose(nvml: ModuleType, gpu, wanted: int | None) -> int:
    """Return a supported graphics clock at the highest memory clock, MHz."""
    memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(gpu))
    clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(gpu, memory)
    if wanted is None:
        wanted = 0.75 * max(clocks)
    return max([c for c in clocks if c <= wanted] or [min(clocks)])


def _quietly(call, *args) -> None:
    with contextlib.suppress(Exception):  # nothing better to do on the way out
        call(*args)


def _sentence(error: Exception) -> str:
    kind = type(error).__name__.removeprefix("NVMLError_")
    known = {
        "NoPermission": "it needs administrator's rights (sudo)",
        "NotSupported": "this GPU does not let its clock be locked",
        "LibraryNotFound": "there is no NVIDIA driver on this machine",
        "DriverNotLoaded": "the NVIDIA driver is not loaded",
        "NotFound": "there is no such GPU",
        "InvalidArgument": "there is no such GPU or clock",
    }
    return f"clock not locked: {known.get(kind, f'NVML says {error}')}"


@contextlib.contextmanager
def _before_sigterm(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` when SIGTERM comes, then let it do what it did before.

    Only a main thread can set handlers; in another the block goes without.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before == signal.SIG_IGN:
        yield
        return
    # None: a handler of C code, which Python cannot put back
    before = before or signal.SIG_DFL

    def first(number, frame):
        undo()
        signal.signal(number, before)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
