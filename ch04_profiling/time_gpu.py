"""4.2.3  Timing GPU code · 計量GPU 程式的執行時間
4.2.4  Precise GPU timing · 精確計量GPU 的執行時間

Question  Where must a stopwatch wait for the GPU, and what is left of a
          kernel's time when the host, the queue and the cache are taken away?
Expect    without a wait the launches are timed; a wait per call adds launch
          and wait to each; waits at the borders and events give the time per
          call, which is the kernel's only while the queue never runs dry.
          bytes / time above the memory's rate means the cache answered
Run       python -m ch04_profiling.time_gpu [--smoke] [--save]
"""

import contextlib
import statistics
import time
import types

import torch

from common import bench, machine, tables, timers


def without_sync(function, calls, clock):
    """A launch returns while the GPU works on: this times the launching."""
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def sync_every_call(function, calls, clock, sync):
    """A wait drains the queue: the next launch finds a GPU that is idle."""
    total = 0.0
    for _ in range(calls):
        sync()
        start = clock()
        function()
        sync()
        total += clock() - start
    return total / calls


def between_events(function, calls, module, ahead=None):
    """The GPU itself notes when it reaches an event in its stream.

    It also notes its waiting for launches. ``ahead`` queues work that keeps
    it busy until all are there: then nothing but kernels lies between.
    """
    start = module.Event(enable_timing=True)
    end = module.Event(enable_timing=True)
    module.synchronize()
    if ahead:
        ahead()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def cold_cache(function, calls, module, evict):
    """A kernel finds in L2 what the last one left there, unless evicted.

    ``evict`` writes more than L2 holds, outside of what is timed. It also
    keeps the GPU busy while the kernel behind it is being launched.
    """
    pairs = []
    for _ in range(calls):
        start = module.Event(enable_timing=True)
        end = module.Event(enable_timing=True)
        evict()
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    module.synchronize()
    times = [start.elapsed_time(end) for start, end in pairs]
    return torch.tensor(times).quantile(0.5).item() / 1e3


def replayed(function, calls, module):
    """One launch replays a graph of kernels: the host does not come between.

    Returned is a function whose call does the work of ``calls`` calls.
    """
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):  # what is made at a first call is not captured
        for _ in range(3):
            function()
    module.current_stream().wait_stream(side)
    graph = module.CUDAGraph()
    with module.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


TECHNIQUES = (
    without_sync,
    sync_every_call,
    between_events,
    cold_cache,
    replayed,
)


class SimulatedGPU:
    """A GPU that finishes late, in simulated seconds: nothing is measured.

    It offers what this script uses of ``torch.cuda``. The host's clock
    ``now`` goes on by ``launch_s`` per order; the GPU has done all of them
    at ``idle_at``. Kernels read their bytes from memory, or from the cache
    where they still lie there. There is one stream.
    """

    launch_s, wait_s, gap_s = 5e-6, 8e-6, 1e-6
    memory_rate, cache_rate, cache_bytes = 1e12, 4e12, 2**25

    def __init__(self):
        self.now = self.idle_at = 0.0
        self.cached, self.captured = {}, None
        self.Stream = self.current_stream = lambda: self
        self.wait_stream = lambda other: None
        self.stream = contextlib.nullcontext

    def clock(self):
        return self.now

    def synchronize(self, until=None):
        until = self.idle_at if until is None else until
        self.now = max(self.now, until) + self.wait_s

    def kernel(self, size, name):
        """Return a launch of a kernel that moves so many bytes of its own."""

        def work():
            hit = self.cached.pop(name, None)
            self.cached[name] = size
            while sum(self.cached.values()) > self.cache_bytes:
                del self.cached[next(iter(self.cached))]  # the oldest
            hit = hit and name in self.cached
            rate = self.cache_rate if hit else self.memory_rate
            self.idle_at += self.gap_s + size / rate

        def call():
            if self.captured is None:
                self.launch(work)
            else:
                self.captured.append(work)

        return call

    def launch(self, *works):
        self.now += self.launch_s
        self.idle_at = max(self.now, self.idle_at)
        for work in works:
            work()

    def Event(self, enable_timing=False):  # noqa: N802 - torch.cuda's name
        event = types.SimpleNamespace()

        def record():
            event.at = self.idle_at = max(self.now, self.idle_at)

        event.record = record
        event.synchronize = lambda: self.synchronize(event.at)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event

    def CUDAGraph(self):  # noqa: N802
        works = []
        return types.SimpleNamespace(
            works=works, replay=lambda: self.launch(*works)
        )

    @contextlib.contextmanager
    def graph(self, graph):
        self.captured = graph.works
        yield
        self.captured = None


