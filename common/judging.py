"""Say from paired samples whether two times differ, and by how much."""

from collections.abc import Sequence

import numpy as np

DRAWS = 2000  # of the bootstrap
NOISY = 0.10  # IQR / median above which a row is marked
# Two copies of one function differ by up to 2% for good: their tensors lie
# elsewhere, and no number of rounds makes that go away
SMALLEST = 0.02


def bootstrap_ratio(
    a: Sequence[float],
    b: Sequence[float],
    level: float = 0.99,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Estimate how many times faster ``b`` is than ``a``, and how surely.

    The two times of one round are neighbours: noise that lasts longer than
    a round divides out.  So the estimate is the median of the rounds'
    ratios, and whole rounds are drawn again (Efron 1979, percentiles).

    Args:
        a: the baseline's times, one per round.
        b: the other's times in the same rounds.
        level: of the interval.  99%, because a 95% one claims a difference
            in 6 to 8% of comparisons of a function with itself.
        seed: of the draws.

    Returns:
        (ratio, low, high).  Below 8 rounds no interval deserves 99%: the
        luck of n rounds that all lean one way has probability 2^(1 - n).
    """
    ratios = np.asarray(a, float) / np.asarray(b, float)
    draws = np.random.default_rng(seed).integers(
        0, len(ratios), (DRAWS, len(ratios))
    )
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(ratios)), float(low), float(high)


def lasts(ratios: np.ndarray) -> bool:
    """Say whether every third of the rounds shows the same difference.

    A neighbour's bursts last longer than a round, so rounds are not as
    independent as the bootstrap takes them to be: a burst that hits one of
    the two for a while narrows the interval around a wrong ratio.  The fewer
    rounds, the more a third varies, and the less is claimed; below three
    nothing is.
    """
    if len(ratios) < 3:
        return False
    parts = [np.median(part) for part in np.array_split(ratios, 3)]
    return bool(min(parts) > 1 + SMALLEST or max(parts) < 1 - SMALLEST)


def verdict(
    ratio: float, interval: Sequence[float], steady: bool = True
) -> tuple[bool, str]:
    """Say whether two times differ, and put it in words.

    Args:
        ratio: baseline over variant.
        interval: (low, high) of it.
        steady: whether every third of the rounds says so (``lasts``).

    Returns:
        (differs, words).  An interval beyond what two copies of one function
        show, that does not last, claims nothing, and is not hidden either.
    """
    low, high = interval
    if low <= 1 + SMALLEST and high >= 1 - SMALLEST:
        return False, "no difference measured here"
    words = f"{ratio:.2f}× [{low:.2f}, {high:.2f}]"
    return steady, words if steady else f"unsteady: {words}"


def judge(
    names: Sequence[str], samples: np.ndarray, smoke: bool = False
) -> list[dict]:
    """Turn paired samples into rows: median, IQR, ratio, verdict.

    A difference is claimed when the ratio's 99% interval lies wholly above
    1.02 or below 0.98, and the difference ``lasts``.

    Args:
        names: one per column of ``samples``; the first is the baseline.
        samples: seconds, (rounds, names).
        smoke: leave the verdict open.

    Returns:
        Rows with name, median_s, q1_s, q3_s, iqr_s, rounds, ratio (above 1
        is faster than the baseline), ratio_interval, differs (None: not
        judged), verdict and noisy.
    """
    rows = []
    for i, name in enumerate(names):
        q1, median, q3 = np.quantile(samples[:, i], [0.25, 0.5, 0.75])
        if i == 0:
            ratio = low = high = 1.0
            differs, said = None, "baseline"
        else:
            ratio, low, high = bootstrap_ratio(samples[:, 0], samples[:, i])
            steady = lasts(samples[:, 0] / samples[:, i])
            differs, said = verdict(ratio, (low, high), steady)
            if smoke:
                differs, said = None, "smoke run: not judged"
        rows.append(
            {
                "name": name,
                "median_s": float(median),
                "q1_s": float(q1),
                "q3_s": float(q3),
                "iqr_s": float(q3 - q1),
                "rounds": len(samples),
                "ratio": ratio,
                "ratio_interval": [low, high],
                "differs": differs,
                "verdict": said,
                "noisy": bool(q3 - q1 > NOISY * median),
            }
        )
    return rows
