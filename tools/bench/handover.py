"""Bench lines of hand-overs: chunks from the buffer of one process to the server of another, all layers at once.

Over TCP the limit is a plain socket that sends as many bytes of the same memory into one buffer of the other process
and gets a byte back. With NIXL the limit is a bare loop of reads in the other process, in pieces of 2 MiB, without
checksums.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from kvstore.channels import open_channel
from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ConfigError
from kvstore.handover.offering import Exposed, open_offering
from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Parcel, Transport
from kvstore.layout import KVLayout
from kvstore.protocol.geometry import encode_geometry
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import NAMESPACE, WARM_UP_ROUNDS, Limit, Pair, Tick, alternating, paired, require
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import running

_INCLUDES: Final = "asking what is there and for room, checksums made and compared, the last answer"
TCP = Subject("hand-over over TCP", "a plain socket", _INCLUDES)
NIXL = Subject("hand-over by NIXL", "a bare loop of NIXL's reads", _INCLUDES)
_BATCH_BYTES: Final = 96 << 20
_TIMEOUT_S: Final = 60.0
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


class _Receiver:
    """Handle of the receiving process, with its URL and the raw socket of the limit."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        port, raw_port = self.said().split()
        self.url = f"kvs://127.0.0.1:{port}"
        self.raw = socket.create_connection(("127.0.0.1", int(raw_port)))

    def said(self) -> str:
        """Return the next line of the process, skipping NIXL's output.

        Raises:
            ConfigError: the process has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("said "):
                return line.removeprefix("said ")
        raise ConfigError("the process that receives has ended")

    def tell(self, text: str, meanwhile: Callable[[], object]) -> None:
        """Send a command and wait for its answer, calling ``meanwhile`` about once per millisecond."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(0.001):
                meanwhile()
        self.said()


@contextmanager
def _receiving(batch: _Batch, channel: str | None) -> Iterator[_Receiver]:
    pool_bytes = _POOL_BATCHES * len(batch.memory) + (64 << 20)
    sizes = (str(pool_bytes), str(batch.num_bytes), channel or "")
    command = [sys.executable, "-m", "kvstore.tools.bench.receiver", encode_geometry(batch.layout).hex(), *sizes]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        receiver = _Receiver(process)
        with receiver.raw:
            yield receiver


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
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - an extra

    agent: Any = nixl_agent("bench-target", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(batch.memory.ctypes.data, len(batch.memory), 0, "")], "DRAM")
    receiver.tell(f"attach {batch.memory.ctypes.data} {agent.get_agent_metadata().hex()}", agent.get_new_notifs)
    return lambda: receiver.tell("read", agent.get_new_notifs)


def _check(batch: _Batch, refs: Sequence[ChunkRef], url: str) -> None:
    """Compare the chunks that the receiver holds with the last round's.

    Raises:
        BenchError: a chunk is missing or differs.
    """
    options = {"url": url, "timeout_s": _TIMEOUT_S}
    with closing(open_tier("server", TierSetup(NAMESPACE, batch.layout, UNBOUNDED_BYTES, options))) as tier:
        found = np.zeros(batch.layout.slot_bytes, np.uint8)
        for ref, payload in zip(refs, batch.payloads, strict=True):
            require(tier.get([Transfer(ref, found)]) == [Outcome.HIT], "the receiver has lost a chunk")
            require(bool((found[: len(payload)] == payload).all()), "a hand-over changed a byte")


def measure_handover(workbench: Workbench, rounds: int, tick: Tick, channel: str | None) -> list[Line]:
    """Measure hand-overs in alternation with the limit.

    Raises:
        BenchError: the receiver lost or changed a byte.
        ConfigError: an extra is not installed, or the receiver does not start.
    """
    if channel is not None and find_spec(channel) is None:
        raise ConfigError("it is not installed: pip install 'vllm-kvstore[nixl]'")
    layout = workbench.paged.layout
    batch = _Batch(layout, max(1, min(workbench.num_chunks, _BATCH_BYTES // layout.slot_bytes)))
    subject = NIXL if channel is not None else TCP
    pairs: list[Pair] = []
    with _receiving(batch, channel) as receiver, _sending(batch, receiver.url, channel) as transport:
        limit = _bare_nixl(batch, receiver) if channel is not None else _plain_socket(batch, receiver)
        for limit_first in alternating(subject.name, rounds, tick):
            refs = batch.next()
            pair, outcomes = paired(limit, partial(_deliver, transport, batch, refs), limit_first=limit_first)
            require(set(outcomes) == {Outcome.STORED}, "the receiver did not take everything")
            pairs.append(pair)
        _check(batch, refs, receiver.url)
    return [subject.line(workbench.geometry, pairs[WARM_UP_ROUNDS:], batch.num_bytes)]
