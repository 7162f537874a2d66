"""3.5  Asynchronous execution · PyTorch 的非同步執行機制

Question  When a call returns, is its work done? Which calls wait for that?
Expect    a GPU takes orders: a call returns after some µs, whatever it costs,
          until the queue is full; whoever wants a value or a size that data
          decide waits for everything ordered before. On a CPU a call returns
          when its work is done: launch = completion, nobody waits
Run       python -m ch03_pytorch_basics.async_execution [--smoke] [--save]
"""

import collections
import functools
import statistics
import threading
import time

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from common import bench, tables, timers


def launch_and_done(work, synchronize, clock):
    """A call puts work into a queue; it is done when the queue is empty.

    Returns the seconds until the call returned, and until it was done.
    """
    synchronize()
    start = clock()
    work()
    returned = clock()
    synchronize()
    return returned - start, clock() - start


def queue_depths(launch, event_behind, count):
    """An event marks a place in the queue: those not reached lie ahead.

    Returns how many operators are ahead after each of ``count`` launches.
    """
    ahead, depths = [], []
    for _ in range(count):
        launch()
        ahead.append(event_behind())
        while ahead and ahead[0].query():  # a queue is done in order
            ahead.pop(0)
        depths.append(len(ahead))
    return depths


def has_waited(call, keep_busy, event_behind):
    """Whoever returns while the device is still busy has not waited for it."""
    keep_busy()
    place = event_behind()
    call()
    return place.query()


TECHNIQUES = (launch_and_done, queue_depths, has_waited)


# ---- a simulated device: this is no GPU ----------------------------------


class SimulatedDevice:
    """A thread works off a queue, as a GPU does; the CPU does the work.

    It shows what the host sees of an asynchronous device: launches that
    return at once, a queue of limited length, waits, late errors.  Its
    times are those it is told (``kernel_s`` per operator).
    """

    def __init__(self, limit=1024, kernel_s=0.0):
        self.limit, self.kernel_s = limit, kernel_s
        self.queue, self.changed = collections.deque(), threading.Condition()
        self.launched = self.done = self.waiting = self.waits = 0
        self.error, self.log = None, []
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        with self.changed:
            self.waiting += 1  # a job that is held goes on
            self.queue.append(None)
            self.changed.notify_all()
        self.thread.join()

    def _work(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue)
                entry = self.queue.popleft()
            if entry is None:
                return
            job, times = entry
            times["start_s"] = time.perf_counter()
            try:
                job()
            except Exception as error:  # reported to the next who waits
                self.error = self.error or error
            time.sleep(self.kernel_s)
            times["end_s"] = time.perf_counter()
            with self.changed:
                self.done += 1
                self.changed.notify_all()

    def launch(self, job):
        """Queue a job; with a full queue, first wait for one to be done."""
        times = {"asked_s": time.perf_counter()}
        with self.changed:
            if self.launched - self.done >= self.limit:
                self._wait(self.launched + 1 - self.limit)
            self.queue.append((job, times))
            self.launched += 1
            self.changed.notify_all()
        times["returned_s"] = time.perf_counter()
        self.log.append(times)

    def _wait(self, count):
        self.waits += 1
        self.waiting += 1
        self.changed.notify_all()
        self.changed.wait_for(lambda: self.done >= count)
        self.waiting -= 1

    def synchronize(self):
        """Wait until everything that was launched is done."""
        with self.changed:
            self._wait(self.launched)
            error, self.error = self.error, None
        if error:
            raise error

    def hold(self):
        """Queue a job that ends when somebody waits for the device."""

        def job():
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)

        self.launch(job)

    def event(self):
        """Return an event behind all that was launched."""
        return SimulatedEvent(self, self.launched)

    def tensor(self, values):
        """Return a tensor on this device."""
        found = SimulatedTensor(self, values)
        found.box["value"] = values
        return found


class SimulatedEvent(collections.namedtuple("_Event", "device place")):
    """A place in the queue."""

    def query(self):
        return self.device.done >= self.place


