"""6.1.1  Parallel preprocessing · 增加資料前置處理的平行度

Question  How much of a training step is waiting for data, and how many
          worker processes does it take until there is nothing to wait for?
Expect    per sample, from load + compute down to max(compute, load / workers),
          and never below all work / cores; making the workers costs extra,
          once per epoch or, if they are kept, once
Run       python -m ch06_single_gpu_perf.loader_workers
          [--start-method spawn] [--smoke] [--save]
"""

import contextlib
import io
import multiprocessing
import time

import numpy as np
import torch
from torch import nn

from common import bench, machine, notebook, tables
from common.answers import TOLERANCE, agree, parts
from common.judging import judge

CLASSES = 4
WAITING = 0.05  # of the step; below it, more workers have nothing to hide
REASONS = {  # by the prediction: what is measured is that it waits
    "loading": "predicted: the workers cannot keep up; try more cores for "
    "more of them, or cheaper samples",
    "cores": "predicted: all cores are at work; try samples that are cheaper "
    "to load",
    "the step": "predicted: loading is hidden. What the prediction leaves "
    "out, and how to look:\n"
    "- other programs on the cores: python -m ch04_profiling.quiet_machine\n"
    "- handing batches over: let the dataset return tensors made before; "
    "what still waits is that",
}
ROUNDS, FEWEST_ROUNDS, BUDGET_S = 10, 3, 30.0


def sample_stream(seed, epoch, index):
    """A sample's random numbers follow from its name, not from who draws.

    A generator that the dataset holds is copied with it, in one state, to
    every worker: all of them repeat the same draws.  A worker's own seed
    repairs that, but then the draws depend on the number of workers.

    Returns:
        A ``random.Random`` of this sample in this epoch.
    """
    import random

    # a text, because it is hashed: neighbours get unrelated streams
    return random.Random(f"{seed} {epoch} {index}")


def parallel_loader(
    dataset, order, batch, workers, keep=False, start=None, pin=False
):
    """Worker processes prepare whole batches, two each ahead of the loop.

    Args:
        order: yields the keys that ``dataset[key]`` gets.
        keep: the workers of one epoch serve the next one too.
        start: how a process is made; None takes the platform's way.
        pin: copy batches to page-locked memory; for CUDA only.
    """
    how = {"num_workers": workers, "pin_memory": pin, "drop_last": True}
    if workers:  # refused without any
        how["prefetch_factor"] = 2
        how["persistent_workers"] = keep
        how["multiprocessing_context"] = start
    return torch.utils.data.DataLoader(dataset, batch, sampler=order, **how)


def stopwatch(device):
    """A GPU stamps an event when it reaches it; a CPU reads its clock.

    Neither makes anybody wait: what is still running keeps running, and the
    stamps are read when the loop is over.

    Returns:
        mark() -> stamp, and seconds(stamp, later stamp).
    """
    if torch.device(device).type == "cpu":
        import time

        return time.perf_counter, lambda a, b: b - a

    def mark():
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def seconds(a, b):
        b.synchronize()
        return a.elapsed_time(b) / 1e3

    return mark, seconds


def waiting_share(batches, step, mark, seconds, settle=1, most=1000):
    """A loop waits in ``next``: stamp the time around it and the step.

    ``mark`` and ``seconds`` are a ``stopwatch``.  The first ``settle``
    batches are the start, for the workers all began at once; after ``most``
    it stops, so that a loader without an end will do.

    Returns start_up_s (making workers) and first_batch_s; of the later
    batches wait_s, compute_s, the share waited, and their number.
    """
    stamps = [mark()]
    iterator = iter(batches)  # makes the workers
    stamps.append(mark())
    for _, batch in zip(range(most), iterator, strict=False):
        stamps.append(mark())  # it has come
        step(batch)
        stamps.append(mark())
    start_up, *took = map(seconds, stamps, stamps[1:])
    waits, steps = took[::2], took[1::2]
    if (count := len(steps) - settle) < 1:
        raise ValueError(f"{len(steps)} batches, {settle} to start: too few")
    wait, compute = sum(waits[settle:]), sum(steps[settle:])
    found = {"start_up_s": start_up, "first_batch_s": waits[0]}
    found |= {"wait_s": wait, "compute_s": compute, "batches": count}
    return found | {"share": wait / (wait + compute)}


