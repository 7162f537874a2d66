"""The card, the ceilings and the source: right, stable, never in the way."""

import getpass
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from common import ceilings, machine
from common.bench import Refusal

FIGURES = {
    "copy_bytes_per_s": 1e10,
    "triad_bytes_per_s": 1.1e10,
    "buffer_bytes": 2**26,
    "cache_bytes": 2**25,
    "host_to_device_bytes_per_s": None,
    "device_to_host_bytes_per_s": None,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch):
    """Replace the measuring by figures; return what was asked for."""
    asked = []

    def gemm(dtype, device, **_):
        asked.append(dtype)
        return 1e11 * torch.get_num_threads()

    def memory(*_):
        asked.append("memory")
        return {k: v for k, v in FIGURES.items() if "host" not in k}

    monkeypatch.setattr(machine, "_busy", lambda: 0.0)
    monkeypatch.setattr(machine, "_again", set())
    monkeypatch.setattr(ceilings, "gemm_flops", gemm)
    monkeypatch.setattr(ceilings, "bandwidth", memory)
    return asked


# --- card -------------------------------------------------------------------


def test_card_is_plain_and_names_nobody():
    card = machine.card()
    text = json.dumps(card)
    assert json.loads(text) == card
    assert card["gpu"] is None and card["cores"] >= 1
    assert card["torch"] == torch.__version__
    for secret in (socket.gethostname(), str(Path.home()), str(machine.ROOT)):
        assert len(secret) < 4 or secret not in text
    user = getpass.getuser()
    assert not any(user == word for word in text.replace('"', " ").split())


def test_identity_is_hardware_only(monkeypatch):
    first = machine.identity()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        monkeypatch.setattr(machine.psutil, "cpu_freq", lambda: None)
        assert machine.identity() == first
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(machine, "_cpu_model", lambda: "Another CPU")
    assert machine.identity() != first
    monkeypatch.undo()
    monkeypatch.setattr(machine, "cores", lambda: 77)
    assert "-77c-" in machine.identity()


def test_card_without_psutil(monkeypatch):
    expected = machine.identity()
    monkeypatch.setattr(machine, "psutil", None)
    assert machine.card()["cpu_mhz"] is None
    if hasattr(os, "sysconf"):
        assert machine.identity() == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763"),
        ("Intel Xeon Gold 6248 CPU", "xeon-gold-6248"),
        ("11th Gen Intel Core i7-1185G7", "core-i7-1185g7"),
        ("AMD Ryzen 7 5800H with Radeon Graphics", "ryzen-7-5800h"),
        ("Apple M2 Pro", "apple-m2-pro"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("", "cpu"),
    ],
)
def test_words(name, words):
    assert "-".join(machine._words(name).split("-")[:3]) == words


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "1000 100000"}, 1),
        ({"cpu.max": "nonsense"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000"}, 64),
        (
            {
                "cpu/cpu.cfs_quota_us": "400000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            64,
        ),
    ],
)
def test_cores_respect_a_containers_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(machine, "CGROUP", str(tmp_path))
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: range(64), raising=False
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cores() == cores


def test_memory_respects_a_containers_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", str(tmp_path))
    whole = machine.memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes() == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine.memory_bytes() == 2**20


def test_line_fits():
    card = machine.card()
    assert card["cpu"][:10] in machine.line(card)
    card["gpu"] = {"name": "NVIDIA A Card With A Very Long Name " * 4}
    assert len(machine.line(card)) <= 100
    assert machine.line(card).endswith(card["id"].split("-")[-1])


def test_main_prints_the_card(capsys):
    machine.main(["--device", "cpu"])
    text = capsys.readouterr().out
    assert machine.identity() in text and "governor" in text
    if not torch.cuda.is_available():
        with pytest.raises(Refusal, match="cuda"):
            machine.main(["--device", "cuda"])
        with pytest.raises(Refusal, match="cuda"):
            machine.peaks("cuda")


# --- published peaks --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),  # it has none
        ("Tesla T4", "float16", 65),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", 80),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_known_devices(name, dtype, tera):
    found = machine.published_peak(name, dtype)
    assert found == (tera and pytest.approx(tera * 1e12))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",  # which of three?
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-10C",
        "GRID A100-10C",
        "NVIDIA A100X",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "AMD Instinct MI250X/MI250",
        "Apple M2 Pro",
        "Intel Xeon Processor",
        "A device of tomorrow",
        "",
        None,
    ],
)
def test_unknown_devices_have_no_peak(name):
    assert machine.published_peak(name, "bfloat16") is None


