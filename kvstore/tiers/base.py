"""The contract of a storage tier: a place outside the slab pool where chunks can live.

What every tier promises:

- *Batch first.* Each call takes several chunks and answers each with an ``Outcome``, in order.
- *Misses and "full" are values.* ``TierError`` means that the whole tier is broken; what it held counts as missing.
- *Never a wrong byte.* ``get`` answers ``HIT`` only after key, length and checksums agreed. Bytes that do not agree are
  removed, counted, and answered as ``CORRUPT``. After anything but ``HIT`` the buffer's content is undefined.
- *All or nothing.* ``get`` and ``scan`` see a chunk only once ``put`` wrote all of it, also across ``kill -9``.
- *Bounded.* ``used_bytes`` never exceeds ``capacity_bytes`` and equals what the storage really holds.
- *Thread-safe.* Any method may be called from any thread; no lock is held during I/O.
- *A write belongs to its epoch.* ``put`` stores nothing for a transfer that names another namespace than the tier is in
  when it stores: however long it took on its way, and whatever it waited for, ``reset`` was there first.

A tier decides nothing: the index says what goes in and what goes out.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ConfigError, InvalidCallError
from kvstore.keys import PREFIX_KEY_BYTES, Namespace
from kvstore.layout import ALIGNMENT_BYTES, KVLayout, round_up

UNBOUNDED_BYTES = sys.maxsize  # as a capacity: whatever the storage holds
MAX_LENT = 64


class Transfer(NamedTuple):
    """One chunk to move.

    ``buffer`` is a uint8 array of at least the payload's bytes rounded up to 4096, starting at an address that is a
    multiple of 4096 (a slab slot). ``put`` reads the payload from it and may set the padding behind it to zero.

    ``namespace_id`` is for ``put``: whose bytes these are. A tier that is in another namespace, because a ``reset``
    came in between, answers ``FAILED`` and stores nothing. None for the namespace that the tier is in.
    """

    ref: ChunkRef
    buffer: ByteArray
    namespace_id: bytes | None = None

    def belongs_to(self, namespace_id: bytes | None) -> bool:
        """Whether a tier in this namespace may store it. To be asked under the lock under which ``reset`` moves."""
        return namespace_id is None or self.namespace_id in (None, namespace_id)


@dataclass
class TierCounters:
    """Events since the tier was opened. Read without a lock: single numbers are exact, sets of them nearly so."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    full: int = 0
    failed: int = 0
    swept: int = 0  # leftovers of a crash, or unusable files, removed at start
    bytes_read: int = 0
    bytes_written: int = 0

    def count(self, outcome: Outcome, num_bytes: int) -> None:
        """Count what became of one chunk, and its bytes if they moved. Not atomic: needs the tier's lock."""
        name = _COUNTER_OF[outcome]
        setattr(self, name, getattr(self, name) + 1)
        if outcome is Outcome.HIT:
            self.bytes_read += num_bytes
        elif outcome is Outcome.STORED:
            self.bytes_written += num_bytes


_COUNTER_OF = {
    Outcome.HIT: "hits",
    Outcome.MISS: "misses",
    Outcome.CORRUPT: "corrupt",
    Outcome.STORED: "stored",
    Outcome.FULL: "full",
    Outcome.FAILED: "failed",
}


