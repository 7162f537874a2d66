"""One rank of three that compute and reduce; one may come late.

python reducing_job.py FOLDER LATE_RANK
"""

import sys
import time

import torch
import torch.distributed as dist

from common import ranks


def main(folder, late):
    """Profile four steps into FOLDER/rankN.json."""
    rank = ranks.init("cpu")
    torch.set_num_threads(1)
    x, total = torch.ones(300, 300), torch.ones(1000)

    def step(pause_s=0.0):
        for _ in range(5):
            x @ x
        time.sleep(pause_s)
        dist.all_reduce(total)

    # neighbours delay every rank: late is what is far later than they make
    longest_s = torch.zeros(1)
    for _ in range(8):
        begun = time.perf_counter()
        step()
        longest_s[0] = max(float(longest_s), time.perf_counter() - begun)
    dist.all_reduce(longest_s, dist.ReduceOp.MAX)
    pause_s = min(max(0.2, 8 * float(longest_s)), 4.0)
    pause_s *= str(rank.rank) == late
    with torch.profiler.profile() as run:
        for number in range(4):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step(pause_s)
    run.export_chrome_trace(f"{folder}/rank{rank.rank}.json")
    ranks.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
