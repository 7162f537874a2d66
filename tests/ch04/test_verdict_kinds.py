"""One small trace for each way in which a kind of finding goes wrong.

Whatever is accused here has its counterpart that looks alike and must not be.
"""

import json

import pytest
import synthetic
from test_find_bottleneck import check_sums

from ch04_profiling import find_bottleneck, traces, verdicts
from chapters import toc

GRAPH = "cudaGraphLaunch"
FILL = "Memset (Device)"
ACROSS = "Memcpy DtoD (Device -> Device)"


def read(made, tmp_path, name="trace.json"):
    path = tmp_path / name
    path.write_text(made.text(), encoding="utf-8")
    report = find_bottleneck.read(path)
    check_sums(report)
    return report


def kinds(report):
    return [finding["kind"] for finding in report["findings"]]


def warned(report):
    return {said["kind"]: said["text"] for said in report["warnings"]}


def shares(report):
    (rank,) = report["ranks"]
    return {n: us / rank["span_us"] for n, us in rank["parts"].items()}


def one(report, kind):
    (found,) = (f for f in report["findings"] if f["kind"] == kind)
    return found


def test_every_cure_is_a_section_and_its_script():
    for section, script in (
        verdicts.IN_PYTHON,
        verdicts.ALLOCATING,
        verdicts.COPYING,
        verdicts.COUNTERS,
        verdicts.OPERATORS,
    ):
        assert script in toc.section(section).modules


# ---- work that was launched and did not start ----------------------------


def queued(made=None):
    """Five steps: of each 20 ms the second half is launched 6 ms too early."""
    made = made or synthetic.Recording()
    for step in range(5):
        at = 20_000 * step
        made.step(step + 10, at, 20_000)
        made.add("cpu_op", "aten::mm", at, 300)
        for k in range(10):
            made.run(synthetic.GEMM, at + 20 * k, 10, at + 60 + 600 * k, 600)
        for k in range(10):
            called, start = at + 300 + 20 * k, at + 12_060 + 600 * k
            made.run(synthetic.GEMM, called, 10, start, 600)
        made.add("cuda_runtime", "cudaDeviceSynchronize", at + 600, 17_500)
    return made


def test_queued_work_is_not_the_hosts_fault(tmp_path):
    report = read(queued(), tmp_path)
    assert shares(report)["idle_unknown"] == pytest.approx(0.32, abs=0.01)
    assert "host-bound" not in kinds(report)
    said = warned(report)
    assert "unexplained-idle" not in said
    assert "30% of the span work was launched" in said["queued-work"]
    assert "longest 6.0 ms at 6.060 ms" in said["queued-work"]


def test_what_is_launched_late_is_the_hosts_fault(tmp_path):
    made = queued()
    for event in made.events:
        if event["name"] == "cudaDeviceSynchronize":
            event["name"], event["cat"] = "aten::nonzero", "cpu_op"
        late = (event["ts"] - 1_000_000) % 20_000 >= 300
        if event["name"] == "cudaLaunchKernel" and late:
            event["ts"] += 11_700
    report = read(made, tmp_path)
    assert kinds(report)[0] == "host-bound"
    assert "queued-work" not in warned(report)


def test_what_was_launched_before_the_recording_was_queued(tmp_path):
    """Of the first work only the wait for it is in the file."""
    made = synthetic.Recording()
    made.calls = 50
    made.add("cuda_runtime", "cudaDeviceSynchronize", 1, 19_990)
    for k in range(10):
        made.run(synthetic.GEMM, 0, 1, 100 * k, 90)
        made.run(synthetic.GEMM, 0, 1, 15_000 + 100 * k, 90)
    without(made, "cuda_runtime")
    made.add("cuda_runtime", "cudaDeviceSynchronize", 1, 15_990)
    for k in range(20):
        made.run(synthetic.GEMM, 16_000 + 20 * k, 5, 16_010 + 400 * k, 400)
    report = read(made, tmp_path)
    assert "sync-bound" not in kinds(report)
    assert "queued-work" in warned(report)


# ---- operators of a CPU --------------------------------------------------


def convolving(calls=4):
    """A gradient of 18 ms copies its input for 1.4 ms and then computes."""
    made = synthetic.Recording(gpu=False)
    for step in range(calls):
        at = 20_000 * step
        made.step(step, at, 20_000)
        made.add("cpu_op", "aten::convolution_backward", at, 18_000)
        made.add("cpu_op", "aten::contiguous", at + 100, 1400)
        made.add("cpu_op", "aten::clone", at + 110, 1380)
        made.add("cpu_op", "aten::copy_", at + 130, 1350)
    return made


