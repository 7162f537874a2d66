"""Start the processes of a parallel job, and let them find each other.

A rank is one process with its own memory; what it shares it must send.  The
ranks of one machine need no network: here they meet through a file and talk
over the loopback interface, so that nothing can be reached from outside.
Under ``torchrun`` ``init`` takes what torchrun provides, so that a script is
written once: ``rank = ranks.init(args.device)`` ... ``ranks.finish()``.

Source: ``torch.distributed`` (FileStore, gloo, NCCL) and ``torchrun``.
"""

import atexit
import contextlib
import functools
import importlib
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import socket

import torch
import torch.distributed as dist

from common.bench import Refusal

LOOPBACK = {"darwin": "lo0", "win32": "Loopback Pseudo-Interface 1"}.get(
    sys.platform, "lo"
)


# ---- inside a rank -------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """One process of ``world``; ``local_rank`` counts within its host."""

    rank: int
    world: int
    local_rank: int
    device: torch.device


def init(device: str | torch.device = "cpu", timeout_s: float = 300) -> Rank:
    """Join the other ranks, if this process was started as one of several.

    Calling it again is harmless.  Without ``RANK`` in the environment the
    process is alone and no process group is made.

    Args:
        device: ``cpu`` talks over gloo, ``cuda`` over NCCL, one GPU per rank.
        timeout_s: how long a collective waits for a rank that is late.

    Returns:
        Who this process is; ``device`` is this rank's own.

    Raises:
        Refusal: fewer GPUs than ranks, or a device that cannot communicate.
        RuntimeError: another rank did not join in time.
    """
    device, backend = torch.device(device), "gloo"
    if "RANK" not in os.environ:
        return Rank(0, 1, 0, device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise Refusal(
                f"rank {rank} needs a GPU of its own and this machine has "
                f"{torch.cuda.device_count()}: start fewer ranks or use "
                "--device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if dist.is_nccl_available():  # objects and checkpoints go by gloo
            backend = "cpu:gloo,cuda:nccl"
    elif device.type != "cpu":
        raise Refusal(
            f"ranks cannot exchange {device.type} tensors: use --device cpu"
        )
    if not dist.is_initialized():
        end_with_launcher()
        _prefer_loopback()
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                backend,
                timeout=timeout,
                store=_store(rank, world, timeout, next(_times_joined)),
                rank=rank,
                world_size=world,
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            if re.search("time(d )?out", str(error), re.IGNORECASE) is None:
                raise
            raise RuntimeError(  # the late one says nothing: it is not there
                f"rank {rank} waited {timeout_s:g} s for all {world} ranks "
                "to join, and one of them did not come"
            ) from None
    return Rank(rank, world, local_rank, device)


def _store(rank: int, world: int, timeout: timedelta, time: int) -> dist.Store:
    """Return where ranks leave each other their addresses.

    Another for each ``time`` of joining: the addresses of the time before
    are still in the old one, and nobody answers there.
    """
    if "RANKS_STORE" in os.environ:
        store = dist.FileStore(f"{os.environ['RANKS_STORE']}.{time}", world)
        store.set_timeout(timeout)
        return store
    store = next(dist.rendezvous("env://", rank, world, timeout=timeout))[0]
    return dist.PrefixStore(f"joined {time}", store)


_times_joined = itertools.count()


def finish() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _prefer_loopback() -> None:
    """Let gloo and NCCL listen on loopback when one host is all there is."""
    env = os.environ
    master = env.get("MASTER_ADDR", "")
    one_host = "RANKS_STORE" in env or env.get("GROUP_WORLD_SIZE") == "1"
    if one_host or master == "localhost" or master.startswith("127."):
        env.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        env.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    if sys.platform == "win32":
        env.setdefault("USE_LIBUV", "0")  # not in torch's Windows builds


@functools.cache  # one watching thread is enough
def end_with_launcher() -> None:
    """End this rank when the process that launched it is gone.

    By polling, since no signal tells a child so on every system; by pid too,
    since under torchrun the parent is another process.
    """
    launcher, parent = os.environ.get("RANKS_LAUNCHER"), os.getppid()

    def watch():
        while os.getppid() == parent and alive(int(launcher)):
            time.sleep(0.5)
        os._exit(1)

    if launcher is not None:
        threading.Thread(target=watch, daemon=True).start()


def alive(pid: int) -> bool:
    """Say whether a process still runs (a zombie does not); yes if unsure."""
    try:
        import psutil

        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except ImportError:
        return True
    except psutil.Error as error:
        return not isinstance(error, psutil.NoSuchProcess)


# ---- starting and ending processes ---------------------------------------


class Process(subprocess.Popen):
    """A started rank or agent; the last lines of its stderr are remembered.

    What it prints is passed on as it comes, through ``sys.stdout`` and
    ``sys.stderr`` of this process, so that notebooks show it too.
    """

    def __init__(self, command, name, env, folder, stdout=None):
        """Start ``command``; ``folder`` is removed at its end."""
        self.name, self.folder = name, folder
        self.tail, self.failed_at = deque(maxlen=100), float("inf")
        super().__init__(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            start_new_session=os.name == "posix",  # a group, to end as one
        )
        atexit.register(self.end)
        self._readers = [
            threading.Thread(target=self._pass_on, args=(name,), daemon=True)
            for name in ("stderr", "stdout")[: 2 if stdout is None else 1]
        ]
        for reader in self._readers:
            reader.start()

    def _pass_on(self, name: str) -> None:
        for line in getattr(self, name):
            text = line.decode("utf-8", "replace")
            if name == "stderr":
                self.tail.append(text.rstrip())
                if "Traceback (most recent" in text:
                    self.failed_at = min(self.failed_at, time.monotonic())
            with contextlib.suppress(ValueError, OSError):  # closed by now
                stream = getattr(sys, name)
                stream.write(text)
                stream.flush()

    def end(self) -> None:
        """Kill it with all it started; once only, since pids are reused."""
        if self.folder is None:
            return
        atexit.unregister(self.end)
        family = [self]
        with contextlib.suppress(Exception):  # no psutil, or it has ended
            import psutil

            family += psutil.Process(self.pid).children(recursive=True)
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(Exception):
                process.kill()
        self.wait()
        for reader in self._readers:
            reader.join(timeout=2)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None

    def reason(self) -> Exception:
        """Say why it failed: its own refusal, or its last lines."""
        lines = [line for line in self.tail if line.strip()]
        if self.returncode == 2 and self.failed_at == float("inf") and lines:
            return Refusal(re.sub(r"^[\w.]+: ", "", lines[-1]))
        how = f"failed with exit code {self.returncode}"
        if self.returncode < 0:
            how = f"was killed by {signal.Signals(-self.returncode).name}"
        text = "\n".join(lines) or "(it wrote nothing to stderr)"
        return RuntimeError(f"{self.name} {how}; its last lines:\n{text}")

    def blame(self) -> tuple[bool, float]:
        """Sort key: a rank that fails tears the connections of the others."""
        torn = re.compile("closed by peer|reset by peer|[Bb]roken pipe")
        return any(map(torn.search, self.tail)), self.failed_at


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.end()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit meanwhile, so that ``finally`` runs."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


OF_A_RANK = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    "|RANKS_.*|TORCHELASTIC_.*"
)


def _environment(threads: int, interface: str, *more: Mapping | None) -> dict:
    """Return this process's environment, fitted for a child.

    A child imports what this process can import, talks over ``interface``,
    and does not take this process's place in a job it may belong to.
    """
    env = {k: v for k, v in os.environ.items() if not OF_A_RANK.fullmatch(k)}
    folders = env.get("PYTHONPATH", "").split(os.pathsep)
    folders += [path or os.getcwd() for path in sys.path]
    env |= {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(folders))),
        "PYTHONUNBUFFERED": 1,
        "PYTHONUTF8": 1,
        "RANKS_LAUNCHER": os.getpid(),
    }
    if sys.platform == "win32":
        env["USE_LIBUV"] = 0
    for some in more:
        env |= some or {}
    return {k: str(v) for k, v in env.items()}


