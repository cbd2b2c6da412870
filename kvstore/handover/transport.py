"""Contract of a transport, which sends chunks from an engine that prefills to one that decodes.

Every transport guarantees:

- *By content.* The receiver finds a chunk by its key, like any other stored chunk; neither engine holds blocks for the
  other.
- *All or nothing.* The receiver finds a chunk only after all of its layers have arrived and been verified. If the
  sender stops or dies, no part of the chunk stays.
- *Once.* A chunk that the receiver has is not sent again.
- *Compatible engines only.* A receiver whose KV is not interchangeable with ours refuses, and names the difference.

``kvstore.testing.transports`` has a suite for that. The bytes are in host memory, as sockets need them: ``tcp.py``
sends them in messages, ``offering.py`` lets the receiver read them through a channel (``kvstore/channels``), such as
NIXL. A transport between devices would need in addition:

- *NCCL* needs both sides in a call at once, and blocks before it is known that all of a chunk is right. So the receiver
  needs unpublished slots in device memory, ``deliver`` begins with a message that announces the chunks, and ``Parcel``
  gets a form on the device. A rank that dies breaks its communicator, so each pair of engines needs a separate one,
  created again after a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.protocol.progress import Progress


class Receiver(NamedTuple):
    """Address at which an engine receives chunks: its host, and the port of this rank."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Parcel(NamedTuple):
    """A chunk to be handed over.

    Attributes:
        ref: its key and length.
        payload: uint8 ``[layout.payload_bytes(ref.num_blocks)]``, in the order of the layout, in host memory.
        trail: the keys at the ends of its blocks, by which the receiver finds its parts; empty if they are not sent.
        until_s: the end of its time to live, in seconds since 1970; None for no end.
    """

    ref: ChunkRef
    payload: ByteArray
    trail: bytes = b""
    until_s: float | None = None


class Transport(ABC):
    """Connection to one receiver, for the chunks of one namespace. For one thread, except ``close``."""

    @abstractmethod
    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        """Hand chunks over, layer by layer while they are being computed.

        Args:
            parcels: the chunks. Once ``ready`` has yielded a layer, that must not change until this returns.
            ready: yields all layers in order, in ranges of any length; may block until a layer has been computed. If
                it ends before the last layer, the chunks are not to be trusted, and must not be found.

        Returns:
            For each chunk: STORED if the receiver has it now, FULL if it has no room for it, or else FAILED.

        Raises:
            TierError: the receiver cannot be reached, refuses, or does not answer in time.
        """

    @abstractmethod
    def tell(self, progress: Progress) -> None:
        """Report progress to the receiver, at once if it is connected; also called by ``ready`` within ``deliver``.

        It is called at least every ``BEAT_S``, changed or not, and must be sent as often, because a receiver without
        news for some seconds stops waiting. One that gets no progress, or does not understand it, waits until its
        deadline.

        Raises:
            TierError: as ``deliver``.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Idempotent and bounded; from any thread."""