def test_unknown_dtype_and_no_sparse_figures():
    assert machine.published_peak("NVIDIA H200", "float8") is None
    sparse = 624, 1979, 1513, 1671, 242, 733, 250, 140, 330.3, 2614.9
    for row in ceilings.PUBLISHED.values():
        assert not set(sparse) & set(row or ())
        tf32, half = (row or (0, None, None, 0))[1::2]
        assert tf32 is None or tf32 <= half  # a sparse tf32 would be half's


# --- measured peaks ---------------------------------------------------------


def test_peaks_are_measured_once(cache, measured):
    first = machine.peaks(threads=3)
    assert measured == ["float32", "bfloat16", "float16", "memory"]
    assert first["gemm_flops"]["float32"] == 3e11
    assert first["all_reduce"] is None and first["threads"] == 3
    assert first.items() >= FIGURES.items()
    assert machine.peaks(threads=3) == first and len(measured) == 4
    assert [f.name for f in cache.iterdir()] == [f"peaks-{first['id']}.json"]
    assert json.loads(next(cache.iterdir()).read_text()) == first
    machine.peaks(threads=3, refresh=True)
    assert len(measured) == 8


def test_each_number_of_threads_has_its_own(cache, measured):
    before = torch.get_num_threads()
    three, one = machine.peaks(threads=3), machine.peaks(threads=1)
    assert torch.get_num_threads() == before
    assert one["gemm_flops"]["float32"] == 1e11
    assert (machine.peaks(threads=3), machine.peaks(threads=1)) == (three, one)
    assert len(measured) == 8 and len(list(cache.iterdir())) == 2


def test_only_what_is_missing_is_measured(cache, measured):
    first = machine.peaks(threads=3)
    path = cache / f"peaks-{first['id']}.json"
    less = json.loads(path.read_text())
    del less["gemm_flops"]["bfloat16"], less["copy_bytes_per_s"]
    path.write_text(json.dumps(less))
    del measured[:]
    assert machine.peaks(threads=3) == first
    assert measured == ["bfloat16", "memory"]


def test_kept_figures_stay(cache, measured):
    ring = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    machine.keep_peaks({"all_reduce": ring}, threads=3)
    assert machine.peaks(threads=3)["all_reduce"] == ring
    machine.keep_peaks({"gather_bytes_per_s": 2e9}, threads=3)
    found = machine.peaks(threads=3)
    assert found["all_reduce"] == ring and found["gather_bytes_per_s"] == 2e9
    assert len(measured) == 4


def test_the_best_that_was_seen_stays(cache, measured):
    """Each rate's own, whichever run found it; until the file is deleted."""
    first = machine.peaks(threads=3)
    ring = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    seen = {
        "gemm_flops": {"float32": 5e11, "bfloat16": 1e11, "float16": None},
        "copy_bytes_per_s": first["copy_bytes_per_s"] + 1,
        "triad_bytes_per_s": first["triad_bytes_per_s"] - 1,
        "disk_read_bytes_per_s": 2e9,
        "all_reduce": ring,
    }
    kept = machine.keep_peaks(seen, threads=3)
    assert kept == machine.peaks(threads=3)
    assert kept["gemm_flops"] == first["gemm_flops"] | {"float32": 5e11}
    assert kept["copy_bytes_per_s"] == first["copy_bytes_per_s"] + 1
    assert kept["triad_bytes_per_s"] == first["triad_bytes_per_s"]
    assert kept["all_reduce"] == ring
    ring = {"latency_s": 2e-4, "bytes_per_s": 2e9}
    machine.keep_peaks({"all_reduce": ring}, threads=3)
    again = machine.peaks(threads=3, refresh=True)
    best = {"latency_s": 1e-4, "bytes_per_s": 2e9}
    assert again == kept | {"all_reduce": best}
    for path in cache.iterdir():
        path.unlink()
    assert machine.peaks(threads=3) == first


