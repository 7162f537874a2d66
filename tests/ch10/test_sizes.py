"""The ladder takes the largest model that a machine can climb with."""

import pytest
import torch

from ch10_gpt2 import sizes
from common import gpt

CPU, GIB = torch.device("cpu"), 2**30
REFERENCE = 337.6e9  # FLOP/s of two cores, 23.6 GiB beside them


def chosen(flops, gib):
    peaks = {"gemm_flops": {"float32": flops}}
    found = sizes.size(CPU, False, peaks, gib * GIB)
    return found.preset, found.sequences, found.T, found.budget_s


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0, 1.2, 1.4])
def test_two_cores_get_what_they_always_got(share):
    wanted = ("gpt2-small-cpu", 4, 96, 390)
    assert chosen(share * REFERENCE, 23.6) == wanted


@pytest.mark.parametrize(
    ("flops", "gib", "wanted"),
    [
        (2e12, 64, ("gpt2", 4, 96)),
        (2e12, 8, ("gpt2-small-cpu", 4, 256)),  # two of gpt2 need more
        (700e9, 16, ("gpt2-small-cpu", 4, 256)),
        (700e9, 2, ("gpt2-tiny", 4, None)),
        (100e9, 16, ("gpt2-small-cpu", 4, 32)),
        (20e9, 16, ("gpt2-tiny", 4, None)),
        (None, 16, ("gpt2-tiny", 4, None)),  # no rate could be measured
    ],
)
def test_rate_and_memory_decide(flops, gib, wanted):
    assert chosen(flops, gib)[:3] == wanted


def test_the_list_falls_and_its_presets_have_the_context():
    work = [
        sequences * T * gpt.flops_per_token(gpt.preset(preset), T)
        for preset, sequences, T in sizes.ON_A_CPU
    ]
    assert work == sorted(work, reverse=True)
    for preset, _, T in sizes.ON_A_CPU:
        assert T <= gpt.preset(preset).block_size


def test_a_size_says_why():
    peaks = {"gemm_flops": {"float32": REFERENCE}}
    why = sizes.size(CPU, False, peaks, 23.6 * GIB).why
    assert "338 GFLOP/s" in why and "half of 23.6 GiB" in why
    assert why.startswith("the largest of 5 sizes")
    why = sizes.size(CPU, False, peaks, 1 * GIB).why
    assert why.startswith("the smallest size; not the largest of 5")


@pytest.mark.parametrize(
    ("gib", "wanted"),
    [
        (139, ("gpt2", 8, None, 600)),
        (24, ("gpt2", 2, None, 600)),
        (4, ("gpt2-small-cpu", 8, 96, 600)),
    ],
)
def test_a_gpu_is_chosen_for_by_its_memory(gib, wanted):
    found = sizes.size(torch.device("cuda"), False, memory=gib * GIB)
    assert (found.preset, found.sequences, found.T, found.budget_s) == wanted
    assert f"{gib} GiB" in found.why


def test_a_smoke_run_measures_nothing_first(monkeypatch):
    monkeypatch.setattr(sizes.machine, "peaks", None)  # not to be called
    assert sizes.size(CPU, True).preset == "gpt2-tiny"
