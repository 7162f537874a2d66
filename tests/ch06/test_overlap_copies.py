"""6.1.3: what is copied on a side stream is waited for, kept, and in time."""

import contextlib
import inspect
import itertools
import json

import pytest
import torch
from late_device import LateDevice

from ch06_single_gpu_perf import overlap_copies
from ch06_single_gpu_perf.overlap_copies import (
    device_intervals,
    double_buffered,
    hidden_share,
    one_stream,
    prefetched,
)

CPU = torch.device("cpu")
FEEDS = [prefetched, double_buffered]
SEEDS = range(40)


def numbered(late=None, count=6, shape=(4, 3)):
    """Return batches of two tensors that say which batch they are of."""
    batches = [
        [torch.full(shape, float(i)), torch.full((5,), 10 * i)]
        for i in range(1, count + 1)
    ]
    return [[late.pin(t) if late else t for t in pair] for pair in batches]


def step(x, y):
    """Read every value, through temporaries that also want memory."""
    return (x * 2).sum() + (y + 1).sum()


def truth(count=6, shape=(4, 3)):
    return [float(step(*pair)) for pair in numbered(None, count, shape)]


def changed(function, old, new=""):
    """Return a technique with one thing done otherwise."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, old
    names = {"torch": torch, "itertools": itertools}
    exec(source.replace(old, new), names)
    return names[function.__name__]


def trained(feed, seed, count=6):
    """Return what a device that works late computes from each batch."""
    with LateDevice(seed) as late:
        batches = numbered(late, count)
        found = []
        for batch in feed(batches, late.device):
            found.append(step(*batch))
        return [value.item() for value in found]


def wrong_seeds(feed):
    return sum(trained(feed, seed) != truth() for seed in SEEDS)


# --- the order of copies and kernels ----------------------------------------


def test_one_stream_is_right_on_any_schedule():
    for seed in [None, *SEEDS]:
        with LateDevice(seed) as late:
            found = one_stream(numbered(late), step, late.device)
            assert [value.item() for value in found] == truth()


@pytest.mark.parametrize("feed", FEEDS)
def test_values_are_right_on_any_schedule(feed):
    for seed in [None, *range(80)]:
        assert trained(feed, seed) == truth(), seed


@pytest.mark.parametrize(
    ("feed", "line", "instead"),
    [
        # compute reads before the copy has arrived
        (prefetched, "compute.wait_stream(side)", "pass"),
        (double_buffered, "compute.wait_stream(side)  # for", "pass  #"),
        # the memory of a batch is written again before compute has read it
        (prefetched, "tensor.record_stream(compute)", "pass"),
        (double_buffered, "side.wait_stream(compute)", "pass"),
        # waits the wrong way round
        (prefetched, "compute.wait_stream(side)", "side.wait_stream(compute)"),
        # one buffer instead of two
        (double_buffered, "slots[i % 2]", "slots[0]"),
        # the copy is handed out before the wait for it is queued
        (
            double_buffered,
            "if ready:\n                yield ready",
            "yield slot",
        ),
    ],
)
def test_known_wrong_versions_give_wrong_values(feed, line, instead):
    assert wrong_seeds(changed(feed, line, instead))


def test_a_host_that_waits_is_right_without_keeping_memory():
    """Which is why a program that synchronises somewhere shows no error."""
    careless = changed(prefetched, "tensor.record_stream(compute)", "pass")

    def drained(batches, device):
        for batch in careless(batches, device):
            yield batch
            torch.get_device_module(device).synchronize()

    assert wrong_seeds(careless)
    assert not wrong_seeds(drained)


def orders(feed, count=5):
    """Return, per batch, how far the other stream must be.

    For the step on batch i: the copies that must be done. For the copy of
    batch i: the steps that must be done. Beyond that they overlap.
    """
    with LateDevice() as late:
        starts = []
        compute = late.now
        for batch in feed(numbered(late, count), late.device):
            step(*batch)
            starts.append(len(compute.queue))
        side = late.streams[1]
        labels = [label for label, _, _ in side.queue]
        ends = [i + 1 for i, name in enumerate(labels) if name == "copy"]
        ends = ends[1::2]  # two tensors in a batch
        assert len(ends) == count
        copies, steps = [], []
        for end in starts:
            needed = late.before(compute, end).get(side, 0)
            copies.append(sum(end <= needed for end in ends))
        for end in ends:
            needed = late.before(side, end).get(compute, 0)
            steps.append(sum(end <= needed for end in starts))
        return copies, steps


@pytest.mark.parametrize("feed", FEEDS)
def test_a_step_waits_for_its_own_batch_only(feed):
    copies, steps = orders(feed)
    assert copies == [1, 2, 3, 4, 5]
    # the copy of batch i runs beside the step on batch i - 1
    assert all(done <= max(0, i - 1) for i, done in enumerate(steps))


def test_a_buffer_waits_for_its_last_reader():
    _, steps = orders(double_buffered)
    assert steps == [0, 0, 1, 2, 3]
    _, steps = orders(prefetched)
    assert steps == [0, 0, 0, 0, 0]  # memory is kept instead


def test_a_late_wait_costs_the_overlap():
    """Waiting after the next copy is queued waits for that one as well."""

    def waits_late(batches, device):
        module = torch.get_device_module(device)
        side, compute = module.Stream(device), module.current_stream(device)
        ahead = None
        for batch in itertools.chain(batches, [None]):
            ready = ahead
            if batch:
                with module.stream(side):
                    ahead = [t.to(device, non_blocking=True) for t in batch]
            if ready:
                compute.wait_stream(side)
                for tensor in ready:
                    tensor.record_stream(compute)
                yield ready

    assert not wrong_seeds(waits_late)
    assert orders(waits_late)[0] == [2, 3, 4, 5, 5]


@pytest.mark.parametrize("feed", FEEDS)
def test_the_host_waits_for_nothing(feed):
    with LateDevice(seed=0) as late:
        for batch in feed(numbered(late), late.device):
            step(*batch)
        assert late.waits == 0
        for batch in feed(numbered(), late.device):  # pageable: it must
            step(*batch)
        assert late.waits == 2 * 6


def test_recorded_calls():
    """The calls of each, in order: what a reviewer would look for."""

    def calls(feed):
        with LateDevice() as late:
            for _ in feed(numbered(late, 3), late.device):
                late.calls.append("step")
            return late.calls

    waits = ("wait_stream", "compute", "side")
    kept = [("record_stream", "compute")] * 2
    assert calls(prefetched) == 3 * [waits, *kept, "step"]
    reuse = ("wait_stream", "side", "compute")
    first, last = [waits, reuse], [waits, "step"]
    assert calls(double_buffered) == [
        *first,
        *(2 * [waits, reuse, "step"]),
        *last,
    ]


# --- memory -----------------------------------------------------------------


def test_two_buffers_take_the_memory_of_two_batches():
    def bytes_of(feed, count):
        with LateDevice() as late:
            for _ in feed(numbered(late, count), late.device):
                pass
            return late.allocated

    two_batches = 2 * 2 * 512  # a block of 512 bytes for each tensor
    assert bytes_of(double_buffered, 3) == two_batches
    assert bytes_of(double_buffered, 12) == two_batches
    # kept until compute is done, and here it never is: the host runs ahead
    assert bytes_of(prefetched, 12) > 3 * two_batches


def test_batches_of_other_shapes_get_other_buffers():
    """A smaller last batch must not be spread over an old buffer."""
    for seed in SEEDS:
        with LateDevice(seed) as late:
            batches = numbered(late, 4) + numbered(late, 2, shape=(1, 3))
            found = [
                step(*batch) for batch in double_buffered(batches, late.device)
            ]
            right = truth(4) + truth(2, shape=(1, 3))
            assert [value.item() for value in found] == right, seed


def stopped_early(feed, seed):
    """Leave after two batches, then use memory for something else."""
    with LateDevice(seed) as late:
        with contextlib.closing(feed(numbered(late), late.device)) as batches:
            found = [step(*next(batches)) for _ in range(2)]
        del batches
        other = [torch.zeros(4, 3, device=late.device) for _ in range(8)]
        late.synchronize()
        return [value.item() for value in found] == truth()[:2] and not any(
            tensor.cpu().any() for tensor in other
        )


@pytest.mark.parametrize("feed", FEEDS)
def test_stopping_early_leaves_memory_in_order(feed):
    assert all(stopped_early(feed, seed) for seed in SEEDS)


def test_buffers_given_back_during_a_copy_are_caught():
    careless = changed(
        double_buffered,
        "compute.wait_stream(side)\n    if slot",
        "pass\n    if slot",
    )
    assert not all(stopped_early(careless, seed) for seed in SEEDS)


# --- the same code on a CPU -------------------------------------------------


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_each_batch_comes_once_in_order(feed, count):
    seen = [float(x[0, 0]) for x, _ in feed(numbered(count=count), CPU)]
    assert seen == list(range(1, count + 1))


@pytest.mark.parametrize("feed", FEEDS)
def test_reads_ahead_by_one_batch_even_without_an_end(feed):
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield [torch.tensor([i])]

    batches = feed(endless(), CPU)
    for i in range(4):
        (ids,) = next(batches)
        assert int(ids) == i
        assert taken == list(range(i + 2))


def test_a_batch_from_two_buffers_lasts_until_the_next():
    kept = [x for x, _ in double_buffered(numbered(count=4), CPU)]
    assert kept[0] is kept[2] and kept[1] is kept[3]
    assert float(kept[0][0, 0]) == 3.0
    kept = [x for x, _ in prefetched(numbered(count=4), CPU)]
    assert [float(x[0, 0]) for x in kept] == [1.0, 2.0, 3.0, 4.0]


def test_a_graph_over_an_overwritten_buffer_is_refused():
    """Autograd notices what a plain reader would not."""
    weight = torch.ones(3, requires_grad=True)
    losses = [
        (x * weight).sum() for x, _ in double_buffered(numbered(count=3), CPU)
    ]
    losses[2].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        losses[0].backward()


def test_losses_and_gradients_are_the_same_bits():
    model = overlap_copies.make_model(8, CPU)
    train = overlap_copies.make_step(model)
    batches = overlap_copies.make_batches(5, 16, 8, False)
    answers = []
    for feed in (None, *FEEDS):
        model.zero_grad()
        if feed is None:
            losses = one_stream(batches, train, CPU)
        else:
            losses = [train(*batch) for batch in feed(batches, CPU)]
        gradients = [p.grad.flatten() for p in model.parameters()]
        answers.append(torch.cat([torch.stack(losses), *gradients]))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_device_without_streams_has_one_queue(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    for feed in FEEDS:
        seen = [float(x[0, 0]) for x, _ in feed(numbered(), CPU)]
        assert seen == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_streams_of_real_modules_take_these_calls():
    """What the late device accepts, torch's own modules accept too."""
    for module in (torch.cuda, torch.xpu, torch.cpu):
        inspect.signature(module.current_stream).bind(CPU)
        inspect.signature(module.stream).bind(None)
        for name in ("wait_stream", "wait_event"):
            assert callable(getattr(module.Stream, name))
    names = inspect.signature(torch.cuda.Stream.__new__).parameters
    assert list(names)[1] == "device"
    torch.cpu.Stream(CPU)