def test_a_rate_that_came_first_does_not_hide_what_is_missing(cache, measured):
    machine.keep_peaks({"copy_bytes_per_s": 1.0, "triad_bytes_per_s": 1.0})
    found = machine.peaks()
    assert "memory" in measured and found["cache_bytes"]


def test_a_ceiling_found_beside_a_neighbour_is_found_again_once(
    cache, measured, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "_busy", lambda: 0.8)
    machine.peaks(threads=3)
    ring = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    machine.keep_peaks({"all_reduce": ring}, threads=3)
    machine.peaks(threads=3)
    assert len(measured) == 4  # as loud as before: no better figures now
    monkeypatch.setattr(machine, "_busy", lambda: 0.5)
    assert machine.peaks(threads=3)["busy"] == 0.5 and len(measured) == 8
    monkeypatch.setattr(machine, "_busy", lambda: 0.1)
    machine.peaks(threads=3)
    assert len(measured) == 8  # once per process
    monkeypatch.setattr(machine, "_again", set())
    found = machine.peaks(threads=3)
    assert found["busy"] == 0.1 and found["all_reduce"] == ring
    monkeypatch.setattr(machine, "_again", set())
    assert machine.peaks(threads=3) == found and len(measured) == 12
    assert capsys.readouterr() == ("", "")


def spoiled(text):
    """Return the ways in which a file may be unusable."""
    good = json.loads(text)
    return {
        "cut short": text[: len(text) // 2],
        "empty": "",
        "not text": "\x00\xff\x00",
        "a list": "[1, 2]",
        "deep": "[" * 100_000,
        "another machine's": json.dumps(good | {"id": "epyc-64c-1"}),
        "another torch's": json.dumps(good | {"torch": "1.0"}),
        "not a number": json.dumps(good | {"copy_bytes_per_s": float("nan")}),
        "negative": json.dumps(good | {"gemm_flops": {"float32": -1}}),
        "words": json.dumps(good | {"triad_bytes_per_s": "quick"}),
        "no table": json.dumps(good | {"gemm_flops": [1]}),
        "no ring": json.dumps(good | {"all_reduce": 3}),
        "busy in words": json.dumps(good | {"busy": "very"}),
        "no threads": json.dumps(good | {"threads": None}),
    }


def test_an_unusable_file_is_measured_again(cache, measured):
    first = machine.peaks(threads=3)
    path = cache / f"peaks-{first['id']}.json"
    for what, text in spoiled(path.read_text()).items():
        del measured[:]
        path.write_bytes(text.encode("latin-1"))
        again = machine.peaks(threads=3)
        assert again | {"busy": None} == first | {"busy": None}, what
        assert len(measured) == 4, what
    assert list(cache.iterdir()) == [path]  # nothing left beside it


def test_an_unwritable_cache_only_costs_time(tmp_path, measured, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "file"))
    assert machine.peaks(threads=3)["gemm_flops"]["float32"] == 3e11
    machine.keep_peaks({"all_reduce": None}, threads=3)


def test_threads_are_restored_after_a_failure(cache, monkeypatch):
    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ceilings, "measure", fails)
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        machine.peaks(threads=before + 1)
    assert torch.get_num_threads() == before
    assert not list(cache.iterdir())


