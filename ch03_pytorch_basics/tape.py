"""3.4.2  How it is implemented · 自動微分的實現

Question  What does autograd keep during a forward, and how does it use it?
Expect    a line per operator: where its inputs came from, how a gradient
          passes, and the tensors that this takes. Read from the last line to
          the first they give all gradients: under 100 lines of Python train
          as torch does, with the same nodes and the same bytes kept
Run       python -m ch03_pytorch_basics.tape [--smoke] [--save]
"""

import textwrap

import torch

from common import bench, tables


class Tape:
    """Every operator writes a line; read backwards, they are the chain rule.

    A line is the operator's name and, for each input that a gradient must
    reach, (line of the input, rule, saved tensors): the rule makes the
    input's gradient from the result's.  A tensor is saved with its version,
    which torch raises whenever something is written into it.
    """

    class Variable:
        """A tensor and the line that made it; None: no gradient goes there."""

        def __init__(self, tape, value, line=None):
            self.tape, self.value, self.line = tape, value, line

        def __matmul__(self, other):
            a, b = self.value, other.value  # (N, K), (K, M)
            return self.tape.write(
                "matmul",
                a @ b,
                (self, lambda g, b: g @ b.T, b),
                (other, lambda g, a: a.T @ g, a),
            )

        def __add__(self, other):
            # what was broadcast was used often: its gradients add up
            a, b = self.value.shape, other.value.shape
            return self.tape.write(
                "add",
                self.value + other.value,
                (self, lambda g: g.sum_to_size(a)),
                (other, lambda g: g.sum_to_size(b)),
            )

        def __neg__(self):
            return self.tape.write("neg", -self.value, (self, lambda g: -g))

        def tanh(self):
            y = self.value.tanh()
            edge = (self, lambda g, y: g * (1 - y * y), y)
            return self.tape.write("tanh", y, edge)

        def log_softmax(self, dim):
            y = self.value.log_softmax(dim)
            edge = (self, lambda g, y: g - y.exp() * g.sum(dim, True), y)
            return self.tape.write("log_softmax", y, edge)

        def gather(self, dim, index):
            def rule(g, index):
                return g.new_zeros(shape).scatter_add(dim, index, g)

            shape, y = self.value.shape, self.value.gather(dim, index)
            return self.tape.write("gather", y, (self, rule, index))

        def mean(self):
            shape = self.value.shape
            edge = (self, lambda g: g.expand(shape) / shape.numel())
            return self.tape.write("mean", self.value.mean(), edge)

    def __init__(self):
        self.lines = []

    def leaf(self, value):
        """Return a variable whose gradient is wanted."""
        self.lines.append(("leaf", []))
        return self.Variable(self, value, len(self.lines) - 1)

    def write(self, name, value, *edges):
        """Append a line, without the inputs that need no gradient."""
        edges = [
            (source.line, rule, [(t, t._version) for t in saved])
            for source, rule, *saved in edges
            if source.line is not None
        ]
        self.lines += [(name, edges)] if edges else []
        line = len(self.lines) - 1 if edges else None
        return self.Variable(self, value, line)

    def backward(self, result):
        """Return {line: gradient} of the leaves; the lines stay."""
        gradients = {result.line: torch.ones_like(result.value)}
        for line in range(result.line, -1, -1):
            name, edges = self.lines[line]
            if name == "leaf" or line not in gradients:
                continue
            g = gradients.pop(line)
            for source, rule, saved in edges:
                for tensor, version in saved:
                    if tensor._version != version:
                        raise RuntimeError(
                            f"{name} saved a tensor at version {version}; "
                            f"it is at version {tensor._version}"
                        )
                part = rule(g, *(tensor for tensor, _ in saved))
                known = gradients.get(source)
                gradients[source] = part if known is None else known + part
        return gradients


def loss_of(x, w1, b1, w2, b2, targets):
    """The same lines run on tensors and on a tape's variables.

    x (N, K), targets (N, 1) of classes; the mean cross-entropy.
    """
    scores = (x @ w1 + b1).tanh() @ w2 + b2  # (N, classes)
    return -scores.log_softmax(-1).gather(1, targets).mean()


