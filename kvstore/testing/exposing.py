"""Peer process of the tests of channels, which registers memory and lets it be read.

    python -m kvstore.testing.exposing MODULE CLASS NUM_BYTES SEED

Prints the description of its memory in hex, and serves until its standard input ends.
"""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np

from kvstore.channels.base import Channel
from kvstore.model.chunks import ByteArray


def random_bytes(num_bytes: int, seed: int) -> ByteArray:
    """Return the random bytes that the memory is filled with."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def main() -> None:
    """Serve."""
    module, name, num_bytes, seed = sys.argv[1:]
    channel: Channel = getattr(import_module(module), name)()
    memory = random_bytes(int(num_bytes), int(seed))
    channel.register(memory)
    with channel.serving():
        sys.stdout.write(f"{channel.describe().hex()}\n")
        sys.stdout.flush()
        sys.stdin.read()
    channel.close()


if __name__ == "__main__":
    main()
