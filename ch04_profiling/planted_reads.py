"""Read one file in one of three ways, for a tracer of system calls.

python -m ch04_profiling.planted_reads FILE --by unbuffered|buffered|whole

It imports neither torch nor anything of this repository: under a tracer
every system call of an import is paid for.
"""

import argparse
import zlib

PIECE, BUFFER = 64, 8192  # bytes that the program wants; that it asks for


def unbuffered(path):
    """Each small read is a system call: into the kernel and back."""
    found = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def buffered(path):
    """A buffer in the process takes large pieces, and hands out small."""
    found = 0
    with open(path, "rb", buffering=BUFFER) as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def whole(path):
    """One call asks for the file as it is, one more finds its end."""
    with open(path, "rb", buffering=0) as file:
        return zlib.crc32(file.read())


WAYS = {"unbuffered": unbuffered, "buffered": buffered, "whole": whole}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--by", choices=WAYS, default="unbuffered")
    args = parser.parse_args(argv)
    print(WAYS[args.by](args.file))


if __name__ == "__main__":
    main()
