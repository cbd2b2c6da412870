"""Striping of one disk tier over several folders, one per disk.

A chunk's *home* folder follows from a hash of its prefix key, so no chunk is searched for. A chunk whose home is full
is stored in another folder and recorded as a *stray*, as is a chunk that a restart finds elsewhere because the list of
folders changed. Every folder has its own lock, bound and guards: one that breaks loses only its chunks, and one that
hangs delays only the calls that need it.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, NamedTuple, TypeVar

from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import BoundedTier, TierCounters, Transfer, check_layers, payload_view, start_closing
from kvstore.tiers.disk.survey import Use, in_order_of_use
from kvstore.tiers.disk.tier import DiskTier

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_ROUNDS: Final = 4  # over all folders, for one chunk that finds no room


class _Stray(NamedTuple):
    """Folder of a chunk that is not at home, and the number of clears before it was stored there."""

    folder: int
    clears: int


class StripedTier(BoundedTier):
    """Tier over several disk tiers. A batch is served one chunk after the other; callers on several threads overlap.

    The first chunk whose folder times out ends its batch, and ``pending`` has the outcome of that chunk alone.

    Args:
        disks: newly opened tiers of one namespace and layout.
        tiers: the same with their guards; ``close`` closes them.
        layout: of the chunks.
    """

    name = "disk"

    def __init__(self, disks: Sequence[DiskTier], tiers: Sequence[BoundedTier], layout: KVLayout) -> None:
        self.capacity_bytes = sum(disk.capacity_bytes for disk in disks)
        self.counters = TierCounters()
        self._layout = layout
        self._disks = tuple(disks)
        self._tiers = tuple(tiers)
        self._lock = threading.Lock()  # guards the fields below; never held during I/O
        self._strays: dict[ChunkRef, _Stray] = {}
        self._putting: set[ChunkRef] = set()
        self._puts = 0  # begins and ends of puts
        self._scanned = False
        self._clears = 0  # and resets
        self._closed = False
        self._throttle = Throttle(logger)

    @property
    def parts(self) -> tuple[BoundedTier, ...]:
        """Tiers of the folders, with their guards."""
        return self._tiers

    @property
    def answers(self) -> bool:
        """True if any folder's tier answers."""
        return any(tier.answers for tier in self._tiers)

    @property
    def usable_bytes(self) -> int:
        """Bytes that can certainly be filled, below which at least one folder has room for another chunk."""
        return self.capacity_bytes - (len(self._disks) - 1) * self.stored_bytes(self._layout.blocks_per_chunk)

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Return every chunk held, in order of use over all folders. Scans the folders in parallel.

        The first call finds the strays. Of a chunk in two folders it keeps the copy used last.

        Raises:
            TierError: a folder could not be read or swept.
        """
        found = self._in_every_folder(self._uses_in)
        if not self._scanned:
            self._take_stock(found)
        held = (use for number, uses in enumerate(found) for use in uses if self._place(use.ref) == number)
        return [(use.ref, use.size_bytes) for use in in_order_of_use(held)]

    def trails(self) -> dict[PrefixKey, bytes]:
        """Return the trails of all folders, which are read in parallel.

        Raises:
            TierError: a folder could not be read.
        """
        found = self._in_every_folder(lambda number: self._tiers[number].trails())
        return {key: trail for trails in found for key, trail in trails.items()}

    def owners(self) -> dict[PrefixKey, bytes]:
        """Return the owners noted in all folders, which are read in parallel.

        Raises:
            TierError: a folder could not be read.
        """
        found = self._in_every_folder(lambda number: self._tiers[number].owners())
        return {key: owner for owners in found for key, owner in owners.items()}

    def retain(self, retentions: Sequence[Retention]) -> None:
        """Note which chunks stay until when, in every folder, as one that is being written may become a stray."""
        self._check_open()
        by_folder = {number: list(retentions) for number in range(len(self._tiers))}
        self._tell(by_folder, lambda tier, staying: tier.retain(staying))

    def retained(self) -> list[Retention]:
        """Return the retention of the chunks in all folders, which are read in parallel.

        Raises:
            TierError: a folder could not be read.
        """
        return [one for found in self._in_every_folder(lambda number: self._tiers[number].retained()) for one in found]

    @property
    def keeps_lifetimes(self) -> bool:
        """True if every folder does."""
        return all(tier.keeps_lifetimes for tier in self._tiers)

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Change the times to live of chunks held; a folder that refuses does not affect the others."""
        self._check_open()
        by_folder: dict[int, list[Lifetime]] = {}
        for one in lifetimes:
            by_folder.setdefault(self._place(one.ref), []).append(one)
        self._tell(by_folder, lambda tier, changed: tier.limit(changed))

    def lifetimes(self) -> list[Lifetime]:
        """Return the times to live of the chunks in all folders.

        Raises:
            TierError: a folder could not be read.
        """
        found = self._in_every_folder(lambda number: self._tiers[number].lifetimes())
        return [one for number, some in enumerate(found) for one in some if self._place(one.ref) == number]

    def _uses_in(self, number: int) -> list[Use]:
        """Return the chunks of a folder and the last use of each."""
        self._tiers[number].scan()  # through the guards; the rest is in memory
        return self._disks[number].uses()

    def _take_stock(self, found: Sequence[Sequence[Use]]) -> None:
        uses = sorted((use.used_ns, use.ref, number) for number, chunks in enumerate(found) for use in chunks)
        places = {ref: number for _, ref, number in uses}  # of two, the one used last
        with self._lock:
            self.counters.swept = sum(disk.counters.swept for disk in self._disks)
            self._strays = {
                ref: _Stray(number, self._clears) for ref, number in places.items() if number != self._home(ref)
            }
            self._scanned = True
        for number, chunks in enumerate(found):
            doubles = [use.ref for use in chunks if places[use.ref] != number]
            if doubles:
                self._tiers[number].remove(doubles)

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if its folder holds it; a broken folder counts as empty."""
        self._check_open()
        return [self._presence(ref) for ref in refs]

    def _presence(self, ref: ChunkRef) -> Presence:
        place = self._place(ref)
        try:
            return self._tiers[place].contains([ref])[0]
        except TierError as error:
            self._warn(place, error)
            return False

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers. A broken folder answers ``FAILED`` for its chunks.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still write to its chunk's buffer.
        """
        return self._each(transfers, self._get)

    @property
    def reads_layers(self) -> bool:
        """True if layers can be read one by one, which they cannot if a codec encodes the chunks."""
        return self._disks[0].reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Read some layers of chunks. A broken folder answers ``FAILED`` for its chunks.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still write to its chunk's buffer.
        """
        check_layers(self._layout, layers)
        return self._each(transfers, lambda transfer: self._get(transfer, layers))

    def _get(self, transfer: Transfer, layers: range | None = None) -> Outcome:
        ref, place = transfer.ref, self._place(transfer.ref)
        if layers is None:
            return self.counters.count(self._ask(place, lambda tier: tier.get([transfer])), self.size_of(ref))
        outcome = self._ask(place, lambda tier: tier.get_layers([transfer], layers))
        is_last = layers.stop == self._layout.num_layers
        return self.counters.count(outcome, self.layer_bytes(ref.num_blocks, layers), is_last=is_last)

    def layer_bytes(self, num_blocks: int, layers: range) -> int:
        """Return the bytes of these layers."""
        return self._disks[0].layer_bytes(num_blocks, layers)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, at home or else where there is room. A broken folder answers ``FAILED``.

        A chunk that another call is putting is also ``FAILED``, because it could end up in two folders.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still read its chunk's buffer.
        """
        clears = self._clears
        return self._each(transfers, lambda transfer: self._put(transfer, clears))

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks; a folder that refuses does not affect the others."""
        self._check_open()
        by_folder: dict[int, list[ChunkRef]] = {}
        with self._lock:  # a put that ends later records its stray again
            for ref in refs:
                by_folder.setdefault(self._take_place(ref), []).append(ref)
        self._tell(by_folder, lambda tier, leaving: tier.remove(leaving))

    def _tell(self, by_folder: Mapping[int, list[T]], tell: Callable[[BoundedTier, list[T]], None]) -> None:
        for number, part in by_folder.items():
            try:
                tell(self._tiers[number], part)
            except TierError as error:
                self._warn(number, error)

    def clear(self) -> None:
        """Remove every chunk of the namespace, in every folder.

        Raises:
            TierError: a folder refused; the others were cleared.
        """
        with self._lock:
            self._clears += 1
            clears = self._clears

        def clear(number: int) -> None:
            self._tiers[number].clear()
            with self._lock:  # a folder that refuses keeps its strays, as they may be removed later
                for ref, stray in list(self._strays.items()):
                    if stray.folder == number and stray.clears < clears:
                        del self._strays[ref]

        self._in_every_folder(clear)

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk and enter another namespace, in every folder.

        Raises:
            TierError: a folder did not remove the old chunks, and stores nothing until it does.
        """
        with self._lock:
            self._clears += 1
            self._strays.clear()
        self._in_every_folder(lambda number: self._tiers[number].reset(namespace))

    def stored_bytes(self, num_blocks: int) -> int:
        """See ``DiskTier.stored_bytes``."""
        return self._disks[0].stored_bytes(num_blocks)

    def size_of(self, ref: ChunkRef) -> int:
        """Return the size of the chunk's file."""
        return self._disks[self._place(ref)].size_of(ref)

    @property
    def used_bytes(self) -> int:
        """Bytes of all folders; see ``DiskTier.used_bytes``."""
        return sum(disk.used_bytes for disk in self._disks)

    def close(self) -> None:
        """Close all folders in parallel; waits for the slowest of them, whose close is bounded."""
        self._closed = True
        for closing in start_closing(self._tiers):
            closing.join()

    def _home(self, ref: ChunkRef) -> int:
        return zlib.crc32(ref.prefix_key) % len(self._disks)

    def _place(self, ref: ChunkRef) -> int:
        stray = self._strays.get(ref)
        return self._home(ref) if stray is None else stray.folder

    def _take_place(self, ref: ChunkRef) -> int:
        """Remove a chunk's stray, and return its folder. Needs the lock."""
        stray = self._strays.pop(ref, None)
        return self._home(ref) if stray is None else stray.folder

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier was closed")

    def _in_every_folder(self, action: Callable[[int], T]) -> list[T]:
        """Run an action for the number of each folder, in parallel; raises the first error after all have ended."""
        self._check_open()
        with ThreadPoolExecutor(len(self._tiers), "kvstore-folder") as threads:
            try:
                calls = [threads.submit(action, number) for number in range(len(self._tiers))]
            except RuntimeError as error:  # the interpreter is shutting down and starts no thread
                raise ClosedError("the disk tier was closed") from error
        return [call.result() for call in calls]

    def _each(self, transfers: Sequence[Transfer], move: Callable[[Transfer], Outcome]) -> list[Outcome]:
        """Check all transfers, then move one after the other."""
        self._check_open()
        for transfer in transfers:
            payload_view(self._layout, transfer)
        return [move(transfer) for transfer in transfers]

    def _ask(self, place: int, call: Callable[[BoundedTier], list[Outcome]]) -> Outcome:
        """Let a folder move one chunk; FAILED if the folder is broken.

        Raises:
            TierTimeoutError: it did not answer in time.
        """
        try:
            (outcome,) = call(self._tiers[place])
        except TierError as error:
            self._warn(place, error)
            if isinstance(error, TierTimeoutError):
                raise
            return Outcome.FAILED
        return outcome

    def _put(self, transfer: Transfer, clears: int) -> Outcome:
        """Store a chunk in the first folder with room, from its place on.

        ``clears`` is the number of clears before the call began. While the folders are tried one by one, other puts may
        fill the next one, and removals may empty one that was full, so they are tried again.
        """
        ref = transfer.ref
        with self._lock:
            if ref in self._putting:
                return self.counters.count(Outcome.FAILED, 0)
            is_alone = not self._putting
            self._putting.add(ref)
            self._puts = puts = self._puts + 1
        place, outcome = self._place(ref), Outcome.FULL
        with ExitStack() as on_error:
            on_error.callback(self._end_put, ref, place, clears, Outcome.FAILED)
            try:
                for number in range(1, _MAX_ROUNDS * len(self._tiers) + 1):
                    outcome = self._ask(place, lambda tier: tier.put([transfer]))
                    if outcome is not Outcome.FULL or clears != self._clears:
                        break
                    place = (place + 1) % len(self._tiers)
                    if number >= len(self._tiers) and is_alone and self._puts == puts:
                        break
            except TierTimeoutError as error:
                on_error.pop_all()
                raise self._late_put(ref, place, clears, error) from error
            on_error.pop_all()
        return self.counters.count(self._end_put(ref, place, clears, outcome), self.size_of(ref))

    def _late_put(self, ref: ChunkRef, place: int, clears: int, timeout: TierTimeoutError) -> TierTimeoutError:
        """Return the error to raise after a time-out, whose ``pending`` is done once the put has ended."""
        ended: Future[list[Outcome]] = Future()

        def end(late: Future[Sequence[Outcome]]) -> None:
            outcome = Outcome.FAILED
            try:
                stored = Outcome.FAILED if late.cancelled() or late.exception() else late.result()[0]
                outcome = self._end_put(ref, place, clears, stored)
            finally:  # a waiting caller keeps a slot for it
                ended.set_result([outcome])

        timeout.pending.add_done_callback(end)
        return TierTimeoutError(str(timeout), ended)

    def _end_put(self, ref: ChunkRef, place: int, clears: int, outcome: Outcome) -> Outcome:
        """Record the outcome of a put, and let other calls put the chunk again."""
        try:
            return self._settle(ref, place, clears) if outcome is Outcome.STORED else outcome
        except ClosedError:
            return Outcome.FAILED  # the next start finds the file
        finally:
            with self._lock:
                self._putting.discard(ref)
                self._puts += 1

    def _settle(self, ref: ChunkRef, place: int, clears: int) -> Outcome:
        """Record the folder of a stored chunk, and remove the chunk from its former folder.

        If the tier was cleared since the put began, remove the new copy instead.
        """
        with self._lock:
            before, is_current = self._place(ref), clears == self._clears
            if is_current:
                self._strays.pop(ref, None)
                if place != self._home(ref):
                    self._strays[ref] = _Stray(place, clears)
        obsolete = before if is_current else place
        if not is_current or before != place:
            try:
                self._tiers[obsolete].remove([ref])
            except TierError as error:
                self._warn(obsolete, error)
        return Outcome.STORED if is_current else Outcome.FAILED

    def _warn(self, number: int, error: TierError) -> None:
        message = "a folder of the disk tier failed, its chunks count as missing: %s"
        self._throttle.log(str(number), message, error)