class SimulatedTensor(torch.Tensor):
    """What the host knows of a result: its shape; the value comes later."""

    @staticmethod
    def __new__(cls, device, like):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device="meta",
        )

    def __init__(self, device, like):
        self.queue, self.box = device, {}

    def __repr__(self):
        return f"SimulatedTensor({tuple(self.shape)})"

    def tolist(self):  # as torch does: copy to the host, then read
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tree_leaves((args, kwargs))
        device = next(t.queue for t in inputs if isinstance(t, cls))

        def value(leaf):
            return leaf.box["value"] if isinstance(leaf, cls) else leaf

        def run():
            return op(*tree_map(value, args), **tree_map(value, kwargs))

        if to_host(op, kwargs):
            there = torch.empty(args[0].shape, dtype=args[0].dtype)
            device.launch(lambda: there.copy_(value(args[0])))
            if not kwargs.get("non_blocking"):
                device.synchronize()
            return there
        if data_decide(op, args):
            device.synchronize()
            return tree_map_only(torch.Tensor, device.tensor, run())
        if op._schema.is_mutable:
            device.launch(run)
            return args[0]
        shapes = op(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))
        late = tree_map_only(torch.Tensor, lambda t: cls(device, t), shapes)

        def fill():
            for place, found in zip(
                *map(tree_leaves, (late, run())), strict=True
            ):
                place.box["value"] = found

        device.launch(fill)
        return late


