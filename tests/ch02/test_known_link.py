"""The benchmark of a known link reads the right row, and can fail."""

import pytest

from benchmarks import known_link
from common.bench import Mismatch


def measured(share, monkeypatch):
    """Let chapter 2's script find this share of any rate."""

    def rows(words):
        rate = known_link.collective_bandwidth.rate_of(
            words[words.index("--rate") + 1]
        )
        fits = [
            {"name": name, "link_percent": 100 * part, "start_s": 1e-3}
            | {"bus_bytes_per_s": rate * part}
            for name, part in [("broadcast", 0.1), ("all-reduce", share)]
        ]
        return [{"name": "all-reduce", "link_percent": None}, *fits]

    monkeypatch.setattr(known_link.collective_bandwidth, "main", rows)
    monkeypatch.setattr(known_link.bench, "record", lambda *a, **k: None)


def test_the_all_reduces_fit_is_held_against_the_rate(monkeypatch):
    measured(0.97, monkeypatch)
    rows = known_link.main(["--device", "cpu"])
    assert [row["name"] for row in rows] == list(known_link.RATES)
    assert rows[1]["set_bytes_per_s"] == 100e6 / 8
    assert rows[1]["fit_bytes_per_s"] == pytest.approx(0.97 * 100e6 / 8)


@pytest.mark.parametrize("share", [0.7, 1.3])
def test_a_wrong_fit_fails(share, monkeypatch):
    measured(share, monkeypatch)
    with pytest.raises(Mismatch, match="50mbit, 100mbit, 400mbit"):
        known_link.main(["--device", "cpu"])
    assert known_link.main(["--smoke", "--device", "cpu"])
