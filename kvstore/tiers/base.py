"""Contract of a storage tier, which stores chunks outside the slab pool.

Every tier guarantees:

- *Batch first.* Each call takes several chunks and answers each with an ``Outcome``, in order.
- *Misses and "full" are values.* ``TierError`` means that the whole tier is broken; its chunks count as missing.
- *Never a wrong byte.* ``get`` answers ``HIT`` only after key, length and checksums agreed. Bytes that do not agree are
  removed, counted, and answered as ``CORRUPT``. After any other outcome than ``HIT`` the buffer's content is undefined.
- *All or nothing.* ``get`` sees a chunk only once ``put`` has written all of it, even after ``kill -9``.
- *Thread-safe.* Any method may be called from any thread; no lock is held during I/O.
- *A write belongs to its epoch.* ``put`` stores nothing for a transfer that names another namespace than the tier's at
  that moment. A ``reset`` during the write wins, however long the write takes.

``Tier`` is enough for storage that several engines share and that evicts by itself, such as a remote one. The local
disk is a ``BoundedTier``: the index decides which chunks it holds, so it accounts for every byte.
"""

from __future__ import annotations

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence
from kvstore.model.errors import ConfigError, InvalidCallError
from kvstore.model.keys import PREFIX_KEY_BYTES, Namespace, PrefixKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.tiers.loan import Loan

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = sys.maxsize  # as a capacity: the storage keeps its own bound
MAX_LENT = 64
MAX_NEAREST: Final = 4
_counting = threading.Lock()  # one lock for all counters, so that they remain plain data
_PLURALS = {Outcome.HIT: "hits", Outcome.MISS: "misses"}  # other outcomes are counted under their own names


class Transfer(NamedTuple):
    """Chunk to move.

    ``buffer`` is a uint8 array of at least the payload's bytes rounded up to 4096, starting at an address that is a
    multiple of 4096 (a slab slot). ``put`` reads the payload from it and may zero the padding behind it.

    ``namespace_id`` is for ``put``: the namespace of these bytes. A tier that is in another namespace, because of a
    ``reset`` in between, answers ``FAILED`` and stores nothing. None means the namespace that the tier is in.

    ``trail`` is for ``put``: the keys at the ends of the chunk's blocks; empty if they are not known.

    ``tenant`` is for ``put``, and chooses the key if the tier encrypts: ``KeyExtras.tenant`` of the chunk's requests.

    ``owner`` is for ``put`` at a tier with a bound, or with quotas of its own: the id of the chunk's owner, for
    ``owners``; empty for none.

    ``until_s`` is for ``put`` at a tier that ``keeps_lifetimes``: the end of the chunk's time to live, in seconds since
    1970; None for no end.

    ``front_blocks`` is for ``get`` at a tier that ``reads_fronts``: read only so many of the chunk's leading blocks,
    as the payload of a chunk that has no others. 0 for all of them.
    """

    ref: ChunkRef
    buffer: ByteArray
    namespace_id: bytes | None = None
    trail: bytes = b""
    front_blocks: int = 0
    tenant: bytes = b""
    until_s: float | None = None
    owner: bytes = b""

    def belongs_to(self, namespace_id: bytes | None) -> bool:
        """Tell if a tier in this namespace may store the chunk. Call it under the lock that ``reset`` takes."""
        return namespace_id is None or self.namespace_id in (None, namespace_id)


