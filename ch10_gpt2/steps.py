"""The optimisation steps of chapter 10, one change each, in two tracks.

A step takes the configuration of the step before it and changes **one**
thing. Its docstring says why that should help; ``bound`` estimates by how
much, from bytes, FLOPs and this machine's measured ceilings, before anything
is run. ``agreement`` says how far losses and gradients may move (``race``):

* ``exact``: the same numbers in the same order, bit for bit;
* ``close``: the same mathematics summed in another order, in any format;
* ``precision``: another number format than the step before.

Tokens per optimizer update, data order and seed never change, so the losses
of all steps can be laid on top of each other.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

from ch10_gpt2.train import Config
from common import gpt

TOLERANCE = {"exact": 0.0, "close": 2e-4, "precision": 2e-2}


@dataclass(frozen=True)
class Step:
    """One row of the log.

    ``needs`` names what the machine must have (``accelerator``, ``compiler``,
    ``custom operator``, ``glibc``, ``ranks``); ``shows`` the functions that
    the change turns on, in the trainer or as ``module:name``; ``pilot`` asks
    for a trial of one sequence before a full run, because the change may be
    far slower on this machine; ``hosts`` starts the ranks under two agents;
    ``bound`` estimates (seconds saved per update, in words).
    """

    track: str
    section: str
    title: str
    title_zh: str
    change: Callable[[Config], Config]
    agreement: str = "exact"
    needs: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    pilot: bool = False
    hosts: bool = False
    bound: Callable | None = None

    @property
    def name(self) -> str:
        """The function's name, e.g. ``fused_attention``."""
        return self.change.__name__

    @property
    def why(self) -> str:
        """Why it should help: the docstring on one line."""
        return " ".join(inspect.getdoc(self.change).split())


MEMORY: list[Step] = []
SPEED: list[Step] = []


def step(track: list, section: str, title: str, title_zh: str, **facts):
    """Append the decorated change to ``track``; return it unchanged."""

    def add(change):
        name = "memory" if section.startswith("10.3") else "speed"
        track.append(Step(name, section, title, title_zh, change, **facts))
        return change

    return add


# What a step should save, estimated. ``now`` and ``then`` are the
# configurations before and after, ``at`` the machine: bytes_per_s, flops (by
# dtype), host_to_device, launch_s of an operator, fault_s of a fresh page;
# operators of a forward and backward; seconds and data_s of an update before.
# A pass reads or writes every number of a tensor once.


def _shape(config: Config):
    model = config.model()
    tokens = config.sequences * config.context()
    return model, tokens, gpt.parameter_counts(model)["total"]


def _gradient_bytes(config: Config):
    """Return the bytes of gradients that are born in one backward pass."""
    counts = gpt.parameter_counts(config.model())
    twice = counts["wte"] if config.model().tied else 0  # embedding and head
    return 4 * (counts["total"] + twice)


def _faults_in(config: Config):
    """Say whether a large tensor's pages are faulted in at every birth."""
    return config.device == "cpu" and config.allocator == "default"


def fewer_passes_over_weights(now, then, at):
    """Count the bytes and launches that fewer micro-batches do not need."""
    model, _, N = _shape(now)
    fewer = now.sequences // now.micro_batch
    fewer -= now.sequences // then.micro_batch
    moved = fewer * 6 * 4 * N  # read twice, gradient written, added (3)
    launches = fewer * at["operators"]
    saved = moved / at["bytes_per_s"] + launches * at["launch_s"]
    words = (
        f"{fewer} passes fewer over {4 * N / 1e6:.0f} MB of weights and "
        f"their gradients, {launches:,} operators fewer of "
        f"{at['launch_s'] * 1e6:.1f} µs each before they do anything"
    )
    if _faults_in(now):
        pages = fewer * _gradient_bytes(now) / 4096
        saved += pages * at["fault_s"]
        words += f", {pages / 1e3:,.0f} thousand page faults fewer"
    return saved, words


def no_waiting_for_data(now, then, at):
    """Take all of the time that the update before waited for data."""
    share = at["data_s"] / at["seconds"]
    return at["data_s"], f"{share:.1%} of the update waits for the loader"


def no_blocking_copies(now, then, at):
    """Hide the copy of the ids behind the compute."""
    _, tokens, _ = _shape(now)
    moved = 2 * 8 * tokens
    rate = at["host_to_device"] or at["bytes_per_s"]
    return moved / rate, f"{moved / 1e3:.0f} kB of ids per update"


