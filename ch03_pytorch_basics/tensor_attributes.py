"""3.1.1  Attributes and creation · 張量的基本屬性及建立

Question  What does a tensor say of itself, and whose memory does it use?
Expect    made where and as it is wanted, a tensor is written once; made and
          then moved, it is written twice and read once. from_numpy,
          frombuffer and, where they can, as_tensor and asarray share memory;
          torch.tensor always copies
Run       python -m ch03_pytorch_basics.tensor_attributes [--smoke] [--save]
"""

import numpy as np
import torch

from ch03_pytorch_basics.operator_library import aten_operators
from common import bench, tables


def attributes(tensor):
    """A tensor is a small record that describes a piece of memory.

    Returns:
        dtype, device, layout, requires_grad, shape and the bytes of its
        memory: none on the meta device; of a sparse one, the parts' sum.
    """
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    else:
        parts = [tensor]
    held = [] if tensor.is_meta else [p.untyped_storage() for p in parts]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "layout": str(tensor.layout).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
        "shape": str(tuple(tensor.shape)),
        "memory_bytes": sum(storage.nbytes() for storage in held),
    }


def address(source):
    """Numbers lie somewhere: at a pointer, unless each is a Python object.

    Args:
        source: a tensor, a NumPy array, a writable buffer, or a list.

    Returns:
        The address of the first byte; None of a list.
    """
    if isinstance(source, torch.Tensor):
        return source.data_ptr()
    if isinstance(source, list):
        return None
    return torch.frombuffer(source, dtype=torch.uint8).data_ptr()


def create_then_move(size, device, dtype):
    """Write ones on the host, then read them to write them elsewhere."""
    return torch.ones(size).to(device, dtype)


def create_on_device(size, device, dtype):
    """Let the device write ones of the wanted type into its own memory."""
    return torch.ones(size, device=device, dtype=dtype)


# --- what is run ------------------------------------------------------------


def specimens(device):
    """Return (how it is made, tensor) of every kind that the book names."""
    array = np.arange(6.0).reshape(2, 3)
    return [
        ("torch.tensor([1, 2, 3])", torch.tensor([1, 2, 3])),
        ("torch.tensor([1.0, 2.0])", torch.tensor([1.0, 2.0])),
        ("torch.tensor([True])", torch.tensor([True])),
        ("torch.tensor(1j)", torch.tensor(1j)),
        ("torch.from_numpy(float64 array)", torch.from_numpy(array)),
        ("torch.zeros(2, 3, device=…)", torch.zeros(2, 3, device=device)),
        (
            "torch.ones(4, dtype=torch.bfloat16)",
            torch.ones(4, dtype=torch.bfloat16),
        ),
        ("torch.eye(3).to_sparse()", torch.eye(3).to_sparse()),
        (
            "torch.empty(2**40, device='meta')",
            torch.empty(2**40, device="meta"),
        ),
        ("nn.Parameter(torch.ones(2))", torch.nn.Parameter(torch.ones(2))),
    ]


def described(device):
    """Describe each specimen; of a strided one the bytes are known before.

    Raises:
        Mismatch: the memory is not what shape and type need.
    """
    rows = []
    for name, tensor in specimens(device):
        row = {"name": name} | attributes(tensor)
        if tensor.layout == torch.strided:
            expected = tensor.numel() * tensor.element_size()
            if row["memory_bytes"] != (not tensor.is_meta) * expected:
                raise bench.Mismatch(f"memory of {row}: not {expected} bytes")
        rows.append(row)
    return rows


def makers(device):
    """Return (kind of source, maker's name, maker, does it share?)."""
    near = device.type == "cpu"
    f32, f64 = torch.float32, torch.float64
    return [
        ("list", "torch.tensor", torch.tensor, False),
        ("list", "torch.asarray", torch.asarray, False),
        ("array", "torch.tensor", torch.tensor, False),
        ("array", "torch.from_numpy", torch.from_numpy, True),
        ("array", "torch.as_tensor", torch.as_tensor, True),
        (
            "array",
            f"as_tensor, device={device.type}",
            lambda s: torch.as_tensor(s, device=device),
            near,
        ),
        (
            "array",
            "as_tensor, dtype=float64",
            lambda s: torch.as_tensor(s, dtype=f64),
            False,
        ),
        ("array", "torch.asarray", torch.asarray, True),
        (
            "array",
            "asarray, copy=True",
            lambda s: torch.asarray(s, copy=True),
            False,
        ),
        ("array", "torch.from_dlpack", torch.from_dlpack, True),
        (
            "bytearray",
            "torch.frombuffer",
            lambda s: torch.frombuffer(s, dtype=f32),
            True,
        ),
        (
            "bytearray",
            "torch.asarray",
            lambda s: torch.asarray(s, dtype=f32),
            True,
        ),
        ("tensor", "as_tensor", torch.as_tensor, True),
        ("tensor", ".to(float32)", lambda s: s.to(f32), True),
        ("tensor", ".to(float64)", lambda s: s.to(f64), False),
        ("tensor", ".detach", torch.Tensor.detach, True),
        ("tensor", ".clone", torch.Tensor.clone, False),
    ]


