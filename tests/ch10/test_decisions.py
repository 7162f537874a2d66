"""What the ladder decides, told what it would have measured."""

import types

import pytest

from ch10_gpt2 import ladder, race, steps, train
from chapters import record
from common import bench


@pytest.fixture
def plan(tmp_path):
    return race.Plan(
        {"device": "cpu", "preset": "gpt2-tiny", "T": 32, "sequences": 4},
        "ch10_gpt2.steps", False, 1, 2, False, 100.0, tmp_path, {},
    )  # fmt: skip


@pytest.fixture
def clock(plan, monkeypatch):
    """Let time pass by hand: ``clock.now``, in seconds since the start."""
    clock = types.SimpleNamespace(now=0.0)
    plan.begun = 0.0
    time = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(ladder, "time", time)
    return clock


class Book:
    """A log that is only kept in memory."""

    def __init__(self):
        self.data = {"rows": []}

    def row(self, track, name, section):
        rows = self.data["rows"]
        return next((r for r in rows if r["step"] == name), None)

    def add(self, row):
        self.data["rows"].append(row)

    def save(self):
        pass


# --- the budget ---


def test_a_row_gets_its_share_of_what_is_left(plan, clock):
    plan.overheads = [5.0]
    clock.now = 20.0
    assert ladder.row_seconds(plan, 4) == 80 / 4 - 5
    assert ladder.row_seconds(plan, 80) == 2.0  # the least


def test_a_budget_is_used_up_with_some_to_spare(plan, clock):
    clock.now = 114.0
    assert not ladder.is_late(plan)
    clock.now = 116.0
    assert ladder.is_late(plan)
    plan.smoke = True
    assert not ladder.is_late(plan)


def climbed(plan, monkeypatch, until=None, ahead=0, seconds=0.0, clock=None):
    """Climb the speed track with rows that cost ``seconds`` each."""
    left = []

    def try_step(plan, step, *more, **how):
        if clock:
            clock.now += seconds
        return ladder.empty_row(step, verdict="kept")

    def row_seconds(plan, rows_left):
        left.append(rows_left)
        return 1.0

    monkeypatch.setattr(ladder, "try_step", try_step)
    monkeypatch.setattr(ladder, "row_seconds", row_seconds)
    book = Book()
    ladder.climb(plan, "speed", book, until, ahead)
    return book.data["rows"], left


def test_time_is_divided_among_the_rows_that_will_run(plan, monkeypatch):
    rows, left = climbed(plan, monkeypatch)
    count = len(steps.SPEED) + 1  # the summary
    assert [r["step"] for r in rows][-1] == "summary"
    assert left == list(range(count, 0, -1))
    rows, left = climbed(plan, monkeypatch, until="10.4.3", ahead=2)
    assert [r["section"] for r in rows] == ["10.4.1", "10.4.2", "10.4.3"]
    assert left == [5, 4, 3]
    rows, left = climbed(plan, monkeypatch, until="10.4.6")
    assert [r["section"] for r in rows][-2:] == ["10.4.6", "10.4.6"]
    assert left[-1] == 1


def test_what_the_budget_does_not_reach_waits(plan, clock, monkeypatch):
    rows, _ = climbed(plan, monkeypatch, seconds=60.0, clock=clock)
    reached = [r["step"] for r in rows if not r.get("not_reached")]
    assert reached == ["speed_baseline", "larger_batch"]
    assert len(rows) == len(steps.SPEED)  # no summary of a part


# --- one step ---


def attempts(plan, monkeypatch, *outcomes):
    """Try a step whose attempts come out so; return its row, how often."""
    tried, outcomes = [], list(outcomes)

    def attempt(plan, step, applied, before, previous, seconds, then, alone):
        tried.append(alone)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return ladder.empty_row(step, verdict="kept")

    monkeypatch.setattr(ladder, "attempt", attempt)
    step = steps.SPEED[1]
    row = ladder.try_step(plan, step, [], {"any": "row"}, None, 1.0)
    return row, tried


