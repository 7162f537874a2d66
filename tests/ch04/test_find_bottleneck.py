"""Where a trace's time went: accounts, verdicts and the command line."""

import copy
import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import synthetic

from ch04_profiling import accounting, find_bottleneck, traces, verdicts
from ch04_profiling import event_names as names
from chapters import toc
from common import bench

FILES = sorted(synthetic.FOLDER.rglob("*.json"))


def report_of(recording, tmp_path, name="trace.json"):
    path = tmp_path / name
    path.write_text(recording.text(), encoding="utf-8")
    return find_bottleneck.read(path)


def parts(rank):
    """Return the shares of a rank's span in per cent, those above zero."""
    return {
        name: 100 * us / rank["span_us"]
        for name, us in rank["parts"].items()
        if us
    }


def check_sums(report):
    """Parts add up to the span, whole and step by step; names are known."""
    for rank in report["ranks"]:
        assert list(rank["parts"]) == names.PARTS
        assert sum(rank["parts"].values()) == pytest.approx(
            rank["span_us"], rel=1e-12
        )
        assert min(rank["parts"].values()) >= 0
        assert min(rank["hidden"].values()) >= 0
        check_busy(rank)
        for step in rank["steps"]:
            assert sum(step["parts"].values()) == pytest.approx(
                step["span_us"], rel=1e-12
            )
    assert len(report["findings"]) <= 3
    for finding in report["findings"]:
        assert finding["kind"] in verdicts.KINDS
        assert 0 <= finding["gain_bound"] <= finding["share_of_span"] <= 1
    json.dumps(report, allow_nan=False)


def check_busy(rank):
    """What the device works in is inside of its span, and no more than it."""
    span = rank["gpu_span"]
    inner = span["compute_us"] + span["other_us"] + span["idle_us"]
    assert inner == pytest.approx(span["span_us"], rel=1e-12)
    busy = sum(rank["parts"][name] for name in names.WORK)
    assert busy <= span["span_us"] * (1 + 1e-12)
    assert min(span.values()) >= 0


# ---- one trace for each kind of finding ----------------------------------


def test_the_committed_traces_are_those_of_the_generator():
    found = {
        path.relative_to(synthetic.FOLDER).as_posix(): path.read_text("utf-8")
        for path in FILES
    }
    assert found == synthetic.texts()
    assert set(synthetic.SINGLE) | {"straggler"} == set(verdicts.KINDS)


@pytest.mark.parametrize("kind", verdicts.KINDS)
def test_each_kind_is_found_first(kind):
    path = synthetic.FOLDER / kind
    if not path.is_dir():
        path = path.with_name(f"{kind}.json")
    report = find_bottleneck.read(path)
    check_sums(report)
    kinds = [finding["kind"] for finding in report["findings"]]
    if kind == "straggler":
        assert kind in kinds
        (late,) = (f for f in report["findings"] if f["kind"] == kind)
        assert late["rank"] == 1
    else:
        assert kinds == [kind]


@pytest.mark.parametrize(
    ("kind", "part", "percent"),
    [
        ("data-bound", "idle_loader", 60),
        ("host-bound", "idle_host", 92),
        ("transfer-bound", "copy_h2d", 60),
        ("compute-bound", "gemm", 100 * 11760 / 12100),
        ("bandwidth-bound", "elementwise", 100 * 11760 / 12100),
        ("communication-bound", "communication", 100 * 4800 / 11040),
        ("compilation", "idle_compilation", 50),
        ("start-up", "idle_start_up", 100 * 940_000 / 941_630),
    ],
)
def test_the_share_is_the_planted_one(kind, part, percent):
    (rank,) = find_bottleneck.read(synthetic.FOLDER / f"{kind}.json")["ranks"]
    assert parts(rank)[part] == pytest.approx(percent, abs=1e-6)


def test_hidden_communication_is_not_exposed():
    (rank,) = find_bottleneck.read(
        synthetic.FOLDER / "communication-bound.json"
    )["ranks"]
    assert rank["hidden"]["communication"] == 12 * 100
    assert rank["parts"]["communication"] == 12 * 400


