"""System calls are counted from strace's output, real or as it prints it."""

import os
import shutil
import subprocess
import sys

import pytest

from ch04_profiling import planted_reads, strace
from common import bench

TABLE = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 92.11    0.001402           1      1025           read
  7.89    0.000120          24         5         2 openat
  0.00    0.000000           0         1           fstat
------ ----------- ----------- --------- --------- ----------------
100.00    0.001522           1      1031         2 total
"""
LINES = """\
101 openat(AT_FDCWD, "a b (c)", O_RDONLY|O_CLOEXEC) = 3
101 read(3, "\\0\\1) = 9"..., 64)       = 64
[pid   102] read(4,  <unfinished ...>
101 close(3)                          = 0
[pid   102] <... read resumed>"xy", 8)     = 2
101 openat(AT_FDCWD, "none", O_RDONLY) = -1 ENOENT (No such file)
101 --- SIGCHLD {si_signo=SIGCHLD} ---
101 +++ exited with 0 +++
read(3, "", 64)                         = 0
"""


def works():
    """Say whether strace is here and may trace."""
    if not shutil.which("strace"):
        return False
    done = subprocess.run(
        ["strace", "-o", os.devnull, sys.executable, "-c", ""],
        capture_output=True,
    )
    return done.returncode == 0


def make(folder, size=9_984):
    path = folder / "file.bin"
    path.write_bytes(bytes(i % 251 for i in range(size)))
    return str(path)


def test_the_table_is_read():
    found = strace.calls(TABLE)
    assert found == {
        "read": (1025, 0, 0.001402),
        "openat": (5, 2, 0.00012),
        "fstat": (1, 0, 0.0),
    }


def test_the_list_is_read():
    found = strace.listed(LINES)
    assert [(name, result) for name, _, result in found] == [
        ("openat", "3"),
        ("read", "64"),
        ("close", "0"),
        ("read", "2"),
        ("openat", "-1"),
        ("read", "0"),
    ]
    assert found[3][1] == '4, "xy", 8'


def test_counting_lines_counts_interrupted_calls_twice():
    """The wrong way: a call in two lines is one call."""
    lines = sum("read" in line for line in LINES.splitlines())
    reads = sum(name == "read" for name, *_ in strace.listed(LINES))
    assert lines == 4 and reads == 3


def test_the_three_ways_read_the_same(tmp_path):
    path = make(tmp_path)
    answers = {read(path) for read in planted_reads.WAYS.values()}
    assert len(answers) == 1


def test_reads_are_predicted():
    assert list(strace.predicted(8192).values()) == [129, 2, 2]
    assert list(strace.predicted(9_984).values()) == [157, 3, 2]


def test_the_command_is_whole():
    words = strace.command(["python", "x.py"], "out", "/data/file")
    assert words[0] == "strace"
    assert words[-2:] == ["python", "x.py"]
    assert words[words.index("-P") + 1] == "/data/file"
    assert words[words.index("-o") + 1] == "out"
    assert {"-f", "-c"} <= set(words)
    assert "-P" not in strace.command(["x"], "out")


@pytest.mark.skipif(not works(), reason="needs strace")
@pytest.mark.parametrize("way", strace.ROWS.values())
def test_a_real_run_has_the_predicted_reads(way, tmp_path):
    path = make(tmp_path)
    (name,) = [n for n, w in strace.ROWS.items() if w == way]
    found = strace.calls(strace.traced(os.path.realpath(path), way))
    assert found["read"][0] == strace.predicted(9_984)[name]


@pytest.mark.skipif(not works(), reason="needs strace")
def test_a_real_list_agrees_with_the_count(tmp_path):
    path, out = os.path.realpath(make(tmp_path)), tmp_path / "list"
    words = strace.command(
        [sys.executable, planted_reads.__file__, path], str(out), path
    )
    words.remove("-c")
    subprocess.run(words, check=True, capture_output=True)
    found = strace.listed(out.read_text(encoding="utf-8", errors="replace"))
    reads = [result for name, _, result in found if name == "read"]
    assert len(reads) == 157
    assert sum(map(int, reads)) == 9_984


def test_the_smoke_run(capsys):
    rows = strace.main(["--smoke", "--device", "cpu"])
    assert len([row for row in rows if "median_s" in row]) == 3
    counted = [row for row in rows if "reads" in row]
    if works():
        assert [row["reads"] for row in counted] == [257, 3, 2]
        for row in counted:
            assert row["reads"] == row["predicted_reads"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("found", [None, "/usr/bin/strace"])
def test_without_the_tool_or_the_right_a_line_says_so(
    found, monkeypatch, capsys
):
    def denied(*_):
        raise bench.Refusal("strace did not work here (ptrace: EPERM)")

    monkeypatch.setattr(
        shutil, "which", lambda name: found if name == "strace" else None
    )
    monkeypatch.setattr(strace, "traced", denied)
    rows = strace.main(["--smoke", "--device", "cpu"])
    assert len(rows) == 3
    said = capsys.readouterr().out
    assert "left out: counting system calls: strace" in said
    assert ("EPERM" if found else "apt-get install strace") in said


def test_a_tracer_that_fails_is_a_sentence(monkeypatch, tmp_path):
    words = [sys.executable, "-c", "import sys; sys.exit('ptrace: EPERM')"]
    monkeypatch.setattr(strace, "command", lambda *rest: words)
    with pytest.raises(bench.Refusal, match="ptrace: EPERM"):
        strace.traced(make(tmp_path), "whole")


def test_techniques_can_be_pasted(pasted):
    assert pasted(strace.calls)(TABLE)["read"][0] == 1025
    assert len(pasted(strace.listed)(LINES)) == 6
    assert pasted(strace.command)(["x"], "o")[-1] == "x"
