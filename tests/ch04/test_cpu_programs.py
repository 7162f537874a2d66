"""What is said of programs that have no GPU."""

import pytest
import synthetic
from test_verdict_kinds import kinds, one, read

from ch04_profiling import (
    accounting,
    find_bottleneck,
    timeline,
    traces,
    verdicts,
)
from ch04_profiling import event_names as names

BANDWIDTH = "bandwidth-bound", verdicts.CURES["bandwidth-bound"]

# ---- values asked for ----------------------------------------------------

ITEM = ("aten::item", "aten::_local_scalar_dense")
PRODUCT = """\
aten::matmul aten::mm aten::resolve_conj aten::resolve_conj aten::sum \
aten::sum aten::resolve_conj aten::as_strided aten::fill_"""


def asking(steps, items, marks=True):
    """Steps that ask for values, each after ten operators of a program."""
    made, at = synthetic.Recording(gpu=False), 0
    for step in range(steps):
        begin = at
        made.add("cpu_op", "aten::mm", at, 900)
        at += 1000
        for _ in range(items):
            for name in (*PRODUCT.split(), *ITEM):
                made.add("cpu_op", name, at, 4)
                at += 5
        if marks:
            made.step(step, begin, at - begin)
    return made


@pytest.mark.parametrize("marks", [True, False])
def test_values_asked_for_among_many_operators_are_a_storm(marks, tmp_path):
    report = read(asking(1, 300, marks=marks), tmp_path)
    assert kinds(report)[0] == "sync-bound"
    assert "300 × .item()" in report["findings"][0]["evidence"]


def test_twenty_values_in_a_step_are_many_and_fewer_are_not(tmp_path):
    found = one(read(asking(4, 20), tmp_path), "sync-bound")
    assert "80 × .item(), 20 in each step" in found["evidence"]
    assert "sync-bound" not in kinds(read(asking(4, 19), tmp_path))


@pytest.mark.parametrize(
    "begins",
    ["Optimizer.step#SGD.step", "enumerate(DataLoader)#x.__next__"],
)
def test_a_loss_that_each_step_reads_is_no_storm(begins, tmp_path):
    """An optimizer or a batch tells steps that are not marked."""
    made = asking(1, 200, marks=False)
    assert "sync-bound" in kinds(read(made, tmp_path))
    for event in list(made.events):
        if event["name"] == "aten::item":
            at = event["ts"] - 1_000_003
            made.add("user_annotation", begins, at, 1)
    assert "sync-bound" not in kinds(read(made, tmp_path))


@pytest.mark.parametrize(
    "owner",
    [
        "Optimizer.step#Adam.step",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    ],
)
def test_values_that_lie_on_the_host_anyway_are_no_storm(owner, tmp_path):
    """Adam counts its steps on the host; labels are read before they move."""
    made = asking(4, 1)
    for step in range(4):
        begin = 10_000 * step + 300_000
        made.add("user_annotation", owner, begin, 4000)
        for k in range(150):
            made.add("cpu_op", "aten::item", begin + 20 * k + 1, 4)
    assert "sync-bound" not in kinds(read(made, tmp_path))


# ---- what an operator does -----------------------------------------------