# --- overlap from intervals -------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([], [(0, 1)], None),
        ([(0, 10)], [], 0.0),
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(10, 20)], 0.0),
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10)], [(-5, 5)], 0.5),
        ([(0, 10)], [(2, 4), (6, 7)], 0.3),
        ([(2, 4), (6, 8)], [(0, 10)], 1.0),
        ([(0, 4), (6, 8)], [(3, 7)], 2 / 6),
        # kernels of two streams at once hide a copy once
        ([(0, 10)], [(0, 6), (2, 4), (5, 8)], 0.8),
        ([(0, 10)], [(5, 8), (0, 6)], 0.8),
        ([(5, 5)], [(0, 10)], None),
    ],
)
def test_hidden_share_of_hand_made_intervals(copies, kernels, share):
    if share is None:
        assert hidden_share(copies, kernels) is None
    else:
        assert hidden_share(copies, kernels) == pytest.approx(share)


def test_hidden_share_agrees_with_counting_every_microsecond():
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        starts = torch.randint(60, (12,), generator=draw).tolist()
        lengths = torch.randint(1, 9, (12,), generator=draw).tolist()
        spans = [(a, a + n) for a, n in zip(starts, lengths, strict=True)]
        copies, kernels = spans[:4], spans[4:]
        busy = {t for a, b in kernels for t in range(a, b)}
        ticks = [t for a, b in copies for t in range(a, b)]
        right = sum(t in busy for t in ticks) / len(ticks)
        assert hidden_share(copies, kernels) == pytest.approx(right)


