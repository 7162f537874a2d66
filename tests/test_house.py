"""House rules that a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "chapters", "benchmarks")
BANNED = {"utils", "helpers", "misc", "new", "fast", "slow", "v2", "optimized"}
BANNED |= {"final", "util", "helper"}
LIMIT = 500_000  # bytes


def tracked():
    """Return the files that git keeps, or would keep when asked."""
    done = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    names = done.stdout.decode().split("\0")
    return [ROOT / n for n in names if n and (ROOT / n).is_file()]


def modules():
    """Return our Python files, tests left out."""
    folders = [ROOT / name for name in PACKAGES]
    folders += sorted(ROOT.glob("ch[0-9][0-9]_*"))
    return [path for folder in folders for path in folder.rglob("*.py")]


def chapters_imported(path):
    """Return the chapter folders that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        found |= {n.split(".")[0] for n in names if re.match(r"ch\d\d_", n)}
    return found


def test_no_file_is_large():
    large = [f for f in tracked() if f.stat().st_size > LIMIT]
    assert not large


def test_names_say_what_a_thing_is():
    for path in tracked():
        parts = path.relative_to(ROOT).with_suffix("").parts
        words = {word for part in parts for word in part.lower().split("_")}
        assert not words & BANNED, path


def test_only_chapter_10_imports_other_chapters():
    for path in modules():
        own = path.relative_to(ROOT).parts[0]
        if own in ("ch10_gpt2", "benchmarks"):
            continue
        assert chapters_imported(path) <= {own}, path


def test_the_check_sees_an_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "def f():\n    from ch07_memory import x\n    return x\n"
    )
    assert chapters_imported(script) == {"ch07_memory"}


def test_nothing_happens_at_import():
    """A module's top level defines; only the guard at its end runs."""
    calm = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.AugAssign,
        ast.If,
        ast.Try,
    )
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            doc = isinstance(node, ast.Expr)
            doc = doc and isinstance(node.value, ast.Constant)
            assert doc or isinstance(node, calm), (path, node.lineno)


def test_texts_are_utf8_and_need_no_machine():
    """No file carries a path of the machine it was written on."""
    here = str(ROOT.parent) + "/"
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt", ".ipynb"}:
            assert here not in path.read_text(encoding="utf-8"), path