OPERATORS = {
    "gemm": """\
aten::mm aten::addmm_ aten::bmm aten::baddbmm aten::_int_mm aten::_sparse_mm
aten::convolution aten::convolution_backward aten::mkldnn_convolution
aten::_slow_conv2d_forward aten::conv_tbc aten::linear_backward aten::mv
aten::mkldnn_linear aten::mkldnn_rnn_layer aten::gru_cell aten::vdot
aten::_trilinear aten::bilinear aten::linalg_multi_dot quantized::linear
mkldnn::_linear_pointwise onednn::qconv2d_pointwise mylib::grouped_gemm
torchvision::deform_conv2d""",
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "optimizer": "aten::_fused_adamw_",
    "elementwise": """\
aten::add aten::copy_ aten::relu_ aten::gelu_backward aten::silu_ aten::sum
aten::upsample_bilinear2d aten::upsample_bilinear2d_backward
aten::_upsample_bilinear2d_aa aten::upsample_linear1d
aten::upsample_trilinear3d_backward aten::_convert_indices_from_coo_to_csr
aten::to_mkldnn aten::mkldnn_max_pool2d aten::mkldnn_adaptive_avg_pool2d
aten::linalg_vector_norm aten::linalg_cross aten::batch_norm aten::threshold
aten::embedding_dense_backward aten::lgamma_ prims::sin quantized::cat
fbgemm::permute_2D_sparse_data mylib::fused_relu""",
    "other_kernel": """\
aten::_linalg_svd aten::_linalg_eigh aten::linalg_cholesky_ex aten::lu_unpack
aten::linalg_lu_factor_ex aten::cholesky_solve aten::triangular_solve
aten::_fft_r2c aten::_fft_c2c aten::sort aten::topk aten::_unique2
aten::median aten::kthvalue aten::searchsorted aten::_cdist_forward
aten::_pdist_backward aten::_ctc_loss torchvision::nms mylib::op
mylib::comm_ready""",
    None: "aten::resolve_conj aten::detach c10d::allreduce_ AddBackward0",
}


@pytest.mark.parametrize("work", OPERATORS)
def test_an_operators_name_says_its_work(work):
    for name in OPERATORS[work].split():
        assert names.work_of_operator(name) == work, name


def calling(name, calls=20):
    made = synthetic.Recording(gpu=False)
    for k in range(calls):
        made.step(k, 10_000 * k, 10_000)
        made.add("cpu_op", name, 10_000 * k, 9900)
    return made


@pytest.mark.parametrize(
    ("name", "kind", "cure"),
    [
        ("aten::upsample_bilinear2d", *BANDWIDTH),
        ("aten::mkldnn_max_pool2d", *BANDWIDTH),
        ("aten::_linalg_svd", "compute-bound", verdicts.OPERATORS),
        ("aten::sort", "compute-bound", verdicts.OPERATORS),
        ("mylib::op", "compute-bound", verdicts.OPERATORS),
        ("aten::mm", "compute-bound", verdicts.CURES["compute-bound"]),
    ],
)
def test_what_binds_a_cpu_is_not_cured_by_what_does_not(
    name, kind, cure, tmp_path
):
    found = read(calling(name), tmp_path)["findings"][0]
    assert found["kind"] == kind
    assert (found["section"], found["script"]) == cure


def test_work_between_the_operators_it_calls_is_in_the_devices_span(tmp_path):
    """An operator that begins and ends with its own work, as topk does."""
    made = synthetic.Recording(gpu=False)
    for step in range(4):
        at = 10_000 * step
        made.step(step, at, 10_000)
        made.add("cpu_op", "aten::topk", at + 100, 9000)
        made.add("cpu_op", "aten::copy_", at + 4000, 400)
    report = read(made, tmp_path)
    (rank,) = report["ranks"]
    assert rank["gpu_span"]["start_us"] == 100
    assert rank["gpu_span"]["span_us"] == 39_000
    evidence = report["findings"][0]["evidence"]
    assert "it is busy 92% from its first to its last event" in evidence


# ---- compilation ---------------------------------------------------------

TIMED = " (dynamo_timed)"


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        (0, "1 compilation stops the program"),
        (2, "3 compilations stop the program"),
    ],
)
def test_gradients_that_are_compiled_are_counted(gradients, said, tmp_path):
    """A graph's gradient is compiled when it is first asked for."""
    made = synthetic.Recording(gpu=False)
    made.add("cpu_op", f"_compile.compile_inner{TIMED}", 0, 20_000)
    made.add("cpu_op", f"compile_fx.<locals>.fw_compiler_base{TIMED}", 10, 99)
    for k in range(gradients):
        at = 20_000 + 9000 * k
        made.add("cpu_op", f"backward._backward_impl{TIMED}", at, 8000)
        name = f"compile_fx.<locals>.bw_compiler{TIMED}"
        made.add("cpu_op", name, at + 100, 7800)
        made.add("cpu_op", f"compile_fx_inner{TIMED}", at + 200, 7000)
    made.add("cpu_op", "aten::mm", 40_000, 900)
    assert said in one(read(made, tmp_path), "compilation")["evidence"]


