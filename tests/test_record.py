"""Recording resumes, keeps to its budget and leaves one archive."""

import dataclasses
import json
import tarfile

import pytest

from chapters import record, toc
from common import bench, machine

SCRIPT = '''"""1.{number}  S{number} · 節"""
import json, os, sys
from pathlib import Path

if __name__ == "__main__":
    with open(os.environ["RUNS"], "a") as file:
        print("{number}", *sys.argv[1:], file=file)
    bad = Path(os.environ["BAD"] + "{number}")
    if bad.exists():
        sys.exit(int(bad.read_text() or 1))
    if "--save" in sys.argv and "BENCH_RESULTS" in os.environ:
        path = Path(os.environ["BENCH_RESULTS"]) / "ch01_x" / "box-1.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else {{}}
        path.write_text(json.dumps(old | {{"{number}": "recorded"}}))
'''


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of three scripts; one fails where a file of its number is."""
    folder = tmp_path / "ch01_x"
    folder.mkdir()
    sections = {"1": toc.Section("1", "One", "一", "chapter", folder="ch01_x")}
    for number in (1, 2, 3):
        path = folder / f"s{number}.py"
        path.write_text(SCRIPT.format(number=number), encoding="utf-8")
        sections[f"1.{number}"] = toc.Section(
            f"1.{number}", f"S{number}", "節", modules=(f"ch01_x.s{number}",)
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(toc, "load", lambda: sections)
    monkeypatch.setattr(toc, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "source", lambda: {"sources": "0"})
    monkeypatch.setattr(machine, "identity", lambda device: "box-1")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs.txt"))
    monkeypatch.setenv("BAD", str(tmp_path / "bad"))
    return tmp_path


def ran(book):
    path = book / "runs.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.split()[0] for line in lines]


def test_done_scripts_are_not_run_again(book, capsys):
    (book / "bad2").touch()
    assert record.main([]) == 1
    assert "failed: ch01_x.s2" in capsys.readouterr().err
    assert ran(book) == ["1", "2", "3"]
    (book / "bad2").unlink()
    assert record.main([]) == 0
    assert ran(book) == ["2"]
    assert record.main([]) == 0
    assert ran(book) == []

    script = book / "ch01_x" / "s3.py"
    script.write_text(script.read_text("utf-8") + "# changed\n", "utf-8")
    assert record.main([]) == 0
    assert ran(book) == ["3"]


def test_the_budget_ends_it_and_the_same_command_goes_on(book, capsys):
    assert record.main(["--budget", "1e-9"]) == 0
    assert ran(book) == []
    assert "goes on with: ch01_x.s1" in capsys.readouterr().out
    assert record.main(["--budget", "60", "1.1"]) == 0
    assert ran(book) == ["1"]


def test_a_program_that_spent_its_budget_goes_on(book, monkeypatch, capsys):
    """It recorded nothing: neither done nor failed."""
    code = str(record.UNFINISHED)
    (book / "bad2").write_text(code)
    assert record.main(["--budget", "60"]) == 1  # of a script: an error
    assert ran(book) == ["1", "2", "3"] and capsys.readouterr().err

    sections = toc.load()
    program = dataclasses.replace(sections["1.2"], budget=True)
    monkeypatch.setitem(sections, "1.2", program)
    assert record.main(["--budget", "60"]) == 0
    out, err = capsys.readouterr()
    assert "ch01_x.s2: its budget is spent" in out and not err
    assert "2 of 3 recorded" in out and "goes on with: ch01_x.s2" in out
    (book / "bad2").unlink()
    ran(book)
    assert record.main(["--budget", "60"]) == 0
    assert ran(book) == ["2"]
    assert "3 of 3 recorded" in capsys.readouterr().out


def test_a_script_that_takes_too_long_is_ended(book, monkeypatch, capsys):
    monkeypatch.setattr(record, "AT_LEAST_S", 0)
    script = book / "ch01_x" / "s1.py"
    script.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    assert record.main(["--budget", "1", "1.1"]) == 0
    assert "its time was over" in capsys.readouterr().out
    entry = json.loads((book / "runs/record-box-1/state.json").read_text())
    assert entry["ch01_x.s1"]["exit_code"] == "ended"


def test_smoke_saves_nothing(book):
    with pytest.raises(bench.Refusal, match="--out: a smoke run"):
        record.main(["--smoke", "--out", str(book / "out")])
    assert record.main(["--smoke"]) == 0
    assert (book / "runs.txt").read_text() == "".join(
        f"{n} --smoke\n" for n in (1, 2, 3)
    )
    assert not (book / "out").exists()
    assert not list(book.rglob("state.json"))
    assert not list(book.rglob("box-1.json"))


def test_the_archive_unpacks_in_a_checkout(book, tmp_path):
    own = book / "ch01_x" / "results" / "box-1.json"
    own.parent.mkdir()
    own.write_text('{"0": "older"}')
    out = book / "out"
    assert record.main(["--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["records-box-1.tar.gz"]
    with tarfile.open(out / "records-box-1.tar.gz") as tar:
        tar.extractall(tmp_path / "home", filter="data")
    home = tmp_path / "home" / "ch01_x" / "results" / "box-1.json"
    recorded = json.loads(home.read_text())
    assert recorded == {
        "0": "older",
        "1": "recorded",
        "2": "recorded",
        "3": "recorded",
    }
    assert json.loads(own.read_text()) == {"0": "older"}
    assert record.main(["--out", str(book / "again")]) == 0
    assert (book / "again" / "records-box-1.tar.gz").exists()


def test_a_dirty_tree_is_refused_once(book, monkeypatch):
    monkeypatch.setattr(machine, "source", lambda: {"dirty": True})
    with pytest.raises(bench.Refusal, match="uncommitted changes"):
        record.main([])
    assert ran(book) == []


def test_time_is_divided_by_weight():
    light = record.Job("a", ()), record.Job("b", ())
    heavy = record.Job("c", (), True, 8)
    left = [*light, heavy]
    assert record.share(light[0], left, 100) == 10
    assert record.share(heavy, left, 100) == 80
    assert record.share(heavy, [heavy], 33) == 33
