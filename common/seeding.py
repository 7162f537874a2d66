"""Start every random stream of a run from one number, and save where it is.

Python, NumPy, torch and each GPU draw from generators of their own, and so
does every worker process of a loader.  A run repeats only if all of them do;
it resumes exactly only if all of them are saved.
"""

import os
import random
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch.utils.data import get_worker_info


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, the GPUs' included.

    ``PYTHONHASHSEED`` takes effect when Python starts: setting it here
    reaches the processes started from now on, not the order of this one's
    sets of strings.

    Args:
        seed: any integer; NumPy gets it modulo 2³².
        deterministic: also have torch choose algorithms that add in a fixed
            order, and raise where it has none.  They can be slower; cuBLAS
            obeys only if this comes before its first use.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every GPU's too, once CUDA starts
    os.environ.setdefault("PYTHONHASHSEED", str(seed % 2**32))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False  # its choice follows timings


def worker_generator() -> np.random.Generator:
    """Return a new NumPy generator, seeded from torch's.

    A loader seeds torch differently in every worker and every epoch, so the
    streams differ there and repeat with the run's seed.  The seed is drawn,
    not ``torch.initial_seed()``: that one stays the same over the epochs of
    persistent workers, and of the main process without workers.
    """
    drawn = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    return np.random.Generator(np.random.PCG64(drawn.tolist()))


def worker_init(worker_id: int) -> None:
    """Give each worker streams of its own (``worker_init_fn=worker_init``).

    torch seeds its own, Python's and NumPy's global generators in a worker.
    A NumPy ``Generator`` that the dataset holds is copied with it, though,
    in the same state to every worker: all would draw the same augmentation.
    Here every generator found in the dataset is set anew, in place.

    Args:
        worker_id: given by the loader; the seed already differs by it.
    """
    info = get_worker_info()
    for held in _generators(info.dataset if info else None, set()):
        fresh = worker_generator().integers(2**63, size=2).tolist()
        kind = type(held.bit_generator)
        held.bit_generator.state = kind(fresh).state


def _generators(
    held: object, seen: set[int], depth: int = 6
) -> Iterator[np.random.Generator]:
    """Find the generators in an object, its attributes and its containers."""
    if depth == 0 or id(held) in seen:
        return
    if isinstance(held, type | ModuleType):
        return  # a library's own, not the dataset's
    seen.add(id(held))
    if isinstance(held, np.random.Generator):
        yield held
    elif isinstance(held, dict):
        held = list(held.values())
    elif not isinstance(held, list | tuple) and hasattr(held, "__dict__"):
        held = list(vars(held).values())
    if isinstance(held, list | tuple):
        # a long list is data: generators would stand among its first items
        for item in held[:100]:
            yield from _generators(item, seen, depth - 1)


def rng_state() -> dict:
    """Return the state of all streams of this process, to be saved.

    Tensors, numbers and None only, so ``torch.load(weights_only=True)``
    reads them back.  Of several GPUs only the current one counts: a rank
    draws on its own, and asking the others would start CUDA on them.
    """
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"]["key"].astype(np.int64)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    mps = torch.backends.mps.is_available()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            torch.from_numpy(key),
            numpy["state"]["pos"],
            numpy["has_gauss"],
            float(numpy["gauss"]),
        ],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "mps": torch.mps.get_rng_state() if mps else None,
    }


def restore_rng(state: dict) -> None:
    """Set all streams of this process to what ``rng_state`` returned.

    A GPU's state is left out where there is no such GPU now.

    Raises:
        Refusal: when ``state`` is something else.
    """
    from common.bench import Refusal

    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        key, position, has_gauss, gauss = state["numpy"]
        key = key.cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, position, has_gauss, gauss))
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
        if state["mps"] is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"].cpu())
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise Refusal(
            "the saved random state is not one that rng_state() made: start "
            "without resuming, or from another checkpoint"
        ) from None
