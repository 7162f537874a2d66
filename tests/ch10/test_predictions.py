"""The record of predictions: deterministic, whole, in the book's numbers."""

import json

import pytest

from ch10_gpt2 import predictions
from common import bench, gpt

MIB = 2**20


@pytest.fixture(scope="module")
def smoke():
    return predictions.compute(smoke=True)


def test_two_computations_give_the_same_bytes(smoke):
    again = predictions.compute(smoke=True)
    assert predictions.text(again) == predictions.text(smoke)


def test_computed_rows_are_whole(smoke):
    assert [row["section"] for row in smoke["cases"]] == [
        f"10.3.{n}" for n in range(1, 6)
    ]
    for row in smoke["cases"]:
        assert sum(row["bytes"].values()) == row["peak_bytes"]
        together = row["micro_batch"] * row["accumulate"] * row["ranks"]
        assert together == smoke["cases"][0]["micro_batch"]


def test_save_and_load_give_the_same(smoke, tmp_path):
    path = predictions.save(smoke, tmp_path / "results" / "predictions.json")
    assert predictions.load(path) == smoke
    assert [p.name for p in path.parent.iterdir()] == ["predictions.json"]
    assert predictions.is_current(smoke)
    assert not predictions.is_current(smoke | {"source": "another"})


@pytest.mark.parametrize("text", [None, "", "[]", "3", '{"cases": []}'])
def test_no_record_is_a_sentence(tmp_path, text):
    path = tmp_path / "predictions.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(bench.Refusal, match="--save"):
        predictions.load(path)


def test_smoke_saves_nothing():
    with pytest.raises(bench.Refusal, match="smoke"):
        predictions.main(["--smoke", "--save"])


def test_show_prints_the_record(capsys):
    predictions.main(["--show"])
    printed = capsys.readouterr().out.splitlines()
    assert any("fully_sharded" in line for line in printed)
    assert all(len(line) <= 100 for line in printed[:-1])


def test_a_computation_is_held_against_the_record(monkeypatch, capsys):
    record = predictions.load()
    monkeypatch.setattr(predictions, "compute", lambda: record)
    predictions.main([])
    assert "equal to" in capsys.readouterr().out
    other = record | {"torch": "0.0"}
    monkeypatch.setattr(predictions, "compute", lambda: other)
    with pytest.raises(SystemExit, match="differs from"):
        predictions.main([])


# --- the committed record ---------------------------------------------------


def test_record_is_of_todays_sources():
    record = predictions.load()
    assert record["source"] == predictions.source_hash(), (
        "stale: python -m ch10_gpt2.predictions --save"
    )
    text = predictions.RECORD.read_text(encoding="utf-8")
    assert text == predictions.text(json.loads(text))


def test_record_holds_the_books_bytes():
    record = predictions.load()
    config = gpt.preset("book-large")
    weights = 4 * gpt.parameter_counts(config)["total"]
    assert 4 * weights / MIB == pytest.approx(10814.2, abs=0.1)
    steps = [row for row in record["cases"] if row["case"] == "book-large"]
    for row in steps:
        share = weights / row["ranks"]
        assert row["bytes"]["parameters"] == pytest.approx(share, rel=1e-3)
        assert row["rest_bytes"] == pytest.approx(4 * share, rel=1e-3)
        assert row["micro_batch"] * row["accumulate"] * row["ranks"] == 32
    peaks = [row["peak_bytes"] for row in steps]
    assert peaks == sorted(peaks, reverse=True)
    assert [row["ranks"] for row in steps] == [1, 1, 1, 1, 2, 4, 8]
    # what no tensor shows is far below the margin
    unseen = record["book"]["unseen_mib"] * MIB
    assert 0 < unseen < predictions.margin(24 * 10**9)


def test_record_has_batches_that_fit():
    rows = predictions.load()["largest_batch"]
    assert {row["T"] for row in rows} == {1024}
    sizes = {}
    for row in rows:
        capacity = row["capacity_bytes"]
        usable = capacity - predictions.margin(capacity)
        assert row["peak_bytes"] <= usable == row["usable_bytes"]
        key = row["step"], row["attention"], row["ranks"]
        sizes.setdefault(key, []).append(row["batch"])
    assert all(small < large for small, large in sizes.values())
    baseline = [
        sizes["memory_baseline", name, 1][0] for name in ("plain", "fused")
    ]
    assert baseline[0] < baseline[1]  # no (T, T) scores