def by_autograd(loss_of, weights, *data):
    """Let torch record the forward and walk it; returns (loss, gradients)."""
    leaves = [w.detach().requires_grad_() for w in weights]
    loss = loss_of(data[0], *leaves, *data[1:])
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves]


def by_tape(tape, loss_of, weights, *data):
    """Let an empty tape do it; returns (loss, gradients)."""
    leaves = [tape.leaf(w) for w in weights]
    x = tape.Variable(tape, data[0])
    loss = loss_of(x, *leaves, *data[1:])
    gradients = tape.backward(loss)
    return loss.value, [gradients[leaf.line] for leaf in leaves]


def nodes_of(result):
    """A node of torch's graph knows its inputs' nodes and what it saved.

    Returns (name, saved tensors by name) of each, in backward's order, for
    a graph in which each result is used once.
    """
    found, ahead = [], [result.grad_fn]
    while ahead:
        node = ahead.pop()
        kept = {
            name.removeprefix("_saved_"): getattr(node, name)
            for name in dir(node)
            if name.startswith("_saved_")
        }
        kept = {k: v for k, v in kept.items() if torch.is_tensor(v)}
        found.append((node.name(), kept))
        ahead += [source for source, _ in node.next_functions if source]
    return found


TECHNIQUES = (Tape, loss_of, by_autograd, by_tape, nodes_of)


