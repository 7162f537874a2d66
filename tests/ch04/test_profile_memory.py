"""Bytes of programs whose every allocation is known."""

import pytest
import torch

from ch04_profiling import profile_memory
from common import bench

CPU = torch.device("cpu")


def changed(name, sizes=(64, 32, 96)):
    inputs = profile_memory.make_inputs("cpu", *sizes)
    return profile_memory.measured(profile_memory.PROGRAMS[name], inputs, CPU)


CASES = [
    (name, sizes)
    for name in profile_memory.PROGRAMS
    for sizes in [(64, 32, 96), (48, 16, 16), (32, 64, 8)]
    # a wide input moves the peak with gradients to another place
    if name != "with gradients" or sizes[1] <= sizes[2]
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_the_peak_is_exact(name, sizes):
    used = [size for _, size in profile_memory.over_time(changed(name, sizes))]
    assert max(used) == profile_memory.predicted(*sizes)[name]
    assert used[-1] == 0  # what was made is gone


def test_lines_over_each_other_mix_no_colours():
    """A thin line smoothed over a wide one has a colour of neither."""
    rows = profile_memory.main(["--smoke", "--device", "cpu"])
    (axes,) = profile_memory.figure(rows).axes
    lines = axes.get_lines()
    assert len(lines) == len(profile_memory.PROGRAMS)
    assert not any(line.get_antialiased() for line in lines)
    # the widest lies lowest, so that of each something is seen
    widths = [line.get_linewidth() for line in lines]
    heights = [line.get_zorder() for line in lines]
    assert widths == sorted(set(widths))
    assert heights == sorted(set(heights), reverse=True)


def test_every_allocation_has_its_operator():
    flows = profile_memory.by_operator(changed("h named"))
    small, large = 4 * 64 * 32, 4 * 64 * 96
    assert flows["aten::mm"] == [large + small, 0, 2]
    assert flows["aten::clamp_min"] == [large, 0, 1]
    assert flows[None] == [0, 2 * large + small, 0]  # Python lets go
    assert len(flows) == 3


def test_the_public_tables_agree(tmp_path):
    inputs = profile_memory.make_inputs("cpu", 64, 32, 96)
    with torch.profiler.profile(profile_memory=True) as profile:
        profile_memory.named(*inputs)
    own = {e.key: e.self_cpu_memory_usage for e in profile.key_averages()}
    flows = profile_memory.by_operator(changed("h named"))
    for name in ("aten::mm", "aten::clamp_min"):
        assert own[name] == flows[name][0] - flows[name][1]


def test_wrong_ways_miss_the_peak():
    """Sums of what operators allocate, nested or not, are no peak."""
    name = "with gradients"
    inputs = profile_memory.make_inputs("cpu", 64, 32, 96)
    program = profile_memory.PROGRAMS[name]
    with torch.profiler.profile(profile_memory=True) as profile:
        program(*inputs)
    peak = profile_memory.predicted(64, 32, 96)[name]
    events = profile.key_averages()
    own = sum(max(e.self_cpu_memory_usage, 0) for e in events)
    nested = sum(max(e.cpu_memory_usage, 0) for e in events)
    assert own > peak
    assert nested > own


def test_the_same_answer_from_each_program():
    inputs = profile_memory.make_inputs("cpu", 64, 32, 96)
    answers = [
        profile_memory.PROGRAMS[name](*inputs)
        for name in ("h named", "h let go", "relu in place")
    ]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])
    x, w1, w2 = (tensor.clone().requires_grad_() for tensor in inputs)
    profile_memory.named(x, w1, w2).sum().backward()
    found = profile_memory.with_gradients(*inputs)
    torch.testing.assert_close(found, (w1.grad, w2.grad))


def test_the_smoke_run_is_exact_and_drawn(capsys):
    rows = profile_memory.main(["--smoke", "--device", "cpu"])
    programs = [row for row in rows if "peak_bytes" in row]
    assert len(programs) == 4
    assert all(row["bytes_apart"] == 0 for row in programs)
    figure = profile_memory.figure(rows)
    assert len(figure.axes[0].get_lines()) == 4
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_snapshot_needs_cuda(tmp_path):
    words = ["--smoke", "--device", "cpu", "--snapshot", str(tmp_path / "x")]
    with pytest.raises(bench.Refusal, match="only CUDA's allocator"):
        profile_memory.main(words)
    assert not list(tmp_path.iterdir())


def test_techniques_can_be_pasted(pasted, tmp_path):
    path = str(tmp_path / "memory.json")
    ones = torch.ones(8, 8)
    call = pasted(profile_memory.named)
    pasted(profile_memory.memory_trace)(lambda: call(ones, ones, ones), path)
    found = pasted(profile_memory.changes)(path, 0)
    used = pasted(profile_memory.over_time)(found)
    assert max(size for _, size in used) == 3 * 8 * 8 * 4
    assert len(pasted(profile_memory.by_operator)(found)) == 3
    assert pasted(profile_memory.changes)(path, 1) == []


@pytest.mark.gpu
def test_cuda_hands_out_what_the_formula_says(tmp_path):
    device, sizes = torch.device("cuda"), (8192, 1024, 2048)
    inputs = profile_memory.make_inputs(device, *sizes)
    for name, program in profile_memory.PROGRAMS.items():
        found = profile_memory.measured(program, inputs, device)
        peak = max(size for _, size in profile_memory.over_time(found))
        expected = profile_memory.predicted(*sizes)[name]
        assert peak == pytest.approx(expected, rel=0.02), name
    out = tmp_path / "history.pickle"
    profile_memory.main(["--smoke", "--snapshot", str(out)])
    assert out.stat().st_size