def chrome(name, cat, ts, dur, ph="X"):
    return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_trace_is_read_as_copies_and_kernels():
    trace = {
        "traceEvents": [
            chrome("aten::copy_", "cpu_op", 0, 100),
            chrome("cudaMemcpyAsync", "cuda_runtime", 0, 90),
            chrome("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 10.5, 8),
            chrome("CopyHostToDevice", "gpu_memcpy", "30", "4"),  # ROCm
            chrome("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 40, 8),
            chrome("Memset (Device)", "gpu_memset", 50, 1),
            chrome("sgemm", "kernel", 14.5, 10),
            {"ph": "M", "name": "process_name"},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1},
        ]
    }
    copies, kernels = device_intervals(json.loads(json.dumps(trace)))
    assert copies == [(10.5, 18.5), (30.0, 34.0)]
    assert kernels == [(14.5, 24.5)]
    assert hidden_share(copies, kernels) == pytest.approx(4 / 12)


def test_a_trace_of_a_cpu_holds_neither():
    copies, kernels = overlap_copies.profiled(
        lambda: torch.ones(8).add(1), CPU
    )
    assert copies == kernels == []


# --- the prediction ---------------------------------------------------------


def timeline(copy_s, compute_s, count, depth):
    """Return the end of a pipeline, batch by batch."""
    copied = computed = [0.0]
    for i in range(count):
        free = computed[max(0, i + 1 - depth)] if depth else computed[-1]
        copied = [*copied, max(copied[-1], free) + copy_s]
        computed = [*computed, max(computed[-1], copied[-1]) + compute_s]
    return computed[-1]


@pytest.mark.parametrize("copy_s", [1.0, 2.0, 5.0])
def test_the_bound_is_that_of_a_simulated_pipeline(copy_s, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.cuda)
    count, compute_s = 7, 2.0
    found = overlap_copies.predict(
        copy_s, compute_s, count, torch.device("cuda")
    )
    for name, depth in (("one stream", 0), ("double buffer", 2)):
        right = timeline(copy_s, compute_s, count, depth) / count
        assert found[name] == pytest.approx(right), name
    assert found["side stream"] == found["double buffer"]


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = overlap_copies.main(["--smoke", "--device", "cpu"])
    names = ["one stream", "side stream", "double buffer"]
    assert [row["name"] for row in rows] == 2 * names
    assert all(row["worst_error"] == 0 for row in rows[:3])
    shown = capsys.readouterr()
    assert "left out: copies over a link" in shown.out
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    drawn = overlap_copies.figure(rows)
    assert len(drawn.axes[0].patches) == 3


@pytest.mark.parametrize("function", overlap_copies.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone = pasted(function)
    if function is hidden_share:
        assert alone([(0, 2)], [(1, 2)]) == 0.5
    elif function is one_stream:
        found = alone(numbered(), step, CPU)
        assert [float(value) for value in found] == truth()
    else:
        found = [step(*batch) for batch in alone(numbered(), CPU)]
        assert [float(value) for value in found] == truth()


# --- on a GPU ---------------------------------------------------------------

LATE = 100_000_000  # cycles, some 50 ms


@pytest.mark.gpu
@pytest.mark.parametrize("feed", FEEDS)
def test_compute_is_late_and_reads_what_was_copied(feed):
    def right(feed):
        device = torch.device("cuda")
        source = [[torch.full((1 << 20,), i).pin_memory()] for i in range(8)]
        kept = torch.empty(8, 1 << 20, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        rows = iter(kept)
        for (ids,) in feed(source, device):
            torch.cuda._sleep(LATE)  # the host runs ahead of the kernels
            next(rows).copy_(ids)
            del ids
        torch.cuda.synchronize()
        return [bool((row == i).all()) for i, row in enumerate(kept)]

    assert right(feed) == [True] * 8
    keeps = {
        prefetched: "tensor.record_stream(compute)",
        double_buffered: "side.wait_stream(compute)",
    }
    assert not all(right(changed(feed, keeps[feed], "pass")))


@pytest.mark.gpu
@pytest.mark.parametrize("feed", FEEDS)
def test_the_trace_shows_copies_behind_kernels(feed):
    device = torch.device("cuda")
    work = torch.randn(4096, 4096, device=device)
    source = [[torch.ones(1 << 22).pin_memory()] for _ in range(6)]

    def copying(batches):
        for _ in batches:
            for _ in range(4):
                work @ work

    copies, kernels = overlap_copies.profiled(
        lambda: copying(feed(source, device)), device
    )
    assert len(copies) == 6
    behind = hidden_share(copies, kernels)
    copies, kernels = overlap_copies.profiled(
        lambda: one_stream(source, lambda _: copying([0]), device), device
    )
    assert behind > 0.5 and hidden_share(copies, kernels) < 0.05


@pytest.mark.gpu
def test_trains_alike_on_a_gpu():
    rows = overlap_copies.main(["--smoke", "--device", "cuda"])
    assert {row["copies"] for row in rows[-3:]} == {6}


class Late:
    """A pinned batch whose copy starts late; -1 lies there meanwhile."""

    def __init__(self, value):
        self.value = torch.full((1 << 20,), value).pin_memory()

    def to(self, device, non_blocking):
        there = torch.empty_like(self.value, device=device).fill_(-1)
        torch.cuda._sleep(LATE)
        return there.copy_(self.value, non_blocking=non_blocking)


@pytest.mark.gpu
def test_compute_waits_for_a_prefetched_batch(monkeypatch):
    device = torch.device("cuda")

    def right():
        source = [[Late(i)] for i in range(4)]
        torch.cuda.synchronize()
        found = [
            bool(torch.all(ids == i))
            for i, (ids,) in enumerate(prefetched(source, device))
        ]
        torch.cuda.synchronize()
        return found

    assert right() == [True] * 4  # which also loads the kernels
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
    assert not all(right())


@pytest.mark.parametrize("feed", FEEDS)
def test_a_batch_of_another_type_is_not_rounded(feed):
    """A buffer of integers would make 0 and 2 of these."""
    batches = [[torch.tensor([1, 2])]] * 2 + [[torch.tensor([0.5, 2.5])]] * 2
    found = [[t.clone() for t in batch] for batch in feed(batches, CPU)]
    torch.testing.assert_close(found, batches, rtol=0, atol=0)


def test_what_misses_its_prediction_is_said():
    rows = [{"name": "a", "times": 1.04}, {"name": "b", "times": 1.11}]
    text = "\n".join(overlap_copies.missed(rows))
    assert text.startswith("b: 11% above its prediction")
    assert "a: " not in text
