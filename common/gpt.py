"""GPT-2 as published, in one page, with its parameters, FLOPs and bytes.

The baseline is plain: the attention matrix is written to memory, every
activation is kept, the loss is ``cross_entropy``.  What makes it faster or
smaller is handed in from outside (``attention``, ``loss``, ``run_block``), so
that an optimisation is visible where it is made.

Source: Radford et al. 2019 (GPT-2); the FLOPs formula is that of Chowdhery
et al. 2022 (PaLM), appendix B: 6 N + 12 L C T per token, N without ``wpe``.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a target that is not counted, as in torch's cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; ``n_embd`` is C, ``block_size`` the longest T."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50257
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head "
                f"{self.n_head}"
            )

    def but(self, **changes) -> "GPTConfig":
        """Return a copy with some fields changed."""
        return replace(self, **changes)


PRESETS = {
    "gpt2": GPTConfig(12, 12, 768),
    "gpt2-medium": GPTConfig(24, 16, 1024),
    "gpt2-large": GPTConfig(36, 20, 1280),
    "gpt2-xl": GPTConfig(48, 25, 1600),
    # GPT-2's shape at sizes that a laptop's CPU trains in seconds
    "gpt2-small-cpu": GPTConfig(2, 5, 320, block_size=256, vocab_size=50304),
    "gpt2-tiny": GPTConfig(2, 2, 64, block_size=64),
    # the book's own case of 10.3: characters, short context, untied head
    "book-large": GPTConfig(
        36, 20, 1280, block_size=128, vocab_size=65, tied=False
    ),
}


def preset(name: str) -> GPTConfig:
    """Return the configuration called ``name``.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {list(PRESETS)}")
    return PRESETS[name]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write the (T, T) scores of every head to memory, mask, soften, mix.

    Args:
        q: queries, (B, H, T, D).
        k: keys, alike.
        v: values, alike.

    Returns:
        The mixed values, (B, H, T, D).
    """
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (B, H, T, T)
    past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~past, float("-inf"))
    return scores.softmax(dim=-1) @ v


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Sum the loss of the counted targets, times ``scale``.

    A sum, because micro-batches with unequal numbers of counted targets
    cannot be averaged by averaging their means.

    Args:
        logits: (N, V).
        targets: (N,), ``IGNORED`` where not counted.
        scale: 0-dim tensor, usually 1 / counted tokens of the whole window.
    """
    loss = F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="sum"
    )
    return loss if scale is None else loss * scale


def call_block(block: nn.Module, x: Tensor) -> Tensor:
    """Run one block and keep what its backward needs: the plain way."""
    return block(x)


class SelfAttention(nn.Module):
    """Causal self-attention; how it mixes is ``attention``'s business."""

    def __init__(self, config: GPTConfig, attention: Callable):
        super().__init__()
        C = config.n_embd
        self.n_head, self.attention = config.n_head, attention
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (
            t.view(heads).transpose(1, 2)  # (B, H, T, D)
            for t in self.c_attn(x).split(C, dim=2)
        )
        y = self.attention(q, k, v).transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Widen to 4 C, tanh-GELU, narrow."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.c_fc = nn.Linear(C, 4 * C)
        self.c_proj = nn.Linear(4 * C, C)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: GPTConfig, attention: Callable):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = SelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2: ``model(ids)`` gives logits, ``model(ids, targets)`` the loss.

    Args:
        config: the shape.
        attention: (q, k, v) -> mixed values, causal.
        loss: (logits (N, V), targets (N,), scale) -> scaled sum of losses.
        run_block: (block, x) -> x; recomputation is put in here.
    """

    def __init__(
        self,
        config: GPTConfig,
        attention: Callable = plain_attention,
        loss: Callable = summed_cross_entropy,
        run_block: Callable = call_block,
    ):
        super().__init__()
        self.config, self.loss, self.run_block = config, loss, run_block
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, attention) for _ in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        self.initialise()

    def tie(self) -> None:
        """Let the head use the embedding's storage, if the config says so.

        ``to_empty`` from the meta device loses the tie: call this again.
        """
        if self.config.tied:
            self.lm_head.weight = self.wte.weight

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the weights as GPT-2's: N(0, 0.02), residuals / sqrt(2 L)."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name or name.startswith("ln_"):
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith("c_proj.weight")
                parameter.normal_(0.0, residual_std if is_residual else 0.02)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V), or the scaled sum of losses.

        Args:
            ids: token ids, (B, T), T at most ``block_size``.
            targets: (B, T); ``IGNORED`` where not counted.
            scale: 0-dim tensor that multiplies the sum.
        """
        T = ids.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"T = {T} > block_size {self.config.block_size}")
        x = self.wte(ids) + self.wpe(torch.arange(T, device=ids.device))
        x = self.dropout(x)  # (B, T, C)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        if targets is None:
            return logits
        return self.loss(logits.flatten(0, 1), targets.flatten(), scale)