def free_port() -> int:
    """Return a TCP port that was free on the loopback interface just now."""
    with socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(
    module: str,
    argv: Sequence[str] = (),
    world: int = 2,
    *,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    stdout=None,
) -> list[Process]:
    """Start ``world`` local processes ``python -m module argv...``.

    They meet through a file in a private folder and talk over loopback: no
    port is opened to the network, and several launches can run at once.
    One process alone is no rank: ``init`` then joins nothing.
    Follow with ``wait``; what still runs when this process ends is ended.

    Args:
        module: dotted name; it calls ``init()``.
        argv: its arguments.
        world: number of ranks.
        threads: OpenMP threads of each rank.
        env: more environment variables.
        stdout: as for ``subprocess.Popen``; None passes it on to ours.
    """
    folder = tempfile.mkdtemp(prefix="ranks-")
    command = [sys.executable, "-m", module, *map(str, argv)]
    processes = []
    try:
        for rank in range(world):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "RANKS_STORE": os.path.join(folder, "store"),
            }
            if world == 1:  # then there is nobody to meet
                place = {}
            child = _environment(threads, LOOPBACK, place, env)
            processes.append(
                Process(command, f"rank {rank}", child, folder, stdout)
            )
    except BaseException:
        _end(processes)
        raise
    return processes


