"""The launch files for real clusters are the commands that run here."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ch10_gpt2" / "launch"
TORCHRUN = FOLDER / "torchrun_two_hosts.sh"
SLURM = FOLDER / "slurm.sbatch"
JOB = """
import json, os, sys
import torch, torch.distributed as dist
from common import ranks

rank = ranks.init(timeout_s=300)
values = torch.full((1000,), float(rank.rank + 1))
dist.all_reduce(values)
ranks.finish()
path = os.path.join(sys.argv[1], f"{rank.rank}.json")
with open(path, "w") as file:
    json.dump([values.unique().tolist(), rank.local_rank, sys.argv[2]], file)
"""

pytestmark = pytest.mark.skipif(
    os.name != "posix" or shutil.which("bash") is None,
    reason="the launch files are for bash",
)


def environment(folder: Path, **change) -> dict[str, str]:
    """Fit the marked values to this machine; ``folder`` holds the job."""
    (folder / "job.py").write_text(JOB)
    env = ranks._environment(1, "nothing", {"PYTHON": sys.executable}, change)
    env["PYTHONPATH"] += f"{os.pathsep}{folder}"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        del env[name]  # the launch files set them
    return env


def check_answers(folder: Path) -> None:
    """Read what both ranks left: the sum, and their arguments unharmed."""
    for rank in range(2):
        answer = json.loads((folder / f"{rank}.json").read_text())
        assert answer == [[3.0], 0, "two words"]


def private_network() -> list[str]:
    """Return a prefix that runs a command where only loopback exists."""
    probe = ["unshare", "--map-root-user", "--net"]
    if shutil.which(probe[0]) is None or subprocess.call([*probe, "true"]):
        pytest.skip(
            "torchrun's store listens on every interface, and there "
            "is no `unshare` here to be alone with it"
        )
    script = 'ip link set lo up && exec "$@"'
    return [*probe, "sh", "-c", script, "sh"]


def print_arguments(folder: Path) -> str:
    """Return a program that writes its arguments instead of running them."""
    program = folder / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return str(program)


def arguments(folder: Path, *words: str, **change) -> list[str]:
    """Return what the torchrun file would hand to python."""
    env = environment(folder, PYTHON=print_arguments(folder), **change)
    command = ["bash", str(TORCHRUN), *words]
    done = subprocess.run(
        command, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("node", [0, 1])
def test_the_command_is_the_one_that_two_namespaces_run(node, tmp_path):
    found = arguments(
        *(tmp_path, str(node), "job", str(tmp_path), "two words"),
        MASTER_ADDR="10.77.0.1",
        PER_HOST=3,
    )
    meet = ranks.at_address(node, "10.77.0.1", 29500)
    mine = ranks.torchrun("job", [tmp_path, "two words"], 3, *meet)[1:]
    job = mine.index("job")
    assert found[-3:] == mine[job:]
    assert sorted(found[:-3]) == sorted(mine[:job])


def test_what_is_trained_by_default_is_understood(tmp_path):
    config = pytest.importorskip("ch10_gpt2.config")
    found = arguments(tmp_path, "0")
    module = found.index("-m", 2) + 1
    assert found[module] == "ch10_gpt2.train"
    told = config.parse("", found[module + 1 :])
    per_host = int(re.search(r"PER_HOST:-(\d+)", TORCHRUN.read_text())[1])
    assert told.sequences % (told.micro_batch * 2 * per_host) == 0
    alone = dataclasses.replace(told, parallel="none", device="cpu")
    config.check(alone, 1)


def test_without_a_number_the_usage(tmp_path):
    done = subprocess.run(
        ["bash", str(TORCHRUN)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "usage: " in done.stderr


@pytest.mark.parametrize("file", [TORCHRUN, SLURM], ids=lambda f: f.name)
def test_what_differs_between_clusters_is_marked(file):
    own = {"HOSTS", "MASTER_ADDR", "PER_HOST", "MASTER_PORT", "PYTHON"}
    for line in file.read_text().splitlines():
        given = re.match(r"(?:export )?([A-Z_]+)=\$\{\1:-", line)
        if given and given[1] not in own:
            assert "CHANGE" in line, line
        if re.match(r"#SBATCH --(nodes|gpus|cpus|time)", line):
            assert "CHANGE" in line, line


@pytest.mark.ranks
@pytest.mark.root
def test_two_hosts_start_the_torchrun_file(tmp_path):
    with ranks._namespaces(None) as names:
        agents = []
        for node, name in enumerate(names):
            env = environment(
                tmp_path,
                MASTER_ADDR=ranks.ADDRESSES[0],
                INTERFACE=name,
                PER_HOST=1,
            )
            inside = ["ip", "netns", "exec", name, "bash", str(TORCHRUN)]
            job = [str(node), "job", str(tmp_path), "two words"]
            agents.append(ranks.Process(inside + job, f"host {node}", env, ""))
        ranks.wait(agents, 120)
    check_answers(tmp_path)


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="Slurm is for Linux")
def test_slurm_starts_an_agent_on_each_host(tmp_path):
    alone = private_network()
    programs = {
        "scontrol": "printf '127.0.0.1\\nsecond\\n'",
        "srun": (
            'while [ "${1#--}" != "$1" ]; do shift; done\n'
            'SLURM_NODEID=0 "$@" & first=$!\n'
            'SLURM_NODEID=1 "$@" && wait $first'
        ),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = environment(
        tmp_path,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=ROOT,
        SLURM_JOB_ID=123456,
        SLURM_JOB_NUM_NODES=2,
        SLURM_JOB_NODELIST="host[1-2]",
        SLURM_GPUS_ON_NODE=1,
        INTERFACE="lo",
    )
    command = ["bash", str(SLURM), "job", str(tmp_path), "two words"]
    subprocess.run([*alone, *command], env=env, check=True, timeout=120)
    check_answers(tmp_path)
