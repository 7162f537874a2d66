"""1.1  The challenge of model scale · 模型規模帶來的挑戰
1.2  The challenge of data scale · 資料規模帶來的挑戰
1.3  How we respond · 模型規模與資料增長的應對方法

Question  What does a GPT of a given size ask of the GPUs one can buy?
Expect    16 bytes per parameter before the first activation; about 6 FLOPs
          per parameter and token: size and data multiply, so the days grow
          with the square of the size when the data grow with the model
Run       python -m chapters.scale [--model gpt2-xl] [--gpus 8] [--days 7]
"""

import math
from pathlib import Path

from common import bench, gpt, machine

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30

# Brown et al. 2020, table 2.1 (13B: the 5140 printed there is 40 heads x 128)
MODELS = {
    name: gpt.PRESETS[name]
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
} | {
    "gpt3-2.7b": gpt.GPTConfig(32, 32, 2560, block_size=2048),
    "gpt3-6.7b": gpt.GPTConfig(32, 32, 4096, block_size=2048),
    "gpt3-13b": gpt.GPTConfig(40, 40, 5120, block_size=2048),
    "gpt3-175b": gpt.GPTConfig(96, 96, 12288, block_size=2048),
}

# the memory that vendors print, which drivers report as about so many GiB
GPUS = {
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 24),
    "V100": ("Tesla V100-SXM2-32GB", 32),
    "A100": ("NVIDIA A100-SXM4-80GB", 80),
    "H100": ("NVIDIA H100 80GB HBM3", 80),
    "H200": ("NVIDIA H200", 140),
    "MI300X": ("AMD Instinct MI300X", 192),
}
MARGIN = 0.1  # of a GPU's memory: context, workspaces, fragmentation
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022: compute-optimal, roughly
COUNTS = (1, 8, 64, 512, 1024)  # GPUs


def state_bytes(parameters):
    """Hold weights, gradients and AdamW's state: 16 bytes per parameter.

    float32: 4 + 4 + 8.  Mixed precision with a float32 master copy and
    16-bit gradients: 2 + 2 + 4 + 8, the same.
    """
    return 16 * parameters


def activation_bytes(layers, width, vocabulary, length, recompute=False):
    """Hold what the backward of one sequence needs, in 16-bit training.

    34 bytes per token and channel in each block when the attention matrix
    is never written (Korthikanti et al. 2022, section 4), and the float32
    logits.  Recomputation keeps a block's input, and one block in full.
    """
    block = 34 * length * width
    kept = 2 * length * width * layers + block if recompute else layers * block
    return kept + 4 * length * (width + vocabulary)


def smallest_count(state, activations, memory):
    """Share the state evenly; each GPU has activations of its own.

    None: not even the activations fit, however many GPUs there are.
    """
    room = memory - activations
    return math.ceil(state / room) if room > 0 else None


def training_days(flops, gpus, peak, mfu):
    """Spend the FLOPs at a share ``mfu`` of the peak (FLOP/s) of each GPU."""
    return flops / (gpus * peak * mfu) / 86400


def memory_needs(state, kept, recomputed, memory, gpus, sequences):
    """Name what makes one update fit.

    ``kept`` and ``recomputed`` are the activations of one sequence,
    ``sequences`` how many each GPU processes per update.
    """
    count = smallest_count(state, recomputed, memory)
    if count is None:
        return [("8.4.1", "split every layer: tensor parallel")]
    needs, share = [], state
    if state + recomputed > memory:
        share = state / 4  # 16-bit weights and gradients stay
        if gpus == 1 and share + recomputed <= memory:
            needs.append(("7.5.3", "offload the optimizer state to the host"))
        else:
            more = f" on at least {count:,} GPUs" if count > gpus else ""
            needs.append(("8.4.2", "shard the training state" + more))
            share = state / max(count, gpus)
    if share + kept > memory:
        needs.append(("7.5.2", "recompute activations"))
        kept = recomputed
    if share + sequences * kept > memory:
        needs.append(("7.5.1", "accumulate gradients over micro-batches"))
    return needs


