"""What chapter 10's trainer can be told, as one flat record and as flags.

The defaults are the log's baseline, an honest first version; the log ends
with the flags for your machine.
"""

import argparse
import dataclasses
import math
import os
import shlex
import shutil
import sysconfig
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common import gpt, machine
from common.bench import Refusal


def flag(default, help, *choices, least=None, most=2**31 - 1):
    """Describe a field that is also a command-line flag."""
    limits = None if least is None else (least, most)
    return dataclasses.field(
        default=default,
        metadata={"help": help, "choices": choices, "limits": limits},
    )


@dataclass(frozen=True)
class Config:
    """What to train and how; each field is a flag, ``--micro-batch 4``."""

    preset: str = flag("gpt2-small-cpu", "size of the model", *gpt.PRESETS)
    data: str = flag("embedded", "text: embedded, a path, hub:NAME, .tokens")
    device: str = flag("cpu", "cpu, cuda or mps")
    T: int | None = flag(None, "context; the preset's block size")
    sequences: int = flag(
        8, "sequences per update, all ranks together", least=1
    )
    micro_batch: int = flag(1, "sequences per forward, on each rank", least=1)
    attention: str = flag(
        "plain", "(T, T) scores in memory, or tile by tile", "plain", "fused"
    )
    loss: str = flag(
        "plain", "its gradient beside or over the logits", "plain", "in-place"
    )
    recompute: str = flag("none", "activations in backward", "none", "blocks")
    optimizer: str = flag(
        "for-loop", "how AdamW walks", "for-loop", "foreach", "fused"
    )
    tokens: str = flag(
        "on-the-fly", "when text is tokenised", "on-the-fly", "once"
    )
    workers: int = flag(0, "loader processes on each rank", least=0, most=1024)
    transfer: str = flag(
        "blocking", "of batches to the device", "blocking", "prefetch"
    )
    allocator: str = flag("default", "freed host memory", "default", "keep")
    compile: bool = flag(False, "torch.compile the model")
    precision: str = flag(
        "float32", "autocast of GEMMs", "float32", "bfloat16", "float16"
    )
    parallel: str = flag(
        "none", "replicate or shard over ranks", "none", "ddp", "fsdp"
    )
    threads: int | None = flag(
        None, "CPU threads of each rank; torch's default", least=1, most=1024
    )
    steps: int = flag(100, "optimizer updates", least=1)
    lr: float = flag(6e-4, "highest learning rate", least=0, most=1e3)
    warmup: int = flag(10, "updates until it is reached", least=0)
    min_lr: float | None = flag(None, "lowest at the end; a tenth of lr")
    weight_decay: float = flag(0.1, "of matrices and embeddings", least=0)
    clip: float = flag(
        1.0, "largest gradient norm; 0 does not clip", least=0, most=math.inf
    )
    dropout: float = flag(0.0, "share of activations dropped")
    seed: int = flag(
        0, "of weights, data order and dropout", least=0, most=2**32 - 1
    )
    evaluate_every: int = flag(
        0, "updates between evaluations; 0: never", least=0
    )
    evaluate_batches: int = flag(
        4, "of `sequences` windows each, held out", least=1
    )
    save_every: int = flag(
        0, "updates between checkpoints; 0: at the end", least=0
    )
    out: str | None = flag(None, "folder for checkpoint, metrics and curves")
    resume: bool = flag(False, "go on from the checkpoint in --out")
    vocab_size: int | None = flag(None, "the preset's; 50304 is padded")
    tied: bool | None = flag(None, "head uses the embedding; the preset's")

    def model(self) -> gpt.GPTConfig:
        """Return the model's shape."""
        try:
            shape = gpt.preset(self.preset)
        except ValueError as error:
            raise Refusal(f"--preset: {error}") from None
        own = {"vocab_size": self.vocab_size, "tied": self.tied}
        own = {name: value for name, value in own.items() if value is not None}
        return shape.but(dropout=self.dropout, **own)

    def context(self) -> int:
        """Return T."""
        return self.model().block_size if self.T is None else self.T

    def largest_micro_batch(self) -> int:
        """Return the most sequences that fit the device by a rough formula.

        Float32 bytes per token, plain: about 32 C and 4 H T kept per block,
        4 V for the logits and their gradient; 0.4 of the memory is used, for
        another process may hold the same configuration (the ladder's does).
        """
        shape, T = self.model(), self.context()
        kept = shape.n_layer * (32 * shape.n_embd + 4 * shape.n_head * T)
        sequence = 4 * T * (kept + 4 * shape.vocab_size)
        if torch.device(self.device).type == "cuda":
            room = torch.cuda.get_device_properties(0).total_memory
        else:
            room = machine.memory_bytes() or 8 << 30
        room = 0.4 * room - 16 * gpt.parameter_counts(shape)["total"]
        return divisor(self.sequences, max(1, int(room // sequence)))


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` up to ``most``."""
    return max(d for d in range(1, number + 1) if not number % d and d <= most)


def as_dict(config: Config) -> dict:
    """Return the configuration as plain data, for a record."""
    return dataclasses.asdict(config)


def fit_to_ranks(config: Config, world: int, threads: int | None) -> Config:
    """Keep the update, give each rank its share and ``threads`` threads."""
    share = max(1, config.sequences // world)
    micro_batch = divisor(share, config.micro_batch)
    return replace(config, micro_batch=micro_batch, threads=threads)


def check(config: Config, world: int) -> None:
    """Refuse in words what cannot be trained; ``world`` is the ranks."""
    for field in dataclasses.fields(config):
        value, allowed = getattr(config, field.name), field.metadata["choices"]
        if allowed and value not in allowed:
            raise Refusal(
                f"--{field.name} {value}: unknown; known: {', '.join(allowed)}"
            )
        if value is not None and (limits := field.metadata["limits"]):
            least, most = limits
            if not least <= value <= most:  # which a NaN is not either
                most = "or more" if most == math.inf else f"to {most:.10g}"
                raise Refusal(
                    f"{spelt(field.name)} {value}: give {least} {most}"
                )
    shape, each = config.model(), config.micro_batch * world
    if config.min_lr is not None and not 0 <= config.min_lr <= config.lr:
        raise Refusal(
            f"--min-lr {config.min_lr}: give 0 to --lr, which is {config.lr}"
        )
    if config.lr * config.weight_decay > 1:
        raise Refusal(
            f"--weight-decay {config.weight_decay}: times --lr {config.lr} an "
            "update takes more than a whole weight away; give less"
        )
    if not 1 <= config.context() <= shape.block_size:
        raise Refusal(
            f"--T {config.T}: {config.preset} sees 1 to {shape.block_size} "
            "tokens"
        )
    if not 0 <= config.dropout < 1:
        raise Refusal(f"--dropout {config.dropout}: give 0 to below 1")
    if config.sequences % each:
        raise Refusal(
            f"--sequences {config.sequences} is no multiple of --micro-batch "
            f"{config.micro_batch} on {world} rank(s): change one of them"
        )
    if config.parallel == "none" and world > 1:
        raise Refusal(f"{world} ranks: add --parallel ddp or --parallel fsdp")
    if config.parallel != "none" and not dist.is_initialized():
        raise Refusal(
            f"--parallel {config.parallel} needs ranks: torchrun "
            f"--nproc-per-node=2 -m ch10_gpt2.train --parallel "
            f"{config.parallel} ..."
        )
    if not config.out and (config.resume or config.save_every):
        raise Refusal("--resume and --save-every need a folder: --out FOLDER")


def cannot_compile(device: torch.device) -> str | None:
    """Say what torch.compile lacks here, or nothing."""
    if device.type == "cuda":
        return cannot_launch()
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return "torch.compile needs a C++ compiler; none is found (see CXX)"
    return None


def cannot_launch() -> str | None:
    """Say what Triton lacks to compile a kernel and its launcher, or nothing.

    The launcher is C against Python's headers, built when a kernel first runs.
    """
    from torch.utils._triton import has_triton

    missing = [] if has_triton() else ["Triton"]
    if os.name != "nt":  # where Triton brings a compiler and the headers
        # Triton takes these and no other
        named = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if not any(map(shutil.which, named)):
            missing.append(f"a C compiler ({', '.join(named)}; see CC)")
        scheme = sysconfig.get_default_scheme().replace("local", "prefix")
        folder = sysconfig.get_path("include", scheme)
        header = os.path.join(folder, "Python.h")
        if not os.path.exists(header):
            missing.append(f"Python's headers ({header})")
    if missing:
        return f"torch.compile needs {' and '.join(missing)}; not found"
    return None


def flags(doc: str) -> argparse.ArgumentParser:
    """Make a command-line flag of every field, e.g. ``--micro-batch``."""
    parser = argparse.ArgumentParser(
        prog="python -m ch10_gpt2.train",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = typing.get_type_hints(Config)
    for field in dataclasses.fields(Config):
        kind = next(
            t
            for t in typing.get_args(kinds[field.name]) or [kinds[field.name]]
            if t is not type(None)
        )
        how = {"type": kind}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif field.metadata["choices"]:
            how["metavar"] = "|".join(field.metadata["choices"])
        parser.add_argument(
            spelt(field.name),
            default=argparse.SUPPRESS,  # so that what was given is known
            help=f"{field.metadata['help']} ({field.default})",
            **how,
        )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny and short where not told"
    )
    return parser


def parse(doc: str, argv: Sequence[str] | None) -> Config:
    """Read a configuration from the command line."""
    given = vars(flags(doc).parse_args(argv))
    smoke = os.environ.get("BENCH_SMOKE", "0") not in ("", "0")
    if given.pop("smoke") or smoke:
        given |= smoke_sizes(given)
    return Config(**given)


def smoke_sizes(given: dict) -> dict:
    """Return what a smoke run makes small of all that was not given.

    A context that was meant for a larger model is cut to the tiny one's.
    """
    each = given.get("micro_batch", Config.micro_batch)
    each *= int(os.environ.get("WORLD_SIZE", 1))
    sizes = {"preset": "gpt2-tiny", "steps": 3, "sequences": max(2, each)}
    sizes = {name: n for name, n in sizes.items() if name not in given}
    if "preset" in sizes:
        longest = gpt.preset(sizes["preset"]).block_size
        if (given.get("T") or 0) > longest:
            sizes["T"] = longest
    words = " ".join(f"{spelt(name)} {n}" for name, n in sizes.items())
    if int(os.environ.get("RANK", 0)) == 0:
        said = (
            f"as if with {words}" if words else "of the sizes that were given"
        )
        print(f"smoke run {said}: its figures mean nothing", flush=True)
    return sizes


def spelt(name: str) -> str:
    """Return a field's flag."""
    return "--" + name.replace("_", "-")


def command_line(config: Config | dict, world: int = 1) -> str:
    """Return the command that trains this configuration."""
    config = config if isinstance(config, Config) else Config(**config)
    words = ["python", "-m", "ch10_gpt2.train"]
    if config.parallel != "none":
        words = ["torchrun", "--standalone", f"--nproc-per-node={world}"]
        words += ["-m", "ch10_gpt2.train"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            no = "" if value else "no-"
            words.append(spelt(field.name).replace("--", "--" + no))
        else:
            words += [spelt(field.name), str(value)]
    return shlex.join(words)
