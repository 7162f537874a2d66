"""ncu's CSV is parsed, and its refusals are passed on in plain words."""

import shutil
import subprocess
import types

import pytest
import torch

from ch04_profiling import nsight_compute
from common import bench

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context",'
    '"Stream","Block Size","Grid Size","Device","CC","Section Name",'
    '"Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type",'
    '"Rule Description","Estimated Speedup Type","Estimated Speedup"'
)
ADD = "void vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, 3>(int)"
SPEED = nsight_compute.SPEED


def line(number, kernel, section, metric, unit, value, advice=""):
    cells = [number, 4242, "python", "host", kernel, 1, 7, "(128, 1, 1)"]
    cells += ["(65536, 1, 1)", 0, "9.0", section, metric, unit, value]
    cells += ["", "", advice, "", ""]
    return ",".join('"' + str(c).replace('"', '""') + '"' for c in cells)


OUTPUT = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        '==PROF== Profiling "vectorized_elementwise_kernel": 0%....100% - 9',
        "a line of the program, with, commas",
        "==PROF== Disconnected from process 4242",
        HEAD,
        line(0, ADD, SPEED, "DRAM Throughput", "%", "92.10"),
        line(0, ADD, SPEED, "Duration", "nsecond", "221,184"),
        line(0, ADD, SPEED, "Memory Throughput", "%", "92.10"),
        line(0, ADD, SPEED, "Compute (SM) Throughput", "%", "11.5"),
        line(0, ADD, SPEED, "", "", "", 'it uses "most", of the memory'),
        line(
            0,
            ADD,
            "Memory Workload Analysis",
            "Memory Throughput",
            "byte/second",
            "2,430,000,000,000",
        ),
        line(0, ADD, "Memory Workload Analysis", "L2 Hit Rate", "%", "33.4"),
        line(0, ADD, "Occupancy", "Achieved Occupancy", "%", "n/a"),
        line(0, ADD, "Launch Statistics", "Registers Per Thread", "r", "16"),
        line(1, "sgemm", SPEED, "Memory Throughput", "%", "30"),
        line(1, "sgemm", SPEED, "Compute (SM) Throughput", "%", "88"),
    ]
)


def test_kernels_are_read_with_units_in_mind():
    add, product = nsight_compute.rows_of(OUTPUT)
    assert add["memory_percent"] == 92.1  # not the bytes per second
    assert add["duration_s"] == pytest.approx(221.184e-6)
    assert add["registers"] == 16
    assert add["occupancy_percent"] is None
    assert add["bound_by"] == "memory"
    assert product["bound_by"] == "compute"
    assert product["duration_s"] is None


def test_names_of_metrics_alone_would_mix_two_sections():
    """The wrong key: both sections have a "Memory Throughput"."""
    metrics = nsight_compute.parse(OUTPUT)["0", ADD]
    alone = {name: value for (_, name), value in metrics.items()}
    assert alone["Memory Throughput"] > 100
    assert metrics[SPEED, "Memory Throughput"] == 92.1


def test_what_is_far_below_both_limits_waits():
    assert nsight_compute.bound(20, 30) == "latency"
    assert nsight_compute.bound(61, 60) == "compute"
    assert nsight_compute.bound(61, 90) == "memory"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission "
            "to access NVIDIA GPU Performance Counters on the target device",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==WARNING== No kernels were profiled.", "no kernel was launched"),
        ("==ERROR== No section with that name", "No section with that name"),
        ("", "no metric in ncu's output"),
        (HEAD, "no metric in ncu's output"),
    ],
)
def test_refusals_of_ncu_are_sentences(text, sentence, tmp_path):
    path = tmp_path / "out.csv"
    path.write_text(text)
    with pytest.raises(bench.Refusal, match=sentence):
        nsight_compute.main(["--device", "cpu", "--read", str(path)])
    with pytest.raises(bench.Refusal, match="No such file"):
        nsight_compute.main(["--device", "cpu", "--read", str(path) + "x"])


def test_an_output_is_shown(tmp_path, capsys):
    path = tmp_path / "out.csv"
    path.write_text(OUTPUT, encoding="utf-8")
    rows = nsight_compute.main(["--device", "cpu", "--read", str(path)])
    assert [row["bound_by"] for row in rows] == ["memory", "compute"]
    assert "221 µs" in capsys.readouterr().out


