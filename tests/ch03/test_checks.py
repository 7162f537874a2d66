"""Chapter 3's checks hold with `python -O`, which drops every assert."""

import ast
from pathlib import Path

import pytest

import ch03_pytorch_basics

SCRIPTS = sorted(Path(ch03_pytorch_basics.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_check_is_an_assert(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert not lines
