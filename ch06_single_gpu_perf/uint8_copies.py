"""6.5.1  Low-precision copies · 使用低精度資料進行裝置間拷貝

Question  Where should uint8 pixels become float32: before or after the copy?
Expect    a quarter of the bytes cross the link, for the same bits in the
          end; on a CPU, where the copy is one part of several, bytes
          read and written fall from 21 to 15 per value
Run       python -m ch06_single_gpu_perf.uint8_copies [--smoke] [--save]
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import bench, machine, tables


def converted_on_host(pixels, mean, scale, staging, device):
    """Four bytes per value cross the link, and the host writes them first."""
    torch.sub(pixels, mean, out=staging).mul_(scale)
    return staging.to(device, copy=True)


def converted_on_device(pixels, mean, scale, device):
    """One byte per value crosses the link; a kernel widens it there.

    Two calls: in ``.to(device, torch.float32)`` alone the *host* converts,
    unless ``non_blocking`` is set, and four bytes cross again.
    """
    values = pixels.to(device, copy=True)
    return torch.sub(values, mean).mul_(scale)


def ids_widened_on_host(ids, device):
    """Eight bytes per token cross, because an embedding looks up int64."""
    return ids.long().to(device, copy=True)


def ids_widened_on_device(ids, device):
    """Bytes cross as stored: two for up to 65,536 entries, else four."""
    return ids.to(device, copy=True).long()


TECHNIQUES = (
    converted_on_host,
    converted_on_device,
    ids_widened_on_host,
    ids_widened_on_device,
)


COPY = torch.ops.aten.copy_.default
TO_COPY = torch.ops.aten._to_copy.default


class Copies(TorchDispatchMode):
    """Count bytes that are copied, and values widened before and after.

    A copy changes the device or, within one memory, nothing but the place.
    """

    def __init__(self):
        super().__init__()
        self.copied_bytes = self.widened_before = self.widened_after = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        pair = args[:2] if function is COPY else (result, *args[:1])
        if len(pair) < 2 or not all(isinstance(t, torch.Tensor) for t in pair):
            return result
        there, source = pair
        moved = source.device != there.device
        same = source.dtype == there.dtype
        if function in (COPY, TO_COPY) and (moved or same):
            # converted on the way: by the host, if it waits anyway
            late = kwargs.get("non_blocking") or args[2:] == (True,)
            self.copied_bytes += (source if late else there).nbytes
        elif there.element_size() > source.element_size():
            if self.copied_bytes:
                self.widened_after += there.numel()
            else:
                self.widened_before += there.numel()
        return result


def sizes(args):
    """Return (images, side in pixels, sequences, their length)."""
    if args.smoke:
        return 2, 32, 2, 16
    if args.device.type == "cpu":
        return 32, 224, 8, 1024
    return 256, 224, 8, 1024


def counted(function):
    """Return what one call copies and widens."""
    with Copies() as found:
        function()
    return {
        "copied_bytes": found.copied_bytes,
        "widened_before": found.widened_before,
        "widened_after": found.widened_after,
    }


def copy_s(args, copied_bytes):
    """Return the seconds of a copy at this machine's best rate.

    In one memory each byte is read and written.
    """
    if args.smoke:
        return None
    peaks = machine.peaks(args.device)
    if args.device.type == "cpu":
        return 2 * copied_bytes / peaks["copy_bytes_per_s"]
    rate = peaks["host_to_device_bytes_per_s"]
    return rate and copied_bytes / rate


# read and written per value: uint8 in, float32 out, float32 in place
CONVERSION_BYTES = (1 + 4) + (4 + 4)


def predict(args, values):
    """Return the seconds until a batch has arrived, per row, or None."""
    links = copy_s(args, 4 * values), copy_s(args, values)
    if None in links:
        return None
    rates = [
        machine.peaks(where)["copy_bytes_per_s"]
        for where in ("cpu", args.device)
    ]
    return {
        "float32": CONVERSION_BYTES * values / rates[0] + links[0],
        "uint8": CONVERSION_BYTES * values / rates[1] + links[1],
    }


def make_pixels(images, side, pinned):
    """Return (pixels, room for as many floats), both (N, 3, side, side)."""
    draw = torch.Generator().manual_seed(0)
    shape = images, 3, side, side
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
    staging = torch.empty(shape)
    if pinned:
        return pixels.pin_memory(), staging.pin_memory()
    return pixels, staging


def normalisation(device):
    """Return (mean, scale) of ImageNet's channels, for values 0 to 255.

    Subtracting and multiplying round alike everywhere; a division by a
    number does not: CUDA multiplies by its reciprocal.
    """
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255
    return mean.to(device), deviation.reciprocal().to(device)


def first_layer(device):
    """Return a step: patches of 16 x 16 pixels, embedded, and its gradient."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 32, 16, stride=16).to(device)

    def step(values):
        layer.zero_grad()
        loss = layer(values).square().mean()
        loss.backward()
        gradients = [layer.weight.grad, layer.bias.grad]
        return {"loss": loss, "gradients": gradients}

    return step


