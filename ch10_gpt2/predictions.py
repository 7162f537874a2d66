"""Predict 10.3's memory for the book's own case, without a GPU.

The ladder measures the model that fits the machine. What its memory steps
are worth on the book's model, GPT-2-large with 65 characters, block 128,
batch 32 and an untied head, is predicted here with tensors that have no
memory (``ch07_memory.training_memory``): deterministic, so kept as a record.

The book's recorded run rests at 10,953.5 MiB. Parameters, gradients and
AdamW's state are 10,814.2 MiB of them; the other 139 MiB are what no tensor
of the model shows: the libraries' workspaces, masks kept as buffers, blocks
rounded up.

Computes anew and says whether the record still holds; ``--show`` only
prints the record.

Run       python -m ch10_gpt2.predictions [--show] [--smoke] [--save]
"""

import argparse
import json
import os
from pathlib import Path

import torch

from ch06_single_gpu_perf.fused_operators import fused_attention
from ch07_memory import training_memory
from ch07_memory.training_memory import (
    largest_batch,
    predict,
    recompute_block,
)
from common import bench, gpt

RECORD = Path(__file__).parent / "results" / "predictions.json"
SOURCES = (training_memory.__file__, __file__, gpt.__file__)

SEQUENCES = 32  # per update, all ranks together
MICRO_BATCH = 4  # from 10.3.2 on: 8 micro-batches of 4
RANKS = (2, 4, 8)
ATTENTIONS = (gpt.plain_attention, fused_attention)
BOOK_REST_MIB = 10953.5  # the book's recorded run, between two updates
CAPACITIES = (24 * 10**9, 80 * 10**9)  # cards hold a little more than 10⁹s

MARGIN = (
    "1 GiB for what no tensor shows (CUDA context, cuBLAS and NCCL "
    "buffers), and a tenth of the card for fragmentation, rounding and "
    "kernels that differ from the CPU's"
)

# cumulative; each adds one argument of predict
CHANGES = [
    ("10.3.1", "memory_baseline", {"optimizer": "foreach"}),
    ("10.3.2", "accumulate_gradients", {"accumulate": 8}),
    ("10.3.3", "recompute_blocks", {"run_block": recompute_block}),
    ("10.3.4", "loop_optimizer", {"optimizer": "for-loop"}),
]
SHARDED = ("10.3.5", "fully_sharded")


def margin(capacity_bytes: int) -> int:
    """Return the bytes of a card that a prediction leaves free."""
    return 2**30 + capacity_bytes // 10


def ladder(ranks=RANKS):
    """Yield (section, step, world, predict's arguments), cumulative."""
    how = {}
    for section, step, change in CHANGES:
        how = how | change
        yield section, step, 1, how
    for world in ranks:
        yield *SHARDED, world, how | {"world": world, "fsdp": True}