@dataclass
class TierCounters:
    """Events since the tier was opened. Thread-safe; each number is exact, several together nearly so."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    full: int = 0
    failed: int = 0
    swept: int = 0  # leftovers of a crash and unusable files, removed at start
    bytes_read: int = 0
    bytes_written: int = 0
    held: int = 0  # chunks whose staging memory stays taken, because a call on it that was given up may still run
    replaced: int = 0  # processes of the storage's client

    def add(self, *, held: int = 0, replaced: int = 0) -> None:
        """Count what befell a client that runs in another process."""
        with _counting:
            self.held += held
            self.replaced += replaced

    def count(self, outcome: Outcome, num_bytes: int, *, is_last: bool = True) -> Outcome:
        """Count one chunk's outcome, and its bytes if they moved. Returns the outcome.

        A chunk that is read in several calls is one hit, with its last layer.
        """
        with _counting:
            if is_last or outcome is not Outcome.HIT:
                name = _PLURALS.get(outcome, outcome.value)
                setattr(self, name, getattr(self, name) + 1)
            if outcome is Outcome.HIT:
                self.bytes_read += num_bytes
            elif outcome is Outcome.STORED:
                self.bytes_written += num_bytes
        return outcome


GIVEN_BY_URL: Final = ("url", "connections", "timeout_s")
"""Options that every tier behind a remote URL gets. It gets others only if the configuration sets them."""


@dataclass(frozen=True)
class TierSetup:
    """Arguments of every factory in the registry ``kvstore.tiers``.

    Attributes:
        namespace: that of the tier's chunks.
        layout: the geometry of the chunks.
        capacity_bytes: the bound of a ``BoundedTier``. ``UNBOUNDED_BYTES`` for a tier behind a remote URL.
        options: options of this kind of tier, such as a folder.
        guard: for a tier of several parts that may break alone: puts guards around each. None for the part's choice.
    """

    namespace: Namespace
    layout: KVLayout
    capacity_bytes: int
    options: Mapping[str, object] = field(default_factory=dict)
    guard: Callable[[Tier], Tier] | None = None

    def require_known_options(self, *known: str) -> None:
        """Refuse options that the tier does not have.

        Raises:
            ConfigError: names the first unknown option, and the known ones.
        """
        unknown = next((name for name in self.options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"a tier has no option {unknown!r}: it knows {', '.join(known) or 'none'}")

    def require_unbounded(self, advice: str) -> None:
        """Refuse a capacity, for a tier whose storage has its own bound.

        Raises:
            ConfigError: the message advises where to set that bound.
        """
        if self.capacity_bytes != UNBOUNDED_BYTES:
            raise ConfigError(
                f"the storage of this tier has its own bound, and cannot keep to {self.capacity_bytes} bytes: {advice}"
            )


def payload_view(layout: KVLayout, transfer: Transfer, *, reads_fronts: bool = False) -> ByteArray:
    """Return the payload's part of a transfer's buffer; only if the call ``reads_fronts``, it may be of leading blocks.

    Raises:
        InvalidCallError: the chunk has no such key or length, or no such leading blocks, or the buffer does not hold
            them.
    """
    ref, buffer, front_blocks = transfer.ref, transfer.buffer, transfer.front_blocks
    check_ref(layout, ref)
    if front_blocks and not (reads_fronts and 0 < front_blocks < ref.num_blocks):
        raise InvalidCallError(f"this call cannot move only {front_blocks} leading blocks of {ref.num_blocks}")
    num_blocks = front_blocks or ref.num_blocks
    payload_bytes = layout.payload_bytes(num_blocks)
    need_bytes = round_up(payload_bytes, ALIGNMENT_BYTES)
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or len(buffer) < need_bytes:
        raise InvalidCallError(
            f"a buffer for {num_blocks} blocks must be a contiguous one-dimensional uint8 array of at least "
            f"{need_bytes} bytes, got {buffer.dtype}{list(buffer.shape)}"
        )
    return buffer[:payload_bytes]


def late_outcomes(late: Future[Sequence[Outcome]]) -> Sequence[Outcome]:
    """Return the outcomes of a call that timed out and has ended; none if it failed."""
    return () if late.cancelled() or late.exception() is not None else late.result()


class _Closable(Protocol):
    def close(self) -> None: ...


def start_closing(tiers: Iterable[_Closable]) -> list[threading.Thread]:
    """Close tiers or lanes at once, each on a separate thread, so that one that hangs does not delay the others."""
    closers = [threading.Thread(target=tier.close, name="kvstore-close", daemon=True) for tier in tiers]
    for closer in closers:
        closer.start()
    return closers


def check_ref(layout: KVLayout, ref: ChunkRef) -> None:
    """Refuse a key or a length that no chunk has.

    Raises:
        InvalidCallError: the message states the valid lengths.
    """
    if len(ref.prefix_key) != PREFIX_KEY_BYTES or not 0 < ref.num_blocks <= layout.blocks_per_chunk:
        raise InvalidCallError(
            f"a chunk must have a key of {PREFIX_KEY_BYTES} bytes and 1 to {layout.blocks_per_chunk} blocks, "
            f"got {len(ref.prefix_key)} bytes and {ref.num_blocks} blocks"
        )


def check_layers(layout: KVLayout, layers: range) -> None:
    """Refuse layers that a chunk does not have.

    Raises:
        InvalidCallError: there are none, they are not in a row, or not in the layout.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= layout.num_layers:
        raise InvalidCallError(f"layers must be consecutive ones of the {layout.num_layers} of a chunk, got {layers}")