def arrivals(pixels, staging, device):
    """Return, per row, a call that brings the batch to the device."""
    here, there = normalisation("cpu"), normalisation(device)
    return {
        "float32": lambda: converted_on_host(pixels, *here, staging, device),
        "uint8": lambda: converted_on_device(pixels, *there, device),
    }


def token_arrivals(sequences, length, device):
    """Return the same for ids that a file holds in 16 or 32 bits."""
    ids = torch.arange(sequences * length, dtype=torch.int32) % 50257
    stored = ids.to(torch.uint16)
    return {
        "int64 ids": lambda: ids_widened_on_host(stored, device),
        "int32 ids": lambda: ids_widened_on_device(ids, device),
        "uint16 ids": lambda: ids_widened_on_device(stored, device),
    }


def in_words(args, values):
    """Say what is expected of the pixels, or None."""
    predicted = predict(args, values)
    if predicted is None:
        return None
    words = [f"{n} {tables.seconds(s)}" for n, s in predicted.items()]
    text = f"until the pixels have arrived, {', '.join(words)}"
    here = args.device.type == "cpu"
    if here and machine.peaks("cpu")["cache_bytes"] > 9 * values:
        text += "; less, as a cache holds them"
    return text


def main(argv=None):
    args = bench.cli(__doc__, argv)
    device = args.device
    images, side, sequences, length = sizes(args)
    pixels, staging = make_pixels(images, side, device.type == "cuda")
    batch = arrivals(pixels, staging, device)
    tokens = token_arrivals(sequences, length, device)
    counts = []
    for name, arrive in (batch | tokens).items():
        found = {"values": arrive().numel()} | counted(arrive)
        best_s = copy_s(args, found["copied_bytes"])
        counts.append({"name": name} | found | {"copy_s": best_s})
    bench.report(
        args,
        counts,
        {
            "name": "row",
            "values": "values",
            "copied_bytes": "copied",
            "widened_before": "widened before",
            "widened_after": "and after",
            "copy_s": "copy at best rate",
        },
        title="A batch of pixels and one of token ids, counted",
    )
    rows = bench.compare(
        args,
        {name: lambda call=call: call for name, call in batch.items()},
        unit="batch",
        tolerance=None,
        expect=in_words(args, pixels.numel()),
        title="Until the batch has arrived as float32",
        budget_s=3.0,
    )

    def trained(arrive):
        def factory():
            step = first_layer(device)
            return lambda: step(arrive())

        return factory

    part = max(1, images // 4)
    batch = arrivals(pixels[:part], staging[:part], device)
    rows += bench.compare(
        args,
        {name: trained(call) for name, call in batch.items()},
        unit="batch",
        tolerance=None,
        title="A quarter of it, with forward and backward of a first layer",
        budget_s=3.0,
    )
    if device.type == "cpu":
        bench.left_out(
            args,
            "the link to a GPU, slower than any memory: there a quarter of "
            "the bytes weighs most",
        )
    return counts + rows


if __name__ == "__main__":
    bench.run(main)
