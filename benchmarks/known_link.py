"""Does the fit of 2.4.2 find the rate of a link that is known?

Question  Two hosts stand in two network namespaces, and their cable is
          slowed down: which share of the rate that was set does the fitted
          all-reduce find?
Expect    within 20% of it at every rate: time is start + bytes / bandwidth
Run       python -m benchmarks.known_link [--smoke] [--save]   (Linux, root)
"""

from ch02_hardware import collective_bandwidth
from common import bench, tables

RATES = ("50mbit", "100mbit", "400mbit")
MOST_OFF = 20  # per cent
SOURCES = (  # whose change makes a record old, as the script's own does
    "ch02_hardware/collective_bandwidth.py",
    "ch02_hardware/host_device_copy.py",
    "common/ranks.py",
    "common/timers.py",
)


def measured(rate, smoke):
    """Measure over a link of this rate; return the all-reduce's (fit, points).

    A start that the fit lost in noise is no start of zero seconds: None.
    """
    words = ["--hosts", "--netns", "--rate", rate, "--device", "cpu"]
    rows = [
        row
        for row in collective_bandwidth.main(words + ["--smoke"] * smoke)
        if row.get("place") == collective_bandwidth.NAMESPACES
        and row.get("name") == "all-reduce"
    ]
    (fit,) = [row for row in rows if "start_s" in row]
    start_s = fit["start_s"] or None
    found = {
        "name": rate,
        "set_bytes_per_s": collective_bandwidth.rate_of(rate),
        "fit_bytes_per_s": fit["bus_bytes_per_s"],
        "link_percent": fit["link_percent"],
        "start_s": start_s,
        "start": tables.seconds(start_s) if start_s else "not resolved",
    }
    keys = "message_bytes", "took_s", "bus_bytes_per_s"
    return found, [
        {"name": rate} | {key: row[key] for key in keys}
        for row in rows
        if "took_s" in row
    ]


def answers(entry):
    """Return (what, answer, bar, "" or why it is missed) of a record."""
    return [
        (
            row["name"],
            f"{row['link_percent']:.1f}% found",
            f"within {MOST_OFF}%",
            "missed" if abs(row["link_percent"] - 100) > MOST_OFF else "",
        )
        for row in entry["rows"]
        if "link_percent" in row
    ]


def figure(rows):
    """Draw bytes per second by message: measured, fitted, and as was set."""
    from matplotlib.figure import Figure

    from common import notebook

    drawn = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = drawn.add_subplot()
    points = [row for row in rows if "took_s" in row]
    for i, fit in enumerate(r for r in rows if "set_bytes_per_s" in r):
        some = [row for row in points if row["name"] == fit["name"]]
        sizes = [row["message_bytes"] for row in some]
        rates = [row["bus_bytes_per_s"] / 1e6 for row in some]
        axes.loglog(sizes, rates, f"C{i}o", label=fit["name"])
        start_s, rate = fit["start_s"] or 0.0, fit["fit_bytes_per_s"]
        line = [n / (start_s + n / rate) / 1e6 for n in sizes]
        axes.plot(sizes, line, f"C{i}")
        most = fit["set_bytes_per_s"] / 1e6
        axes.axhline(most, color=f"C{i}", linestyle=":")
    axes.set_xscale("log", base=2)
    shown = sorted({row["message_bytes"] for row in points})
    axes.set_xticks(shown, [tables.cell(n, "bytes") for n in shown])
    axes.set_xlabel("message")
    axes.set_ylabel("MB/s")
    title = "all-reduce: measured (points), fitted (lines), set (dotted) · "
    title += "實測（點）、擬合（線）、設定值（虛線）"
    fonts = {"fontfamily": notebook.fonts()["font.family"]}
    axes.set_title(notebook.label(title), fontsize=10, **fonts)
    axes.legend(frameon=False)
    return drawn


def main(argv=None):
    args = bench.cli(__doc__, argv)
    fits, points = [], []
    for rate in RATES[:1] if args.smoke else RATES:
        fit, some = measured(rate, args.smoke)
        fits.append(fit)
        points += some
        print()
    bench.report(
        args,
        fits,
        {
            "name": "link",
            "set_bytes_per_s": "set",
            "fit_bytes_per_s": "fitted",
            "link_percent": "% of it",
            "start": "start",
        },
        extra={"key": {"sources": bench.digests(SOURCES)}},
    )
    if any(fit["start_s"] is None for fit in fits):
        print(
            "not resolved: small messages came at the higher rates, for the "
            "shaper lets some bytes pass at\nonce; that leaves no room for a "
            "start"
        )
    points = bench.report(
        args,
        points,
        {
            "name": "link",
            "message_bytes": "message",
            "took_s": "took",
            "bus_bytes_per_s": "bus",
        },
        title="The all-reduces that were fitted",
    )
    missed = [rate for rate, *_, why in answers({"rows": fits}) if why]
    if missed and not args.smoke:
        raise bench.Mismatch(
            f"more than {MOST_OFF}% off the rate that was set: "
            f"{', '.join(missed)}"
        )
    return fits + points


if __name__ == "__main__":
    bench.run(main)
