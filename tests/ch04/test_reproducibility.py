"""4.1.2: each source differs, each control works, two runs end alike."""

import inspect
import os
import random

import numpy as np
import pytest
import torch

from ch04_profiling import reproducibility
from ch04_profiling.reproducibility import (
    HoldsGenerator,
    Noisy,
    added_in_order,
    drawn_twice,
    loaded,
    order_of_strings,
    same_bits,
    two_runs,
)
from common import bench, seeding

CPU = torch.device("cpu")


def test_smoke():
    """Two runs in processes of their own end with the same bits."""
    rows = reproducibility.main(["--smoke", "--device", "cpu"])
    sources = [row for row in rows if "control" in row]
    assert len(sources) == 7
    for row in sources:
        assert row["controlled"], row["name"]
        # sums of few additions may be alike by luck, and with one thread are
        assert not row["free"] or "sum" in row["name"], row["name"]
    assert rows[-1]["name"] == "all controlled"
    assert all(rows[-1][k] for k in ("batches", "losses", "parameters"))


def test_runs_that_differ_are_an_error(monkeypatch):
    runs = [{"batches": 1, "parameters": 2}, {"batches": 1, "parameters": 3}]
    monkeypatch.setattr(reproducibility, "whole_runs", lambda *_: runs)
    monkeypatch.setattr(reproducibility, "source_rows", lambda _: [])
    monkeypatch.setattr(reproducibility, "held_rows", lambda _: [])
    with pytest.raises(bench.Mismatch, match="controlled runs differ"):
        reproducibility.main(["--smoke", "--device", "cpu"])


def test_uncontrolled_runs_differ_in_every_part():
    first, second = reproducibility.whole_runs(CPU, controlled=False)
    assert first.keys() == second.keys()
    assert all(first[part] != second[part] for part in first)


def test_nothing_of_the_caller_s_is_changed():
    before, environment = seeding.rng_state(), dict(os.environ)
    expected = random.random(), np.random.rand(), torch.rand(3)
    seeding.restore_rng(before)
    copied, cured = reproducibility.held_rows()
    assert (copied["drawn_twice"], cured["drawn_twice"]) == (8, 0)
    assert not copied["epochs_differ"] and cured["epochs_differ"]
    assert copied["runs_alike"] and cured["runs_alike"]
    assert reproducibility.source_rows(CPU)
    found = random.random(), np.random.rand(), torch.rand(3)
    assert same_bits(expected, found)
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


# --- Python's hash -----------------------------------------------------------


def test_the_order_of_a_set_is_drawn_when_python_starts(pasted):
    order = pasted(order_of_strings)
    words = reproducibility.WORDS
    assert order(words, "0") == order(words, "0")
    assert sorted(order(words, "1")) == sorted(words)
    assert order(words, "0") != order(words, "1")
    assert order(words) != order(words)  # 20! orders


def test_setting_it_while_python_runs_is_too_late(monkeypatch):
    """The known wrong version: in this process nothing changes."""
    before = hash("word1")
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    assert hash("word1") == before


# --- a generator that the dataset keeps --------------------------------------


def values(**how):
    return loaded(HoldsGenerator(), **how)


def test_a_held_generator_repeats_in_every_worker(pasted):
    torch.manual_seed(0)
    batches = values()
    assert pasted(drawn_twice)(batches) == 8
    # the first batch of one worker is the first of the other
    assert torch.equal(batches[0], batches[1])


def reseed_global(worker_id):
    """The known wrong cure: NumPy's global state is not what is held."""
    np.random.seed(worker_id)


def same_in_every_epoch(worker_id):
    """The known wrong cure: by the worker's number alone."""
    info = torch.utils.data.get_worker_info()
    info.dataset.draw = np.random.default_rng(worker_id)


def test_the_cure_differs_by_worker_and_epoch_and_repeats_by_seed():
    torch.manual_seed(0)
    first = values(worker_init_fn=seeding.worker_init)
    second = values(worker_init_fn=seeding.worker_init)
    torch.manual_seed(0)
    again = values(worker_init_fn=seeding.worker_init)
    assert drawn_twice(first) == drawn_twice(second) == 0
    assert drawn_twice(first + second) == 0
    assert same_bits(first, again)


def test_known_wrong_cures_fail_the_same_check():
    torch.manual_seed(0)
    assert drawn_twice(values(worker_init_fn=reseed_global)) == 8
    first = values(worker_init_fn=same_in_every_epoch)
    second = values(worker_init_fn=same_in_every_epoch)
    assert drawn_twice(first) == 0
    assert drawn_twice(first + second) == 16


def test_without_workers_nothing_repeats():
    dataset = HoldsGenerator()
    assert drawn_twice([dataset[i].view(1) for i in range(16)]) == 0


# --- bits --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.tensor([1.0, float("nan")]), None, True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1, 2), False),
        ([1.5, {"a": 2}], [1.5, {"a": 2}], True),
        ([1.5], [1.5, 1.5], False),
        (torch.ones(3, 2).T, torch.ones(2, 3), True),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_same_bits(first, second, same, pasted):
    second = first.clone() if second is None else second
    assert pasted(same_bits)(first, second) is same


def test_another_order_gives_other_bits(pasted):
    added = pasted(added_in_order)
    values = torch.tensor([1e8, 1.0, -1e8])
    assert added(values, torch.tensor([0, 1, 2])).item() == 0
    assert added(values, torch.tensor([0, 2, 1])).item() == 1


def test_two_runs(pasted):
    random.seed(0)
    runs = pasted(two_runs)
    seed = lambda: random.seed(0)  # noqa: E731
    assert runs(random.random, seed, same_bits) == (False, True)
    assert runs(random.random, lambda: None, same_bits) == (False, False)
    assert runs(lambda: 1, lambda: None, same_bits) == (True, True)


def test_every_generator_shows_in_the_noisy_samples():
    """Whichever one is left alone, the sample is another."""
    dataset, sample = Noisy(0), []
    state, held = seeding.rng_state(), dataset.draw.bit_generator.state

    def draw(moved=lambda: None):
        seeding.restore_rng(state)
        dataset.draw.bit_generator.state = held
        moved()
        return dataset[0]

    sample = draw()
    assert same_bits(sample, draw())
    for moved in (
        random.random,
        np.random.rand,
        lambda: torch.rand(()),
        dataset.draw.random,
    ):
        assert not same_bits(sample, draw(moved))


def test_seeding_shows_in_its_source():
    """What the script calls, and chapter 4 shows, is the common function."""
    source = inspect.getsource(reproducibility.one_run)
    assert "seed_everything(0, deterministic=True)" in source


@pytest.mark.gpu
def test_controls_of_a_gpu():
    rows = reproducibility.source_rows(torch.device("cuda"))
    found = {row["name"]: row for row in rows}
    for name in ("cuDNN's choice", "atomic additions"):
        assert found[name]["controlled"], name
    assert not found["atomic additions"]["free"]
    first, second = reproducibility.whole_runs("cuda", controlled=True)
    assert first == second
