"""A technique is a few lines that work when pasted under ``import torch``."""

import builtins
import dis
import importlib
import inspect
import textwrap
import types

import pytest
import torch

from chapters import toc

LIMIT = 25  # lines, docstring included
# a tool that readers hand a step of their own, and a model on one page
# readers of other programs' reports: used as they are, not pasted
TOOLS = ("find_bottleneck", "nsight_compute", "nsight_systems", "strace")
LONGER = {"hidden_syncs": 80, "Tape": 99, "double_buffered": 26}
# what stands right above a tool and is pasted with it
ABOVE = {"hidden_syncs": {"WAITS", "HOST_WORK", "running_line"}}


def scripts():
    """Return the scripts of the chapters that teach techniques."""
    found = {
        module
        for section in toc.load().values()
        if not section.planned and section.kind == "leaf"
        for module in section.modules
        if module.startswith(("ch02_", "ch03_", "ch04_", "ch06_"))
        and not module.endswith(TOOLS)
    }
    return sorted(found)


def free_names(code):
    """Yield the global names that a code object reads."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    for nested in inner:
        yield from free_names(nested)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval


def foreign(function, limit=LIMIT):
    """Return what keeps a function from being pasted, or nothing."""
    source = textwrap.dedent(inspect.getsource(function)).rstrip()
    lines = source.count("\n") + 1
    if lines > limit:
        return f"{lines} lines"
    known = {"torch", function.__name__, *dir(builtins)}
    known |= ABOVE.get(function.__name__, set())
    # names of a class body, and of what the function itself defines
    known |= {"__name__", "__module__", "__qualname__"}
    code = compile(source, function.__name__, "exec")
    names = set(free_names(code)) - known
    return f"reads {', '.join(sorted(names))}" if names else None


@pytest.mark.parametrize("module", scripts())
def test_techniques_can_be_pasted(module):
    techniques = importlib.import_module(module).TECHNIQUES
    assert techniques
    for function in techniques:
        name = function.__name__
        assert inspect.getdoc(function), name
        reason = foreign(function, LONGER.get(name, LIMIT))
        assert reason is None, f"{module}.{name}: {reason}"


def test_the_check_sees_a_global(pasted):
    def own(x):
        """Use torch, a builtin and a local."""
        y = [torch.ones(2) for _ in range(len(x))]
        return y

    def borrowed(x):
        """Use what stands elsewhere in this file."""
        return pytest.approx(x)

    assert foreign(own) is None
    assert foreign(borrowed) == "reads pytest"
    assert foreign(own, limit=2) == "4 lines"
