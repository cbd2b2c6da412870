"""Implementation of ``kvstore verify``, which reads every chunk of a folder, a pack or a store, and fixes faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.format.chunkfile import Damage
from kvstore.format.pack import Pack, Shard, open_pack
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.tiers import leads_to, load_tier
from kvstore.tiers.disk.folder import FOLDER_MODE, LOCK_FILE, FolderLock
from kvstore.tiers.disk.inventory import Inventory, Place, inventories
from kvstore.tools.interrupts import ShouldStop, never

if TYPE_CHECKING:
    from kvstore.tiers.object.inventory import ObjectInventory
    from kvstore.tiers.object.names import Place as ObjectPlace
    from kvstore.tiers.redis.inventory import RedisInventory, RedisPlace
    from kvstore.tiers.redis.names import Home

_P = TypeVar("_P")

QUARANTINE = ".quarantine"
NOT_A_NAME = "not a chunk's name"


@dataclass(frozen=True)
class Fault:
    """Unusable chunk or file: its place, its damage, and whether it was moved to quarantine or removed."""

    place: str
    damage: str
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.damage}"


@dataclass
class VerifyReport:
    """Result of a run.

    Attributes:
        chunks: chunks that were read, sound or not.
        size_bytes: bytes of the sound chunks.
        faults: one for each damaged chunk, and for each name that is not a chunk's.
        left: namespaces in which nothing was fixed, because no chunk in them is sound.
        unread: chunks that were left when the run was interrupted.
    """

    chunks: int = 0
    size_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unread: int = 0

    @property
    def fixed(self) -> int:
        """Number of faults that were moved to quarantine or removed."""
        return sum(fault.fixed for fault in self.faults)

    def may_fix(self, home: str, sound: int, faulty: int) -> bool:
        """Tell if faults of a namespace may be fixed; if none may, add the namespace to ``left``.

        A sound chunk proves that the geometry used to check the others is right. Without one, a wrong note, or layers
        of unknown sizes, could make every good chunk look damaged.
        """
        if faulty and not sound:
            self.left.append(home)
        return sound > 0


Tick = Callable[[int, int], None]
"""Callback after each chunk, with the total number of chunks and the bytes of this one."""


@dataclass(frozen=True)
class _Namespace(Generic[_P]):
    """Chunks of one namespace.

    Attributes:
        name: folder or id of the namespace.
        places: place of each chunk, with its text for people.
        check: returns the damage of a chunk, or None, and the bytes of a sound one; 0 bytes if it is gone.
        fix: moves damaged chunks to quarantine, or removes them, and returns for each whether it did.
    """

    name: str
    places: Sequence[tuple[str, _P]]
    check: Callable[[_P], tuple[str | None, int]]
    fix: Callable[[list[_P]], list[bool]]


def verify(
    target: str,
    *,
    fix: bool = False,
    remove: bool = False,
    options: Mapping[str, object] | None = None,
    tick: Tick = lambda _total, _size: None,
    should_stop: ShouldStop = never,
) -> VerifyReport:
    """Check every chunk of all namespaces.

    Args:
        target: a folder of the disk tier or of a cache server, a pack, or the URL of a Redis or of an object store.
        fix: move damaged chunks of a folder to ``.quarantine`` in it; delete those in a store. Nothing else is touched:
            no folder, and no file that is not a chunk's.
        remove: with ``fix``, delete damaged chunks of a folder instead of moving them.
        options: further options of the tier.
        tick: called after each chunk.
        should_stop: called before each chunk; damaged chunks that were read until then are fixed.

    Raises:
        ConfigError: there is no such folder, or the URL is wrong.
        FolderOwnedError: ``fix`` was requested, and an engine is using the folder.
        TierError: the store does not answer.
    """
    if leads_to(target, "redis"):
        load_tier("redis")  # its error names the package to install
        from kvstore.tiers.redis.inventory import RedisInventory  # noqa: PLC0415 - redis-py may not be installed

        with closing(RedisInventory(target, options or {})) as redis:
            return _verify(_in_redis(redis), fix=fix, tick=tick, should_stop=should_stop)
    if leads_to(target, "object"):
        from kvstore.tiers.object.inventory import ObjectInventory  # noqa: PLC0415 - as above

        with closing(ObjectInventory(target, options or {})) as objects:
            return _verify(_in_objects(objects), fix=fix, tick=tick, should_stop=should_stop)
    if "://" in target:
        raise ConfigError(f"verify reads a folder, a pack, a Redis or objects: {target.partition('://')[0]}:// is none")
    path = Path(target)
    if path.is_file():
        if fix:
            raise ConfigError("a pack is not changed: export it again without the damaged chunks")
        with open_pack(path) as pack:
            report = _verify(_in_pack(pack), fix=False, tick=tick, should_stop=should_stop)
            if lost := pack.read_trails()[1]:
                report.faults.append(Fault(f"{path}: trails", f"{lost:,} damaged: found as whole chunks only"))
            return report
    found = inventories(path)
    if not found and not (path / LOCK_FILE).exists():
        raise ConfigError(f"{path} is no folder of the disk tier: there is no namespace in it")
    with ExitStack() as locks:
        if fix:  # a running engine would count removed bytes, and find names that it did not create
            for owned in sorted({owner for inventory in found for owner in inventory.owners()}):
                locks.callback(FolderLock(owned).release)
        return _verify(
            [_in_folder(inventory, remove=remove) for inventory in found], fix=fix, tick=tick, should_stop=should_stop
        )


def place_in_pack(shard: Shard, ref: ChunkRef) -> str:
    """Return the place of a chunk in a pack, for people."""
    return f"{shard.namespace.id.hex()}/{ref.prefix_key.hex()}-{ref.num_blocks}"


def _verify(namespaces: Iterable[_Namespace[_P]], *, fix: bool, tick: Tick, should_stop: ShouldStop) -> VerifyReport:
    report, namespaces = VerifyReport(), list(namespaces)
    report.unread = total = sum(len(namespace.places) for namespace in namespaces)
    for namespace in namespaces:
        faults: list[tuple[str, _P, str]] = []
        sound = 0
        for text, place in takewhile(lambda _: not should_stop(), namespace.places):
            damage, size_bytes = namespace.check(place)
            report.unread -= 1
            report.chunks += bool(size_bytes) or damage not in {None, NOT_A_NAME}
            report.size_bytes += size_bytes
            sound += size_bytes > 0
            if damage is not None:
                faults.append((text, place, damage))
            tick(total, size_bytes)
        may_fix = fix and report.may_fix(namespace.name, sound, len(faults))
        is_fixed = namespace.fix([place for _, place, _ in faults]) if may_fix else [False] * len(faults)
        report.faults += [Fault(text, damage, done) for (text, _, damage), done in zip(faults, is_fixed, strict=True)]
    return report


def _in_pack(pack: Pack) -> Iterator[_Namespace[ChunkRef]]:
    for number, shard in enumerate(pack.shards):

        def check(ref: ChunkRef, number: int = number) -> tuple[str | None, int]:
            damage = pack.check(number, ref)
            return damage, 0 if damage else pack.extents[number][ref].size_bytes

        places = [(place_in_pack(shard, ref), ref) for ref in pack.extents[number]]
        yield _Namespace(shard.namespace.id.hex(), places, check, lambda refs: [False] * len(refs))


def _in_folder(inventory: Inventory, *, remove: bool) -> _Namespace[Place]:
    def check(place: Place) -> tuple[str | None, int]:
        if place.ref is None:
            return NOT_A_NAME, 0
        found = inventory.read(place.ref, place.until_s)
        if found is None or isinstance(found, str):  # removed by an engine in the meantime, or damaged
            return found, 0
        return None, len(found)

    try:
        places = [(str(place.path), place) for place in inventory.places()]
    except OSError as error:
        raise ConfigError(f"the folder {inventory.home} cannot be read: {error.strerror}") from error
    return _Namespace(
        str(inventory.home),
        places,
        check,
        lambda found: [_set_aside(inventory, place, remove=remove) for place in found],
    )


def _in_redis(inventory: RedisInventory) -> Iterator[_Namespace[RedisPlace]]:
    def check(place: RedisPlace) -> tuple[str | None, int]:
        damage = inventory.check(place)
        facts = inventory.facts(place) if damage is None else None
        return damage, facts.payload_bytes if facts else 0

    def fix(places: list[RedisPlace]) -> list[bool]:
        inventory.remove(places)
        return [True] * len(places)

    places = inventory.places()
    by_home: dict[Home, list[tuple[str, RedisPlace]]] = {}
    for place in places:
        by_home.setdefault(place.home, []).append((str(place), place))
    for home, mine in by_home.items():
        inventory.layout(home, places)  # which ``check`` uses
        yield _Namespace(home.namespace_id.hex(), mine, check, fix)


def _in_objects(inventory: ObjectInventory) -> Iterator[_Namespace[ObjectPlace]]:
    def check(place: ObjectPlace) -> tuple[str | None, int]:
        damage = inventory.check(place)
        return damage, 0 if damage is not None else inventory.sizes[place]

    def fix(places: list[ObjectPlace]) -> list[bool]:
        inventory.remove(places)
        return [True] * len(places)

    for home, found in groupby(inventory.places(), attrgetter("home")):
        yield _Namespace(home.namespace_id.hex(), [(str(place), place) for place in found], check, fix)


def _set_aside(inventory: Inventory, place: Place, *, remove: bool) -> bool:
    """Move or delete a chunk's file if a second read finds it damaged; return True if that was done.

    Folders, links, names that are not a chunk's, and unreadable files are left alone, because they may be anything, and
    a folder may contain sound chunks.

    Raises:
        ConfigError: the file cannot be moved or deleted.
    """
    if place.ref is None or not isinstance(inventory.read(place.ref, place.until_s), Damage):
        return False
    try:
        if remove:
            place.path.unlink()
            return True
        aside = inventory.home.parent / QUARANTINE / inventory.home.name
        aside.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        target = aside / place.path.name
        number = 0
        while os.path.lexists(target):
            number += 1
            target = aside / f"{place.path.name}.{number}"
        place.path.rename(target)
    except OSError as error:
        raise ConfigError(f"{place.path} cannot be moved or deleted: {error.strerror}") from error
    return True
