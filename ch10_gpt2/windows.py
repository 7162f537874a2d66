"""Windows of T tokens of a text, in an order made of nothing but numbers.

Update u of a training takes the same windows whatever the micro-batch, the
number of ranks or of loader workers, so that losses can be compared, and a
training resumes from one number.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ch10_gpt2.config import Config
from common import ranks, seeding, text
from common.bench import Refusal


class TokenisedOnTheFly(Dataset):
    """Tokenise the documents that touch a window whenever it is read."""

    def __init__(self, documents: list[str], starts, count: int, T: int):
        self.documents, self.starts, self.T = documents, starts, T
        self.windows = (count - 1) // T

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        begin, end = i * self.T, (i + 1) * self.T + 1
        first = int(np.searchsorted(self.starts, begin, "right")) - 1
        last = int(np.searchsorted(self.starts, end, "left"))
        ids = np.concatenate(
            [text.document_ids(d) for d in self.documents[first:last]]
        )
        begin -= int(self.starts[first])
        ids = ids[begin : begin + self.T + 1]
        window = torch.from_numpy(ids.astype(np.int64))
        return window[:-1], window[1:]  # ids and targets, (T,) each


class TokenisedOnce(Dataset):
    """Slice a file of 2-byte ids, which the system maps into memory."""

    def __init__(self, file: text.TokenFile, T: int):
        self.file, self.T = file, T  # pickles as its path, for workers
        self.windows = (len(file) - 1) // T

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        ids = self.file.tokens[i * self.T : (i + 1) * self.T + 1]
        window = torch.from_numpy(ids.astype(np.int64))
        return window[:-1], window[1:]  # ids and targets, (T,) each


def open_data(config: Config, rank: ranks.Rank) -> Dataset:
    """Tokenise the text, once on each host, and open it as windows."""
    if rank.world > 1 and rank.local_rank:
        dist.barrier()  # the first rank of the host writes the file
    file = text.open_tokens(text.tokenize(config.data))
    if rank.world > 1 and not rank.local_rank:
        dist.barrier()
    if file.vocab_size > config.model().vocab_size:
        raise Refusal(
            f"{config.data} has ids up to {file.vocab_size - 1}, the model "
            f"{config.model().vocab_size}: --vocab-size {file.vocab_size}"
        )
    if config.tokens == "once":
        return TokenisedOnce(file, config.context())
    starts = np.array(file.document_starts)
    documents = list(
        itertools.islice(text.documents(config.data), len(starts))
    )
    # a token file cut in mid-word gives back a word of other tokens
    end = file.tokens[starts[-1] :]
    if not np.array_equal(text.document_ids(documents[-1])[: len(end)], end):
        raise Refusal(
            f"{config.data} ends in the middle of a text, whose ids do not "
            "come back from its characters: use --tokens once"
        )
    return TokenisedOnTheFly(documents, starts, len(file), config.context())


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    """Return an epoch's order of the windows, from nothing but numbers."""
    return np.random.default_rng([seed, epoch]).permutation(windows)


class Order(Sampler):
    """Each rank's windows, update after update, from update ``first`` on.

    Epochs follow each other without a gap. Nothing here depends on workers
    or micro-batches, and ranks only cut each update into shares: to resume,
    the number of the update is enough.
    """

    def __init__(self, config: Config, windows: int, rank, first: int):
        self.config, self.windows = config, windows
        self.rank, self.first = rank, first

    def __iter__(self) -> Iterator[list[int]]:
        count = self.config.sequences
        share = count // self.rank.world
        for update in itertools.count(self.first):
            begin = update * count + self.rank.rank * share
            yield [self.window(begin + i) for i in range(share)]

    def window(self, entry: int) -> int:
        """Return the window at a place in the endless order."""
        epoch, place = divmod(entry, self.windows)
        order = permutation(self.config.seed, epoch, self.windows)
        return int(order[place])


def make_loader(config: Config, windows: Dataset, order: Order) -> DataLoader:
    """Load whole updates; ``workers`` processes prepare later ones."""
    pin = config.transfer == "prefetch" and config.device.startswith("cuda")
    return DataLoader(
        windows,
        batch_sampler=order,
        num_workers=config.workers,
        worker_init_fn=seeding.worker_init if config.workers else None,
        persistent_workers=config.workers > 0,
        prefetch_factor=2 if config.workers else None,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(config.seed),
    )


def blocking(batches: Iterable, device: torch.device) -> Iterator:
    """Copy each batch when it is asked for, and wait for it."""
    for batch in batches:
        yield [tensor.to(device) for tensor in batch]
