"""4.1.2  Reproducibility · 提升PyTorch 程式的可重複性

Question  What makes two runs of one program differ, and what does each source
          take to be the same again?
Expect    every source differs until it is controlled; a NumPy Generator kept
          in the dataset repeats in each of 2 workers, so half of what they
          draw is drawn twice; with all controlled, two runs in processes of
          their own end with the same bits
Run       python -m ch04_profiling.reproducibility [--smoke] [--save]
"""

import functools
import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common import bench, seeding


def order_of_strings(words, hash_seed=None):
    """Python salts the hash of strings when it starts: sets change order.

    Returned is the order of a set in a new process, whose salt is drawn, or
    made from ``hash_seed`` (text).
    """
    import os
    import subprocess
    import sys

    environment = dict(os.environ)
    environment.pop("PYTHONHASHSEED", None)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    code = "import sys; print(*set(sys.argv[1:]), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def added_in_order(values, order):
    """A floating-point sum is rounded at each step: its order shows in it.

    Atomic additions on a GPU come in the order in which threads get there.
    """
    total = torch.zeros(1, dtype=values.dtype, device=values.device)
    for i in order.tolist():
        total += values[i]
    return total


def same_bits(first, second):
    """Equal bits are more than equal values: -0 is 0, and NaN is not NaN."""
    runs = []
    for result in (first, second):
        leaves = torch.utils._pytree.tree_leaves(result)
        tensors = [torch.as_tensor(leaf).cpu().contiguous() for leaf in leaves]
        flat = [t.flatten().view(torch.uint8).numpy() for t in tensors]
        kinds = [(t.dtype, t.shape) for t in tensors]
        runs.append((kinds, [bytes(array) for array in flat]))
    return runs[0] == runs[1]


def two_runs(draw, control, same):
    """Randomness that is not set anew goes on from where the last run ended.

    Returned is whether a run equals the next one, (as it is, controlled).
    """
    free = same(draw(), draw())
    runs = []
    for _ in range(2):
        control()
        runs.append(draw())
    return free, same(*runs)


def drawn_twice(batches):
    """A loader's workers take turns: count values that came up before."""
    values = torch.cat(list(batches)).flatten().tolist()
    return len(values) - len(set(values))


TECHNIQUES = (
    order_of_strings,
    added_in_order,
    same_bits,
    two_runs,
    drawn_twice,
)

WORDS = [f"word{n}" for n in range(20)]


class HoldsGenerator(Dataset):
    """Samples from a generator that each worker gets a copy of."""

    def __init__(self, seed=0, count=16):
        self.draw, self.count = np.random.default_rng(seed), count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor(self.draw.random(), dtype=torch.float64)


class Noisy(Dataset):
    """Draws from all at once: a set's order, and every generator."""

    def __init__(self, seed=None):
        self.words = list(set(WORDS))
        self.draw = np.random.default_rng(seed)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        x = torch.full((8, 8), float(self.words[i][4:]))
        x[0, 0], x[0, 1] = random.random(), np.random.rand()
        return x + torch.rand(8, 8) + float(self.draw.random())


def loaded(dataset, **how):
    """Return the batches of an epoch in two workers."""
    return list(DataLoader(dataset, batch_size=4, num_workers=2, **how))


def summed(threads, values):
    """Sum rows on so many threads, each of which adds up a part."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [row.sum() for row in values]
    finally:
        torch.set_num_threads(before)


def sources(device):
    """Return {source: (draw, control, its words)}."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 2**16, generator=draw)
    few, fixed, turns = rows[0, :2000], {}, [1, 2]

    def fix(**values):
        return lambda: fixed.update(values)

    def strings():
        found = order_of_strings(WORDS, fixed.get("hash_seed"))
        return [WORDS.index(word) for word in found]

    def uniform():
        return torch.rand(3, device=device)

    def epoch():
        return loaded(Noisy(0), shuffle=True)

    def sums():
        return summed(fixed.get("threads") or turns.pop(), rows)

    def added():
        drawn = torch.randperm(len(few))
        return added_in_order(few, fixed.get("order", drawn))

    def seed():
        torch.manual_seed(0)

    def numpy():
        np.random.seed(0)

    one, order = fix(threads=1), fix(order=torch.arange(len(few)))
    found = {
        "Python's hash": (strings, fix(hash_seed="0"), "PYTHONHASHSEED=0"),
        "random": (random.random, lambda: random.seed(0), "random.seed(0)"),
        "NumPy": (np.random.rand, numpy, "np.random.seed(0)"),
        "torch": (uniform, seed, "torch.manual_seed(0)"),
        "loader's workers": (epoch, seed, "torch.manual_seed(0)"),
        "threads of a sum": (sums, one, "torch.set_num_threads(1)"),
        # drawn here; with atomics it is the GPU's luck
        "order of additions": (added, order, "a fixed order"),
    }
    return found | (gpu_sources(device) if device.type == "cuda" else {})