def test_cures_are_sections_of_the_book_and_their_scripts():
    cures = set(verdicts.CURES.values()) | {
        ("6.2.1", "ch06_single_gpu_perf.batch_size"),
        ("6.1.3", "ch06_single_gpu_perf.overlap_copies"),
        ("8.2", "ch08_distributed.collectives"),
        ("8.4.2", "ch08_distributed.fsdp"),
    }
    for section, script in cures:
        assert script in toc.section(section).modules


# ---- what owns a time ----------------------------------------------------


def test_a_sync_is_charged_at_most_what_the_host_had_waited(tmp_path):
    """A wait of 100 µs cannot be to blame for 3 ms of Python after it."""
    made = synthetic.Recording()
    for k in range(24):
        at = 4000 * k
        made.run(synthetic.GEMM, at, 10, at + 20, 100)
        made.add("cuda_runtime", "cudaStreamSynchronize", at + 20, 105)
    (rank,) = report_of(made, tmp_path)["ranks"]
    assert rank["parts"]["idle_sync"] == pytest.approx(23 * 105, abs=30)
    assert rank["parts"]["idle_host"] > 20 * 3000


def test_a_gap_between_queued_kernels_is_not_the_loaders(tmp_path):
    """The host is already loading the next batch while the GPU works."""
    made = synthetic.Recording()
    for k in range(30):
        made.run(synthetic.GEMM, 10 * k, 5, 400 + 405 * k, 400)
    made.add("user_annotation", "enumerate(DataLoader)#x", 400, 12_000)
    report = report_of(made, tmp_path)
    assert parts(report["ranks"][0]).get("idle_loader", 0) < 4
    assert report["findings"][0]["kind"] == "compute-bound"


def test_a_loader_in_another_thread_is_no_wait(tmp_path):
    made = synthetic.Recording()
    for k in range(30):
        made.add("cpu_op", "aten::mm", 500 * k, 480)
        made.run(synthetic.GEMM, 500 * k + 200, 10, 500 * k + 220, 100)
    made.add("user_annotation", "enumerate(DataLoader)#x", 0, 15_000, lane=555)
    (rank,) = report_of(made, tmp_path)["ranks"]
    assert rank["parts"]["idle_loader"] == 0


def test_a_watchdog_that_polls_is_nobodys_wait(tmp_path):
    made = synthetic.compute_bound()
    for k in range(100):
        made.add("cuda_runtime", "cudaEventQuery", 120 * k, 3, lane=-77)
        made.add("cuda_runtime", "cudaEventSynchronize", 120 * k, 9, lane=-7)
    (rank,) = report_of(made, tmp_path)["ranks"]
    assert set(rank["waiting_calls"][0]["name"].split()) == {
        "cudaDeviceSynchronize"
    }


def test_merging_and_membership_agree_with_a_count_by_hand():
    generator = np.random.default_rng(0)
    for _ in range(50):
        starts = generator.integers(0, 200, 30)
        ends = starts + generator.integers(0, 15, 30)
        union = accounting.merge(starts, ends)
        by_hand = {
            t for a, b in zip(starts, ends, strict=True) for t in range(a, b)
        }
        points = np.arange(-5, 230)
        held = accounting.inside(union, points)
        assert set(points[held].tolist()) == by_hand
        assert int((union[1] - union[0]).sum()) == len(by_hand)
        assert (union[0][1:] > union[1][:-1]).all()


def test_steps_of_a_trace_share_its_parts(tmp_path):
    (rank,) = find_bottleneck.read(synthetic.FOLDER / "data-bound.json")[
        "ranks"
    ]
    assert [step["name"] for step in rank["steps"]] == [
        "step 5",
        "step 6",
        "step 7",
    ]
    for step in rank["steps"]:
        assert step["parts"]["idle_loader"] == 6000


