"""The command is right, and a report's own tables are read back."""

import shutil
import sqlite3

import pytest
import torch

from ch04_profiling import nsight_systems
from common import bench

THREAD = (77 << 24) + 5  # nsys packs the process above the thread
OTHER = (78 << 24) + 5


def write(path, inline=True, without=()):
    """Make a report as nsys exports it: one process, and a second one."""
    strings = ["gemm_kernel", "add_kernel", "cudaLaunchKernel", "forward"]
    file = sqlite3.connect(path)
    file.executescript("""
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER,
  deviceId INTEGER, contextId INTEGER, streamId INTEGER,
  correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,
  shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER,
  deviceId INTEGER, streamId INTEGER, correlationId INTEGER,
  globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER,
  eventClass INTEGER, globalTid INTEGER, correlationId INTEGER,
  nameId INTEGER, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER,
  rangeId INTEGER, category INTEGER, color INTEGER, text TEXT,
  globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
  domainId INTEGER);
""")
    file.executemany(
        "INSERT INTO StringIds VALUES (?, ?)", enumerate(strings, start=1)
    )
    text, text_id = ("forward", None) if inline else (None, 4)
    file.executemany(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, "
        "textId) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (100, 200, 59, text, THREAD, text_id),
            (300, 400, 59, text, THREAD, text_id),
            (0, 1000, 60, "step 0", THREAD, None),
            (50, None, 34, "a mark", THREAD, None),
            (0, 1000, 59, "elsewhere", OTHER, None),
        ],
    )
    file.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,0,?,?,3,0)",
        [(110, 120, THREAD, 1), (500, 510, THREAD, 3)]
        + [(310, 320, THREAD + 1, 2)]  # as autograd's thread does
        + [(110, 160, OTHER, 1)],  # the same number in another process
    )
    file.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,1,7,?,?,?,?)",
        [
            # later than its range: the launch decides, not the time
            (250, 650, 1, 77 << 24, 1, 1),
            (650, 700, 2, 77 << 24, 2, 2),
            (700, 730, 3, 77 << 24, 2, 2),
            (120, 9120, 1, 78 << 24, 1, 1),
        ],
    )
    file.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,0,7,9,?,?,?)",
        [(0, 10, 77 << 24, 4096, 1), (20, 30, 77 << 24, 4096, 1)]
        + [(40, 45, 77 << 24, 8, 2)],
    )
    for name in without:
        file.execute(f"DROP TABLE {name}")
    file.commit()
    file.close()
    return path


def by_name(rows):
    return {row["name"]: (row["count"], row["ns"]) for row in rows}


@pytest.mark.parametrize("inline", [True, False])
def test_a_reports_tables_are_read(tmp_path, inline):
    found = nsight_systems.tables(write(tmp_path / "r.sqlite", inline))
    assert by_name(found["Kernels"]) == {
        "gemm_kernel": (2, 9400),
        "add_kernel": (2, 80),
    }
    copies = {row["name"]: row["bytes"] for row in found["Copies"]}
    assert copies == {"host to device": 8192, "device to host": 8}
    calls = by_name(found["CUDA calls of the host"])
    assert calls == {"cudaLaunchKernel": (4, 80)}
    ranges = by_name(found["NVTX ranges, time on the host"])
    assert ranges["forward"] == (2, 200)
    assert "a mark" not in ranges


def test_a_kernel_belongs_to_the_range_of_its_launch(tmp_path):
    found = nsight_systems.tables(write(tmp_path / "r.sqlite"))
    inside = by_name(found["NVTX ranges, time of the kernels launched inside"])
    assert inside["forward"] == (2, 450)
    assert inside["step 0"] == (3, 480)
    assert inside["elsewhere"] == (1, 9000)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # call numbers repeat between processes
        ("AND k.globalPid / 16777216 = r.globalTid / 16777216", ""),
        # another thread launches backward
        ("r.globalTid / 16777216 = m.tid / 16777216", "r.globalTid = m.tid"),
    ],
)
def test_wrong_joins_are_seen(right, wrong, tmp_path):
    assert right in nsight_systems.LAUNCHED
    wrong = nsight_systems.LAUNCHED.replace(right, wrong)
    file = sqlite3.connect(write(tmp_path / "r.sqlite"))
    rows = {name: ns for name, _, ns in file.execute(wrong)}
    file.close()
    assert rows["forward"] != 450


