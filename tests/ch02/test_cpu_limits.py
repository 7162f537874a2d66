"""CPU limits: intensity, the crossing, and the same answer on both sides."""

import pytest
import torch
from test_techniques import foreign

from ch02_hardware import cpu_limits, gpu_structure
from ch02_hardware.cpu_limits import (
    least_s,
    overtaken_at,
    there_and_back,
    uses_per_copy,
)

CPU = torch.device("cpu")
PEAKS = 3e11, 2e10  # FLOP/s and bytes/s
EMPTY = {"a + b copied": "not by 2048", "a @ b copied": "not by 2048"}
MANY = [n for n in cpu_limits.SIZES if n <= cpu_limits.MOST]


def here(flops_per_s=PEAKS[0], bytes_per_s=PEAKS[1], sizes=MANY):
    """Return times of a CPU that keeps to its ceilings at every size."""
    found = {}
    for name in cpu_limits.OPERATORS:
        found[name] = {}
        for n in sizes:
            flops, inward, outward = cpu_limits.work(name, n)
            found[name][n] = least_s(
                flops, inward + outward, flops_per_s, bytes_per_s
            )
    return found


def card(**more):
    return {
        "name": "a GPU",
        "flops_per_s": 2e13,
        "bytes_per_s": 2e12,
        "in_per_s": 2.5e10,
        "out_per_s": 2.5e10,
        "order_s": 1e-5,
        "start_s": 1e-5,
    } | more


def test_intensity_by_hand():
    n = 6
    flops, there, back = cpu_limits.work("a @ b", n)
    assert (flops, there, back) == (432, 288, 144)
    assert cpu_limits.intensity(flops, there + back) == 432 / 432 == n / 6
    flops, there, back = cpu_limits.work("a + b", n)
    assert cpu_limits.intensity(flops, there + back) == 1 / 12


def test_the_slower_resource_decides():
    assert least_s(100, 10, 10, 10) == 10  # arithmetic
    assert least_s(10, 100, 10, 10) == 10  # memory
    assert least_s(10, 100, 10, 1) == 100


def test_copies_are_counted_in_both_directions():
    found = card(in_per_s=8.0, out_per_s=2.0, start_s=0.0)
    _, copies = cpu_limits.predicted("a + b", 1, found)
    assert copies == 8 / 8 + 4 / 2


def test_each_matrix_that_crosses_costs_the_start_of_a_copy(monkeypatch):
    more = cpu_limits.OPERATORS | {
        "softmax": (torch.softmax, lambda n: 5 * n**2, 1, 1)
    }
    monkeypatch.setattr(cpu_limits, "OPERATORS", more)
    for name, count in (("a + b", 3), ("a @ b", 3), ("softmax", 2)):
        there, copies = cpu_limits.predicted(name, 64, card(start_s=0.0))
        found = cpu_limits.predicted(name, 64, card(start_s=7.0))
        assert found == (there, pytest.approx(count * 7 + copies, abs=1e-12))


@pytest.mark.parametrize(
    ("here", "there", "at"),
    [
        ([1, 2, 3, 4], [2, 2, 2, 2], 30),
        ([1, 2, 3, 4], [0, 1, 2, 3], 10),
        ([1, 2, 3, 4], [5, 5, 5, 5], None),
        ([1, 2, 3, 4], [1, 2, 3, 4], None),  # as quick is not quicker
        ([3, 1, 3, 4], [2, 2, 2, 2], 30),  # an earlier gain does not last
        ([3, 3, 3, 1], [2, 2, 2, 2], None),
    ],
)
def test_overtaken_for_good(here, there, at):
    assert overtaken_at([10, 20, 30, 40], here, there) == at


def test_uses_pay_for_a_copy():
    assert uses_per_copy(10, 3, 1) == 5
    assert uses_per_copy(10, 4, 1) == 4  # three gain 9
    assert uses_per_copy(1, 4, 1) == 1
    assert uses_per_copy(10, 1, 1) is None
    assert uses_per_copy(10, 1, 2) is None


def test_the_crossing_is_where_the_formulas_meet():
    """2 n^3 / P = 12 n^2 / L has one solution when nothing else takes time."""
    no_starts = {"order_s": 0.0, "start_s": 0.0}
    found = card(flops_per_s=1e30, bytes_per_s=1e30, **no_starts)
    times = here(3e11, 1e12, [16, 71, 73, 200])  # no memory-bound product
    assert 12 / found["in_per_s"] * 3e11 / 2 == pytest.approx(72)
    row = cpu_limits.crossing(found, times)
    assert row["a @ b copied"] == 73
    assert row["a @ b resident"] == 16


