"""Bench lines of hand-overs: chunks from the buffer of one process to the server of another, all layers at once.

    python -m kvstore.tools.bench.handover GEOMETRY_HEX POOL_BYTES BATCH_BYTES CHANNEL

is the receiving process: a server as a decode engine embeds it, and the receivers of the limits. It prints the server's
port, and a second port that receives ``BATCH_BYTES`` repeatedly into one buffer and answers with a byte each time. With
a channel, ``attach ADDRESS METADATA_HEX`` and then ``read`` on standard input read as many bytes by bare NIXL; each
command is answered with a line.

Over TCP the limit is a plain socket that sends as many bytes of the same memory into one buffer of the other process
and gets a byte back. With NIXL the limit is a bare loop of reads in the other process, in pieces of 2 MiB, without
checksums.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvstore.channels import open_channel
from kvstore.handover.offering import Exposed, open_offering
from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Parcel, Transport
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ConfigError
from kvstore.model.layout import KVLayout
from kvstore.protocol.payload import Geometry, encode_geometry
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import NAMESPACE, Limit, Tick, alternating, columns, require
from kvstore.tools.bench.servers import Child, child
from kvstore.tools.bench.workbench import Workbench

_INCLUDES: Final = "asking what is there and for room, checksums made and compared, the last answer"
TCP = Subject("hand-over over TCP", "a plain socket", _INCLUDES)
NIXL = Subject("hand-over by NIXL", "a bare loop of NIXL's reads", _INCLUDES)
_BATCH_BYTES: Final = 96 << 20
_PIECE_BYTES: Final = 2 << 20  # bytes of one bare NIXL read
_TIMEOUT_S: Final = 60.0
_MARK: Final = "said "  # of answers, as NIXL prints, too
_POOL_BATCHES: Final = 8  # a client may write to a quarter of the pool at once


class _Batch:
    """Chunks in one buffer, with new keys and bytes in each round."""

    def __init__(self, layout: KVLayout, num_chunks: int) -> None:
        self.layout = layout
        self.memory = prefaulted(num_chunks * layout.slot_bytes)
        self.memory[:] = np.random.default_rng(0).integers(256, size=len(self.memory), dtype=np.uint8)
        size = layout.payload_bytes(layout.blocks_per_chunk)
        self.payloads = [self.memory[begin : begin + size] for begin in range(0, len(self.memory), layout.slot_bytes)]
        self.num_bytes = num_chunks * size
        self._number = 0

    def next(self) -> list[ChunkRef]:
        """Change the bytes of all chunks, and return references that were not used before."""
        numbers = range(self._number, self._number + len(self.payloads))
        self._number = numbers.stop
        self.memory[:: self.layout.slot_bytes] += 1
        return [ChunkRef(number.to_bytes(16, "little"), self.layout.blocks_per_chunk) for number in numbers]


class _Receiver(NamedTuple):
    """Handle of the receiving process, with its URL and the raw socket of the limit."""

    process: Child
    url: str
    raw: socket.socket

    def tell(self, text: str, meanwhile: Callable[[], object]) -> None:
        """Send a command and wait for its answer, calling ``meanwhile`` about once per millisecond."""
        self.process.tell(text)
        with selectors.DefaultSelector() as selector:
            assert self.process.process.stdout is not None
            selector.register(self.process.process.stdout, selectors.EVENT_READ)
            while not selector.select(0.001):
                meanwhile()
        if not self.process.said():
            raise ConfigError("the process that receives has ended")


@contextmanager
def _receiving(batch: _Batch, channel: str | None) -> Iterator[_Receiver]:
    pool_bytes = _POOL_BATCHES * len(batch.memory) + (64 << 20)
    given = (encode_geometry(batch.layout).hex(), str(pool_bytes), str(batch.num_bytes), channel or "")
    with child("kvstore.tools.bench.handover", *given, mark=_MARK) as process:
        port, _, raw_port = process.said().partition(" ")
        if not raw_port:
            raise ConfigError("the process that receives has ended")
        with socket.create_connection(("127.0.0.1", int(raw_port))) as raw:
            yield _Receiver(process, f"kvs://127.0.0.1:{port}", raw)


@contextmanager
def _sending(batch: _Batch, url: str, name: str | None) -> Iterator[Transport]:
    settings = {"timeout_s": _TIMEOUT_S}
    channel = open_channel(name, batch.memory)
    if channel is None:
        with closing(open_transport(url, NAMESPACE, batch.layout, settings)) as transport:
            yield transport
        return
    exposed = Exposed(channel, batch.memory)
    with closing(channel), closing(open_offering(url, NAMESPACE, batch.layout, settings, exposed)) as transport:
        yield transport
        require(exposed.read_bytes > 0, f"nothing went by {name}")


def _deliver(transport: Transport, batch: _Batch, refs: Sequence[ChunkRef]) -> list[Outcome]:
    parcels = list(map(Parcel, refs, batch.payloads))
    return transport.deliver(parcels, iter([range(batch.layout.num_layers)]))


def _plain_socket(batch: _Batch, receiver: _Receiver) -> Limit:
    def send() -> None:
        for payload in batch.payloads:
            receiver.raw.sendall(payload.data)
        receiver.raw.recv(1)

    return send


def _bare_nixl(batch: _Batch, receiver: _Receiver) -> Limit:
    agent = _nixl_agent("bench-target", batch.memory)
    receiver.tell(f"attach {batch.memory.ctypes.data} {agent.get_agent_metadata().hex()}", agent.get_new_notifs)
    return lambda: receiver.tell("read", agent.get_new_notifs)


def _check(batch: _Batch, refs: Sequence[ChunkRef], url: str) -> None:
    """Compare the chunks that the receiver holds with the last round's."""
    options = {"url": url, "timeout_s": _TIMEOUT_S}
    with closing(open_tier("server", TierSetup(NAMESPACE, batch.layout, UNBOUNDED_BYTES, options))) as tier:
        found = np.zeros(batch.layout.slot_bytes, np.uint8)
        for ref, payload in zip(refs, batch.payloads, strict=True):
            require(tier.get([Transfer(ref, found)]) == [Outcome.HIT], "the receiver has lost a chunk")
            require(bool((found[: len(payload)] == payload).all()), "a hand-over changed a byte")


