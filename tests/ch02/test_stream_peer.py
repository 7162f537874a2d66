"""The peers of chapter 2's figures: their words are read as they mean."""

import pytest
import torch

from benchmarks import stream_peer
from ch02_hardware import memory_hierarchy
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
    assert row["ratio"] == pytest.approx(3 / 2.9)
    assert row["verdict"] == "within 15%"


@pytest.mark.parametrize(
    ("tool", "ratio", "verdict"),
    [
        ("mbw", 1.14, "within 15%"),
        ("mbw", 1.16, "missed"),
        ("mbw", 0.84, "missed"),
        ("fio", 0.86, "within 15%"),
        (stream_peer.LOOP, 0.6, "missed"),
        (stream_peer.LOOP, 1.2, "missed"),
        ("sysbench", 1.1, "within 15%"),
        ("sysbench", 1.21, "missed, because it is scalar"),
        ("sysbench", 1.99, "missed, because it is scalar"),
        ("sysbench", 2.01, "missed"),  # that is more than scalar explains
        ("sysbench", 0.84, "missed"),  # scalar or not
    ],
)
def test_the_bar(tool, ratio, verdict):
    (row,) = stream_peer.measured([("x", tool, lambda: ratio, lambda: 1.0)], 1)
    assert row["verdict"] == verdict


def test_without_a_figure_there_is_no_verdict():
    (row,) = stream_peer.measured(
        [("disk", "fio", lambda: None, lambda: 1.0)], 2
    )
    assert row["ratio"] is None and row["verdict"] is None


@pytest.fixture
def loops():
    try:
        return stream_peer.loops_in_c()
    except bench.Refusal as refusal:
        pytest.skip(str(refusal))


def test_the_loops_in_c_do_what_torch_does(loops):
    n = 1003
    b, c = torch.arange(float(n)), torch.rand(n)
    a = torch.full((n + 1,), -1.0)
    loops["copy"](a.data_ptr(), b.data_ptr(), n, 0)
    assert torch.equal(a[:n], b) and a[n] == -1
    loops["triad"](a.data_ptr(), b.data_ptr(), c.data_ptr(), n, 2.0)
    right = memory_hierarchy.triad(torch.empty(n), b, c)
    assert torch.allclose(a[:n], right) and a[n] == -1


def test_each_pair_moves_the_same_bytes(monkeypatch):
    """Both sides of a pair get the same arrays, and count them alike."""
    calls, size = [], 2**20
    noted = {
        name: lambda *words, name=name: calls.append((name, words))
        for name in ("copy", "triad")
    }

    def shortest(call, device, budget_s):
        call()
        calls.append(call.args)
        return 1.0

    monkeypatch.setattr(stream_peer.ceilings, "shortest", shortest)
    found = stream_peer.pairs(size, 2**20, None, True, noted)
    ours = {name: (ours, theirs) for name, tool, ours, theirs in found[:2]}
    for name, arrays in (("copied", 2), ("triad", 3)):
        mine, other = ours[f"memory, {name} by torch"]
        assert mine() == other() == arrays * size
        tensors = [t.data_ptr() for t in calls[-3]]
        assert list(calls[-1][:arrays]) == tensors and len(tensors) == arrays
        assert calls[-1][arrays] == size // 4
    assert [tool for _, tool, *_ in found[:2]] == [stream_peer.LOOP] * 2
    assert len(stream_peer.pairs(size, 2**20, None, True, None)) == 4
    rates = {name: ours() for name, _, ours, _ in found[2:-1]}
    counted = {"memory, read": 1, "memory, written": 1}
    counted[stream_peer.MEMMOVE] = 2
    assert rates == {name: n * size for name, n in counted.items()}
    assert calls[-1][2] == size  # memmove's, the last of them


def test_without_a_compiler_tools_are_still_compared(monkeypatch, capsys):
    def none():
        raise bench.Refusal("no C compiler (cc) on the PATH")

    monkeypatch.setattr(stream_peer, "loops_in_c", none)
    monkeypatch.setattr(stream_peer.shutil, "which", lambda name: name)
    answers = {"sysbench": SYSBENCH, "mbw": MBW, "fio": FIO}
    monkeypatch.setattr(stream_peer, "output_of", lambda c, *_: answers[c])
    rows = stream_peer.main(["--smoke"])
    assert {row["tool"] for row in rows} == set(answers)
    assert "torch's copy and triad are not compared" in capsys.readouterr().out


def test_an_unexplained_miss_fails_an_explained_one_does_not(monkeypatch):
    monkeypatch.setattr(stream_peer.shutil, "which", lambda name: name)
    monkeypatch.setattr(stream_peer, "pairs", lambda *_: [])
    row = {"name": "read", "ours_bytes_per_s": 1.0, "verdict": "missed"}
    rows = [row | {"verdict": "missed, because it is scalar"}]
    monkeypatch.setattr(stream_peer, "measured", lambda *_: rows)
    assert stream_peer.main([]) == rows
    rows.append(row)
    with pytest.raises(bench.Mismatch, match="bar missed: read"):
        stream_peer.main([])


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


def test_smoke_with_tools_that_answer(monkeypatch, capsys, loops):
    answers = {"sysbench": SYSBENCH, "mbw": MBW, "fio": FIO}
    asked = []

    def output_of(*command):
        asked.append(command)
        return answers[command[0]]

    monkeypatch.setattr(stream_peer, "loops_in_c", lambda: loops)
    monkeypatch.setattr(stream_peer.shutil, "which", lambda name: name)
    monkeypatch.setattr(stream_peer, "output_of", output_of)
    rows = stream_peer.main(["--smoke"])
    assert [row["tool"] for row in rows] == [
        stream_peer.LOOP,
        stream_peer.LOOP,
        "sysbench",
        "sysbench",
        "mbw",
        "fio",
    ]
    assert {c[0] for c in asked} == set(answers)
    assert "--memory-block-size=16M" in asked[0]
    assert ("mbw", "-q", "-n", "2", "16") in asked
    assert "torch's copy reaches" in capsys.readouterr().out