def test_the_command_measures_one_range():
    words = nsight_compute.command(
        ["SpeedOfLight", "Occupancy"], ["python", "x.py"]
    )
    assert words[0] == "ncu"
    assert words[-2:] == ["python", "x.py"]
    assert words.count("--section") == 2
    at = words.index("--nvtx-include")
    assert words[at + 1] == "measured/"
    assert {"--csv", "--nvtx"} <= set(words)
    assert words[words.index("--page") + 1] == "details"
    assert words[words.index("--print-units") + 1] == "base"


def test_warming_up_stays_outside_the_range(monkeypatch):
    said = []

    class Range:
        def __init__(self, name):
            said.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            said.append("end")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("sync"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    nsight_compute.measured_range(lambda: said.append("run"), "cuda", 2)
    assert said == ["run", "run", "sync", "measured", "run", "end", "sync"]


def test_the_smoke_run_predicts_and_says_what_is_missing(capsys):
    rows = nsight_compute.main(["--smoke", "--device", "cpu"])
    assert [row["name"] for row in rows] == ["add", "product"]
    said = capsys.readouterr().out
    assert "left out: counters of a kernel: there is no CUDA device" in said
    assert "ncu --csv --page details" in said
    assert nsight_compute.main(["--device", "cpu", "--profiled", "add"]) == []
    with pytest.raises(bench.Refusal, match="add, product"):
        nsight_compute.main(["--device", "cpu", "--profiled", "sum"])


def test_predictions_count_bytes_and_work(monkeypatch):
    found = nsight_compute.operations("cpu")
    operation, size, work = found["product"]
    assert (size, work) == (12 * 64**2, 2 * 64**3)
    assert operation().shape == (64, 64)
    assert found["add"][1:] == (8 * 2**16, 2 * 2**16)
    peaks = {"copy_bytes_per_s": 1e10, "gemm_flops": {"float32": 1e11}}
    monkeypatch.setattr(nsight_compute.machine, "peaks", lambda device: peaks)
    args = types.SimpleNamespace(smoke=False, device="cpu")
    add, product = nsight_compute.predictions(args, found)
    assert add["predicted_bound"] == "memory"
    assert add["memory_s"] == pytest.approx(8 * 2**16 / 1e10)
    assert product["predicted_bound"] == "compute"


def test_no_permission_leaves_the_prediction(monkeypatch, capsys):
    """A GPU whose counters are closed: said so, with exit code 0."""
    args = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(
        shutil, "which", lambda name: name if name == "ncu" else None
    )
    done = types.SimpleNamespace(
        stdout="==ERROR== ERR_NVGPUCTRPERM", stderr=""
    )
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    monkeypatch.setattr(
        nsight_compute.bench, "left_out", lambda a, what: print(what)
    )
    real = bench.cli

    def cli(*words, **more):
        found = real(*words, **more)
        found.device = args
        return found

    monkeypatch.setattr(nsight_compute.bench, "cli", cli)
    monkeypatch.setattr(
        nsight_compute, "operations", lambda *a: {"add": (None, 8, 2)}
    )
    monkeypatch.setattr(
        nsight_compute, "predictions", lambda *a: [{"name": "add"}]
    )
    monkeypatch.setattr(
        nsight_compute.bench, "report", lambda args, rows, **k: rows
    )
    rows = nsight_compute.main(["--device", "cpu"])
    assert rows == [{"name": "add"}]
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().out


def test_techniques_can_be_pasted(pasted):
    assert len(pasted(nsight_compute.parse)(OUTPUT)) == 2
    assert pasted(nsight_compute.bound)(70, 10) == "compute"
    assert pasted(nsight_compute.measured_range)(lambda: 3, "cpu") == 3
    assert pasted(nsight_compute.command)([], ["x"])[-1] == "x"


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("ncu"), reason="needs ncu")
def test_a_real_kernel_is_measured_or_the_reason_given(capsys):
    rows = nsight_compute.main([])
    said = capsys.readouterr().out
    if "left out" not in said:
        bounds = [row["bound_by"] for row in rows if "bound_by" in row]
        assert bounds[0] == "memory"
    else:
        assert "ERR_NVGPUCTRPERM" in said