def test_an_operator_computes_between_those_it_calls(tmp_path):
    report = read(convolving(), tmp_path)
    assert kinds(report) == ["compute-bound"]
    found = shares(report)
    assert found["gemm"] == pytest.approx(16.6 / 20, abs=0.01)
    assert found["elementwise"] == pytest.approx(1.35 / 20, abs=0.01)
    assert (
        "aten::convolution_backward (66.4 ms)"
        in (one(report, "compute-bound")["evidence"])
    )


def test_an_operator_that_only_calls_others_does_not_compute(tmp_path):
    made = synthetic.Recording(gpu=False)
    for k in range(400):
        at = 200 * k
        made.add("cpu_op", "aten::linear", at, 180)
        made.add("cpu_op", "aten::t", at + 40, 20)
        made.add("cpu_op", "aten::addmm", at + 100, 40)
    report = read(made, tmp_path)
    assert shares(report)["gemm"] == pytest.approx(0.2, abs=0.01)
    assert kinds(report)[0] == "host-bound"


# ---- calls of the driver -------------------------------------------------


def calling(steps, first=10, count=5):
    """Steps of 40 kernels, ``steps`` of which make calls in their midst."""
    made, at = synthetic.Recording(), 0
    for step in range(count):
        begin = at
        for half in range(2):
            for k in range(20):
                called = at + 15 * k
                made.run(synthetic.GEMM, called, 10, at + 20 + 200 * k, 200)
            at += 4030
            if half or step not in steps:
                continue
            for name, takes in steps[step]:
                made.add("cuda_runtime", name, at, takes)
                at += takes
        made.step(first + step, begin, at - begin)
    return made


RESERVING = [("cudaFree", 300)] * 6 + [("cudaMalloc", 500)] * 6


def test_memory_reserved_in_every_step_is_no_start(tmp_path):
    report = read(calling(dict.fromkeys(range(5), RESERVING)), tmp_path)
    assert shares(report)["idle_start_up"] > 0.3
    assert kinds(report)[0] == "host-bound"
    found = report["findings"][0]
    assert (found["section"], found["script"]) == verdicts.ALLOCATING
    assert "30 × cudaFree, 30 × cudaMalloc" in found["evidence"]
    assert not {"start-up"} & (set(kinds(report)) | set(warned(report)))


def test_optimizers_tell_steps_that_are_not_marked(tmp_path):
    made = calling(dict.fromkeys(range(5), RESERVING))
    for event in made.events:
        if event["name"].startswith("ProfilerStep"):
            event["name"] = "Optimizer.step#SGD.step"
    report = read(made, tmp_path)
    assert kinds(report)[0] == "host-bound"
    assert report["findings"][0]["section"] == verdicts.ALLOCATING[0]


@pytest.mark.parametrize("first", [0, 10])
def test_memory_reserved_at_the_start_is_one(first, tmp_path):
    calls = {0: [("cudaFree", 90_000), *RESERVING], 1: RESERVING}
    report = read(calling(calls, first), tmp_path)
    assert kinds(report)[0] == "start-up"
    assert "start-up" in warned(report)
    assert verdicts.ALLOCATING[0] not in str(report["findings"])


def test_a_first_call_is_the_start_even_where_later_ones_repeat(tmp_path):
    calls = dict.fromkeys(range(5), [("cudaMalloc", 200)])
    calls[0] = [("cudaMalloc", 90_000)]
    assert kinds(read(calling(calls), tmp_path))[0] == "start-up"


def launching(lengths):
    """Graphs of 60 kernels of 50 µs each; their launch takes so long."""
    made, at = synthetic.Recording(), 0
    for step, takes in enumerate(lengths):
        made.step(step + 3, at, takes + 3100)
        made.add("cpu_op", "aten::add", at, 5)
        made.run(synthetic.GEMM, at + 6, takes, at + takes, 50)
        made.events[-2]["name"] = GRAPH
        for k in range(1, 60):
            again = made.events[-1] | {
                "ts": 1_000_000 + at + takes + 50 * k,
            }
            made.events.append(again)
        at += takes + 3100
    return made