def shape_of(leaf):
    """Return a tensor's shape, strides and type, without values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(
        leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta"
    )


def to_host(op, kwargs):
    """Say whether an operator copies from the device to the host."""
    there = kwargs.get("device")
    return (
        op is torch.ops.aten._to_copy.default
        and there
        and (torch.device(there).type == "cpu")
    )


def data_decide(op, args):
    """Say whether Python needs values, or a size that values decide."""
    if op is torch.ops.aten.index.Tensor:
        picks = [t.dtype for t in args[1] if t is not None]
        return torch.bool in picks
    return (
        bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            & set(op.tags)
        )
        or op is torch.ops.aten.equal.default
    )


# ---- which calls wait ----------------------------------------------------

CALLS = {  # name: (call, whether it must wait)
    "x + 1": (lambda x: x + 1, False),
    "x.add_(1)": (lambda x: x.add_(1), False),
    "x.sum()": (lambda x: x.sum(), False),
    "x.shape": (lambda x: x.shape, False),
    "x[2:4]": (lambda x: x[2:4], False),
    "x.argmax()": (lambda x: x.argmax(), False),
    "torch.where(x > 0, x, -x)": (lambda x: torch.where(x > 0, x, -x), False),
    "x.to('cpu', non_blocking=True)": (
        lambda x: x.to("cpu", non_blocking=True),
        False,
    ),
    "x.cpu()": (lambda x: x.cpu(), True),
    "x.tolist()": (lambda x: x.tolist(), True),
    "x.sum().item()": (lambda x: x.sum().item(), True),
    "if x.sum() > 0": (lambda x: bool(x.sum() > 0), True),
    "x.nonzero()": (lambda x: x.nonzero(), True),
    "x[x > 0]": (lambda x: x[x > 0], True),
    "x.unique()": (lambda x: x.unique(), True),
    "torch.equal(x, x + 1)": (lambda x: torch.equal(x, x + 1), True),
}


class Nothing:
    """The event of a CPU: what was launched is done."""

    def query(self):
        return True


def event_behind(device):
    """Return an event behind what was launched on a real device."""
    if device.type == "cpu":
        return Nothing()
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def busy(device, seconds):
    """Return a function that gives a real device work for so long."""
    width = 4096 if device.type == "cuda" else 1024
    a = torch.full((width, width), 1 / width, device=device)
    out = torch.empty_like(a)
    work = functools.partial(torch.mm, a, a, out=out)
    work()
    count = max(1, round(seconds / timers.wall(work, 5, device)))

    def keep_busy():
        for _ in range(count):
            work()

    return keep_busy


def waiting_calls(device):
    """Return rows: whether each call should wait, and whether it does.

    On the simulated device, and on ``device`` unless it is a CPU.
    """
    rows, values = [], torch.arange(-4.0, 4.0)
    keep_busy = device.type == "cpu" or busy(device, 0.05)
    for name, (call, must_wait) in CALLS.items():
        with SimulatedDevice() as late:
            x = late.tensor(values.clone())
            work = functools.partial(call, x)
            waited = has_waited(work, late.hold, late.event)
        row = {"name": name, "expected": must_wait, "simulated": waited}
        if device.type != "cpu":
            there = values.to(device)
            call(there)  # loads kernels, asks for memory
            timers.synchronize(device)
            row["real"] = has_waited(
                functools.partial(call, there),
                keep_busy,
                functools.partial(event_behind, device),
            )
            timers.synchronize(device)
        rows.append(row)
    return rows


# ---- launch, completion, queue -------------------------------------------


def durations(device, widths, repeats):
    """Return a row per matrix product: until it returned, until it was done.

    Medians of ``repeats`` turns on a real device.
    """
    rows = []
    for width in widths:
        a = torch.full((width, width), 1 / width, device=device)
        work = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
        synchronize = functools.partial(timers.synchronize, device)
        work()
        found = [
            launch_and_done(work, synchronize, time.perf_counter)
            for _ in range(repeats)
        ]
        returned, done = map(statistics.median, zip(*found, strict=True))
        rows.append(
            {
                "name": f"{width} × {width}",
                "returned_s": returned,
                "done_s": done,
                "held_percent": 100 * returned / done,
            }
        )
    return rows


def depths(device, count):
    """Return rows: the queue after ``count`` launches, simulated and real."""
    limit = 8
    with SimulatedDevice(limit) as late:
        x = late.tensor(torch.ones(4))
        late.hold()  # the first of the limit
        found = queue_depths(lambda: x.add_(1), late.event, limit - 1)
        fitted = late.waits == 0
        x.add_(1)
        rows = [
            {
                "name": f"simulated, room for {limit}",
                "launches": limit + 1,
                "deepest": found[-1] + 1,
                "full": fitted and late.waits == 1,
            }
        ]
    x = torch.ones(4, device=device)
    took = []

    def launch():
        start = time.perf_counter()
        x.add_(1)
        took.append(time.perf_counter() - start)

    launch()
    if device.type != "cpu":
        busy(device, 0.05)()
    took.clear()
    found = queue_depths(
        launch, functools.partial(event_behind, device), count
    )
    timers.synchronize(device)
    return rows + [
        {
            "name": str(device),
            "launches": count,
            "deepest": max(found),
            "launch_s": statistics.median(took),
            "longest_s": max(took),
        }
    ]


def host_and_device(kernels, prepare_s, kernel_s):
    """Return rows: a program that waits once, and one that always waits.

    Host and device work at once where nobody waits: the slower of the two
    sets the pace.
    """
    pace_s = max(prepare_s, kernel_s)
    predicted = {
        "wait at the end": prepare_s + kernel_s + (kernels - 1) * pace_s,
        "wait after each": kernels * (prepare_s + kernel_s),
    }
    rows = []
    for name, predicted_s in predicted.items():
        with SimulatedDevice(kernel_s=kernel_s) as late:
            x = late.tensor(torch.zeros(4))
            start = time.perf_counter()
            for _ in range(kernels):
                time.sleep(prepare_s)  # Python, the loader, the optimizer
                x.add_(1)
                if name == "wait after each":
                    late.synchronize()
            if name == "wait at the end":
                late.synchronize()
            end, waits = time.perf_counter(), late.waits
            rows.append(
                {
                    "name": name,
                    "waits": waits,
                    "predicted_s": predicted_s,
                    "measured_s": end - start,
                    "value": x.tolist()[0],
                    "prepare_s": prepare_s,
                    "timeline": [
                        {key: t - start for key, t in times.items()}
                        for times in late.log[:kernels]
                    ],
                }
            )
    return rows


def late_error():
    """Return the call that reports another operator's mistake, and it."""
    with SimulatedDevice() as late:
        x = late.tensor(torch.ones(4))
        x.index_select(0, late.tensor(torch.tensor([9])))
        y = x + 1  # launched as if nothing had happened
        try:
            y.tolist()
        except IndexError as error:
            return str(error)
    raise bench.Mismatch("an index out of range was not reported")


