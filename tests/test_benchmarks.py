"""What a benchmark's record says of its age, and of its bars in words."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from chapters import index
from common import bench

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
NAMES = sorted(p.stem for p in FOLDER.glob("[a-z]*.py"))
BUILT = {".c", ".cpp", ".cu"}

# imported, and yet no benchmark's figures come from it
MAKES_NO_FIGURE = {
    "common/__init__.py": "a sentence",
    "common/answers.py": "compares answers, times nothing",
    "common/bench.py": "flags, printing, records; METHOD is in each record",
    "common/machine.py": "the card, which is in each record; folders",
    "common/notebook.py": "draws",
    "common/tables.py": "formats text",
}
MAKES_NONE_THERE = {
    "against_nanogpt": {
        "ch10_gpt2/checkpoints.py": "an update saves nothing",
        "ch10_gpt2/metrics.py": "an update writes nothing",
    },
    "known_link": {
        "ch02_hardware/memory_hierarchy.py": "room, for copies within memory",
    },
    "stream_peer": {
        "ch02_hardware/chain.c": "latency; only its compiler is used",
        "common/ranks.py": "the network's figures are not asked for",
        "common/timers.py": "the network's figures are not asked for",
    },
}


def file_of(name):
    """Return our file of a dotted name, or None."""
    place = ROOT.joinpath(*name.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def used_by(path):
    """Return our files that a module imports anywhere, or builds.

    A program for another process is a string, whose imports count, too.
    """
    trees, found = [ast.parse(path.read_text(encoding="utf-8"))], set()
    for node in ast.walk(trees[0]):
        if not isinstance(getattr(node, "value", None), str):
            continue
        beside = path.parent / node.value
        if Path(node.value).suffix in BUILT and beside.is_file():
            found.add(beside)
        elif re.match(r"\s*(from|import) ", node.value):
            try:
                trees.append(ast.parse(node.value))
            except SyntaxError:
                pass  # a sentence that begins so
    for tree in trees:
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, path
                names = [f"{node.module}.{a.name}" for a in node.names]
                names.append(node.module)
            found |= {file_of(name) for name in names}
    return found - {None}


def reached(path, ends):
    """Return names of all that a script uses; what ``ends`` leads nowhere."""
    found, ahead = set(), [path]
    while ahead:
        for other in used_by(ahead.pop()):
            name = other.relative_to(ROOT).as_posix()
            if name in found or name in ends:
                continue
            if other.stat().st_size:  # an empty __init__.py
                found.add(name)
            if other.suffix == ".py":
                ahead.append(other)
    return found


def module(name):
    return importlib.import_module(f"benchmarks.{name}")


def entry_of(name):
    """Return a record of today, without rows."""
    sources = bench.digests(module(name).SOURCES)
    return {
        "method": bench.METHOD,
        "script_sha256": bench.script_hash(FOLDER / f"{name}.py"),
        "key": {"sources": sources},
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_made_the_figures_is_in_the_record(name):
    ends = MAKES_NO_FIGURE | MAKES_NONE_THERE.get(name, {})
    found = reached(FOLDER / f"{name}.py", ends)
    assert found <= set(module(name).SOURCES)
    assert '"sources": bench.digests(SOURCES)' in inspect.getsource(
        module(name)
    )


def test_the_search_sees_all_ways_to_use_a_file(tmp_path):
    (tmp_path / "loop.c").touch()
    script = tmp_path / "script.py"
    script.write_text(
        "PROGRAM = 'from ch04_profiling import traces'\n"
        "SOURCE = 'loop.c'\n"
        "def f():\n"
        "    import common.text\n"
        "    from ch09_advanced import custom_op\n"
    )
    found = {path.name for path in used_by(script)}
    assert found >= {"loop.c", "traces.py", "text.py"}
    operator = ROOT / "ch09_advanced" / "custom_op" / "__init__.py"
    assert operator in used_by(script)
    assert operator.with_name("cross_entropy.cpp") in used_by(operator)
    trainer = reached(FOLDER / "against_nanogpt.py", MAKES_NO_FIGURE)
    assert "ch06_single_gpu_perf/optimizer_kernels.py" in trainer


@pytest.mark.parametrize("name", NAMES)
def test_a_record_ages_with_each_of_its_sources(name):
    entry = entry_of(name)
    assert index.age(entry, f"benchmarks.{name}") == ""
    sources = entry["key"]["sources"]
    assert sources
    for file in sources:
        other = entry | {"key": {"sources": sources | {file: "0" * 16}}}
        said = index.age(other, f"benchmarks.{name}")
        assert said == " (of an older version)", file


def test_the_subject_of_the_comparison_with_itself_is_the_comparer():
    assert set(module("comparer_a_a").SOURCES) == {
        "common/bench.py",
        "common/judging.py",
        "common/timers.py",
    }


def told(name, monkeypatch, **more):
    """Return the lines of a planted record in the table."""
    planted = entry_of(name) | {"machine": {"id": "box-1"}} | more
    monkeypatch.setattr(
        index,
        "entries",
        lambda folder: {"box-1": {f"benchmarks.{name}": planted}},
    )
    monkeypatch.setattr(index.machine, "line", lambda card: card["id"])
    return index.benchmark_table()


def test_a_missed_bar_is_said_in_words(monkeypatch):
    found = {"ratio": 1.1, "ratio_interval": [1.05, 1.38], "holds": False}
    nanogpt = module("against_nanogpt")
    table = told(
        "against_nanogpt",
        monkeypatch,
        found={
            "ours": found | {"share": 0.769},
            nanogpt.LOGS: found | {"ratio": 0.9, "share": 0.625},
        },
    )
    assert "| `box-1` | answer | bar |" in table
    ours = "| not the log's: ours |"
    assert f"{ours} 1.10× nanoGPT [1.05, 1.38] | ≥ 1.00× |" in table
    assert f"{ours} 76.9% of the ceiling | ≥ 75% |" in table
    assert f"| {nanogpt.LOGS} | missed: 62.5% of the ceiling | ≥" in table
    assert f"| {nanogpt.LOGS} | missed: 0.90× nanoGPT" in table


def test_counts_rates_and_peers_are_told(monkeypatch):
    row = {"name": "itself", "comparisons": 200, "bar": "at most 10"}
    rows = [
        row | {"claims": 4, "holds": True},
        row | {"claims": 11, "holds": False},
    ]
    table = told("comparer_a_a", monkeypatch, rows=rows)
    assert "| itself | 4 claims in 200 | at most 10 |" in table
    assert "| itself | missed: 11 claims in 200 | at most 10 |" in table

    rows = [{"name": "1mbit", "link_percent": n} for n in (96.6, 70)]
    table = told("known_link", monkeypatch, rows=[*rows, {"name": "1mbit"}])
    assert "| 1mbit | 96.6% found | within 20% |" in table
    assert "| 1mbit | missed: 70.0% found | within 20% |" in table

    rows = [
        {"name": "read", "tool": "fio", "ratio": ratio, "verdict": verdict}
        for ratio, verdict in [
            (1.0, "within 15%"),
            (1.4, "missed, because it is scalar"),
            (None, None),
        ]
    ]
    table = told("stream_peer", monkeypatch, rows=rows)
    assert "| read | 1.00× fio | 1 ± 0.15 |" in table
    assert "| read | missed, because it is scalar: 1.40× fio |" in table

    rows = [
        {"name": "find_bottleneck", "median_s": 1.5, "peak_bytes": 3e9},
        {"name": "peer", "median_s": 3.0, "peak_bytes": 1e9},
    ]
    table = told("find_bottleneck_speed", monkeypatch, rows=rows)
    assert "| time | 1.5 s | ≤ 10 s |" in table
    assert "| memory | missed: 3 GB | ≤ 2 GB |" in table
    assert "| speed | 2.0× peer | ≥ 1× |" in table


def test_a_record_of_other_rows_is_no_error(monkeypatch):
    table = told("known_link", monkeypatch, rows=[{"link_percent": 1}])
    assert "|  | recorded |  |" in table


def test_every_record_is_told_in_a_narrow_table():
    table = index.benchmark_table()
    for name in NAMES:
        assert f"({name}.py)" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines and max(map(len, lines)) <= 100