def step_bound(load, compute, own, workers, cores, threads=1):
    """Workers load while the step computes, as far as there are cores.

    Args:
        load: seconds of one core per sample.
        compute: seconds of the step per sample, where it is done.
        own: seconds that it occupies the training process: all of them on a
            CPU, the launches on a GPU.
        workers: processes; none: the training process loads, too.
        cores: that all of them share.
        threads: of the training process, while it is occupied.

    Returns:
        (seconds per sample that the loop needs at least, what sets them).
    """
    loading = load / workers if workers else load + own
    shared = (load + own * threads) / cores
    bounds = (compute, "the step"), (loading, "loading"), (shared, "cores")
    return max(bounds, key=lambda bound: bound[0])


# --- the photographs ---------------------------------------------------------


def photographs(count, width=500, height=375):
    """Cut JPEGs out of a photograph that comes with matplotlib.

    Returns:
        ``count`` files as bytes, some 50 KiB each: ordinary photographs.

    Raises:
        Refusal: no Pillow, or a matplotlib without its sample data.
    """
    try:
        from matplotlib import cbook
        from PIL import Image

        path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
        whole = Image.open(path).convert("RGB")
    except (ImportError, OSError) as error:
        raise bench.Refusal(
            f"matplotlib's photograph cannot be read ({error}): install "
            "matplotlib from PyPI (pip install --force-reinstall matplotlib)"
        ) from None
    files = []
    for i in range(count):
        draw = sample_stream("photographs", 0, i)
        x = draw.randint(0, whole.width - width)
        y = draw.randint(0, whole.height - height)
        file = io.BytesIO()
        part = whole.crop((x, y, x + width, y + height))
        part.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def decoded(file, draw, size):
    """Decode a JPEG, resize a random part of it, scale to ±1.

    Args:
        file: bytes.
        draw: a ``random.Random``.
        size: of the square that the part is resized to.

    Returns:
        float32, (3, size, size).
    """
    from PIL import Image

    image = Image.open(io.BytesIO(file)).convert("RGB")
    side = draw.uniform(0.5, 1.0) * min(image.size)
    x = draw.uniform(0, image.width - side)
    y = draw.uniform(0, image.height - side)
    image = image.resize(
        (size, size),
        Image.Resampling.BILINEAR,
        box=(x, y, x + side, y + side),
    )
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1).float().div_(127.5).sub_(1.0)


class Photographs(torch.utils.data.Dataset):
    """JPEGs in memory; the key (epoch, index) says all about a sample.

    At the module's top level, because spawn and forkserver import it.
    """

    def __init__(self, files, count, size, seed=0):
        self.files, self.count = files, count
        self.size, self.seed = size, seed

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        epoch, index = key
        draw = sample_stream(self.seed, epoch, index)
        file = self.files[index % len(self.files)]
        return decoded(file, draw, self.size), index % CLASSES, index


class Epochs(torch.utils.data.Sampler):
    """Shuffle anew each time it is iterated; a key carries its epoch.

    So workers that are kept hear of the new epoch with every sample: what
    ``dataset.epoch = 1`` sets in the training process never reaches them.
    """

    def __init__(self, count, seed=0):
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = list(range(self.count))
        sample_stream(self.seed, epoch, "order").shuffle(order)
        return iter([(epoch, index) for index in order])


# --- the training ------------------------------------------------------------