class Loan:
    """Memory of a tier, lent for reading: a context manager, whose end gives it back. Any thread may end it.

    Attributes:
        outcomes: of each chunk: HIT, MISS, CORRUPT or FAILED.
        payloads: of each chunk, read-only; None if it is no HIT. Nobody may look at one after the end.
    """

    def __init__(
        self, outcomes: list[Outcome], payloads: list[ByteArray | None], give_back: Callable[[], None] | None = None
    ) -> None:
        self.outcomes = outcomes
        self.payloads = payloads
        self._give_back = give_back

    @classmethod
    def refused(cls, num_chunks: int) -> Loan:
        """One in which every chunk ``FAILED``."""
        return cls([Outcome.FAILED] * num_chunks, [None] * num_chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Give the memory back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        self.payloads = [None] * len(self.outcomes)
        if give_back is not None:
            give_back()


GIVEN_BY_URL: Final = ("url", "connections", "timeout_s")
"""Options of every tier that a remote URL leads to. Others of the configuration come only if they are set."""


@dataclass(frozen=True)
class TierSetup:
    """What a tier is opened with: the arguments of every factory in the registry ``kvstore.tiers``.

    Attributes:
        namespace: whose chunks the tier holds.
        layout: the geometry of the chunks.
        capacity_bytes: never exceeded.
        options: what only this kind of tier has, such as a folder.
    """

    namespace: Namespace
    layout: KVLayout
    capacity_bytes: int
    options: Mapping[str, object] = field(default_factory=dict)

    def require_known_options(self, *known: str) -> None:
        """Turn down options that the tier does not have.

        Raises:
            ConfigError: names the first such option, and those that there are.
        """
        unknown = next((name for name in self.options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"a tier has no option {unknown!r}: it knows {', '.join(known) or 'none'}")


def payload_view(layout: KVLayout, transfer: Transfer) -> ByteArray:
    """The part of a transfer's buffer that is the payload.

    Raises:
        InvalidCallError: the chunk has no such key or length, or the buffer does not hold it.
    """
    ref, buffer = transfer.ref, transfer.buffer
    check_ref(layout, ref)
    payload_bytes = layout.payload_bytes(ref.num_blocks)
    need_bytes = round_up(payload_bytes, ALIGNMENT_BYTES)
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or len(buffer) < need_bytes:
        raise InvalidCallError(
            f"a buffer for {ref.num_blocks} blocks is a contiguous row of at least {need_bytes} uint8, "
            f"not {buffer.dtype}{list(buffer.shape)}"
        )
    return buffer[:payload_bytes]


def check_ref(layout: KVLayout, ref: ChunkRef) -> None:
    """Turn down a chunk that cannot be.

    Raises:
        InvalidCallError: it has no such key or length.
    """
    if len(ref.prefix_key) != PREFIX_KEY_BYTES or not 0 < ref.num_blocks <= layout.blocks_per_chunk:
        raise InvalidCallError(
            f"a chunk has a key of {PREFIX_KEY_BYTES} bytes and 1 to {layout.blocks_per_chunk} blocks, "
            f"not {len(ref.prefix_key)} bytes and {ref.num_blocks} blocks"
        )


def check_layers(layout: KVLayout, layers: range) -> None:
    """Turn down layers that a chunk does not have.

    Raises:
        InvalidCallError: they are none, not in a row, or not in the layout.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= layout.num_layers:
        raise InvalidCallError(f"{layers} are not some of the {layout.num_layers} layers of a chunk, in a row")


class Tier(ABC):
    """A storage tier for the chunks of one namespace. See the module's docstring for what it promises."""

    name: str
    capacity_bytes: int
    counters: TierCounters

    @abstractmethod
    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, with its stored bytes, the longest untouched first.

        ``put`` and a ``HIT`` are touches. Chunks touched without a pause of more than a second may come in another
        order: a prompt is touched from its head to its tail, and should be evicted the other way. Called before any
        other use, as it may have to look through the storage; later calls are allowed, and tell what is true then.
        """

    @property
    def parts(self) -> tuple[Tier, ...]:
        """The tiers of which it consists and which may break one by one, as they are now: often only itself."""
        return (self,)

    @property
    def answers(self) -> bool:
        """Whether any part of it answers, as far as is known: False while all of them are left alone."""
        return True

    def check(self) -> None:  # noqa: B027 - most tiers have nothing to find out
        """Find out whether the storage can be used, for those who want to know at start.

        Raises:
            TierError: it cannot; the message says why.
        """

    @abstractmethod
    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether ``get`` would find it."""

    @abstractmethod
    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers: HIT, MISS, CORRUPT or FAILED each.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract; nothing was moved.
            TierError: the tier as a whole is broken.
        """

    @property
    def reads_layers(self) -> bool:
        """Whether ``get_layers`` reads only the layers asked for, and touches no other bytes."""
        return False

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:  # noqa: ARG002 - see below
        """Read some layers of chunks to their places in the buffers: HIT, MISS, CORRUPT or FAILED each.

        ``HIT`` says that key, length and the checksums of these layers agreed. A tier that has ``reads_layers`` leaves
        all other bytes of the buffers alone, so that layers read before are still what they were; any other reads
        whole chunks. Who reads a chunk in several calls sees to it that it is not replaced in between. It counts as a
        hit once, with its last layer.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract, or there are no such layers; nothing was moved.
            TierError: the tier as a whole is broken.
        """
        return self.get(transfers)

    def layer_bytes(self, num_blocks: int, layers: range) -> int:  # noqa: ARG002 - reads all of them
        """What ``get_layers`` reads of a chunk of that many blocks, headers aside."""
        return self.stored_bytes(num_blocks)

    @property
    def lends(self) -> bool:
        """Whether ``borrow`` is there."""
        return False

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend the memory in which chunks lie, to be read from where they are: a ``get`` without the copy.

        What is lent stays what it is until the loan ends, even if the chunk is replaced or removed, or the storage
        goes away. At most ``MAX_LENT`` chunks; those for which the borrower holds too much already have ``FAILED``.

        Raises:
            InvalidCallError: the tier does not lend, or not so many, or there are no chunks like these.
            TierError: the tier as a whole is broken.
        """
        raise InvalidCallError(f"the {self.name} tier does not lend the memory of {len(refs)} chunks: call get")

    @abstractmethod
    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, replacing equal ones: STORED, FULL or FAILED each.

        FAILED also for what belongs to another namespace than the tier is in, see ``Transfer``.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract; nothing was moved.
            TierError: the tier as a whole is broken.
        """

    @abstractmethod
    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks; those that are not here are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk of the namespace: unreachable at once, even after a crash in the middle."""

    @abstractmethod
    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk, and keep those to come under a namespace that is new: the weights were changed.

        From the end of this call on, however it ends, nothing stored before can be got here. One that timed out holds
        back all calls after it until it has ended.

        Raises:
            TierError: the storage would not let go of the old chunks; ``put`` fails until it does.
        """

    def drop_spares(self, wanted_bytes: int) -> None:  # noqa: B027 - most tiers keep nothing for later use
        """Give back storage that is only kept to be used again, until so many bytes are free, or there is none of it.

        Raises:
            TierError: the storage did not answer.
        """

    @abstractmethod
    def stored_bytes(self, num_blocks: int) -> int:
        """What a chunk of that many blocks occupies at most, by which the index keeps the tier within its bound."""

    def size_of(self, ref: ChunkRef) -> int:
        """What a chunk that is held occupies; ``stored_bytes`` if it is not, or if all of its length take the same.

        Answers from memory. Less than ``stored_bytes`` only where a codec is at work.
        """
        return self.stored_bytes(ref.num_blocks)

    @property
    def usable_bytes(self) -> int:
        """What an index may fill: less than the capacity only where storage in several parts wastes some.

        What fits into it is stored; what fits only into the capacity is stored or ``FULL``.
        """
        return self.capacity_bytes

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes occupied now, everything included."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Idempotent; calls after it raise ``ClosedError``."""
