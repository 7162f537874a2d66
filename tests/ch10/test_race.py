"""Two workers take turns; what was started is always ended."""

import types

import numpy as np
import pytest

from ch10_gpt2 import race, worker
from common import judging


class Answering:
    """A worker whose updates take as long as it is told."""

    def __init__(self, name, seconds, asked):
        self.name, self.seconds, self.asked = name, seconds, asked
        self.config = {"workers": 0}
        self.told = {}

    def tell(self, **command):
        self.told = command

    def hear(self):
        report = {"seconds": self.seconds, "data_s": 0.0, "loss": 1.0}
        report |= {"grad_norm": 1.0, "skipped": False}
        if self.told.get("gradients"):
            report["parameter_norms"] = {"a": 1.0}
        count = self.told.get("untimed", 0) + self.told["count"]
        return {"updates": [dict(report) for _ in range(count)]}

    def ask(self, **command):
        self.asked.append(self.name)
        self.tell(**command)
        return self.hear()


@pytest.fixture
def plan(tmp_path):
    return race.Plan(
        {"device": "cpu"}, "ch10_gpt2.steps", False, 1, 2, False, 1.0,
        tmp_path, {},
    )  # fmt: skip


def test_who_begins_changes_from_round_to_round(plan):
    asked = []
    old, new = Answering("old", 3.0, asked), Answering("new", 2.0, asked)
    result = race.race(plan, old, new, seconds=0.0)
    assert asked[:8] == ["old", "new", "new", "old"] * 2
    assert all(times == [3.0, 2.0] for times in result["rounds"])
    # every update that is compared brings its gradients
    for side in ("old", "new"):
        compared = result[side][: plan.updates]
        assert all(report["parameter_norms"] for report in compared)


def test_a_row_keeps_the_opponents_speed(plan):
    old, new = Answering("old", 3.0, []), Answering("new", 2.0, [])
    result = race.race(plan, old, new, seconds=0.0)
    config = race.train.Config("gpt2-tiny", T=32, sequences=3)
    row = race.measured(plan, result, config)
    assert row["previous_tokens_per_s"] == 96 / 3
    assert row["tokens_per_s"] == 96 / 2 and row["ratio_previous"] == 1.5


def test_a_row_keeps_the_rounds_of_its_ratio(plan):
    """The ratio is the median of the rounds' ratios, and can be found."""
    rounds = [[3.0, 2.0]] * 6 + [[4.0, 1.0], [2.0, 2.0]]
    reports = [{"loss": 1.0, "data_s": 0.0, "grad_norm": 1.0}] * 10
    for report in reports:
        report["parameter_norms"] = {}
    plan.updates = 3
    config = race.train.Config("gpt2-tiny", T=32, sequences=3)
    result = {"old": reports, "new": reports, "rounds": rounds}
    row = race.measured(plan, result, config)
    assert row["round_seconds"] == rounds
    old, new = zip(*row["round_seconds"], strict=True)
    found = judging.bootstrap_ratio(old, new)
    assert [row["ratio_previous"], *row["ratio_interval"]] == list(found)
    assert row["steady"] is True
    late = [[2.0, 2.0]] * 3 + [[3.0, 2.0]] * 5  # not in the first third
    row = race.measured(plan, result | {"rounds": late}, config)
    assert row["ratio_previous"] == 1.5 and row["steady"] is False
    assert not judging.lasts(np.array([3.0, 3.0]))  # no third to ask


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_late_row_has_its_fewest_rounds(plan, seconds):
    plan.updates = 3
    old, new = Answering("old", 3.0, []), Answering("new", 2.0, [])
    result = race.race(plan, old, new, seconds)
    assert len(result["rounds"]) == race.FEWEST_ROUNDS == 6
    config = race.train.Config("gpt2-tiny", T=32, sequences=3)
    assert race.measured(plan, result, config)["ratio_interval"]
    result["rounds"].pop()  # five lean one way by luck in 6% of cases
    assert "ratio_interval" not in race.measured(plan, result, config)