def measure_handover(workbench: Workbench, rounds: int, tick: Tick, channel: str | None) -> list[Line]:
    """Measure hand-overs in alternation with the limit."""
    if channel is not None and find_spec(channel) is None:
        raise ConfigError("it is not installed: pip install 'vllm-kvstore[nixl]'")
    layout = workbench.paged.layout
    batch = _Batch(layout, max(1, min(workbench.num_chunks, _BATCH_BYTES // layout.slot_bytes)))
    subject = NIXL if channel is not None else TCP
    found = []
    with _receiving(batch, channel) as receiver, _sending(batch, receiver.url, channel) as transport:
        limit = _bare_nixl(batch, receiver) if channel is not None else _plain_socket(batch, receiver)
        for pair in alternating(rounds, tick):
            refs = batch.next()
            sample, outcomes = pair(limit, partial(_deliver, transport, batch, refs))
            require(set(outcomes) == {Outcome.STORED}, "the receiver did not take everything")
            found.append([sample])
        _check(batch, refs, receiver.url)
    return [subject.line(columns(found)[0], workbench.geometry.name, batch.num_bytes)]


def _nixl_agent(name: str, memory: ByteArray) -> Any:  # noqa: ANN401 - NIXL's
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - an extra

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")
    return agent


class _BareReader:
    """A bare loop of reads by NIXL."""

    def __init__(self, target: ByteArray) -> None:
        self._target, self._agent = target, _nixl_agent("bench-reader", target)

    def attach(self, address: int, metadata: bytes) -> None:
        """Select the peer and its address to read from."""
        self._address = address
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def read(self) -> None:
        """Read the whole batch, piece by piece."""
        for begin in range(0, len(self._target), _PIECE_BYTES):
            size = min(_PIECE_BYTES, len(self._target) - begin)
            here, there = (
                self._agent.get_xfer_descs([(base + begin, size, 0)], "DRAM")
                for base in (self._target.ctypes.data, self._address)
            )
            handle = self._agent.initialize_xfer("READ", here, there, self._peer)
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise SystemExit("NIXL failed to read")


def _take(listening: socket.socket, target: ByteArray) -> None:
    connection, _ = listening.accept()
    view = target.data
    while True:
        done = 0
        while done < len(view):
            count = connection.recv_into(view[done:])
            if not count:
                return
            done += count
        connection.sendall(b"\1")


def main() -> None:
    """Answer until killed."""
    geometry, (pool_bytes, batch_bytes), channel = sys.argv[1], map(int, sys.argv[2:4]), sys.argv[4] or None
    layout = msgspec.msgpack.decode(bytes.fromhex(geometry), type=Geometry).layout()
    target = prefaulted(batch_bytes)
    np.copyto(target, 1)
    server = EmbeddedServer(NAMESPACE, layout, EmbeddedOptions(pool_bytes, "127.0.0.1", 0, channel=channel))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_take, args=(listening, target), daemon=True).start()
        reader = _BareReader(target) if channel else None
        print(f"{_MARK}{server.port} {listening.getsockname()[1]}", flush=True)
        for line in sys.stdin:
            command, *words = line.split()
            assert reader is not None
            if command == "attach":
                reader.attach(int(words[0]), bytes.fromhex(words[1]))
            else:
                reader.read()
            print(f"{_MARK}{command}", flush=True)
    server.close()


if __name__ == "__main__":
    main()
