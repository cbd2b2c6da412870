"""Engines that hand over through a channel, as processes that can be killed.

    sender|lazy-sender CHANNEL URL FIRST_NUMBER
    receiver CHANNEL PORT

A sender delivers two chunks: each word on its standard input lets it name half of the layers; it prints ``half`` after
the first half was read, then its outcomes, and begins again; after an error with the next word. A lazy sender serves
no read that needs its processor until it has printed its outcomes and got another word. A receiver prints its port,
and serves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from subprocess import PIPE
from typing import Self

import numpy as np

from kvstore.channels import open_channel
from kvstore.handover.offering import Exposed, open_offering
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.layout import KVLayout
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import MINE
from support.forked import forker

LAYOUT = KVLayout((1 << 19,) * 8, planes=1, block_tokens=16, chunk_tokens=64)  # a layer of a chunk has 2 MiB
NUM_CHUNKS = 2
TIMEOUT_S = 5.0


def payload_of(number: int) -> ByteArray:
    """Return the random payload of a chunk."""
    return np.random.default_rng(number).integers(0, 256, LAYOUT.payload_bytes(4), np.uint8)


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "big"), 4)


def open_receiver(channel: str, port: int = 0) -> EmbeddedServer:
    return EmbeddedServer(MINE, LAYOUT, EmbeddedOptions(256 << 20, "127.0.0.1", port, channel=channel))


def _say(text: str) -> None:
    sys.stdout.write(f"said {text}\n")
    sys.stdout.flush()


def _send(name: str, url: str, number: int, *, is_lazy: bool) -> None:
    memory = np.zeros(NUM_CHUNKS * LAYOUT.slot_bytes, np.uint8)
    channel = open_channel(name, memory)
    assert channel is not None
    serving = channel.serving
    if is_lazy:
        channel.serving = nullcontext  # type: ignore[method-assign]
    exposed = Exposed(channel, memory)
    transport = open_offering(url, MINE, LAYOUT, {"timeout_s": TIMEOUT_S}, exposed)

    def computed() -> Iterator[range]:
        for half in (range(4), range(4, 8)):
            sys.stdin.readline()
            yield half
            if half.start == 0:
                _say("half")

    _say("ready")
    while True:
        parcels = []
        for slot in range(NUM_CHUNKS):
            view = memory[slot * LAYOUT.slot_bytes :][: LAYOUT.payload_bytes(4)]
            view[:] = payload_of(number + slot)
            parcels.append(Parcel(ref_of(number + slot), view))
        try:
            outcomes = transport.deliver(parcels, computed())
        except TierError as error:
            _say(f"failed: {error}")
            transport.close()
            sys.stdin.readline()
            transport = open_offering(url, MINE, LAYOUT, {"timeout_s": TIMEOUT_S}, exposed)
            continue
        _say(f"{[outcome.value for outcome in outcomes]} {exposed.read_bytes}")
        number += NUM_CHUNKS
        if is_lazy:
            sys.stdin.readline()
            with serving():
                sys.stdin.readline()


def _receive(name: str, port: int) -> None:
    server = open_receiver(name, port)
    _say(str(server.port))
    sys.stdin.read()
    server.close()


class End:
    """A sender or a receiver as a process. A context manager."""

    def __init__(self, *words: object, **environment: str) -> None:
        words = ("support.channel_ends", *words)
        self.process = forker().start(words, stdin=PIPE, stdout=PIPE, text=True, env={**os.environ, **environment})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def go(self) -> None:
        """Let the sender name half of the layers."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def says(self) -> str:
        """Return its next line; output of UCX and NIXL is left out."""
        assert self.process.stdout is not None
        for line in map(str, self.process.stdout):
            if line.startswith("said "):
                return line.removeprefix("said ").strip()
        raise AssertionError("it has ended")


def main() -> None:
    """Be the end that the arguments name."""
    if sys.argv[1] != "receiver":
        _send(sys.argv[2], sys.argv[3], int(sys.argv[4]), is_lazy=sys.argv[1] == "lazy-sender")
    else:
        _receive(sys.argv[2], int(sys.argv[3]))
