"""Contract of a channel: reading memory that another process has registered.

Every handover is announced in messages over TCP, whichever way its bytes take (``kvstore.handover``). With a channel, a
message only says where they are in the sender's memory; the receiver reads them, and verifies their checksum before
they can be found. A channel therefore need not detect that the other side has died or reused the memory: such bytes
fail the checksum and are dropped. The receiver reads, because only the reader knows until when its memory is written.

Promises of every channel:

- *Registered once.* Memory is registered before the first peer is attached, and stays until ``close``.
- *Ends are reported.* ``look`` reports the end of a read, however late. Until then its parts belong to the channel,
  which may write to them at any time, so their owner must not reuse them even after it has stopped waiting.
- *Bounds.* Nothing outside the peer's registered memory is read.
- *No call hangs.* Every call returns within milliseconds, whatever the peer's state; ``close`` within a second.
- *After close* nothing is written to any part.

The bytes are in host memory, or in any memory the channel can access. NCCL does not fit this contract, since it needs
both sides in a call at once, which ``serving`` and ``read`` do not provide. It would need a ``Transport`` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import ClassVar, NewType

from kvstore.model.chunks import ByteArray

Peer = NewType("Peer", str)
"""The channel's name for an attached process."""

Reading = NewType("Reading", int)
"""The channel's number for a read in progress."""

MAX_DESCRIPTION_BYTES = 64 << 10


class State(Enum):
    """State of a read."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Channel(ABC):
    """One end of a channel, in a process that reads, is read from, or both. Thread-safe.

    Made by a factory without arguments.

    Attributes:
        name: the registered name, the same at both ends.

    Raises:
        ChannelError: from the factory, if it cannot be used on this machine.
    """

    name: ClassVar[str]

    @abstractmethod
    def register(self, memory: ByteArray) -> None:
        """Register memory, ``uint8 [num_bytes]``, as the source and target of reads. Called once.

        Raises:
            ChannelError: it cannot be registered.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """Return the description with which a peer reads the registered memory: at most 64 KiB, the same at every call.

        Raises:
            ChannelError: nothing is registered, or the channel has failed.
        """

    @abstractmethod
    def attach(self, description: bytes) -> Peer:
        """Prepare to read from the peer of a description. Descriptions come over the network and may be any bytes.

        Raises:
            ChannelError: this is no description, or one of another kind of machine.
        """

    @abstractmethod
    def detach(self, peer: Peer) -> None:
        """Forget a peer without pending reads. It may be attached again."""

    @abstractmethod
    def read(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> Reading:
        """Begin to read from an offset in a peer's memory into parts of the registered memory, one after the other.

        Raises:
            ChannelError: the peer has fewer bytes there, is not attached, or cannot be reached. In that
                case no part is written. Failures after the first write are reported by ``look``.
        """

    @abstractmethod
    def look(self, reading: Reading) -> State:
        """Return the state of a read, and make progress on it if the channel only works during calls.

        Returns DONE or FAILED once, and forgets the number then.
        """

    def serving(self) -> AbstractContextManager[object]:
        """Return a context held while peers may read here, for a channel that needs CPU time for that."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """End everything, including pending reads: nothing is read or written afterwards. Idempotent."""
