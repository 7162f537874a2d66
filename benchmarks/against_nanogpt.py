"""Does the log's last configuration train as fast as nanoGPT's model?

Question  How many tokens per second do chapter 10's trainer and nanoGPT's
          own model code train, eager and compiled, at the same shape, batch
          and threads, and how much of the GEMM ceiling is that?
Expect    at least the better of nanoGPT's two, at least 75% of the ceiling:
          an update is three GEMMs per weight; what is left beside them is
          bound by memory, and the loss is the largest part of that
Run       python -m benchmarks.against_nanogpt --nanogpt FOLDER [--log FILE]
          [--save]

FOLDER is a checkout of https://github.com/karpathy/nanoGPT; its ``model.py``
is executed. All rows make whole updates in turn in one process: forward,
backward, clipping, AdamW, fused on both sides. What the trainer sets for the
process holds for nanoGPT too. nanoGPT's batches lie in memory beforehand;
the trainer reads its own from the token file. The ceiling is the best
float32 GEMM of the sizes below, measured between the updates.

The first table's configuration was chosen for this comparison: the trainer
can do it, the log did not end with it. What the log's own last one reaches
stands in the table that ``--log`` adds.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ch10_gpt2 import train
from common import bench, gpt, judging, timers

GEMM_SIZES = (1024, 2048, 4096)
SHARE = 0.75  # of the ceiling
ALIKE = 5e-3  # nanoGPT's GELU is exact, GPT-2's and ours the tanh form
SOURCES = (  # whose change makes a record old, as the script's own does
    "ch06_single_gpu_perf/fused_operators.py",
    "ch06_single_gpu_perf/optimizer_kernels.py",
    "ch06_single_gpu_perf/overlap_copies.py",
    "ch06_single_gpu_perf/tensor_creation.py",
    "ch07_memory/training_memory.py",
    "ch09_advanced/custom_op/__init__.py",
    "ch09_advanced/custom_op/cross_entropy.cpp",
    "ch10_gpt2/config.py",
    "ch10_gpt2/train.py",
    "ch10_gpt2/windows.py",
    "common/gpt.py",
    "common/judging.py",
    "common/ranks.py",
    "common/seeding.py",
    "common/text.py",
    "common/timers.py",
)
LOGS = "as the log ends, in float32"
HELD = 4  # batches that nanoGPT's rows go round


def flags(parser):
    parser.add_argument(
        "--nanogpt", metavar="FOLDER", required=True, help="a checkout"
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="a log.json or a record of the log: train its last "
        "configuration (in float32), too",
    )
    parser.add_argument("--preset", choices=gpt.PRESETS)
    parser.add_argument("--sequences", type=int, help="per update")
    parser.add_argument("--micro-batch", type=int, help="per forward")
    parser.add_argument("--vocab-size", type=int, help="50304 is padded")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=20, help="at least 8")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out compiled rows"
    )


def nanogpt_code(folder):
    """Import ``model.py`` of a nanoGPT checkout under a name of its own."""
    path = Path(folder) / "model.py"
    if not path.is_file():
        raise bench.Refusal(
            f"--nanogpt {folder}: there is no model.py; give a checkout of "
            "https://github.com/karpathy/nanoGPT"
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
        module.GPT, module.GPTConfig  # noqa: B018
    except Exception as error:
        raise bench.Refusal(
            f"{path} is not nanoGPT's model.py: {type(error).__name__}: "
            f"{error}"
        ) from error
    return module


def last_of(path):
    """Return the configuration that a log or its record ends with."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found = found.get("ch10_gpt2.ladder", found)
        return train.Config(**found["final"]["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise bench.Refusal(
            f"--log {path}: no finished log.json and no record of one "
            f"({type(error).__name__}: {error})"
        ) from None


def configurations(args):
    """Return {title: the trainer's configuration}: ours, and the log's."""
    found = {
        "fused attention, tokens made once": train.Config(
            sequences=8,
            micro_batch=8,
            attention="fused",
            loss="in-place",
            optimizer="fused",
            tokens="once",
            allocator="keep",  # of the process: nanoGPT's rows have it too
        )
    }
    if args.log:
        found[LOGS] = last_of(args.log)
    own = {
        "preset": args.preset or ("gpt2-tiny" if args.smoke else None),
        "sequences": args.sequences,
        "micro_batch": args.micro_batch,
        "vocab_size": args.vocab_size,
        "threads": args.threads,
        "precision": "float32",
    }
    if args.sequences and not args.micro_batch:
        own["micro_batch"] = args.sequences
    own = {name: value for name, value in own.items() if value is not None}
    for title, chosen in found.items():
        found[title] = dataclasses.replace(
            chosen, device=str(args.device), steps=10**9, out=None, **own
        )
        if found[title].parallel != "none":
            raise bench.Refusal(
                f"--log {args.log}: its configuration has ranks; the "
                "comparison is of one process"
            )
    return found


def like_ours(nanogpt, ours):
    """Build nanoGPT's model in our model's shape, with our weights."""
    shape = ours.config
    with contextlib.redirect_stdout(io.StringIO()):
        model = nanogpt.GPT(
            nanogpt.GPTConfig(
                block_size=shape.block_size,
                vocab_size=shape.vocab_size,
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_embd=shape.n_embd,
                dropout=shape.dropout,
                bias=True,
            )
        )
    weights = {
        name if name.startswith("lm_head") else f"transformer.{name}": tensor
        for name, tensor in ours.state_dict().items()
    }
    weights = {
        name.replace(".blocks.", ".h."): tensor
        for name, tensor in weights.items()
    }
    model.load_state_dict(weights, strict=True)
    return model.to(ours.wte.weight.device)


def nanogpt_update(nanogpt, run, batches, compiled):
    """Return nanoGPT's update: its model, its recipe, fused AdamW."""
    config, model = run.config, like_ours(nanogpt, run.model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    forward = torch.compile(model) if compiled else model
    count = config.sequences // config.micro_batch
    endless = itertools.cycle(batches)

    def update():
        ids, targets = next(endless)
        total = 0.0
        for x, y in zip(ids.chunk(count), targets.chunk(count), strict=True):
            _, loss = forward(x, y)
            (loss / count).backward()
            total += loss.item() / count
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return update


def trainer_update(config):
    """Return the trainer's own update."""
    run = train.start(config)
    return run, lambda: train.update(run)["loss"]


def gemm(n, device):
    """Return one product of two float32 (n, n) matrices."""
    a, b = (torch.randn(n, n, device=device) for _ in "ab")
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def check_alike(losses):
    """Compare the first update's losses: same weights, same tokens."""
    (name, expected), *others = losses.items()
    for other, loss in others:
        if not abs(loss - expected) <= ALIKE * abs(expected):
            raise bench.Mismatch(
                f"the first loss of {other} is {loss:.4f}, of {name} "
                f"{expected:.4f}: not the same model"
            )


def judged(names, samples, ceilings, flops, causal, tokens):
    """Turn samples into rows; ``ceilings`` are FLOP/s, one per round."""
    rows = judging.judge(names, samples)
    for row, took in zip(rows, samples.T, strict=True):
        # the time at the ceiling over the time taken, round by round
        share, low, high = judging.bootstrap_ratio(flops / ceilings, took)
        row |= {
            "tokens_per_s": tokens / row["median_s"],
            "share": share,
            "share_interval": [low, high],
            "share_causal": share * causal / flops,
            "percent": f"{100 * share:.1f} [{100 * low:.1f}, "
            f"{100 * high:.1f}]",
            "percent_causal": f"{100 * share * causal / flops:.1f}",
        }
    return rows


def verdict(rows, ours, theirs, rounds):
    """Compare the faster of our rows with the faster of nanoGPT's."""
    best = {row["name"]: row["median_s"] for row in rows}
    mine = min(ours, key=best.get)
    other = min(theirs, key=best.get)
    ratio, low, high = judging.bootstrap_ratio(rounds[other], rounds[mine])
    share = next(row["share"] for row in rows if row["name"] == mine)
    return {
        "ours": mine,
        "theirs": other,
        "ratio": ratio,
        "ratio_interval": [low, high],
        "share": share,
        "holds": ratio >= 1 and share >= SHARE,
    }


def answers(entry):
    """Return (what, answer, bar, "" or why it is missed) of a record."""
    lines = []
    for title, found in entry["found"].items():
        what = title if title == LOGS else f"not the log's: {title}"
        low, high = found["ratio_interval"]
        lines += [
            (
                what,
                f"{found['ratio']:.2f}× nanoGPT [{low:.2f}, {high:.2f}]",
                "≥ 1.00×",
                "" if found["ratio"] >= 1 else "missed",
            ),
            (
                what,
                f"{100 * found['share']:.1f}% of the ceiling",
                f"≥ {SHARE:.0%}",
                "" if found["share"] >= SHARE else "missed",
            ),
        ]
    return lines


def compared(args, nanogpt, title, config):
    """Train one configuration and nanoGPT in turn; return rows, verdict."""
    shape, T = config.model(), config.context()
    plain = dataclasses.replace(config, compile=False)
    chosen = {"trainer, eager": plain}
    if not args.no_compile:
        compiled = dataclasses.replace(config, compile=True)
        chosen["trainer, compiled"] = compiled
    functions, losses, ours = {}, {}, list(chosen)
    run, update = trainer_update(plain)
    held = [next(run.batches) for _ in range(HELD)]
    for name, compiled in [("eager", False), ("compiled", True)]:
        if not (compiled and args.no_compile):
            functions[f"nanoGPT, {name}"] = nanogpt_update(
                nanogpt, run, held, compiled
            )
    theirs = list(functions)
    train.finish(run)
    for name, own in chosen.items():
        _, functions[name] = trainer_update(own)
    for name, update in functions.items():
        losses[name] = update()
    check_alike(losses)
    names = list(functions)
    for n in GEMM_SIZES[:1] if args.smoke else GEMM_SIZES:
        functions[f"GEMM {n}"] = gemm(n, args.device)
    rounds = 3 if args.smoke else max(8, args.rounds)
    samples = timers.take_turns(
        list(functions.values()), args.device, rounds=rounds, budget_s=0.0
    )
    by_name = dict(zip(functions, samples.T, strict=True))
    rates = {
        n: 2 * n**3 / by_name[f"GEMM {n}"]
        for n in GEMM_SIZES
        if f"GEMM {n}" in by_name
    }
    size = max(rates, key=lambda n: np.median(rates[n]))
    tokens = config.sequences * T
    flops, causal = (
        tokens * gpt.flops_per_token(shape, T, causal=half)
        for half in (False, True)
    )
    rows = judged(
        names, samples[:, : len(names)], rates[size], flops, causal, tokens
    )
    found = verdict(rows, ours, theirs, by_name)
    columns = {
        "name": "row",
        "median_s": "update",
        "iqr_s": "IQR",
        "tokens_per_s": "tokens/s",
        "ratio": "ratio",
        "percent": "% of ceiling",
        "percent_causal": "causal half",
    }
    print(
        f"\n{config.preset}: {shape.n_layer} layers, C {shape.n_embd}, "
        f"H {shape.n_head}, V {shape.vocab_size}, T {T}; {tokens} tokens per "
        f"update, {config.micro_batch} sequences per forward; "
        f"{torch.get_num_threads()} threads\n"
        f"ceiling: GEMM {size}, {np.median(rates[size]) / 1e9:.4g} GFLOP/s "
        f"(median of {rounds} rounds); {flops / tokens:.5g} FLOPs per token, "
        f"{causal / tokens:.5g} with half of the attention"
    )
    found |= {
        "config": dataclasses.asdict(config),
        "ceiling_flops": {n: float(np.median(r)) for n, r in rates.items()},
        "flops_per_token": [flops / tokens, causal / tokens],
        "first_losses": losses,
    }
    args.found[title] = found
    bench.report(
        args,
        rows,
        columns,
        title=title,
        extra={
            "found": args.found,
            "threads": torch.get_num_threads(),
            "malloc": {k: v for k, v in os.environ.items() if "MALLOC" in k},
            "key": {"sources": bench.digests(SOURCES)},
            "nanogpt_model_sha256": hashlib.sha256(
                (Path(args.nanogpt) / "model.py").read_bytes()
            ).hexdigest(),
        },
    )
    low, high = found["ratio_interval"]
    print(
        f"{found['ours']} against {found['theirs']}: {found['ratio']:.2f}x "
        f"[{low:.2f}, {high:.2f}]; {100 * found['share']:.1f}% of the ceiling"
    )
    return rows


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    args.found = {}
    nanogpt, chosen = nanogpt_code(args.nanogpt), configurations(args)
    rows = []
    for title, config in chosen.items():
        rows += compared(args, nanogpt, title, config)
    missed = [t for t, found in args.found.items() if not found["holds"]]
    if missed and not args.smoke:
        raise bench.Mismatch(
            f"bar missed ({'; '.join(missed)}): at least 1.00x and "
            f"{SHARE:.0%} of the ceiling"
        )
    return rows


if __name__ == "__main__":
    bench.run(main)