def figure(rows):
    """Draw who worked when, on the simulated device."""
    from matplotlib.figure import Figure

    from common import notebook

    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    rows = [row for row in rows if "timeline" in row]
    drawn = Figure(figsize=(7.5, 3.4), layout="constrained")
    panels = drawn.subplots(len(rows), sharex=True)
    for axes, row in zip(panels, rows, strict=True):
        host = [
            (1e3 * (t["asked_s"] - row["prepare_s"]), 1e3 * row["prepare_s"])
            for t in row["timeline"]
        ]
        device = [
            (1e3 * t["start_s"], 1e3 * (t["end_s"] - t["start_s"]))
            for t in row["timeline"]
        ]
        for lane, spans in enumerate((host, device)):
            axes.broken_barh(
                spans, (lane - 0.4, 0.8), color=f"C{lane}", edgecolor="white"
            )
        for t in row["timeline"]:
            axes.annotate(
                "",
                (1e3 * t["start_s"], 0.6),
                (1e3 * t["returned_s"], 0.4),
                arrowprops={"arrowstyle": "->", "color": "0.4"},
            )
        axes.set_yticks((0, 1), ["host", "device"])
        axes.set_ylim(1.6, -0.6)
        axes.set_title(row["name"], loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    title = "a simulated device: launches and their work · 模擬裝置"
    drawn.suptitle(notebook.label(title), **fonts)
    return drawn


SIMULATED = "SIMULATED, a thread works off a queue"


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    on_cpu = device.type == "cpu"
    widths = (256, 512, 1024) if on_cpu else (256, 1024, 4096)
    took = bench.report(
        args,
        durations(device, (64,) if args.smoke else widths, 15),
        {
            "name": "matrix product",
            "returned_s": "call returned",
            "done_s": "work done",
            "held_percent": "% host held",
        },
        title=f"Launch and completion on {device}",
    )
    held = took[-1]["held_percent"]
    print(
        f"{device}: the last call held the host for {held:.0f}% of its work"
        + (": launch = completion, a CPU is synchronous" if on_cpu else "")
    )
    queue = depths(device, 50 if args.smoke else 2000)
    if queue[0]["deepest"] != 8 or not queue[0]["full"]:
        raise bench.Mismatch(f"the simulated queue: {queue[0]}")
    if on_cpu and queue[1]["deepest"]:
        raise bench.Mismatch(f"a CPU has no queue: {queue[1]}")
    queue = bench.report(
        args,
        queue,
        {
            "name": "device",
            "launches": "launches",
            "deepest": "deepest queue",
            "full": "a launch found it full",
            "launch_s": "launch",
            "longest_s": "longest",
        },
        title="The queue while the device is busy",
    )
    calls = waiting_calls(device)
    wrong = [r["name"] for r in calls if r["simulated"] != r["expected"]]
    if wrong:
        raise bench.Mismatch(f"simulated, against the rule: {wrong}")
    columns = {
        "name": "call",
        "expected": "expected",
        "simulated": "simulated",
    }
    calls = bench.report(
        args,
        calls,
        columns | ({} if on_cpu else {"real": str(device)}),
        title=f"Does the call wait for what was launched? ({SIMULATED})",
    )
    for row in calls:
        if row.get("real", row["expected"]) != row["expected"]:
            print(f"on {device} it is otherwise: {row['name']}")
    print(
        f"an index out of range is reported by the next wait: {late_error()}"
    )
    kernels, times = (3, (1e-3, 2e-3)) if args.smoke else (6, (3e-3, 5e-3))
    whole = host_and_device(kernels, *times)
    answers = [(row["waits"], row["value"]) for row in whole]
    if answers != [(1, kernels), (kernels, kernels)]:
        raise bench.Mismatch(f"waits and values: {answers}")
    whole = bench.report(
        args,
        whole,
        {
            "name": "row",
            "waits": "waits",
            "predicted_s": "predicted",
            "measured_s": "measured",
        },
        title=f"{kernels} kernels of {tables.seconds(times[1])}, each "
        f"prepared in {tables.seconds(times[0])} ({SIMULATED})",
    )
    if on_cpu:
        bench.left_out(
            args,
            "launch times, queue and waits of a GPU; the simulated device "
            "obeys rules, it proves none",
        )
    return took + queue + calls + whole


if __name__ == "__main__":
    bench.run(main)