def network(width, size, seed=0):
    """Make three convolutions and a classifier, the same for one seed.

    Every layer's backward adds in a fixed order (adaptive pooling's does
    not on a GPU): losses can be compared to the bit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, width, 7, stride=4, padding=3),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(size // 16),  # (B, 4 * width, 1, 1)
            nn.Flatten(),
            nn.Linear(4 * width, CLASSES),
        )


class Training:
    """A model and its steps; ``answer`` is what every loader must agree on."""

    def __init__(self, width, size, device):
        self.device = device
        self.model = network(width, size).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.losses, self.indices = [], []

    def step(self, batch):
        """Train on one batch; nothing here waits for the device."""
        images, labels, indices = batch
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.indices.append(indices)

    def answer(self):
        """Return the losses, the order of the samples, the last gradients."""
        return {
            "losses": torch.stack(self.losses),
            "order": torch.stack(self.indices),
            "gradients": [p.grad for p in self.model.parameters()],
        }


def per_sample(found, batch):
    """Divide what ``waiting_share`` returns by its samples."""
    samples = found["batches"] * batch
    return {key: found[key] / samples for key in ("wait_s", "compute_s")}


def costs(loader, training, batch):
    """Measure load and compute apart: seconds per sample, each alone.

    Args:
        loader: without workers.
        training: a fresh ``Training``.
        batch: samples per batch.

    Returns:
        load, compute and own, as ``step_bound`` takes them.
    """
    clock, kept = stopwatch("cpu"), []
    found = waiting_share(loader, kept.append, *clock)
    load = per_sample(found, batch)["wait_s"]
    # few: a GPU's queue must not fill up, or the host's clock sees the work
    few = [kept[0]] * min(8, len(kept))
    found = waiting_share(few, training.step, *clock)
    own = compute = per_sample(found, batch)["compute_s"]
    if training.device.type != "cpu":  # the host has only launched it
        watch = stopwatch(training.device)
        found = waiting_share(few, training.step, *watch)
        compute = per_sample(found, batch)["compute_s"]
    return {"load": load, "compute": compute, "own": own}


def check(answers, exact):
    """Prove that all loaders trained alike: order, losses and gradients.

    Args:
        answers: row name to ``Training.answer``; the first is the baseline.
        exact: to the bit; else within the usual tolerance.

    Returns:
        (parts compared, worst error).

    Raises:
        Mismatch: naming the row and what differs.
    """
    baseline, *others = answers
    expected = dict(parts(answers[baseline]))
    errors = [
        agree(
            name,
            dict(parts(answers[name])),
            baseline,
            expected,
            None if exact else TOLERANCE,
        )
        for name in others
    ]
    return len(expected), max(errors, default=0.0)


def rounds_of(loaders, train, alone, settle, fewest, most, budget_s):
    """Let the loaders take turns, an epoch each, and keep what each showed.

    The first round makes what is kept, warms up and is compared, not timed.

    Args:
        loaders: row name to loader.
        train: () -> fresh ``Training``.
        alone: () -> ``costs``, measured again in every round: a neighbour
            on the machine slows the prediction and the rows alike.
        settle: batches that belong to the start.
        fewest: rounds, at least.
        most: rounds, at most.
        budget_s: seconds after which no new round begins.

    Returns:
        (rounds: dicts of row name to ``waiting_share``; the rounds' costs;
        what ``check`` returns).
    """
    names, rounds, apart = list(loaders), [], []
    start = time.monotonic()
    while len(rounds) <= fewest or (
        len(rounds) <= most and time.monotonic() - start < budget_s
    ):
        turn = len(rounds) % len(names)
        order = names[turn:] + names[:turn]
        found, answers = {}, {}
        for name in order if len(rounds) % 2 else order[::-1]:
            training = train()
            watch = stopwatch(training.device)
            found[name] = waiting_share(
                loaders[name], training.step, *watch, settle
            )
            answers[name] = training.answer()
        answers = {name: answers[name] for name in names}
        checked = check(answers, training.device.type == "cpu")
        rounds.append(found)
        apart.append(alone())
    return rounds[1:], apart[1:], checked


def rows_of(rounds, batch, predicted):
    """Turn rounds into rows: medians per sample, shares and verdicts.

    Args:
        rounds: dicts of row name to ``waiting_share``.
        batch: samples per batch.
        predicted: row name to (seconds per sample, what sets them).
    """
    names = list(predicted)
    each = [{n: per_sample(r[n], batch) for n in names} for r in rounds]
    samples = np.array(
        [[sum(found[name].values()) for name in names] for found in each]
    )
    few = len(rounds) < 8  # luck could look like a difference
    rows = judge(names, samples, smoke=few)
    for row in rows:
        name = row["name"]
        for source, keys in (
            (rounds, ("start_up_s", "first_batch_s", "share")),
            (each, ("wait_s", "compute_s")),
        ):
            for key in keys:
                row[key] = float(np.median([r[name][key] for r in source]))
        waits = row["share"] >= WAITING
        row |= {
            "unit": "sample",
            "predicted_s": predicted[name][0],
            "set_by": predicted[name][1],
            "loader_bound": waits,
            "waiting": f"{row['share']:.0%}" if waits else "not loader-bound",
        }
        if few and row["verdict"] != "baseline":
            row["verdict"] = f"{row['ratio']:.2f}×, not judged"
    return rows


def conclusion(rows):
    """Say in words what the rows show: lines of at most 100 columns."""
    base, *others = rows
    if not base["loader_bound"]:
        yield (
            f"not loader-bound even without workers: {base['share']:.1%} of "
            "the step is waiting; look elsewhere"
        )
        return
    cured = [row for row in others if not row["loader_bound"]]
    least = min(others, key=lambda row: row["share"])
    if cured:
        yield (
            f"not loader-bound from {cured[0]['name']!r} on; without workers "
            f"{base['share']:.0%} of the step was waiting"
        )
    else:
        yield (
            f"loader-bound in every row, {least['share']:.0%} waiting at "
            f"best ({least['name']}):"
        )
        yield REASONS[least["set_by"]]
    for row in others:
        saved = base["median_s"] - row["median_s"]
        start = row["start_up_s"] + row["first_batch_s"]
        start -= base["start_up_s"] + base["first_batch_s"]
        begins = f"{row['name']}: an epoch begins {tables.seconds(abs(start))}"
        if start <= 0:
            yield f"{begins} sooner"
        elif row["differs"] is False or saved <= 0:
            yield f"{begins} later; no gain per sample to pay for it was seen"
        else:
            paid = f"paid back after {start / saved:,.0f} samples"
            yield f"{begins} later; {paid}"
    over = max(rows, key=lambda row: row["median_s"] / row["predicted_s"])
    part = over["median_s"] / over["predicted_s"] - 1
    yield f"furthest above its prediction: {over['name']}, by {part:.0%}"


def announce(args, predicted, alone, cores):
    """Print, before anything runs in parallel, what it should come to."""
    load, compute = (tables.seconds(alone[k]) for k in ("load", "compute"))
    bench.report(
        args,
        [
            {"name": name, "predicted_s": seconds, "set_by": what}
            for name, (seconds, what) in predicted.items()
        ],
        {"name": "row", "predicted_s": "s per sample", "set_by": "set by"},
        {"alone": alone},
        f"expected at least, of load {load} and compute {compute} per "
        f"sample, each alone, on {cores} cores",
    )


def show(args, rows, checked):
    """Print what was found: each epoch's start, and the steady state."""
    start = ("name", "start_up_s", "first_batch_s")
    bench.report(
        args,
        [{key: row[key] for key in start} for row in rows],
        {"name": "row", "start_up_s": "workers made", start[2]: "first batch"},
        title="start of an epoch",
    )
    columns = {
        "name": "row",
        "wait_s": "wait",
        "compute_s": "compute",
        "median_s": "step",
        "predicted_s": "expected",
        "waiting": "waiting",
        "verdict": "speed",
    }
    bench.report(args, rows, columns, title="steady state, per sample")
    compared, worst = checked
    print(
        f"answers agree (parts: {compared}, worst error {worst:.2g}) · "
        f"{rows[0]['rounds']} rounds"
    )
    if not args.smoke:
        print(*conclusion(rows), sep="\n")


