"""Verdicts on real GPU recordings, where a folder of them is given.

``RECORDED_TRACES`` names the folder; each file is looked for by its name.
Shares are per cent of the span, from an independent count of intervals.
"""

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
from test_find_bottleneck import check_sums

from ch04_profiling import event_names as names
from ch04_profiling import find_bottleneck, traces, verdicts

FOLDER = Path(os.environ.get("RECORDED_TRACES") or "absent")
FOUND = sorted(FOLDER.glob("*.gz")) if FOLDER.is_dir() else []
pytestmark = pytest.mark.skipif(
    not FOUND, reason="RECORDED_TRACES names no folder of recordings"
)


def ranks_of(name):
    for path in FOUND:
        if path.name.startswith(name):
            return verdicts.number(traces.read([path]))
    pytest.skip(f"{name} is not in the folder")


def figures(rank):
    """Return what the table of known recordings gives, in per cent."""
    starts, ends = rank.account.loader
    return {
        "busy": 100 * rank.share(*names.WORK),
        "computing": 100 * rank.share(*names.COMPUTE),
        "loader": 100 * int((ends - starts).sum()) / rank.span,
        "communication": 100
        * rank.account.total_ns("communication")
        / rank.span,
        "exposed": 100 * rank.share("communication"),
        "idle": 100 * rank.share(*names.IDLE),
    }


