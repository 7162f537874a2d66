"""Loads that wait for each other: a loop in C, built by the system's compiler.

Python takes some 50 ns per step, ten times as long as an access it would
time.  A source is compiled once per machine, in the user's cache.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from common import bench, machine

SOURCE = Path(__file__).with_name("chain.c")


@functools.cache
def follow():
    """Return the C function (address, place, steps) -> place, built once.

    Raises:
        bench.Refusal: no compiler, or it fails.
    """
    function = library(SOURCE).follow
    function.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    function.restype = ctypes.c_int64
    return function


def library(source):
    """Return the functions of a C file, as ctypes loads them.

    It is compiled in a folder of its own and moved to the cache whole; a
    cache that others can write to is passed over.

    Raises:
        bench.Refusal: no compiler, or it fails.
    """
    posix = os.name == "posix"  # elsewhere a backslash is part of a path
    named = shlex.split(os.environ.get("CC", ""), posix=posix)
    tried, more = named[:1] or ["cc", "gcc", "clang"], named[1:]
    found = next(filter(None, map(shutil.which, tried)), None)
    if not found:
        raise bench.Refusal(f"no C compiler ({', '.join(tried)}) on the PATH")
    command = [found, *more, "-O3", "-shared", "-fPIC", str(source), "-o"]
    key = repr([command[:-2], platform.machine(), source.read_bytes()])
    key = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = machine.cache_dir() / "ops"
    suffix = ".dll" if os.name == "nt" else ".so"
    made = folder / f"{source.stem}-{key}{suffix}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = folder.is_dir() and machine.only_ours(folder)
    if not (ours and made.exists() and machine.only_ours(made)):
        made = built(command, made, folder if ours else None)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise bench.Refusal(f"the loop does not load: {error}") from None


def built(command, wanted, folder):
    """Compile beside ``wanted``, or without ``folder`` for this process."""
    try:
        scratch = tempfile.mkdtemp(prefix="build-", dir=folder)
    except OSError:  # a folder that cannot be written
        scratch, folder = tempfile.mkdtemp(prefix="chain-"), None
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    made = Path(scratch) / wanted.name
    try:
        done = subprocess.run(
            [*command, str(made)], cwd=scratch, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise bench.Refusal(f"the C compiler does not work: {error}") from None
    if done.returncode or not made.exists():
        words = done.stderr.decode(errors="replace").strip().split("\n")[0]
        raise bench.Refusal(f"{command[0]} cannot build the loop: {words:.60}")
    made.chmod(0o700)  # a umask may let a group write
    try:
        return made.replace(wanted) if folder else made
    except OSError:  # Windows, where another process has loaded the same
        return made
