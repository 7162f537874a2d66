"""6.5.1: a quarter of the bytes, the same bits."""

import warnings

import pytest
import torch
from late_device import LateDevice

from ch06_single_gpu_perf import uint8_copies
from ch06_single_gpu_perf.uint8_copies import (
    Copies,
    converted_on_device,
    converted_on_host,
    ids_widened_on_device,
    ids_widened_on_host,
)
from common import bench

CPU = torch.device("cpu")


def every_pixel():
    """Return a batch in which each channel has each of the 256 values."""
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    return pixels.repeat(2, 3, 1, 1)


def both(device=CPU, pixels=None):
    pixels = every_pixel() if pixels is None else pixels
    staging = torch.empty(pixels.shape)
    return uint8_copies.arrivals(pixels, staging, device)


# --- the same bits -----------------------------------------------------------


def test_values_are_the_same_bits():
    found = {name: arrive() for name, arrive in both().items()}
    assert found["float32"].dtype == found["uint8"].dtype == torch.float32
    assert torch.equal(found["float32"], found["uint8"])


def test_values_are_normalised():
    pixels = every_pixel()
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for found in [arrive() for arrive in both(pixels=pixels).values()]:
        for channel in range(3):
            right = pixels[:, channel].double() / 255
            right = (right - mean[channel]) / deviation[channel]
            error = (found[:, channel] - right).abs().max()
            assert error < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        # a division by the deviation rounds otherwise than a product
        lambda pixels, mean, scale: (pixels - mean) / scale.reciprocal(),
        # half the bytes, a third of the digits
        lambda pixels, mean, scale: ((pixels - mean) * scale).half().float(),
        # in bytes: below zero it wraps round
        lambda pixels, mean, scale: (pixels - mean.byte()) * scale,
        # the channels' axis taken for another
        lambda pixels, mean, scale: (pixels - mean[0]) * scale[0],
    ],
)
def test_other_arithmetic_fails_the_comparison(wrong):
    args = bench.cli("6.5.1  Wrong · 錯", ["--smoke", "--device", "cpu"])
    pixels = every_pixel()
    constants = uint8_copies.normalisation(CPU)
    variants = {
        "float32": lambda: both()["float32"],
        "uint8": lambda: lambda: wrong(pixels, *constants),
    }
    with pytest.raises(AssertionError, match="disagrees"):
        bench.compare(args, variants, tolerance=None)


def test_gradients_are_the_same_bits():
    pixels, staging = uint8_copies.make_pixels(2, 32, False)
    answers = []
    for arrive in both(pixels=pixels).values():
        found = uint8_copies.first_layer(CPU)(arrive())
        assert len(found["gradients"]) == 2
        assert all(g.abs().sum() > 0 for g in found["gradients"])
        answers.append([found["loss"], *found["gradients"]])
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


def test_ids_look_up_the_same_rows():
    table = torch.randn(65536, 2)
    ids = torch.tensor([0, 1, 32767, 32768, 50256, 65535], dtype=torch.int32)
    right = torch.nn.functional.embedding(ids, table)
    stored = ids.to(torch.uint16)
    for found in (
        ids_widened_on_host(stored, CPU),
        ids_widened_on_device(stored, CPU),
        ids_widened_on_device(ids, CPU),
    ):
        assert found.dtype == torch.int64
        looked_up = torch.nn.functional.embedding(found, table)
        assert torch.equal(looked_up, right)
    # int16 has room for half of them
    narrow = ids_widened_on_device(ids.short(), CPU)
    assert not torch.equal(narrow, ids.long())


# --- bytes, counted ----------------------------------------------------------


def test_bytes_of_a_batch_on_a_cpu():
    found = {n: uint8_copies.counted(call) for n, call in both().items()}
    n = every_pixel().numel()
    assert found["float32"] == {
        "copied_bytes": 4 * n,
        "widened_before": n,
        "widened_after": 0,
    }
    assert found["uint8"] == {
        "copied_bytes": n,
        "widened_before": 0,
        "widened_after": n,
    }


def test_bytes_of_token_ids():
    calls = uint8_copies.token_arrivals(2, 8, CPU)
    found = {n: uint8_copies.counted(call) for n, call in calls.items()}
    copied = [row["copied_bytes"] for row in found.values()]
    assert copied == [8 * 16, 4 * 16, 2 * 16]
    before = [row["widened_before"] for row in found.values()]
    after = [row["widened_after"] for row in found.values()]
    assert (before, after) == ([16, 0, 0], [0, 16, 16])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_bytes_and_bits_across_a_link(seed):
    """A second memory: what changes place is counted, once."""
    right = both()["float32"]()
    n = right.numel()
    with LateDevice(seed) as late:
        for name, width in (("float32", 4), ("uint8", 1)):
            arrive = both(late.device)[name]
            with Copies() as found:
                values = arrive()
            assert found.copied_bytes == width * n
            assert torch.equal(values.cpu(), right)


