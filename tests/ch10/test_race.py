"""Two workers take turns; what was started is always ended."""

import types

import pytest

from ch10_gpt2 import race, worker


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
        return {"updates": [dict(report) for _ in range(self.told["count"])]}

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
