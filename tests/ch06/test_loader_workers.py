"""6.1.1: the same training for any number of workers; waiting told apart."""

import itertools
import math
import multiprocessing
import warnings

import numpy as np
import pytest
import torch

from ch06_single_gpu_perf import loader_workers as lesson
from common import bench
from common.answers import Mismatch

METHODS = multiprocessing.get_all_start_methods()
COUNT, BATCH, SIZE = 12, 2, 32


@pytest.fixture(scope="module")
def files():
    return lesson.photographs(3)


class HeldGenerator(lesson.Photographs):
    """Wrong: the generator is copied to every worker in the same state."""

    def __init__(self, *args):
        super().__init__(*args)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, key):
        file = self.files[key[1] % len(self.files)]
        draw = lesson.sample_stream(self.generator.integers(2**31), 0, 0)
        return lesson.decoded(file, draw, self.size), key[1] % 4, key[1]


class WorkersOwnStream(lesson.Photographs):
    """Wrong here: what is drawn depends on the number of workers."""

    def __getitem__(self, key):
        file = self.files[key[1] % len(self.files)]
        draw = lesson.sample_stream(torch.randint(2**31, ()).item(), 0, 0)
        return lesson.decoded(file, draw, self.size), key[1] % 4, key[1]


class EpochAttribute(torch.utils.data.Dataset):
    """Wrong with kept workers: their copy never hears of a new epoch."""

    epoch = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, key):
        return lesson.sample_stream(0, self.epoch, key[1]).random()


class EpochInKey(torch.utils.data.Dataset):
    """Draw from the key alone."""

    def __len__(self):
        return COUNT

    def __getitem__(self, key):
        return lesson.sample_stream(0, *key).random()


class Threads(torch.utils.data.Dataset):
    """Say how many threads the process has that asks."""

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return torch.get_num_threads()