def test_measuring_is_real_and_leaves_the_precision_alone():
    before = torch.get_float32_matmul_precision()
    device = torch.device("cpu")
    rate = ceilings.gemm_flops("float32", sizes=(64,), budget_s=0.01)
    assert 1e7 < rate < 1e15
    assert torch.get_float32_matmul_precision() == before
    found = ceilings.bandwidth(device, 3 * 2**20, budget_s=0.01)
    assert found["buffer_bytes"] == 2**20 <= found["cache_bytes"]
    assert 1e7 < found["triad_bytes_per_s"] < 1e14
    assert set(ceilings.transfer(device).values()) == {None}


def test_bytes_are_those_read_and_written_beyond_the_caches(monkeypatch):
    """In a second each: the array once read or written is the unit."""
    operations = []

    def shortest(call, device, budget_s):
        operations.append((call.func.__name__, len(call.args)))
        return 1.0

    monkeypatch.setattr(ceilings, "shortest", shortest)
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 2**26 + 4)
    found = ceilings.bandwidth(torch.device("cpu"), 2**30)
    size = found["buffer_bytes"]
    assert operations == [("copy_", 1), ("add", 2)]
    assert size == found["cache_bytes"] == 2**26 + 4
    assert found["copy_bytes_per_s"] == 2 * size  # one is read, one written
    assert found["triad_bytes_per_s"] == 3 * size


def test_a_slow_dtype_ends_in_its_budget(monkeypatch):
    sizes = []

    def slow(call, device, budget_s):
        n = call.args[0].shape[0]
        sizes.append(n)
        return 2 * n**3 / 1.3e9  # what an emulated product reaches

    monkeypatch.setattr(ceilings, "shortest", slow)
    rate = ceilings.gemm_flops("bfloat16", sizes=(1024, 2048), budget_s=0.5)
    assert rate == pytest.approx(1.3e9) and sizes == [512]
    assert ceilings.gemm_flops("float64", sizes=(64,)) and sizes[-1] == 64


def test_shortest_leaves_out_the_first_call(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: clock[0])
    times = iter([0.25, 3.0, 2.0, 4.0, 50.0, 1.0])

    def call():  # the first is the quickest here: it must not count
        clock[0] += next(times)

    assert ceilings.shortest(call, torch.device("cpu"), 30.0) == 2.0


def test_a_slow_first_call_is_no_ceiling(monkeypatch):
    """As on a GPU, where it makes a cuBLAS handle and loads the kernels."""
    clock, calls = [0.0], []
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: clock[0])

    def product(a, b, out):
        calls.append(a.shape[0])
        first = calls.count(a.shape[0]) == 1
        clock[0] += 2 * a.shape[0] ** 3 / 1e11 * (100 if first else 1)

    monkeypatch.setattr(torch, "mm", product)
    rate = ceilings.gemm_flops("float32", sizes=(1024,), budget_s=0.5)
    assert rate == pytest.approx(1e11) and 1024 in calls

    def shortest(call, device, budget_s):  # what took the first for a time
        before = clock[0]
        call()
        return clock[0] - before

    del calls[:]
    monkeypatch.setattr(ceilings, "shortest", shortest)
    rate = ceilings.gemm_flops("float32", sizes=(1024,), budget_s=0.5)
    assert rate == pytest.approx(1e9) and 1024 not in calls


