"""3.1.2: which index is a view, which a copy, and what a write reaches."""

import functools
import types

import pytest
import torch

from ch03_pytorch_basics import indexing
from ch03_pytorch_basics.operator_library import aten_operators
from common import bench

CPU = torch.device("cpu")


def table():
    return torch.arange(12.0).view(4, 3)


def test_storage_pointers():
    rows = {row["name"]: row for row in indexing.read_rows(table())}
    views = {name for name, row in rows.items() if row["result"] == "view"}
    assert {"x[1]", "x[:, 1]", "x[1:3]", "x[..., None]"} <= views
    assert not views & {"x[[0, 2]]", "x[[1]]", "x[x > 4]", "x[1:3, [0, 1]]"}
    assert rows["x[::2, -2:]"]["offset"] == 1
    assert rows["x[::2, -2:]"]["strides"] == "(6, 1)"
    # views are made by operators that move nothing
    for name in views:
        assert "index" not in rows[name]["operators"]


def test_a_wrong_belief_about_a_read_is_caught(monkeypatch):
    x = table()
    for wrong in (("x[[0]]", lambda: x[[0]], True), ("x[0]", lambda: x[0], 0)):
        monkeypatch.setattr(indexing, "readings", lambda x, w=wrong: [w])
        with pytest.raises(bench.Mismatch, match=r"said to be a view"):
            indexing.read_rows(x)


def test_reads_leave_the_table_as_it_was():
    x = table()
    indexing.read_rows(x)
    assert torch.equal(x, table())


def test_what_an_assignment_reaches():
    rows = {row["name"]: row["x"] for row in indexing.write_rows(CPU)}
    assert rows["x[[0, 2]] = 0"] == "changed"
    assert rows["x[[0, 2]][:] = 0"] == "unchanged: lost"
    assert rows["x[mask][0] = 0"] == "unchanged: lost"
    x, y = table(), table()
    indexing.zero_in_place(x, [0, 2])
    indexing.zero_through_copy(y, [0, 2])
    assert x[[0, 2]].sum() == 0
    assert torch.equal(y, table())


def test_one_operator_writes_through_an_index():
    ran = aten_operators(lambda: indexing.zero_in_place(table(), [0, 2]))
    assert "aten.index_put_.default" in map(str, ran)
    ran = aten_operators(lambda: indexing.zero_through_copy(table(), [0, 2]))
    assert "aten.index_put_.default" not in map(str, ran)


def test_an_id_that_occurs_twice_counts_twice():
    ids = torch.tensor([0, 0, 2, 0])
    right, wrong = torch.zeros(3), torch.zeros(3)
    indexing.count_by_index_add(right, ids)
    indexing.count_by_index(wrong, ids)
    assert right.tolist() == torch.bincount(ids).tolist() == [3, 0, 1]
    assert wrong.tolist() == [1, 0, 1]
    indexing.repeated_rows(CPU)


def test_all_ways_read_the_same_rows():
    x, wanted = torch.randn(16, 4), range(4, 12)
    rows = torch.arange(4, 12)
    mask = (torch.arange(16) >= 4) & (torch.arange(16) < 12)
    expected = indexing.rows_by_slice(x, wanted)
    assert indexing.shares_storage(x, expected)
    for function, which in (
        (indexing.rows_by_slice_copied, wanted),
        (indexing.rows_by_index, rows),
        (indexing.rows_selected, rows),
        (indexing.rows_by_mask, mask),
    ):
        found = function(x, which)
        assert torch.equal(found, expected)
        assert not indexing.shares_storage(x, found)


def test_each_way_is_an_operator_of_its_own():
    """Two rows that ran one operator would compare it with itself."""
    rows, wanted = torch.tensor([1, 2]), range(1, 3)
    mask = torch.tensor([False, True, True, False])
    for function, which, ran in (
        (indexing.rows_by_slice_copied, wanted, "slice.Tensor, clone"),
        (indexing.rows_selected, rows, "index_select"),
        (indexing.rows_by_index, rows, "index.Tensor"),
        (indexing.rows_by_mask, mask, "index.Tensor"),
    ):
        call = functools.partial(function, table(), which)
        assert indexing.names(aten_operators(call)) == ran


@pytest.mark.parametrize(
    ("cache_bytes", "words"),
    [(2**40, "; a view"), (0, ": at least 671 µs here; a view")],
)
def test_memory_bounds_only_what_no_cache_holds(
    monkeypatch, cache_bytes, words
):
    peaks = {"copy_bytes_per_s": 1e11, "cache_bytes": cache_bytes}
    monkeypatch.setattr(indexing.machine, "peaks", lambda device: peaks)
    said = {}
    monkeypatch.setattr(
        indexing.bench, "compare", lambda *args, **how: said.update(how)
    )
    args = types.SimpleNamespace(device=CPU, smoke=False)
    indexing.reading_costs(args, 1 << 18, 64)
    assert said["expect"].startswith(f"a copy moves 64 MiB{words}")


def test_gradients_reach_the_rows_that_were_read():
    wanted, rows = range(1, 3), torch.tensor([1, 2])
    mask = torch.tensor([False, True, True, False])
    found = []
    for function, which in (
        (indexing.rows_by_slice, wanted),
        (indexing.rows_by_index, rows),
        (indexing.rows_selected, rows),
        (indexing.rows_by_mask, mask),
    ):
        x = table().requires_grad_()
        (function(x, which) ** 2).sum().backward()
        found.append(x.grad)
    assert all(torch.equal(grad, found[0]) for grad in found)
    assert found[0][0].sum() == 0


def test_numbers_cost_two_operators_each():
    x = torch.arange(5.0)
    one_by_one, at_once = indexing.numbers_one_by_one, indexing.numbers_at_once
    assert one_by_one(x) == at_once(x) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(aten_operators(lambda: one_by_one(x))) == 10
    assert len(aten_operators(lambda: at_once(x))) == 0


def test_smoke(capsys):
    rows = indexing.main(["--smoke", "--device", "cpu"])
    assert rows[-1]["name"] == "x.tolist()"
    shown = capsys.readouterr()
    assert not shown.err
    assert all(len(line) <= 100 for line in shown.out.splitlines())


@pytest.mark.parametrize("function", indexing.TECHNIQUES)
def test_techniques_work_when_pasted(function, pasted):
    alone, x = pasted(function), table()
    name = function.__name__
    if function is indexing.shares_storage:
        assert alone(x, x[0]) and not alone(x, x.clone())
    elif name.startswith("numbers"):
        assert alone(x[0]) == [0.0, 1.0, 2.0]
    elif name.startswith("count"):
        counts = torch.zeros(3)
        alone(counts, torch.tensor([2]))
        assert counts.tolist() == [0, 0, 1]
    elif name.startswith("zero"):
        alone(x, torch.tensor([1]))
        assert (x[1].sum() == 0) == (function is indexing.zero_in_place)
    else:
        which = range(1, 2) if "slice" in name else torch.tensor([1])
        if function is indexing.rows_by_mask:
            which = torch.tensor([False, True, False, False])
        assert torch.equal(alone(x, which), x[1:2])
