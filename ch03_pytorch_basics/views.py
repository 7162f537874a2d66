"""3.1.4  Views · 張量的視圖

Question  Which operators hand out the memory they were given, and what does
          a small view of a large tensor keep alive?
Expect    a reshape is a view while the strides allow it, else a copy. 1,000
          of 1,000,000 float32 hold and save 4,000,000 bytes, and 4,000 after
          clone; contiguous and detach change nothing
Run       python -m ch03_pytorch_basics.views [--smoke] [--save]
"""

import copy
import io

import torch

from ch03_pytorch_basics.strides import draw_cells, memory_map
from common import bench, notebook


def shares_storage(a, b):
    """Two tensors share memory when their storages begin at one address."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def strides_after_reshape(shape, strides, wanted):
    """A view exists while no new dimension crosses a jump of the old ones.

    Dimensions that lie evenly one in the other act as one block, and each
    new dimension must fit into a block.  Returns the new strides, or None:
    then reshape copies.  No size may be 0.
    """
    if not shape:
        return (1,) * len(wanted)
    found, left, block, step = [], list(wanted), 1, strides[-1]
    for i in reversed(range(len(shape))):
        block *= shape[i]
        jump = i and shape[i - 1] > 1 and strides[i - 1] != block * step
        if i == 0 or jump:
            room = 1
            while left and (room < block or left[-1] == 1):
                found.append(room * step)
                room *= left.pop()
            if room != block:
                return None
            block, step = 1, strides[i - 1]
    return tuple(reversed(found))


def held_bytes(tensor):
    """A view keeps its whole storage alive, however little of it it shows."""
    return tensor.untyped_storage().nbytes()


def saved_bytes(tensor):
    """torch.save writes storages, so that views stay views when loaded."""
    import io

    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


def compact(view):
    """Copy what the view shows, and let the large storage go."""
    return view.clone()


# --- what is run ------------------------------------------------------------


def operations(x):
    """Return (written, result, shares memory?) of a contiguous (4, 6)."""
    t = x.t()
    return [
        ("x.view(2, 12)", x.view(2, 12), True),
        ("x.reshape(2, 12)", x.reshape(2, 12), True),
        ("x.flatten()", x.flatten(), True),
        ("x.t()", t, True),
        ("x.permute(1, 0)", x.permute(1, 0), True),
        ("x.t().reshape(24)", t.reshape(24), False),
        ("x.t().flatten()", t.flatten(), False),
        ("x.t().reshape(2, 3, 4)", t.reshape(2, 3, 4), True),
        ("x[:, :4].reshape(4, 2, 2)", x[:, :4].reshape(4, 2, 2), True),
        ("x[:, :4].reshape(16)", x[:, :4].reshape(16), False),
        ("x.contiguous()", x.contiguous(), True),
        ("x.t().contiguous()", t.contiguous(), False),
        ("x[1:3, ::2]", x[1:3, ::2], True),
        ("x.narrow(1, 2, 2)", x.narrow(1, 2, 2), True),
        ("x.split(2)[1]", x.split(2)[1], True),
        ("x.unbind(1)[0]", x.unbind(1)[0], True),
        ("x.diagonal()", x.diagonal(), True),
        ("x.unfold(1, 2, 2)", x.unfold(1, 2, 2), True),
        ("x.unsqueeze(0)", x.unsqueeze(0), True),
        ("x[:1].expand(3, 6)", x[:1].expand(3, 6), True),
        ("x[:1].repeat(3, 1)", x[:1].repeat(3, 1), False),
        ("x.view(torch.int32)", x.view(torch.int32), True),
        ("x.detach()", x.detach(), True),
        ("x.to(torch.float32)", x.to(torch.float32), True),
        ("x.to(torch.float64)", x.to(torch.float64), False),
        ("x.flip(0)", x.flip(0), False),
        ("x.roll(1)", x.roll(1), False),
        ("x[[0, 1]]", x[[0, 1]], False),
        ("x.clone()", x.clone(), False),
    ]


def sharing(device):
    """See which operators return memory of x, and what theirs looks like.

    Raises:
        Mismatch: one that shares where it is said to copy, or copies.
    """
    x = torch.arange(24.0, device=device).view(4, 6)
    rows = []
    for name, result, shared in operations(x):
        if shares_storage(x, result) != shared:
            raise bench.Mismatch(f"{name}: shares memory {not shared}")
        rows.append(
            {
                "name": name,
                "memory": "shared" if shared else "own",
                "size": list(result.shape),
                "stride": list(result.stride()),
                "offset": result.storage_offset(),
                "contiguous": result.is_contiguous(),
                "places": memory_map(result).flatten().tolist(),
            }
        )
    return rows


def reshapes(device):
    """Predict from strides alone where reshape copies, and look.

    Raises:
        Mismatch: a copy, or strides, that the rule does not give.
    """
    x = torch.arange(24.0, device=device).view(4, 6)
    sources = {
        "x, (4, 6)": x,
        "x.t()": x.t(),
        "x[:, :4]": x[:, :4],
        "x[:, ::2]": x[:, ::2],
        "x[:2]": x[:2],
        "x[:1].expand(4, 6)": x[:1].expand(4, 6),
    }
    rows = []
    for name, source in sources.items():
        for wanted in factorings(source.numel()):
            predicted = strides_after_reshape(
                source.shape, source.stride(), wanted
            )
            result = source.reshape(wanted)
            shared = shares_storage(x, result)
            found = result.stride() if shared else None
            if found != predicted:
                raise bench.Mismatch(
                    f"{name} to {wanted}: strides {found} of a view (None of "
                    f"a copy), predicted {predicted}"
                )
            rows.append((name, wanted, shared))
    return [
        {
            "name": name,
            "reshapes": sum(row[0] == name for row in rows),
            "copies": sum(row[0] == name and not row[2] for row in rows),
            "copied_to": " ".join(
                "×".join(map(str, wanted))
                for n, wanted, shared in rows
                if n == name and not shared
            ),
        }
        for name in sources
    ]


def factorings(count):
    """Return all shapes of one or two dimensions with ``count`` elements."""
    twos = [(n, count // n) for n in range(2, count) if count % n == 0]
    return [(count,), *twos]


CURES = {
    "x[:1000]": lambda view: view,
    "… .contiguous()": lambda view: view.contiguous(),
    "… .detach()": lambda view: view.detach(),
    "copy.deepcopy(…)": copy.deepcopy,
    "… .clone()": compact,
}


def keeping(device, total=1_000_000, shown=1000):
    """Cut a piece from a large tensor and see what stays alive, and on disk.

    Raises:
        Mismatch: a cure that does not cure, or a cause that does not harm,
            or numbers that are not the same after loading.
    """
    rows = []
    for name, cure in CURES.items():
        x = torch.arange(float(total), device=device)
        piece = cure(x[:shown])
        del x
        file = io.BytesIO()
        torch.save(piece, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        if not torch.equal(loaded, piece):
            raise bench.Mismatch(f"{name}: other numbers after loading")
        held, saves = held_bytes(piece), saved_bytes(piece)
        expected = 4 * (shown if cure is compact else total)
        if held != expected or not 0 < saves - expected < 2048:
            raise bench.Mismatch(
                f"{name} keeps {held} bytes and saves {saves}, where "
                f"{expected} and a header are expected"
            )
        rows.append(
            {
                "name": name,
                "shows_bytes": piece.nbytes,
                "holds_bytes": held,
                "saves": saves,
                "loaded_holds_bytes": held_bytes(loaded),
            }
        )
    return rows


DRAWN = (
    "x.view(2, 12)",
    "x.t()",
    "x[1:3, ::2]",
    "x.diagonal()",
    "x[:1].expand(3, 6)",
    "x.t().reshape(24)",
    "x[[0, 1]]",
    "x.clone()",
)


def figure(rows):
    """Draw the memory: views in x's strip, copies in strips of their own.

    Args:
        rows: what ``main`` returned.

    Returns:
        A matplotlib Figure; below, to scale, what a slice of 1,000 holds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    strips = [row for row in rows if row["name"] in DRAWN and "places" in row]
    held = [row for row in rows if "holds_bytes" in row]
    with matplotlib.rc_context(notebook.fonts()):
        drawn = Figure(figsize=(8, 0.6 * len(strips) + 3.4), dpi=100)
        grid = drawn.add_gridspec(len(strips) + 4, 1, hspace=0.9)
        for i, row in enumerate(strips):
            own = row["memory"] == "own"
            words = "its own memory · 自有記憶體" if own else "x's · 共用 x 的"
            places = row["places"]
            length = max(places) + 1 if own else 24
            axes = drawn.add_subplot(grid[i])
            group = [1 if own else 0] * len(places)
            name = f"{row['name']}: {notebook.label(words)}"
            draw_cells(axes, places, group, length, name)
            axes.set_xlim(-0.1, 24.1)
        axes = drawn.add_subplot(grid[-3:])
        for i, row in enumerate(held):
            held_mb = row["holds_bytes"] / 1e6
            axes.barh(i, held_mb, color="0.85", edgecolor="0.5")
            words = f"{row['holds_bytes']:,} B"
            axes.text(held_mb + 0.03, i, words, va="center", fontsize=8)
        axes.set_yticks(range(len(held)), [row["name"] for row in held])
        axes.invert_yaxis()
        axes.set_xlim(right=4.7)
        axes.set_xlabel(
            notebook.label(
                "MB kept alive by 1,000 float32 (4,000 B)"
                " · 1,000 個 float32（4,000 B）所佔住的 MB"
            )
        )
        axes.spines[["top", "right"]].set_visible(False)
        words = (
            "Whose memory, from left to right · 由左至右：誰的記憶體",
            "green: x's, (4, 6); orange: the result's own; white: not reached"
            " · 綠：x 的；橙：結果自有；白：不觸及",
            "numbers: the order of indexing; +: named more than once"
            " · 數字：索引順序；+：不只一個索引",
        )
        drawn.suptitle("\n".join(map(notebook.label, words)), fontsize=9)
        drawn.subplots_adjust(left=0.2, right=0.98, top=0.87, bottom=0.07)
    return drawn


TECHNIQUES = (
    shares_storage,
    strides_after_reshape,
    held_bytes,
    saved_bytes,
    compact,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    bench.report(
        args,
        sharing(args.device),
        {
            "name": "x is (4, 6)",
            "memory": "memory",
            "size": "size",
            "stride": "stride",
            "offset": "offset",
            "contiguous": "contiguous",
        },
        title="whose memory a result lies in",
    )
    bench.report(
        args,
        reshapes(args.device),
        {
            "name": "reshape of",
            "reshapes": "shapes",
            "copies": "copied",
            "copied_to": "those copied",
        },
        title="reshape, to every shape of one or two dimensions: predicted "
        "from strides, and seen",
    )
    bench.report(
        args,
        keeping(args.device),
        {
            "name": "x holds 1,000,000 float32",
            "shows_bytes": "shows",
            "holds_bytes": "keeps alive",
            "saves": "bytes saved",
            "loaded_holds_bytes": "after loading",
        },
        title="1,000 of 1,000,000: what a small view keeps",
    )
    return args.rows


if __name__ == "__main__":
    bench.run(main)