def wait(processes: Sequence[Process], timeout_s: float | None = None) -> None:
    """Wait until all have ended; the first that fails ends the others.

    Raises:
        Refusal: a rank refused its input in a sentence (exit code 2).
        RuntimeError: a rank failed; with its last lines of stderr.
        TimeoutError: after ``timeout_s`` seconds; all have been ended.
    """
    stop = time.monotonic() + (timeout_s or float("inf"))
    with _sigterm_raises():
        try:
            while any(p.poll() is None for p in processes):
                if any(p.poll() for p in processes):
                    time.sleep(0.3)  # for its last words to arrive
                    break
                if time.monotonic() > stop:
                    late = [p.name for p in processes if p.poll() is None]
                    raise TimeoutError(
                        f"{', '.join(late)} still running after "
                        f"{timeout_s:g} s, now ended"
                    )
                time.sleep(0.01)
            failed = [p for p in processes if p.poll()]
        finally:
            _end(processes)
    if failed:
        raise min(failed, key=Process.blame).reason()


def spawn(
    function: Callable,
    world: int = 2,
    *args,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list:
    """Call ``function(*args)`` in ``world`` processes, return their results.

    The function calls ``init()`` itself.  Arguments and results are pickled
    through a folder that only this user can read.

    Args:
        function: importable, at the top of a module (not a notebook cell).
        world: number of ranks.
        *args: handed to each call.
        threads: OpenMP threads of each rank.
        env: more environment variables.
        timeout_s: as for ``wait``.

    Returns:
        The results in the order of the ranks.

    Raises:
        ValueError: the function cannot be imported by another process.
        RuntimeError: a rank failed; see ``wait``.
    """
    module = function.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec else ""
    if not module or not function.__qualname__.isidentifier():
        raise ValueError(
            f"{function.__qualname__} must stand at the top of a module that "
            "other processes can import (start a script as python -m NAME)"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        job = Path(name, "job")
        job.write_bytes(pickle.dumps((module, function.__qualname__, args)))
        options = {"threads": threads, "env": env}
        wait(launch("common.ranks", [name], world, **options), timeout_s)
        results = [Path(name, str(rank)) for rank in range(world)]
        return [pickle.loads(result.read_bytes()) for result in results]


def _run_job(folder: Path) -> None:
    """Be one rank of ``spawn``."""
    end_with_launcher()
    module, name, args = pickle.loads((folder / "job").read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(result))
    finish()


# ---- two hosts, or what stands for them ----------------------------------

ADDRESSES = "10.77.0.1", "10.77.0.2"  # seen only inside a pair of namespaces
NAMESPACE = re.compile(r"rank(\d+)[a-z]\d+")  # pid, side, serial number
_serial = itertools.count()


def torchrun(
    module: str, argv: Sequence[str], per_host: int, *meet: str
) -> list[str]:
    """Return the command of one of two agents; ``meet``: how they meet."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += [*meet, f"--nproc-per-node={per_host}", "-m", module]
    return command + [str(a) for a in argv]


def at_address(node: int, address: str, port: int) -> list[str]:
    """Return torchrun's flags for hosts that know the first one's address.

    The first agent's store then listens on *every* interface of its host.
    """
    where = [f"--master-addr={address}", f"--master-port={port}"]
    return [f"--node-rank={node}", *where]


def in_folder(folder: str) -> list[str]:
    """Return torchrun's flags for agents that meet through a file."""
    return [
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={os.path.join(folder, 'agents')}",
        f"--rdzv-id={os.path.basename(folder)}",
        "--local-addr=127.0.0.1",
    ]


@contextlib.contextmanager
def hosts(
    module: str,
    argv: Sequence[str] = (),
    *,
    world_per_host: int = 1,
    netns: bool = False,
    rate: str | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    stdout=None,
) -> Iterator[list[Process]]:
    """Start two torchrun agents as if on two hosts; yield them for ``wait``.

    On loopback agents and ranks meet through files, since torchrun's own
    store would listen on every interface.  With ``netns`` each agent has a
    network namespace of its own, joined by a virtual cable, and they meet
    as real hosts do.  Agents and namespaces are gone when the block ends.

    Args:
        module: dotted name; it calls ``init()``.
        argv: its arguments.
        world_per_host: ranks of each agent.
        netns: two network namespaces instead of loopback (Linux, root).
        rate: the cable's bandwidth as ``tc`` spells it, such as "100mbit".
        threads: OpenMP threads of each rank.
        env: more environment variables.
        stdout: as for ``launch``.

    Raises:
        Refusal: no namespaces here, or a rate that cannot be set.
    """
    if rate and not netns:
        raise Refusal(f"a rate ({rate}) needs network namespaces: --netns")
    processes: list[Process] = []
    with _sigterm_raises(), contextlib.ExitStack() as stack:
        names = stack.enter_context(_namespaces(rate)) if netns else []
        stack.callback(_end, processes)  # before the namespaces go
        folder = tempfile.mkdtemp(prefix="ranks-")
        more = {
            "RANKS_STORE": os.path.join(folder, "ranks"),
            # else torchrun opens a port for its workers all the same
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
        }
        if netns:  # there are no names in there, and torch warns of that
            more = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        for node in range(2):
            meet, inside, interface = in_folder(folder), [], LOOPBACK
            if netns:
                meet = at_address(node, ADDRESSES[0], 29500)
                interface = names[node]
                inside = ["ip", "netns", "exec", interface]
            child = _environment(threads, interface, more, env)
            meet += [f"--log-dir={folder}"]  # torchrun leaves folders behind
            command = inside + torchrun(module, argv, world_per_host, *meet)
            processes.append(
                Process(command, f"host {node}", child, folder, stdout)
            )
        yield processes


def can_netns() -> str | None:
    """Return why network namespaces cannot be made here, None if they can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root: start it with sudo"
    if shutil.which("ip") is None:
        return "network namespaces need `ip`: install the package iproute2"
    probe = f"rank{os.getpid()}p{next(_serial)}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except Refusal as refusal:
        return str(refusal)
    return None


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise Refusal(f"`ip {' '.join(words)}` failed: {why}")
    return done.stdout


@contextlib.contextmanager
def _namespaces(rate: str | None) -> Iterator[list[str]]:
    """Join two network namespaces by a veth pair, each named like its end.

    The pair's addresses can be the same every time: nobody else sees them.
    """
    reason = can_netns()
    if reason:
        raise Refusal(f"{reason}; without --netns two agents use loopback")
    if rate and shutil.which("tc") is None:
        raise Refusal("a rate needs `tc`: install the package iproute2")
    for name in _ip("netns", "list").split():
        match = NAMESPACE.fullmatch(name)
        if match and not alive(int(match[1])):
            _remove(name)  # its maker was killed
    number = next(_serial)
    a, b = names = [f"rank{os.getpid()}{side}{number}" for side in "ab"]
    try:
        _ip("netns", "add", a)
        _ip("netns", "add", b)
        cable = f"link add {a} type veth peer name {b} netns {b}"
        _ip("-n", a, *cable.split())
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate:
                shape = f"tbf rate {rate} burst 256kb latency 50ms"
                qdisc = f"tc qdisc add dev {name} root {shape}"
                _ip("netns", "exec", name, *qdisc.split())
        yield names
    finally:
        for name in names:
            _remove(name)


def _remove(name: str) -> None:
    """End what still runs in a namespace of ours, and delete it."""
    with contextlib.suppress(Refusal):  # it was not made yet
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


if __name__ == "__main__":
    from common import bench, ranks  # the copy of this file that jobs see

    bench.run(lambda: ranks._run_job(Path(sys.argv[1])))
