"""6.4.2  No needless gradients · 關閉不必要的梯度計算

Question  What does autograd keep and do for gradients that nobody reads?
Expect    evaluating: the activations that forward keeps (0 bytes under
          no_grad and inference_mode), model.eval() or not; training a head on
          a frozen backbone: only what the head needs, and the FLOPs of
          forward alone: backward's two products per layer go, of which the
          first layer has one, so L layers are 3 L - 1 products against L
Run       python -m ch06_single_gpu_perf.no_gradients [--smoke] [--save]
"""

import math
import textwrap

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch06_single_gpu_perf.fused_operators import reading
from common import bench, seeding


def forward_with_grad(model, x):
    """Keep every input of a product for a backward that will not come."""
    return model(x)


def forward_in_eval_mode(model, x):
    """Switch dropout and batch norm; autograd does not read the switch."""
    model.eval()
    return model(x)


def forward_without_grad(model, x):
    """Record no graph: an input is freed as soon as it has been used."""
    with torch.no_grad():
        return model(x)


def forward_in_inference_mode(model, x):
    """Record no graph, and leave out version counters and view tracking.

    What is made here can never enter a recorded computation.
    """
    with torch.inference_mode():
        return model(x)


def freeze(module):
    """Mark parameters as constants: autograd plans no product for them."""
    module.requires_grad_(False)


def train_everything(backbone, head, x, targets):
    """Compute all gradients, also of weights that no optimizer changes."""
    loss = torch.nn.functional.cross_entropy(head(backbone(x)), targets)
    loss.backward()
    return loss.detach()


def train_behind_no_grad(backbone, head, x, targets):
    """Record nothing of the backbone; backward ends where the head begins.

    The same as a frozen backbone, said where it is used.
    """
    with torch.no_grad():
        features = backbone(x)
    loss = torch.nn.functional.cross_entropy(head(features), targets)
    loss.backward()
    return loss.detach()


def saved_bytes(function):
    """Return (bytes kept for backward, tensors) that ``function()`` saves.

    A storage that is saved twice counts once, in full.
    """
    kept, count = {}, 0

    def pack(tensor):
        nonlocal count
        count += 1
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()  # its graph keeps what is saved alive meanwhile
    del result
    return sum(kept.values()), count


class Operators(TorchDispatchMode):
    """Count operators, all of them and the matrix products, and FLOPs."""

    def __init__(self):
        super().__init__()
        self.total = self.products = self.flops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.total += 1
        if op.overloadpacket.__name__ in (
            "mm",
            "addmm",
            "linear",  # in one piece where autograd is off
        ):
            self.products += 1
            # (M, K) @ (K, N): each of the three sizes lies in two of these
            first, second = [t for t in args if t is not None and t.dim() > 1]
            sizes = first.numel() * second.numel() * out.numel()
            self.flops += 2 * math.isqrt(sizes)
        return out


def operators(function):
    """Return (operators, matrix products) that ``function()`` dispatches."""
    with Operators() as counted:
        function()
    return counted.total, counted.products


def product_flops(function):
    """Return the FLOPs of the matrix products of ``function()``."""
    with Operators() as counted:
        function()
    return counted.flops


def summary(times, variants):
    """Return the ratios that FLOPs predict, and those measured, by row."""
    flops = {}
    for name, (factory, *_) in variants.items():
        function = factory()
        function()
        flops[name] = product_flops(function)
    first = flops[times[0]["name"]]
    return [
        {
            "name": row["name"],
            "predicted": first / flops[row["name"]],
            "measured": row["ratio"],
            "interval": row["ratio_interval"],
            "reading": reading(first / flops[row["name"]], row),
        }
        for row in times[1:]
    ]


def make_backbone(args):
    """Return (backbone, input (rows, width)): ``LAYERS`` of linear, GELU."""
    rows, width = (32, 16) if args.smoke else (256, 512)
    if args.device.type != "cpu" and not args.smoke:
        rows, width = 8192, 2048
    seeding.seed_everything(0)
    layers = []
    for _ in range(LAYERS):
        layers += [
            torch.nn.Linear(width, width, device=args.device),
            torch.nn.GELU(),
        ]
    backbone = torch.nn.Sequential(*layers)
    return backbone, torch.randn(rows, width, device=args.device)


LAYERS, CLASSES = 4, 8


def evaluations(args):
    """Return {row: (factory, bytes that are predicted to be saved)}."""
    model, x = make_backbone(args)
    # per layer: the input of the product, and what GELU reads
    activations = LAYERS * 2 * x.nbytes
    weights = sum(m.weight.nbytes for m in model[2::2])  # for inputs' sake
    techniques = {
        "grad": (forward_with_grad, activations + weights),
        "eval mode alone": (forward_in_eval_mode, activations + weights),
        "no_grad": (forward_without_grad, 0),
        "inference_mode": (forward_in_inference_mode, 0),
    }

    def factory(function):
        def make():
            model, x = make_backbone(args)
            if function is not forward_in_eval_mode:
                return lambda: function(model, x)
            function(model, x)  # switched once: the walk is not timed
            return lambda: model(x)

        return make

    return {
        name: (factory(function), saved)
        for name, (function, saved) in techniques.items()
    }