def test_even_without_a_budget_two_calls_are_timed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: clock[0])
    times = iter([50.0, 9.0, 3.0])

    def call():
        clock[0] += next(times)

    assert ceilings.shortest(call, torch.device("cpu"), 0.0) == 3.0
    assert next(times, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peaks_of_a_gpu(cache):
    found = machine.peaks("cuda")
    card = machine.card("cuda")
    assert card["gpu"]["name"] and found["id"] == card["id"]
    assert found["host_to_device_bytes_per_s"] > 1e8
    for dtype, rate in found["gemm_flops"].items():
        published = machine.published_peak(card["gpu"]["name"], dtype)
        if published:
            assert 0.3 * published < rate < 1.05 * published, dtype


# --- source -----------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make a small copy of the project."""
    root = tmp_path / "copy"
    files = {
        "common/machine.py": "a = 1\n",
        "ch02_hardware/results/m.json": "{}",
        "ch02_hardware/ch02.ipynb": "{}",
        "README.md": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(machine, "ROOT", root)
    return root


def git(root, *words):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    settings += ["-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *words], check=True, capture_output=True)


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@needs_git
def test_source_in_git(tree):
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "first")
    clean = machine.source()
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    for name in ("ch02_hardware/results/m.json", "README.md"):
        (tree / name).write_text("changed")
    (tree / "ch02_hardware/ch02.ipynb").write_text("[]")
    (tree / "scratch.py").write_text("untracked")
    assert machine.source() == clean
    (tree / "common/machine.py").write_text("a = 2\n")
    assert machine.source() == clean | {"dirty": True}
    git(tree, "add", ".")
    assert machine.source()["dirty"] is True
    (tree / "common/machine.py").unlink()
    assert machine.source()["dirty"] is True


@needs_git
def test_a_hooks_environment_does_not_mislead(tree, tmp_path, monkeypatch):
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "first")
    right = machine.source()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert machine.source() == right


def test_source_without_git(tree, monkeypatch):
    monkeypatch.setenv("PATH", "")
    first = machine.source()
    assert len(first["sources"]) == 64
    (tree / "ch02_hardware/results/m.json").write_text("[]")
    (tree / "common/machine.py").write_bytes(b"a = 1\r\n")
    assert machine.source() == first
    (tree / "common/machine.py").write_text("a = 2\n")
    assert machine.source() != first


@needs_git
def test_a_copy_inside_anothers_repository(tree):
    git(tree.parent, "init")
    git(tree.parent, "commit", "--allow-empty", "-m", "theirs")
    assert "sources" in machine.source()


def test_cache_dir_never_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "a" / "b"))
    assert machine.cache_dir() == tmp_path / "a" / "b"
    assert machine.cache_dir().is_dir()
    monkeypatch.delenv("BENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert machine.cache_dir().parent == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA")

    def nobody():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    assert machine.cache_dir().parent == tmp_path
    assert machine.cache_dir() == machine.cache_dir()


posix = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="needs owners and modes"
)


@posix
def test_without_a_home_the_cache_is_nobody_elses(monkeypatch, tmp_path):
    for name in ("BENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody():
        raise RuntimeError("no home")

    def folder(shared):
        shared.mkdir(exist_ok=True)
        monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: shared)
        return machine.cache_dir()

    monkeypatch.setattr(Path, "home", nobody)
    ours = folder(tmp_path / "a")
    assert ours.name.endswith(f"-{os.getuid()}")
    assert ours.stat().st_mode & 0o777 == 0o700
    machine._homeless_cache.cache_clear()
    assert folder(tmp_path / "a") == ours  # the next process's too

    def made_by_others(place):
        place.mkdir(parents=True)
        place.chmod(0o777)

    def a_link(place):
        place.parent.mkdir()
        place.symlink_to(ours)

    def a_file(place):
        place.parent.mkdir()
        place.write_text("")
        place.chmod(0o666)

    for number, plant in enumerate((made_by_others, a_link, a_file)):
        place = tmp_path / str(number) / ours.name
        plant(place)
        other = folder(place.parent)
        assert other != place and other.parent == place.parent
        assert other.stat().st_mode & 0o777 == 0o700
        assert machine.cache_dir() == other  # the same all through a process


@posix
def test_only_ours(monkeypatch, tmp_path):
    path = tmp_path / "library.so"
    assert not machine.only_ours(path)
    path.write_text("")
    for mode, ours in ((0o700, 1), (0o755, 1), (0o775, 0), (0o757, 0)):
        path.chmod(mode)
        assert machine.only_ours(path) == bool(ours), oct(mode)
    path.chmod(0o700)
    (tmp_path / "link").symlink_to(path)
    assert not machine.only_ours(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not machine.only_ours(path)
