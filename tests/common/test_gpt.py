"""The model is GPT-2: counts, FLOPs, bytes, initialisation, semantics."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from common import gpt, machine
from common.gpt import GPT, IGNORED, GPTConfig

TINY = GPTConfig(2, 2, 32, block_size=32, vocab_size=97)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def batch(config, B=2, T=None, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shape = (B, (T or config.block_size) + 1)
    ids = torch.randint(config.vocab_size, shape, generator=draw)
    return ids[:, :-1], ids[:, 1:]


def seeded(config, **parts):
    torch.manual_seed(0)
    return GPT(config, **parts)


def unique_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        ("gpt2", {}, 124_439_808),
        ("gpt2", {"vocab_size": 50304}, 124_475_904),
        ("gpt2-medium", {}, 354_823_168),
        ("gpt2-large", {}, 774_030_080),
        ("gpt2-xl", {}, 1_557_611_200),
        ("book-large", {}, 708_720_640),
        ("gpt2-tiny", {"tied": False}, None),
    ],
)
def test_parameters_are_the_published_ones(name, changes, published):
    config = gpt.preset(name).but(**changes)
    counts = gpt.parameter_counts(config)
    assert counts["total"] == (published or counts["total"])
    with torch.device("meta"):
        model = GPT(config)
    assert unique_parameters(model) == counts["total"]
    parts = {"wte": "wte.", "wpe": "wpe.", "attention": ".attn."}
    parts |= {"mlp": ".mlp.", "norms": "ln_", "head": "lm_head."}
    for part, mark in parts.items():
        found = sum(
            p.numel() for n, p in model.named_parameters() if mark in n
        )
        assert found == counts[part], part


def test_state_of_the_books_model_in_mib():
    state = gpt.state_bytes(gpt.preset("book-large"))
    assert round(state["total"] / 2**20, 1) == 10814.2
    model = seeded(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = batch(TINY)
    model(ids, targets).backward()
    optimizer.step()
    moments = [
        t
        for s in optimizer.state.values()
        for n, t in s.items()
        if n != "step"
    ]
    state = gpt.state_bytes(TINY)
    assert sum(t.nbytes for t in moments) == state["optimizer"]
    grads = [p.grad.nbytes for p in model.parameters()]
    assert sum(grads) == state["gradients"] == state["parameters"]


def test_flops_of_gpt2():
    config = gpt.preset("gpt2")
    flops = gpt.flops_by_component(config, 1024)
    assert flops["total"] == gpt.flops_per_token(config, 1024)
    assert flops["total"] == pytest.approx(8.5517e8, rel=1e-5)
    attention = 12 * 12 * 768 * 1024
    half = gpt.flops_by_component(config, 1024, causal=True)
    assert flops["attention"] - half["attention"] == attention / 2
    assert flops["total"] - half["total"] == attention / 2


def test_model_flops_utilisation_of_a_published_run():
    peak = machine.published_peak("NVIDIA A100-SXM4-80GB", "bfloat16")
    assert peak == 312e12
    per_token = gpt.flops_per_token(gpt.preset("gpt2"), 1024)
    assert f"{142_156 * per_token / peak:.1%}" == "39.0%"


@pytest.mark.parametrize("tied", [True, False])
def test_flops_equal_three_times_the_counted_forward(tied):
    config = TINY.but(tied=tied)
    model = seeded(config)
    ids, targets = batch(config, B=2, T=16)
    with FlopCounterMode(display=False) as forward:
        model(ids)
    with FlopCounterMode(display=False) as step:
        model(ids, targets).backward()
    assert step.get_total_flops() == 3 * forward.get_total_flops()
    # what the formula adds: biases and norms, which no product holds
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    formula = gpt.flops_per_token(config, 16) - 6 * vectors
    assert formula * ids.numel() == step.get_total_flops()


def test_the_counter_is_blind_to_the_fused_kernel_on_a_cpu():
    """The reason why FLOPs are counted with plain attention."""
    ids, _ = batch(TINY)
    with FlopCounterMode(display=False) as plain:
        seeded(TINY)(ids)
    with FlopCounterMode(display=False) as fused:
        seeded(TINY, attention=sdpa)(ids)
    assert fused.get_total_flops() < plain.get_total_flops()


@pytest.mark.parametrize("attention", [gpt.plain_attention, sdpa])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("B", [1, 3])
def test_activation_bytes_equal_the_saved_tensors(attention, tied, B):
    config = GPTConfig(3, 2, 64, 64, vocab_size=101, tied=tied)
    model = seeded(config, attention=attention)
    ids, targets = batch(config, B=B, T=48)
    own = [*model.parameters(), ids, targets]
    own = {t.untyped_storage().data_ptr() for t in own}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, targets.contiguous(), torch.tensor(1.0))
    formula = gpt.activation_bytes(config, B, 48, fused=attention is sdpa)
    assert loss.requires_grad
    assert sum(kept.values()) == pytest.approx(formula["total"], rel=0.05)
    # closer than asked: targets, their total weight and the scale are left
    assert abs(sum(kept.values()) - formula["total"]) <= targets.nbytes + 16


def test_initial_weights():
    config = GPTConfig(4, 4, 128, block_size=64, vocab_size=512)
    model = seeded(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert weight.eq(0).all(), name
        elif "ln_" in name:
            assert weight.eq(1).all(), name
        else:
            residual = "c_proj" in name
            std = 0.02 / math.sqrt(2 * 4) if residual else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(2, 4, 256, block_size=64, vocab_size=5000),
        GPTConfig(2, 10, 640, block_size=32, vocab_size=2000),
    ],
)
def test_first_loss(config):
    model = seeded(config)
    ids, targets = batch(config, B=64)
    with torch.no_grad():
        loss = model(ids, targets) / targets.numel()
    uniform = math.log(config.vocab_size)
    expected = uniform + config.n_embd * 0.02**2 / 2
    assert loss.item() == pytest.approx(expected, rel=0.003)
    if config.n_embd > 300:  # what the logits' variance adds is seen
        assert loss.item() != pytest.approx(uniform, rel=0.003)


def test_tie_is_kept_by_to_and_deepcopy_and_lost_by_to_empty():
    model = seeded(TINY)
    moved = copy.deepcopy(model).to(torch.float64)
    assert moved.lm_head.weight is moved.wte.weight
    assert moved.wte.weight is not model.wte.weight
    with torch.device("meta"):
        empty = GPT(TINY)
    empty.to_empty(device="cpu")
    assert empty.lm_head.weight is not empty.wte.weight
    lost = unique_parameters(empty)
    assert lost == unique_parameters(model) + empty.wte.weight.numel()
    empty.tie()
    empty.initialise()
    assert empty.lm_head.weight is empty.wte.weight
    assert unique_parameters(empty) == unique_parameters(model)
    empty.load_state_dict(model.state_dict())
    ids, _ = batch(TINY)
    assert torch.equal(empty(ids), model(ids))


def test_untied_head_has_its_own_weight():
    model = seeded(TINY.but(tied=False))
    assert model.lm_head.weight is not model.wte.weight
    model.tie()
    assert model.lm_head.weight is not model.wte.weight


def blind_attention(q, k, v):
    """Wrong: no mask."""
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("attention", "causal"),
    [(gpt.plain_attention, True), (sdpa, True), (blind_attention, False)],
)
def test_a_later_token_changes_no_earlier_logit(attention, causal):
    model = seeded(TINY, attention=attention)
    ids, _ = batch(TINY)
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % TINY.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :20], after[:, :20]) == causal
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_plain_and_fused_attention_agree_with_gradients():
    ids, targets = batch(TINY)
    grads = []
    for attention in (gpt.plain_attention, sdpa):
        model = seeded(TINY, attention=attention)
        model(ids, targets).backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, fused in zip(*grads, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-4)


def test_run_block_sees_every_block_and_changes_nothing():
    calls = []

    def counted(block, x):
        calls.append(block)
        return block(x)

    ids, _ = batch(TINY)
    model = seeded(TINY, run_block=counted)
    assert torch.equal(model(ids), seeded(TINY)(ids))
    assert calls == list(model.blocks)


# Gradient accumulation: the model gives a *sum* times a scale, so that the
# window's micro-batches may hold unequal numbers of counted targets.


def window():
    """One micro-batch with 11 counted targets, one with 101, one with 0."""
    ids, targets = batch(TINY, B=12)
    ids, targets = ids.split(4), [t.clone() for t in targets.split(4)]
    for part, counted in zip(targets, (11, 101, 0), strict=True):
        part.view(-1)[counted:] = IGNORED
    return list(zip(ids, targets, strict=True))


def counted(targets):
    return int((targets != IGNORED).sum())


def scaled_sums(model, parts):
    total = sum(counted(t) for _, t in parts)
    for ids, targets in parts:
        model(ids, targets, torch.tensor(1 / total)).backward()


def mean_of_means(model, parts):
    for ids, targets in parts:
        scale = torch.tensor(1 / max(counted(targets), 1) / len(parts))
        model(ids, targets, scale).backward()


def zeroed_inside(model, parts):
    total = sum(counted(t) for _, t in parts)
    for ids, targets in parts:
        model.zero_grad(set_to_none=False)
        model(ids, targets, torch.tensor(1 / total)).backward()


def undivided(model, parts):
    for ids, targets in parts:
        scale = torch.tensor(1 / max(counted(targets), 1))
        model(ids, targets, scale).backward()


def one_batch_reused(model, parts):
    scaled_sums(model, [parts[0]] * len(parts))


def gradient(accumulate, parts):
    model = seeded(TINY)
    accumulate(model, parts)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_error(accumulate):
    parts = window()
    whole = [tuple(torch.cat(side) for side in zip(*parts, strict=True))]
    full = gradient(scaled_sums, whole)
    found = gradient(accumulate, parts)
    return ((found - full).norm() / full.norm()).item()


def test_accumulated_gradient_equals_the_full_batchs():
    assert relative_error(scaled_sums) <= 1e-6


@pytest.mark.parametrize(
    "wrong", [mean_of_means, zeroed_inside, undivided, one_batch_reused]
)
def test_wrong_accumulation_is_seen(wrong):
    assert relative_error(wrong) > 1e-4


def test_a_micro_batch_without_counted_targets_adds_nothing():
    model = seeded(TINY)
    ids, targets = window()[2]
    loss = model(ids, targets, torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.eq(0).all() for p in model.parameters())


def test_the_scaled_sum_is_the_mean_of_torch():
    model = seeded(TINY)
    ids, targets = batch(TINY)
    scale = torch.tensor(1 / targets.numel())
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, targets, scale), expected)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="unknown preset 'gpt3'.*gpt2-xl"):
        gpt.preset("gpt3")
    with pytest.raises(ValueError, match="n_embd 65"):
        GPTConfig(n_embd=65, n_head=2)
    with pytest.raises(ValueError, match="T = 33 > block_size 32"):
        seeded(TINY)(torch.zeros(1, 33, dtype=torch.long))
