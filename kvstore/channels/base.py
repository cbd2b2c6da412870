"""The contract of a channel: how a process reads memory that another process has registered.

What is handed over is announced in messages over TCP, wherever its bytes go (``kvstore.handover``). With a channel, a
message only says where they are in the sender's memory; the receiver reads them, and verifies their checksum before
anybody can find them. So a channel need not notice that the other side has died, or has used the memory again:
whatever it reads then is thrown away. It is the receiver that reads, as nobody else can know until when its memory is
written to.

What every channel promises:

- *Registered once.* Memory is registered before the first peer is attached, and stays until ``close``.
- *Ends are told.* ``look`` says when a read has ended, however late. Until then its parts belong to the channel, which
  may write to them at any time: their owner lends them to nobody else, even if he no longer waits.
- *Bounds.* Nothing outside the peer's registered memory is read.
- *No call hangs.* Every call returns within milliseconds, whatever has become of the peer; ``close`` within a second.
- *After close* nothing is written to any part.

The bytes are in host memory, or wherever else the channel can read to. NCCL needs both sides in a call at once, which
``serving`` and ``read`` do not give it: it would need a ``Transport`` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import ClassVar, NewType

from kvstore.chunks import ByteArray

Peer = NewType("Peer", str)
"""A process that was attached: the channel's name for it."""

Reading = NewType("Reading", int)
"""A read that was begun: the channel's number for it."""

MAX_DESCRIPTION_BYTES = 64 << 10


class State(Enum):
    """What has become of a read."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Channel(ABC):
    """One end, for one process, which reads, is read from, or both. Thread-safe. Made by a factory without arguments.

    Attributes:
        name: as it is registered; both ends have the same.

    Raises:
        ChannelError: from the factory, if it cannot be used on this machine.
    """

    name: ClassVar[str]

    @abstractmethod
    def register(self, memory: ByteArray) -> None:
        """Register memory, ``uint8 [num_bytes]``: to be read from by peers, and to be read to. Called once.

        Raises:
            ChannelError: it cannot be registered.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to read the registered memory: at most 64 KiB, the same bytes each time.

        Raises:
            ChannelError: nothing is registered, or the channel has failed.
        """

    @abstractmethod
    def attach(self, description: bytes) -> Peer:
        """Prepare to read what a peer describes. Descriptions come over the network: any bytes are possible.

        Raises:
            ChannelError: this is no description, or one of another kind of machine.
        """

    @abstractmethod
    def detach(self, peer: Peer) -> None:
        """Forget a peer, of which no read is pending. It may be attached again."""

    @abstractmethod
    def read(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> Reading:
        """Begin to read from an offset in a peer's memory into parts of the registered memory, one after the other.

        Raises:
            ChannelError: the peer does not have so many bytes there, is not attached, or cannot be reached. Nothing is
                written to any part then; what fails when that may happen is told by ``look``.
        """

    @abstractmethod
    def look(self, reading: Reading) -> State:
        """What has become of a read; works on it, if the channel works in calls only.

        Answers anything but PENDING once, and forgets the number.
        """

    def serving(self) -> AbstractContextManager[object]:
        """Held while peers may read here, for a channel that needs the processor for that."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Give up everything, pending reads too: nothing is read or written afterwards. Idempotent."""