def copier(size, device):
    """Return a copy on the GPU that reads and writes ``size`` bytes in all."""
    source = torch.ones(size // 8, device=device)
    there = torch.empty_like(source)
    return lambda: there.copy_(source)


def stopwatches(copy, evict, calls, module, clock, sync):
    """Return {name: function}, each of which times one copy in its way."""
    graph = replayed(copy, calls, module)

    def ahead():  # in all longer than the launches take
        for _ in range(2 + calls // 4):
            evict()

    for warm in (copy, evict, graph):
        warm()
    return {
        "no wait": lambda: without_sync(copy, calls, clock),
        "a wait per call": lambda: sync_every_call(copy, calls, clock, sync),
        "waits at the borders": lambda: timers.wall(
            copy, calls, clock=clock, sync=lambda _: sync()
        ),
        "events": lambda: between_events(copy, calls, module),
        "events, queue filled": lambda: between_events(
            copy, calls, module, ahead
        ),
        "events, graph": lambda: between_events(graph, 1, module) / calls,
        "events, cold L2": lambda: cold_cache(copy, calls, module, evict),
    }


def measure(watches, sync, rounds):
    """Return {name: seconds}: the median of some turns of each."""
    found = {name: [] for name in watches}
    for _ in range(rounds):
        for name, watch in watches.items():
            sync()  # what the last one left in the queue
            found[name].append(watch())
    return {name: statistics.median(times) for name, times in found.items()}


def times_of(args, size, calls):
    """Return ({stopwatch: seconds}, the memory's rate) of one copy."""
    if args.device.type != "cuda":
        gpu = SimulatedGPU()
        kernels = gpu.kernel(size, "copy"), gpu.kernel(2**26, "evict")
        sync = gpu.synchronize
        watches = stopwatches(*kernels, calls, gpu, gpu.clock, sync)
        return measure(watches, sync, 1), gpu.memory_rate
    device = args.device
    rate = machine.peaks(device)["copy_bytes_per_s"]
    cache = torch.cuda.get_device_properties(device).L2_cache_size

    def sync():
        timers.synchronize(device)

    with torch.cuda.device(device):
        kernels = copier(size, device), copier(4 * cache or 2**28, device)
        watches = stopwatches(
            *kernels, calls, torch.cuda, time.perf_counter, sync
        )
        return measure(watches, sync, 3 if args.smoke else 7), rate


def main(argv=None):
    args = bench.cli(__doc__, argv)
    simulated = args.device.type != "cuda"
    rows = []
    for size in (2**18, 2**23, 2**29):
        calls = 20 if args.smoke or size > 2**25 else 200
        found, rate = times_of(args, size, calls)
        text = tables.cell(size, "bytes")
        rows += bench.report(
            args,
            [
                {
                    "name": name,
                    "bytes": size,
                    "call_s": took,
                    "times": took * rate / size,
                    "seen_bytes_per_s": size / took,
                    "simulated": simulated,
                }
                for name, took in found.items()
            ],
            {
                "name": "stopwatch",
                "call_s": "per call",
                "times": "× bytes / memory's rate",
                "seen_bytes_per_s": "bytes / time",
            },
            title=f"{'SIMULATED ' * simulated}copy of {text}",
            expect=f"a copy of {text} takes {tables.seconds(size / rate)} at "
            f"the memory's {tables.cell(rate, 'x_bytes_per_s')}",
        )
        over = [n for n, took in found.items() if size / took > 1.05 * rate]
        print(f"above the memory's rate: {', '.join(over) or 'none'}")
    if simulated:
        bench.left_out(
            args,
            "every measurement, which needs CUDA. The figures above are a "
            "simulated GPU's: 5 µs per launch, 8 µs per wait, memory of 1 "
            "TB/s, 32 MiB of L2 of 4 TB/s",
        )
    return rows


if __name__ == "__main__":
    bench.run(main)