def figure(rows):
    """Draw compute and waiting per sample, and the predictions, as bars."""
    import matplotlib
    from matplotlib.figure import Figure

    y, left = range(len(rows)), 0
    with matplotlib.rc_context(notebook.fonts()):
        size = (7.5, 1.5 + 0.36 * len(rows))
        drawn = Figure(figsize=size, dpi=100, layout="constrained")
        axes = drawn.subplots()
        for key, words in (
            ("compute_s", "compute · 計算"),
            ("wait_s", "waiting · 等待"),
        ):
            ms = [1e3 * row[key] for row in rows]
            axes.barh(y, ms, 0.7, left, label=notebook.label(words))
            left = ms
        ms = [1e3 * row["predicted_s"] for row in rows]
        words = notebook.label("predicted · 預測")
        axes.plot(ms, y, "k|", markersize=18, label=words)
        axes.set_yticks(y, [row["name"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms per sample")
        axes.spines[["top", "right"]].set_visible(False)
        # above: bars may be anywhere below
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
        axes.legend(frameon=False, ncols=3, **place)
        title = "Where a sample's time goes · 每個樣本的時間花在哪裡"
        drawn.suptitle(notebook.label(title), fontsize=12)
    return drawn


TECHNIQUES = (
    parallel_loader,
    sample_stream,
    stopwatch,
    waiting_share,
    step_bound,
)


@contextlib.contextmanager
def repeatable(threads):
    """Leave cores to workers, let cuDNN add in a fixed order; undo both."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            yield
    finally:
        torch.set_num_threads(before)


def flags(parser):
    """Add how a worker process is made."""
    parser.add_argument(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        help="how a worker is made; default: the platform's",
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    on_cpu, cores = args.device.type == "cpu", machine.cores()
    threads = max(1, cores // 2) if on_cpu else 1
    counts = [0, *(n for n in (1, 2, 4, 8, 16) if n <= cores)]
    batch, width, size = (8, 64, 96) if on_cpu else (32, 512, 96)
    batches, settle, files = max(16, 4 * counts[-1]), counts[-1], 32
    turns = {"fewest": FEWEST_ROUNDS, "most": ROUNDS, "budget_s": BUDGET_S}
    if args.smoke:
        counts, batch, width, size = counts[:2], 2, 8, 32
        batches, settle, files = 4, 1, 4
        turns = {"fewest": 3, "most": 3, "budget_s": 0.0}
    dataset = Photographs(photographs(files), batches * batch, size)

    def loader(workers, keep=False):
        order, pin = Epochs(len(dataset)), args.device.type == "cuda"
        return parallel_loader(
            dataset, order, batch, workers, keep, args.start_method, pin
        )

    def training():
        return Training(width, size, args.device)

    rows = {n: f"{n or 'no'} worker{'' if n == 1 else 's'}" for n in counts}
    kept = f"{rows[counts[-1]]}, kept"
    loaders = {name: loader(n) for n, name in rows.items()}
    loaders[kept] = loader(counts[-1], keep=True)

    def alone():
        return costs(loader(0), training(), batch)

    def predicted(found):
        return {
            name: step_bound(
                **found, workers=made.num_workers, cores=cores, threads=threads
            )
            for name, made in loaders.items()
        }

    with repeatable(threads):
        alone()  # warm
        first = alone()
        announce(args, predicted(first), first, cores)
        rounds, apart, checked = rounds_of(
            loaders, training, alone, settle, **turns
        )
    found = {k: float(np.median([c[k] for c in apart])) for k in first}
    rows = rows_of(rounds, batch, predicted(found))
    show(args, rows, checked)
    return rows


if __name__ == "__main__":
    bench.run(main)