def no_score_matrix(now, then, at):
    """Count the passes over the (T, T) scores that are never written."""
    model, tokens, _ = _shape(now)
    scores = 4 * model.n_layer * model.n_head * tokens * now.context()
    # forward: product, scale (2), mask (2), softmax (2), product; backward:
    # product, softmax (3), mask (2), scale (2), three products
    passes = 8 + 11
    return passes * scores / at["bytes_per_s"], (
        f"{passes} passes over {scores / 1e6:.0f} MB of scores"
    )


def no_page_faults(now, then, at):
    """Count the pages of the large tensors that are born in an update."""
    model, tokens, N = _shape(now)
    logits = 4 * tokens * model.vocab_size
    born = 4 * logits  # with log-softmax and both losses' gradients
    born += now.sequences // now.micro_batch * _gradient_bytes(now)
    denominators = {"for-loop": 2, "foreach": 1, "fused": 0}
    born += denominators[now.optimizer] * 4 * N
    pages = born / 4096
    return pages * at["fault_s"], (
        f"{pages / 1e3:,.0f} thousand page faults of "
        f"{at['fault_s'] * 1e6:.2f} µs per update"
    )


def one_pass_over_the_state(now, then, at):
    """Count the optimizer's passes over parameters, gradients and state."""
    _, _, N = _shape(now)
    # decay (2), first moment (3), second (2 + 3), its root (2), corrected
    # (2), epsilon (2), the step (4); fused: 4 tensors read, 3 written
    moved = (20 - 7) * 4 * N
    return moved / at["bytes_per_s"], (
        f"7 passes instead of 20 over {4 * N / 1e6:.0f} MB"
    )


def fused_pointwise(now, then, at):
    """Count the passes between the GEMMs that fusion removes.

    A residual sum and the norm behind it need 5 passes forward and 6
    backward, fused 4 and 4, twice in a block; the loss needs 6 over the
    logits, fused one to read them and two to turn them into their gradient.
    """
    model, tokens, _ = _shape(now)
    width, logits = (4 * tokens * n for n in (model.n_embd, model.vocab_size))
    passes = 2 * (5 - 4 + 6 - 4)
    moved = passes * width * model.n_layer + (6 - 3) * logits
    return moved / at["bytes_per_s"], (
        f"{passes} passes over {width / 1e6:.1f} MB of activations in each "
        f"of {model.n_layer} blocks and 3 over {logits / 1e6:.0f} MB of "
        "logits"
    )


def faster_matrix_units(now, then, at):
    """Run every FLOP at the measured rate of the narrower format."""
    model, tokens, _ = _shape(now)
    flops = tokens * gpt.flops_per_token(model, now.context())
    before = at["flops"].get(now.precision)
    after = at["flops"].get(then.precision)
    if not before or not after:
        return None, "the rate of this format was not measured here"
    saved = flops / before - flops / after
    return saved, (
        f"{flops / 1e9:.0f} GFLOP at {after / 1e9:.0f} instead of "
        f"{before / 1e9:.0f} GFLOP/s"
    )


def two_passes_over_logits(now, then, at):
    """Count the bytes that the loss moves per logit, and two passes of it.

    The composite: log-softmax (2 passes), the loss's gradient (1) and that
    of the log-softmax (3), in float32; 16-bit logits are converted before
    (2 + 4 bytes) and their gradient after (4 + 2).
    """
    model, tokens, _ = _shape(now)
    logits = tokens * model.vocab_size
    size = 4 if now.precision == "float32" else 2
    before = 6 * 4 if size == 4 else (2 + 4) + 6 * 4 + (4 + 2)
    after = 2 * size
    return (before - after) * logits / at["bytes_per_s"], (
        f"{after} instead of {before} bytes for each of "
        f"{logits / 1e6:.0f} million logits"
    )