def test_out_of_memory_gets_it_all_before_it_is_blamed(plan, monkeypatch):
    full = race.WorkerError("out-of-memory", "999 GiB")
    row, tried = attempts(plan, monkeypatch, full, "fine")
    assert row["verdict"] == "kept" and tried == [False, True]
    row, tried = attempts(plan, monkeypatch, full, full)
    assert row["verdict"] == "reverted" and tried == [False, True]
    assert row["reason"].startswith("out of memory")
    wrong = race.WorkerError("error", "a rank ended")
    row, tried = attempts(plan, monkeypatch, wrong, "fine")
    assert row["verdict"] == "failed" and tried == [False]


class Piloting:
    """A worker that times one sequence of two configurations."""

    def __init__(self, old, new):
        self.answers = [{"seconds": s, "loss": 2.0} for s in (old, new)]

    def ask(self, **command):
        assert command["do"] == "pilot"
        return self.answers.pop(0)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("old", "new", "hopeless"),
    [(1.0, 5.0, True), (0.69, 1.0, True), (0.71, 1.0, False), (2, 1, False)],
)
def test_a_pilot_ends_only_what_is_hopeless(
    plan, monkeypatch, old, new, hopeless
):
    worker = Piloting(old, new)
    monkeypatch.setattr(race.Plan, "worker", lambda *of: worker)
    step = next(s for s in steps.SPEED if s.pilot)
    now = ["speed_baseline"]
    found = ladder.pilot(plan, step, "speed", now, [*now, step.name])
    assert bool(found) == hopeless
    if hopeless:
        assert found["verdict"] == "reverted" and found["pilot"]
        assert found["ratio_previous"] == old / new
        assert found["agreement"]["holds"]


def test_a_section_stands_on_what_comes_before_it(plan, monkeypatch):
    """Its own other steps are no part of that: each is tried by itself."""
    section = "10.4.2"
    first, second = [
        steps.Step("speed", section, name, name, change)
        for name, change in (
            ("One", steps.larger_batch),
            ("Two", steps.fused_adamw),
        )
    ]
    track = [steps.SPEED[0], first, second]
    monkeypatch.setattr(
        race.Plan, "tracks", lambda self: {"memory": [], "speed": track}
    )
    tried = []

    def try_step(plan, step, applied, before, previous, seconds, then=None):
        tried.append((step.name, applied, then))
        return ladder.empty_row(step, verdict="kept")

    monkeypatch.setattr(ladder, "try_step", try_step)
    book = Book()
    ladder.one_section(plan, section, book)
    base = ["speed_baseline"]
    assert tried == [
        ("speed_baseline", [], base),
        ("larger_batch", base, None),
        ("speed_baseline", [], base),
        ("fused_adamw", base, None),
    ]
    names = [row["step"] for row in book.data["rows"]]
    assert names == ["larger_batch", "fused_adamw"]


def test_more_than_the_whole_update_is_said_to_be(plan, monkeypatch):
    monkeypatch.setattr(ladder, "ceilings", lambda plan: {})
    monkeypatch.setattr(ladder, "operators", lambda config: 1)
    before = {"seconds": 1.0, "data_s": 0.0}
    found = {}
    for saved in (0.5, 1.5):
        step = types.SimpleNamespace(bound=lambda *of, s=saved: (s, "faults"))
        found[saved] = ladder.predict_speed(plan, step, None, None, before)
    assert found[0.5]["predicted"] == "about 2.00×: faults"
    assert found[1.5]["predicted"] == (
        "more than the whole update, counted as 20.00×: faults"
    )


# --- what is recorded ---


@pytest.fixture
def written(plan, monkeypatch, capsys):
    """Write a log whose rows are given; return what was said and saved."""
    saved = []
    monkeypatch.setattr(ladder, "Book", lambda *of: Book())
    monkeypatch.setattr(ladder, "start_ahead", lambda *of: None)
    monkeypatch.setattr(ladder.machine, "line", lambda card: "a machine")
    monkeypatch.setattr(ladder.log, "render", lambda *of: "LOG.md")
    monkeypatch.setattr(ladder.log, "save", lambda *of: saved.append(of))

    def write(*rows, save=True, stopped=None, **flags):
        saved.clear()

        def climb(plan, track, book, until, ahead):
            book.data["rows"] += rows
            if stopped:
                raise stopped

        monkeypatch.setattr(ladder, "climb", climb)
        monkeypatch.setattr(
            ladder,
            "one_section",
            lambda plan, section, book: climb(plan, None, book, None, 0),
        )
        flags = {"only": None, "until": None, "restart": False} | flags
        args = types.SimpleNamespace(save=save, **flags)
        code = 0
        try:
            ladder.write_log(args, plan, ["speed"], {"machine": {}})
        except (SystemExit, KeyboardInterrupt) as end:
            code = getattr(end, "code", 130)
        return code, bool(saved), capsys.readouterr().out

    write.saved = saved
    return write