# ---- names ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("ampere_sgemm_128x64_tn", "gemm"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("Cijk_Alik_Bljk_SB_MT64x16x32_MI16x16x1_SN", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(P)", "gemm"),
        ("volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t", "gemm"),
        ("void implicit_convolve_sgemm<float, 1024, 6, 7>(int)", "gemm"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("triton_poi_fused_add_mm_gelu_3", "elementwise"),
        ("triton_red_fused_native_layer_norm_2", "elementwise"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_traits>(P)", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnBwdSm90>", "attention"),
        ("void pytorch_flash::fwd<128>(P)", "attention"),
        (
            "void at::native::multi_tensor_apply_kernel<FusedAdamMath>(T)",
            "optimizer",
        ),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(A)", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(A)", "communication"),
        ("void vllm::cross_device_reduce_1stage<bf16, 8>(P)", "communication"),
        ("void at::native::softmax_warp_forward<float>(f)", "elementwise"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(T)", "elementwise"),
        ("void convert_fp8_kernel(half*)", "elementwise"),
        ("void cudnn::ops::nchwToNhwcKernel<float>(P)", "elementwise"),
        (
            "void at::native::vectorized_elementwise_kernel<4, "
            "launch_clamp_scalar(c10::Scalar)::{lambda()#1}>(int)",
            "elementwise",
        ),
        ("at::cuda::spin_kernel(long)", "other_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "copy_h2d"),
        ("Memcpy DtoH (Device -> Pageable)", "copy_d2h"),
        ("Memcpy DtoD (Device -> Device)", "copy_d2d"),
        ("Memset (Device)", "copy_d2d"),
        ("CopyHostToDevice", "copy_h2d"),
    ],
)
def test_names_of_gpu_work(name, work):
    assert names.work_on_gpu(name) == work


@pytest.mark.parametrize(
    ("label", "rank"),
    [
        ("rank_12_step3.json.gz", 12),
        ("rank-3.json", 3),
        ("dlrm/worker7_step_12.169412.pt.trace.json", 7),
        ("host_4711.1694128201545.pt.trace.json", None),
        ("trace.json", None),
        ("4.json", 4),
        ("gpu2_trace.json", 2),
    ],
)
def test_ranks_in_file_names(label, rank):
    assert traces.rank_of_name(label) == rank


# ---- other ways to write the same trace ----------------------------------


def rewritten(change):
    """Return data-bound's text after a change to its object."""
    whole = json.loads((synthetic.FOLDER / "data-bound.json").read_text())
    changed = change(whole)
    return json.dumps(whole if changed is None else changed)


OLD = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "cuda_runtime": "Runtime",
    "user_annotation": "Operator",
    "cpu_op": "Operator",
}


def in_old_words(whole):
    for event in whole["traceEvents"]:
        event["cat"] = OLD[event["cat"]]
        if event["cat"] == "Kernel":
            event["tid"] = f"stream {event['tid']}"


def in_nanoseconds(whole):
    for event in whole["traceEvents"]:
        event["ts"] = event["ts"] * 1000 + 1_700_000_000_000_000_000
        event["dur"] *= 1000


def in_epoch_microseconds(whole):
    whole["displayTimeUnit"] = "ns"  # says nothing about ts
    for event in whole["traceEvents"]:
        event["ts"] += 1_700_000_000_000_000


def as_text(whole):
    for event in whole["traceEvents"]:
        event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])


def as_pairs(whole):
    """Write begin and end events, outermost first."""
    events = []
    for event in whole["traceEvents"]:
        if event["cat"] == "kernel":
            end = {k: event[k] for k in ("pid", "tid")} | {
                "ph": "E",
                "ts": event["ts"] + event["dur"],
            }
            events += [event | {"ph": "B"}, end]
        else:
            events.append(event)
    whole["traceEvents"] = events


def shuffled(whole):
    np.random.default_rng(3).shuffle(whole["traceEvents"])


def header_last(whole):
    events = whole.pop("traceEvents")
    return {"traceEvents": events} | whole


def bare_list(whole):
    return whole["traceEvents"]


def with_strangers(whole):
    """Add what other tools write: unknown categories, flows, counters."""
    whole["traceEvents"][:0] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}},
        {"ph": "s", "id": 1, "pid": 0, "tid": 7, "ts": 1, "cat": "ac2g"},
        {"ph": "C", "name": "GPU clock", "ts": 5, "args": {"MHz": 1}},
        {"ph": "X", "cat": "Trace", "name": "all", "ts": 0, "dur": 1e9},
        {"ph": "X", "cat": "cosmic", "name": "ray", "ts": 0, "dur": 7},
        {"ph": "i", "name": "Record Window End", "ts": 1_030_001, "s": "g"},
    ]


