"""What the processes of test_ranks do; importable by them, hence a module.

torch is imported where it is used: the jobs without it start at once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ELEMENTS = 1 << 18  # 1 MiB of float32


def summed(folder=None) -> dict:
    """Sum rank + 1 over the ranks; leave the answer in ``folder``."""
    import torch
    import torch.distributed as dist

    from common import ranks

    for _ in range(2):  # joining a second time works
        rank = ranks.init(timeout_s=300)
        assert ranks.init() == rank
        values = torch.full((ELEMENTS,), float(rank.rank + 1))
        dist.all_reduce(values)
        ranks.finish()
    ranks.init(timeout_s=300)
    answer = {
        "sum": values.unique().tolist(),
        "rank": rank.rank,
        "world": rank.world,
        "local_rank": rank.local_rank,
        "threads": torch.get_num_threads(),
        "received": received(os.environ["GLOO_SOCKET_IFNAME"]),
    }
    time.sleep(0.3)  # long enough for the test to see who listens
    ranks.finish()
    if folder:
        Path(folder, f"{rank.rank}.json").write_text(json.dumps(answer))
    return answer


def received(interface: str) -> int | None:
    """Return the bytes that came in through a network interface (Linux)."""
    if sys.platform != "linux":
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0])
    return None


def unequal_counts(counts: list[int]) -> tuple[int, float, float]:
    """Train one DDP step on 6 and 2 counted tokens, twice.

    Returns:
        The rank, and the gradient's relative error against one process with
        all tokens: scaled by world / global tokens, and as the plain average
        of means.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from common import ranks

    rank = ranks.init(timeout_s=300)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 7)
    x = torch.randn(len(counts), max(counts), 16)
    y = torch.randint(7, x.shape[:2])
    for row, count in enumerate(counts):
        y[row, count:] = -100
    F.cross_entropy(layer(x).flatten(0, 1), y.flatten()).backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer.bias.grad = None
    ddp = DistributedDataParallel(layer)

    def error(loss) -> float:
        loss.backward()
        gradient, layer.weight.grad = layer.weight.grad, None
        return float((gradient - expected).norm() / expected.norm())

    mine = x[rank.rank], y[rank.rank]
    tokens = (mine[1] != -100).sum()
    dist.all_reduce(tokens)
    total = F.cross_entropy(ddp(mine[0]), mine[1], reduction="sum")
    scaled = error(total * rank.world / tokens)
    plain = error(F.cross_entropy(ddp(mine[0]), mine[1]))
    return rank.rank, scaled, plain


def broken_peer() -> None:
    """Rank 1 fails while rank 0 waits for its tensor."""
    import torch
    import torch.distributed as dist

    from common import ranks

    rank = ranks.init(timeout_s=300)
    dist.all_reduce(torch.ones(1))
    if rank.rank == 1:
        raise ValueError("the data of rank 1 are broken")
    dist.all_reduce(torch.ones(1))


def linger(folder: str) -> None:
    """Join a job, say so, and do not leave it."""
    from common import ranks

    ranks.init()
    Path(folder, "joined").touch()
    time.sleep(600)


def abandon(folder: str) -> None:
    """Start a rank as a launcher does, and wait; to be killed."""
    env = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "RANKS_STORE": str(Path(folder, "store")),
        "RANKS_LAUNCHER": str(os.getpid()),
    }
    command = [sys.executable, "-m", "rank_jobs", "linger", folder]
    rank = subprocess.Popen(command, env=env)
    Path(folder, "rank").write_text(str(rank.pid))
    rank.wait()


def sleep(folder: str) -> None:
    """Start a child that sleeps, note its pid, and sleep."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command)
    pids = Path(folder, os.environ.get("RANK", "0"))
    pids.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    pids.with_suffix(".part").rename(pids)
    time.sleep(600)


def fail(how: str, folder: str) -> None:
    """Rank 1 ends in some way once rank 0 sleeps."""
    if os.environ["RANK"] == "0":
        sleep(folder)
    while not Path(folder, "0").exists():
        time.sleep(0.01)
    if how == "raise":
        raise ValueError("the disk of rank 1 is full")
    print(f"rank_jobs: last words before {how}", file=sys.stderr, flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit({"exit": 7, "refuse": 2}[how])


def join_alone() -> None:
    """Rank 0 joins; rank 1 is late for ever."""
    from common import ranks

    if os.environ["RANK"] == "1":
        time.sleep(600)
    ranks.init(timeout_s=1)


def say(text: str) -> None:
    """Print a text."""
    print(text)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
