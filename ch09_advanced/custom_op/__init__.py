"""Cross-entropy that overwrites the logits with their gradient.

The logits (N, V) of a language model are its largest activation: 206 MB for
1,024 tokens of GPT-2's vocabulary.  The composite keeps them, writes the
log-softmax beside them and the gradient beside both.  The C++ operator here
reads them once and leaves the gradient in the same bytes, so the backward
pass has nothing left to do.

``load`` builds the operator with the system's C++ compiler in a few seconds,
once per source, PyTorch and machine.
"""

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from common.bench import Refusal
from common.machine import cache_dir, only_ours

SOURCE = Path(__file__).with_name("cross_entropy.cpp")
INSTEAD = "or keep the composite loss, which needs none"
BUILD_LIMIT_S = 300  # a compiler that waits for something must not hang us

_loaded: Path | None = None


def load() -> Path:
    """Build the operator if it is not in the cache; register it once.

    Two processes that build at once do not disturb each other; a cache that
    cannot be written, or that others can write to, is replaced by a temporary
    folder, and a library that others may have written is built again.

    Returns:
        The library's file.

    Raises:
        Refusal: without a compiler, or when it fails; one sentence.
    """
    global _loaded
    if _loaded is None:
        commands = _commands(_compiler())
        library = _build(commands, _key(commands))
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise Refusal(
                f"{library} does not load ({_first_line(str(error))}); "
                f"delete it and try again, {INSTEAD}"
            ) from None
        _loaded = library
    return _loaded


def available(device: torch.device | str = "cpu") -> str | None:
    """Say why the operator cannot run on ``device``; None if it can.

    Builds it, because only that shows whether it can be built.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        return f"the in-place cross-entropy has no {kind} kernel, only a CPU's"
    try:
        load()
    except Refusal as refusal:
        return str(refusal)
    return None


def in_place_cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Read the logits once and write their gradient over them; give the loss.

    The same contract as ``common.gpt.summed_cross_entropy``, but for one
    thing: **the logits are consumed**, also without a backward pass.  The
    gradient of ``scale * sum`` is what lies there afterwards; the backward
    pass multiplies it by the gradient that arrives, and skips that pass over
    memory where it is 1.

    With float16 logits the gradient is rounded to float16 here, before a
    ``GradScaler`` could lift it: fold the scaler's factor into ``scale``.

    Args:
        logits: (N, V), contiguous, float32, bfloat16, float16 (computed in
            float32) or float64, on the CPU.
        targets: (N,), int64, -100 where not counted.
        scale: 0-dim float tensor; no gradient flows into it.

    Returns:
        0-dim tensor, float32 (float64 for float64 logits).

    Raises:
        Refusal: no compiler, or the logits are not on the CPU.
        TypeError, ValueError: wrong dtype or shape.
        RuntimeError: a target outside [0, V) that is not -100.
    """
    _check(logits, targets, scale)
    return _InPlace.apply(logits, targets, scale)


class _InPlace(torch.autograd.Function):
    """Keep the overwritten logits: they are the gradient."""

    @staticmethod
    def forward(ctx, logits, targets, scale):
        loss = _cross_entropy(logits, targets, scale)
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx, by):
        (gradient,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # A branch would break the graph; inductor multiplies in place.
            return gradient * by, None, None
        # On a CPU the comparison reads one number and waits for nobody.  A
        # second backward pass over a changed gradient raises: mul_ counts as
        # a modification of what was saved.
        if not _is_fake(by) and by != 1:
            gradient.mul_(by)
        return gradient.detach(), None, None


@torch.library.custom_op(
    "ch09::cross_entropy_", mutates_args=("logits",), device_types="cpu"
)
def _cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor | None
) -> Tensor:
    """Call the C++ kernel, built by the first call."""
    load()
    return torch.ops.ch09_cpu.cross_entropy_(logits, targets, scale)


@_cross_entropy.register_fake
def _(logits, targets, scale):
    wide = logits.dtype == torch.float64
    return logits.new_empty((), dtype=logits.dtype if wide else torch.float32)


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check(logits: Tensor, targets: Tensor, scale: Tensor | None) -> None:
    if logits.device.type != "cpu":
        raise Refusal(
            f"the in-place cross-entropy has no {logits.device.type} kernel, "
            "only a CPU's; keep the composite loss on this device"
        )
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits are {logits.dtype}, not floating point")
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(
            "logits must be a contiguous (N, V) tensor: a copy would take "
            f"the memory this saves; got shape {tuple(logits.shape)}, "
            f"strides {logits.stride()}"
        )
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are {targets.dtype}, not torch.int64")
    if targets.shape != logits.shape[:1]:
        raise ValueError(
            f"targets must be (N,) = ({logits.shape[0]},); got "
            f"{tuple(targets.shape)}"
        )
    if scale is not None and scale.dim() != 0:
        raise ValueError(f"scale must be 0-dim; got {tuple(scale.shape)}")


