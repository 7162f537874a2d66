"""Every stream repeats with the seed and with a saved state."""

import io
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from common import seeding
from common.bench import Refusal


class Augmented(Dataset):
    """Holds a NumPy generator, as many datasets do."""

    def __init__(self):
        self.nested = {"transforms": [Jitter(np.random.default_rng(0))]}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.nested["transforms"][0].draw()


class Jitter:
    def __init__(self, rng):
        self.rng = rng

    def draw(self):
        return int(self.rng.integers(2**62))


class Stream(IterableDataset):
    """Makes its generator where it draws."""

    def __iter__(self):
        rng = seeding.worker_generator()
        return iter(int(rng.integers(2**62)) for _ in range(4))


def epochs(dataset, seed=3, count=2, **options):
    """Return the draws of each epoch, as a set of lists per batch."""
    seeding.seed_everything(seed)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, **options)
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def all_differ(drawn):
    values = [v for epoch in drawn for batch in epoch for v in batch]
    return len(set(values)) == len(values)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
    os.environ.pop("PYTHONHASHSEED", None)


def test_a_held_generator_repeats_in_every_worker_without_the_cure():
    drawn = epochs(Augmented())
    assert not all_differ(drawn)
    assert drawn[0][0] == drawn[0][1]  # both workers drew the same
    assert drawn[0] == drawn[1]  # and so did both epochs


def test_seeding_numpys_global_state_does_not_cure_it():
    drawn = epochs(Augmented(), worker_init_fn=np.random.seed)
    assert not all_differ(drawn)


@pytest.mark.parametrize("wrap", [False, True])
def test_worker_init_gives_every_worker_and_epoch_a_stream(wrap):
    def dataset():
        return Subset(Augmented(), range(8)) if wrap else Augmented()

    cure = {"worker_init_fn": seeding.worker_init}
    drawn = epochs(dataset(), **cure)
    assert all_differ(drawn)
    assert drawn == epochs(dataset(), **cure)
    assert drawn != epochs(dataset(), seed=4, **cure)


def test_persistent_workers_go_on():
    options = {
        "worker_init_fn": seeding.worker_init,
        "persistent_workers": True,
    }
    assert all_differ(epochs(Augmented(), **options))
    assert all_differ(epochs(Stream(), **options))


@pytest.mark.ranks
def test_workers_that_are_not_forked():
    methods = torch.multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    drawn = epochs(
        Augmented(),
        count=1,
        multiprocessing_context=method,
        worker_init_fn=seeding.worker_init,
    )
    assert all_differ(drawn)


def test_worker_generator_without_workers():
    def draw(seed):
        seeding.seed_everything(seed)
        return [b.tolist() for _ in "ab" for b in DataLoader(Stream())]

    first = draw(3)
    assert len({v for batch in first for v in batch}) == 8
    assert first == draw(3) != draw(4)


def test_initial_seed_would_repeat_over_the_epochs():
    """Why the seed is drawn: the usual recipe, in the main process."""
    seeding.seed_everything(3)
    first = np.random.default_rng(torch.initial_seed()).integers(2**62)
    again = np.random.default_rng(torch.initial_seed()).integers(2**62)
    assert first == again


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        {} if not torch.cuda.is_available() else torch.rand(3).cuda().tolist(),
    )


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 1])
def test_one_seed_for_all(seed):
    seeding.seed_everything(seed)
    first = draws()
    seeding.seed_everything(seed)
    assert draws() == first
    assert os.environ["PYTHONHASHSEED"] == str(seed % 2**32)


def test_state_survives_a_file_without_pickled_code():
    seeding.seed_everything(1)
    draws()  # leaves half of a pair of normal numbers behind
    file = io.BytesIO()
    torch.save(seeding.rng_state(), file)
    expected = draws(), draws()
    seeding.seed_everything(2)
    file.seek(0)
    seeding.restore_rng(torch.load(file, weights_only=True))
    assert (draws(), draws()) == expected


@pytest.mark.parametrize(
    "state", [None, {}, {"python": 1}, {"python": [3, torch.ones(2), None]}]
)
def test_a_foreign_state_is_refused_in_words(state):
    with pytest.raises(Refusal, match="random state"):
        seeding.restore_rng(state)


def test_deterministic_sets_every_switch(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.benchmark = True
        seeding.seed_everything(0)
        assert not torch.are_deterministic_algorithms_enabled()
        seeding.seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert cudnn.deterministic and not cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, cudnn.benchmark = before
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpus_stream_is_saved_too():
    seeding.seed_everything(1)
    torch.rand(3, device="cuda")
    state = seeding.rng_state()
    expected = torch.rand(3, device="cuda").tolist()
    seeding.seed_everything(2)
    seeding.restore_rng(state)
    assert torch.rand(3, device="cuda").tolist() == expected
