"""The contract of a transport: the way of chunks from an engine that computes them to one that goes on with them.

What every transport promises:

- *By content.* The far end finds a chunk by its key, as anything else that is stored; nobody holds anybody's blocks.
- *All or nothing.* A chunk can be found there only once all of its layers have arrived, verified; if the sender stops,
  or dies, nothing of it stays.
- *Once.* What the far end has already is not sent again.
- *Refused strangers.* A far end whose KV is not interchangeable with ours answers with an error that names the
  difference.

The bytes are in host memory here, as sockets want them. What transports between devices would need in addition is
written down in docs/disaggregation.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.chunks import ByteArray, ChunkRef, Outcome


class Parcel(NamedTuple):
    """A chunk to be handed over.

    Attributes:
        ref: its key and length.
        payload: uint8 ``[layout.payload_bytes(ref.num_blocks)]``, in the order of the layout, in host memory.
    """

    ref: ChunkRef
    payload: ByteArray


class Transport(ABC):
    """The way to one receiver, for the chunks of one namespace. For one thread, except ``close``."""

    @abstractmethod
    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        """Hand chunks over, layer by layer while they are being computed.

        Args:
            parcels: the chunks. Their payloads must not change after ``ready`` has named a layer, until this returns.
            ready: the layers, in order, in as many ranges as it likes; it may block until a layer has been computed.
                If it ends before the last layer, what was sent is not to be trusted, and nothing of it may be found.

        Returns:
            For each chunk: STORED if the receiver has it now, FULL if it has no room for it, or else FAILED.

        Raises:
            TierError: the receiver cannot be reached, is of another kind, or does not answer in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Hang up. Idempotent, and bounded; from any thread."""