# ---- pictures ------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "owner"), [(False, "CPU"), (True, "GPU")])
def test_a_picture_names_the_device_whose_time_it_shows(gpu, owner, tmp_path):
    made = synthetic.compute_bound() if gpu else calling("aten::mm")
    path = tmp_path / "trace.json"
    path.write_text(made.text(), encoding="utf-8")
    (trace,) = traces.read([path])
    figure = timeline.picture(trace, accounting.account(trace), *trace.window)
    titles = [legend.get_title().get_text() for legend in figure.legends]
    assert titles[0] == f"the {owner}'s time: who owns it"


# ---- what a reader is told -----------------------------------------------


def warned(report):
    return {said["kind"]: said["text"] for said in report["warnings"]}


def test_that_no_gpu_is_there_is_said_once(tmp_path):
    report = read(calling("aten::mm"), tmp_path)
    assert kinds(report) == ["compute-bound"]
    assert "read as a CPU program" in warned(report)["no-gpu-events"]
    for made in (synthetic.no_gpu_events(), synthetic.Recording(gpu=False)):
        made.step(0, 0, 10)
        report = read(made, tmp_path)
        assert kinds(report) == ["no-gpu-events"]
        assert "no-gpu-events" not in warned(report)


def test_a_rank_without_kernels_is_a_note_beside_the_others(tmp_path):
    for rank in range(3):
        made = synthetic.straggler(rank)
        if rank == 2:
            made.events = [e for e in made.events if e["cat"] != "kernel"]
        (tmp_path / f"rank{rank}.json").write_text(made.text())
    report = find_bottleneck.read(tmp_path)
    assert "no-gpu-events" not in kinds(report)
    said = warned(report)["no-gpu-events"]
    assert said.startswith("rank 2: kernels were not recorded")


def test_short_operators_in_a_row_are_called_no_gaps(tmp_path):
    """Products of 15 µs without a pause; nothing was ready, they were run."""
    made = synthetic.Recording(gpu=False)
    for k in range(4000):
        made.add("cpu_op", "aten::mm", 15 * k, 15)
    for step in range(4):
        made.step(step, 15_000 * step, 15_000)
    evidence = one(read(made, tmp_path), "host-bound")["evidence"]
    assert "60.0 ms went into operators too short to count as" in evidence
    assert "gap" not in evidence and "ready" not in evidence


def test_how_to_mark_steps_is_said_as_it_works(tmp_path):
    """Without a schedule, a profiler's step() writes no mark."""
    made = calling("aten::mm")
    made.events = [e for e in made.events if e["cat"] == "cpu_op"]
    said = warned(read(made, tmp_path))
    assert "schedule=" in said["no-step-marks"]
    assert "record_function('ProfilerStep#n')" in said["no-step-marks"]
    assert "partial-step" not in said
    made.add("user_annotation", "Optimizer.step#Adam.step", 9000, 900)
    assert "optimizer's state" in warned(read(made, tmp_path))["partial-step"]
    made.add("user_annotation", "Optimizer.step#Adam.step", 19_000, 900)
    assert "partial-step" not in warned(read(made, tmp_path))


def test_steps_of_batches_that_are_not_known_are_called_so(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    said = "batch sizes are not in the files"
    shape = {"Input Dims": [[8, 3, 9]]}
    for shapes in ({}, shape):
        for path in (old, new):
            made = calling("aten::mm")
            made.add("cpu_op", "aten::conv2d", 1, 2, **shapes)
            path.write_text(made.text(), encoding="utf-8")
        find_bottleneck.main([str(new), "--against", str(old)])
        assert (said in capsys.readouterr().out) == (not shapes)


@pytest.mark.parametrize("time_us", [0, -1_000_000])
@pytest.mark.parametrize("gpu", [True, False])
def test_a_wrong_clock_is_no_finding(gpu, time_us, tmp_path):
    made = synthetic.compute_bound() if gpu else calling("aten::mm")
    work = next(e for e in made.events if e["cat"] in ("kernel", "cpu_op"))
    made.events.append(work | {"ts": time_us})
    report = read(made, tmp_path)
    assert "unexplained-idle" in warned(report)
    assert "host-bound" not in kinds(report)
