"""The benchmark of a known link reads the right rows, and can fail."""

import io
import json

import pytest

from benchmarks import known_link
from common.bench import Mismatch

SIZES = [2**18, 2**20, 2**22]


def measured(share, monkeypatch, start_s=1e-3):
    """Let chapter 2's script find this share of any rate."""

    def rows(words):
        rate = known_link.collective_bandwidth.rate_of(
            words[words.index("--rate") + 1]
        )
        found = []
        for place, name, part in [
            ("one host", "all-reduce", 9.0),
            ("two namespaces", "broadcast", 0.1),
            ("two namespaces", "all-reduce", share),
        ]:
            at = {"place": place, "name": name}
            bus = rate * part
            found += [
                at
                | {"message_bytes": n, "took_s": start_s + n / bus}
                | {"bus_bytes_per_s": n / (start_s + n / bus)}
                for n in SIZES
            ]
            percent = 100 * part if place == "two namespaces" else None
            fit = {"start_s": start_s, "link_percent": percent}
            found.append(at | fit | {"bus_bytes_per_s": bus})
        return [*found, {"place": "two namespaces", "predicted_s": 1.0}]

    monkeypatch.setattr(known_link.collective_bandwidth, "main", rows)
    monkeypatch.setattr(known_link.bench, "record", lambda *a, **k: None)


def test_the_all_reduces_fit_is_held_against_the_rate(monkeypatch):
    measured(0.97, monkeypatch)
    rows = known_link.main(["--device", "cpu"])
    fits, points = rows[:3], rows[3:]
    assert [row["name"] for row in fits] == list(known_link.RATES)
    assert fits[1]["set_bytes_per_s"] == 100e6 / 8
    assert fits[1]["fit_bytes_per_s"] == pytest.approx(0.97 * 100e6 / 8)
    assert [row["message_bytes"] for row in points] == 3 * SIZES
    name, took_s = points[3]["name"], points[3]["took_s"]
    assert name == "100mbit"
    assert took_s == pytest.approx(1e-3 + SIZES[0] / (0.97 * 100e6 / 8))


@pytest.mark.parametrize("share", [0.79, 1.21])
def test_a_wrong_fit_fails(share, monkeypatch):
    measured(share, monkeypatch)
    with pytest.raises(Mismatch, match="50mbit, 100mbit, 400mbit"):
        known_link.main(["--device", "cpu"])
    assert known_link.main(["--smoke", "--device", "cpu"])


@pytest.mark.parametrize("share", [0.81, 1.19])
def test_a_fit_within_the_bar_passes(share, monkeypatch):
    measured(share, monkeypatch)
    assert known_link.main(["--device", "cpu"])


def test_a_start_that_the_fit_lost_is_not_zero(monkeypatch, capsys):
    measured(0.97, monkeypatch, start_s=0.0)
    rows = known_link.main(["--device", "cpu"])
    assert [row["start_s"] for row in rows[:3]] == [None] * 3
    shown = capsys.readouterr().out
    assert shown.count("  not resolved\n") == 3
    assert "not resolved: small messages" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    measured(0.97, monkeypatch, start_s=2e-3)
    rows = known_link.main(["--device", "cpu"])
    assert [row["start_s"] for row in rows[:3]] == [2e-3] * 3
    shown = capsys.readouterr().out
    assert "  2 ms\n" in shown and "not resolved" not in shown


@pytest.mark.parametrize("start_s", [0.0, 1e-3])
def test_the_picture_has_points_fits_and_rates(start_s, monkeypatch):
    measured(0.97, monkeypatch, start_s)
    rows = json.loads(json.dumps(known_link.main(["--device", "cpu"])))
    (axes,) = known_link.figure(rows).axes
    points, line, rate = axes.lines[:3]
    assert list(points.get_xdata()) == list(line.get_xdata()) == SIZES
    assert list(points.get_ydata()) == pytest.approx(list(line.get_ydata()))
    assert set(rate.get_ydata()) == {6.25}
    assert len(axes.lines) == 9
    known_link.figure(rows[:3]).savefig(io.BytesIO())  # a record without them