def test_a_launch_that_is_always_long_is_host_time(tmp_path):
    report = read(launching([3500] * 8), tmp_path)
    assert kinds(report)[0] == "host-bound"
    assert shares(report)["idle_start_up"] == 0
    evidence = report["findings"][0]["evidence"]
    assert f"8 × {GRAPH} take 3.5 ms each" in evidence
    assert "start-up" not in warned(report)


def test_a_launch_that_was_long_once_is_the_start(tmp_path):
    report = read(launching([9000] + [10] * 7), tmp_path)
    assert kinds(report)[0] == "start-up"


# ---- copies on the device ------------------------------------------------


def moving(name, product, moved, reduced=0):
    made = synthetic.Recording()
    period = product + moved + reduced
    for k in range(40):
        if k % 8 == 0:
            made.step(k // 8, 40 * k, 320)
        at = 10 + period * k
        made.run(synthetic.GEMM, 40 * k, 5, at, product)
        made.run(name, 40 * k + 10, 5, at + product, moved)
        made.events[-1]["cat"] = "gpu_memcpy"
        if reduced:
            at += product + moved
            made.run(synthetic.NCCL, 40 * k + 20, 5, at, reduced)
    made.add("cuda_runtime", "cudaDeviceSynchronize", 1600, period * 39)
    return made


@pytest.mark.parametrize("name", [ACROSS, FILL])
def test_copies_on_the_device_and_fills_are_found(name, tmp_path):
    report = read(moving(name, 500, 450), tmp_path)
    assert kinds(report) == ["compute-bound", "bandwidth-bound"]
    found = one(report, "bandwidth-bound")
    assert found["share_of_span"] == pytest.approx(0.47, abs=0.02)
    assert name in found["evidence"]
    report = read(moving(name, 300, 500), tmp_path)
    assert kinds(report) == ["bandwidth-bound"]
    assert report["findings"][0]["section"] == verdicts.COPYING[0]


def test_few_copies_on_the_device_are_none(tmp_path):
    assert kinds(read(moving(ACROSS, 500, 15), tmp_path)) == ["compute-bound"]


def test_a_gpu_that_is_not_idle_is_said_to_work(tmp_path):
    """Communication has 12%: not all there is to say of the other 88%."""
    report = read(moving(synthetic.ADD, 520, 240, 200), tmp_path)
    assert kinds(report) == ["communication-bound", "compute-bound"]


# ---- what the host did ---------------------------------------------------


def pausing(gap, frames=(), name=None):
    """Steps of three bursts of kernels, each after Python alone."""
    made, at = synthetic.Recording(), 0
    for step in range(4):
        begin = at
        for _ in range(3):
            for frame, part in frames:
                made.add("python_function", frame, at + 1, part * gap)
            if name:
                made.add("user_annotation", name, at + 1, gap - 2)
            at += gap
            made.add("cpu_op", "aten::mm", at, 200)
            for k in range(10):
                made.run(synthetic.GEMM, at + 20 * k, 8, at + 30 + 90 * k, 90)
            at += 1000
        made.step(step + 5, begin, at - begin)
    return made


@pytest.mark.parametrize("gap", [1500, 4000, 4999, 5001, 7000, 60_000])
def test_python_of_any_length_is_the_hosts(gap, tmp_path):
    report = read(pausing(gap), tmp_path)
    assert kinds(report) == ["host-bound"]
    (found,) = report["findings"]
    assert (found["section"], found["script"]) == verdicts.IN_PYTHON
    assert "py-spy" in found["evidence"]
    assert shares(report)["idle_unknown"] < 0.01
    assert not {"unexplained-idle"} & set(warned(report))


def test_the_python_function_is_named(tmp_path):
    frames = [
        ("/home/u/train.py(90): main", 0.999),
        ("/home/u/train.py(116): shuffle", 0.98),
        ("<built-in function sleep>", 0.97),
    ]
    (found,) = read(pausing(7000, frames), tmp_path)["findings"]
    said = "in train.py(116): shuffle → <built-in function sleep> (84.8 ms)"
    assert said in found["evidence"]
    assert "with_stack" not in found["evidence"]


def test_the_range_around_a_gap_is_named(tmp_path):
    (found,) = read(pausing(7000, name="## tokenize ##"), tmp_path)["findings"]
    assert "in ## tokenize ## (84.8 ms)" in found["evidence"]


def test_what_no_event_tells_stays_unknown(tmp_path):
    """After the last sign of the host; or where operators were left out."""
    made = pausing(7000)
    made.add("cpu_op", "aten::mm", 400_000, 10)
    assert shares(read(made, tmp_path))["idle_unknown"] > 0.5
    made = pausing(7000)
    for at, event in enumerate(made.events):
        if event["cat"] == "cpu_op":
            event["args"] = {"Ev Idx": 1000 * at}
    report = read(made, tmp_path)
    assert "sampled" in warned(report)
    assert shares(report)["idle_unknown"] > 0.5


def test_after_the_last_work_nothing_waits(tmp_path):
    """A program without marks that ends slowly is not bound by that."""
    made = without(compute_then_python(3000), "user_annotation")
    report = read(made, tmp_path)
    assert shares(report)["idle_unknown"] > 0.15
    assert kinds(report) == ["compute-bound"]


def compute_then_python(gap):
    made = synthetic.compute_bound()
    last = max(e["ts"] + e["dur"] for e in made.events) - 1_000_000
    made.add("cpu_op", "aten::mm", last + gap, 10)
    return made


def test_long_python_after_a_wait_is_not_the_waits(tmp_path):
    """12 ms of Python would be worth more to shorten than the wait."""
    made, at = synthetic.Recording(), 0
    for step in range(4):
        begin = at
        for k in range(10):
            made.run(synthetic.GEMM, at + 20 * k, 8, at + 30 + 900 * k, 900)
        made.add("cuda_runtime", "cudaDeviceSynchronize", at + 300, 8740)
        at += 9040 + 12_000
        made.step(step, begin, at - begin)
    report = read(made, tmp_path)
    assert kinds(report)[0] == "host-bound"


# ---- what was not recorded -----------------------------------------------


def without(made, *categories):
    made.events = [e for e in made.events if e["cat"] not in categories]
    return made


def test_a_profile_of_the_gpu_alone_accuses_nobody(tmp_path):
    made = without(
        synthetic.host_bound(), "cpu_op", "cuda_runtime", "user_annotation"
    )
    report = read(made, tmp_path)
    assert "no-host-events" in warned(report)
    assert "unexplained-idle" not in warned(report)
    assert kinds(report) == []  # busy for 8%: nor does computing bound it
    assert shares(report)["idle_host"] == 0


def test_operators_that_were_not_recorded_are_no_sample(tmp_path):
    made = synthetic.data_bound()
    for at, event in enumerate(made.events):
        if event["cat"] == "user_annotation":
            event["args"] = {"Ev Idx": 4000 * at}
    report = read(made, tmp_path)
    assert "sampled" not in warned(report)
    assert "no-operators" in warned(report)
    assert kinds(report) == ["data-bound"]
    made.add("cpu_op", "aten::mm", 1, 5, **{"Ev Idx": 9})
    assert "sampled" in warned(read(made, tmp_path))


def test_a_step_without_anything_in_it_accuses_nobody(tmp_path):
    made = synthetic.Recording(gpu=False)
    for step in range(4):
        made.step(step, 10 * step, 10)
    report = read(made, tmp_path)
    assert kinds(report) == ["no-gpu-events"]
    assert "nothing was recorded" in report["findings"][0]["evidence"]


def test_a_recording_of_no_length_adds_up(tmp_path):
    made = synthetic.Recording(gpu=False)
    made.add("cpu_op", "aten::mm", 0, 0)
    (rank,) = read(made, tmp_path)["ranks"]
    assert rank["span_us"] == 0


def test_one_is_not_many(tmp_path):
    made = synthetic.Recording()
    made.run(synthetic.GEMM, 0, 5, 10, 20)
    assert "1 GPU event in" in warned(read(made, tmp_path))["too-short"]


def test_reports_are_json(tmp_path):
    json.dumps(read(pausing(7000), tmp_path), allow_nan=False)


def test_ranges_alone_say_nothing_of_the_host(tmp_path):
    report = read(without(pausing(7000), "cpu_op", "cuda_runtime"), tmp_path)
    assert "no-host-events" in warned(report)
    assert "host-bound" not in kinds(report)


# ---- two recordings ------------------------------------------------------


def against(new, old, tmp_path):
    sides = []
    for at, made in enumerate((new, old)):
        path = tmp_path / f"{at}.json"
        path.write_text(made.text(), encoding="utf-8")
        sides.append(verdicts.number(traces.read([path])))
    return find_bottleneck.against(*sides)


def test_another_device_is_said(tmp_path, capsys):
    """On a slower GPU the host keeps up: nothing was cured."""
    old, new = synthetic.host_bound(), synthetic.compute_bound()
    new.header["deviceProperties"][0]["name"] = "Slow GPU"
    find_bottleneck.show_against(against(new, old, tmp_path))
    said = capsys.readouterr().out
    assert "the devices differ, Tested GPU → Slow GPU" in said
    assert "no longer found: host-bound" in said
    assert "cured" not in said


def test_a_cure_on_the_same_device_is_one(tmp_path, capsys):
    old, new = synthetic.data_bound(), synthetic.compute_bound()
    find_bottleneck.show_against(against(new, old, tmp_path))
    said = capsys.readouterr().out
    assert "cured: data-bound" in said
    assert "devices differ" not in said


# ---- copies across, and calls that wait for them ---------------------------

PINNED = "Memcpy HtoD (Pinned -> Device)"


@pytest.mark.parametrize(
    ("pinned", "section"), [(0, "6.1.2"), (3, "6.1.2"), (9, "6.1.3")]
)
def test_pinned_copies_are_to_be_hidden_and_others_to_be_pinned(
    pinned, section, tmp_path
):
    """Of twelve copies; what takes most of their time decides."""
    made = synthetic.transfer_bound()
    uploads = [e for e in made.events if e["name"] == synthetic.UPLOAD]
    for event in uploads[:pinned]:
        event["name"] = PINNED
    report = read(made, tmp_path)
    assert kinds(report) == ["transfer-bound"]
    assert report["findings"][0]["section"] == section


def held(name):
    """Each copy of 90 µs holds the host for 700 µs before its kernel."""
    made = synthetic.Recording()
    for k in range(24):
        at = 1200 * k
        if k % 8 == 0:
            made.step(k // 8, at, 9600)
        made.run(name, at, 700, at + 600, 90, bytes=4_000_000)
        made.run(synthetic.GEMM, at + 710, 5, at + 720, 470)
    return made


def test_a_call_that_copies_is_no_call_that_waits(tmp_path):
    """The host stands in cudaMemcpyAsync: that is the copy's doing."""
    report = read(held(synthetic.UPLOAD), tmp_path)
    assert shares(report)["idle_sync"] > 0.45
    assert kinds(report) == ["transfer-bound"]
    found = report["findings"][0]
    assert "the copy calls held the host" in found["evidence"]
    assert found["gain_bound"] > 0.5
    report = read(held(synthetic.DOWNLOAD), tmp_path)
    assert kinds(report)[0] == "sync-bound"


# ---- two threads that feed the GPU ----------------------------------------


def two_threads(waiting, category, feeding):
    """One thread waits for 800 µs, and another is in operators or not."""
    made = synthetic.Recording()
    for step in range(5):
        begin = 10_000 * step
        made.step(step, begin, 10_000)
        for k in range(10):
            at = begin + 1000 * k
            made.add(category, waiting, at + 10, 800)
            if feeding:
                made.add("cpu_op", "MmBackward0", at, 850, synthetic.AUTOGRAD)
            made.run(synthetic.GEMM, at + 830, 5, at + 840, 150)
            if feeding:
                launch, kernel = made.events[-2:]
                launch["tid"] = synthetic.AUTOGRAD
        # both threads launch
        made.run(synthetic.ADD, begin + 9990, 5, begin + 9992, 7)
        made.run(synthetic.ADD, begin + 9985, 2, begin + 9999, 1)
        made.events[-2]["tid"] = synthetic.AUTOGRAD
    return made


@pytest.mark.parametrize(
    ("waiting", "category", "part", "kind"),
    [
        ("get_batch", "user_annotation", "idle_loader", "data-bound"),
        (
            "cudaStreamSynchronize",
            "cuda_runtime",
            "idle_sync",
            "sync-bound",
        ),
    ],
)
def test_a_thread_that_waits_while_another_feeds_is_not_to_blame(
    waiting, category, part, kind, tmp_path
):
    alone = two_threads(waiting, category, False)
    report = read(alone, tmp_path)
    assert kinds(report)[0] == kind
    assert shares(report)[part] > 0.7
    fed = two_threads(waiting, category, True)
    report = read(fed, tmp_path)
    assert kinds(report) == ["host-bound"]
    assert shares(report)[part] < 0.05
