"""Programs with a planted fault, profiled here, and the same ones cured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ch04_profiling import find_bottleneck
from common import ranks

JOB = Path(__file__).resolve().parent / "reducing_job.py"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kinds(report):
    return [finding["kind"] for finding in report["findings"]]


def share(report, part):
    (rank,) = report["ranks"]
    return rank["parts"][part] / rank["span_us"]


BIG = 600  # rows and columns: a product of milliseconds


def products(count=4):
    x = torch.ones(BIG, BIG)
    return lambda: [x @ x for _ in range(count)][-1]


def test_a_loader_that_is_late_and_one_that_is_not():
    """40 ms of waiting before 20 ms of products, then none."""
    multiply = products()

    def program(seconds):
        data = find_bottleneck.Photographs(80, seconds)
        batches = iter(torch.utils.data.DataLoader(data, batch_size=4))

        def step():
            next(batches)
            multiply()

        return step

    fault = find_bottleneck.profile(program(0.05))
    assert kinds(fault)[0] == "data-bound"
    assert share(fault, "idle_loader") > 0.3
    cured = find_bottleneck.profile(program(0.0))
    assert share(cured, "idle_loader") < 0.5 * share(fault, "idle_loader")
    assert kinds(cured)[0] != "data-bound"


def test_many_tiny_operators_and_a_few_large_ones():
    x = torch.ones(8)

    def tiny():
        y = x
        for _ in range(2000):
            y = y + 1

    fault = find_bottleneck.profile(tiny)
    assert kinds(fault)[0] == "host-bound"
    evidence = fault["findings"][0]["evidence"].replace(",", "")
    assert int(re.search(r"(\d+) operators of", evidence)[1]) >= 8000
    assert "host-bound" not in kinds(find_bottleneck.profile(products(8)))


def test_a_storm_of_item_and_one_at_the_end():
    values, multiply = torch.ones(400), products(2)

    def storm():
        multiply()
        return sum(values[i].item() for i in range(400))

    def once():
        multiply()
        return values.sum().item()

    fault = find_bottleneck.profile(storm)
    assert kinds(fault)[0] == "sync-bound"
    assert "1,600 × .item()" in fault["findings"][0]["evidence"]
    assert "sync-bound" not in kinds(find_bottleneck.profile(once))


def test_a_step_that_recompiles_and_one_that_does_not():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a: (a * 2).sin().sum(), backend="eager", dynamic=False
    )
    sizes = iter(range(3, 20))
    multiply = products()

    def changing():
        compiled(torch.ones(next(sizes), 50))

    def constant():
        compiled(torch.ones(3, 50))
        multiply()

    fault = find_bottleneck.profile(changing)
    assert kinds(fault)[0] == "compilation"
    assert "4 compilations" in fault["findings"][0]["evidence"]
    assert "compilation" in {w["kind"] for w in fault["warnings"]}
    assert "compilation" not in kinds(find_bottleneck.profile(constant))
    torch._dynamo.reset()


def test_the_profile_of_a_step_can_be_kept(tmp_path):
    target = tmp_path / "kept.json"
    report = find_bottleneck.profile(products(), steps=3, path=target)
    assert len(report["ranks"][0]["steps"]) == 3
    assert json.loads(target.read_text())["traceEvents"]
    assert kinds(report)[0] == "compute-bound"


def reduced(folder, late):
    """Return the report of three ranks, one of which may come late."""
    folder.mkdir()
    port = str(ranks.free_port())
    started = []
    for rank in range(3):
        words = [sys.executable, str(JOB), str(folder), str(late)]
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        started.append(subprocess.Popen(words, env=os.environ | place))
    try:
        assert [process.wait(300) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
    report = find_bottleneck.read(folder)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2]
    return report


def lost_us(report):
    """Return {rank that is called late: time the others lose to it}."""
    spans = {rank["rank"]: rank["span_us"] for rank in report["ranks"]}
    return {
        f["rank"]: f["gain_bound"] * spans[f["rank"]]
        for f in report["findings"]
        if f["kind"] == "straggler"
    }


@pytest.mark.ranks
def test_a_late_rank_under_gloo_and_none(tmp_path):
    """Neighbours may delay a rank, though never as one that sleeps is."""
    fault = lost_us(reduced(tmp_path / "late", 1))
    assert list(fault) == [1]
    lost = []
    while len(lost) < 3 and min(lost, default=fault[1]) >= fault[1] / 3:
        cured = lost_us(reduced(tmp_path / f"even-{len(lost)}", None))
        lost.append(sum(cured.values()))
    assert min(lost) < fault[1] / 3


@pytest.mark.gpu
def test_a_step_on_a_gpu():
    """Large products bound it; a value asked for after each, the waiting."""
    x = torch.ones(4096, 4096, device="cuda")
    small = torch.ones(8, device="cuda")

    def busy():
        for _ in range(20):
            x @ x

    def asking():
        for _ in range(50):
            small.add_(1).sum().item()

    report = find_bottleneck.profile(busy)
    assert kinds(report)[0] == "compute-bound"
    assert share(report, "gemm") > 0.8
    assert {"sync-bound", "host-bound"} & set(
        kinds(find_bottleneck.profile(asking))
    )
