"""GPU structure: arithmetic that gives what data sheets print."""

import types

import pytest
import torch
from test_techniques import foreign

from ch02_hardware import gpu_structure
from ch02_hardware.gpu_structure import known, resident_warps
from common import machine

# TFLOP/s of float32 and of 16-bit matrices (dense), GB/s, as printed
PRINTED = {
    "V100 SXM2 32GB": (15.7, 125, 900),
    "T4": (8.1, 65, 320),
    "A100 SXM4 40GB": (19.5, 312, 1555),
    "A100 SXM4 80GB": (19.5, 312, 2039),
    "A10": (31.2, 125, 600),
    "GeForce RTX 3090": (35.6, 71, 936),
    "L4": (30.3, 121, 300),
    "L40S": (91.6, 362.05, 864),
    "GeForce RTX 4090": (82.6, 165.2, 1008),
    "H100 80GB HBM3": (66.9, 989.4, 3352),
    "H200": (66.9, 989.4, 4800),
    "GeForce RTX 5090": (104.8, 209.5, 1792),
}


@pytest.mark.parametrize("name", gpu_structure.CARDS)
def test_peaks_are_those_of_the_data_sheet(name):
    card = known(name)
    float32, matrix, memory = PRINTED[name]
    assert card["float32_flops"] == pytest.approx(float32 * 1e12, rel=0.006)
    assert card["matrix_flops"] == pytest.approx(matrix * 1e12, rel=0.004)
    assert card["memory_bytes_per_s"] == pytest.approx(memory * 1e9, rel=0.003)
    # and of the table that percentages refer to
    assert card["printed_flops"] == pytest.approx(matrix * 1e12, rel=0.004)
    published = machine.published_peak(name, "float32")
    assert card["float32_flops"] == pytest.approx(published, rel=0.01)


def test_every_card_is_checked():
    assert PRINTED.keys() == gpu_structure.CARDS.keys()


def test_wrong_arithmetic_is_caught():
    """An FMA counted once, sparsity, one edge of the clock: all far off."""
    card = known("A100 SXM4 80GB")
    for wrong in (0.5, 2.0):
        assert card["matrix_flops"] * wrong != pytest.approx(312e12, rel=0.2)
        rate = card["memory_bytes_per_s"] * wrong
        assert rate != pytest.approx(2039e9, rel=0.2)
    assert known("GeForce RTX 4090")["matrix_flops"] < 200e12  # not 330


def test_by_hand():
    assert gpu_structure.peak_flops(108, 128, 1.41e9) == 108 * 128 * 1.41e9
    assert gpu_structure.memory_bytes_per_s(5120, 2.43e9) == 1555.2e9
    assert gpu_structure.ridge(312e12, 1.56e12) == 200.0
    card = known("A100 SXM4 40GB")
    assert card["register_bytes"] == 108 * 65536 * 4
    assert card["threads"] == 108 * 2048
    assert card["ridge"] == pytest.approx(200.5, rel=0.01)


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "warps"),
    [
        # CUDA's occupancy calculator
        ("8.0", 256, 32, 0, 64),
        ("8.0", 256, 33, 0, 48),  # 40 registers: 6 blocks
        ("8.0", 256, 64, 0, 32),
        ("8.0", 1024, 64, 0, 32),
        ("8.0", 1024, 65, 0, 0),  # too many to start
        ("8.0", 512, 16, 0, 64),
        ("8.0", 512, 64, 0, 32),
        ("8.0", 512, 65, 0, 16),  # given out by 8: 72 for each thread
        ("8.0", 128, 0, 80 * 1024, 8),  # two blocks of shared memory
        ("8.0", 64, 32, 0, 64),
        ("8.0", 32, 32, 0, 32),  # no more than 32 blocks
        ("8.0", 33, 32, 0, 64),  # a warp with one thread counts as one
        ("8.0", 256, 32, 48 * 1024, 24),  # three blocks of shared memory
        ("7.5", 256, 64, 0, 32),
        ("7.5", 32, 32, 0, 16),
        ("8.9", 512, 40, 0, 48),
        ("9.0", 128, 255, 0, 8),
    ],
)
def test_resident_warps(capability, threads, registers, shared, warps):
    sm = gpu_structure.multiprocessor(capability)
    assert resident_warps(threads, registers, shared, sm) == warps


