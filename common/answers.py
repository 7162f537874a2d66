"""Prove that two variants of a computation give the same answer."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

TOLERANCE = (1e-4, 1e-5)  # relative, absolute: float32 sums in another order


class Mismatch(AssertionError):
    """Two variants whose answers differ: names row, leaf and worst error."""


def parts(tree: object, path: str = "result") -> Iterator[tuple]:
    """Yield (path, leaf) of nested dicts, lists and tuples, copied to the CPU.

    Copied, because the next call may write into the same storage.
    """
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from parts(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, branch in enumerate(tree):
            yield from parts(branch, f"{path}[{i}]")
    elif isinstance(tree, torch.Tensor):
        yield path, tree.detach().cpu().clone()
    elif isinstance(tree, (np.ndarray, float)):
        yield path, torch.from_numpy(np.array(tree))
    elif tree is not None:
        yield path, tree


def _error(expected: object, found: object, tolerance: tuple | None) -> tuple:
    """Return (worst error, how much is allowed there) of two leaves."""
    if not isinstance(expected, torch.Tensor):
        return (0.0 if expected == found else math.inf), 0.0
    if not isinstance(found, torch.Tensor) or expected.shape != found.shape:
        return math.inf, 0.0
    if tolerance is None and expected.dtype != found.dtype:
        return math.inf, 0.0
    if expected.is_complex():
        expected = torch.view_as_real(expected)
        found = torch.view_as_real(found.to(torch.complex128))
    relative = absolute = 0.0  # also for integers
    if tolerance is not None and expected.is_floating_point():
        relative, absolute = tolerance
    if not expected.numel():
        return 0.0, absolute
    x, y = expected.double(), found.double()
    same = (x == y) | (x.isnan() & y.isnan())
    error = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
    allowed = absolute + relative * x.abs().nan_to_num()
    worst = (error - allowed).argmax()
    return error.flatten()[worst].item(), allowed.flatten()[worst].item()


def agree(
    name: str,
    found: Mapping,
    baseline: str,
    expected: Mapping,
    tolerance: tuple | None = TOLERANCE,
    gradients: tuple | None | str = "alike",
) -> float:
    """Check the leaves of one variant's answer against the baseline's.

    Args:
        name: the variant.
        found: its answer, as ``dict(parts(result))``.
        baseline: the name of the row it is compared with.
        expected: that row's answer.
        tolerance: (relative, absolute); None asks for the same bits.
        gradients: the same for what lies below a key "gradients".

    Returns:
        The largest absolute error.

    Raises:
        Mismatch: naming row, leaf, error and what was allowed.
    """
    if list(found) != list(expected):
        odd = sorted(set(found) ^ set(expected)) or list(found)
        raise Mismatch(
            f"row {name!r} returns other parts than {baseline!r}: {odd[0]}"
        )
    largest = 0.0
    for path, leaf in expected.items():
        limits = tolerance
        if gradients != "alike" and "['gradients']" in path:
            limits = gradients
        error, allowed = _error(leaf, found[path], limits)
        if error > allowed:
            raise Mismatch(
                f"row {name!r} disagrees with {baseline!r} at {path}: "
                f"worst error {error:.3g}, allowed {allowed:.3g}"
            )
        largest = max(largest, error)
    return largest