def rows(*verdicts):
    return [
        {"step": "x", "verdict": verdict, "not_reached": verdict is None}
        for verdict in verdicts
    ]


def test_only_a_whole_log_is_recorded(written):
    code, saved, said = written(*rows("kept", None, None))
    assert (code, saved) == (3, False)
    assert "nothing is recorded: 2 rows were not reached" in said
    assert "the same command goes on" in said
    assert written(*rows("kept", "reverted"))[:2] == (0, True)
    assert written(*rows("kept", None), save=False)[:2] == (0, False)
    assert written(*rows("failed", None))[:2] == (1, False)
    assert written(*rows("failed", "kept"))[:2] == (1, True)
    assert ladder.UNFINISHED == record.UNFINISHED == 3


def test_what_is_trained_at_the_end_is_kept(written):
    config = train.as_dict(train.Config(preset="gpt2-tiny", T=32))
    summary = {"step": "summary", "verdict": "kept", "config": config}
    written(*rows("kept"), summary)
    ((_, data, _),) = written.saved
    assert "--out runs/gpt2-tiny" in data["final"]["command"]
    assert data["final"]["config"] == config


def test_a_stopped_log_says_what_the_same_command_does(written):
    stop = KeyboardInterrupt()
    said = written(*rows("kept"), stopped=stop)[2]
    assert "stopped after 1 rows: the same command goes on" in said
    said = written(stopped=stop)[2]
    assert "stopped after 0 rows: the same command begins anew" in said
    said = written(*rows("kept"), stopped=stop, only="10.4.5")[2]
    assert "stopped after 1 rows: the same command begins anew" in said
    said = written(*rows("kept"), stopped=stop, restart=True)[2]
    assert "the same command without --restart goes on" in said


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Let ``--save`` begin, and every log end before anything is run."""
    monkeypatch.setattr(bench.machine, "source", lambda: {"dirty": False})
    monkeypatch.delenv("BENCH_SMOKE", raising=False)
    monkeypatch.chdir(tmp_path)
    own = ladder.size(ladder.torch.device("cpu"), True)
    monkeypatch.setattr(ladder, "size", lambda *of: own)
    monkeypatch.setattr(ladder.machine, "peaks", lambda device: {})
    begun = []
    monkeypatch.setattr(ladder, "write_log", lambda *of: begun.append(of[1]))
    return begun


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "10.4.5"],
        ["--only", "10.1"],
        ["--track", "memory"],
        ["--until", "10.4.2"],
        ["--steps", "planted_steps"],
        ["--data", "another.txt"],
        ["--preset", "gpt2-small-cpu"],
        ["--sequences", "8"],
    ],
)
def test_no_other_log_takes_the_place_of_the_record(clean, words):
    with pytest.raises(bench.Refusal, match=f"--save with {words[0]}: "):
        ladder.main(["--device", "cpu", "--save", *words])
    assert not clean


@pytest.mark.parametrize(
    "words", [["--preset", "gpt2-tiny"], ["--sequences", "4"], []]
)
def test_the_machines_own_size_may_be_named(clean, words):
    ladder.main(["--device", "cpu", "--budget", "250", "--save", *words])
    (plan,) = clean
    assert plan.base["T"] == 32 and plan.budget_s == 250
    assert plan.why == "a smoke run takes the smallest"


def test_another_size_is_not_said_to_suit(clean):
    ladder.main(["--device", "cpu", "--preset", "gpt2-small-cpu"])
    (plan,) = clean
    assert plan.base["T"] is None and plan.why == "as the flags ask"