def trainings(args):
    """Return {row: (factory, bytes saved, matrix products)}, predicted."""

    def factory(train, frozen):
        def make():
            backbone, x = make_backbone(args)
            head = torch.nn.Linear(x.shape[1], CLASSES, device=args.device)
            targets = torch.arange(len(x), device=args.device) % CLASSES
            if frozen:
                freeze(backbone)

            def step():
                head.zero_grad()
                backbone.zero_grad()
                loss = train(backbone, head, x, targets)
                gradients = [p.grad for p in head.parameters()]
                return {"loss": loss, "gradients": gradients}

            return step

        return make

    _, x = make_backbone(args)
    rows, width = x.shape
    backbone = LAYERS * 2 * x.nbytes + (LAYERS - 1) * 4 * width**2
    # the head's input and, if its gradient is wanted, weight; log-softmax
    # (its result), targets and the number of them
    head = x.nbytes + 4 * rows * CLASSES + 8 * rows + 4
    weight = 4 * width * CLASSES
    forward = LAYERS + 1
    return {
        "everything": (
            factory(train_everything, False),
            backbone + head + weight,
            forward + 2 * forward - 1,  # the input wants no gradient
        ),
        "frozen backbone": (
            factory(train_everything, True),
            head,
            forward + 1,
        ),
        "backbone under no_grad": (
            factory(train_behind_no_grad, False),
            head,
            forward + 1,
        ),
    }


def inference_tensor_in_training(device="cpu"):
    """Return the sentence with which torch refuses it, and what cures it.

    Returns:
        (text of the RuntimeError, gradient by a clone, gradient by no_grad)
    """
    weight = torch.ones(3, device=device, requires_grad=True)

    def gradient(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad.tolist()

    with torch.inference_mode():
        features = torch.arange(3.0, device=device) + 1
    try:
        gradient(features)
        refused = None
    except RuntimeError as error:
        refused = str(error)
    with torch.no_grad():
        cured = torch.arange(3.0, device=device) + 1
    return refused, gradient(features.clone()), gradient(cured)


COLUMNS = {
    "name": "row",
    "saved_bytes": "saved",
    "predicted_bytes": "predicted",
    "saved_tensors": "tensors",
    "operators": "operators",
    "products": "products",
    "predicted_products": "predicted",
}

TECHNIQUES = (
    forward_with_grad,
    forward_in_eval_mode,
    forward_without_grad,
    forward_in_inference_mode,
    freeze,
    train_everything,
    train_behind_no_grad,
)


def counted(variants):
    """Return rows of saved bytes and operators, beside those predicted."""
    rows = []
    for name, (factory, saved, *products) in variants.items():
        function = factory()
        function()  # gradients and states exist from the second call on
        found, tensors = saved_bytes(function)
        total, multiplied = operators(function)
        row = {
            "name": name,
            "saved_bytes": found,
            "predicted_bytes": saved,
            "saved_tensors": tensors,
            "operators": total,
            "products": multiplied,
            "predicted_products": products[0] if products else LAYERS,
        }
        rows.append(row)
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv)
    tables, variants = [], evaluations(args)
    most = variants["grad"][1]
    title = f"Evaluating {LAYERS} layers"
    tables += bench.compare(
        args,
        {name: factory for name, (factory, _) in variants.items()},
        tolerance=None,
        budget_s=4.0,
        expect=(
            f"{most / 2**20:.3g} MiB saved by forward with grad, 0 without; "
            f"{3 * LAYERS + 2} matrix products per training step, {LAYERS + 2}"
            " with a frozen backbone"
        ),
        title=title,
    )
    tables += bench.report(
        args, counted(variants), COLUMNS, title=f"{title}, counted"
    )

    variants = trainings(args)
    title = f"Training a head on {LAYERS} layers"
    times = bench.compare(
        args,
        {name: factory for name, (factory, *_) in variants.items()},
        unit="step",
        budget_s=4.0,
        title=title,
    )
    ratios = bench.report(
        args,
        summary(times, variants),
        title="Speed predicted from the FLOPs of the matrix products",
    )
    tables += times + ratios
    tables += bench.report(
        args, counted(variants), COLUMNS, title=f"{title}, counted"
    )

    refused, cloned, without = inference_tensor_in_training(args.device)
    print("A tensor made under inference_mode, used in training, is refused:")
    print(*(f"  {line}" for line in textwrap.wrap(refused, 90)), sep="\n")
    print(
        "Autograd would have to save it, and it has no version counter that "
        "could tell whether\nsomebody has changed it since. A clone made "
        f"outside works: gradient {cloned}; so does\nmaking it under no_grad: "
        f"{without}."
    )
    return tables


if __name__ == "__main__":
    bench.run(main)