def test_who_converts_in_a_single_call():
    """``.to(device, float32)`` sends floats, unless it need not wait."""
    pixels = every_pixel()
    n = pixels.numel()
    with LateDevice() as late:
        for flag, width in ((False, 4), (True, 1)):
            with Copies() as found:
                pixels.to(late.device, torch.float32, non_blocking=flag)
            assert found.copied_bytes == width * n
            place = torch.empty(pixels.shape, device=late.device)
            with Copies() as found:
                place.copy_(pixels, non_blocking=flag)
            assert found.copied_bytes == width * n


def test_the_count_sees_copies_only():
    x = torch.ones(8)
    with Copies() as found:
        x.add(1).view(2, 4).sum()
        x.to(torch.bfloat16)  # narrower: no copy, and nothing widened
        torch.zeros(4)
    assert found.copied_bytes == 0
    assert found.widened_before == found.widened_after == 0
    with Copies() as found:
        torch.empty(8).copy_(x)
        x.to("cpu")  # is there already
    assert found.copied_bytes == 32


def test_the_wrong_way_round_is_seen_by_the_count():
    """Converted before the copy after all: same bits, four bytes each."""
    device, (mean, scale) = CPU, uint8_copies.normalisation(CPU)

    def early(pixels):
        return ((pixels.float() - mean) * scale).to(device, copy=True)

    with Copies() as found:
        values = early(every_pixel())
    assert torch.equal(values, both()["uint8"]())
    assert found.copied_bytes == 4 * values.numel()


# --- the prediction ----------------------------------------------------------


def test_the_prediction_by_hand(monkeypatch):
    peaks = {
        "cpu": {"copy_bytes_per_s": 10.0},
        "cuda": {"copy_bytes_per_s": 100.0, "host_to_device_bytes_per_s": 2.0},
        "mps": {"copy_bytes_per_s": 50.0, "host_to_device_bytes_per_s": None},
    }
    monkeypatch.setattr(
        uint8_copies.machine, "peaks", lambda d: peaks[torch.device(d).type]
    )

    def predict(device):
        args = type("Args", (), {"smoke": False, "device": device})
        return uint8_copies.predict(args, 100)

    found = predict(torch.device("cpu"))
    assert found["float32"] == pytest.approx(2100 / 10)
    assert found["uint8"] == pytest.approx(1500 / 10)
    found = predict(torch.device("cuda"))
    assert found["float32"] == pytest.approx(1300 / 10 + 400 / 2)
    assert found["uint8"] == pytest.approx(100 / 2 + 1300 / 100)
    assert predict(torch.device("mps")) is None


# --- the script --------------------------------------------------------------


def test_smoke(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = uint8_copies.main(["--smoke", "--device", "cpu"])
    counts, times = rows[:5], rows[5:]
    assert [row["name"] for row in counts[2:]] == [
        "int64 ids",
        "int32 ids",
        "uint16 ids",
    ]
    assert [row["worst_error"] for row in times] == [0, 0, 0, 0]
    assert [row["compared"] for row in times] == [1, 1, 3, 3]
    shown = capsys.readouterr()
    assert "left out: the link to a GPU" in shown.out
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())


def test_techniques_work_when_pasted(pasted):
    pixels, constants = every_pixel(), uint8_copies.normalisation(CPU)
    right = both()["float32"]()
    staging = torch.empty(pixels.shape)
    host = pasted(converted_on_host)
    assert torch.equal(host(pixels, *constants, staging, CPU), right)
    device = pasted(converted_on_device)
    assert torch.equal(device(pixels, *constants, CPU), right)
    ids = torch.tensor([1, 50256], dtype=torch.uint16)
    for function in (ids_widened_on_host, ids_widened_on_device):
        assert pasted(function)(ids, CPU).tolist() == [1, 50256]


# --- on a GPU ----------------------------------------------------------------


def link_bytes(function):
    """Return the bytes that the driver itself copied to the device."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities()
    ) as profile:
        function()
        torch.cuda.synchronize()
    return sum(
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if "HtoD" in event.name()
    )


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu():
    device = torch.device("cuda")
    right = both()["float32"]()
    for arrive in both(device).values():
        assert torch.equal(arrive().cpu(), right)
    ids = torch.tensor([0, 32768, 65535], dtype=torch.uint16)
    found = ids_widened_on_device(ids, device)
    assert found.cpu().tolist() == [0, 32768, 65535]


@pytest.mark.gpu
def test_the_driver_counts_the_same_bytes():
    device = torch.device("cuda")
    pixels = every_pixel()
    n = pixels.numel()
    calls = both(device)
    assert link_bytes(calls["float32"]) == 4 * n
    assert link_bytes(calls["uint8"]) == n
    for flag, width in ((False, 4), (True, 1)):
        copied = link_bytes(
            lambda flag=flag: pixels.to(
                device, torch.float32, non_blocking=flag
            )
        )
        assert copied == width * n


@pytest.mark.gpu
def test_smoke_on_a_gpu():
    rows = uint8_copies.main(["--smoke", "--device", "cuda"])
    assert [row["worst_error"] for row in rows[5:7]] == [0, 0]
