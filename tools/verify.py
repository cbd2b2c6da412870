"""``kvstore verify``: reads every chunk of a folder or a Redis, and sets aside what is damaged."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import ConfigError
from kvstore.format.chunkfile import Damage
from kvstore.format.pack import open_pack
from kvstore.tiers import leads_to, load_tier
from kvstore.tiers.disk.folder import FOLDER_MODE, LOCK_FILE, FolderLock
from kvstore.tiers.disk.shelf import Place, Shelf, shelves

if TYPE_CHECKING:
    from kvstore.tiers.redis.chunk import Home
    from kvstore.tiers.redis.shelf import RedisPlace

QUARANTINE = ".quarantine"
NOT_A_NAME = "not a chunk's name"


class Fault(NamedTuple):
    """What nobody can use: where it is, what is wrong with it, and whether it was set aside or removed."""

    place: str
    damage: str
    fixed: bool = False


@dataclass
class VerifyReport:
    """What was found.

    Attributes:
        chunks: looked at, sound or not.
        size_bytes: of those.
        faults: each with its place.
        left: namespaces in which nothing was fixed, because no chunk in them is sound.
    """

    chunks: int = 0
    size_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def fixed(self) -> int:
        """How many of the faults were set aside or removed."""
        return sum(fault.fixed for fault in self.faults)

    def may_fix(self, home: str, sound: int, faulty: int) -> bool:
        """Whether chunks of a namespace may be called damaged; otherwise it is noted in ``left``.

        A sound chunk proves that the geometry is right by which the others were checked. If there is none, a wrong
        note, or layers of sizes that nothing tells, would make every good chunk look damaged.
        """
        if faulty and not sound:
            self.left.append(home)
        return sound > 0


Tick = Callable[[int, int], None]
"""Called after every chunk: how many there are in all, and the bytes of this one."""


def verify(
    target: str,
    *,
    fix: bool = False,
    remove: bool = False,
    options: Mapping[str, object] | None = None,
    tick: Tick = lambda _total, _size: None,
) -> VerifyReport:
    """Check every chunk of all namespaces.

    Args:
        target: a folder of the disk tier or of a cache server, a pack, or the URL of a Redis.
        fix: move damaged chunks of a folder to ``.quarantine`` in it; those in Redis are removed. Nothing else is
            touched: no folder, and no file that is not a chunk's.
        remove: with ``fix``, delete them instead.
        options: of the Redis tier, beside the URL.
        tick: told of every chunk.

    Raises:
        ConfigError: there is no such folder, or the URL is wrong.
        FolderOwnedError: ``fix``, and an engine is using the folder.
        TierError: the Redis does not answer.
    """
    if leads_to(target, "redis"):
        return _verify_redis(target, options or {}, fix=fix, tick=tick)
    if "://" in target:
        raise ConfigError(f"verify reads a folder or a Redis, and {target.partition('://')[0]}:// is neither")
    if Path(target).is_file():
        if fix:
            raise ConfigError("a pack is not changed: export it again without the damaged chunks")
        return _verify_pack(Path(target), tick=tick)
    return _verify_folder(Path(target), fix=fix, remove=remove, tick=tick)


def _verify_pack(path: Path, *, tick: Tick) -> VerifyReport:
    report = VerifyReport()
    with open_pack(path) as pack:
        total = sum(len(extents) for extents in pack.extents)
        for number, extents in enumerate(pack.extents):
            for ref, extent in extents.items():
                report.chunks += 1
                report.size_bytes += extent.size_bytes
                damage = pack.check(number, ref)
                if damage is not None:
                    place = f"{pack.shards[number].namespace.id.hex()}/{ref.prefix_key.hex()}-{ref.num_blocks}"
                    report.faults.append(Fault(place, damage))
                tick(total, extent.size_bytes)
    return report


def _verify_folder(folder: Path, *, fix: bool, remove: bool, tick: Tick) -> VerifyReport:
    found = shelves(folder)
    if not found and not (folder / LOCK_FILE).exists():
        raise ConfigError(f"{folder} is no folder of the disk tier: there is no namespace in it")
    report = VerifyReport()
    with ExitStack() as locks:
        if fix:  # a running engine would count bytes that are gone, and find names that it did not make
            for owned in sorted({owner for shelf in found for owner in shelf.owners()}):
                locks.callback(FolderLock(owned).release)
        listed = [(shelf, list(_places(shelf))) for shelf in found]
        total = sum(len(places) for _, places in listed)
        for shelf, places in listed:
            faults, sound = [], 0
            for place in places:
                damage, size_bytes = _verify_place(shelf, place, report)
                tick(total, size_bytes)
                sound += size_bytes > 0
                if damage is not None:
                    faults.append((place, damage))
            may_fix = fix and report.may_fix(str(shelf.home), sound, len(faults))
            for place, damage in faults:
                is_fixed = may_fix and _set_aside(shelf, place, remove=remove)
                report.faults.append(Fault(str(place.path), damage, is_fixed))
    return report


def _places(shelf: Shelf) -> Iterator[Place]:
    try:
        yield from shelf.places()
    except OSError as error:
        raise ConfigError(f"the folder {shelf.home} cannot be read: {error.strerror}") from error


def _verify_place(shelf: Shelf, place: Place, report: VerifyReport) -> tuple[str | None, int]:
    """Look at one name: what is wrong with it, if anything, and the bytes of a sound chunk."""
    if place.ref is None:
        return NOT_A_NAME, 0
    found = shelf.read(place.ref)
    if found is None:  # an engine has removed it meanwhile
        return None, 0
    report.chunks += 1
    if isinstance(found, str):
        return found, 0
    report.size_bytes += len(found)
    return None, len(found)


def _set_aside(shelf: Shelf, place: Place, *, remove: bool) -> bool:
    """Take a damaged chunk away from where chunks are looked for, if it is one: a file of ours that was read once more.

    Folders, links, names that are no chunk's and what the system does not let us read are left alone: they may be
    anything, and good chunks may be below them.

    Raises:
        ConfigError: the folder does not let go of it.
    """
    if place.ref is None or not isinstance(shelf.read(place.ref), Damage):
        return False
    try:
        if remove:
            place.path.unlink()
            return True
        aside = shelf.home.parent / QUARANTINE / shelf.home.name
        aside.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        target = aside / place.path.name
        number = 0
        while os.path.lexists(target):
            number += 1
            target = aside / f"{place.path.name}.{number}"
        place.path.rename(target)
    except OSError as error:
        raise ConfigError(f"{place.path} cannot be taken away: {error.strerror}") from error
    return True


def _verify_redis(url: str, options: Mapping[str, object], *, fix: bool, tick: Tick) -> VerifyReport:
    load_tier("redis")  # says what to install, if need be
    from kvstore.tiers.redis.shelf import RedisShelf  # noqa: PLC0415 - redis-py may not be installed

    shelf = RedisShelf(url, options)
    report = VerifyReport()
    try:
        places = shelf.places()
        bad: dict[Home, list[tuple[RedisPlace, str]]] = {}
        sound: Counter[Home] = Counter()
        for place in places:
            shelf.layout(place.home, places)
            damage = shelf.check(place)
            report.chunks += 1
            facts = shelf.facts(place) if damage is None else None
            size_bytes = facts.payload_bytes if facts else 0
            report.size_bytes += size_bytes
            tick(len(places), size_bytes)
            sound[place.home] += facts is not None
            if damage is not None:
                bad.setdefault(place.home, []).append((place, damage))
        for home, faults in bad.items():
            may_fix = fix and report.may_fix(home.namespace_id.hex(), sound[home], len(faults))
            if may_fix:
                shelf.remove(place for place, _ in faults)
            report.faults += [Fault(str(place), damage, may_fix) for place, damage in faults]
    finally:
        shelf.close()
    return report