def problem(samples, width, hidden, classes, device):
    """Return weights of a two-layer network, and (x, targets) to learn."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=draw)

    x = randn(samples, width)
    targets = (x @ randn(width, classes)).argmax(-1, keepdim=True)
    weights = [
        randn(width, hidden) / width**0.5,
        torch.zeros(hidden),
        randn(hidden, classes) / hidden**0.5,
        torch.zeros(classes),
    ]
    return [w.to(device) for w in weights], (x.to(device), targets.to(device))


def train(gradients_of, weights, data, steps, rate=0.5):
    """Return the losses of ``steps`` steps of gradient descent."""
    weights, losses = [w.clone() for w in weights], []
    for _ in range(steps):
        loss, gradients = gradients_of(loss_of, weights, *data)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= rate * gradient
        losses.append(loss.item())
    return losses


def taped(*problem):
    """Do as ``by_tape`` on a new tape: a graph serves one forward."""
    return by_tape(Tape(), *problem)


def kept(tensors):
    """Write what a node keeps: shapes, and name the bytes."""
    shapes = " ".join("×".join(map(str, t.shape)) for t in tensors)
    return shapes or "nothing", sum(t.nbytes for t in tensors)


def distinct_bytes(tensors):
    """Count each piece of memory once, however many nodes hold it."""
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def side_by_side(weights, data):
    """Return a row for each operator: the tape's line and torch's node.

    And the bytes that both keep, each piece of memory counted once.
    """
    tape = Tape()
    by_tape(tape, loss_of, weights, *data)
    lines = [line for line in reversed(tape.lines) if line[0] != "leaf"]
    x, targets = data
    leaves = [w.clone().requires_grad_() for w in weights]
    nodes = nodes_of(loss_of(x, *leaves, targets))
    nodes = [node for node in nodes if "AccumulateGrad" not in node[0]]
    rows = []
    for (name, edges), (node, saved) in zip(lines, nodes, strict=True):
        tensors = [t for _, _, pairs in edges for t, _ in pairs]
        shapes, nbytes = kept(tensors)
        node_shapes, node_bytes = kept(saved.values())
        rows.append(
            {
                "name": name,
                "keeps": shapes,
                "line_bytes": nbytes,
                "node": node,
                "saves": node_shapes,
                "node_bytes": node_bytes,
            }
        )
    ours = [t for _, edges in lines for e in edges for t, _ in e[2]]
    torchs = [t for _, saved in nodes for t in saved.values()]
    return rows, [distinct_bytes(tensors) for tensors in (ours, torchs)]


CHANGES = {
    "y + 1": lambda y: y + 1,
    "y.add_(1)": lambda y: y.add_(1),
    "y.data.add_(1)": lambda y: y.data.add_(1),
}


def changed_in_place(device):
    """Return rows: what happens to y = tanh(x) before its backward."""
    x = torch.linspace(-1, 1, 5, device=device)
    truth = (1 - x.tanh() ** 2) / 5

    def by_torch(change):
        leaf = x.clone().requires_grad_()
        y = leaf.tanh()
        change(y.detach())
        y.mean().backward()
        return leaf.grad

    def by_ours(change):
        tape = Tape()
        leaf = tape.leaf(x)
        y = leaf.tanh()
        change(y.value)
        return tape.backward(y.mean())[leaf.line]

    rows = []
    for name, change in CHANGES.items():
        row = {"name": name}
        for who, gradient in (("torch", by_torch), ("tape", by_ours)):
            try:
                error = (gradient(change) - truth).abs().max().item()
            except RuntimeError as refusal:
                row |= {who: "RuntimeError", f"{who}_says": str(refusal)}
            else:
                row[who] = "right" if error < 1e-6 else f"wrong: {error:.2f}"
        rows.append(row)
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv)
    sizes = (64, 8, 16, 4) if args.smoke else (512, 32, 128, 10)
    weights, data = problem(*sizes, args.device)
    steps = 10 if args.smoke else 100
    losses = [train(way, weights, data, steps) for way in (by_autograd, taped)]
    learned = [
        {
            "step": step,
            "torch": losses[0][step],
            "tape": losses[1][step],
            "difference": abs(losses[0][step] - losses[1][step]),
        }
        for step in range(steps)
    ]
    worst = max(row["difference"] / row["torch"] for row in learned)
    if worst > 1e-5 or losses[0][-1] > 0.9 * losses[0][0]:
        raise bench.Mismatch(f"losses differ by {worst:.1e}: {learned[-1]}")
    learned = bench.report(
        args,
        [learned[i * (steps - 1) // 4] for i in range(5)],
        {key: key for key in learned[0]},
        title="The loss of a two-layer network",
        extra={"losses": losses},
    )
    beside, distinct = side_by_side(weights, data)
    if distinct[0] != distinct[1]:
        raise bench.Mismatch(f"the tape and torch keep {distinct} bytes")
    beside = bench.report(
        args,
        beside,
        {
            "name": "the tape's line",
            "keeps": "keeps",
            "line_bytes": "bytes",
            "node": "torch's node",
            "saves": "saves",
            "node_bytes": "bytes",
        },
        title="What one forward leaves behind, in backward's order",
    )
    print(
        "each piece of memory counted once: "
        f"{tables.cell(distinct[0], 'bytes')} by the tape, "
        f"{tables.cell(distinct[1], 'bytes')} by torch"
    )
    changed = changed_in_place(args.device)
    verdicts = [row[who] for row in changed for who in ("torch", "tape")]
    if verdicts[:4] != ["right", "right", "RuntimeError", "RuntimeError"]:
        raise bench.Mismatch(f"changes in place: {verdicts}")
    changed = bench.report(
        args,
        changed,
        {"name": "after y = tanh(x)", "torch": "torch", "tape": "the tape"},
        title="Gradients, when something is written into a saved tensor",
    )
    for who in ("torch", "tape"):
        says = f"{who}: {changed[1][f'{who}_says'].split(' Hint')[0]}"
        print(textwrap.fill(says, 99, subsequent_indent="    "))
    timed = bench.compare(
        args,
        {
            name: lambda way=way: (
                lambda: dict(
                    zip(
                        ("loss", "gradients"),
                        way(loss_of, weights, *data),
                        strict=True,
                    )
                )
            )
            for name, way in (("torch", by_autograd), ("tape", taped))
        },
        unit="step",
        budget_s=3.0,
        title="One forward and backward",
    )
    return learned + beside + changed + timed


if __name__ == "__main__":
    bench.run(main)
