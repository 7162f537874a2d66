"""Ranks find each other, end each other, and are heard by nobody else."""

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import rank_jobs
import torch

from common import ranks
from common.bench import Refusal

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    """Be no rank of whatever job runs these tests."""
    for name in list(os.environ):
        if ranks.OF_A_RANK.fullmatch(name):
            monkeypatch.delenv(name)


def private_network() -> list[str]:
    """Return a prefix that runs a command where only loopback exists."""
    probe = ["unshare", "--map-root-user", "--net"]
    if shutil.which(probe[0]) is None or subprocess.call([*probe, "true"]):
        return []
    script = 'ip link set lo up && exec "$@"'
    return [*probe, "sh", "-c", script, "sh"]


def listened_on(processes) -> set[str]:
    """Collect the addresses that the processes listen on while they run."""
    seen = set()
    while any(p.poll() is None for p in processes):
        for p in psutil.Process().children(recursive=True):
            try:
                sockets = p.net_connections("tcp")
            except psutil.Error:
                continue
            seen |= {
                s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN
            }
        time.sleep(0.05)
    return seen


def beyond_loopback(addresses: set[str]) -> set[str]:
    """Return the addresses that other machines may reach."""
    return {a for a in addresses if not ipaddress.ip_address(a).is_loopback}


def await_file(path: Path, timeout_s: float = 300) -> str:
    """Wait until another process has written a file."""
    stop = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < stop, f"{path} does not come"
        time.sleep(0.02)
    return path.read_text()


def assert_gone(pids: list[int]) -> None:
    """Wait a moment for processes to be gone; zombies are."""
    stop = time.monotonic() + 10
    while left := [p for p in pids if ranks.alive(p)]:
        assert time.monotonic() < stop, f"{left} still run"
        time.sleep(0.02)


def answers(folder: Path, world: int) -> list[dict]:
    """Read what the ranks of ``rank_jobs.summed`` left."""
    files = [folder / f"{rank}.json" for rank in range(world)]
    found = [json.loads(file.read_text()) for file in files]
    assert [a["rank"] for a in found] == list(range(world))
    assert all(a["world"] == world for a in found)
    assert all(a["sum"] == [world * (world + 1) / 2] for a in found)
    return found


# ---- launch, wait, spawn -------------------------------------------------