def parameter_counts(config: GPTConfig) -> dict[str, int]:
    """Count the parameters per component by formula.

    Returns:
        ``wte wpe attention mlp norms head total``; a tied head counts 0.
    """
    C, L, V = config.n_embd, config.n_layer, config.vocab_size
    counts = {
        "wte": V * C,
        "wpe": config.block_size * C,
        "attention": L * (3 * C * C + 3 * C + C * C + C),
        "mlp": L * (8 * C * C + 5 * C),
        "norms": (2 * L + 1) * 2 * C,
        "head": 0 if config.tied else V * C,
    }
    return counts | {"total": sum(counts.values())}


def flops_by_component(
    config: GPTConfig, T: int, causal: bool = False
) -> dict[str, float]:
    """Return the model FLOPs of one trained token: 6 N + 12 L C T.

    N are the parameters that multiply, 2 FLOPs forward and 4 backward each:
    all but ``wpe`` and the look-up in ``wte`` (tied, it works as the head).
    Biases and norms count as in PaLM's formula, though no matrix product
    holds them; softmax, GELU and the optimizer do not.  ``causal`` counts
    the second term half, as only half of the scores are needed.
    Recomputation is not counted: these are *model* FLOPs.

    Returns:
        As ``parameter_counts``.
    """
    counts = parameter_counts(config)
    scores = 12 * config.n_layer * config.n_embd * T
    mixing = scores / 2 if causal else scores
    flops = {
        "wte": 0,
        "wpe": 0,
        "attention": 6 * counts["attention"] + mixing,
        "mlp": 6 * counts["mlp"],
        "norms": 6 * counts["norms"],
        "head": 6 * config.vocab_size * config.n_embd,
    }
    return flops | {"total": sum(flops.values())}


def flops_per_token(config: GPTConfig, T: int, causal: bool = False) -> float:
    """Return the total of ``flops_by_component``; MFU is made of it."""
    return flops_by_component(config, T, causal)["total"]


def state_bytes(config: GPTConfig) -> dict[str, int]:
    """Return the float32 bytes that stay between two updates.

    Returns:
        ``parameters gradients optimizer total``; AdamW holds two moments.
    """
    N = 4 * parameter_counts(config)["total"]
    kinds = {"parameters": N, "gradients": N, "optimizer": 2 * N}
    return kinds | {"total": 4 * N}


def activation_bytes(
    config: GPTConfig, micro_batch: int, T: int, fused: bool = False
) -> dict[str, int]:
    """Return the float32 bytes that forward keeps for backward.

    A linear layer keeps its input, a norm its input and two statistics per
    token, GELU its input, the loss log-probabilities (N, V).  Attention
    keeps q, k, v and, plain, every head's weights and each layer's mask
    (T, T); the ``fused`` kernel one number per token and head instead.  The
    caller's ids, backward's temporaries and dropout (0) are not counted.

    Returns:
        As ``parameter_counts``.
    """
    C, L, H = config.n_embd, config.n_layer, config.n_head
    n = 4 * micro_batch * T  # bytes of one float32 per token
    mixing = n * H if fused else n * H * T + T * T  # the mask is bool
    kept = {
        "wte": 0,
        "wpe": 8 * T,  # the positions, int64
        "attention": L * (5 * n * C + mixing),
        "mlp": L * 9 * n * C,
        "norms": (2 * L + 1) * n * (C + 2),
        "head": n * (C + config.vocab_size),
    }
    return kept | {"total": sum(kept.values())}


def as_dict(config: GPTConfig) -> dict:
    """Return the config as plain data, for a record."""
    return asdict(config)