def test_a_sum_is_never_worth_a_slower_link():
    row = cpu_limits.crossing(card(in_per_s=1e10, out_per_s=1e10), here())
    assert row["a + b copied"] == "not by 2048"
    assert row["a + b resident"] is not None
    assert row["a + b uses"] > 1
    row = cpu_limits.crossing(card(in_per_s=1e11, out_per_s=1e11), here())
    assert row["a + b copied"] < 2048  # a link quicker than this memory
    slow = cpu_limits.crossing(card(flops_per_s=1e9, bytes_per_s=1e9), here())
    assert slow["a @ b copied"] == slow["a @ b resident"] == "not by 2048"
    assert slow["a @ b uses"] is None


def test_forgetting_the_copies_is_caught():
    row = cpu_limits.crossing(card(), here())
    assert row["a @ b copied"] > row["a @ b resident"]


def test_what_a_cache_holds_is_not_taken_from_the_memorys_rate():
    """A link between memory's rate and the cache's: the formula says yes."""
    quick = card(in_per_s=3.15e10, out_per_s=3.15e10)
    by_memory = cpu_limits.crossing(quick, here())
    assert by_memory["a + b copied"] < 1024
    in_cache = cpu_limits.crossing(quick, here(bytes_per_s=5e10))
    assert in_cache["a + b copied"] == "not by 2048"


def test_a_crossing_that_the_start_decides_is_named():
    times = here(bytes_per_s=1e11)
    row = cpu_limits.crossing(card(order_s=1e-5), times)
    assert row["a @ b resident by start"] is True
    assert "a @ b, data there (1 of 2)" in cpu_limits.starts(
        [row, row | {"a @ b resident by start": False}]
    )
    row = cpu_limits.crossing(card(start_s=1e-9), times)
    assert row["a @ b resident by start"] is True  # the kernel's alone
    assert row["a @ b copied by start"] is False
    row = cpu_limits.crossing(card(order_s=1e-9), times)
    assert row["a @ b resident by start"] is False
    assert row["a @ b copied by start"] is True  # the copies'
    row = cpu_limits.crossing(card(order_s=1e-9, start_s=1e-9), times)
    assert not any(v for k, v in row.items() if k.endswith("by start"))
    assert cpu_limits.starts([row]) is None


def test_the_copies_price_names_what_it_leaves_out():
    for cuda in (False, True):
        said = cpu_limits.assumed(cuda)
        assert "10 µs by assumption" in said and "pageable" in said
        assert ("as measured here" in said) == cuda


def test_no_prediction_is_drawn_where_a_cache_holds_the_data(monkeypatch):
    """The line of memory's rate would cross where the table has no answer."""
    cache = 12 * 1024**2
    monkeypatch.setattr(cpu_limits.ceilings, "cache_bytes", lambda: cache)
    gpu = cpu_limits.gpu("A100 SXM4 80GB")
    none = dict.fromkeys(cpu_limits.OPERATORS, {})
    lines = cpu_limits.curves(PEAKS, gpu, CPU, none, 0.0)
    drawn = {name: [] for name in none}
    for row in lines:
        if row["here_s"]:
            drawn[row["curve"]].append(row["n"])
    assert drawn["a + b"][0] == 1218 and drawn["a + b"][-1] == 16384
    assert drawn["a @ b"][0] == 91  # arithmetic decides from n / 6 = 15 on
    axes = cpu_limits.figure(lines + [{"name": gpu["name"]} | EMPTY]).axes
    for name, place in zip(drawn, axes, strict=True):
        (line,) = [x for x in place.lines if "CPU" in x.get_label()]
        assert list(line.get_xdata()) == drawn[name]


def test_measured_points_that_say_otherwise_are_named():
    row = {"name": "a GPU", "a + b copied": 100, "a @ b copied": "not by 200"}

    def line(curve, n, cpu_s, gpu_s):
        return {"curve": curve, "n": n, "cpu_s": cpu_s, "gpu_s": gpu_s}

    agree = [
        line("a + b", 50, 1.0, 2.0),
        line("a + b", 100, 2.0, 1.0),
        line("a @ b", 200, 1.0, 2.0),
        line("a + b", 400, None, 1.0),  # not measured
        {"curve": "a + b", "n": 200, "cpu_s": 1.0},
    ]
    assert cpu_limits.contradictions(row, agree) == []
    others = [
        line("a + b", 50, 2.0, 1.0),
        line("a + b", 200, 1.0, 1.6),
        line("a @ b", 200, 2.0, 1.0),
    ]
    first, second = cpu_limits.contradictions(row, agree + others)
    assert first.startswith("measured otherwise")
    assert first.endswith("a + b at n = 50, 200")
    assert second.endswith("a @ b at n = 200")


