"""3.1.2  Access · 存取張量的資料

Question  Which index reads memory in place, and which copies it?
Expect    integers, slices, None and ... (basic) only compute an offset and
          strides: a view, 0 bytes, whatever its size. Lists, index tensors
          and masks (advanced) read and write every element. A number
          fetched alone costs two operators, fetched with all others none
Run       python -m ch03_pytorch_basics.indexing [--smoke] [--save]
"""

import torch

from ch03_pytorch_basics.operator_library import aten_operators
from common import bench, machine, tables


def shares_storage(a, b):
    """Two tensors share memory when their storages begin at one address."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def rows_by_slice(x, rows):
    """Move the offset to the first of ``rows`` (a range): no data moves."""
    return x[rows.start : rows.stop]


def rows_by_slice_copied(x, rows):
    """Stream the wanted rows once, from one block to another."""
    return x[rows.start : rows.stop].clone()


def rows_by_index(x, rows):
    """Read a list of row numbers, then each row it names."""
    return x[rows]


def rows_selected(x, rows):
    """Do the same with an operator that takes one list for one dimension."""
    return torch.index_select(x, 0, rows)


def rows_by_mask(x, mask):
    """Turn the mask into a list of row numbers (nonzero) first."""
    return x[mask]


def zero_through_copy(x, rows):
    """Write zeros into a copy that nobody keeps: x stays as it was."""
    x[rows][:] = 0


def zero_in_place(x, rows):
    """Hand index and value to one operator, which writes into x."""
    x[rows] = 0


def count_by_index(counts, ids):
    """Read, add 1, write: an id that occurs twice is counted once."""
    counts[ids] += 1


def count_by_index_add(counts, ids):
    """Add 1 to memory for every id, however often it occurs."""
    counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))


def numbers_one_by_one(x):
    """Make a view and wait for the device, once for every number."""
    return [x[i].item() for i in range(len(x))]


def numbers_at_once(x):
    """Fetch all numbers with one copy and make Python objects of them."""
    return x.tolist()


# --- what is run ------------------------------------------------------------


def readings(x):
    """Return (expression, call, is it a view?) of a (R, C) tensor."""
    zero = torch.tensor(0, device=x.device)
    rows = torch.tensor([0, 2], device=x.device)
    return [
        ("x[1]", lambda: x[1], True),
        ("x[1, 2]", lambda: x[1, 2], True),
        ("x[1:3]", lambda: x[1:3], True),
        ("x[:, 1]", lambda: x[:, 1], True),
        ("x[::2, -2:]", lambda: x[::2, -2:], True),
        ("x[..., None]", lambda: x[..., None], True),
        ("x[tensor(0)]", lambda: x[zero], True),
        ("x[[0, 2]]", lambda: x[[0, 2]], False),
        ("x[tensor([0, 2])]", lambda: x[rows], False),
        ("x[[1]]", lambda: x[[1]], False),
        ("x[1:3, [0, 1]]", lambda: x[1:3, [0, 1]], False),
        ("x[x > 4]", lambda: x[x > 4], False),
        ("x[x[:, 0] > 3]", lambda: x[x[:, 0] > 3], False),
        ("x.index_select(0, …)", lambda: x.index_select(0, rows), False),
        ("x.take(…)", lambda: x.take(rows), False),
        ("x.narrow(0, 1, 2)", lambda: x.narrow(0, 1, 2), True),
    ]


def read_rows(x):
    """Read by each expression and see whether memory is shared.

    Raises:
        Mismatch: a view where a copy is said to be, or the reverse.
    """
    rows = []
    for name, read, is_view in readings(x):
        ran, result = aten_operators(read), read()
        shares = shares_storage(x, result)
        before = x.clone()
        result.add_(100)
        changed = not torch.equal(x, before)
        x.copy_(before)
        if not shares == changed == is_view:
            raise bench.Mismatch(
                f"{name}: shares memory {shares}, a write reaches x "
                f"{changed}, said to be a view {bool(is_view)}"
            )
        rows.append(
            {
                "name": name,
                "result": "view" if shares else "copy",
                "shape": str(tuple(result.shape)),
                "offset": result.storage_offset() if shares else None,
                "strides": str(result.stride()),
                "operators": names(ran),
            }
        )
    return rows


def names(operators):
    """Write overloads in one line."""
    words = [str(o).removeprefix("aten.") for o in operators]
    return ", ".join(word.removesuffix(".default") for word in words)


def writings(device):
    """Return (statement, function of x, does it change x?)."""
    rows = torch.tensor([0, 2], device=device)
    mask = torch.tensor([True, False, True, False], device=device)

    def slice_then_fill(x):
        x[1:3][:] = 0

    def slice_once(x):
        x[1:3] = 0

    def mask_once(x):
        x[mask] = 0

    def mask_twice(x):
        x[mask][0] = 0

    def augmented(x):
        x[rows] += 1

    return [
        ("x[1:3][:] = 0", slice_then_fill, True),
        ("x[1:3] = 0", slice_once, True),
        ("x[[0, 2]] = 0", lambda x: zero_in_place(x, rows), True),
        ("x[[0, 2]][:] = 0", lambda x: zero_through_copy(x, rows), False),
        ("x[mask] = 0", mask_once, True),
        ("x[mask][0] = 0", mask_twice, False),
        ("x[[0, 2]] += 1", augmented, True),
    ]


def write_rows(device):
    """Run each assignment and see whether it reached x.

    Raises:
        Mismatch: one that reached x, or did not, against the table.
    """
    rows = []
    for name, write, reaches in writings(device):
        x = torch.arange(12.0, device=device).view(4, 3) + 1
        before = x.clone()
        ran = aten_operators(lambda write=write, x=x: write(x))
        changed = not torch.equal(x, before)
        if changed != reaches:
            raise bench.Mismatch(f"{name}: x changed {changed}")
        rows.append(
            {
                "name": name,
                "x": "changed" if changed else "unchanged: lost",
                "operators": names(ran),
            }
        )
    return rows


def repeated_rows(device):
    """Count [0, 0, 2] both ways; only one is right.

    Raises:
        Mismatch: the right way is wrong, or the wrong one right.
    """
    ids = torch.tensor([0, 0, 2], device=device)
    rows = []
    for name, count, right in (
        ("counts[ids] += 1", count_by_index, False),
        ("counts.index_add_(0, ids, …)", count_by_index_add, True),
    ):
        counts = torch.zeros(3, device=device)
        count(counts, ids)
        if (counts.tolist() == [2, 0, 1]) != right:
            raise bench.Mismatch(f"{name} counts {counts.tolist()}")
        rows.append(
            {
                "name": name,
                "counts": str([int(n) for n in counts.tolist()]),
                "answer": "right" if right else "wrong: 0 occurs twice",
            }
        )
    return rows


def reading_costs(args, R, C):
    """Time the ways to read half of the rows of (R, C) float32."""
    torch.manual_seed(0)
    x = torch.randn(R, C, device=args.device)
    wanted = range(R // 4, R // 4 * 3)
    rows = torch.arange(wanted.start, wanted.stop, device=args.device)
    mask = torch.zeros(R, dtype=torch.bool, device=args.device)
    mask[wanted.start : wanted.stop] = True
    copied = 2 * 4 * C * len(wanted)  # read and written
    listed = copied + 8 * len(wanted)
    variants = {
        "slice, clone": (rows_by_slice_copied, wanted, copied),
        "index_select": (rows_selected, rows, listed),
        "index tensor": (rows_by_index, rows, listed),
        "mask": (rows_by_mask, mask, listed + R + 8 * len(wanted)),
        "slice": (rows_by_slice, wanted, 0),
    }
    expect = "a copy moves 2 × 4 C bytes a row, a view none"
    if not args.smoke:
        peaks = machine.peaks(args.device)
        expect = f"a copy moves {tables.cell(copied, 'bytes')}"
        if copied > peaks["cache_bytes"]:
            bound_s = copied / peaks["copy_bytes_per_s"]
            expect += f": at least {tables.seconds(bound_s)} here"
        expect += "; a view moves nothing"
    return bench.compare(
        args,
        {
            name: lambda f=function, r=which: lambda: f(x, r)
            for name, (function, which, _) in variants.items()
        },
        tolerance=None,
        bytes={name: moved for name, (_, _, moved) in variants.items()},
        budget_s=3.0,
        title=f"{len(wanted):,} of {R:,} rows of {C} float32",
        expect=expect,
    )


def fetching_costs(args, count):
    """Time the ways to turn a tensor into Python numbers."""
    torch.manual_seed(0)
    x = torch.randn(count, device=args.device)
    single = len(aten_operators(lambda: numbers_one_by_one(x)))
    whole = len(aten_operators(lambda: numbers_at_once(x)))
    return bench.compare(
        args,
        {
            "x[i].item()": lambda: lambda: numbers_one_by_one(x),
            "x.tolist()": lambda: lambda: numbers_at_once(x),
        },
        per_call=count,
        unit="number",
        tolerance=None,
        budget_s=2.0,
        title=f"{count:,} numbers, from a tensor to Python",
        expect=f"{single:,} operators one by one, {whole} at once, where a "
        "number is one Python object",
    )


TECHNIQUES = (
    shares_storage,
    rows_by_slice,
    rows_by_slice_copied,
    rows_selected,
    rows_by_index,
    rows_by_mask,
    zero_through_copy,
    zero_in_place,
    count_by_index,
    count_by_index_add,
    numbers_one_by_one,
    numbers_at_once,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    x = torch.arange(12.0, device=args.device).view(4, 3)
    bench.report(
        args,
        read_rows(x),
        {
            "name": "read",
            "result": "result",
            "shape": "shape",
            "offset": "offset",
            "strides": "strides",
            "operators": "operators",
        },
        title="x is (4, 3): what an index gives",
    )
    bench.report(
        args,
        write_rows(args.device),
        {"name": "write", "x": "x afterwards", "operators": "operators"},
        title="assignment through an index",
    )
    bench.report(
        args,
        repeated_rows(args.device),
        {"name": "ids = [0, 0, 2]", "counts": "counts", "answer": "answer"},
        title="an index that names one place twice",
    )
    R, C = (1 << 17, 64) if args.device.type == "cpu" else (1 << 20, 256)
    reading_costs(args, *((64, 8) if args.smoke else (R, C)))
    fetching_costs(args, 16 if args.smoke else 1000)
    return args.rows


if __name__ == "__main__":
    bench.run(main)
