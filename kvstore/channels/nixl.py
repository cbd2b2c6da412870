"""NIXL as a channel: UCX chooses shared memory, RDMA or TCP.

NIXL's own progress thread is off, because it takes a whole core even when idle. UCX therefore makes progress in calls:
in ``look`` where this end reads, and on a thread while others may read here, as new connections and TCP need it.

A read in progress is not cancelled and its peer not detached before it has ended, because UCX keeps writing to its
parts. Only the end of the whole agent stops that. NIXL reports a transfer as failed as soon as one of its ranges has
failed, while it may still write to the others, so each part of a read is a separate transfer.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import xxhash

from kvstore.channels.base import MAX_DESCRIPTION_BYTES, Channel, Peer, Reading, State
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ChannelError

_raises = logging.raiseExceptions
try:
    from nixl import _bindings
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise ImportError(f"NIXL cannot be imported ({error}): pip install 'vllm-kvstore[nixl]'") from error
finally:
    logging.raiseExceptions = _raises  # NIXL disables the error reports of all loggers in the process
if not os.environ.get("NIXL_LOG_LEVEL"):
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs to stdout, where programs print their results

logger = logging.getLogger(__name__)

_BACKEND: Final = "UCX"
_MEMORY: Final = "DRAM"
_HEADER: Final = struct.Struct("<8s8sQQ")  # of a description: magic, checksum, and address and length of the memory
_NUMBERS: Final = struct.Struct("<QQ")
_MAGIC: Final = b"kvnixl\0\1"
_TURN_S: Final = 2e-3  # between two polls of the thread, which take a few percent of a core
_CLOSE_WAIT_S: Final = 1.0
_FAILURES: Final[tuple[type[Exception], ...]] = tuple(  # NIXL's exceptions have no common base class
    kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_NO_AGENT: Final[tuple[type[Exception], ...]] = (*_FAILURES, RuntimeError)
_NOT_BEGUN: Final[tuple[type[Exception], ...]] = (*_FAILURES, ChannelError)


class _Memory(NamedTuple):
    address: int
    num_bytes: int


@dataclass
class _Transfers:
    """The pending transfers of a read, with a flag set if another one has failed."""

    handles: list[Any]
    has_failed: bool


def _checksum(memory: _Memory, metadata: bytes) -> bytes:
    return xxhash.xxh3_64(_NUMBERS.pack(*memory) + metadata).digest()


def _begin(agent: Any, peer: Peer, begin: int, part: ByteArray) -> Any:  # noqa: ANN401 - NIXL has no types
    """Begin a transfer from an address of a peer. If this raises, nothing was begun."""
    there = agent.get_xfer_descs([(begin, len(part), 0)], _MEMORY)
    here = agent.get_xfer_descs([(part.ctypes.data, len(part), 0)], _MEMORY)
    handle = agent.initialize_xfer("READ", here, there, peer)
    if agent.transfer(handle) == "ERR":
        raise ChannelError("NIXL cannot start the read")
    return handle


class NixlChannel(Channel):
    """A NIXL agent behind a lock."""

    name: ClassVar[str] = "nixl"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._memory: _Memory | None = None
        self._description = b""
        self._peers: dict[Peer, _Memory] = {}
        self._readings: dict[Reading, _Transfers] = {}
        self._serving = threading.Condition()
        self._num_serving = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent: Any = nixl_agent(uuid.uuid4().hex, config)
        except _NO_AGENT as error:
            raise ChannelError(f"NIXL cannot create an agent: {error}") from error
        if _BACKEND not in self._agent.backends:
            raise ChannelError(f"this NIXL has no {_BACKEND} backend, only {', '.join(self._agent.plugin_list)}")

    def register(self, memory: ByteArray) -> None:
        """See ``Channel``."""
        found = _Memory(memory.ctypes.data, memory.nbytes)
        with self._working() as agent:
            agent.register_memory([(*found, 0, "")], _MEMORY, [_BACKEND])
            self._memory = found
            metadata: bytes = agent.get_agent_metadata()
            self._description = _HEADER.pack(_MAGIC, _checksum(found, metadata), *found) + metadata

    def describe(self) -> bytes:
        """See ``Channel``."""
        if self._memory is None:
            raise ChannelError("no memory is registered")
        if len(self._description) > MAX_DESCRIPTION_BYTES:
            raise ChannelError(f"NIXL's description has {len(self._description)} bytes, which is too long to be sent")
        return self._description

    def attach(self, description: bytes) -> Peer:
        """See ``Channel``."""
        if len(description) < _HEADER.size:
            raise ChannelError(f"{len(description)} bytes are too few for a description")
        magic, added_up, *fields = _HEADER.unpack_from(description)
        memory, metadata = _Memory(*fields), description[_HEADER.size :]
        is_sound = magic == _MAGIC and added_up == _checksum(memory, metadata) and sum(memory) <= 1 << 64
        if not is_sound:  # NIXL would take damaged addresses for sound
            raise ChannelError("this is no description of NIXL, or it is damaged")
        with self._working() as agent:
            peer = Peer(agent.add_remote_agent(metadata).decode("ascii", "replace"))
            self._peers[peer] = memory
            return peer

    def detach(self, peer: Peer) -> None:
        """See ``Channel``."""
        if self._peers.pop(peer, None) is not None:
            with suppress(ChannelError), self._working() as agent:
                agent.remove_remote_agent(peer)

    def read(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> Reading:
        """See ``Channel``."""
        memory = self._peers.get(peer)
        if memory is None:
            raise ChannelError("this peer is not attached")
        if offset_bytes < 0 or offset_bytes + sum(map(len, parts)) > memory.num_bytes:
            raise ChannelError(f"a read from byte {offset_bytes} leaves the peer's memory of {memory.num_bytes} bytes")
        begins = itertools.accumulate(map(len, parts), initial=memory.address + offset_bytes)
        transfers = _Transfers([], has_failed=False)
        with self._working() as agent:  # held throughout, because a handle that ``close`` misses keeps the agent alive
            for begin, part in zip(begins, parts, strict=False):
                try:
                    transfers.handles.append(_begin(agent, peer, begin, part))
                except _NOT_BEGUN:
                    if not transfers.handles:
                        raise
                    transfers.has_failed = True  # the earlier transfers are still awaited
                    break
            reading = Reading(next(self._numbers))
            self._readings[reading] = transfers
            return reading

    def look(self, reading: Reading) -> State:
        """See ``Channel``."""
        transfers = self._readings.get(reading)
        if transfers is None:  # ended by ``close``
            return State.FAILED
        for handle in list(transfers.handles):
            state = self._state_of(handle)
            if state is not State.PENDING:
                transfers.handles.remove(handle)
                transfers.has_failed = transfers.has_failed or state is State.FAILED
        if transfers.handles:
            return State.PENDING
        self._readings.pop(reading, None)
        return State.FAILED if transfers.has_failed else State.DONE

    def _state_of(self, handle: Any) -> State:  # noqa: ANN401 - NIXL has no types
        """Return the state of a transfer, whose handle is released once it has ended."""
        try:
            with self._working(_bindings.nixlRemoteDisconnectError) as agent:
                found = agent.check_xfer_state(handle)
        except _bindings.nixlRemoteDisconnectError:
            found = "ERR"
        except ChannelError:  # nothing says that UCX has ended: it may still write
            return State.PENDING
        if found == "PROC":
            return State.PENDING
        with suppress(ChannelError), self._working() as agent:
            agent.release_xfer_handle(handle)
        return State.DONE if found == "DONE" else State.FAILED

    @contextmanager
    def serving(self) -> Iterator[None]:
        """See ``Channel``."""
        with self._serving:
            self._num_serving += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="kvstore-channel", daemon=True)
                self._thread.start()
            self._serving.notify_all()
        try:
            yield
        finally:
            with self._serving:
                self._num_serving -= 1

    def close(self) -> None:
        """See ``Channel``."""
        with self._serving:
            self._is_closed = True
            self._serving.notify_all()
        if not self._lock.acquire(timeout=_CLOSE_WAIT_S):
            logger.warning("NIXL is stuck in a call: its connections stay open until the process ends")
            return
        try:
            for handle in itertools.chain.from_iterable(under_way.handles for under_way in self._readings.values()):
                with suppress(*_FAILURES):
                    handle.release()
            self._readings.clear()
            self._agent = None  # ends UCX and all pending transfers
        finally:
            self._lock.release()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)

    def _serve(self) -> None:
        while True:
            with self._serving:
                self._serving.wait_for(lambda: self._is_closed or self._num_serving > 0)
                if self._is_closed:
                    return
            with suppress(ChannelError), self._working() as agent:
                agent.get_new_notifs()
            with self._serving:
                self._serving.wait_for(lambda: self._is_closed, _TURN_S)

    @contextmanager
    def _working(self, *passed: type[Exception]) -> Iterator[Any]:
        """Yield the agent to one thread at a time; translates NIXL's errors except those in ``passed``."""
        with self._lock:
            if self._agent is None or self._is_closed:
                raise ChannelError("the channel was closed")
            try:
                yield self._agent
            except passed:
                raise
            except _FAILURES as error:
                raise ChannelError(f"NIXL: {error}") from error