def test_what_was_not_recorded_has_no_rows(tmp_path):
    path = write(
        tmp_path / "r.sqlite",
        without=["CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS"],
    )
    found = nsight_systems.tables(path)
    assert found["Copies"] == found["NVTX ranges, time on the host"] == []
    assert found["Kernels"]


def test_the_command_is_whole():
    words = nsight_systems.command("out", ["python", "-m", "mine", "--x"])
    assert words[:2] == ["nsys", "profile"]
    assert words[-4:] == ["python", "-m", "mine", "--x"]
    assert "--output=out" in words
    assert "--capture-range=cudaProfilerApi" in words
    (traced,) = [w for w in words if w.startswith("--trace=")]
    assert {"cuda", "nvtx"} <= set(traced.removeprefix("--trace=").split(","))
    words = nsight_systems.export("a.nsys-rep", "b.sqlite")
    assert words[:3] == ["nsys", "export", "--type=sqlite"]
    assert words[-1] == "a.nsys-rep"


def test_the_capture_lies_between_synchronisations(monkeypatch):
    said = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            said.append(self.name)

        def __exit__(self, *_):
            pass

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda: said.append("sync"))
    monkeypatch.setattr(cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(cuda.nvtx, "range", Range)
    nsight_systems.capture(lambda: said.append("work"), 1, 2, "cuda")
    assert said == [
        "work",
        *("sync", "start"),
        *("step 0", "work", "step 1", "work"),
        *("sync", "stop"),
    ]


def test_ranges_do_no_harm_without_cuda():
    with torch.profiler.profile() as profile:
        nsight_systems.capture(
            nsight_systems.make_step("cpu", smoke=True), 0, 2, "cpu"
        )
    counts = {e.key: e.count for e in profile.key_averages()}
    for name in nsight_systems.RANGES:
        assert counts[name] == 2
    assert counts["step 1"] == 1


def test_without_the_tool_the_command_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert nsight_systems.main(["--smoke", "--device", "cpu"]) == []
    said = capsys.readouterr().out
    assert "nsys profile" in said.replace(" \\\n   ", "")
    assert "left out: recording and reading a report" in said


def test_a_report_is_shown(tmp_path, capsys):
    path = write(tmp_path / "r.sqlite")
    rows = nsight_systems.main(["--device", "cpu", "--read", str(path)])
    assert {"forward", "gemm_kernel"} <= {row["name"] for row in rows}
    assert "8 KiB" in capsys.readouterr().out


def test_bad_input_is_a_sentence(tmp_path, monkeypatch):
    text = tmp_path / "text.sqlite"
    text.write_text("no database, but long enough to be looked at" * 9)
    other = tmp_path / "other.sqlite"
    file = sqlite3.connect(other)
    file.execute("CREATE TABLE t (x)")
    file.close()
    report = tmp_path / "r.nsys-rep"
    report.write_text("x")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for path, sentence in (
        (tmp_path / "absent.sqlite", "no such file"),
        (text, "not an SQLite file of nsys"),
        (other, "not of nsys"),
        (report, "only nsys reads this"),
        (tmp_path / "absent.nsys-rep", "no such file"),
    ):
        with pytest.raises(bench.Refusal, match=sentence):
            nsight_systems.main(["--device", "cpu", "--read", str(path)])


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nsys"), reason="needs nsys")
def test_a_real_report_has_our_ranges():
    titles = list(nsight_systems.TABLES)
    rows = nsight_systems.main(["--smoke"])
    marks = by_name([r for r in rows if r["title"] == titles[-2]])
    for name in nsight_systems.RANGES:
        assert marks[name][0] == nsight_systems.STEPS
    inside = by_name([r for r in rows if r["title"] == titles[-1]])
    assert inside["backward"][1] > 0