def time_needs(days, days_float32, limit, gpus):
    """Name what makes the training end in ``limit`` days.

    ``days`` is at 16-bit speed on ``gpus`` GPUs, ``days_float32`` the same
    in float32; both at the stated MFU, which chapters 4 to 6 must earn.
    """
    if days_float32 <= limit:
        return []
    needs = [("9.1.3", "train in mixed precision")]
    if days > limit:
        count = math.ceil(gpus * days / limit)
        needs.append(("8.3", f"data parallel on about {count:,} GPUs"))
    return needs


def data_needs(tokens, host_memory):
    """Name what feeds it: 2 bytes per token of a vocabulary below 65,536."""
    needs = [("5.2.3", "tokenise once, into a memory-mapped file")]
    if 2 * tokens > host_memory:
        needs.append(("5.2.4", "store shards: they exceed the host's memory"))
    return needs


def sizes(models, memories):
    """Return one row per model: what it holds, and how many GPUs that takes.

    ``memories``: usable bytes by GPU name.
    """
    rows = []
    for name in models:
        config = MODELS[name]
        shape = config.n_layer, config.n_embd, config.vocab_size
        T = config.block_size
        parameters = gpt.parameter_counts(config)["total"]
        state = state_bytes(parameters)
        recomputed = activation_bytes(*shape, T, recompute=True)
        rows.append(
            {
                "model": name,
                "parameters": parameters,
                "state_bytes": state,
                "kept_bytes": activation_bytes(*shape, T),
                "recomputed_bytes": recomputed,
                "per_token": gpt.flops_per_token(config, T),
                **{
                    gpu: smallest_count(state, recomputed, memory)
                    for gpu, memory in memories.items()
                },
            }
        )
    return rows


def durations(rows, tokens, peak, mfu, price):
    """Return one row per model: FLOPs, days on N GPUs, cost."""
    out = []
    for row in rows:
        count = tokens or TOKENS_PER_PARAMETER * row["parameters"]
        flops = row["per_token"] * count
        days = {n: training_days(flops, n, peak, mfu) for n in COUNTS}
        out.append(
            {
                "model": row["model"],
                "tokens": float(count),
                "FLOPs": flops,
                "days": days,
                "cost": days[1] * 24 * price,
            }
        )
    return out


