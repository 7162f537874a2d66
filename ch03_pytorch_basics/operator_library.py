"""3.2.1  Operator library · PyTorch 的運算元函數庫

Question  How many operators stand behind one name, and behind one layer?
Expect    each way to write a product is one overload of one ATen operator;
          its schema says what is written and what is shared; a Linear layer
          is one matrix product (addmm) forward and two (mm) backward
Run       python -m ch03_pytorch_basics.operator_library [--smoke] [--save]
"""

import torch

from common import bench


def aten_operators(function):
    """Every operator passes the dispatcher, where a mode can stand and look.

    Returns:
        The overloads that ``function()`` ran, in order.
    """
    ran = []

    class Listener(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            ran.append(operator)
            return operator(*args, **(kwargs or {}))

    with Listener():
        function()
    return ran


def forms_of_multiply(x, y, number):
    """One name, many ways: each reaches another overload, or the same.

    ``x`` and ``y`` are tensors of one shape; the in-place form writes a copy
    of ``x``.  Returns {how it is written: a call of no arguments}.
    """
    kept, out, aten = x.clone(), torch.empty_like(x), torch.ops.aten
    return {
        "x * y": lambda: x * y,
        "torch.mul(x, y)": lambda: torch.mul(x, y),
        "x.mul(y)": lambda: x.mul(y),
        "torch.ops.aten.mul.Tensor(x, y)": lambda: aten.mul.Tensor(x, y),
        "x * 3": lambda: x * number,
        "torch.ops.aten.mul.Scalar(x, 3)": lambda: aten.mul.Scalar(x, number),
        "x.mul_(y)": lambda: kept.mul_(y),
        "torch.mul(x, y, out=z)": lambda: torch.mul(x, y, out=out),
    }


def overloads(name):
    """One operator is one packet of overloads, each with a schema.

    Returns:
        {overload: schema} of ``aten::name``, as text; those of numbers and
        lists alone, which only compiled scripts use, are left out.
    """
    packet = getattr(torch.ops.aten, name)
    found = {o: str(getattr(packet, o)._schema) for o in packet.overloads()}
    return {o: text for o, text in found.items() if "Tensor" in text}


def promises(operator):
    """A schema says which arguments are written, and which are returned.

    ``Tensor(a!)`` is written, ``Tensor(a)`` shared with the result of the
    same letter; a plain ``Tensor`` comes back untouched and unshared.
    Returns {"writes": names, "shares": names}.
    """
    returned = set()
    for result in operator._schema.returns:
        if result.alias_info:
            returned |= result.alias_info.before_set
    found = {"writes": set(), "shares": set()}
    for argument in operator._schema.arguments:
        alias = argument.alias_info
        if alias and alias.is_write:
            found["writes"].add(argument.name)
        if alias and (alias.before_set & returned or "*" in alias.after_set):
            found["shares"].add(argument.name)  # a -> *: a list of views
    return found


def keeps(operator, *args, **kwargs):
    """Watch what an operator writes, and what its result shares.

    Returns {"writes": names, "shares": names}, as ``promises`` does.
    """
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
    before = {name: value.clone() for name, value in given.items()}
    results = operator(*args, **kwargs)
    results = results if isinstance(results, (tuple, list)) else [results]
    storages = {r.untyped_storage()._cdata for r in results}
    found = {"writes": set(), "shares": set()}
    for name, value in given.items():
        if not torch.equal(value, before[name]):
            found["writes"].add(name)
        if value.untyped_storage()._cdata in storages:
            found["shares"].add(name)
    return found


# --- what is run ------------------------------------------------------------


def written_forms(device):
    """Run every form of a product: operator, result, number of operators.

    Raises:
        Mismatch: another product, or more operators than one.
    """
    x = torch.arange(1.0, 7.0, device=device)
    y = torch.full((6,), 3.0, device=device)
    rows, expected = [], x * y
    for name, call in forms_of_multiply(x, y, 3).items():
        ran = aten_operators(call)
        forms = forms_of_multiply(x, y, 3)  # in-place must start afresh
        result = forms[name]()
        if not torch.equal(result, expected) or len(ran) != 1:
            raise bench.Mismatch(f"{name} runs {ran}, gives {result.tolist()}")
        said = promises(ran[0])
        rows.append(
            {
                "name": name,
                "operator": str(ran[0]),
                "result": ", ".join(said["shares"]) or "new memory",
                "schema": str(ran[0]._schema),
            }
        )
    return rows


def schema_cases(device):
    """Return (operator, arguments, keyword arguments) worth checking."""
    aten = torch.ops.aten

    def x():
        return torch.arange(1.0, 7.0, device=device).view(2, 3)

    rows = torch.tensor([1, 0], device=device)
    return [
        (aten.mul.Tensor, (x(), x()), {}),
        (aten.mul_.Tensor, (x(), x()), {}),
        (aten.mul.out, (x(), x()), {"out": torch.zeros_like(x())}),
        (aten.t.default, (x(),), {}),
        (aten.view.default, (x(), [6]), {}),
        (aten.select.int, (x(), 0, 1), {}),
        (aten.index.Tensor, (x(), [rows]), {}),
        (aten.index_put_.default, (x(), [rows], x() + 9), {}),
        (aten.clone.default, (x(),), {}),
        (aten.addmm.default, (x(), x(), torch.eye(3, device=device)), {}),
        (aten.relu_.default, (-x(),), {}),
        (aten.split.Tensor, (x(), 1), {}),
    ]


def checked_schemas(cases):
    """Compare what schemas promise with what operators do.

    Raises:
        Mismatch: an operator that does something else.
    """
    rows = []
    for operator, args, kwargs in cases:
        said, done = promises(operator), keeps(operator, *args, **kwargs)
        if said != done:
            raise bench.Mismatch(f"{operator}: says {said}, does {done}")
        rows.append(
            {
                "name": str(operator),
                "writes": ", ".join(sorted(done["writes"])) or "nothing",
                "shares": ", ".join(sorted(done["shares"])) or "nothing",
                "schema": str(operator._schema).removeprefix("aten::"),
            }
        )
    return rows


def linear_passes(device):
    """Return {what: call} of one Linear layer's forward and backward."""
    layer = torch.nn.Linear(4, 3, device=device)
    bare = torch.nn.Linear(4, 3, bias=False, device=device)
    x = torch.ones(2, 4, device=device, requires_grad=True)
    deep = torch.ones(2, 5, 4, device=device)
    y = layer(x)
    start = torch.ones_like(y)
    inputs = [x, *layer.parameters()]

    def inference():
        with torch.inference_mode():
            return layer(x)

    return {
        "forward, x (2, 4)": lambda: layer(x),
        "forward, x (2, 5, 4)": lambda: layer(deep),
        "forward, no bias": lambda: bare(x),
        "forward, inference mode": inference,
        "backward of the first": lambda: torch.autograd.grad(y, inputs, start),
    }


def under_linear(device):
    """List the operators under each pass of a layer."""
    rows = []
    for name, call in linear_passes(device).items():
        ran = aten_operators(call)
        products = [o for o in ran if "mm" in str(o) or "linear" in str(o)]
        rows.append(
            {
                "name": name,
                "operators": len(ran),
                "products": len(products),
                "in_order": ", ".join(
                    str(o).removeprefix("aten.").removesuffix(".default")
                    for o in ran
                ),
            }
        )
    return rows


def census():
    """Count the operators that this build of torch registers.

    Returns:
        {kind: number} of ATen's overloads.
    """
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    counts = {"overloads": 0, "in-place": 0, "out=": 0, "views": 0, "core": 0}
    packets = set()
    for name in sorted(names):
        packet, _, overload = name.partition(".")
        try:
            found = getattr(
                getattr(torch.ops.aten, packet), overload or "default"
            )
        except AttributeError:  # a few have schemas that Python cannot hold
            continue
        packets.add(packet)
        arguments = found._schema.arguments
        written = [a for a in arguments if a.alias_info and a.is_write]
        counts["overloads"] += 1
        counts["out="] += any(a.is_out for a in arguments)
        counts["in-place"] += bool(
            written and written[0] is arguments[0] and packet.endswith("_")
        )
        counts["views"] += found.is_view
        counts["core"] += torch.Tag.core in found.tags
    return {"operators": len(packets)} | counts


TECHNIQUES = (forms_of_multiply, overloads, aten_operators, promises, keeps)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    forms = written_forms(args.device)
    bench.report(
        args,
        forms,
        {"name": "written", "operator": "operator run", "result": "result"},
        title="one product, eight ways to write it: all results equal",
    )
    for overload, schema in overloads("mul").items():
        print(f"  mul.{overload}: {schema}"[:100])
    schemas = checked_schemas(schema_cases(args.device))
    bench.report(
        args,
        schemas,
        {"name": "operator", "writes": "writes", "shares": "result shares"},
        title="what a schema promises, and the operator was seen to do",
    )
    layers = under_linear(args.device)
    bench.report(
        args,
        layers,
        {
            "name": "one Linear layer",
            "operators": "ops",
            "products": "products",
            "in_order": "in order",
        },
        title="the ATen operators under one Linear layer",
    )
    counts = census()
    bench.report(
        args,
        [{"name": kind, "count": count} for kind, count in counts.items()],
        title="ATen in this build",
    )
    return args.rows


if __name__ == "__main__":
    bench.run(main)
