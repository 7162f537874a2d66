"""Small traces with one known fault each; ``write`` renews the files.

python tests/ch04/synthetic.py
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "traces"
GEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, AddFunctor>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
UPLOAD = "Memcpy HtoD (Pageable -> Device)"
DOWNLOAD = "Memcpy DtoH (Device -> Pageable)"
MAIN, AUTOGRAD, STREAM, SIDE = 100, 101, 7, 20


class Recording:
    """Events as Kineto writes them, in µs."""

    def __init__(self, rank=None, world=None, gpu=True):
        self.events, self.calls = [], 0
        self.header = {"schemaVersion": 1, "deviceProperties": []}
        if gpu:
            self.header["deviceProperties"] = [{"id": 0, "name": "Tested GPU"}]
        if rank is not None:
            info = {"backend": "nccl", "rank": rank, "world_size": world}
            self.header["distributedInfo"] = info

    def add(self, category, name, start, length, lane=MAIN, **arguments):
        process = 0 if lane in (STREAM, SIDE) else MAIN
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": process,
            "tid": lane,
            "ts": 1_000_000 + start,
            "dur": length,
        }
        if arguments:
            event["args"] = arguments
        self.events.append(event)

    def step(self, number, start, length):
        self.add("user_annotation", f"ProfilerStep#{number}", start, length)

    def run(self, name, called, takes, start, length, lane=STREAM, **more):
        """Launch GPU work: a call on the host, and the work itself."""
        self.calls += 1
        api, category = "cudaLaunchKernel", "kernel"
        if name.startswith("Memcpy"):
            api, category = "cudaMemcpyAsync", "gpu_memcpy"
        self.add("cuda_runtime", api, called, takes, correlation=self.calls)
        more |= {"correlation": self.calls, "stream": lane}
        self.add(category, name, start, length, lane, **more)

    def text(self):
        lines = [json.dumps(event) for event in self.events]
        head = json.dumps(self.header)[1:-1]
        return (
            "{" + head + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"
        )


def data_bound():
    """Each step of 10 ms waits 6 ms for its batch."""
    made = Recording()
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for step in range(3):
        at = 10_000 * step
        made.step(step + 5, at, 10_000)
        made.add("user_annotation", name, at, 6000)
        for k in range(8):
            made.run(GEMM, at + 6010 + 20 * k, 10, at + 6100 + 480 * k, 470)
    return made


def host_bound():
    """Operators of 250 µs launch kernels of 20 µs."""
    made = Recording()
    for k in range(24):
        if k % 8 == 0:
            made.step(k // 8, 250 * k, 2000)
        made.add("cpu_op", "aten::add", 250 * k, 240)
        made.run(ADD, 250 * k + 100, 10, 250 * k + 115, 20)
    return made


def sync_bound():
    """Each kernel is followed by .item() and 400 µs until the next one."""
    made = Recording()
    for k in range(12):
        at = 1000 * k
        if k % 4 == 0:
            made.step(k // 4, at, 4000)
        made.run(GEMM, at, 10, at + 20, 580)
        made.add("cpu_op", "aten::item", at + 30, 600)
        made.run(DOWNLOAD, at + 40, 570, at + 601, 3, bytes=4)
        made.add("cuda_runtime", "cudaStreamSynchronize", at + 611, 10)
    return made


def transfer_bound():
    """Pageable uploads of 600 µs come before kernels of 350 µs."""
    made = Recording()
    for k in range(12):
        at = 1000 * k
        if k % 4 == 0:
            made.step(k // 4, at, 4000)
        made.run(UPLOAD, at, 640, at + 30, 600, bytes=3_600_000)
        made.run(GEMM, at + 641, 5, at + 648, 350)
    return made


def compute_bound(kernel=GEMM):
    """Kernels of 490 µs follow each other; the host is far ahead."""
    made = Recording()
    for k in range(24):
        if k % 8 == 0:
            made.step(k // 8, 20 * k, 160)
        made.run(kernel, 20 * k, 10, 500 * k + 20, 490)
    made.add("cuda_runtime", "cudaDeviceSynchronize", 500, 11_600)
    return made


def bandwidth_bound():
    """The same, all element-wise."""
    return compute_bound(ADD)


def communication_bound(rank=0, world=1, wait=400, work=500):
    """A reduction ends each step; a fifth of it runs beside a kernel."""
    made = Recording(rank, world)
    period = work + wait + 20
    for k in range(12):
        at = period * k
        if k % 4 == 0:
            made.step(k // 4, at, 4 * period)
        made.run(GEMM, at, 5, at + 10, work)
        made.run(NCCL, at + 6, 5, at + work - 90, 100 + wait, SIDE)
    return made


def straggler(rank):
    """Of three ranks, rank 1 computes longer; the others wait for it."""
    late = rank == 1
    return communication_bound(
        rank, 3, 50 if late else 450, 900 if late else 500
    )


def start_up():
    """CUDA is initialised, then twenty short kernels run."""
    made = Recording()
    made.add("cuda_runtime", "cudaFree", 100, 900_000)
    made.add("cuda_runtime", "cudaMalloc", 900_200, 40_000)
    for k in range(24):
        made.run(ADD, 941_000 + 30 * k, 10, 941_020 + 30 * k, 20)
    return made


def compilation():
    """Every step compiles for 5 ms before its kernels."""
    made = Recording()
    for step in range(3):
        at = 10_000 * step
        made.step(step, at, 10_000)
        name = "_compile.compile_inner (dynamo_timed)"
        made.add("user_annotation", name, at + 100, 5000)
        for k in range(8):
            made.run(GEMM, at + 5200 + 20 * k, 10, at + 5300 + 580 * k, 570)
    return made


def no_gpu_events():
    """A rank of a GPU program whose kernels were not recorded."""
    made = Recording()
    for k in range(20):
        made.add("cpu_op", "aten::mm", 300 * k, 250)
    return made


SINGLE = {
    "data-bound": data_bound,
    "host-bound": host_bound,
    "sync-bound": sync_bound,
    "transfer-bound": transfer_bound,
    "compute-bound": compute_bound,
    "bandwidth-bound": bandwidth_bound,
    "communication-bound": communication_bound,
    "start-up": start_up,
    "compilation": compilation,
    "no-gpu-events": no_gpu_events,
}


def texts():
    """Return {file below ``FOLDER``: text} of every committed trace."""
    found = {f"{kind}.json": make().text() for kind, make in SINGLE.items()}
    for rank in range(3):
        found[f"straggler/rank{rank}.json"] = straggler(rank).text()
    return found


def write():
    for name, text in texts().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write()
