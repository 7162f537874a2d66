"""One ladder at a time writes a log, and goes on only with its own."""

import subprocess
import sys
import threading
import types

import pytest

from ch10_gpt2 import journal, race
from common import bench

HOLDS = """
import sys
from pathlib import Path
from ch10_gpt2 import journal
with journal.alone_in(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_written_by_one_at_a_time(tmp_path):
    with journal.alone_in(tmp_path):
        with pytest.raises(bench.Refusal, match="is writing a log there"):
            with journal.alone_in(tmp_path):
                pass
    with journal.alone_in(tmp_path):  # and by the next afterwards
        pass


def test_of_many_that_ask_at_once_one_is_let_in(tmp_path):
    count, inside, refused = 8, [], []
    ask, leave = threading.Barrier(count), threading.Barrier(count)

    def enter():
        ask.wait(60)
        try:
            with journal.alone_in(tmp_path):
                inside.append(1)
                leave.wait(60)
        except bench.Refusal:
            refused.append(1)
            leave.wait(60)

    threads = [threading.Thread(target=enter) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(inside), len(refused)) == (1, count - 1)


def test_a_lock_ends_with_its_process(tmp_path):
    """Whatever number the file names, even that of a process that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        cwd=bench.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "inside\n"
            with pytest.raises(bench.Refusal, match=f"process {process.pid}"):
                with journal.alone_in(tmp_path):
                    pass
        finally:
            process.kill()
    (tmp_path / "lock").write_text("1")
    with journal.alone_in(tmp_path):
        pass


@pytest.fixture
def plan(tmp_path, monkeypatch):
    machine = types.SimpleNamespace(identity=lambda device: "box-1")
    opened = types.SimpleNamespace(
        tokenize=str,
        open_tokens=lambda name: types.SimpleNamespace(digest=f"of {name}"),
    )
    monkeypatch.setattr(journal, "machine", machine)
    monkeypatch.setattr(journal, "text", opened)
    base = {"device": "cpu", "data": "embedded"}
    return race.Plan(
        base, "ch10_gpt2.steps", False, 1, 2, False, 1.0, tmp_path, {}
    )


def test_a_log_goes_on_only_if_nothing_changed(plan, monkeypatch):
    first = journal.key(plan)
    assert journal.key(plan) == first
    assert first["data"] == "of embedded"
    for name, value in {
        "threads": 4,
        "world": 8,
        "netns": True,
        "base": plan.base | {"sequences": 99},
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(plan, name, value)
            assert journal.key(plan) != first, name
    with monkeypatch.context() as patch:
        patch.setattr(journal.torch, "__version__", "0.0")
        assert journal.key(plan) != first
    with monkeypatch.context() as patch:
        patch.setattr(journal.machine, "identity", lambda device: "box-2")
        assert journal.key(plan) != first
    with monkeypatch.context() as patch:  # the same name, another text
        other = types.SimpleNamespace(digest="another")
        patch.setattr(journal.text, "open_tokens", lambda name: other)
        assert journal.key(plan) != first


def test_a_source_that_changed_begins_a_log_anew(plan, monkeypatch):
    first = journal.key(plan)
    names = first["sources"].keys()
    for name in ("race", "worker", "train", "steps", "windows"):
        assert f"ch10_gpt2/{name}.py" in names
    for name in ("gpt", "judging", "ranks"):
        assert f"common/{name}.py" in names
    assert "ch07_memory/training_memory.py" in names
    assert "ch09_advanced/custom_op/cross_entropy.cpp" in names
    hashed = bench.script_hash
    for changed in ("worker.py", "fused_operators.py", "steps.py"):
        with monkeypatch.context() as patch:
            patch.setattr(
                bench,
                "script_hash",
                lambda path, c=changed: (
                    "0" * 64 if str(path).endswith(c) else hashed(path)
                ),
            )
            assert journal.key(plan) != first, changed