def divided_compute(now, then, at):
    """Divide the compute, add the gradients' all-reduce; cores are fixed.

    Where the ranks share cores and memory there is nothing to divide, and
    each walks over all weights and the optimizer's state by itself: W times
    what one process did. A byte on the loopback is copied into the kernel
    and out of it.
    """
    _, _, N = _shape(now)
    world = at["world"]
    wire = 2 * (world - 1) / world * 4 * N
    if at["shared_cores"]:
        passes = 6 + {"for-loop": 20, "foreach": 20, "fused": 7}[now.optimizer]
        again = (world - 1) * passes * 4 * N
        copied = world * wire * 2 * 2
        return -(again + copied) / at["bytes_per_s"], (
            f"{world} ranks share the cores that one process used: nothing "
            f"to gain, but {again / 1e6:.0f} MB more of weights and state to "
            f"pass over, and {wire / 1e6:.0f} MB for each to exchange"
        )
    return at["seconds"] * (1 - 1 / world), (
        f"{world} devices divide the tokens; {wire / 1e6:.0f} MB of "
        "gradients cross the link, hidden behind backward at best"
    )


# --- memory: what fits -----------------------------------------------------


@step(MEMORY, "10.3.1", "Baseline", "基準模型")
def memory_baseline(config):
    """Keep everything: one whole batch, float32, plain attention, every
    activation, and AdamW in CUDA's default form (foreach), which makes a
    temporary copy of all parameters while it steps."""
    return replace(
        config,
        micro_batch=config.sequences,
        optimizer="foreach",
        tokens="once",
    )