def case(name: str, config, sequences: int, micro_batch: int, ranks) -> list:
    """Predict every memory step for one model and one batch per update."""
    rows = []
    for section, step, world, how in ladder(ranks):
        batch = micro_batch if how.get("accumulate") else sequences
        if how.get("accumulate"):
            count = max(1, sequences // (batch * world))
            how = how | {"accumulate": count}
        found = predict(config, micro_batch=batch, **how)
        rows.append(
            {
                "case": name,
                "section": section,
                "step": step,
                "ranks": world,
                "micro_batch": batch,
                "accumulate": how.get("accumulate", 1),
                "bytes": found["bytes"],
                "peak_bytes": found["peak_bytes"],
                "moment": found["moment"],
                "rest_bytes": found["rest_bytes"],
            }
        )
    return rows


def batches(name, config, T, capacities, ranks, attentions, steps) -> list:
    """Find the largest micro-batch per step, attention and capacity."""
    rows = []
    for attention in attentions:
        for section, step, world, how in list(ladder(ranks))[:steps]:
            known = {}
            for capacity in capacities:
                found = largest_batch(
                    config,
                    T,
                    capacity,
                    margin,
                    known=known,
                    attention=attention,
                    **how,
                )
                rows.append(
                    {
                        "case": name,
                        "section": section,
                        "step": step,
                        "ranks": world,
                        "T": T,
                        "attention": attention.__name__.split("_")[0],
                        "capacity_bytes": capacity,
                        **found,
                    }
                )
    return rows


def source_hash() -> str:
    """Hash what the figures follow from: model, tracker, this file."""
    return "-".join(bench.script_hash(path)[:12] for path in SOURCES)


def torch_version() -> str:
    """Return torch's version without the build's name."""
    return torch.__version__.split("+")[0]


def compute(smoke: bool = False) -> dict:
    """Predict everything anew: some minutes; ``smoke`` takes tiny models.

    Returns:
        ``cases`` (peak by category per step), ``largest_batch``,
        ``margin`` in words, ``book`` (rest predicted and recorded, MiB),
        ``torch`` and ``source``. The same call gives the same bytes.
    """
    if smoke:
        config = gpt.preset("gpt2-tiny").but(vocab_size=65, tied=False)
        cases = case("gpt2-tiny", config, 8, 1, RANKS[:1])
        found = batches(
            "gpt2-tiny", config, 64, (2 * 10**9,), (), ATTENTIONS[:1], 1
        )
    else:
        config = gpt.preset("book-large")
        cases = case("book-large", config, SEQUENCES, MICRO_BATCH, RANKS)
        config = gpt.preset("gpt2")
        found = batches(
            "gpt2", config, 1024, CAPACITIES, RANKS[-1:], ATTENTIONS, None
        )
    predicted = cases[0]["rest_bytes"] / 2**20
    return {
        "cases": cases,
        "largest_batch": found,
        "margin": MARGIN,
        "book": None
        if smoke
        else {
            "rest_mib_predicted": round(predicted, 1),
            "rest_mib_recorded": BOOK_REST_MIB,
            "unseen_mib": round(BOOK_REST_MIB - predicted, 1),
        },
        "torch": torch_version(),
        "source": source_hash(),
    }


def load(path: Path = RECORD) -> dict:
    """Read the record.

    Raises:
        bench.Refusal: it is missing or not JSON of this kind.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = {"cases", "largest_batch", "margin"} - set(record)
    except OSError as error:
        raise bench.Refusal(
            f"{path} cannot be read ({error.strerror}); make it with "
            "`python -m ch10_gpt2.predictions --save`"
        ) from error
    except (ValueError, TypeError):
        missing = {"everything"}
    if missing:
        raise bench.Refusal(
            f"{path} is not a record of predictions; make it anew with "
            "`python -m ch10_gpt2.predictions --save`"
        )
    return record


def is_current(record: dict) -> bool:
    """Say whether today's sources and torch made the record."""
    made_by = record.get("source"), record.get("torch")
    return made_by == (source_hash(), torch_version())


def text(record: dict) -> str:
    """Write a record as the file's text: the same bytes every time."""
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def save(record: dict | None = None, path: Path = RECORD) -> Path:
    """Compute unless given, and write the record whole or not at all."""
    return bench.write_atomic(path, text(record or compute()))


def _step(row: dict) -> dict:
    ranks = f" ×{row['ranks']}" if row["ranks"] > 1 else ""
    return {"§": row["section"], "step": row["step"] + ranks}


def case_rows(record: dict) -> list[dict]:
    """Return the steps' peaks and their categories, in MiB as written."""
    return [
        _step(row)
        | {"micro": f"{row['accumulate']} × {row['micro_batch']}"}
        | {"peak": f"{row['peak_bytes'] / 2**20:,.0f}"}
        | {k: f"{size / 2**20:,.0f}" for k, size in row["bytes"].items()}
        for row in record["cases"]
    ]


def batch_rows(record: dict) -> list[dict]:
    """Return the largest micro-batches, a column per attention and card."""
    rows: dict[tuple, dict] = {}
    for found in record["largest_batch"]:
        step = _step(found)
        size = f"{found['capacity_bytes'] / 1e9:.0f} GB"
        row = rows.setdefault(tuple(step.values()), step)
        row[f"{found['attention']}, {size}"] = found["batch"]
    return list(rows.values())


def show(record: dict) -> None:
    """Print both tables."""
    columns = {k: k for k in ("§", "step", "micro", "peak")} | {
        "parameters": "weights",
        "gradients": "grads",
        "optimizer": "state",
        "activations": "kept",
        "temporary": "temp",
        "gathered": "gathered",
    }
    title = f"{record['cases'][0]['case']}, predicted, MiB per rank"
    print(bench.table(case_rows(record), columns, title=title))
    if record.get("book"):
        book = record["book"]
        print(
            f"at rest {book['rest_mib_predicted']:,} MiB predicted, "
            f"{book['rest_mib_recorded']:,} in the book's record\n"
        )
    first = record["largest_batch"][0]
    title = f"{first['case']}, T = {first['T']}: largest micro-batch per rank"
    print(bench.table(batch_rows(record), title=title))
    print(f"left free: {record['margin']}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument(
        "--save", action="store_true", help="compute anew, keep the record"
    )
    parser.add_argument("--show", action="store_true", help="the record")
    args = parser.parse_args(argv)
    if args.smoke or os.environ.get("BENCH_SMOKE", "0") not in ("", "0"):
        if args.save:
            raise bench.Refusal("--save: a smoke run is no record")
        record = compute(smoke=True)
    elif args.save:
        record = compute()
        print(f"recorded in {save(record)}\n")
    elif args.show:
        record = load()
    else:
        record = compute()
        same = RECORD.exists() and text(load()) == text(record)
        show(record)
        if not same:
            raise SystemExit(f"this differs from {RECORD}; --save renews it")
        print(f"equal to {RECORD}")
        return record["cases"]
    show(record)
    return record["cases"]


if __name__ == "__main__":
    bench.run(main)