KNOWN = {
    "kineto-resnet50-workers0": (
        {"busy": 57, "loader": 39},
        ["data-bound"],
        [],
    ),
    "kineto-resnet50-workers4": (
        {"busy": 72, "loader": 1},
        ["host-bound"],
        [],
    ),
    "param-resnet-loader-bound": (
        {"busy": 29, "loader": 51},
        ["data-bound"],
        ["start-up"],
    ),
    "hta-gpu-busy": ({"busy": 95, "exposed": 0}, ["compute-bound"], []),
    "hta-ddp-idle": (
        {"busy": 23, "idle": 77, "exposed": 100 * 39.6 / 684.4},
        ["host-bound"],
        ["missing-ranks"],
    ),
    "hta-comm-exposed": (
        {
            "busy": 83,
            "computing": 60,
            "communication": 35,
            "exposed": 19,
            "idle": 17,
        },
        ["communication-bound", "host-bound"],
        ["missing-ranks"],
    ),
    "hta-sampled": (
        {"busy": 45, "exposed": 27, "idle": 55},
        ["communication-bound"],
        ["sampled", "missing-ranks"],
    ),
    "hta-alexnet-start-up": ({"busy": 0}, ["start-up"], ["start-up"]),
    "modded-nanogpt-before": (
        {"busy": 95.5, "exposed": 5.5},
        ["compute-bound"],
        ["missing-ranks"],
    ),
    "modded-nanogpt-after": (
        {"busy": 98, "exposed": 5.2},
        ["compute-bound"],
        ["missing-ranks"],
    ),
    "hta-edge-event-wait": (
        {},
        ["sync-bound"],
        ["too-short", "partial-step"],
    ),
    "hta-edge-rocm": ({}, ["start-up"], ["too-short", "no-byte-counts"]),
    "hta-edge-triton": ({}, ["start-up"], ["too-short", "start-up"]),
    "hta-edge-cpu-only": ({}, [], ["no-gpu-events", "sampled"]),
    "hta-edge-non-gpu-rank": ({}, ["no-gpu-events"], []),
    "hta-edge-no-distributed": (
        {},
        ["no-gpu-events"],
        ["no-distributed-info"],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_recording_reads_as_known(name):
    known, kinds, warnings = KNOWN[name]
    (rank,) = ranks = ranks_of(name)
    report = verdicts.judge(ranks)
    check_sums(report)
    found = figures(rank)
    for figure, percent in known.items():
        assert found[figure] == pytest.approx(percent, abs=2), figure
    assert [f["kind"] for f in report["findings"]][: len(kinds)] == kinds
    said = {warning["kind"] for warning in report["warnings"]}
    assert said >= set(warnings)


def test_what_is_cured_is_not_accused():
    report = verdicts.judge(ranks_of("kineto-resnet50-workers4"))
    kinds = {f["kind"] for f in report["findings"]}
    assert not kinds & {"data-bound", "transfer-bound", "sync-bound"}
    report = verdicts.judge(ranks_of("hta-gpu-busy"))
    assert len(report["findings"]) == 1


def test_against_says_what_the_workers_cured():
    found = find_bottleneck.against(
        ranks_of("kineto-resnet50-workers4"),
        ranks_of("kineto-resnet50-workers0"),
    )
    assert found["unit"] == "step"
    assert found["cured"] == ["data-bound"]
    assert found["speed"] == pytest.approx(1.26, abs=0.02)


def test_against_sees_a_small_gain():
    found = find_bottleneck.against(
        ranks_of("modded-nanogpt-after"), ranks_of("modded-nanogpt-before")
    )
    assert found["speed"] == pytest.approx(306.4 / 303.3, abs=0.003)
    old, new = found["parts"]["communication"]
    assert 4 * old / 1e3 == pytest.approx(17.2, abs=0.1)
    assert 4 * new / 1e3 == pytest.approx(15.7, abs=0.1)
    assert not found["cured"] and not found["appeared"]


def test_the_rank_that_waits_least_is_late():
    report = verdicts.judge(ranks_of("param-dlrm-8ranks"))
    check_sums(report)
    assert [rank["rank"] for rank in report["ranks"]] == list(range(8))
    by_kind = {finding["kind"]: finding for finding in report["findings"]}
    assert by_kind["straggler"]["rank"] == 7
    assert "SendRecv" in by_kind["communication-bound"]["evidence"]
    least = min(report["ranks"], key=lambda r: r["parts"]["communication"])
    assert least["rank"] == 7


def test_the_waiting_calls_of_a_short_trace_are_named():
    (rank,) = verdicts.judge(ranks_of("hta-edge-event-wait"))["ranks"]
    calls = {row["name"]: row for row in rank["waiting_calls"]}
    assert {
        "cudaEventSynchronize",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
    } <= set(calls)
    assert calls["cudaStreamSynchronize"]["callers"] == {"aten::item": 1}


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.name)
def test_any_recording_adds_up(path):
    check_sums(find_bottleneck.read(path))


# ---- an independent peer -------------------------------------------------


def for_peer(trace_text):
    """Return a trace for HolisticTraceAnalysis: whole ns, no step marks.

    It cuts times to whole µs, leaves out work that no marked step
    launched, and counts the recorder's notes of waiting as GPU work, and
    host events that name the stream they launch on.
    """
    whole = json.loads(trace_text)
    kept, first = [], None
    for event in whole["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") in (
            "cuda_sync",
            "Trace",
            "overhead",
            "gpu_user_annotation",
        ):
            continue
        if str(event["name"]).startswith("ProfilerStep"):
            continue
        if names.KINDS.get(event.get("cat", "").lower()) != names.GPU:
            event.get("args", {}).pop("stream", None)
        first = event["ts"] if first is None else first
        event["ts"] = round((event["ts"] - first) * 1000) + 10**12
        event["dur"] = round(event["dur"] * 1000)
        kept.append(event)
    whole["traceEvents"] = kept
    return json.dumps(whole)


def texts_of(path):
    if ".tar" not in path.name:
        yield path.name, gzip.decompress(path.read_bytes()).decode()
        return
    import tarfile

    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".json"):
                yield member.name, archive.extractfile(member).read().decode()


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.name)
def test_a_peer_splits_the_gpus_time_alike(path, tmp_path):
    hta = pytest.importorskip("hta.trace_analysis")
    logging.getLogger("hta").setLevel(logging.CRITICAL)
    compared = 0
    for at, (_, text) in enumerate(texts_of(path)):
        copy = tmp_path / f"rank{at}.json"
        copy.write_text(for_peer(text), encoding="utf-8")
        try:
            peer = hta.TraceAnalysis(
                trace_files={0: str(copy)}, trace_dir=str(tmp_path)
            ).get_temporal_breakdown(visualize=False)
            row = peer.iloc[0]
        except (IndexError, ValueError, KeyError) as error:
            pytest.skip(f"the peer cannot read it: {error}")
        original = tmp_path / "original.json"
        original.write_text(text, encoding="utf-8")
        (rank,) = find_bottleneck.read(original)["ranks"]
        ours = rank["gpu_span"]
        for theirs, name in (
            ("idle_time(us)", "idle_us"),
            ("compute_time(us)", "compute_us"),
            ("non_compute_time(us)", "other_us"),
        ):
            assert row[theirs] / 1000 == pytest.approx(
                ours[name], abs=0.01 * ours["span_us"]
            ), name
        compared += 1
    assert compared
