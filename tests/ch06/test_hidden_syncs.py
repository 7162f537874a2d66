"""The finder of waits: what must be found, what must not, and where."""

import contextlib
import copy
import functools
import inspect
import io
import linecache
import pickle
import pprint
import re
import sys
import textwrap
import threading
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ch06_single_gpu_perf import hidden_syncs as script
from ch06_single_gpu_perf.hidden_syncs import hidden_syncs
from common import bench, gpt

CPU = torch.device("cpu")
# what they say they are is asked for in a step, so they are made before
X = torch.arange(6.0)
MASK = X > 2
TWO = torch.tensor(2)
ZERO = torch.tensor(0.0)
ONES = torch.ones(6, dtype=torch.long)
SQUARE = 2 * torch.eye(4)
PARAMETER = nn.Parameter(torch.ones(3))


def assign(index, value):
    x = torch.zeros(6)
    x[index] = value
    return x


def sum_of(x):
    x[2:4] = X[:2]
    return x.sum()


def clip_strictly():
    PARAMETER.grad = torch.ones_like(PARAMETER)
    nn.utils.clip_grad_norm_([PARAMETER], 1.0, error_if_nonfinite=True)


def scaler_step():
    optimizer = torch.optim.SGD([PARAMETER], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(PARAMETER.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


WAITING = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to a string": lambda: X.to("cpu"),
    "to a device": lambda: X.to(CPU),
    "to, whose copy is no haste": lambda: X.to("cpu", copy=True),
    "to by keyword": lambda: X.to(device=CPU, dtype=torch.float64),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "float": lambda: float(X[0]),
    "int": lambda: int(X[0]),
    "bool": lambda: bool(X[0]),
    "if": lambda: 1 if X[0] else 0,
    "assert": lambda: not torch.isnan(X).any(),
    "max of two": lambda: max(X[0], X[1]),
    "range": lambda: range(TWO),
    "in": lambda: 1.0 in X,
    "is_nonzero": lambda: torch.is_nonzero(X[0]),
    "nonzero": lambda: X.nonzero(),
    "torch.nonzero": lambda: torch.nonzero(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "where of one": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "mask as index": lambda: X[MASK],
    "uint8 mask": lambda: assign(MASK, X[3:]),
    "mask = tensor": lambda: assign(MASK, X[3:]),
    "index_put": lambda: torch.zeros(6).index_put_((MASK,), X[3:]),
    "mask and index = number": lambda: torch.zeros(6, 2).__setitem__(
        (MASK, TWO.new_zeros(3)), 0.0
    ),
    "masked_fill by tensor": lambda: X.masked_fill(MASK, ZERO),
    "mask = 0-dim tensor": lambda: assign(MASK, ZERO),
    "unique": lambda: torch.unique(X),
    "unique of rows": lambda: torch.unique(X.view(2, 3), dim=0),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "repeat_interleave": lambda: X.repeat_interleave(ONES),
    "bincount": lambda: torch.bincount(ONES),
    "one_hot of unknown width": lambda: F.one_hot(ONES),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "tensor of a list": lambda: torch.tensor([1, 2], device=CPU),
    "tensor of a number": lambda: torch.tensor(1.0, device="cpu"),
    "as_tensor of a list": lambda: torch.as_tensor([1], device=CPU),
    "array to the device": lambda: torch.from_numpy(np.ones(2)).to(CPU),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "new": lambda: X.new([1.0, 2.0]),
    "new by a tuple": lambda: X.new((1.0, 2.0), device=CPU),
    "index made by new": lambda: X[ONES.new([0])],
    "tensor of a tensor": lambda: torch.tensor([X[0]]),
    "list as index": lambda: X[[0, 1]],
    "array as index": lambda: X[np.array([0, 1])],
    "list as index =": lambda: assign([0, 1], X[:2]),
    "index made on the device": lambda: X[torch.tensor([0], device=CPU)],
    "index made like another": lambda: X[ONES.new_tensor([0])],
    "host tensor as index": lambda: X[torch.tensor([0, 1])],
    "tensor as index": lambda: X[TWO],
    "tensor in a slice": lambda: X[:TWO],
    "arange to a tensor": lambda: torch.arange(TWO),
    "size by a tensor": lambda: torch.zeros(TWO),
    "split by a tensor": lambda: X.split(TWO),
    "narrow by a tensor": lambda: X.narrow(0, TWO, 1),
    "topk of a tensor": lambda: X.topk(TWO),
    "alpha is a tensor": lambda: X.add(X, alpha=TWO),
    "print": lambda: print(X),
    "repr": lambda: repr(X),
    "format": lambda: f"{X}",
    "format a number": lambda: f"{X[0]:.3f}",
    "print by the library": lambda: pprint.pformat(X),
    "normal by tensors": lambda: torch.normal(X, X),
    "inverse": lambda: torch.linalg.inv(SQUARE),
    "eigenvalues": lambda: torch.linalg.eigh(SQUARE),
    "clip strictly": clip_strictly,
    "grad scaler": scaler_step,
    "list to another's device": lambda: torch.tensor([1.0, 2.0]).to(X),
    "list as another": lambda: torch.tensor([1, 2]).type_as(X),
    "array to another's device": lambda: torch.from_numpy(np.ones(2)).to(X),
    "random numbers to the device": lambda: torch.rand(2).to(X.device),
    "copy_ of a list": lambda: torch.empty_like(X[:2]).copy_(
        torch.tensor([1.0, 2.0])
    ),
    "slice = list": lambda: X.clone().__setitem__(
        slice(0, 2), torch.tensor([1.0, 2.0])
    ),
    "host permutation as index": lambda: X[torch.randperm(6)],
    "mask = host tensor": lambda: assign(MASK, torch.rand(3)),
    "index_fill by tensor": lambda: X.index_fill(0, ONES, ZERO),
    "torch.save": lambda: torch.save(X, io.BytesIO()),
    "pickle": lambda: pickle.dumps(X),
    "dlpack": lambda: np.from_dlpack(X),
    "a meta tensor beside it": lambda: (
        nn.Linear(2, 2, device="meta")(torch.ones(2, device="meta")),
        X.sum().item(),
    ),
    "computed with the host's": lambda: (torch.rand(6) * X).sum().item(),
    "written to the host's": lambda: sum_of(torch.zeros(6)).item(),
    "moved, then read": lambda: (
        torch.rand(3).to(CPU, non_blocking=True).sum().item()
    ),
    "found through the host": lambda: X.cpu().numpy(),
    "computed on the host": lambda: X.cpu().float().mean().item(),
    "array of the host's": lambda: np.asarray(X.detach().cpu()),
}


ON_THE_DEFAULT_DEVICE = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "as_tensor of an array": lambda: torch.as_tensor(np.ones(2)),
    "made, then read": lambda: torch.ones(2).sum().item(),
    "to": lambda: X.to("cpu"),
    "array to the device": lambda: torch.from_numpy(np.ones(2)).to(CPU),
}


@pytest.mark.parametrize("way", ["with", "around", "set", "set before"])
@pytest.mark.parametrize("name", ON_THE_DEFAULT_DEVICE)
def test_the_default_device_is_the_gpus(name, way):
    """Four ways to name it; the call is the reader's line in each."""
    call = ON_THE_DEFAULT_DEVICE[name]

    def within():
        with CPU:
            call()

    def named():
        torch.set_default_device(CPU)
        call()

    try:
        if way == "set before":
            torch.set_default_device(CPU)
        with CPU if way == "around" else contextlib.nullcontext():
            (row,) = hidden_syncs(
                {"with": within, "set": named}.get(way, call)
            )
    finally:
        torch.set_default_device(None)
    assert row["count"] == 1
    assert row["place"].startswith("test_hidden_syncs.py:")
    assert row["code"] == inspect.getsource(call).strip()


def test_what_lies_on_the_host_stays_there_on_a_default_device():
    """An array's tensor does, and what the library makes by that name."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with CPU:
            torch.from_numpy(np.ones(2)).sum().item()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    assert hidden_syncs(step) == []


SEVERAL = {
    "tensor of two": (2, lambda: torch.tensor([X[0], X[1]])),
    "tensor of three, moved": (
        4,
        lambda: torch.tensor([X[0], X[1], X[2]], device=CPU),
    ),
    "histc without a range": (2, lambda: X.histc(10)),
    "histc of no range": (2, lambda: X.histc(10, min=3, max=3)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_each_wait_of_a_call_is_counted(name):
    times, step = SEVERAL[name]
    (row,) = hidden_syncs(step)
    assert row["count"] == times


@pytest.mark.parametrize("masks", [1, 2, 5])
@pytest.mark.parametrize("way", ["backward", "autograd.backward", "grad"])
def test_each_mask_waits_again_in_backward(masks, way):
    """Wrong version: a backward is one wait, whatever happens in it."""
    x = torch.ones(3, requires_grad=True)
    keep = torch.tensor([True, True, True])

    def step():
        y = x
        for _ in range(masks):
            y = y[keep] * 2
        y = y.sum()
        if way == "grad":
            torch.autograd.grad(y, [x])
        elif way == "backward":
            y.backward()
        else:
            torch.autograd.backward(y)

    rows = hidden_syncs(step)
    assert [row["count"] for row in rows] == [masks, masks]


def test_each_check_of_an_anomaly_is_counted():
    x = torch.ones(3, requires_grad=True)

    def step(layers):
        y = x
        for _ in range(layers):
            y = y.sin()
        with torch.autograd.set_detect_anomaly(True):
            y.sum().backward()

    def waits(layers):
        found = hidden_syncs(lambda: step(layers))
        return sum(row["count"] for row in found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        assert waits(5) - waits(2) == 3


@pytest.mark.parametrize("name", WAITING)
def test_a_waiting_call_is_found_once(name, capsys):
    step = WAITING[name]
    (row,) = hidden_syncs(step)
    assert row["count"] == 1, row
    assert row["place"].startswith("test_hidden_syncs.py:")
    assert row["code"] and row["call"].startswith(".")


def test_file_and_line_are_the_readers(tmp_path, monkeypatch):
    lines = """
        import torch
        from torch import nn

        class Gate(nn.Module):
            def forward(self, x):
                if x.sum() > 0:
                    x = x * 2
                return x

        model = nn.Sequential(nn.Linear(4, 4), Gate())
        x = torch.ones(2, 4)

        def step():
            for _ in range(3):
                loss = model(x).sum()
                loss.backward()
            print(loss.item(),
                  loss.tolist())
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(lines).lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine

    found = {
        (row["place"], row["call"], row["count"], row["code"])
        for row in hidden_syncs(mine.step)
    }
    assert found == {
        ("mine.py:6", ".__bool__()", 3, "if x.sum() > 0:"),
        ("mine.py:17", ".item()", 1, "print(loss.item(),"),
        ("mine.py:18", ".tolist()", 1, "loss.tolist())"),
    }


def test_waits_in_backward_are_found():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.sum() > 0
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    (row,) = hidden_syncs(lambda: Doubled.apply(x).sum().backward())
    assert row["code"] == "assert gradient.sum() > 0"
    # the backward of a mask writes through the mask
    calls = [
        r["call"] for r in hidden_syncs(lambda: x[x > 0].sum().backward())
    ]
    assert calls == [".__getitem__()", ".backward()"]


class Nested(torch.autograd.Function):
    """Another backward inside of this one, ``depth`` deep."""

    @staticmethod
    def forward(ctx, x, depth, last):
        ctx.depth, ctx.last = depth, last
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            if ctx.depth:
                x = torch.ones(1, requires_grad=True)
                x = Nested.apply(x, ctx.depth - 1, ctx.last)
                x.sum().backward()
            else:
                ctx.last[0].backward()  # of operators alone
        return gradient, None, None


@pytest.mark.parametrize("depth", [1, 57, 58, 59, 60, 61, 62])
def test_a_backward_in_another_thread_has_the_readers_line(depth):
    """As a GPU's is: from a depth of 60 on the engine takes a new thread."""
    x = torch.ones(3, requires_grad=True)
    last = x[x > 0].sum()
    first = Nested.apply(torch.ones(1, requires_grad=True), depth, [last])
    (row,) = hidden_syncs(first.sum().backward)
    assert row["code"] == "ctx.last[0].backward()  # of operators alone"


def test_torchs_own_numbers_of_the_host_are_no_waits():
    """Samplers draw, packed sequences count on the host, on any machine."""
    data = torch.utils.data.TensorDataset(torch.randn(4, 3))
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
    layer = nn.LSTM(3, 4)

    def step():
        for (x,) in loader:
            packed = nn.utils.rnn.pack_padded_sequence(
                x.view(2, 1, 3).to(CPU, non_blocking=True), [2]
            )
            layer(packed)[0].data.sum().backward()

    assert hidden_syncs(step) == []

    class Reading(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            keep = torch.rand(1) < 0.5 or X[i] > 0
            return int(ONES[i]), keep

    def stack(pairs):
        return torch.tensor([label for label, _ in pairs])

    for how in ({}, {"collate_fn": stack}):
        loader = torch.utils.data.DataLoader(Reading(), **how)
        assert hidden_syncs(lambda loader=loader: list(loader)) == []
    batches = torch.utils.data.DataLoader(Reading(), collate_fn=stack)
    (row,) = hidden_syncs(lambda: [b.to(CPU) for b in batches])
    assert row["call"] == ".to()" and row["count"] == 2


def test_a_batch_cut_from_an_array_waits_for_its_copies_only():
    """As nanoGPT's get_batch: the host draws, slices and stacks."""
    data = np.arange(100, dtype=np.uint16)

    def step():
        ix = torch.randint(len(data) - 8, (4,))
        x, y = (
            torch.stack(
                [
                    torch.from_numpy(data[i + o : i + o + 8].astype(np.int64))
                    for i in ix
                ]
            )
            for o in (0, 1)
        )
        x, y = x.to(X.device), y.to(X.device)
        return (x * y).sum().item()

    calls = {row["call"]: row["count"] for row in hidden_syncs(step)}
    assert calls == {".to()": 2, ".item()": 1}


READS = {
    "item": lambda g: g.sum().item(),
    "tolist": lambda g: g.tolist(),
    "cpu": lambda g: g.cpu(),
    "numpy": lambda g: g.detach().numpy(),
    "print": lambda g: print(g),
    "format": lambda g: f"{g.norm():.2f}",
    "to": lambda g: g.to("cpu"),
    "list": lambda g: torch.tensor([1.0], device=CPU),
    "new_tensor": lambda g: g.new_tensor([1.0]),
}


@pytest.mark.parametrize("read", READS)
def test_what_hooks_call_in_backward_is_found(read, capsys):
    read = READS[read]

    def hooked():
        x = PARAMETER * 2
        x.register_hook(lambda g: [read(g), None][1])
        return x.sum()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            read(gradient)
            return gradient * 2

    layer = nn.Linear(3, 3)
    layer.register_full_backward_hook(lambda m, i, o: [read(o[0]), None][1])
    x = torch.ones(3, requires_grad=True)
    for loss, run in [
        (hooked, torch.Tensor.backward),
        (hooked, torch.autograd.backward),
        (lambda: Twice.apply(x).sum(), torch.Tensor.backward),
        (lambda: layer(x).sum(), lambda y: torch.autograd.grad(y, [x])),
    ]:
        (row,) = hidden_syncs(lambda loss=loss, run=run: run(loss()))
        assert row["count"] == 1 and "lambda g" in row["code"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("read", READS)
def test_a_recomputed_block_waits_twice(read, reentrant, capsys):
    def block(x):
        READS[read](x.detach())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    (row,) = hidden_syncs(
        lambda: checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    )
    assert row["count"] == 2


def documented():
    """Yield torch.linalg's functions whose documentation says they wait."""
    for name in dir(torch.linalg):
        said = str(getattr(torch.linalg, name).__doc__)
        if re.search("synchronizes that\\s+device with the CPU", said):
            if not name.endswith("_ex"):
                yield name


@pytest.mark.parametrize("name", documented())
def test_what_torch_says_of_linalg_is_found(name):
    function = getattr(torch.linalg, name)
    more = [SQUARE] if name == "solve" else []  # the other side
    rows = hidden_syncs(lambda: function(SQUARE, *more))
    assert sum(row["count"] for row in rows) == 1
    x = SQUARE.clone().requires_grad_()
    assert hidden_syncs(lambda: function(x, *more))
    assert [] == hidden_syncs(  # the host's
        lambda: function(2 * torch.eye(4), *[torch.eye(4) for _ in more])
    )


def test_a_barrier_holds_up_the_host():
    """NCCL's does, as its documentation says; gloo's stands for it here."""
    if not torch.distributed.is_available():
        pytest.skip("this build has no torch.distributed")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1
    )
    try:
        (row,) = hidden_syncs(lambda: torch.distributed.barrier())
        assert row["call"] == ".barrier()" and row["count"] == 1
        assert hidden_syncs(lambda: torch.distributed.all_reduce(X + 0)) == []
    finally:
        torch.distributed.destroy_process_group()


def test_torch_documents_at_least_these():
    assert {"eig", "eigvals", "svdvals", "inv", "pinv"} <= {*documented()}
    for norm in ("nuc", 2):
        assert hidden_syncs(lambda n=norm: torch.linalg.norm(SQUARE, n))


def test_every_operator_whose_size_data_decide_is_in_the_table():
    known = {n.lstrip(".") for names in script.WAITS for n in names.split()}
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and overload != "out":
            op = getattr(
                getattr(torch.ops.aten, packet), overload or "default"
            )
            if torch.Tag.dynamic_output_shape in op.tags:
                tagged.add(packet)
    assert tagged - known <= {"unique_dim_consecutive"}


PACKAGE = """
    import torch
    x = torch.ones(3)

    def step():
        return x.sum().item()

    def show(loss):
        return str(loss)
"""


def test_a_place_is_the_readers_wherever_packages_lie(tmp_path, monkeypatch):
    """Below the standard library or not, a package is another's work."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "installed_trainer.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(site))
    import installed_trainer

    for library in (linecache.__file__, str(tmp_path / "linecache.py")):
        monkeypatch.setattr(linecache, "__file__", library)
        (row,) = hidden_syncs(installed_trainer.step)
        assert row["place"].startswith("installed_trainer.py:")
        assert row["code"] == "return x.sum().item()"
        (row,) = hidden_syncs(lambda: installed_trainer.show(X.sum()))
        assert row["place"].startswith("test_hidden_syncs.py:")
    (row,) = hidden_syncs(X.tolist)
    assert row["code"] == "(row,) = hidden_syncs(X.tolist)"


def test_recomputation_waits_again():
    x = torch.ones(3, requires_grad=True)

    def block(x):
        return (x * x.max().item()).sin()

    def step():
        checkpoint(block, x, use_reentrant=False).sum().backward()

    (row,) = hidden_syncs(step)
    assert row["count"] == 2


def test_a_compiled_function_is_seen_through():
    x = torch.ones(3)
    chosen = torch.compile(lambda x: x * 2 if x.sum() > 0 else x)
    (row,) = hidden_syncs(lambda: chosen(x))
    assert row["call"] == ".__bool__()"


def masked_constants():
    x = torch.zeros(4, 4, device=X.device)
    x[x == 0] = 1.0
    x[:, 0][x[:, 0] == 1] = 2
    x[1] = 5.0
    x[2, :2] = 0
    x.masked_fill_(x > 0, 0.0)
    x = x.masked_fill(x > 1, float("-inf"))
    return x.masked_fill(x > 1, torch.tensor(0.0))


QUIET = {
    "masked constants": masked_constants,
    "random choice": lambda: 1 if torch.rand(1) < 0.5 else 0,
    "random index": lambda: X[int(torch.randint(6, ()))],
    "statistics of the host": lambda: torch.rand(9).mean().item(),
    "host mask": lambda: torch.rand(9)[torch.rand(9) > 0.5].tolist(),
    "printed by the host": lambda: f"{torch.arange(3)}",
    "list to the dtype": lambda: torch.tensor([1, 2]).float().tolist(),
    "host inverse": lambda: torch.linalg.inv(torch.eye(2)),
    "number in one place": lambda: X.clone().__setitem__(0, 5.0),
    "deep copy": lambda: copy.deepcopy(nn.Linear(2, 2)),
    "memory": lambda: X.untyped_storage().nbytes(),
    "tensor of the host": lambda: torch.tensor([1.0, 2.0]),
    "zeros": lambda: torch.zeros(3, device=CPU),
    "full": lambda: torch.full((3,), 2.0, device=CPU),
    "arange": lambda: torch.arange(6, device=X.device),
    "numbers": lambda: (X * 2 + 1) / 3 - X**2,
    "sum": lambda: X.sum() + X.mean() + X.std() + X.norm(),
    "sizes": lambda: (len(X), X.shape, X.numel(), X.dtype, X.device),
    "unbound": lambda: [row * 2 for row in X],
    "where of three": lambda: torch.where(MASK, X, 0.0),
    "index": lambda: X[ONES] + X[2] + X[1:3].sum() + X[None].sum(),
    "assign by index": lambda: assign(ONES, 1.0),
    "assign a slice": lambda: assign(slice(1, 3), X[:2]),
    "gather": lambda: X.gather(0, ONES) + X.index_select(0, ONES),
    "scatter": lambda: X.scatter(0, ONES, 1.0).index_add(0, ONES, X),
    "sort": lambda: (X.sort(), X.argmax(), X.topk(2), X.cumsum(0)),
    "clamp by tensor": lambda: X.clamp(max=TWO),
    "repeat, size known": lambda: X.repeat_interleave(ONES, output_size=6),
    "one_hot, width known": lambda: F.one_hot(ONES, 3),
    "one_hot by keyword": lambda: F.one_hot(ONES, num_classes=3),
    "multinomial": lambda: torch.multinomial(X, 2),
    "random": lambda: torch.randn(3) + torch.normal(0.0, 1.0, (3,)),
    "dropout": lambda: F.dropout(X, 0.5),
    "dtype": lambda: X.to(torch.float64).half().float(),
    "like another": lambda: X.to(ONES),
    "lazy copy": lambda: X.to(CPU, non_blocking=True),
    "lazy copy, placed": lambda: X.to(CPU, torch.float64, True),
    "copy_": lambda: torch.empty_like(X).copy_(X),
    "clone": lambda: X.clone().detach().contiguous().view(2, 3).T,
    "as_tensor of one": lambda: torch.as_tensor(X),
    "embedding": lambda: nn.Embedding(3, 4, padding_idx=0)(ONES),
    "cross_entropy": lambda: F.cross_entropy(
        torch.zeros(6, 3), ONES, ignore_index=-100
    ),
    "attention": lambda: F.scaled_dot_product_attention(
        *torch.randn(3, 1, 2, 4, 8), is_causal=True
    ),
    "norms": lambda: nn.BatchNorm1d(3)(nn.LayerNorm(3)(torch.randn(4, 3))),
    "convolution": lambda: nn.Conv2d(1, 2, 3)(torch.randn(1, 1, 5, 5)),
    "lstm": lambda: nn.LSTM(3, 4)(torch.randn(5, 1, 3)),
    "multi-head": lambda: nn.MultiheadAttention(4, 2)(
        *torch.randn(3, 2, 1, 4)
    ),
    "vmap": lambda: torch.func.vmap(lambda x: x.sin())(X),
    "einsum": lambda: torch.einsum("i,i->", X, X),
    "sparse": lambda: torch.sparse_coo_tensor(
        [[0, 1]], [1.0, 2.0], [3], check_invariants=False
    ),
    "new of a size": lambda: X.new(2, 3).new(torch.Size([2])).new(X[:2]),
    "histc of a range": lambda: (X.histc(10, 0, 5), X.histc(max=5)),
    "histc from below": lambda: X.histc(10, min=-1),
    "index by number": lambda: X[ONES.new_zeros(2)],
    "stack": lambda: torch.stack([X[0], X[1]]).cumsum(0),
    "clip values": lambda: nn.utils.clip_grad_value_([PARAMETER], 1.0),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_call_that_waits_for_nothing_is_not_named(name):
    PARAMETER.grad = torch.ones_like(PARAMETER)
    assert hidden_syncs(QUIET[name]) == []


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("run", ["plain", "checkpoint", "autocast"])
def test_a_clean_training_step_is_quiet(kind, run):
    def recompute(block, x):
        return checkpoint(block, x, use_reentrant=False)

    def fused(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    config = gpt.preset("gpt2-tiny").but(vocab_size=61, dropout=0.1)
    model = gpt.GPT(
        config,
        attention=gpt.plain_attention if run == "plain" else fused,
        run_block=recompute if run == "checkpoint" else gpt.call_block,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    ids = torch.randint(61, (2, 16))
    targets = ids.clone()
    targets[:, 3] = gpt.IGNORED
    total = torch.zeros(())

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=run == "autocast"):
            loss = model(ids, targets, 1 / (targets != -100).sum())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total.add_(loss.detach())

    assert hidden_syncs(step) == []  # makes the optimizer's state
    assert hidden_syncs(step) == []


def step_of(name, **how):
    def step():
        weight.grad = torch.ones(3, 3)
        optimizer.step()

    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **how)
    return step


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "name", "SGD Adam AdamW NAdam RAdam Adagrad Adamax RMSprop".split()
)
def test_counting_steps_is_not_waiting(name, foreach):
    """Optimizers keep their step count on the host, and read it there."""
    step = step_of(name, foreach=foreach)
    assert hidden_syncs(step) == []
    assert hidden_syncs(step) == []


@pytest.mark.parametrize(("foreach", "waits"), [(False, 3), (True, 2)])
def test_an_averaging_optimizer_counts_on_the_gpu(foreach, waits):
    """ASGD's step lies by its parameter: read, and a copy or a rate more."""
    step = step_of("ASGD", foreach=foreach)
    step()
    assert sum(row["count"] for row in hidden_syncs(step)) == waits


def test_an_optimizer_that_does_wait_is_named():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert hidden_syncs(lambda: optimizer.step(closure))


def test_modes_are_gone_after_an_exception():
    def step():
        X.sum().item()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hidden_syncs(step)
    assert not torch.overrides._get_current_function_mode_stack()
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not modes
    assert X.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_step_computes_the_same():
    """The finder watches: results, gradients and sharing stay."""
    x = torch.ones(3, requires_grad=True)
    kept = {}

    def step():
        kept["host"] = x.cpu()
        kept["loss"] = (x.cpu() * 3).sum()
        kept["loss"].backward()

    hidden_syncs(step)
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert torch.equal(kept["host"], x) and kept["loss"].item() == 9


def test_a_line_is_found_from_another_thread():
    """As of CUDA's backward, which the step's own thread awaits."""
    found = []
    code = compile("def call():\n    add(find())", torch.__file__, "exec")
    here = threading.get_ident()
    find = functools.partial(script.running_line, here)
    torchs = {"add": found.append, "find": find}
    exec(code, torchs)

    def step():
        thread = threading.Thread(target=torchs["call"])
        thread.start()
        thread.join()

    hidden_syncs(step)
    assert found[0][1] in ("thread.start()", "thread.join()")


def test_pasted_it_is_the_same(tmp_path):
    """Its tables and what finds the line, which stand above, go with it."""
    source = inspect.getsource(script)
    first = re.search("^# .*\n(?:# .*\n)*WAITS = ", source, re.M).start()
    last = source.index("\n\n\ndef mask_by_index")
    module = types.ModuleType("pasted")
    module.torch = torch
    exec(compile(source[first:last], "pasted", "exec"), module.__dict__)

    def step():
        return [X[0].item() for _ in range(2)] and print(X)

    assert [(r["call"], r["count"]) for r in module.hidden_syncs(step)] == [
        (".item()", 2),
        (".__repr__()", 1),
    ]
    for function, lines in ((hidden_syncs, 80), (script.running_line, 25)):
        assert inspect.getsource(function).rstrip().count("\n") < lines


@pytest.mark.parametrize("part", [cure[1] for cure in script.CURES])
def test_each_part_and_its_cure(part, pasted):
    """Same answer; the part waits as often as said, the cure never."""
    waiting, times, cure = {c[1]: c[2:] for c in script.CURES}[part]
    waiting, cure = pasted(waiting), pasted(cure)
    values = [1.0, 2.0, 3.0]
    inputs = {
        "mask": (X, MASK, -X),
        "weights": (values, X),
        "mean": (torch.arange(6.0, requires_grad=True), MASK),
        "log": (X.sum(),),
        "clip": ([torch.full((6,), 3.0), X.clone()], 1.0),
    }[part]

    def run(function, arguments):
        answer = function(*arguments)
        if part == "mean":
            answer.backward()
            return answer, inputs[0].grad.clone()
        return arguments[0] if part == "clip" else answer

    counts = []
    answers = []
    for function in (waiting, cure):
        arguments = inputs
        if part == "clip":
            arguments = ([g.clone() for g in inputs[0]], 1.0)
        if function is cure and part == "weights":
            arguments = (torch.tensor(values), X)
        if part == "mean":
            inputs[0].grad = None
        answers.append(run(function, arguments))
        if part == "clip":
            arguments = ([g.clone() for g in inputs[0]], 1.0)
        step = lambda f=function, a=arguments: run(f, a)  # noqa: E731
        counts.append(sum(row["count"] for row in hidden_syncs(step)))
    torch.testing.assert_close(*map(as_tensors, answers))
    assert counts == [times, 0]


def as_tensors(answer):
    if isinstance(answer, (list, tuple)):
        return [torch.as_tensor(a) for a in answer]
    return torch.as_tensor(answer)


def test_rows_count_down_to_none(capsys):
    rows = script.main(["--smoke"])
    waits = [row["waits"] for row in rows]
    assert waits == [7, 5, 4, 2, 1, 0]
    assert waits == [n for _, n in script.rows_of_parts().values()]
    assert rows[0]["compared"] == 2  # losses
    out = capsys.readouterr().out
    assert "x[mask] = noise[mask]" in out and "left out" in out


def test_a_step_with_another_answer_is_refused(monkeypatch):
    """A cure that forgets the count: the losses tell."""

    def wrong(losses, counted):
        return torch.where(counted, losses, 0.0).mean()

    cures = [list(cure) for cure in script.CURES]
    cures[2][4] = wrong
    monkeypatch.setattr(script, "CURES", cures)
    with pytest.raises(bench.Mismatch, match="losses"):
        script.main(["--smoke"])


def test_a_dispatch_mode_alone_would_miss_half():
    """Wrong version: operators only. On a CPU these dispatch nothing."""
    names = []

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names.append(str(op))
            return op(*args, **(kwargs or {}))

    with Operators():
        X.tolist(), X.cpu(), repr(X)
    assert not names
    with Operators():  # and these two look alike
        torch.tensor([1.0], device=CPU)
        assign(MASK, 0.0)
    assert names.count("aten.lift_fresh.default") == 2


@pytest.fixture
def cudas_check(monkeypatch):
    """Stand in for CUDA's sync-debug mode: it warns when it is on."""
    modes = [0]

    def wait():
        if modes[-1] == "warn":
            warnings.warn(
                "called a synchronizing CUDA operation", stacklevel=2
            )

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return wait, modes


def test_cudas_own_check_is_asked_and_put_back(cudas_check, pasted):
    wait, modes = cudas_check

    def step():
        warnings.warn("of something else", stacklevel=1)
        for _ in range(3):
            wait()

    places = pasted(script.warned_syncs)(step)
    assert len(places) == 3 and len({*places}) == 1
    assert places[0].startswith("test_hidden_syncs.py:")
    assert modes == [0, "warn", 0]
    with pytest.raises(ZeroDivisionError):
        script.warned_syncs(lambda: 1 / 0)
    assert modes[-1] == 0
    cuda = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    assert script.warned(cuda, wait) == script.warned_syncs(wait) != []
    assert script.warned(types.SimpleNamespace(device=CPU), wait) is None


def test_what_cuda_warns_of_stands_beside_what_is_found(monkeypatch, capsys):
    def warned(args, step):
        assert step() is not None
        return ["mine.py:7", "mine.py:7"]

    monkeypatch.setattr(script, "warned", warned)
    script.main(["--smoke"])
    out = capsys.readouterr().out
    assert "CUDA warns" in out
    assert re.search(r"as written +7 +7 +2\n", out)
    monkeypatch.setitem(sys.modules, "own_training", sys.modules[__name__])
    script.main(["--step", "own_training:own_step"])
    out = capsys.readouterr().out
    assert "found: 1; CUDA itself warns of 2" in out
    assert "warns at mine.py:7\n" in out


def own_step():
    return X.tolist()


def test_a_step_of_the_readers_own(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_training", sys.modules[__name__])
    (row,) = script.main(["--smoke", "--step", "own_training:own_step"])
    assert row["code"] == "return X.tolist()"
    assert "return X.tolist()" in capsys.readouterr().out
    assert script.main(["--step", "own_training:masked_constants"]) == []
    assert "nothing in it waits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "module:function"),
        (":step", "module:function"),
        ("no_such_module_here:step", "no module"),
        ("math:no_such", "no function"),
        ("math:pi", "no function"),
        ("textwrap:dedent", "without arguments"),
        ("", "module:function"),
        ("./mine:step", "module:function"),
        ("fractions:Fraction", "runs no step"),
        ("asyncio:sleep", "runs no step"),
    ],
)
def test_a_bad_name_is_refused_in_words(name, sentence):
    with pytest.raises(bench.Refusal, match=sentence):
        script.main(["--step", name])


def test_a_readers_step_is_not_recorded():
    with pytest.raises(bench.Refusal):
        script.main(["--save", "--step", "math:pi"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "step",
    [
        lambda x, m: x[0].item(),
        lambda x, m: x.tolist(),
        lambda x, m: x.cpu(),
        lambda x, m: x.to("cpu"),
        lambda x, m: x.nonzero(),
        lambda x, m: x[m],
        lambda x, m: x.__setitem__(m, x[0]),
        lambda x, m: torch.unique(x),
        lambda x, m: torch.tensor([1.0], device=x.device),
        lambda x, m: torch.ones(3).to(x.device),
        lambda x, m: x[[0, 1]],
        lambda x, m: x.masked_fill(m, x[0]),
        lambda x, m: torch.equal(x, x),
        lambda x, m: torch.bincount(x.long()),
        lambda x, m: repr(x),
    ],
)
def test_cuda_itself_says_so(step):
    """What the finder names makes CUDA's own check warn, and is real."""
    x = torch.arange(6.0, device="cuda")
    m = x > 2
    (row,) = hidden_syncs(lambda: step(x, m))
    assert row["count"] == 1
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz"):
            step(x, m)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_is_quiet_where_the_finder_is(recwarn):
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    counts = torch.ones(6, dtype=torch.long, device="cuda")
    weight = nn.Parameter(torch.ones(6, device="cuda"))
    optimizer = torch.optim.AdamW([weight], foreach=False)

    def step():
        y = x.detach().clone()
        y[y > 2] = 0.0
        y.masked_fill_(y > 1, 1.0)
        y[1] = 5.0
        F.one_hot(counts, 3)
        y.repeat_interleave(counts, output_size=6)
        torch.multinomial(y + 1, 2)
        torch.ones(3).item() if False else torch.ones(3)[0].item()  # host
        (weight * y).sum().backward()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    assert hidden_syncs(step) == []
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_waits_fall_to_none_on_a_gpu():
    args = bench.cli(script.__doc__, ["--smoke", "--device", "cuda"])
    for parts, expected in script.rows_of_parts().values():
        step = script.stepper(args, parts)
        found = hidden_syncs(step)
        assert sum(row["count"] for row in found) == expected
        assert len(script.warned_syncs(step)) == expected