@step(
    MEMORY,
    "10.3.2",
    "Gradient accumulation",
    "使用跨批次梯度累加",
    agreement="close",
    shows=("accumulate",),
)
def accumulate_gradients(config):
    """Activations grow with the micro-batch, not with the batch: K
    micro-batches hold 1/K of them. Price: K times the launches, smaller
    GEMMs, and the gradients stay alive between the micro-batches."""
    return replace(config, micro_batch=max(1, config.sequences // 8))


@step(
    MEMORY,
    "10.3.3",
    "Recomputation",
    "開啟即時重算前向張量",
    shows=("ch07_memory.training_memory:recompute_block",),
)
def recompute_blocks(config):
    """Keep only the input of each block and compute the rest again in
    backward: activations of L blocks become L inputs and one block. Price:
    one more forward, a third more FLOPs at most."""
    return replace(config, recompute="blocks")


@step(
    MEMORY,
    "10.3.4",
    "Memory-friendly optimizer",
    "使用顯示記憶體友善的最佳化器模式",
    agreement="close",
    shows=("make_optimizer", "ch06_single_gpu_perf.optimizer_kernels:adamw"),
)
def loop_optimizer(config):
    """Step one parameter after the other (foreach=False): the temporaries
    are those of one tensor instead of all. Price: more launches."""
    return replace(config, optimizer="for-loop")


@step(
    MEMORY,
    "10.3.5",
    "Sharding: FSDP",
    "使用分散式方法降低顯示記憶體佔用—FSDP",
    agreement="close",
    needs=("ranks",),
    shows=("shard",),
)
def fully_sharded(config):
    """Each of W ranks keeps 1/W of parameters, gradients and optimizer
    state and gathers a block's weights while it runs. Price: two
    all-gathers and one reduce-scatter of all parameters per micro-batch."""
    return replace(config, parallel="fsdp")


# --- speed: how fast -------------------------------------------------------


@step(SPEED, "10.4.1", "Baseline", "基準模型")
def speed_baseline(config):
    """An honest first version: one sequence at a time, the text tokenised
    whenever a window is read, plain attention, AdamW parameter by
    parameter, float32, blocking copies."""
    return replace(config, micro_batch=1)


@step(
    SPEED,
    "10.4.2",
    "Batch size",
    "增加 BatchSize",
    agreement="close",
    shows=("accumulate",),
    bound=fewer_passes_over_weights,
)
def larger_batch(config):
    """Every micro-batch reads all weights and launches every kernel again;
    one larger micro-batch does both once. The update stays the same."""
    return replace(config, micro_batch=config.largest_micro_batch())


@step(
    SPEED,
    "10.4.3",
    "Loader workers",
    "增加資料前置處理的平行度",
    shows=("make_loader",),
    bound=no_waiting_for_data,
)
def loader_workers(config):
    """Other processes tokenise the next windows while this one computes;
    gains at most the time that a step waits for data, and on a CPU the
    workers take their cores from the model."""
    return replace(config, workers=2)


@step(
    SPEED,
    "10.4.4",
    "Asynchronous copies",
    "使用非同步介面完成資料傳輸",
    needs=("accelerator",),
    shows=("ch06_single_gpu_perf.overlap_copies:prefetched",),
    bound=no_blocking_copies,
)
def asynchronous_copies(config):
    """Copy the next batch from pinned memory on a stream of its own while
    this one is computed; gains at most the time of the copy."""
    return replace(config, transfer="prefetch")


@step(
    SPEED,
    "5.2.3",
    "Tokenise once",
    "資料的離線前置處理",
    shows=("TokenisedOnTheFly", "TokenisedOnce"),
    bound=no_waiting_for_data,
)
def tokenise_once(config):
    """Tokenise the text once into a memory-mapped file; a window is then a
    slice of 2 bytes per token, and there is nothing left to hide."""
    return replace(config, tokens="once")


@step(
    SPEED,
    "6.2.2",
    "Fused attention",
    "使用融合運算元",
    agreement="close",
    shows=("ch06_single_gpu_perf.fused_operators:fused_attention",),
    bound=no_score_matrix,
)
def fused_attention(config):
    """Never write the (T, T) scores to memory: one kernel walks over tiles
    of them with a running softmax, forward and backward."""
    return replace(config, attention="fused")


@step(
    SPEED,
    "6.4.1",
    "Keep freed memory",
    "避免張量的建立銷耗",
    needs=("glibc",),
    shows=("ch06_single_gpu_perf.tensor_creation:keep_freed_memory",),
    bound=no_page_faults,
)
def keep_freed_memory(config):
    """On a CPU a large tensor's memory goes back to the system when it dies,
    and the next one's pages are faulted in and zeroed again. Keeping it
    costs resident memory; CUDA's caching allocator does so by itself. One
    more row than the book's: without it those below measure the kernel."""
    return replace(config, allocator="keep")


@step(
    SPEED,
    "6.5.2",
    "Fused AdamW",
    "使用性能特化的最佳化器實現",
    agreement="close",
    shows=("make_optimizer", "ch06_single_gpu_perf.optimizer_kernels:adamw"),
    bound=one_pass_over_the_state,
)
def fused_adamw(config):
    """Read each parameter, gradient and state once per update and write it
    once, instead of once per arithmetic operation."""
    return replace(config, optimizer="fused")


@step(
    SPEED,
    "10.4.5",
    "Graph compilation",
    "使用計算圖最佳化",
    agreement="close",
    needs=("compiler",),
    bound=fused_pointwise,
)
def compiled_graph(config):
    """torch.compile fuses what lies between the GEMMs, so activations are
    read and written once per fused kernel; the GEMMs stay as they are."""
    return replace(config, compile=True)


@step(
    SPEED,
    "10.4.6",
    "float16 mixed precision",
    "使用float16 混合精度訓練",
    agreement="precision",
    pilot=True,
    bound=faster_matrix_units,
)
def float16_autocast(config):
    """Matrix units run float16 several times faster and half the bytes
    move; a GradScaler keeps small gradients from vanishing."""
    return replace(config, precision="float16")


@step(
    SPEED,
    "10.4.6",
    "bfloat16 mixed precision",
    "使用bfloat16 混合精度訓練",
    agreement="precision",
    pilot=True,
    bound=faster_matrix_units,
)
def bfloat16_autocast(config):
    """float32's range in 16 bits: the speed of float16 without a scaler,
    at the price of three bits of mantissa."""
    return replace(config, precision="bfloat16")


@step(
    SPEED,
    "10.4.7",
    "Custom operator",
    "（可選）使用自訂運算元",
    agreement="close",
    needs=("custom operator", "compiler"),
    shows=("ch09_advanced.custom_op:in_place_cross_entropy",),
    bound=two_passes_over_logits,
)
def in_place_loss(config):
    """Cross-entropy that writes its gradient over the logits in the same
    pass: the largest tensor of the step is read once and written once."""
    return replace(config, loss="in-place")


@step(
    SPEED,
    "10.4.8",
    "Many devices, one host",
    "使用單機多卡加速訓練",
    agreement="close",
    needs=("ranks",),
    shows=("replicate", "accumulate"),
    bound=divided_compute,
)
def data_parallel(config):
    """Each rank computes its share of the same update; DDP averages the
    gradients in buckets while backward goes on."""
    return replace(config, parallel="ddp")


@step(
    SPEED,
    "10.4.9",
    "Many hosts",
    "使用多機多卡加速訓練",
    agreement="close",
    needs=("ranks",),
    hosts=True,
    bound=divided_compute,
)
def two_hosts(config):
    """The same update over two hosts, each with its own torchrun agent: the
    gradients cross the slower link between them."""
    return replace(config, parallel="ddp")
