"""3.1.3  Storage · 張量的儲存方式

Question  Where in memory does an element lie, and what does a bad order cost?
Expect    at offset + Σ index × stride elements from the storage's start. The
          order matters only where operands disagree: then one of them is
          read a cache line (64 bytes, 16 float32) for each element, which
          is 6 times the bytes where no line is kept
Run       python -m ch03_pytorch_basics.strides [--smoke] [--save]
"""

import itertools

import torch

from common import bench, notebook, tables


def element_address(tensor, index):
    """Memory has one dimension: an address is a start and a sum of steps.

    Args:
        tensor: strided, of any shape.
        index: one integer for each dimension.

    Returns:
        The address of the element's first byte.
    """
    place = tensor.storage_offset()
    for i, stride in zip(index, tensor.stride(), strict=True):
        place += i * stride
    start = tensor.untyped_storage().data_ptr()
    return start + place * tensor.element_size()


def memory_map(tensor):
    """Steps of each dimension add up to the place of every element.

    Returns:
        Places in the storage, counted in elements, int64, of ``tensor``'s
        shape.
    """
    places = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places


def element_at(tensor, index):
    """Read the storage itself, as a row of elements, at a computed place."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory.set_(tensor.untyped_storage())
    place = tensor.storage_offset()
    for i, stride in zip(index, tensor.stride(), strict=True):
        place += i * stride
    return memory[place]


def dense_strides(shape, order):
    """The last dimension of ``order`` steps by 1, each other over the next.

    Args:
        shape: of a tensor without gaps.
        order: its dimensions, outermost first: (0, 1, 2, 3) is contiguous,
            (0, 2, 3, 1) channels_last.

    Returns:
        The stride of each dimension.
    """
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


def add_rows(a, b):
    """Walk through both operands at once, in the order of the result."""
    return a + b


def add_after_copy(a, b):
    """Put b in a's order first: one more pass, in blocks that fit a cache."""
    return a + b.contiguous()


def convolve(x, weight):
    """A convolution reads all channels of a pixel together."""
    return torch.nn.functional.conv2d(x, weight, padding=1)


# --- what is run ------------------------------------------------------------


def layouts(device):
    """Return {name: tensor}, all of them over 24 float32 or a few more."""
    x = torch.arange(24.0, device=device)
    image = x.view(1, 2, 3, 4)
    return {
        "contiguous (4, 6)": x.view(4, 6),
        "transposed": x.view(4, 6).t(),
        "columns 1::2": x.view(4, 6)[:, 1::2],
        "last two rows": x.view(4, 6)[2:],
        "diagonal": x.view(4, 6).diagonal(),
        "expanded (3, 6)": x.view(4, 6)[1].expand(3, 6),
        "windows (unfold)": x[:8].unfold(0, 4, 2),
        "image (1, 2, 3, 4)": image,
        "channels_last": image.contiguous(memory_format=torch.channels_last),
    }


def described(device):
    """Prove the address of every element of every layout.

    Raises:
        Mismatch: an address, or a number found there, is not the one that
            indexing gives.
    """
    rows = []
    for name, tensor in layouts(device).items():
        places = memory_map(tensor)
        count = 0
        for index in itertools.product(*map(range, tensor.shape)):
            there = tensor[index]
            right = element_address(tensor, index) == there.data_ptr()
            right &= element_at(tensor, index).item() == there.item()
            right &= places[index].item() == there.storage_offset()
            if not right:
                raise bench.Mismatch(f"{name}: {index} lies elsewhere")
            count += 1
        order = "contiguous" if tensor.is_contiguous() else "neither"
        if order == "neither" and tensor.dim() == 4:
            last = torch.channels_last
            if tensor.is_contiguous(memory_format=last):
                order = "channels_last"
        rows.append(
            {
                "name": name,
                "size": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.storage_offset(),
                "order": order,
                "elements": count,
                "memory_elements": len(places.unique()),
                "places": places.flatten().tolist(),
            }
        )
    x = layouts(device)
    for name, order in (
        ("image (1, 2, 3, 4)", (0, 1, 2, 3)),
        ("channels_last", (0, 2, 3, 1)),
    ):
        found = dense_strides(x[name].shape, order)
        if found != x[name].stride():
            raise bench.Mismatch(f"{name}: strides {found} computed")
    return rows


def additions(size, device):
    """Return {row: (how to add, a, b)}: the same numbers in two orders."""
    torch.manual_seed(0)
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    turned, columns = (x.t().contiguous().t() for x in (a, b))
    return {
        "both by rows": (add_rows, a, b),
        "both by columns": (add_rows, turned, columns),
        "rows + columns": (add_rows, a, columns),
        "rows + columns, copied first": (add_after_copy, a, columns),
    }


def addition_costs(args, size):
    """Time a sum whose operands agree on an order, and where they do not."""
    moved = 3 * 4 * size * size
    most = (2 + 16) / 3  # a and the sum, and a line for each element of b
    found = bench.compare(
        args,
        {
            name: lambda add=add, a=a, b=b: lambda: add(a, b)
            for name, (add, a, b) in additions(size, args.device).items()
        },
        tolerance=None,
        bytes=moved,
        budget_s=3.0,
        title=f"a + b, ({size}, {size}): the numbers are the same",
        expect=f"{tables.cell(moved, 'bytes')} move where the orders agree, "
        f"{most:.3g} times that where none of b's lines is kept",
    )
    times = found[2]["median_s"] / found[0]["median_s"]
    if times > most and args.device.type == "cpu" and not args.smoke:
        print(
            f"rows + columns takes {times:.3g} times as long, but moves "
            f"{most:.3g} times the bytes at most: the lines\nof a row are "
            "fetched ahead; each element of a column lies in another page, "
            "where none is"
        )
    if not args.smoke:
        print(copy_pays(found))
    return found