def test_the_sweep_keeps_the_least_and_less_work_is_no_longer(monkeypatch):
    """A burst hits one size of one round, another all rounds of one size."""
    times = {16: [1.0, 1.0], 19: [9.0, 9.0], 23: [3.0, 8.0]}
    asked = []

    def shortest(call, device, budget_s):
        n = len(call.args[0])
        asked.append((call.func, n))
        round_ = sum(done == asked[-1] for done in asked) - 1
        return times[n][round_]

    monkeypatch.setattr(cpu_limits.ceilings, "shortest", shortest)
    found = cpu_limits.swept([16, 19, 23], 0.0, 2)
    assert found["a + b"] == found["a @ b"] == {16: 1.0, 19: 3.0, 23: 3.0}
    assert len(asked) == 2 * 2 * 3


def test_there_and_back_gives_the_same_bits():
    a, b = cpu_limits.inputs(33)
    for call, *_ in cpu_limits.OPERATORS.values():
        found = there_and_back(call, CPU, a, b)
        assert torch.equal(found, call(a, b))


def test_every_input_crosses_and_one_result_returns():
    class Far:
        crossed = []

        def __init__(self, value):
            self.value = value

        def to(self, device):
            Far.crossed.append((self.value, device))
            return Far(10 * self.value)

        def cpu(self):
            Far.crossed.append((self.value, "cpu"))
            return self.value

    found = there_and_back(
        lambda x, y: Far(x.value + y.value), "gpu", Far(1), Far(2)
    )
    assert found == 30
    assert Far.crossed == [(1, "gpu"), (2, "gpu"), (30, "cpu")]


def test_stated_gpus_have_their_data_sheets_ceilings():
    found = cpu_limits.gpu("A100 SXM4 40GB")
    assert found["flops_per_s"] == pytest.approx(19.5e12, rel=0.01)
    assert found["bytes_per_s"] == pytest.approx(1555e9, rel=0.01)
    assert found["in_per_s"] == 31.5e9
    assert found["order_s"] == cpu_limits.ORDER_S


def test_smoke(capsys):
    rows = cpu_limits.main(["--smoke", "--device", "cpu", "--gpu", "T4"])
    shown = capsys.readouterr()
    assert not shown.err
    assert "left out: the same measured on a GPU" in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())
    names = [row["name"] for row in rows if "link_bytes_per_s" in row]
    assert names == list(gpu_structure.CARDS)
    assert {row["name"] for row in rows if "curve" in row} == {"T4"}
    measured = [row for row in rows if row.get("cpu_s")]
    assert [row["n"] for row in measured] == 2 * cpu_limits.SIZES[:3]
    assert not any("gpu_s" in row for row in rows)
    drawn = cpu_limits.figure(rows)
    assert len(drawn.axes) == 2


@pytest.mark.parametrize("function", cpu_limits.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    assert foreign(function) is None
    alone = pasted(function)
    if function is cpu_limits.intensity:
        assert alone(6, 3) == 2
    elif function is least_s:
        assert alone(6, 3, 2, 1) == 3
    elif function is there_and_back:
        assert int(alone(torch.neg, CPU, torch.tensor(3))) == -3
    elif function is overtaken_at:
        assert alone([1, 2], [1, 3], [2, 2]) == 2
    else:
        assert alone(4, 3, 1) == 2


@pytest.mark.gpu
def test_results_agree_on_a_gpu():
    device = torch.device("cuda")
    a, b = cpu_limits.inputs(64)
    for call, *_ in cpu_limits.OPERATORS.values():
        found = there_and_back(call, device, a, b)
        assert found.device.type == "cpu"
        assert torch.allclose(found, call(a, b), rtol=1e-4, atol=1e-4)
    rows = cpu_limits.main(["--smoke", "--device", "cuda"])
    assert any("gpu_s" in row for row in rows)
    assert any(row["name"] == "GPU, copies included" for row in rows)
    cpu_limits.figure(rows)