class Loading(Answering):
    """A worker whose queue is full when its turn begins."""

    def __init__(self, name, workers, asked):
        super().__init__(name, 1.0, asked)
        self.config["workers"] = workers
        self.commands = []

    def tell(self, **command):
        super().tell(**command)
        self.commands.append(command)

    def hear(self):
        found = super().hear()
        untimed = self.told.get("untimed", 0)
        for i, report in enumerate(found["updates"]):
            report["data_s"] = 0.1
            report["seconds"] = 0.5 if i < untimed else 1.0
        return found


def test_what_a_full_queue_hides_is_not_timed(plan, monkeypatch):
    """As many updates as the loader had prepared only empty its queue."""
    slept = []
    monkeypatch.setattr(race.time, "sleep", slept.append)
    old, new = Loading("old", 0, []), Loading("new", 2, [])
    result = race.race(plan, old, new, seconds=0.0)
    turns = [w.commands[1:] for w in (old, new)]
    assert {c["untimed"] for c in turns[0]} == {0}
    assert {c["untimed"] for c in turns[1]} == {4}  # two for each worker
    assert {c["count"] for c in turns[0] + turns[1]} == {4}
    assert all(times == [1.0, 1.0] for times in result["rounds"])
    assert max(slept) == pytest.approx(0.8)  # until the queue is full again


def test_where_nothing_waits_nothing_is_left_out(plan, monkeypatch):
    monkeypatch.setattr(race.time, "sleep", lambda seconds: None)
    old, new = Answering("old", 1.0, []), Answering("new", 1.0, [])
    new.config["workers"] = 2
    race.race(plan, old, new, seconds=0.0)
    assert new.told["untimed"] == 0 and new.told["count"] == 1


class Compiling:
    """A worker that was started ahead and is still at it."""

    def __init__(self, answer):
        self.answer, self.closed = answer, False

    def hear(self):
        if self.answer is not None:
            raise self.answer

    def stop(self):
        pass

    def close(self):
        self.closed = True


def test_ctrl_c_does_not_lose_a_worker_that_compiles(plan):
    step = types.SimpleNamespace(needs=("compiler",), hosts=False)
    worker = Compiling(KeyboardInterrupt())
    plan.compiling = [worker]
    with pytest.raises(KeyboardInterrupt):
        plan.worker(step, 1)
    plan.close()
    assert worker.closed


def test_a_compiled_worker_is_handed_over_once(plan):
    step = types.SimpleNamespace(needs=("compiler",), hosts=False)
    worker = Compiling(None)
    plan.compiling = [worker]
    assert plan.worker(step, 1) is worker and plan.compiling == []
    plan.close()
    assert not worker.closed
    plan.compiling = [broken := Compiling(race.WorkerError("error", "x"))]
    plan.spares = [spare := types.SimpleNamespace(kind=(1, False))]
    assert plan.worker(step, 1) is spare
    assert broken.closed and plan.compiling == []


class Profile:
    """What was profiled; its trace is the name of the update."""

    def __init__(self, name):
        self.name = name

    def export_chrome_trace(self, path):
        with open(path, "w") as file:
            file.write(self.name)


@pytest.mark.parametrize(("world", "updates"), [(1, 1), (2, 5)])
def test_gloos_copies_do_not_count(world, updates, monkeypatch, tmp_path):
    """Among ranks the lowest of a few peaks is kept, and its trace."""
    peaks = iter(enumerate([700, 500, 600, 900, 800]))

    def tracked(run):
        number, peak = next(peaks)
        return {"peak_bytes": peak, "profile": Profile(f"update {number}")}

    monkeypatch.setattr(worker, "tracked", tracked)
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(device="cpu"),
        rank=types.SimpleNamespace(world=world),
    )
    trace = tmp_path / "trace.json"
    found = worker.memory(run, str(trace))["peak_bytes"]
    lowest = 700 if world == 1 else 500
    assert found["tracked"] == lowest
    assert trace.read_text() == f"update {int(world == 2)}"
    assert len(list(peaks)) == 5 - updates