def copy_pays(found):
    """Return a sentence: what b gained by being copied into a's order first.

    Args:
        found: rows of the four sums; the last two are compared, by their
            intervals, since both have the first as their baseline.
    """
    (low, high), (least, most) = (row["ratio_interval"] for row in found[2:4])
    words = "pays nothing here: no difference was measured"
    if least > high:
        words = "pays here"
    elif most < low:
        words = "costs more than it saves here"
    speeds = [f"{row['ratio']:.2f}" for row in found[2:4]]
    said = f"copying b into a's order first {words}:\n{speeds[0]} times the "
    said += f"speed of the first row without the copy, {speeds[1]} with it"
    if any(row["noisy"] for row in found[2:4]):
        said += "\n(these rows are noisy: a quiet machine may say otherwise)"
    return said


def convolution_costs(args, N, C, H):
    """Time a convolution of an image in both orders, and in a mixture."""
    torch.manual_seed(0)
    x = torch.randn(N, C, H, H, device=args.device)
    weight = torch.randn(C, C, 3, 3, device=args.device) / (3 * C**0.5)
    last = torch.channels_last
    pixels, wanted = x.to(memory_format=last), weight.to(memory_format=last)
    kept = convolve(x, weight).is_contiguous()
    if not kept & convolve(pixels, wanted).is_contiguous(memory_format=last):
        raise bench.Mismatch("a convolution changed the order of its input")
    return bench.compare(
        args,
        {
            "contiguous": lambda: lambda: convolve(x, weight),
            "channels_last": lambda: lambda: convolve(pixels, wanted),
            "reordered at each call": lambda: (
                lambda: convolve(x.to(memory_format=last), wanted)
            ),
        },
        tolerance=(1e-3, 1e-4),
        flops=2 * N * C * C * H * H * 9,
        budget_s=3.0,
        title=f"3 × 3 convolution of {(N, C, H, H)}",
        expect="no order is wrong by itself; the library reorders what its "
        "kernel does not want",
    )


def draw_cells(axes, places, groups, length, name):
    """Draw a storage as a strip: cells that a tensor reaches are coloured.

    Args:
        axes: matplotlib's.
        places: of the tensor's elements in the storage, row by row.
        groups: for each element the number of its colour.
        length: of the storage.
        name: beside the strip.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["Set2"]
    reached = {}
    for order, (place, group) in enumerate(zip(places, groups, strict=True)):
        reached.setdefault(place, (group, []))[1].append(order)
    for place in range(length):
        group, orders = reached.get(place, (None, []))
        face = "white" if group is None else colours(group % 8)
        axes.add_patch(
            Rectangle((place, 0), 1, 1, facecolor=face, edgecolor="0.6")
        )
        if orders:
            text = f"{orders[0]}" + "+" * (len(orders) > 1)
            axes.text(
                place + 0.5, 0.5, text, ha="center", va="center", fontsize=8
            )
    axes.set_xlim(-0.1, length + 0.1)
    axes.set_ylim(-0.1, 1.1)
    axes.axis("off")
    axes.set_title(notebook.label(name), fontsize=9, loc="left", pad=2)


def figure(rows):
    """Draw each layout's memory: where its first, second … element lies.

    Args:
        rows: what ``main`` returned; those with ``places`` are drawn.

    Returns:
        A matplotlib Figure.  One colour is one index of the outermost
        dimension that is longer than 1; "+" stands where several elements
        share a place.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in rows if "places" in row]
    with matplotlib.rc_context(notebook.fonts()):
        drawn = Figure(figsize=(8, 0.62 * len(rows) + 0.5), dpi=100)
        strips = drawn.subplots(len(rows), squeeze=False)[:, 0]
        for axes, row in zip(strips, rows, strict=True):
            count = len(row["places"])
            outer = next((n for n in row["size"] if n > 1), 1)
            groups = [i * outer // count for i in range(count)]
            title = f"{row['name']}: size {row['size']}, stride "
            title += f"{row['stride']}, offset {row['offset']}"
            draw_cells(axes, row["places"], groups, 24, title)
        drawn.suptitle(
            notebook.label(
                "memory from left to right; numbers: the order of indexing"
                " · 記憶體由左至右；數字為索引順序"
            ),
            fontsize=10,
        )
        drawn.tight_layout(h_pad=0.3)
    return drawn


TECHNIQUES = (
    element_address,
    memory_map,
    element_at,
    dense_strides,
    add_rows,
    add_after_copy,
    convolve,
)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    rows = described(args.device)
    bench.report(
        args,
        rows,
        {
            "name": "24 float32 as",
            "size": "size",
            "stride": "stride",
            "offset": "offset",
            "order": "order",
            "elements": "elements",
            "memory_elements": "in memory",
        },
        title="the address of each element, computed and compared with "
        "indexing",
    )
    large = args.device.type != "cpu"
    addition_costs(args, 16 if args.smoke else 8192 if large else 2048)
    shape = (32, 256, 56) if large else (4, 64, 56)
    convolution_costs(args, *((1, 4, 5) if args.smoke else shape))
    return args.rows


if __name__ == "__main__":
    bench.run(main)
