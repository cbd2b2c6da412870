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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import ClosedError, ConfigError, TierError, TierTimeoutError
from kvstore.tiers._folder import Throttle, unusable
from kvstore.tiers._survey import check_room, in_order_of_use
from kvstore.tiers.base import ChunkRef, Outcome, Tier, TierCounters, Transfer, payload_view
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.keys import Namespace
    from kvstore.layout import KVLayout

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
    wrap: Wrap | None = None,
) -> Tier:
    """Open a disk tier over one folder or several.

    Args:
        folders: one for each disk.
        namespace: whose chunks these are.
        layout: the geometry of the chunks.
        capacity_bytes: of all folders together; each gets an equal share.
        direct: whether to go round the page cache; None lets each folder find out.
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
            disk = DiskTier(folder, namespace, layout, share_bytes, direct=direct)
            opened.callback(disk.close)
            disks.append(disk)
        _check_shared_room(folders, share_bytes)
        opened.pop_all()
    if len(disks) == 1:
        return wrap(disks[0]) if wrap else disks[0]
    return StripedTier(disks, layout, wrap)


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
            for neighbours in by_device.values():
                check_room(neighbours, share_bytes * len(neighbours))
        except OSError as error:
            raise unusable(folder, error) from error


class StripedTier(Tier):
    """Disk tiers side by side. Batches are served by all folders at once, and answered in their order.

    Args:
        disks: freshly opened tiers of one namespace and layout; ``close`` closes them.
        layout: the geometry of the chunks.
        wrap: put around each of them for everything but the scan.
    """

    name = "disk"

    def __init__(self, disks: Sequence[DiskTier], layout: KVLayout, wrap: Wrap | None = None) -> None:
        self.capacity_bytes = sum(disk.capacity_bytes for disk in disks)
        self.counters = TierCounters()
        self._layout = layout
        self._disks = tuple(disks)
        self._tiers = tuple(wrap(disk) if wrap else disk for disk in disks)
        self._pools = [
            ThreadPoolExecutor(THREADS_PER_FOLDER, f"kvstore-folder-{number}") for number in range(len(disks))
        ]
        self._lock = threading.Lock()  # of the counters and the strays; never held during I/O
        self._strays: dict[ChunkRef, int] = {}
        self._clears = 0
        self._closed = False
        self._throttle = Throttle()

    @property
    def parts(self) -> tuple[Tier, ...]:
        """The tiers of the folders, with what is wrapped around them."""
        return self._tiers

    @property
    def usable_bytes(self) -> int:
        """What can surely be filled: below it, at least one folder has room for another chunk."""
        return self.capacity_bytes - (len(self._disks) - 1) * self.stored_bytes(self._layout.blocks_per_chunk)

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, the longest untouched first, over all folders; they are looked at side by side.

        Raises:
            TierError: a folder could not be read or swept.
        """
        looks = [self._submit(number, disk.found) for number, disk in enumerate(self._disks)]
        found = [look.result() for look in looks]
        ordered = [ref for _, ref in in_order_of_use(chunk for chunks in found for chunk in chunks)]
        with self._lock:
            self.counters.swept = sum(disk.counters.swept for disk in self._disks)
        places = {ref: number for number, disk in enumerate(self._disks) for ref, _ in disk.scan()}
        for number, disk in enumerate(self._disks):
            doubles = [ref for ref, _ in disk.scan() if places[ref] != number]
            disk.remove(doubles)
        with self._lock:
            self._strays = {ref: number for ref, number in places.items() if number != self._home(ref)}
        order = dict.fromkeys(ref for ref in (*ordered, *places) if ref in places)
        return [(ref, self.stored_bytes(ref.num_blocks)) for ref in order]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether its folder holds it; one that cannot say does not."""
        self._check_open()
        held = [False] * len(refs)
        for number, positions in self._by_place(refs).items():
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
        self._check(transfers)
        outcomes = self._spread(transfers, [self._place(transfer.ref) for transfer in transfers], put=False)
        return self._count(transfers, outcomes)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers: at home, or where there is room. A broken folder answers ``FAILED``.

        Raises:
            TierTimeoutError: a folder did not answer in time, and may still use its chunks' buffers.
        """
        self._check(transfers)
        clears = self._clears
        homes = [self._place(transfer.ref) for transfer in transfers]
        outcomes = self._spread(transfers, homes, put=True)
        for step in range(1, len(self._tiers)):
            full = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.FULL]
            if not full or clears != self._clears:
                break
            places = [(homes[position] + step) % len(self._tiers) for position in full]
            again = self._spread([transfers[position] for position in full], places, put=True)
            for position, place, outcome in zip(full, places, again, strict=True):
                outcomes[position] = self._settle(transfers[position].ref, place, outcome, clears)
        return self._count(transfers, outcomes)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks; a folder that refuses does not keep the others from it."""
        self._check_open()
        refs = list(refs)
        for number, positions in self._by_place(refs).items():
            try:
                self._tiers[number].remove([refs[position] for position in positions])
            except TierError as error:
                self._complain(number, error)
        with self._lock:
            for ref in refs:
                self._strays.pop(ref, None)

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
        """The size of the file of a chunk of ``num_blocks`` blocks."""
        return self._disks[0].stored_bytes(num_blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes of all folders; see ``DiskTier.used_bytes``."""
        return sum(disk.used_bytes for disk in self._disks)

    def close(self) -> None:
        """Close all folders at once; waits as long as the slowest of them, which is bounded."""
        self._closed = True
        with ThreadPoolExecutor(len(self._tiers), "kvstore-close") as closers:
            for _ in closers.map(lambda tier: tier.close(), self._tiers):
                pass
        for pool in self._pools:
            pool.shutdown(wait=False)

    def _home(self, ref: ChunkRef) -> int:
        return zlib.crc32(ref.prefix_key) % len(self._disks)

    def _place(self, ref: ChunkRef) -> int:
        return self._strays.get(ref, self._home(ref))

    def _by_place(self, refs: Sequence[ChunkRef]) -> dict[int, list[int]]:
        """For each folder concerned, the positions of its chunks."""
        return _grouped([self._place(ref) for ref in refs])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier was closed")

    def _submit(self, number: int, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Start something on the threads of a folder."""
        try:
            return self._pools[number].submit(work, *arguments)
        except RuntimeError as error:
            raise ClosedError("the disk tier was closed") from error

    def _check(self, transfers: Sequence[Transfer]) -> None:
        self._check_open()
        for transfer in transfers:  # all of them before any is moved
            payload_view(self._layout, transfer)

    def _spread(self, transfers: Sequence[Transfer], places: Sequence[int], *, put: bool) -> list[Outcome]:
        """Serve each transfer in its place: the first folder on this thread, the others on theirs meanwhile."""
        groups = list(_grouped(places).items())
        outcomes = [Outcome.FAILED] * len(transfers)
        late: list[Future[Any]] = []

        def serve(number: int, positions: Sequence[int]) -> None:
            tier = self._tiers[number]
            part = [transfers[position] for position in positions]
            try:
                answers = tier.put(part) if put else tier.get(part)
            except TierError as error:
                self._complain(number, error)
                if isinstance(error, TierTimeoutError):
                    late.append(error.pending)
                return
            for position, answer in zip(positions, answers, strict=True):
                outcomes[position] = answer

        jobs = [self._submit(number, serve, number, positions) for number, positions in groups[1:]]
        try:
            if groups:
                serve(*groups[0])
        finally:
            errors = [job.exception() for job in jobs]  # buffers stay in use until all have ended
        for error in errors:
            if error is not None:
                raise error
        if late:
            raise TierTimeoutError("a folder of the disk tier did not answer in time", _all_of(late))
        return outcomes

    def _settle(self, ref: ChunkRef, place: int, outcome: Outcome, clears: int) -> Outcome:
        """Remember a chunk that was stored away from where it was looked for, unless the tier was cleared meanwhile."""
        if outcome is not Outcome.STORED:
            return outcome
        with self._lock:
            before = self._strays.pop(ref, self._home(ref))
            is_current = clears == self._clears
            if is_current and place != self._home(ref):
                self._strays[ref] = place
        if is_current and before == place:
            return outcome
        try:
            self._tiers[before if is_current else place].remove([ref])
        except TierError as error:
            self._complain(place, error)
        return Outcome.STORED if is_current else Outcome.FAILED

    def _count(self, transfers: Sequence[Transfer], outcomes: list[Outcome]) -> list[Outcome]:
        with self._lock:
            for transfer, outcome in zip(transfers, outcomes, strict=True):
                self.counters.count(outcome, self.stored_bytes(transfer.ref.num_blocks))
        return outcomes

    def _complain(self, number: int, error: TierError) -> None:
        if self._throttle.is_due(str(number)):
            logger.warning("a folder of the disk tier is out of service, its chunks count as missing: %s", error)


def _grouped(places: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for position, place in enumerate(places):
        groups.setdefault(place, []).append(position)
    return groups


def _all_of(calls: Sequence[Future[Any]]) -> Future[Any]:
    """A future that is done when all of ``calls`` are."""
    everything: Future[Any] = Future()
    left = len(calls)
    lock = threading.Lock()

    def note(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            everything.set_result(None)

    for call in calls:
        call.add_done_callback(note)
    return everything