@pytest.mark.parametrize(
    "change",
    [
        in_old_words,
        in_nanoseconds,
        in_epoch_microseconds,
        as_text,
        as_pairs,
        shuffled,
        header_last,
        bare_list,
        with_strangers,
    ],
)
def test_the_same_trace_written_otherwise_reads_the_same(change, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(rewritten(change))
    (rank,) = find_bottleneck.read(path)["ranks"]
    (same,) = find_bottleneck.read(synthetic.FOLDER / "data-bound.json")[
        "ranks"
    ]
    assert rank["span_us"] == same["span_us"]
    assert rank["parts"] == pytest.approx(same["parts"], abs=1)


def test_nanoseconds_are_known_by_the_copies_rates(tmp_path):
    made = synthetic.transfer_bound()
    for event in made.events:
        if event["cat"] == "gpu_memcpy":
            # 3.6 MB in 600 µs
            event["args"]["memory bandwidth (GB/s)"] = 6.0
    usual = report_of(made, tmp_path)["ranks"][0]
    for event in made.events:
        event["ts"], event["dur"] = event["ts"] * 1000, event["dur"] * 1000
    assert report_of(made, tmp_path)["ranks"][0]["parts"] == usual["parts"]


def test_a_long_trace_is_read_in_pieces(tmp_path, monkeypatch):
    expected = find_bottleneck.read(synthetic.FOLDER / "host-bound.json")
    for size in (7, 100, 1009):
        monkeypatch.setattr(traces, "CHUNK", size)
        assert expected == find_bottleneck.read(
            synthetic.FOLDER / "host-bound.json"
        )


# ---- the recordings of several ranks -------------------------------------


def test_an_archive_reads_like_its_folder(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "ranks.tar.gz", "w:gz") as archive:
        archive.add(synthetic.FOLDER / "straggler", "straggler")
    packed = find_bottleneck.read(tmp_path / "ranks.tar.gz")
    folder = find_bottleneck.read(synthetic.FOLDER / "straggler")
    assert packed["findings"] == folder["findings"]
    assert [r["rank"] for r in packed["ranks"]] == [0, 1, 2]


def test_missing_ranks_are_said(tmp_path):
    report = report_of(synthetic.straggler(1), tmp_path, "x.json")
    (said,) = (w for w in report["warnings"] if w["kind"] == "missing-ranks")
    assert "only rank 1 of 3" in said["text"]


def test_equal_ranks_have_no_straggler(tmp_path):
    """Different starts of the recordings make one wait long, not a habit."""
    for rank in range(3):
        made = synthetic.communication_bound(rank, 3)
        first = next(e for e in made.events if "nccl" in e["name"])
        if rank:
            first["dur"] += 9000
            for event in made.events:
                if event is not first and event["ts"] > first["ts"]:
                    event["ts"] += 9000
        path = tmp_path / f"rank{rank}.json"
        path.write_text(made.text())
    kinds = {f["kind"] for f in find_bottleneck.read(tmp_path)["findings"]}
    assert "straggler" not in kinds
    assert "communication-bound" in kinds


def taking_turns(folder, late, steps=24):
    """Three ranks; of each step one is late, and all end it together."""
    for rank in range(3):
        made, at = synthetic.Recording(rank, 3), 0
        for k in range(steps):
            work = 900 if rank == late(k) else 500
            made.step(k, at, 1000)
            made.run(synthetic.GEMM, at, 5, at + 10, work)
            reduces = at + 10 + work
            made.run(synthetic.NCCL, at + 6, 5, reduces, at + 990 - reduces)
            at += 1000
        (folder / f"rank{rank}.json").write_text(made.text())
    found = find_bottleneck.read(folder)["findings"]
    return {f["kind"]: f["rank"] for f in found}


def test_ranks_that_are_late_in_turn_have_no_straggler(tmp_path):
    """Each waits as long as the others do: none of them is to blame."""
    found = taking_turns(tmp_path, lambda k: k % 3)
    assert "straggler" not in found and "communication-bound" in found
    # of one that is late a little more often than the others, neither
    found = taking_turns(tmp_path, lambda k: 0 if k % 12 == 1 else k % 3)
    assert "straggler" not in found
    assert taking_turns(tmp_path, lambda k: 2)["straggler"] == 2


def test_a_bad_file_beside_good_ones_is_named(tmp_path):
    for rank in range(2):
        path = tmp_path / f"rank{rank}.json"
        path.write_text(synthetic.straggler(rank).text())
    (tmp_path / "rank2.json").write_text("never a trace")
    report = find_bottleneck.read(tmp_path)
    (said,) = (w for w in report["warnings"] if w["kind"] == "unreadable")
    assert "rank2.json" in said["text"]


# ---- two recordings ------------------------------------------------------


def ranks_of(recording, tmp_path, name):
    path = tmp_path / name
    path.write_text(recording.text())
    return verdicts.number(traces.read([path]))


def test_against_says_what_changed_per_step(tmp_path):
    old = ranks_of(synthetic.data_bound(), tmp_path, "old.json")
    new = ranks_of(synthetic.compute_bound(), tmp_path, "new.json")
    found = find_bottleneck.against(new, old)
    assert found["unit"] == "step"
    assert found["old_us"] == pytest.approx(9980, abs=30)
    assert found["cured"] == ["data-bound"]
    assert found["parts"]["idle_loader"] == [6000, 0]


def test_against_counts_samples_when_the_batch_differs(tmp_path):
    def recording(batch):
        made = synthetic.compute_bound()
        made.add(
            "cpu_op", "aten::conv2d", 1, 2, **{"Input Dims": [[batch, 3, 8]]}
        )
        return made

    old = ranks_of(recording(8), tmp_path, "old.json")
    new = ranks_of(recording(16), tmp_path, "new.json")
    found = find_bottleneck.against(new, old)
    assert found["unit"] == "sample"
    assert found["speed"] == pytest.approx(2)


# ---- bad input -----------------------------------------------------------


def refuses(path, sentence):
    with pytest.raises(bench.Refusal, match=sentence) as caught:
        find_bottleneck.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty"),
        (b"hello", "not JSON"),
        (b"\x89PNG\r\n\x1a\n....", "not JSON"),
        (b"null", "is one value of JSON, so not a trace"),
        (b"12\n", "is one value of JSON"),
        (b'"x"', "is one value of JSON"),
        (b"12 13", "is not JSON"),
        (b'"x', "is not JSON"),
        (b"{}", "no timed events"),
        (b"[]", "no timed events"),
        (b'{"a": 1}', "no timed events"),
        (b'{"traceEvents": 3}', "no timed events"),
        (b'{"traceEvents": []}', "no timed events"),
        (b'{"traceEvents": [1, null, "x", [], {}]}', "no timed events"),
        (b"[" * 100_000, "nested|no timed events"),
        (b'{"traceEvents": ' + b"[" * 100_000, "nested|no timed events"),
        (b"\x1f\x8b\x08\x00broken", "cannot be unpacked"),
        (b"{" + b'"a' * 50, "not JSON|no timed events"),
    ],
)
def test_what_is_no_trace_is_one_sentence(content, sentence, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    refuses(path, sentence)


def test_nothing_there(tmp_path):
    refuses(tmp_path / "absent.json", "no such file")
    refuses(tmp_path, "no .json")


def test_a_cut_file_is_read_to_the_cut_and_said(tmp_path):
    text = (synthetic.FOLDER / "data-bound.json").read_text()
    path = tmp_path / "cut.json"
    path.write_text(text[: len(text) * 9 // 10])
    report = find_bottleneck.read(path)
    check_sums(report)
    assert "truncated" in {w["kind"] for w in report["warnings"]}
    assert report["findings"][0]["kind"] == "data-bound"


def test_a_cut_gzip_is_read_to_the_cut_and_said(tmp_path):
    packed = gzip.compress(
        (synthetic.FOLDER / "data-bound.json").read_bytes(), 0
    )
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    report = find_bottleneck.read(path)
    assert "truncated" in {w["kind"] for w in report["warnings"]}


@pytest.mark.parametrize("filling", [b" ", b"a", b"[", b"0"])
def test_a_gzip_bomb_is_refused(filling, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(traces, "CHUNK", 1 << 16)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"x": "' + filling * (8 << 20)))
    refuses(path, "unpacks to more than")


def test_broken_events_are_left_out_and_counted(tmp_path):
    text = (synthetic.FOLDER / "data-bound.json").read_text()
    lines = text.splitlines()
    lines[5] = lines[5].replace('"ts": ', '"ts": NaN, "x": ')
    lines[6] = lines[6].replace('"ts": ', '"ts": 1e400, "x": ')
    lines[7] = lines[7].replace('"dur": ', '"dur": -')
    lines[8] = lines[8].replace('"ts": ', '"ts": ' + "9" * 5000 + ', "x": ')
    lines[9] = '{"ph": "X", "name": "\\x", "ts": 1},'
    lines[10] = lines[10].replace('"dur"', '"other"')
    path = tmp_path / "broken.json"
    path.write_text("\n".join(lines))
    report = find_bottleneck.read(path)
    check_sums(report)
    (said,) = (w for w in report["warnings"] if w["kind"] == "damaged-events")
    assert said["text"].startswith("6 entries could not")
    assert report["findings"][0]["kind"] == "data-bound"


def test_one_broken_event_is_one_entry(tmp_path):
    made = synthetic.data_bound()
    made.events[3]["dur"] = -1
    (said,) = (
        w
        for w in report_of(made, tmp_path)["warnings"]
        if w["kind"] == "damaged-events"
    )
    assert said["text"].startswith("1 entry could not be read as a timed")


def test_one_wild_time_costs_the_others_nothing(tmp_path):
    made = synthetic.data_bound()
    expected = report_of(made, tmp_path)["ranks"][0]["parts"]
    for wild in (1e29, 10**18, -(10**17)):
        made.events.insert(0, made.events[-1] | {"ts": wild})
        report = report_of(made, tmp_path)
        assert report["ranks"][0]["parts"] == expected
        made.events.pop(0)


VALUES = [
    None,
    True,
    -1,
    0,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "x" * 1000,
    "\x00\x1f",
    [],
    [[]],
    {},
    {"a": []},
    -(2**63),
    2**64,
]


def fuzzed(generator):
    """Return the bytes of a trace with random faults in it."""
    kind = generator.choice(list(synthetic.SINGLE))
    whole = json.loads(synthetic.SINGLE[kind]().text())
    events = whole["traceEvents"]
    for _ in range(generator.integers(0, 12)):
        event = events[generator.integers(len(events))]
        target = event
        if generator.random() < 0.4 and isinstance(event.get("args"), dict):
            target = event["args"]
        key = generator.choice([*target, "args", "Ev Idx", "bytes"])
        if generator.random() < 0.2:
            target.pop(key, None)
        else:
            value = VALUES[generator.integers(len(VALUES))]
            target[str(key)] = copy.deepcopy(value)
    if generator.random() < 0.3:
        key = generator.choice(["distributedInfo", "deviceProperties"])
        whole[str(key)] = VALUES[generator.integers(len(VALUES))]
    if generator.random() < 0.3:
        generator.shuffle(events)
    data = bytearray(json.dumps(whole).encode())
    if generator.random() < 0.4:
        for _ in range(generator.integers(1, 8)):
            data[generator.integers(len(data))] = generator.integers(256)
    if generator.random() < 0.3:
        data = data[: generator.integers(len(data))]
    if generator.random() < 0.2:
        data = bytearray(gzip.compress(bytes(data), 1))
        data[generator.integers(len(data))] = generator.integers(256)
    return bytes(data)


def test_faults_of_all_kinds_end_in_a_report_or_a_sentence(tmp_path, capsys):
    generator = np.random.default_rng(5)
    path = tmp_path / "fuzzed.json"
    read = 0
    for _ in range(300):
        path.write_bytes(fuzzed(generator))
        try:
            report = find_bottleneck.read(path)
        except bench.Refusal as refusal:
            assert "\n" not in str(refusal)
            continue
        read += 1
        check_sums(report)
        find_bottleneck.show(report)
    assert read > 100


# ---- command line --------------------------------------------------------


def test_json_is_one_object(capsys):
    path = str(synthetic.FOLDER / "data-bound.json")
    find_bottleneck.main([path, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ranks", "findings", "warnings"}
    assert found == json.loads(json.dumps(find_bottleneck.read(path)))


def test_the_text_names_the_verdict_and_its_cure(capsys):
    find_bottleneck.main([str(synthetic.FOLDER / "straggler")])
    find_bottleneck.main([str(synthetic.FOLDER / "data-bound.json")])
    out = capsys.readouterr().out
    assert "straggler (rank 1)" in out
    assert "see 6.1.1, ch06_single_gpu_perf.loader_workers" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_plot_is_drawn(tmp_path):
    target = tmp_path / "out.png"
    find_bottleneck.main(
        [str(synthetic.FOLDER / "straggler"), "--plot", str(target)]
    )
    assert target.read_bytes()[:4] == b"\x89PNG"
    ranks = verdicts.number(
        traces.read([synthetic.FOLDER / "data-bound.json"])
    )
    slices = np.linspace(0, ranks[0].span, 78).astype(np.int64)
    table = find_bottleneck.shares_over_time(ranks[0].account, slices)
    assert table.sum(axis=0) == pytest.approx(1)


def test_a_refusal_ends_with_code_2(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("no")
    done = subprocess.run(
        [sys.executable, "-m", "ch04_profiling.find_bottleneck", str(path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("flag", [["--json"], ["--against", "x"]])
def test_flags_without_a_trace_are_refused(flag):
    with pytest.raises(bench.Refusal, match="needs a trace"):
        find_bottleneck.main(flag)


def test_the_lesson_runs():
    rows = find_bottleneck.main(["--smoke", "--device", "cpu"])
    assert rows[0]["loader_percent"] > rows[1]["loader_percent"]
    assert "data-bound" in rows[0]["findings"]


# ---- what readers and breakers found ----------------------------------------


def reading(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    return find_bottleneck.read(path)


def test_kernels_of_ones_own_are_named(tmp_path):
    text = synthetic.compute_bound("my_kernel(float*)").text()
    (finding,) = reading(tmp_path, text)["findings"]
    assert finding["kind"] == "compute-bound"
    assert finding["share_of_span"] > 0.5
    assert "my_kernel" in finding["evidence"]
    assert finding["script"] == "ch04_profiling.nsight_compute"


def test_an_event_with_a_wrong_clock_is_not_passed_over(tmp_path):
    stray = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1}
    text = synthetic.compute_bound("ampere_sgemm").text()
    data = json.loads(text)
    data["traceEvents"].append(stray | {"ts": 8.0001e10, "dur": 5})
    report = reading(tmp_path, json.dumps(data))
    assert "unexplained-idle" in [w["kind"] for w in report["warnings"]]


def test_times_beyond_any_clock_are_a_sentence(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "g", "pid": 0, "tid": 7}
    events = [event | {"ts": 10**400 + i, "dur": 5} for i in range(3)]
    with pytest.raises(bench.Refusal):
        reading(tmp_path, json.dumps(events))


def test_a_step_of_many_digits_is_no_traceback(tmp_path):
    data = json.loads(synthetic.compute_bound("ampere_sgemm").text())
    for event in data["traceEvents"]:
        if str(event.get("name", "")).startswith("ProfilerStep"):
            event["name"] = "ProfilerStep#" + "9" * 5000
    assert reading(tmp_path, json.dumps(data))["ranks"]


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    path = tmp_path / "trace.json"
    text = synthetic.compute_bound("ampere_sgemm").text()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(bench.Refusal, match="--plot"):
        find_bottleneck.main([str(path), "--plot", str(tmp_path)])


def test_a_file_cannot_command_the_terminal(tmp_path, capsys):
    text = synthetic.compute_bound("gemm\u001b[31mX").text()
    find_bottleneck.show(reading(tmp_path, text))
    printed = capsys.readouterr().out
    assert "\u001b" not in printed and "gemm" in printed


def test_a_cure_that_is_not_written_is_called_planned(tmp_path, capsys):
    report = reading(tmp_path, synthetic.compute_bound("ampere_sgemm").text())
    report["findings"][0] |= {"script": "ch99_nothing.there"}
    find_bottleneck.show(report)
    assert "its script is planned" in capsys.readouterr().out
