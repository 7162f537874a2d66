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

    def step():
        for _ in range(5):
            x @ x
        if str(rank.rank) == late:
            time.sleep(0.2)
        dist.all_reduce(total)

    step()
    with torch.profiler.profile() as run:
        for number in range(4):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
    run.export_chrome_trace(f"{folder}/rank{rank.rank}.json")
    ranks.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
