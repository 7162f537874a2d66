"""3.3  Dynamic graphs · PyTorch 的動態圖機制

Question  Does autograd record the program, or one run of it?
Expect    one run: each forward makes new nodes, one per operator that ran and
          leads to the result; a loop of n turns makes n. A captured graph has
          the operators of its example: on other data it is wrong, or refuses
Run       python -m ch03_pytorch_basics.dynamic_graph [--smoke] [--save]
"""

import contextlib
import io
import logging
import math

import torch

from common import bench


def branching(x):
    """Python reads the data and goes one way; only that way is recorded."""
    if x.sum() > 0:
        return (x * x).sum()
    return x.exp().sin().sum()


def doubling(x, limit):
    """Data decide how many turns a loop makes; each turn records a node.

    The norms are recorded, too, but nothing leads from the result to them:
    their nodes die with them.
    """
    while x.norm() < limit:
        x = x * 2
    return x.sum()


def both_branches(x):
    """An operator that holds two graphs decides when it runs."""
    return torch.cond(
        x.sum() > 0,
        lambda x: (x * x).sum(),
        lambda x: x.exp().sin().sum(),
        (x,),
    )


def graph_of(result):
    """A result holds its node, a node those of its inputs: walk back.

    Returns the nodes in the order in which they are met; they live as long
    as somebody holds them or a result that leads to them.
    """
    nodes, ahead = [], [result.grad_fn]
    while ahead:
        node = ahead.pop(0)
        if node is not None and node not in nodes:
            nodes.append(node)
            ahead += [before for before, _ in node.next_functions]
    return nodes


def captured(function, example):
    """Keep the operators that ran, as a CUDA graph does: no decision stays."""
    from torch.utils import _python_dispatch, _pytree

    steps = []

    class Recorder(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            steps.append((op, args, kwargs or {}, op(*args, **(kwargs or {}))))
            return steps[-1][-1]

    with torch.no_grad(), Recorder():
        result = function(example)

    def replay(x):
        now = {example: x}  # what stands today where that stood
        for op, *inputs, old in steps:
            args, kwargs = _pytree.tree_map_only(
                torch.Tensor, lambda t, now=now: now.get(t, t), inputs
            )
            new = _pytree.tree_leaves(op(*args, **kwargs))
            now |= zip(_pytree.tree_leaves(old), new, strict=True)
        return now[result]

    return replay


TECHNIQUES = (branching, doubling, both_branches, graph_of, captured)


def in_words(nodes):
    """Write the nodes of a chain from the result back, without the endings."""
    names = [node.name().split("::")[-1] for node in nodes]
    return " ← ".join(name.removesuffix("Backward0") for name in names)


def graphs(limits, device):
    """Return a row for each run: what it should record, and what it did."""
    up = torch.full((4,), 0.5, device=device)  # of norm 1
    runs = [("x > 0", branching, (up,), 3), ("x < 0", branching, (-up,), 4)]
    for limit in limits:
        turns = math.ceil(math.log2(limit))
        runs.append((f"a loop of {turns}", doubling, (up, limit), turns + 2))
    rows = []
    for name, function, (x, *more), predicted in runs:
        x = x.clone().requires_grad_()
        first, second = (graph_of(function(x, *more)) for _ in range(2))
        shared = [node for node in first if node in second]
        words = in_words(first)
        if len(words) > 40:
            words = f"{words[:18]}… ←{words.rsplit('←', 1)[1]}"
        rows.append(
            {
                "name": name,
                "predicted": predicted,
                "nodes": len(first),
                "new": len(second) - len(shared),
                "graph": words,
            }
        )
    return rows


class Decides(torch.nn.Module):
    """What torch.export takes: a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@contextlib.contextmanager
def quiet():
    """Keep what a refusing exporter says on the way to its exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            yield
    finally:
        logging.disable(before)


def exported(function, example):
    """Return the function that torch.export made of one example."""
    with quiet():
        return torch.export.export(Decides(function), (example,)).module()


def guarded(function, example):
    """Return the compiled function and its graphs, none of them compiled.

    Between its graphs Python goes on: it still decides.
    """
    pieces = []

    def keep(graph, inputs):
        pieces.append(graph)
        return graph

    torch.compiler.reset()
    with quiet():
        compiled = torch.compile(function, backend=keep)
        compiled(example)
    return compiled, pieces


def asked_otherwise(device):
    """Return rows: what knows x > 0 is asked about x < 0."""
    example = torch.full((4,), 0.5, device=device)
    other = -example
    truth = branching(other).item()
    graphs_of = {
        "eager": lambda: branching,
        "operators replayed": lambda: captured(branching, example),
        "torch.export": lambda: exported(branching, example),
        "torch.export, torch.cond": lambda: exported(both_branches, example),
        "torch.compile": lambda: guarded(branching, example)[0],
    }
    rows = []
    for name, make in graphs_of.items():
        row = {"name": name, "answer": None, "error": None}
        try:
            function = make()
            known = function(example).item()
            row["answer"] = function(other).item()
        except RuntimeError as refusal:
            row["says"] = f"{type(refusal).__name__}, at capture"
        else:
            row["error"] = abs(row["answer"] - truth)
            right = math.isclose(row["answer"], truth, rel_tol=1e-5)
            row["says"] = "right" if right else "wrong, and silent"
            if not math.isclose(known, branching(example).item()):
                raise bench.Mismatch(f"{name}: wrong on its own example")
        rows.append(row)
    return rows


def second_backward(device):
    """Return what torch answers when a graph is walked twice."""
    x = torch.ones(4, device=device, requires_grad=True)
    result = (x * x).sum()
    result.backward()
    try:
        result.backward()
    except RuntimeError as error:
        return str(error).split(" (")[0]
    raise bench.Mismatch("a graph whose tensors were freed went on")


def chain(count, device, recording):
    """Return a factory of calls that run ``count`` tiny operators."""
    x = torch.ones(1, device=device, requires_grad=True)

    def call():
        with torch.set_grad_enabled(recording):
            y = x
            for _ in range(count):
                y = y * 1.01
        return y

    return lambda: call


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    rows = graphs((4, 8) if args.smoke else (4, 8, 1024), device)
    for row in rows:
        # AccumulateGrad is the leaf's own node, and stays with it
        if not row["predicted"] == row["nodes"] == row["new"] + 1:
            raise bench.Mismatch(f"graph of {row['name']}: {row}")
    rows = bench.report(
        args,
        rows,
        {
            "name": "run",
            "predicted": "predicted nodes",
            "nodes": "counted",
            "new": "new next time",
            "graph": "from the result back",
        },
        title="The graph of one forward",
    )
    print(
        "AccumulateGrad belongs to the leaf and stays; the other nodes are "
        f"new each time.\nA second backward: {second_backward(device)}."
    )
    asked = asked_otherwise(device)
    verdicts = [row["says"].split(",")[0] for row in asked]
    if verdicts[:2] + verdicts[3:] != ["right", "wrong", "right", "right"]:
        raise bench.Mismatch(f"captured graphs answered {verdicts}")
    asked = bench.report(
        args,
        asked,
        {
            "name": "what holds the graph",
            "answer": "its answer",
            "error": "error",
            "says": "verdict",
        },
        title="Captured with x > 0, then asked about x < 0",
    )
    count = 20 if args.smoke else 200
    timed = bench.compare(
        args,
        {
            "no graph": chain(count, device, False),
            "graph recorded": chain(count, device, True),
        },
        per_call=count,
        unit="operator",
        budget_s=3.0,
        title="What recording costs, with one element",
    )
    return rows + asked + timed


if __name__ == "__main__":
    bench.run(main)