class Tier(ABC):
    """Storage tier for the chunks of one namespace. See the module's docstring for its guarantees."""

    name: str
    counters: TierCounters

    @property
    def parts(self) -> tuple[Tier, ...]:
        """Tiers that it consists of now, each of which may break alone; for most tiers, only itself."""
        return (self,)

    @property
    def answers(self) -> bool:
        """True if any part is in use; False while circuit breakers bypass all of them."""
        return True

    def check(self) -> None:  # noqa: B027 - most tiers have nothing to find out
        """Check at start that the storage can be used.

        Raises:
            TierError: it cannot; the message has the reason.
        """

    @abstractmethod
    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        """Tell for each chunk if ``get`` would find it; the end in seconds since 1970 if it has a time to live."""

    def look(self, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
        """Look up for a prompt, which uses what is held; None for chunks of a part that failed and may hold them."""
        return self.contains(refs)

    @property
    def keeps_lifetimes(self) -> bool:
        """True if the storage keeps the times to live of chunks; otherwise none is stored that has one."""
        return False

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:  # noqa: B027 - for tiers that keep them
        """Change the times to live of chunks held, in seconds since 1970; others are ignored.

        Raises:
            TierError: the storage did not answer.
        """

    @property
    def keeps_trails(self) -> bool:
        """True if ``put`` keeps trails for every caller of ``nearest``; False while that is not known.

        If True, tails that a longer chunk in the tier contains are not stored.
        """
        return False

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return, for each trail, the trails of up to ``MAX_NEAREST`` chunks that share leading blocks with it.

        Those that share most come first. A tier knows the trails given to ``put``, and keeps them on a best-effort
        basis: a chunk may be left out, and a named one may have been removed, which ``contains`` shows.

        Raises:
            TierError: the tier as a whole is broken.
        """
        return [()] * len(trails)

    @abstractmethod
    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers: HIT, MISS, CORRUPT or FAILED each.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract; nothing was moved.
            TierError: the tier as a whole is broken.
        """

    @property
    def reads_layers(self) -> bool:
        """True if ``get_layers`` reads only the requested layers, and touches no other bytes."""
        return False

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:  # noqa: ARG002 - see below
        """Read some layers of chunks to their places in the buffers: HIT, MISS, CORRUPT or FAILED each.

        ``HIT`` means that key, length and the checksums of these layers agreed. A tier with ``reads_layers`` does not
        touch other bytes of the buffers, so that layers read before stay valid; any other tier reads whole chunks.
        Callers that read a chunk in several calls must prevent its replacement meanwhile. Such a chunk counts as one
        hit, with its last layer.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract, or there are no such layers; nothing was moved.
            TierError: the tier as a whole is broken.
        """
        return self.get(transfers)

    @property
    def reads_fronts(self) -> bool:
        """True if ``get`` can read leading blocks of a chunk alone, verified, at little more than their bytes."""
        return False

    @property
    def lends(self) -> bool:
        """True if ``borrow`` works."""
        return False

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend the tier's memory of chunks, to be read in place like a ``get`` without the copy.

        Lent bytes do not change until the loan ends, even if the chunk is replaced or removed, or the storage ends. At
        most ``MAX_LENT`` chunks. Chunks over the limit of one borrower have ``FAILED``.

        Raises:
            InvalidCallError: the tier does not lend, or not so many, or a key or length is invalid.
            TierError: the tier as a whole is broken.
        """
        raise InvalidCallError(f"the {self.name} tier does not lend the memory of {len(refs)} chunks: call get")

    @abstractmethod
    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, replacing equal ones: STORED, FULL or FAILED each.

        Chunks of another namespace than the tier's are also FAILED, see ``Transfer``.

        Raises:
            InvalidCallError: a chunk or a buffer breaks the contract; nothing was moved.
            TierError: the tier as a whole is broken.
        """

    @abstractmethod
    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks; unknown ones are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every chunk of the namespace; they are unreachable at once, even after a crash in the middle."""

    @abstractmethod
    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk, and keep later ones under a new namespace, because the weights have changed.

        After this call, even if it fails, no earlier chunk can be read here. A reset that timed out blocks all later
        calls until it has ended.

        Raises:
            TierError: the storage did not remove the old chunks; ``put`` fails until it does.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Idempotent; later calls raise ``ClosedError``."""


class BoundedTier(Tier):
    """Tier with a capacity that accounts for every byte, because an index decides which chunks it holds.

    ``used_bytes`` never exceeds ``capacity_bytes``, and equals the real size of the storage. ``scan`` sees only whole
    chunks, like ``get``.
    """

    capacity_bytes: int

    @abstractmethod
    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Return every chunk held, with its stored bytes, the least recently touched first.

        ``put`` and a ``HIT`` are touches. Chunks touched without a pause of more than a second may have another order,
        because a prompt is touched from its head to its tail, and should be evicted in reverse. Call it once before
        any other use, as it may have to search the storage; later calls return the chunks held then.
        """

    def trails(self) -> dict[PrefixKey, bytes]:
        """Return the trails of the chunks held, as far as the storage keeps those given to ``put``."""
        return {}

    def owners(self) -> dict[PrefixKey, bytes]:
        """Return the owners of the chunks held, as far as the storage keeps those given to ``put``."""
        return {}

    def retain(self, retentions: Sequence[Retention]) -> None:
        """Note which chunks stay until when, in seconds since 1970, for ``retained`` after a restart.

        A tier that keeps no such notes loses retention with the process.

        Raises:
            TierError: the storage did not answer.
        """

    def retained(self) -> list[Retention]:
        """Return the last retention noted of each chunk held, ended ones included; none from before ``clear``."""
        return []

    def lifetimes(self) -> list[Lifetime]:
        """Return the times to live of the chunks held that have one, those that are over included."""
        return []

    def drop_spares(self, wanted_bytes: int) -> None:
        """Free storage that is only kept for reuse, until ``wanted_bytes`` are free or none of it is left.

        Raises:
            TierError: the storage did not answer.
        """

    @abstractmethod
    def stored_bytes(self, num_blocks: int) -> int:
        """Return the maximum size of a chunk of that many blocks, by which the index keeps the tier's bound."""

    def size_of(self, ref: ChunkRef) -> int:
        """Return the size of a chunk that is held; ``stored_bytes`` if it is not, or if only its length matters.

        Answers from memory. Less than ``stored_bytes`` only with a codec.
        """
        return self.stored_bytes(ref.num_blocks)

    @property
    def usable_bytes(self) -> int:
        """Bytes that an index may fill, less than the capacity only where storage in several parts wastes some.

        A chunk that fits into it is stored; one that only fits into the capacity is stored or ``FULL``.
        """
        return self.capacity_bytes

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes occupied now, including all overhead."""
