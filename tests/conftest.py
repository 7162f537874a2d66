"""What holds for every test: no network, one thread, nobody's caches."""

import inspect
import os
import signal
import sys
import tempfile
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import offline  # noqa: E402

# before torch is imported, and for the processes that tests start
for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
    del os.environ[name]
for name in ("BENCH_SMOKE", "BENCH_RESULTS", "RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
# a shell that starts us in the background has Ctrl-C ignored, which the
# processes that tests start, and interrupt, would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
CACHE = tempfile.TemporaryDirectory(prefix="bench-cache-")
os.environ |= {
    "OMP_NUM_THREADS": "1",  # timings are not asserted, neighbours are spared
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "KINETO_LOG_LEVEL": "99",
    "PYTHONIOENCODING": "utf-8",
    "BENCH_CACHE": CACHE.name,
    "PYTHONPATH": os.pathsep.join(
        p
        for p in (
            str(HERE / "children"),
            str(ROOT),
            os.environ.get("PYTHONPATH"),
        )
        if p
    ),
}
offline.block()

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture
def pasted():
    """Return a function that runs a technique's source under torch only.

    What it returns is what a reader gets who pastes the technique into an
    empty file below ``import torch``.
    """

    def paste(function):
        module = types.ModuleType("pasted")
        module.torch = torch
        source = inspect.getsource(function)
        exec(compile(source, function.__name__, "exec"), module.__dict__)
        return getattr(module, function.__name__)

    return paste


def pytest_runtest_setup(item):
    """Skip, with the reason, what this machine cannot run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")
    if item.get_closest_marker("ranks"):
        if not torch.distributed.is_available():
            pytest.skip("this torch has no torch.distributed")
    if item.get_closest_marker("root"):
        from common import ranks

        if reason := ranks.can_netns():
            pytest.skip(reason)


def pytest_report_header(config):
    """Name the machine on top of the report."""
    from common import machine

    return f"machine: {machine.line()}"