# ---- building ------------------------------------------------------------


def _compiler() -> list[str]:
    """Find the C++ compiler: ``CXX`` if set, or the system's."""
    named = os.environ.get("CXX", "").split()
    if named:
        found = shutil.which(named[0])
        if not found:
            raise Refusal(
                f"CXX={named[0]} is not a program, so the C++ operator "
                f"cannot be built; set CXX to a C++20 compiler, {INSTEAD}"
            )
        return [found, *named[1:]]
    names = ("cl",) if os.name == "nt" else ("c++", "g++", "clang++")
    for name in names:
        if found := shutil.which(name):
            return [found]
    where = " (in a Developer Command Prompt)" if os.name == "nt" else ""
    raise Refusal(
        f"no C++ compiler found{where}: install g++ or clang++, or set CXX, "
        f"{INSTEAD}"
    )


def _commands(compiler: list[str]) -> list[list[str]]:
    """Return the compile commands to try in order, without the output."""
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    if Path(compiler[0]).stem.lower() in ("cl", "clang-cl"):
        flags = ["/nologo", "/std:c++20", "/O2", "/EHsc", "/LD", "/MD"]
        link = ["/link", f"/LIBPATH:{lib}", "torch_cpu.lib", "c10.lib"]
        base = [*compiler, *flags, f"/I{include}", str(SOURCE)]
        return [[*base, "/arch:AVX2", *link], [*base, *link]]
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared"]
    # without it g++ may not compute both sides of a choice, as vectors do
    flags += ["-fno-trapping-math"]
    link = (
        ["-undefined", "dynamic_lookup"]
        if sys.platform == "darwin"
        else [f"-L{lib}", "-ltorch_cpu", "-lc10"]
    )
    base = [*compiler, *flags, f"-I{include}", str(SOURCE), *link]
    return [[*base, "-march=native"], base]


def _key(commands: list[list[str]]) -> str:
    """Hash what the library depends on.

    A home folder can be shared by machines, and code made for one's
    instructions (``-march=native``) kills the process on another.
    """
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = [s for s in info.splitlines() if s.startswith("flags")][:1]
    except OSError:
        cpu = [platform.processor()]
    parts = [SOURCE.read_bytes(), torch.__version__, platform.machine()]
    parts += [*cpu, sys.platform, commands]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _build(commands: list[list[str]], key: str) -> Path:
    """Return the library, compiled beside its place and moved there."""
    suffix = ".pyd" if os.name == "nt" else ".so"
    folder = cache_dir() / "ops"
    library = folder / f"cross_entropy-{key}{suffix}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_ours(folder):
            raise PermissionError(f"others can write to {folder}")
        if only_ours(library) and library.exists():
            return library
        scratch = tempfile.mkdtemp(prefix="build-", dir=folder)
    except OSError:  # a home that cannot be written: build for this process
        scratch = tempfile.mkdtemp(prefix="cross_entropy-")
        library = Path(scratch) / library.name
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    try:
        made = _compile(commands, Path(scratch), suffix)
        made.chmod(0o700)  # a umask may let a group write
        try:
            os.replace(made, library)
        except OSError:  # Windows: another process has loaded the same
            if not library.exists():
                raise
    except OSError as error:
        raise Refusal(
            f"the C++ operator cannot be built in {scratch} "
            f"({error.strerror}); set BENCH_CACHE to another folder, {INSTEAD}"
        ) from None
    finally:
        if library.parent != Path(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
    return library


def _compile(commands: list[list[str]], folder: Path, suffix: str) -> Path:
    made = folder / f"made{suffix}"
    for command in commands:
        msvc = "/LD" in command
        output = [f"/Fe{made}"] if msvc else ["-o", str(made)]
        at = command.index("/link") if msvc else len(command)
        command = [*command[:at], *output, *command[at:]]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=BUILD_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise Refusal(
                f"{command[0]} did not end in {BUILD_LIMIT_S} s while "
                f"building the C++ operator; set CXX to another, {INSTEAD}"
            ) from None
        if done.returncode == 0 and made.exists():
            return made
    said = _first_line(done.stderr + done.stdout)
    raise Refusal(
        f"{command[0]} cannot build the C++ operator ({said}); set CXX to a "
        f"C++20 compiler, {INSTEAD}"
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[0][:200]
