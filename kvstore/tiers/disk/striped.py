"""Several folders, one for each disk, as one tier.

A chunk's *home* is the folder that a hash of its prefix key names, so nobody has to search for it. A chunk whose home
is full goes to another folder and is remembered as a *stray*, as are chunks that a restart finds elsewhere because the
list of folders changed. Every folder keeps its own lock, bound and threads: one that breaks makes its own chunks miss,
and one that hangs holds up only the calls that need it.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, TierError, TierTimeoutError
from kvstore.throttle import Throttle
from kvstore.tiers.base import Tier, TierCounters, Transfer, check_layers, payload_view
from kvstore.tiers.batches import all_of, grouped
from kvstore.tiers.disk.folder import unusable
from kvstore.tiers.disk.survey import check_room, in_order_of_use
from kvstore.tiers.disk.tier import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.keys import Namespace
    from kvstore.layout import KVLayout
    from kvstore.tiers.disk.survey import Use

logger = logging.getLogger(__name__)

THREADS_PER_FOLDER = 4

T = TypeVar("T")
Wrap = Callable[[DiskTier], Tier]


def open_folders(
    folders: Sequence[Path],
    namespace: Namespace,
    layout: KVLayout,
    capacity_bytes: int,
    *,
    direct: bool | None = None,
    codec: str = "none",
    wrap: Wrap | None = None,
) -> Tier:
    """Open a disk tier over one folder or several.

    Args:
        folders: one for each disk.
        namespace: whose chunks these are.
        layout: the geometry of the chunks.
        capacity_bytes: of all folders together; each gets an equal share.
        direct: whether to go round the page cache; None lets each folder find out.
        codec: what chunks are encoded with, see ``kvstore.format.codecs``.
        wrap: put around the tier of each folder, such as a deadline and a circuit breaker.

    Raises:
        ConfigError: a folder is named twice or lies inside another one, or cannot be used, or has no room.
        FolderOwnedError: another engine uses one of them.
    """
    if not folders:
        raise ConfigError("a disk tier needs at least one folder")
    refuse_overlaps(folders)
    share_bytes = capacity_bytes // len(folders)
    with ExitStack() as opened:
        disks = []
        for folder in folders:
            disk = DiskTier(folder, namespace, layout, share_bytes, direct=direct, codec=codec, checks_room=False)
            opened.callback(disk.close)
            disks.append(disk)
        _check_shared_room(folders, share_bytes)
        opened.pop_all()
    if len(disks) == 1:
        return wrap(disks[0]) if wrap else disks[0]
    return StripedTier(disks, layout, wrap)


def _wrapped(disks: Sequence[DiskTier], wrap: Wrap) -> tuple[Tier, ...]:
    """The tiers with what is put around them; a failure closes them all."""
    with ExitStack() as opened:
        tiers: list[Tier] = []
        for disk in disks:
            opened.callback(disk.close)
        for disk in disks:
            tiers.append(wrap(disk))
            opened.callback(tiers[-1].close)
        opened.pop_all()
    return tuple(tiers)


def refuse_overlaps(folders: Sequence[Path]) -> None:
    """Folders of one tier must not contain each other, whatever links lead to them.

    Raises:
        ConfigError: names the first two that do.
    """
    for one, other in combinations(folders, 2):
        first, second = one.resolve(), other.resolve()
        if first == second:
            raise ConfigError(f"local_disk names the folder {first} twice (as {one} and {other}): name it once")
        if first in second.parents or second in first.parents:
            raise ConfigError(f"local_disk names {one} and {other}, of which one lies inside the other: keep one")


def _check_shared_room(folders: Sequence[Path], share_bytes: int) -> None:
    """Folders on one filesystem must fit into it together.

    Raises:
        ConfigError: they do not, or a folder cannot be read.
    """
    by_device: dict[int, list[Path]] = {}
    for folder in folders:
        try:
            by_device.setdefault(folder.stat().st_dev, []).append(folder)
        except OSError as error:
            raise unusable(folder, error) from error
    for neighbours in by_device.values():  # each folder once: it may hold hundreds of thousands of files
        try:
            check_room(neighbours, share_bytes * len(neighbours))
        except OSError as error:
            raise unusable(neighbours[0], error) from error


@dataclass
class _Batch:
    """Transfers on their way, and what has become of each so far."""

    transfers: Sequence[Transfer]
    outcomes: list[Outcome]
    clears: int | None = None  # of a put: how often the tier had been cleared when it began
    layers: range | None = None  # of a get_layers


class StripedTier(Tier):
    """Disk tiers side by side. Batches are served by all folders at once, and answered in their order.

    Args:
        disks: freshly opened tiers of one namespace and layout; ``close`` closes them.
        layout: the geometry of the chunks.
        wrap: put around each of them.
    """

    name = "disk"

    def __init__(self, disks: Sequence[DiskTier], layout: KVLayout, wrap: Wrap | None = None) -> None:
        self.capacity_bytes = sum(disk.capacity_bytes for disk in disks)
        self.counters = TierCounters()
        self._layout = layout
        self._disks = tuple(disks)
        self._tiers = _wrapped(disks, wrap) if wrap else tuple(disks)
        self._pools = [
            ThreadPoolExecutor(THREADS_PER_FOLDER, f"kvstore-folder-{number}") for number in range(len(disks))
        ]
        self._lock = threading.Lock()  # of what follows and the counters; never held during I/O
        self._strays: dict[ChunkRef, int] = {}
        self._putting: set[ChunkRef] = set()
        self._scanned = False
        self._clears = 0
        self._closed = False
        self._throttle = Throttle(logger)

    @property
    def parts(self) -> tuple[Tier, ...]:
        """The tiers of the folders, with what is wrapped around them."""
        return self._tiers

    @property
    def answers(self) -> bool:
        """Whether any folder's tier does."""
        return any(tier.answers for tier in self._tiers)

    @property
    def usable_bytes(self) -> int:
        """What can surely be filled: below it, at least one folder has room for another chunk."""
        return self.capacity_bytes - (len(self._disks) - 1) * self.stored_bytes(self._layout.blocks_per_chunk)

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, in order of use over all folders; they are looked at side by side.

        The first call finds the strays. Of a chunk in two folders it keeps what was used last.

        Raises:
            TierError: a folder could not be read or swept.
        """
        self._check_open()
        looks = [self._submit(number, self._look, number) for number in range(len(self._disks))]
        found = [look.result() for look in looks]
        if not self._scanned:
            self._take_stock(found)
        held = (use for number, chunks in enumerate(found) for use in chunks if self._place(use.ref) == number)
        return [(use.ref, use.size_bytes) for use in in_order_of_use(held)]

    def _look(self, number: int) -> list[Use]:
        """The chunks of a folder and when they were used last."""
        self._tiers[number].scan()  # what is put around the folder guards the look at it; the rest is in memory
        return self._disks[number].uses()

    def _take_stock(self, found: Sequence[Sequence[Use]]) -> None:
        uses = sorted((use.used_ns, use.ref, number) for number, chunks in enumerate(found) for use in chunks)
        places = {ref: number for _, ref, number in uses}  # of two, the one used last
        with self._lock:
            self.counters.swept = sum(disk.counters.swept for disk in self._disks)
            self._strays = {ref: number for ref, number in places.items() if number != self._home(ref)}
            self._scanned = True
        for number, chunks in enumerate(found):
            doubles = [use.ref for use in chunks if places[use.ref] != number]
            if doubles:
                self._tiers[number].remove(doubles)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether its folder holds it; one that cannot say does not."""
        self._check_open()
        held = [False] * len(refs)
        for number, positions in grouped([self._place(ref) for ref in refs]).items():
            try:
                answers = self._tiers[number].contains([refs[position] for position in positions])
            except TierError as error:
                self._complain(number, error)
                continue
            for position, answer in zip(positions, answers, strict=True):
                held[position] = answer
        return held

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers. A broken folder answers ``FAILED`` for its chunks.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still use its chunks' buffers.
        """
        batch = self._begin(transfers)
        self._spread(batch, [self._place(transfer.ref) for transfer in transfers])
        return self._count(batch)

    @property
    def reads_layers(self) -> bool:
        """A file is read in any parts, unless a codec is at work."""
        return self._disks[0].reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Read some layers of chunks. A broken folder answers ``FAILED`` for its chunks.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still use its chunks' buffers.
        """
        check_layers(self._layout, layers)
        batch = self._begin(transfers)
        batch.layers = layers
        self._spread(batch, [self._place(transfer.ref) for transfer in transfers])
        return self._count(batch)

    def layer_bytes(self, num_blocks: int, layers: range) -> int:
        """The length of these layers."""
        return self._disks[0].layer_bytes(num_blocks, layers)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers: at home, or where there is room. A broken folder answers ``FAILED``.

        So does a chunk that another call is just putting: it might end in two folders.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still use its chunks' buffers.
        """
        batch = self._begin(transfers, self._clears)
        with self._reserved(transfers) as mine:
            homes = {ref: self._place(ref) for ref in mine}
            places = [homes.get(transfer.ref) for transfer in transfers]
            for step in range(1, len(self._tiers) + 1):
                self._spread(batch, places)
                places = [
                    (homes[transfer.ref] + step) % len(self._tiers) if outcome is Outcome.FULL else None
                    for transfer, outcome in zip(transfers, batch.outcomes, strict=True)
                ]
                if batch.clears != self._clears:
                    break
        return self._count(batch)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks; a folder that refuses does not keep the others from it."""
        self._check_open()
        refs = list(refs)
        with self._lock:  # a put that ends later finds it forgotten, and notes it again
            places = [self._strays.pop(ref, self._home(ref)) for ref in refs]
        for number, positions in grouped(places).items():
            try:
                self._tiers[number].remove([refs[position] for position in positions])
            except TierError as error:
                self._complain(number, error)

    def clear(self) -> None:
        """Forget every chunk of the namespace, in every folder.

        Raises:
            TierError: a folder refused; the others were cleared.
        """
        self._forget_all(lambda tier: tier.clear())

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk, and enter another namespace, in every folder.

        Raises:
            TierError: a folder would not let go of the old chunks, and stores nothing until it does.
        """
        self._forget_all(lambda tier: tier.reset(namespace))

    def _forget_all(self, action: Callable[[Tier], None]) -> None:
        with self._lock:
            self._clears += 1
            self._strays.clear()
        jobs = [self._submit(number, action, tier) for number, tier in enumerate(self._tiers)]
        for error in [job.exception() for job in jobs]:
            if error is not None:
                raise error

    def stored_bytes(self, num_blocks: int) -> int:
        """See ``DiskTier.stored_bytes``."""
        return self._disks[0].stored_bytes(num_blocks)

    def size_of(self, ref: ChunkRef) -> int:
        """The size of the chunk's file."""
        return self._disks[self._place(ref)].size_of(ref)

    @property
    def used_bytes(self) -> int:
        """Bytes of all folders; see ``DiskTier.used_bytes``."""
        return sum(disk.used_bytes for disk in self._disks)

    def close(self) -> None:
        """Close all folders at once; waits as long as the slowest of them, which is bounded."""
        self._closed = True
        closers = [threading.Thread(target=tier.close, name="kvstore-close", daemon=True) for tier in self._tiers]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        for pool in self._pools:
            pool.shutdown(wait=False)

    def _home(self, ref: ChunkRef) -> int:
        return zlib.crc32(ref.prefix_key) % len(self._disks)

    def _place(self, ref: ChunkRef) -> int:
        return self._strays.get(ref, self._home(ref))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier was closed")

    def _submit(self, number: int, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Start something on the threads of a folder."""
        try:
            return self._pools[number].submit(work, *arguments)
        except RuntimeError as error:
            raise ClosedError("the disk tier was closed") from error

    def _begin(self, transfers: Sequence[Transfer], clears: int | None = None) -> _Batch:
        self._check_open()
        for transfer in transfers:  # all of them before any is moved
            payload_view(self._layout, transfer)
        return _Batch(transfers, [Outcome.FAILED] * len(transfers), clears)

    @contextmanager
    def _reserved(self, transfers: Sequence[Transfer]) -> Iterator[set[ChunkRef]]:
        """Keep other puts away from these chunks until the last folder has answered. Yields those that were free."""
        with self._lock:
            mine = {transfer.ref for transfer in transfers} - self._putting
            self._putting |= mine

        def give_back(_: Future[Any] | None = None) -> None:
            with self._lock:
                self._putting -= mine

        pending: Future[Any] | None = None
        try:
            yield mine
        except TierTimeoutError as error:
            pending = error.pending
            raise
        finally:
            pending.add_done_callback(give_back) if pending else give_back()

    def _spread(self, batch: _Batch, places: Sequence[int | None]) -> None:
        """Serve each transfer in its place: the first folder on this thread, the others on theirs meanwhile."""
        groups = list(grouped(places).items())
        jobs = [self._submit(number, self._serve, batch, number, positions) for number, positions in groups[1:]]
        served = []
        try:
            served += [self._serve(batch, number, positions) for number, positions in groups[:1]]
        finally:
            errors = [job.exception() for job in jobs]  # buffers stay in use until all have ended
        for error in errors:
            if error is not None:
                raise error
        late = [pending for pending in served + [job.result() for job in jobs] if pending is not None]
        if late:
            raise TierTimeoutError("a folder of the disk tier did not answer in time", all_of(late, batch.outcomes))

    def _serve(self, batch: _Batch, number: int, positions: Sequence[int]) -> Future[None] | None:
        """Let a folder serve its part of a batch. If it takes too long: what is done when it has."""
        part = [batch.transfers[position] for position in positions]
        try:
            answers = self._ask(self._tiers[number], part, batch)
        except TierError as error:
            self._complain(number, error)
            return self._later(batch, number, positions, error) if isinstance(error, TierTimeoutError) else None
        self._take(batch, number, positions, answers)
        return None

    def _ask(self, tier: Tier, part: Sequence[Transfer], batch: _Batch) -> list[Outcome]:
        if batch.clears is not None:
            return tier.put(part)
        return tier.get(part) if batch.layers is None else tier.get_layers(part, batch.layers)

    def _later(self, batch: _Batch, number: int, positions: Sequence[int], error: TierTimeoutError) -> Future[None]:
        ended: Future[None] = Future()

        def take(call: Future[Sequence[Outcome]]) -> None:
            try:
                if not call.cancelled() and call.exception() is None:
                    self._take(batch, number, positions, call.result())
            except ClosedError:
                pass  # the next start finds what it left
            finally:
                ended.set_result(None)

        error.pending.add_done_callback(take)
        return ended

    def _take(self, batch: _Batch, number: int, positions: Sequence[int], answers: Sequence[Outcome]) -> None:
        """Note what a folder answered."""
        for position, answer in zip(positions, answers, strict=True):
            ref = batch.transfers[position].ref
            is_put = batch.clears is not None and answer is Outcome.STORED
            batch.outcomes[position] = self._settle(ref, number, batch.clears) if is_put else answer

    def _settle(self, ref: ChunkRef, place: int, clears: int | None) -> Outcome:
        """Remember where a chunk was stored, and remove it from where it was before.

        If the tier was cleared since the put began, remove the new one instead.
        """
        with self._lock:
            before = self._strays.pop(ref, self._home(ref))
            is_current = clears == self._clears
            if is_current and place != self._home(ref):
                self._strays[ref] = place
        obsolete = before if is_current else place
        if not is_current or before != place:
            try:
                self._tiers[obsolete].remove([ref])
            except TierError as error:
                self._complain(obsolete, error)
        return Outcome.STORED if is_current else Outcome.FAILED

    def _count(self, batch: _Batch) -> list[Outcome]:
        with self._lock:
            for transfer, outcome in zip(batch.transfers, batch.outcomes, strict=True):
                ref = transfer.ref
                if batch.layers is None:
                    self.counters.count(outcome, self.size_of(ref))
                elif outcome is Outcome.HIT and batch.layers.stop < self._layout.num_layers:
                    self.counters.bytes_read += self.layer_bytes(ref.num_blocks, batch.layers)
                else:
                    self.counters.count(outcome, self.layer_bytes(ref.num_blocks, batch.layers))
        return batch.outcomes

    def _complain(self, number: int, error: TierError) -> None:
        said = "a folder of the disk tier is out of service, its chunks count as missing: %s"
        self._throttle.log(str(number), said, error)
