"""A training program with a planted fault, to be found by a profiler.

Its loader decodes pixel by pixel in Python, or all at once in C++:
python -m ch04_profiling.planted_loader --decode pixels|whole
"""

import argparse
import time

import torch

SIDE, BATCH = 64, 8  # pixels of an image, images of a batch


def decode_by_pixel(raw):
    """Python's interpreter runs some ten instructions for each pixel."""
    found = []
    for value in raw:
        found.append((value * value + 127) // 255)
    return torch.tensor(found, dtype=torch.float32)


def decode_whole(raw):
    """One call runs the loop over all pixels in C++."""
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).int()
    return ((values * values + 127) // 255).float()


DECODERS = {"pixels": decode_by_pixel, "whole": decode_whole}


class Images(torch.utils.data.Dataset):
    """Pictures as they lie on a disk: bytes that must be decoded."""

    def __init__(self, count, decode):
        self.count, self.decode = count, decode

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        """Return one image (SIDE²,), made from its index."""
        return self.decode(bytes([index % 256]) * SIDE**2)


def make(decode):
    """Return (model, optimizer, loader); the optimizer imports for long."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE**2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    images = Images(1 << 20, decode)
    loader = torch.utils.data.DataLoader(images, batch_size=BATCH)
    return model, optimizer, loader


def train(model, optimizer, loader, seconds):
    """Train for so many seconds; return the number of batches."""
    batches, end = 0, time.perf_counter() + seconds
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        batches += 1
        if time.perf_counter() > end:
            return batches


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", choices=DECODERS, default="pixels")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    train(*make(DECODERS[args.decode]), args.seconds)


if __name__ == "__main__":
    main()