class H100(types.SimpleNamespace):
    """What torch tells of one, with its clocks left out."""

    def __init__(self, **more):
        facts = {
            "name": "NVIDIA H100 80GB HBM3",
            "major": 9,
            "minor": 0,
            "multi_processor_count": 132,
            "max_threads_per_multi_processor": 2048,
            "regs_per_multiprocessor": 65536,
            "shared_memory_per_multiprocessor": 233472,
            "L2_cache_size": 52428800,
            "warp_size": 32,
            "total_memory": 85_000_000_000,
        }
        super().__init__(**facts | more)


CLOCKS = {"max_graphics_mhz": 1980, "max_memory_mhz": 2619}


def test_this_gpu_from_what_it_tells():
    card = gpu_structure.here("cuda", H100(), CLOCKS, bus_bits=5120)
    table = known("H100 80GB HBM3")
    for key in ("sms", "threads", "register_bytes", "shared_bytes"):
        assert card[key] == table[key], key
    assert card["l2_bytes"] == table["l2_bytes"]
    assert card["float32_flops"] == pytest.approx(66.9e12, rel=0.001)
    assert card["memory_bytes_per_s"] == pytest.approx(3352e9, rel=0.001)
    assert card["printed_flops"] == 989.4e12
    assert card["matrix_flops"] > card["printed_flops"]  # at the top clock


def test_what_is_unknown_stays_unknown(monkeypatch):
    unknown = H100(major=99, name="NVIDIA X1")
    card = gpu_structure.here("cuda", unknown, CLOCKS)
    assert card["float32_flops"] is None and card["matrix_flops"] is None
    assert card["memory_bytes_per_s"] is None and card["ridge"] is None
    assert card["register_bytes"] == 132 * 2**18
    assert card["printed_flops"] is None
    told = H100(memory_bus_width=5120, memory_clock_rate=2619000)
    card = gpu_structure.here("cuda", told, {"max_graphics_mhz": 1980})
    assert card["memory_bytes_per_s"] == pytest.approx(3352e9, rel=0.001)
    monkeypatch.setattr(torch.version, "hip", "6.4")  # gfx90a says 9.0, too
    card = gpu_structure.here("cuda", H100(), CLOCKS, bus_bits=5120)
    assert card["float32_flops"] is None
    assert card["memory_bytes_per_s"] > 3e12


def test_a_card_without_formula_is_still_shown(monkeypatch, capsys):
    unknown = H100(major=99, name="NVIDIA X1")
    card = gpu_structure.here("cuda", unknown, CLOCKS)
    monkeypatch.setattr(gpu_structure, "here", lambda *_, **__: card)
    monkeypatch.setattr(gpu_structure.bench, "device_of", torch.device)
    monkeypatch.setattr(machine, "_gpu", lambda _: None)
    rows = gpu_structure.main(["--smoke", "--device", "cuda"])
    assert rows[0]["name"] == "NVIDIA X1"
    assert "NVIDIA X1" in capsys.readouterr().out


def test_smoke(capsys):
    rows = gpu_structure.main(["--smoke", "--device", "cpu"])
    shown = capsys.readouterr()
    assert not shown.err
    assert "left out: this machine's own GPU" in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    assert [r["name"] for r in rows if "sms" in r] == list(PRINTED)
    drawn = gpu_structure.figure(rows)
    assert len(drawn.axes[0].patches) == 4 * len(PRINTED)


def test_without_nvml_the_bus_is_unknown(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert gpu_structure.bus_width("cuda") is None


@pytest.mark.parametrize("function", gpu_structure.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    assert foreign(function) is None
    alone = pasted(function)
    if function is resident_warps:
        sm = gpu_structure.multiprocessor("8.0")
        assert alone(256, 64, 0, sm) == 32
    elif function is gpu_structure.peak_flops:
        assert alone(2, 3, 5) == 30
    elif function is gpu_structure.ridge:
        assert alone(6, 3) == 2
    else:
        assert alone(16, 1) == 2


@pytest.mark.gpu
def test_this_gpu():
    """Its peaks are those of the table, if the table has it."""
    device = torch.device("cuda")
    bits = gpu_structure.bus_width(device)
    card = gpu_structure.here(device, bus_bits=bits)
    assert card["sms"] > 0 and card["register_bytes"] > 0
    if card["printed_flops"] and card["matrix_flops"]:
        ratio = card["matrix_flops"] / card["printed_flops"]
        assert 0.95 < ratio < 1.35  # vendors print a lower clock
    for name in gpu_structure.CARDS:
        if name in card["name"]:
            rate = known(name)["memory_bytes_per_s"]
            found = card["memory_bytes_per_s"]
            assert found == pytest.approx(rate, rel=0.04)
    gpu_structure.main(["--smoke", "--device", "cuda"])