def source_of(kind):
    """Return fresh numbers 1, 2, 3, 4 of one kind."""
    numbers = [1.0, 2.0, 3.0, 4.0]
    array = np.array(numbers, dtype=np.float32)
    return {
        "list": numbers,
        "array": array,
        "bytearray": bytearray(array.tobytes()),
        "tensor": torch.tensor(numbers),
    }[kind]


def first_number(source):
    """Return the first float32 of a source, whatever its kind."""
    if isinstance(source, bytearray):
        return np.frombuffer(source, dtype=np.float32)[0].item()
    return float(source[0])


def copied_or_shared(device):
    """Make tensors from each source, and write into what was made.

    Raises:
        Mismatch: a maker shares where it is said to copy, or copies.
    """
    rows = []
    for kind, name, maker, shares in makers(device):
        source = source_of(kind)
        made = maker(source)
        if made.tolist() != [1.0, 2.0, 3.0, 4.0]:
            raise bench.Mismatch(f"{name} of a {kind} made {made.tolist()}")
        same = address(made) == address(source)
        made[0] = 9.0
        reached = first_number(source) == 9.0
        if not same == reached == shares:
            raise bench.Mismatch(
                f"{name} of a {kind}: same pointer {same}, a write reaches "
                f"the source {reached}, said to share {shares}"
            )
        rows.append(
            {
                "name": f"{kind}: {name}",
                "memory": "shared" if same else "copied",
                "same_pointer": same,
                "write_reaches_source": reached,
            }
        )
    return rows


def creation_rows(size, device, dtype):
    """Count the operators and the bytes of both ways to make ones.

    Raises:
        Mismatch: other operators run than those whose bytes are counted.
    """
    wide = torch.empty(0, dtype=dtype).element_size()
    # ones: written as float32, read again, written as the other
    moved = {create_then_move: 4 + 4 + wide, create_on_device: wide}
    rows = []
    for name, make in (
        ("create then move", create_then_move),
        ("create on device", create_on_device),
    ):
        ran = aten_operators(lambda make=make: make(8, device, dtype))
        rows.append(
            {
                "name": name,
                "operators": ", ".join(
                    str(o).removeprefix("aten.").removesuffix(".default")
                    for o in ran
                ),
                "moved_bytes": moved[make] * size,
            }
        )
    ran = [row["operators"] for row in rows]
    if ran != ["ones, _to_copy", "ones"]:
        raise bench.Mismatch(f"ones are made by {ran}")
    return rows


TECHNIQUES = (attributes, address, create_then_move, create_on_device)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    bench.report(
        args,
        described(device),
        {
            "name": "made by",
            "dtype": "dtype",
            "device": "device",
            "layout": "layout",
            "requires_grad": "grad",
            "shape": "shape",
            "memory_bytes": "memory",
        },
        title="what a tensor says of itself",
    )
    bench.report(
        args,
        copied_or_shared(device),
        {
            "name": "source: maker",
            "memory": "memory",
            "same_pointer": "same pointer",
            "write_reaches_source": "a write reaches the source",
        },
        title="copy or share",
    )
    size = 1 << (10 if args.smoke else 22 if device.type == "cpu" else 26)
    # on a CPU nothing needs to be moved, but the type is changed alike
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    counted = creation_rows(size, device, dtype)
    title = f"{size:,} ones of {str(dtype)[6:]} on {device.type}"
    bench.report(
        args, counted, ["name", "operators", "moved_bytes"], title=title
    )
    amounts = {row["name"]: row["moved_bytes"] for row in counted}
    first, last = amounts.values()
    found = bench.compare(
        args,
        {
            "create then move": lambda: (
                lambda: create_then_move(size, device, dtype)
            ),
            "create on device": lambda: (
                lambda: create_on_device(size, device, dtype)
            ),
        },
        tolerance=None,
        bytes=amounts,
        budget_s=3.0,
        title=f"time: {title}",
        expect=f"{tables.cell(first, 'bytes')} moved against "
        f"{tables.cell(last, 'bytes')}: {first / last:.3g} times"
        + ("" if device.type == "cpu" else ", and the link is slower still"),
    )
    if found[1]["differs"] and found[1]["ratio_interval"][1] < first / last:
        print(
            "less than predicted: new memory costs the same in both rows,\n"
            "and its pages are mapped when they are first written"
        )
    if device.type == "cpu":
        bench.left_out(
            args, "the copy over the link, which needs a GPU beside the host"
        )
    return args.rows


if __name__ == "__main__":
    bench.run(main)