def test_alone_there_is_no_group():
    assert ranks.init() == ranks.Rank(0, 1, 0, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    ranks.finish()


@pytest.mark.ranks
def test_two_launches_at_once_sum_and_listen_on_loopback_only(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    jobs = []
    for folder in (first, second):
        folder.mkdir()
        jobs.append(ranks.launch("rank_jobs", ["summed", folder]))
    addresses = listened_on(jobs[0] + jobs[1])
    for job in jobs:
        ranks.wait(job, 300)
    for folder in (first, second):
        found = answers(folder, 2)
        assert [a["local_rank"] for a in found] == [0, 1]
        assert {a["threads"] for a in found} == {1}
    assert addresses, "gloo listens, so the check must have seen it"
    assert not beyond_loopback(addresses)


def test_the_listening_check_knows_every_interface():
    seen = {"127.0.0.1", "::1", "0.0.0.0", "::", "10.0.0.2"}
    assert beyond_loopback(seen) == {"0.0.0.0", "::", "10.0.0.2"}


@pytest.mark.ranks
def test_unequal_counts_need_the_global_number_of_tokens():
    results = ranks.spawn(rank_jobs.unequal_counts, 2, [6, 2])
    assert [result[0] for result in results] == [0, 1]
    for _, scaled, plain in results:
        assert scaled <= 1e-6
        assert plain > 1e-4, "the plain average of means must be caught"


def test_spawn_wants_a_function_that_others_can_import(monkeypatch):
    with pytest.raises(ValueError, match="top of a module"):
        ranks.spawn(lambda: 1)
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    cell = types.FunctionType((lambda: 1).__code__, {"__name__": "__main__"})
    cell.__qualname__ = "cell"
    with pytest.raises(ValueError, match="cell must stand"):
        ranks.spawn(cell)


@pytest.mark.ranks
def test_output_passes_through_this_process(capsys):
    ranks.wait(ranks.launch("rank_jobs", ["say", "平行"], 2), 300)
    assert capsys.readouterr().out.split() == ["平行", "平行"]
    piped = ranks.launch("rank_jobs", ["say", "x"], 1, stdout=-1)
    assert piped[0].stdout.read().split() == [b"x"]
    ranks.wait(piped)


@pytest.mark.ranks
def test_torchrun_starts_the_same_module(tmp_path):
    command = [
        *private_network(),  # torchrun's store listens on every interface
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=2", "-m", "rank_jobs", "summed", str(tmp_path)),
    ]
    env = ranks._environment(1, "lo")
    env.pop("GLOO_SOCKET_IFNAME")  # init finds it
    subprocess.run(command, env=env, check=True, timeout=120)
    answers(tmp_path, 2)


def test_a_child_is_not_taken_for_its_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("RANKS_STORE", "elsewhere")
    monkeypatch.setenv("RANKING", "kept")
    monkeypatch.setenv("PYTHONPATH", "first")
    child = ranks._environment(2, "lo", {"A": 1}, {"A": "2"})
    assert not {"RANK", "MASTER_ADDR", "RANKS_STORE"} & set(child)
    assert child["RANKING"] == "kept" and child["A"] == "2"
    assert child["OMP_NUM_THREADS"] == "2"
    folders = child["PYTHONPATH"].split(os.pathsep)
    assert folders[0] == "first" and set(filter(None, sys.path)) < set(folders)


def test_devices_that_cannot_be_used_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "99")
    monkeypatch.setenv("WORLD_SIZE", "100")
    with pytest.raises(Refusal, match="needs a GPU of its own"):
        ranks.init("cuda")
    with pytest.raises(Refusal, match="cannot exchange mps"):
        ranks.init("mps")


# ---- how it ends ---------------------------------------------------------


@posix
@pytest.mark.ranks
@pytest.mark.parametrize(
    "how, error, message",
    [
        ("raise", RuntimeError, "rank 1 failed with exit code 1.*is full"),
        ("exit", RuntimeError, "rank 1 failed with exit code 7.*last words"),
        ("kill", RuntimeError, "rank 1 was killed by SIGKILL.*last words"),
        ("refuse", Refusal, "^last words before refuse$"),
    ],
)
def test_a_dead_rank_ends_the_others(how, error, message, tmp_path):
    with pytest.raises(error, match=f"(?s){message}"):
        ranks.wait(ranks.launch("rank_jobs", ["fail", how, tmp_path]), 300)
    assert_gone([int(pid) for pid in (tmp_path / "0").read_text().split()])


@pytest.mark.ranks
def test_the_rank_that_failed_is_named_not_its_victim():
    with pytest.raises(RuntimeError, match="^rank 1.*") as error:
        ranks.wait(ranks.launch("rank_jobs", ["broken_peer"]), 300)
    assert "data of rank 1 are broken" in str(error.value)


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_said():
    said = "rank 0 waited 1 s for all 2 ranks to join"
    with pytest.raises(RuntimeError, match=said):
        ranks.wait(ranks.launch("rank_jobs", ["join_alone"]), 300)


@posix
@pytest.mark.ranks
def test_late_ranks_are_ended(tmp_path):
    with pytest.raises(TimeoutError, match="rank 0 still running after 0.5"):
        ranks.wait(ranks.launch("rank_jobs", ["sleep", tmp_path], 1), 0.5)


@posix
@pytest.mark.ranks
@pytest.mark.parametrize(
    "number, error",
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_to_the_launcher_ends_the_ranks(number, error, tmp_path):
    before = signal.getsignal(number)
    jobs = ranks.launch("rank_jobs", ["sleep", tmp_path])
    folder = jobs[0].folder

    def interrupt():
        for rank in "01":
            await_file(tmp_path / rank)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    with pytest.raises(error):
        ranks.wait(jobs)
    assert signal.getsignal(number) == before
    assert not Path(folder).exists()
    for rank in "01":
        assert_gone([int(p) for p in (tmp_path / rank).read_text().split()])


@posix
@pytest.mark.ranks
def test_a_rank_does_not_outlive_a_killed_launcher(tmp_path):
    command = [sys.executable, "-m", "rank_jobs", "abandon", str(tmp_path)]
    launcher = subprocess.Popen(command, env=ranks._environment(1, "lo"))
    await_file(tmp_path / "joined")
    launcher.kill()
    launcher.wait()
    assert_gone([int((tmp_path / "rank").read_text())])


# ---- two hosts -----------------------------------------------------------


@pytest.mark.ranks
def test_two_agents_on_loopback(tmp_path):
    with ranks.hosts("rank_jobs", ["summed", tmp_path]) as agents:
        addresses = listened_on(agents)
        ranks.wait(agents, 120)
    assert [a["local_rank"] for a in answers(tmp_path, 2)] == [0, 0]
    assert addresses and not beyond_loopback(addresses)


def test_without_namespaces_a_sentence(monkeypatch):
    with pytest.raises(Refusal, match="needs network namespaces"):
        with ranks.hosts("rank_jobs", rate="1gbit"):
            pass
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Refusal, match="exist on Linux only; without --netns"):
        with ranks.hosts("rank_jobs", netns=True):
            pass


def namespaces() -> list[str]:
    """List this machine's network namespaces of ours."""
    listed = ranks._ip("netns", "list").split()
    return [name for name in listed if ranks.NAMESPACE.fullmatch(name)]


@pytest.mark.root
class TestNamespaces:
    @pytest.mark.ranks
    def test_ranks_talk_through_the_cable(self, tmp_path):
        job = ["summed", tmp_path]
        with ranks.hosts("rank_jobs", job, netns=True) as agents:
            mine = [n for n in namespaces() if str(os.getpid()) in n]
            assert len(mine) == 2
            ranks.wait(agents, 120)
        found = answers(tmp_path, 2)
        assert all(a["received"] > 4 * rank_jobs.ELEMENTS for a in found)
        assert not set(mine) & set(namespaces())

    def test_stale_ones_are_swept_and_living_ones_stay(self):
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        stale, alive = f"rank{dead.pid}a7", f"rank{os.getppid()}a7"
        for name in (stale, alive):
            ranks._ip("netns", "add", name)
        try:
            left = subprocess.Popen(
                ["ip", "netns", "exec", stale, "sleep", "600"]
            )
            while str(left.pid) not in ranks._ip("netns", "pids", stale):
                time.sleep(0.01)
            with pytest.raises(KeyError), ranks._namespaces(None) as names:
                assert stale not in namespaces()
                assert {alive, *names} <= set(namespaces())
                assert left.wait(10) == -signal.SIGKILL
                raise KeyError
            assert not set(names) & set(namespaces())
            assert alive in namespaces()
        finally:
            ranks._remove(stale)
            ranks._remove(alive)

    def test_two_pairs_at_once_do_not_meet(self):
        serve = (
            "import socket, sys; s = socket.create_server(('10.77.0.1', 5));"
            "print(flush=True); s.accept()[0].sendall(sys.argv[1].encode())"
        )
        ask = (
            "import socket; s = socket.create_connection(('10.77.0.1', 5));"
            "print(s.recv(99).decode())"
        )

        def start(name, *words):
            inside = ["ip", "netns", "exec", name]
            alone = [sys.executable, "-I", "-c", *words]  # no network block
            return subprocess.Popen(
                [*inside, *alone], stdout=subprocess.PIPE, text=True
            )

        with ranks._namespaces(None) as one, ranks._namespaces(None) as two:
            servers = [start(pair[0], serve, pair[0]) for pair in (one, two)]
            for server in servers:
                server.stdout.readline()
            for pair in (one, two):
                heard = start(pair[1], ask).communicate(timeout=60)[0]
                assert heard.strip() == pair[0]
            for server in servers:
                server.communicate(timeout=60)

    def test_a_rate_shapes_both_ends(self):
        with ranks._namespaces("100mbit") as names:
            for name in names:
                command = ["netns", "exec", name, "tc", "qdisc", "show"]
                assert "tbf" in ranks._ip(*command, "dev", name)
        before = namespaces()
        with pytest.raises(Refusal, match="rate quick"):
            with ranks._namespaces("quick"):
                pass
        assert namespaces() == before

    def test_names_fit_an_interface(self):
        assert len(f"rank{2**22}a999") <= 15