def gpu_sources(device):
    """Return the sources that only a GPU has; controls last till the end."""
    x = torch.randn(32, 16, 64, 64, device=device)
    weight = torch.randn(32, 16, 3, 3, device=device, requires_grad=True)
    index = torch.randint(10, (10**6,), device=device)
    values = torch.randn(10**6, device=device)

    def convolved():
        y = torch.nn.functional.conv2d(x, weight)
        return torch.autograd.grad(y.square().sum(), weight)

    def cudnn():
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True

    def added():
        return values.new_zeros(10).index_add_(0, index, values)

    def deterministic():
        torch.use_deterministic_algorithms(True)

    asked = "use_deterministic_algorithms(True)"
    return {
        "cuDNN's choice": (convolved, cudnn, "cudnn.deterministic = True"),
        "atomic additions": (added, deterministic, asked),
    }


def source_rows(device):
    """Return a row per source; every generator and switch is put back."""
    before, cudnn = seeding.rng_state(), torch.backends.cudnn
    switches = cudnn.benchmark, cudnn.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark = True
    rows = []
    try:
        for name, (draw, control, words) in sources(device).items():
            free, controlled = two_runs(draw, control, same_bits)
            row = {"name": name, "free": free, "control": words}
            rows.append(row | {"controlled": controlled})
    finally:
        seeding.restore_rng(before)
        cudnn.benchmark, cudnn.deterministic = switches
        torch.use_deterministic_algorithms(deterministic)
    return rows


def held_rows(smoke=False):
    """Return rows: a Generator in the dataset, as it is and set anew."""
    rows, before = [], seeding.rng_state()
    try:
        for name, init in (
            ("copied to each worker", None),
            ("set anew by seeding.worker_init", seeding.worker_init),
        ):
            epochs = []
            for number in range(2 if smoke else 3):
                if number != 1:  # a run has two epochs
                    dataset = HoldsGenerator()
                    torch.manual_seed(0)
                epochs.append(loaded(dataset, worker_init_fn=init))
            first, second, *again = epochs
            row = {"name": name, "samples": len(dataset)}
            row["drawn_twice"] = drawn_twice(first)
            row["epochs_differ"] = not same_bits(first, second)
            row["runs_alike"] = same_bits(first, again[0]) if again else None
            rows.append(row)
    finally:
        seeding.restore_rng(before)
    return rows


def one_run(device, controlled):
    """Train a small model; return what its steps leave, hashed."""
    if controlled:
        seeding.seed_everything(0, deterministic=True)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8)),
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(144, 1),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    init = seeding.worker_init if controlled else None
    dataset, losses = Noisy(0 if controlled else None), []
    batches = loaded(dataset, shuffle=True, worker_init_fn=init)
    for batch in batches:
        optimizer.zero_grad()
        losses.append(model(batch.to(device)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return {
        "batches": digest(batches),
        "losses": digest(losses),
        "parameters": digest(list(model.parameters())),
    }


def digest(tensors):
    """Return a hash of tensors' bytes."""
    arrays = [t.detach().cpu().contiguous().numpy() for t in tensors]
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def whole_runs(device, controlled):
    """Return what two runs in processes of their own leave."""
    environment = dict(os.environ, PYTHONHASHSEED="0")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(bench.ROOT), os.environ.get("PYTHONPATH")])
    )
    if not controlled:
        del environment["PYTHONHASHSEED"]
    command = [sys.executable, "-m", "ch04_profiling.reproducibility"]
    command += ["--device", str(device), "--one-run"]
    command += ["controlled" if controlled else "free"]
    run = functools.partial(subprocess.Popen, env=environment, text=True)
    processes = [run(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        texts = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a run of its own failed: {' '.join(command)}")
    return [json.loads(text) for text in texts]


def add(parser):
    parser.add_argument(
        "--one-run",
        choices=["free", "controlled"],
        help="train once, print hashes of what it leaves, and nothing else",
    )


def main(argv=None):
    args = bench.cli(__doc__, argv, add)
    device = args.device
    if args.one_run:
        print(json.dumps(one_run(device, args.one_run == "controlled")))
        return []
    rows = bench.report(
        args,
        source_rows(device),
        {
            "name": "source",
            "free": "two runs alike",
            "control": "control",
            "controlled": "alike with it",
        },
        title="Each source alone",
    )
    rows += bench.report(
        args,
        held_rows(args.smoke),
        {
            "name": "Generator in the dataset",
            "samples": "samples",
            "drawn_twice": "drawn twice",
            "epochs_differ": "epochs differ",
            "runs_alike": "runs alike",
        },
        title="A NumPy Generator that the dataset keeps, 2 workers",
    )
    ended = []
    for controlled in (True,) if args.smoke else (False, True):
        first, second = whole_runs(device, controlled)
        row = {"name": f"{'all' if controlled else 'nothing'} controlled"}
        for part in first:
            row[part] = first[part] == second[part]
        ended.append(row)
    columns = {"name": "two processes that train", "batches": "same batches"}
    columns |= {"losses": "same losses", "parameters": "same parameters"}
    title = "Two whole runs, to the last bit"
    rows += bench.report(args, ended, columns, title=title)
    if device.type != "cuda":
        bench.left_out(
            args,
            "cuDNN's choice of algorithms and atomic additions: a GPU's",
        )
    if not all(ended[-1].values()):
        raise bench.Mismatch("controlled runs differ; see the table above")
    return rows


if __name__ == "__main__":
    bench.run(main)