def span(days):
    """Write a number of days in the unit a person would use."""
    units = {"y": 365, "d": 1, "h": 1 / 24, "min": 1 / 1440, "s": 1 / 86400}
    unit = next((u for u, size in units.items() if days >= size), "s")
    value = days / units[unit]
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def short(count):
    """Write a count with three digits: 124 M, 1.56 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def plot(rows, title, path):
    """Draw days against GPUs, one line per model, to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows:
        days = [row["days"][n] for n in COUNTS]
        axes.loglog(COUNTS, days, marker="o", label=row["model"])
    for days, name in ((1, "a day"), (30, "a month"), (365, "a year")):
        axes.axhline(days, color="0.8", linewidth=1, zorder=0)
        axes.text(COUNTS[-1], days, name, color="0.4", ha="right", va="bottom")
    axes.set(xlabel="GPUs", ylabel="days", title=title)
    axes.set_xticks(COUNTS, [f"{n:,}" for n in COUNTS])
    axes.minorticks_off()
    axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def positive(text):
    """Parse a flag that must be a finite number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def flags(parser):
    parser.add_argument("--model", default="gpt2-xl", choices=MODELS)
    parser.add_argument("--gpu", default="H100", choices=GPUS)
    parser.add_argument("--gpus", type=int, default=8, help="for 1.3")
    parser.add_argument(
        "--tokens",
        type=positive,
        help=f"of the data set ({TOKENS_PER_PARAMETER} per parameter)",
    )
    parser.add_argument("--mfu", type=positive, default=0.4)
    parser.add_argument("--days", type=positive, default=7.0, help="for 1.3")
    parser.add_argument(
        "--price", type=positive, default=2.0, help="assumed, per GPU hour"
    )
    parser.add_argument(
        "--batch-tokens", type=positive, default=5e5, help="per update"
    )
    parser.add_argument(
        "--host-gib", type=positive, default=512, help="each host's memory"
    )


def decide(args, peaks, memory):
    """Return the table of 1.3: section, technique, in order of need."""
    config = MODELS[args.model]
    T = config.block_size
    (size,) = sizes([args.model], {})
    tokens = args.tokens or TOKENS_PER_PARAMETER * size["parameters"]
    days = [
        training_days(size["per_token"] * tokens, args.gpus, peak, args.mfu)
        for peak in peaks
    ]
    sequences = math.ceil(args.batch_tokens / T / args.gpus)
    needs = [
        *memory_needs(
            size["state_bytes"],
            size["kept_bytes"],
            size["recomputed_bytes"],
            memory,
            args.gpus,
            sequences,
        ),
        *time_needs(*days, args.days, args.gpus),
        *data_needs(tokens, args.host_gib * GIB),
    ]
    return [
        {"order": i, "section": section, "technique": technique}
        for i, (section, technique) in enumerate(needs, 1)
    ]


def main(argv=None):
    args = bench.cli(__doc__, argv, flags)
    if args.gpus < 1 or args.mfu > 1:
        raise bench.Refusal("--gpus must be at least 1, --mfu at most 1")
    usable = {g: gib * GIB * (1 - MARGIN) for g, (_, gib) in GPUS.items()}
    peaks = [  # FLOP/s; the V100 has no bfloat16
        machine.published_peak(GPUS[args.gpu][0], "bfloat16")
        or machine.published_peak(GPUS[args.gpu][0], "float16"),
        machine.published_peak(GPUS[args.gpu][0], "float32"),
    ]
    rows = sizes(list(MODELS), usable)
    times = durations(rows, args.tokens, peaks[0], args.mfu, args.price)
    needs = decide(args, peaks, usable[args.gpu])
    shown = [row | {"parameters": short(row["parameters"])} for row in rows]
    for row in shown:
        row["per_token"] = short(row["per_token"])
    bench.report(
        args,
        shown,
        {
            "model": "model",
            "parameters": "parameters",
            "per_token": "FLOPs/token",
            "state_bytes": "training state",
            "kept_bytes": "activations",
            "recomputed_bytes": "recomputed",
        },
        extra={"sizes": rows, "durations": times, "needs": needs},
    )
    print(
        "training state: 16 bytes per parameter; activations: of one "
        "sequence\n"
    )
    title = (
        "How many GPUs hold the state, shared evenly, and each the recomputed "
        f"activations; {MARGIN:.0%} kept free"
    )
    print(bench.table(rows, ["model", *GPUS], title), "", sep="\n")
    terms = f"{args.gpu}, {peaks[0] / 1e12:,.0f} TFLOP/s at MFU {args.mfu:g}"
    title = f"Time on so many {terms}; {args.price:g} per GPU hour (assumed)"
    shown = [
        {
            "model": row["model"],
            "tokens": short(row["tokens"]),
            "FLOPs": f"{row['FLOPs']:.2e}",
            **{f"{n:,}": span(days) for n, days in row["days"].items()},
            "cost": f"{row['cost']:,.0f}",
        }
        for row in times
    ]
    print(bench.table(shown, title=title), "", sep="\n")
    title = (
        f"First for {args.model} on {args.gpus} x {args.gpu} "
        f"in {args.days:g} days"
    )
    print(bench.table(needs, title=title))
    path = ROOT / "runs" / "scale.png"
    plot(times, f"Training time, {terms}", path)
    print(f"plot: {path}")
    return rows


if __name__ == "__main__":
    bench.run(main)