class Drawn(torch.utils.data.Dataset):
    """Return what a held generator draws."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, key):
        return self.generator.integers(2**31)


def trained(dataset, workers, order=None, start=None):
    """Return the answer of one epoch."""
    training = lesson.Training(8, SIZE, torch.device("cpu"))
    order = order or lesson.Epochs(COUNT)
    loader = lesson.parallel_loader(
        dataset, order, BATCH, workers, start=start
    )
    for batch in loader:
        training.step(batch)
    return training.answer()


def test_smoke(capsys):
    rows = lesson.main(["--smoke"])
    assert [row["name"] for row in rows] == [
        "no workers",
        "1 worker",
        "1 worker, kept",
    ]
    for row in rows:
        assert row["median_s"] > 0 and row["predicted_s"] > 0
        assert row["unit"] == "sample"
        assert 0 <= row["share"] <= 1
        assert row["wait_s"] >= 0 and row["compute_s"] > 0
    out = capsys.readouterr().out
    assert out.index("expected at least") < out.index("steady state")
    assert "worst error 0" in out
    assert max(map(len, out.splitlines())) <= 100
    assert lesson.figure(rows).get_axes()


@pytest.mark.parametrize("start", METHODS)
def test_every_way_to_make_a_worker_trains_alike(files, start):
    dataset = lesson.Photographs(files, COUNT, SIZE)
    workers = 2 if start == "fork" else 1
    answers = {
        "none": trained(dataset, 0),
        "some": trained(dataset, workers, start=start),
    }
    compared, worst = lesson.check(answers, exact=True)
    assert compared == 2 + 8 and worst == 0
    assert len(answers["none"]["losses"]) == COUNT // BATCH


@pytest.mark.parametrize("wrong", [HeldGenerator, WorkersOwnStream])
def test_draws_that_depend_on_the_worker_are_caught(files, wrong):
    answers = {}
    for workers in (0, 2):
        torch.manual_seed(0)
        dataset = wrong(files, COUNT, SIZE)
        answers[f"{workers} workers"] = trained(dataset, workers)
    with pytest.raises(Mismatch, match=r"'2 workers'.*(losses|gradients)"):
        lesson.check(answers, exact=True)
    with pytest.raises(Mismatch):  # a GPU's tolerance sees it as well
        lesson.check(answers, exact=False)


def test_a_held_generator_repeats_in_every_worker():
    loader = lesson.parallel_loader(Drawn(), range(8), 2, 2)
    batches = [batch.tolist() for batch in loader]
    assert batches[0] == batches[1] and batches[2] == batches[3]


def test_an_unseeded_order_is_caught(files):
    dataset = lesson.Photographs(files, COUNT, SIZE)

    class Unseeded(lesson.Epochs):
        def __iter__(self):
            order = torch.randperm(self.count).tolist()
            return iter([(0, index) for index in order])

    torch.manual_seed(0)
    answers = {n: trained(dataset, 0, Unseeded(COUNT)) for n in ("a", "b")}
    with pytest.raises(Mismatch):
        lesson.check(answers, exact=False)


def test_kept_workers_hear_of_the_epoch_by_the_key():
    def two_epochs(dataset):
        order = lesson.Epochs(COUNT)
        loader = lesson.parallel_loader(dataset, order, BATCH, 1, keep=True)
        epochs = []
        for epoch in range(2):
            dataset.epoch = epoch
            epochs.append(sorted(torch.cat(list(loader)).tolist()))
        return epochs

    first, second = two_epochs(EpochInKey())
    assert first != second
    first, second = two_epochs(EpochAttribute())
    assert first == second  # the known mistake


def test_epochs_are_shuffled_anew_and_repeat_with_the_seed():
    order = lesson.Epochs(COUNT)
    first, second = list(order), list(order)
    assert sorted(first) == [(0, i) for i in range(COUNT)]
    assert {epoch for epoch, _ in second} == {1}
    assert [i for _, i in first] != [i for _, i in second]
    assert list(lesson.Epochs(COUNT)) == first
    assert list(lesson.Epochs(COUNT, seed=1)) != first


def test_streams_differ_by_seed_epoch_and_index():
    names = [(s, e, i) for s in range(3) for e in range(3) for i in range(30)]
    draws = [lesson.sample_stream(*name).random() for name in names]
    assert len(set(draws)) == len(names)
    assert draws == [lesson.sample_stream(*name).random() for name in names]


def test_workers_have_one_thread_and_nobody_warns():
    with warnings.catch_warnings(), lesson.repeatable(2):
        # Python's own about fork beside threads; not ours to prevent
        warnings.simplefilter("error", UserWarning)
        assert torch.get_num_threads() == 2
        for workers, threads in ((0, 2), (1, 1)):
            loader = lesson.parallel_loader(Threads(), range(2), 2, workers)
            assert [b.tolist() for b in loader] == [[threads] * 2]
            assert loader.persistent_workers is False
    assert not loader.pin_memory


# --- the time ---------------------------------------------------------------


class Scene:
    """A clock that only what happens moves, and a diary of it."""

    def __init__(self, loads, step):
        self.loads, self.cost = loads, step
        self.now, self.diary = 0.0, []

    def spend(self, seconds, what):
        self.now += seconds
        self.diary.append(what)

    def __iter__(self):
        self.spend(5.0, "iter")
        return self.batches()

    def batches(self):
        for load in self.loads:
            self.spend(load, "next")
            yield load

    def step(self, batch):
        self.spend(self.cost, "step")

    def mark(self):
        self.diary.append("mark")
        return self.now

    def seconds(self, a, b):
        self.diary.append("read")
        return b - a


def test_waiting_is_told_from_start_and_compute():
    scene = Scene([7.0, 1.0, 1.0, 2.0], 4.0)
    found = lesson.waiting_share(
        scene, scene.step, scene.mark, scene.seconds, settle=2
    )
    assert found == {
        "start_up_s": 5.0,
        "first_batch_s": 7.0,
        "wait_s": 3.0,
        "compute_s": 8.0,
        "share": pytest.approx(3 / 11),
        "batches": 2,
    }
    assert lesson.per_sample(found, 2) == {"wait_s": 0.75, "compute_s": 2.0}


def test_stamps_stand_at_the_borders_and_are_read_afterwards():
    scene = Scene([1.0, 1.0], 1.0)
    lesson.waiting_share(scene, scene.step, scene.mark, scene.seconds)
    batch = ["next", "mark", "step", "mark"]
    assert scene.diary == ["mark", "iter", "mark", *batch * 2, *["read"] * 5]


def test_a_start_that_counts_as_steady_would_be_seen():
    """Without ``settle`` the first batch drowns the steady state."""
    scene = Scene([7.0] + [0.0] * 3, 1.0)
    right = lesson.waiting_share(scene, scene.step, scene.mark, scene.seconds)
    wrong = lesson.waiting_share(
        scene, scene.step, scene.mark, scene.seconds, settle=0
    )
    assert right["share"] == 0 and wrong["share"] > 0.6


def test_rounds_leave_out_the_batches_that_belong_to_the_start(monkeypatch):
    asked = []

    def share(batches, step, mark, seconds, settle):
        asked.append((batches, settle))
        return {}

    class Trained:
        device, step = torch.device("cpu"), None

        def answer(self):
            return {"loss": torch.zeros(1)}

    monkeypatch.setattr(lesson, "waiting_share", share)
    lesson.rounds_of({"a": 1, "b": 2}, Trained, dict, 5, 1, 1, 0.0)
    assert sorted(asked) == [(1, 5), (1, 5), (2, 5), (2, 5)]


@pytest.mark.parametrize("loads", [[], [1.0]])
def test_too_few_batches_are_one_sentence(loads):
    scene = Scene(loads, 1.0)
    said = f"{len(loads)} batches, 1 to start: too few"
    with pytest.raises(ValueError, match=said):
        lesson.waiting_share(scene, scene.step, scene.mark, scene.seconds)


def test_a_loader_without_an_end_will_do():
    scene = Scene(itertools.repeat(1.0), 3.0)
    found = lesson.waiting_share(
        scene, scene.step, scene.mark, scene.seconds, most=9
    )
    assert found["batches"] == 8 and found["share"] == 0.25
    assert scene.diary.count("next") == 9  # none is loaded for nobody
    scene.diary.clear()
    lesson.waiting_share(scene, scene.step, scene.mark, scene.seconds)
    assert scene.diary.count("step") == 1000


def test_a_gpus_stopwatch_never_waits_before_it_is_read(monkeypatch):
    calls = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing and str(device) == "cuda:0"
            self.number = len(calls)

        def record(self, stream):
            assert stream == "stream of cuda:0"
            calls.append(("record", self.number))

        def synchronize(self):
            calls.append(("wait", self.number))

        def elapsed_time(self, later):
            return 250.0 * (later.number - self.number)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda d: f"stream of {d}"
    )
    mark, seconds = lesson.stopwatch(torch.device("cuda:0"))
    scene = Scene([1.0, 1.0], 1.0)
    found = lesson.waiting_share(scene, scene.step, mark, seconds)
    kinds = [kind for kind, _ in calls]
    assert kinds == ["record"] * 6 + ["wait"] * 5
    assert [number for kind, number in calls if kind == "wait"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert found["wait_s"] == found["compute_s"] == 0.25


@pytest.mark.parametrize(
    ("workers", "cores", "threads", "own", "bound"),
    [
        (0, 8, 1, 2.0, (5.0, "loading")),  # one after the other
        (1, 8, 1, 2.0, (3.0, "loading")),
        (2, 8, 1, 2.0, (2.0, "the step")),
        (2, 2, 1, 2.0, (2.5, "cores")),  # 3 + 2 s of work for two
        (4, 4, 4, 2.0, (2.75, "cores")),
        (0, 8, 1, 0.5, (3.5, "loading")),  # a GPU computes meanwhile
        (4, 1, 1, 0.5, (3.5, "cores")),  # and asks only launches of a core
        (8, 8, 1, 0.5, (2.0, "the step")),
    ],
)
def test_bound_by_hand(workers, cores, threads, own, bound):
    found = lesson.step_bound(3.0, 2.0, own, workers, cores, threads)
    assert found == bound


def row(name, wait, compute, start=0.0, differs=True):
    step = wait + compute
    share = wait / step
    return {
        "name": name,
        "wait_s": wait,
        "compute_s": compute,
        "median_s": step,
        "predicted_s": step / 1.25,
        "set_by": "cores",
        "share": share,
        "loader_bound": share >= lesson.WAITING,
        "start_up_s": start,
        "first_batch_s": 0.1,
        "differs": differs,
    }


def said(*rows):
    return "\n".join(lesson.conclusion(rows))


def test_conclusions_follow_the_rows():
    idle = row("no workers", 0.001, 0.999)
    text = said(idle, row("1 worker", 0.0, 1.0, 3.0))
    assert text.startswith("not loader-bound even without workers: 0.1%")
    base = row("no workers", 1.0, 1.0)
    text = said(base, row("1 worker", 0.01, 1.0, 2.0))
    assert "not loader-bound from '1 worker' on" in text
    assert "50% of the step was waiting" in text
    assert "begins 2 s later; paid back after 2 samples" in text
    text = said(base, row("1 worker", 0.5, 1.0, 2.0, differs=False))
    assert "loader-bound in every row, 33% waiting" in text
    assert "no gain per sample" in text and "by 25%" in text
    assert lesson.REASONS["cores"] in text
    # that what should be hidden is not has causes that nobody measured here
    hidden = [row("no workers", 1.0, 1.0), row("1 worker", 0.2, 1.0)]
    text = said(*(found | {"set_by": "the step"} for found in hidden))
    assert "What the prediction leaves out, and how to look:" in text
    assert "quiet_machine" in text and "made before" in text
    for reason in lesson.REASONS.values():
        assert reason.startswith("predicted: ")
    assert max(map(len, text.splitlines())) <= 100


def test_costs_are_measured_apart(files):
    dataset = lesson.Photographs(files, COUNT, SIZE)
    loader = lesson.parallel_loader(dataset, lesson.Epochs(COUNT), BATCH, 0)
    training = lesson.Training(8, SIZE, torch.device("cpu"))
    found = lesson.costs(loader, training, BATCH)
    assert found["own"] == found["compute"] > 0 and found["load"] > 0
    assert len(training.losses) == min(8, COUNT // BATCH)
    assert torch.stack(training.indices).unique(dim=0).shape[0] == 1


# --- the rest ---------------------------------------------------------------


def test_the_photographs_are_real_and_repeat(files):
    assert files == lesson.photographs(3)
    assert all(file[:2] == b"\xff\xd8" for file in files)
    sizes = [len(file) for file in lesson.photographs(8)]
    assert 20_000 < min(sizes) and max(sizes) < 120_000
    image = lesson.decoded(files[0], lesson.sample_stream(0, 0, 0), SIZE)
    assert image.shape == (3, SIZE, SIZE) and image.dtype == torch.float32
    assert image.min() >= -1 and image.max() <= 1 and image.std() > 0.1


def test_a_missing_photograph_is_one_sentence(monkeypatch):
    from matplotlib import cbook

    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(cbook, "get_sample_data", missing)
    with pytest.raises(bench.Refusal, match="install matplotlib"):
        lesson.photographs(1)


def test_techniques_work_when_pasted(pasted):
    loader = pasted(lesson.parallel_loader)(range(6), range(6), 2, 0)
    watch = pasted(lesson.stopwatch)("cpu")
    steps = []
    found = pasted(lesson.waiting_share)(loader, steps.append, *watch)
    assert [batch.tolist() for batch in steps] == [[0, 1], [2, 3], [4, 5]]
    assert found["batches"] == 2 and math.isfinite(found["share"])
    assert pasted(lesson.step_bound)(1, 2, 2, 1, 4) == (2, "the step")
    draw = pasted(lesson.sample_stream)(0, 1, 2)
    assert draw.random() == lesson.sample_stream(0, 1, 2).random()


@pytest.mark.gpu
def test_on_a_gpu():
    rows = lesson.main(["--smoke", "--device", "cuda"])
    assert all(0 <= row["share"] <= 1 for row in rows)


@pytest.mark.gpu
def test_batches_are_pinned_and_a_queue_of_steps_is_not_waiting():
    loader = lesson.parallel_loader(
        [torch.ones(3)] * 6, range(6), 2, 0, pin=True
    )
    assert all(batch.is_pinned() for batch in loader)
    a = torch.ones(4096, 4096, device="cuda")
    mark, seconds = lesson.stopwatch("cuda")
    found = lesson.waiting_share([a] * 20, lambda x: x @ a, mark, seconds)
    # the host runs ahead: to the device the next batch is always there
    assert found["share"] < 0.5
