"""3.3: a graph is one run's; what is captured keeps its example's branch."""

import gc
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch03_pytorch_basics import dynamic_graph
from ch03_pytorch_basics.dynamic_graph import (
    both_branches,
    branching,
    captured,
    doubling,
    graph_of,
)
from common import bench

UP = torch.full((4,), 0.5)


def names(result):
    return [node.name().split("::")[-1] for node in graph_of(result)]


def leaf(x=UP):
    return x.clone().requires_grad_()


# --- the graph of one forward -----------------------------------------------


def test_each_branch_has_its_own_nodes():
    ends = ["AccumulateGrad"]
    assert names(branching(leaf())) == ["SumBackward0", "MulBackward0"] + ends
    assert names(branching(leaf(-UP))) == [
        f"{name}Backward0" for name in ("Sum", "Sin", "Exp")
    ] + ["AccumulateGrad"]


@pytest.mark.parametrize("turns", [0, 1, 2, 7, 30])
def test_a_loop_of_n_turns_has_n_nodes(turns):
    found = names(doubling(leaf(), 2.0**turns))
    assert found.count("MulBackward0") == turns
    assert len(found) == turns + 2


def test_counting_what_runs_is_not_counting_the_graph():
    """The loop's norms run and are recorded, but no result leads there."""

    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += 1
            return op(*args, **(kwargs or {}))

    with Count() as ran:
        result = doubling(leaf(), 8)
    assert len(graph_of(result)) == 5
    assert ran.count > 3 * 3


def test_a_node_used_twice_is_one_node():
    y = leaf() * 2
    assert names((y + y).sum()).count("MulBackward0") == 1


def test_a_forward_makes_new_nodes_and_keeps_the_leaf_s():
    x = leaf()
    first, second = graph_of(branching(x)), graph_of(branching(x))
    assert [node in second for node in first] == [False, False, True]


def test_a_graph_dies_with_its_result():
    class Note:
        """What a node holds, as long as it lives."""

    result, note = branching(leaf()), Note()
    result.grad_fn.next_functions[0][0].metadata["note"] = note
    seen = weakref.ref(note)
    del note
    gc.collect()
    assert seen() is not None
    del result
    gc.collect()
    assert seen() is None


def test_a_graph_is_walked_once():
    says = dynamic_graph.second_backward("cpu")
    assert says == "Trying to backward through the graph a second time"
    result = branching(leaf())
    result.backward(retain_graph=True)
    result.backward()


def test_only_one_of_the_timed_rows_records(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        dynamic_graph.bench,
        "compare",
        lambda args, variants, **how: seen.update(variants) or [],
    )
    dynamic_graph.main(["--smoke", "--device", "cpu"])
    found = {name: factory()() for name, factory in seen.items()}
    assert list(found) == ["no graph", "graph recorded"]
    assert found["no graph"].grad_fn is None
    assert len(graph_of(found["graph recorded"])) == 20 + 1
    assert torch.equal(*found.values())


def test_without_grad_there_is_no_graph():
    with torch.no_grad():
        assert branching(leaf()).grad_fn is None
    assert graph_of(torch.ones(1)) == []


# --- captured ---------------------------------------------------------------


def test_a_replay_is_right_while_the_branch_is_the_example_s():
    replay = captured(branching, UP)
    for x in (UP, 3 * UP, torch.arange(4.0)):
        assert torch.equal(replay(x), branching(x))


def test_a_replay_is_silently_wrong_on_the_other_branch():
    replay = captured(branching, UP)
    assert replay(-UP).item() == 1.0  # the square's sum
    right = branching(-UP).item()
    assert right == pytest.approx(4 * math.sin(math.exp(-0.5)))
    assert abs(replay(-UP).item() - right) > 1


def test_a_replay_turns_as_often_as_its_example():
    replay = captured(lambda x: doubling(x, 8), UP)  # 3 turns
    assert replay(UP) == doubling(UP, 8)
    assert replay(UP / 2) == doubling(UP, 8) / 2 != doubling(UP / 2, 8)


def test_a_replay_keeps_constants_and_several_results():
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def function(x):
        values, places = (weight @ x).sort()
        big, small = values.chunk(2)
        return big - small + places[:2] + 1.0

    replay = captured(function, UP)
    x = torch.tensor([3.0, -1.0, 0.5, 2.0])
    assert torch.equal(replay(x), function(x))


def test_an_export_refuses_and_a_cond_holds_both():
    with pytest.raises(RuntimeError, match="data-dependent"):
        dynamic_graph.exported(branching, UP)
    exported = dynamic_graph.exported(both_branches, UP)
    for x in (UP, -UP):
        assert torch.equal(exported(x), branching(x))


def test_a_compiled_function_still_decides():
    function, pieces = dynamic_graph.guarded(branching, UP)
    known = len(pieces)  # the condition, and one branch
    assert torch.equal(function(-UP), branching(-UP))
    assert len(pieces) == known + 1
    function(UP), function(-UP)
    assert len(pieces) == known + 1


# --- the script -------------------------------------------------------------


def test_smoke(capsys):
    rows = dynamic_graph.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert not shown.err
    graphs = [row for row in rows if "nodes" in row]
    assert [row["nodes"] for row in graphs] == [3, 4, 4, 5]
    asked = {row["name"]: row for row in rows if "says" in row}
    assert asked["operators replayed"]["error"] > 1
    assert asked["torch.export"]["answer"] is None
    assert asked["torch.compile"]["error"] == 0


def test_a_capture_that_would_decide_is_not_reported_as_frozen(monkeypatch):
    monkeypatch.setattr(dynamic_graph, "captured", lambda f, example: f)
    with pytest.raises(bench.Mismatch, match="answered"):
        dynamic_graph.main(["--smoke", "--device", "cpu"])


def test_a_graph_counted_wrongly_is_noticed(monkeypatch):
    monkeypatch.setattr(
        dynamic_graph, "graph_of", lambda result: graph_of(result)[1:]
    )
    with pytest.raises(bench.Mismatch, match="graph of"):
        dynamic_graph.main(["--smoke", "--device", "cpu"])


@pytest.mark.parametrize("function", dynamic_graph.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone = pasted(function)
    if function is doubling:
        assert alone(UP, 8) == doubling(UP, 8)
    elif function is graph_of:
        assert len(alone(branching(leaf()))) == 3
    elif function is captured:
        assert alone(branching, UP)(2 * UP) == branching(2 * UP)
    elif function is both_branches:
        assert torch.equal(alone(-UP), branching(-UP))
    else:
        assert torch.equal(alone(-UP), branching(-UP))


@pytest.mark.gpu
def test_on_a_gpu():
    rows = dynamic_graph.main(["--smoke", "--device", "cuda"])
    assert [row["nodes"] for row in rows if "nodes" in row] == [3, 4, 4, 5]
