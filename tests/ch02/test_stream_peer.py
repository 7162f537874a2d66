"""The peers of chapter 2's figures: their words are read as they mean."""

import pytest

from benchmarks import stream_peer
from common import bench

SYSBENCH = """
Running memory speed test with the following options:
  block size: 262144KiB
  total size: 4096MiB

Total operations: 16 (   27.65 per second)

4096.00 MiB transferred (7078.85 MiB/sec)
"""
MBW = """0\tMethod: MEMCPY\tElapsed: 0.06126\tMiB: 256.00000\tCopy: 4178 MiB/s
1\tMethod: MEMCPY\tElapsed: 0.05000\tMiB: 256.00000\tCopy: 5120.000 MiB/s
AVG\tMethod: MEMCPY\tElapsed: 0.01000\tMiB: 256.00000\tCopy: 1.000 MiB/s
0\tMethod: DUMB\tElapsed: 0.03200\tMiB: 256.00000\tCopy: 8000.000 MiB/s
0\tMethod: MCBLOCK\tElapsed: 0.02560\tMiB: 256.00000\tCopy: 1e4 MiB/s
"""
FIO = 'note: something\n{"jobs": [{"read": {"bw": 9, "bw_bytes": 1500000}}]}'


def test_words_of_the_tools():
    assert stream_peer.sysbench_rate(SYSBENCH) == 7078.85 * 2**20
    # the quickest; a copy reads and writes, mbw counts it once
    assert stream_peer.mbw_rate(MBW) == pytest.approx(2e4 * 2**20)
    assert stream_peer.fio_rate(FIO) == 1.5e6


def test_best_of_rounds_decides():
    ours, theirs = iter([1.0, 3.0, 2.0]), iter([2.0, 2.9, 1.0])
    (row,) = stream_peer.measured(
        [("copy", "mbw", lambda: next(ours), lambda: next(theirs))], 3
    )
    assert row["ours_bytes_per_s"] == 3.0 and row["tool_bytes_per_s"] == 2.9
    assert row["ratio"] == pytest.approx(3 / 2.9) and row["holds"] is True


@pytest.mark.parametrize(
    ("tool", "ratio", "holds"),
    [
        ("mbw", 1.14, True),
        ("mbw", 1.16, False),
        ("mbw", 0.84, False),
        ("fio", 0.86, True),
        ("sysbench", 1.4, True),  # a scalar loop
        ("sysbench", 0.84, False),
    ],
)
def test_the_bar(tool, ratio, holds):
    (row,) = stream_peer.measured([("x", tool, lambda: ratio, lambda: 1.0)], 1)
    assert row["holds"] is holds


def test_without_a_peer_there_is_no_verdict():
    found = [
        ("disk", "fio", lambda: None, lambda: 1.0),
        ("copy", None, lambda: 1.0, None),
    ]
    for row in stream_peer.measured(found, 2):
        assert row["ratio"] is None and row["holds"] is None


def test_without_tools_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(stream_peer.shutil, "which", lambda _: None)
    assert stream_peer.main(["--smoke"]) == []
    shown = capsys.readouterr().out
    assert "not on the PATH: fio, mbw, sysbench" in shown
    assert "no independent tool is at hand" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_a_tool_that_fails_is_one_sentence(monkeypatch):
    def fails(command, **_):
        return stream_peer.subprocess.CompletedProcess(
            command, 1, b"", b"usage\nno such option\n"
        )

    monkeypatch.setattr(stream_peer.subprocess, "run", fails)
    with pytest.raises(bench.Refusal, match="mbw fails: no such option"):
        stream_peer.by_mbw(2**24, 1)


def test_smoke_with_tools_that_answer(monkeypatch, capsys):
    answers = {"sysbench": SYSBENCH, "mbw": MBW, "fio": FIO}
    asked = []

    def output_of(*command):
        asked.append(command)
        return answers[command[0]]

    monkeypatch.setattr(stream_peer.shutil, "which", lambda name: name)
    monkeypatch.setattr(stream_peer, "output_of", output_of)
    rows = stream_peer.main(["--smoke"])
    assert [row["tool"] for row in rows] == [
        "sysbench",
        "sysbench",
        "mbw",
        "fio",
        None,
    ]
    assert {c[0] for c in asked} == set(answers)
    assert "--memory-block-size=16M" in asked[0]
    assert ("mbw", "-q", "-n", "2", "16") in asked
    assert "torch's copy reaches" in capsys.readouterr().out
