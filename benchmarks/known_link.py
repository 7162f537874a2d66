"""Does the fit of 2.4.2 find the rate of a link that is known?

Question  Two hosts stand in two network namespaces, and their cable is
          slowed down: which share of the rate that was set does the fitted
          all-reduce find?
Expect    within 20% of it at every rate: time is start + bytes / bandwidth
Run       python -m benchmarks.known_link [--smoke] [--save]   (Linux, root)
"""

from ch02_hardware import collective_bandwidth
from common import bench

RATES = ("50mbit", "100mbit", "400mbit")
MOST_OFF = 20  # per cent
SOURCES = ("ch02_hardware/collective_bandwidth.py", "common/ranks.py")


def fitted(rate, smoke):
    """Measure over a link of this rate; return the all-reduce's fit."""
    words = ["--hosts", "--netns", "--rate", rate, "--device", "cpu"]
    rows = collective_bandwidth.main(words + ["--smoke"] * smoke)
    fits = [row for row in rows if row.get("link_percent") is not None]
    return next(fit for fit in fits if fit["name"] == "all-reduce")


def main(argv=None):
    args = bench.cli(__doc__, argv)
    rows = []
    for rate in RATES[:1] if args.smoke else RATES:
        fit = fitted(rate, args.smoke)
        rows.append(
            {
                "name": rate,
                "set_bytes_per_s": collective_bandwidth.rate_of(rate),
                "fit_bytes_per_s": fit["bus_bytes_per_s"],
                "link_percent": fit["link_percent"],
                "start_s": fit["start_s"],
            }
        )
        print()
    bench.report(
        args,
        rows,
        {
            "name": "link",
            "set_bytes_per_s": "set",
            "fit_bytes_per_s": "fitted",
            "link_percent": "% of it",
            "start_s": "start",
        },
        extra={"key": {"sources": bench.digests(SOURCES)}},
    )
    missed = [
        row["name"]
        for row in rows
        if abs(row["link_percent"] - 100) > MOST_OFF
    ]
    if missed and not args.smoke:
        raise bench.Mismatch(
            f"more than {MOST_OFF}% off the rate that was set: "
            f"{', '.join(missed)}"
        )
    return rows


if __name__ == "__main__":
    bench.run(main)
