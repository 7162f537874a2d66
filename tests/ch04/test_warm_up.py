"""4.2.2: how many runs a claim needs, on samples whose truth is known."""

import gc
import statistics

import numpy as np
import pytest

from ch04_profiling import warm_up
from ch04_profiling.warm_up import (
    each_call,
    middle,
    runs_needed,
    warm_up_calls,
)

SHAPES = {
    "normal": lambda rng, n: 1 + 0.1 * rng.standard_normal(n),
    "skewed": lambda rng, n: np.exp(0.15 * rng.standard_normal(n)),
    "interrupted": lambda rng, n: (
        (1 + 0.05 * rng.standard_normal(n))
        * np.where(rng.random(n) < 0.05, 8, 1)
    ),
}


def drifting(rng, n, r=0.8, sigma=0.1):
    """Samples of which neighbours are alike, spread as 1 ± sigma."""
    found = [rng.standard_normal()]
    for _ in range(n - 1):
        fresh = (1 - r * r) ** 0.5 * rng.standard_normal()
        found.append(r * found[-1] + fresh)
    return 1 + sigma * np.array(found)


def held(draw, runs, within=0.02, trials=400, truth=None):
    """Return in what share of trials the claim about the median holds."""
    rng = np.random.default_rng(1)
    if truth is None:
        truth = np.median(draw(rng, 200_000))
    medians = [np.median(draw(rng, runs)) for _ in range(trials)]
    return np.mean(np.abs(np.array(medians) / truth - 1) <= within)


def test_smoke_and_figure():
    rows = warm_up.main(["--smoke", "--device", "cpu"])
    assert gc.isenabled()
    assert len(rows[0]["times"]) == 40 and rows[0]["runs"] >= 1
    assert warm_up.figure(rows).axes


@pytest.mark.parametrize("shape", SHAPES)
def test_so_many_runs_are_enough_and_a_quarter_is_not(shape, pasted):
    draw = SHAPES[shape]
    sample = draw(np.random.default_rng(0), 2000).tolist()
    runs = pasted(runs_needed)(sample)
    assert held(draw, runs) >= 0.92
    assert held(draw, max(1, runs // 4)) < 0.85


def test_the_formula_by_hand():
    """IQR 0.1349 of 1: σ = 0.1, (1.96 · 1.2533 · 0.1 / 0.02)² = 150.9."""
    quantiles = [1 - 0.06745, 1.0, 1 + 0.06745]
    sample = [q for _ in range(400) for q in (*quantiles, *quantiles[::-1])]
    # ranks' correlation of this order is known to be small
    assert runs_needed(sample[: 3 * 400]) >= 150
    assert runs_needed([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 1


def test_half_the_width_takes_four_times_the_runs():
    sample = SHAPES["normal"](np.random.default_rng(0), 2000).tolist()
    runs = runs_needed(sample)
    assert abs(runs_needed(sample, within=0.01) / runs - 4) < 0.1


def test_runs_that_resemble_their_neighbours_count_for_less():
    sample = drifting(np.random.default_rng(0), 4000).tolist()
    runs = runs_needed(sample)
    assert held(drifting, runs, truth=1.0, trials=200) >= 0.9
    # the known wrong version takes them as drawn anew: shuffled, they are
    mixed = np.random.default_rng(0).permutation(sample).tolist()
    assert held(drifting, runs_needed(mixed), truth=1.0, trials=200) < 0.7


def test_mean_and_deviation_are_fooled_by_interruptions():
    """1 in 20 calls takes 8 times as long: the mean is a third too high."""
    draw = SHAPES["interrupted"]
    sample = draw(np.random.default_rng(0), 2000)
    median, distance = middle(sample.tolist())
    assert abs(median - 1) < 0.02 and distance < 0.09
    assert abs(sample.mean() - 1) > 0.3
    by_deviation = (1.96 * sample.std() / (0.02 * sample.mean())) ** 2
    assert by_deviation > 20 * runs_needed(sample.tolist())


@pytest.mark.parametrize("slow", [0, 1, 3, 12])
def test_slow_calls_are_counted(slow, pasted):
    steady = SHAPES["normal"](np.random.default_rng(0), 60).clip(0.8, 1.15)
    times = [9.0 / (i + 1) + 1.5 for i in range(slow)] + steady.tolist()
    assert pasted(warm_up_calls)(times) == slow


def test_a_slow_call_among_the_first_keeps_the_warm_up_going():
    """Two calls that happen to be quick do not end it."""
    times = [9.0, 1.0, 1.0, 9.0, *[1.0] * 36]
    assert warm_up_calls(times) == 4
    assert warm_up_calls([9.0] * 25 + [1.0] * 75) == 25


def test_middle_is_median_and_iqr(pasted):
    assert pasted(middle)([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0)


def test_every_call_is_waited_for(pasted):
    """A device that works late: each call's work lies in its own time."""
    state = {"now": 0.0, "done": 0.0}
    lengths = iter([30.0, 2.0, 1.0])

    def call():
        state["now"] += 0.1
        state["done"] = state["now"] + next(lengths)

    def sync():
        state["now"] = max(state["now"], state["done"])

    found = pasted(each_call)(call, 3, lambda: state["now"], sync)
    assert found == pytest.approx([30.1, 2.1, 1.1])


def test_claims_include_the_first_call_or_not():
    times = [20.0] + [1.0] * 40
    row = {"times": times, "slow_calls": 1, "median_s": 1.0}
    found = {r["name"]: r["off_percent"] for r in warm_up.claims(row)}
    assert found["mean, first call included"] == pytest.approx(95)
    assert found["median after the warm-up"] == 0


def test_drawn_half_width_agrees_with_the_formula():
    sample = SHAPES["normal"](np.random.default_rng(0), 2000).tolist()
    sigma = middle(sample)[1] / 1.349
    formula = 1.96 * 1.2533 * sigma / 100**0.5
    assert abs(warm_up.half_width(sample, 100) / formula - 1) < 0.2
    assert statistics.median(sample) == pytest.approx(1, abs=0.01)
