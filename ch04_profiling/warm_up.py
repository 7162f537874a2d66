"""4.2.2  Warm-up and repetition · 程式預熱和多次執行取平均

Question  Which calls are not like the others, and how many of those that are
          does a claim of ±2% need?
Expect    the first call also pays for what is done once: memory the system
          hands out page by page, code chosen for a shape, an optimizer's
          state. After it the median of n calls is within z · 1.25 σ / √n of
          the true one, where σ is the quartiles' distance / 1.35
Run       python -m ch04_profiling.warm_up [--smoke] [--save]
"""

import gc
import statistics
import time

import torch

from common import bench, timers


def each_call(function, calls, clock, sync, budget_s=float("inf")):
    """What is made once is paid by the first call: time every call apart."""
    times = []
    while len(times) < calls and (len(times) < 40 or sum(times) < budget_s):
        sync()
        start = clock()
        function()
        sync()
        times.append(clock() - start)
    return times


def warm_up_calls(times):
    """The second half of the calls is steady: how many before are slower?

    A call is slow when it lies beyond the upper fence of the steady ones,
    the third quartile and 1.5 times the quartiles' distance. The warm-up
    ends where three calls in a row are not.
    """
    steady = torch.tensor(times[len(times) // 2 :], dtype=torch.float64)
    low, high = torch.quantile(steady, torch.tensor([0.25, 0.75]).double())
    fence = float(high + 1.5 * (high - low))
    for first in range(len(times) // 2):
        if max(times[first : first + 3]) <= fence:
            return first
    return len(times) // 2


def middle(times):
    """Interruptions only ever add time: quartiles ignore the few they hit.

    Returned are (median, distance between the quartiles).
    """
    parts = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    times = torch.tensor(times, dtype=torch.float64)
    low, median, high = torch.quantile(times, parts).tolist()
    return median, high - low


def runs_needed(times, within=0.02, z=1.96):
    """Noise shrinks with the root of the runs, if each is drawn anew.

    A median's standard error is 1.2533 σ / √n; σ comes from the quartiles,
    1.349 σ apart. Neighbours that are alike count for less: by their ranks'
    correlation r, (1 + r) / (1 - r) times as many are needed.
    """
    x = torch.tensor(times, dtype=torch.float64)
    parts = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.quantile(x, parts).tolist()
    sigma = (high - low) / 1.349
    runs = (z * 1.2533 * sigma / (within * median)) ** 2
    ranks = x.argsort().argsort().double()
    ranks = ranks - ranks.mean()
    r = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    r = min(max(r, 0.0), 0.99)
    return max(1, round(runs * (1 + r) / (1 - r) + 0.5))


TECHNIQUES = (each_call, warm_up_calls, middle, runs_needed)


def works(args):
    """Return {name: function}, each fresh: nothing has been called yet."""
    device, n = args.device, 32 if args.smoke else 384
    if device.type != "cpu":
        n *= 4
    torch.manual_seed(0)
    images = torch.randn(8, 8, n // 8 + 3, n // 8 + 1, device=device)
    layer = torch.nn.Conv2d(8, 16, 3).to(device)
    there = torch.empty(n, n, 16, device=device)
    model = torch.nn.Linear(n, n).to(device)
    x = torch.randn(64, n, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def update():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return {
        "fill fresh memory": lambda: there.fill_(1.0),
        "convolve, a new shape": lambda: layer(images),
        "AdamW update": update,
        "matrix product": lambda: x @ model.weight.detach(),
    }


def half_width(times, runs, draws=400):
    """Return how far 95% of the medians of so many runs are off, measured.

    The runs are drawn from those that were timed.
    """
    x = torch.tensor(times, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    picks = torch.randint(len(times), (draws, runs), generator=draw)
    off = (x[picks].quantile(0.5, dim=1) / x.median() - 1).abs()
    return float(off.quantile(0.95))


def describe(name, times):
    """Return a row: warm-up, the steady state, and what ±2% takes."""
    slow = warm_up_calls(times)
    steady = times[slow:]
    median, distance = middle(steady)
    return {
        "name": name,
        "first_s": times[0],
        "second_s": times[1],
        "median_s": median,
        "first_times": times[0] / median,
        "slow_calls": slow,
        "iqr_percent": 100 * distance / median,
        "runs": runs_needed(steady),
        "times": times,
    }


def claims(row):
    """Return rows: what one would report from the same first 20 calls."""
    times, steady = row["times"][:20], row["times"][row["slow_calls"] :]
    warm = steady[:20]
    ways = {
        "mean, first call included": statistics.mean(times),
        "mean after the warm-up": statistics.mean(warm),
        "median after the warm-up": statistics.median(warm),
        "shortest": min(warm),
    }
    return [
        {
            "name": name,
            "claim_s": claim,
            "off_percent": 100 * (claim / row["median_s"] - 1),
        }
        for name, claim in ways.items()
    ]


def figure(rows):
    """Draw every call of each work, and how the median's error shrinks."""
    from matplotlib.figure import Figure

    from common import notebook

    rows = [row for row in rows if "times" in row]
    drawn = Figure(figsize=(9, 3.4), layout="constrained")
    calls, error = drawn.subplots(1, 2)
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    for number, row in enumerate(rows):
        times, color = row["times"], f"C{number}"
        shown = [t / row["median_s"] for t in times]
        places = range(1, len(times) + 1)
        calls.plot(places, shown, ".", ms=4, color=color, label=row["name"])
        steady = times[row["slow_calls"] :]
        runs = [1, 2, 5, 10, 20, 50, 100, 200, 500]
        off = [100 * half_width(steady, n) for n in runs]
        error.plot(runs, off, color=color, marker=".")
        sigma = row["iqr_percent"] / 1.349
        formula = [1.96 * 1.2533 * sigma / n**0.5 for n in runs]
        error.plot(runs, formula, color=color, ls=":")
    calls.set(xscale="log", yscale="log", xlabel="call")
    calls.set_ylabel("time / steady median")
    calls.axhline(1, color="0.6", lw=0.8, zorder=0)
    calls.legend(fontsize=8)
    error.axhline(2, color="k", lw=0.8)
    error.set(xscale="log", yscale="log", xlabel="runs")
    error.set_ylabel("median off by (%), 95% of cases")
    title = "The first calls · 最初幾次呼叫"
    calls.set_title(notebook.label(title), **fonts)
    title = "measured, formula dotted · 實測（虛線為公式）"
    error.set_title(notebook.label(title), **fonts)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device, calls = args.device, 40 if args.smoke else 400
    rows = []
    gc.disable()  # a collection would hit some calls and not others
    try:
        for name, work in works(args).items():
            times = each_call(
                work,
                calls,
                time.perf_counter,
                lambda: timers.synchronize(device),
                budget_s=3.0,
            )
            rows.append(describe(name, times))
    finally:
        gc.enable()
    rows = bench.report(
        args,
        rows,
        {
            "name": "work",
            "first_s": "first call",
            "second_s": "second",
            "median_s": "steady",
            "first_times": "first / it",
            "slow_calls": "slow calls",
            "iqr_percent": "IQR %",
            "runs": "runs, ±2%",
        },
        title=f"Up to {calls} calls, each timed apart",
    )
    chosen = max(rows, key=lambda row: row["first_times"])
    reported = bench.report(
        args,
        claims(chosen),
        {
            "name": "reported",
            "claim_s": "time",
            "off_percent": "off the steady median, %",
        },
        title=f"What 20 calls make one say: {chosen['name']}",
    )
    steady = chosen["times"][chosen["slow_calls"] :]
    runs = min(chosen["runs"], 10_000)
    print(
        f"{chosen['name']}: medians of {runs} runs drawn from these "
        f"are within {100 * half_width(steady, runs):.1f}%\n"
        "of all runs' in 95% of cases; 2% were asked for"
    )
    return rows + reported


if __name__ == "__main__":
    bench.run(main)
