"""2.4.1 and 2.4.2: formulas by hand, sums right, a known link found."""

import os
import shutil
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from ch02_hardware import collective_bandwidth
from ch02_hardware.collective_bandwidth import (
    COLLECTIVES,
    GRADIENT,
    bus_factor,
    call_of,
    fits,
    gradient_rows,
    least_s,
    predicted_s,
    rate_of,
    shown,
    sizes_for,
)
from ch02_hardware.host_device_copy import fitted
from common import bench, gpt, ranks, timers


def private_network():
    """Return a prefix that runs a command where only loopback exists."""
    probe = ["unshare", "--map-root-user", "--net"]
    if shutil.which(probe[0]) is None or subprocess.call([*probe, "true"]):
        return []
    return [*probe, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


# --- formulas by hand --------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "two", "four", "eight"),
    [
        ("all-reduce", 1.0, 1.5, 1.75),
        ("all-gather", 0.5, 0.75, 0.875),
        ("reduce-scatter", 0.5, 0.75, 0.875),
        ("all-to-all", 0.5, 0.75, 0.875),
        ("broadcast", 1.0, 1.0, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, two, four, eight):
    found = [bus_factor(collective, n) for n in (2, 4, 8)]
    assert found == [two, four, eight]


def ring_bytes(world, size):
    """Return what each rank of a ring all-reduce sends, step by step."""
    part, sent = size // world, 0
    for _ in range(world - 1):  # reduce-scatter
        sent += part
    for _ in range(world - 1):  # all-gather
        sent += part
    return sent


def test_a_ring_sends_what_the_factor_says():
    for world in (2, 3, 4, 8):
        size = 840 * world
        assert ring_bytes(world, size) == pytest.approx(
            bus_factor("all-reduce", world) * size
        )


def synthetic(start_s, link, world=4, place="two namespaces", noise=None):
    """Return rows as a link of that bandwidth would give them."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for name in COLLECTIVES:
        for size in (2**18, 2**20, 2**22):
            took_s = start_s + size * bus_factor(name, world) / link
            if noise:
                took_s *= 1 + noise * torch.rand(1, generator=draw).item()
            row = {"place": place, "name": name, "ranks": world}
            row |= {"message_bytes": size, "took_s": took_s}
            rate = size / took_s
            row |= {"algorithm_bytes_per_s": rate, "right": True}
            row |= {"bus_bytes_per_s": rate, "sent_times": None}
            rows.append(row)
    return rows


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_fit_finds_the_link_from_every_collective(world):
    rows = synthetic(1e-3, 12.5e6, world)
    for row in fits(rows, 12.5e6):
        assert row["bus_bytes_per_s"] == pytest.approx(12.5e6, rel=1e-3)
        assert row["start_s"] == pytest.approx(1e-3, rel=1e-2)
        assert row["link_percent"] == pytest.approx(100, rel=1e-3)


def test_noise_of_ten_per_cent_leaves_it_within_twenty():
    for row in fits(synthetic(1e-3, 12.5e6, noise=0.1), 12.5e6):
        assert 80 <= row["link_percent"] <= 120


def test_the_largest_message_alone_does_not_find_the_link():
    """Its time holds the start as well: that is what the fit is for."""
    size, start_s, rate = 2**20, 0.1, 12.5e6
    took_s = start_s + size / rate
    assert size / took_s < 0.8 * rate
    counts = [size // 16, size // 4, size]
    found = fitted(counts, [start_s + n / rate for n in counts])
    assert found[1] == pytest.approx(rate, rel=1e-3)


def test_algorithm_bandwidth_is_not_the_links():
    """Without the factor, 8 ranks would seem to have half the link."""
    rows = fits(synthetic(1e-3, 12.5e6, world=8), 12.5e6)
    assert rows[0]["fit_bytes_per_s"] < 0.6 * 12.5e6


def test_gpt2s_gradient():
    counts = gpt.parameter_counts(gpt.preset("gpt2"))
    assert GRADIENT == 4 * counts["total"]
    fit = {"start_s": 1e-3, "fit_bytes_per_s": 1e8}
    assert predicted_s(fit, 5e8) == pytest.approx(5.001)
    assert predicted_s(fit, 5e8, 1e8) == pytest.approx(5.005)
    assert predicted_s(fit, 5e8, 3e8) == pytest.approx(5.002)
    rows = gradient_rows(fits(synthetic(0, 12.5e6, 2), None), {})
    (row,) = rows
    assert row["predicted_s"] == pytest.approx(GRADIENT / 12.5e6, rel=1e-3)
    assert row["sent_bytes"] == GRADIENT


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 12.5e6),
        ("2.5gbit", 312.5e6),
        ("800kbit", 1e5),
        ("8bit", 1),
        ("1mbps", 1e6),  # tc's spelling of bytes per second
    ],
)
def test_rates_as_tc_spells_them(text, rate):
    assert rate_of(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "100", "100 Mb/s", "", "..bit"])
def test_other_spellings_are_refused(text):
    with pytest.raises(bench.Refusal, match="write it like 100mbit"):
        rate_of(text)


def test_messages_suit_the_link():
    for text in ("10mbit", "100mbit", "1gbit", "40gbit"):
        sizes = sizes_for(False, rate_of(text))
        assert 2**20 <= max(sizes) <= 2**24
        assert sizes == sorted(sizes) and len(sizes) == 3
    assert max(sizes_for(False, 12.5e6)) / 12.5e6 < 0.5


# --- one process -------------------------------------------------------------


def test_the_right_answers_of_every_rank(monkeypatch):
    """As the ranks would have them, computed apart from the script."""
    world, size = 3, 4 * 12
    me = [
        types.SimpleNamespace(rank=r, world=world, device="cpu")
        for r in range(world)
    ]
    base = torch.arange(12.0) % 61
    sent = [(r + 1) * base for r in range(world)]
    for r in range(world):
        right = {c: call_of(c, size, me[r])[1] for c in COLLECTIVES}
        own = slice(4 * r, 4 * r + 4)
        assert torch.equal(right["all-reduce"], sum(sent))
        assert torch.equal(right["reduce-scatter"], sum(sent)[own])
        assert torch.equal(right["broadcast"], sent[0])
        parts = [sent[q][4 * q : 4 * q + 4] for q in range(world)]
        assert torch.equal(right["all-gather"], torch.cat(parts))
        parts = [sent[q][own] for q in range(world)]
        assert torch.equal(right["all-to-all"], torch.cat(parts))


def test_a_wrong_sum_stops_the_script():
    args = types.SimpleNamespace(smoke=True, rate=None)
    rows = synthetic(0, 1e6)
    rows[3]["right"] = False
    with pytest.raises(AssertionError, match="one host: all-gather"):
        shown(
            args,
            {
                "one host": rows
                and [
                    {k: v for k, v in row.items() if k != "place"}
                    for row in rows
                ]
            },
            None,
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "100000"], "cores serve"),
        (["--hosts", "--ranks", "3"], "even number"),
        (["--netns"], "add --hosts"),
        (["--hosts", "--rate", "1mbit"], "add --hosts --netns"),
        (["--hosts", "--netns", "--rate", "quick"], "like 100mbit"),
        (["--hosts", "--netns", "--rate", ""], "like 100mbit"),
        (["--hosts", "--netns", "--rate", "0mbit"], "1mbit is the least"),
        (["--hosts", "--netns", "--rate", "900kbit"], "1mbit is the least"),
    ],
)
def test_bad_requests_are_sentences(words, message, monkeypatch):
    monkeypatch.setattr(ranks, "spawn", None)  # no rank is started
    with pytest.raises(bench.Refusal, match=message):
        collective_bandwidth.main(["--smoke", "--device", "cpu", *words])


def test_the_least_rate_takes_minutes():
    rate = rate_of("1mbit")
    assert 120 < least_s(sizes_for(False, rate), rate, 2) < 400
    assert least_s([2**20], 2**20, 2) == 5 * (1 + 3 * 0.5 + 1)


def test_one_row_by_hand(monkeypatch):
    """A rank that takes 2 s and one that takes 3: the slowest counts.

    Bytes still on their way when they are counted would be missing.
    """
    happened, counts = [], iter([1000, 1000 + 3 * 64])
    times = iter([2.0, 2.0, 5.0, 2.0])

    def all_reduce(mine, operation):
        join = {
            dist.ReduceOp.MAX: torch.maximum,
            dist.ReduceOp.MIN: torch.minimum,
        }[operation]
        others = torch.where(mine == 2.0, 3.0, mine)
        mine.copy_(join(mine, others))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(
        timers, "wall", lambda *_: happened.append("call") or next(times)
    )
    monkeypatch.setattr(
        collective_bandwidth,
        "sent",
        lambda: happened.append("sent") or next(counts),
    )
    answer = torch.ones(1)
    monkeypatch.setattr(
        collective_bandwidth, "call_of", lambda *_: (lambda: answer, answer)
    )
    me = types.SimpleNamespace(rank=0, world=4, device="cpu")
    row = collective_bandwidth.timed("all-gather", 64, me, True)
    assert row == {
        "name": "all-gather",
        "ranks": 4,
        "right": True,
        "message_bytes": 64,
        "took_s": 3.0,
        "least_s": 3.0,
        "most_s": 5.0,
        "algorithm_bytes_per_s": 64 / 3,
        "bus_bytes_per_s": 16,  # three of four parts
        "sent_times": 1.0,
    }
    before, *between, after = happened[1:]
    assert happened[0] == "call"
    assert (before, after) == ("barrier", "sent")
    assert between == ["sent", *["barrier", "call"] * 3, "barrier"]


def test_the_machines_all_reduce_is_raised_by_what_was_seen():
    rows = synthetic(1e-3, 1e9, 2, "one host")
    rows += synthetic(1e-4, 2e9, 2, "two agents")
    rows += synthetic(1e-5, 9e9, 2)  # a link of its own
    rows += synthetic(1e-5, 9e9, 4, "one host")
    found = collective_bandwidth.seen(rows)["all_reduce"]
    assert found["latency_s"] == pytest.approx(1e-4 + 2**18 / 2e9)
    rate = 2**22 / (1e-4 + 2**22 / 2e9)
    assert found["bytes_per_s"] == pytest.approx(rate)
    assert collective_bandwidth.seen(rows[-5:]) == {}


def test_namespaces_that_cannot_be_made_are_a_sentence(monkeypatch):
    monkeypatch.setattr(ranks, "can_netns", lambda: "they need root")
    with pytest.raises(bench.Refusal, match="--netns: they need root"):
        collective_bandwidth.main(["--hosts", "--netns", "--device", "cpu"])


def test_backends_with_a_longer_way_are_named():
    args = types.SimpleNamespace(hosts=True, netns=True, rate="100mbit")
    rows = synthetic(1e-3, 12.5e6, 2)
    for row in rows:
        row["sent_times"] = 1.0
    words = list(collective_bandwidth.in_words(args, rows, fits(rows, 12.5e6)))
    assert words[0].startswith("the all-reduce's fit finds 100%")
    assert "NOT" not in words[0]
    named = {line.split()[0] for line in words[1:]}
    assert named == {"all-gather", "reduce-scatter", "all-to-all"}
    half = collective_bandwidth.in_words(args, rows, fits(rows, 25e6))
    assert "50% of 100mbit, NOT within" in next(half)


def test_bandwidths_that_are_not_alike_are_named_and_explained():
    args = types.SimpleNamespace(
        hosts=False, netns=False, rate=None, device=torch.device("cpu")
    )
    rows = synthetic(1e-3, 1e9, 2, "one host")
    assert not list(collective_bandwidth.in_words(args, rows, fits(rows, 0)))
    for row in rows:
        if row["name"] == "reduce-scatter":
            row["took_s"] *= 12
    words = list(collective_bandwidth.in_words(args, rows, fits(rows, 0)))
    assert words[0].startswith("one host: the bus bandwidths are NOT alike, ")
    assert "83.33 MB/s (reduce-scatter) to 1 GB/s (" in words[0]
    assert "gloo" in words[1]
    lines = "\n".join(words).splitlines()
    assert max(map(len, lines)) <= 100
    args.device = torch.device("cuda")  # whose backend is another
    words = list(collective_bandwidth.in_words(args, rows, fits(rows, 0)))
    assert len(words) == 1


def test_a_line_that_fits_badly_is_named():
    args = types.SimpleNamespace(
        hosts=False, netns=False, rate=None, device=torch.device("cpu")
    )
    rows = synthetic(1e-3, 1e9, 2, "one host")
    for row in rows:
        if row["message_bytes"] == 2**20:
            row["took_s"] *= 10
    words = list(collective_bandwidth.in_words(args, rows, fits(rows, 0)))
    assert words[0].startswith("a straight line is ")


def test_the_picture():
    rows = synthetic(1e-3, 12.5e6, 2) + synthetic(1e-4, 1e9, 2, "one host")
    drawn = collective_bandwidth.figure(rows + fits(rows, None))
    assert [len(axes.lines) for axes in drawn.axes] == [10, 10]


# --- ranks -------------------------------------------------------------------


def checked(world, names):
    """Be one rank: call techniques pasted under torch; say what is right."""
    import inspect

    me = ranks.init(timeout_s=300)
    right = {}
    for collective, name in zip(COLLECTIVES, names, strict=True):
        call, answer = call_of(collective, 4 * 60, me)
        source = inspect.getsource(getattr(collective_bandwidth, name))
        space = {"torch": torch}
        exec(source, space)
        found = space[name](*call.args)
        right[collective] = torch.equal(found, answer)
    numbers = torch.ones(4) * (me.rank + 1)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)  # a known wrong one
    right["an average"] = numbers[0].item() == world * (world + 1) / 2
    return right


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_techniques_are_right_when_pasted(world):
    names = [c.replace("-", "_") for c in COLLECTIVES]
    for right in ranks.spawn(checked, world, world, names, timeout_s=300):
        assert not right.pop("an average")
        assert all(right.values()), right


@pytest.mark.ranks
def test_smoke(capsys):
    rows = collective_bandwidth.main(["--smoke", "--device", "cpu"])
    assert [row["right"] for row in rows[:10]] == [True] * 10
    assert {row["place"] for row in rows} == {"one host"}
    shown = capsys.readouterr()
    assert "all sums and parts are right" in shown.out
    assert "Warning" not in shown.err


@pytest.mark.ranks
def test_two_agents_on_loopback_are_labelled(capsys):
    words = ["--smoke", "--device", "cpu", "--hosts"]
    rows = collective_bandwidth.main(words)
    places = list(dict.fromkeys(row["place"] for row in rows))
    assert places == ["one host", "two agents"]
    assert "their link is this machine's memory" in capsys.readouterr().out


@pytest.mark.ranks
def test_torchrun_starts_the_same_script():
    done = subprocess.run(
        [
            *private_network(),  # torchrun's store listens on every interface
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m"),
            *("ch02_hardware.collective_bandwidth", "--smoke"),
            *("--device", "cpu"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all sums and parts are right") == 1


@pytest.mark.ranks
@pytest.mark.root
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc")
def test_the_fit_recovers_the_configured_bandwidth(capsys):
    """The link is so slow that no busy neighbour makes it slower."""
    words = ["--smoke", "--device", "cpu", "--hosts", "--netns"]
    for _ in range(3):  # who waits for a core saves up the shaper's credit
        rows = collective_bandwidth.main([*words, "--rate", "40mbit"])
        found = [row for row in rows if row.get("link_percent")]
        assert found[0]["name"] == "all-reduce"
        if 80 <= found[0]["link_percent"] <= 120:
            break
    assert 80 <= found[0]["link_percent"] <= 120
    assert "of 40mbit, within 20%" in capsys.readouterr().out
    # counted at the interface: what the formula says, and TCP's headers
    counted = [row for row in rows if row.get("sent_times")]
    assert len(counted) == 3 * len(COLLECTIVES)
    for row in counted:
        times = row["sent_times"] / bus_factor(row["name"], 2)
        longer = row["name"] == "reduce-scatter"  # gloo sums whole messages
        assert 1 <= times < (2.3 if longer else 1.15), row


def test_the_factor_works_when_pasted(pasted):
    assert pasted(bus_factor)("all-reduce", 4) == 1.5


@pytest.mark.gpu
@pytest.mark.ranks
def test_smoke_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows = collective_bandwidth.main(["--smoke", "--device", "cuda"])
    assert all(row["right"] for row in rows if "right" in row)
