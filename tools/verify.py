"""``kvstore verify``: reads every chunk of a folder or a Redis, and sets aside what is damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.packs import open_pack
from kvstore.shelf import Place, Shelf, shelves
from kvstore.tiers import SCHEMES
from kvstore.tiers._folder import FOLDER_MODE, FolderLock

QUARANTINE = ".quarantine"
NOT_A_NAME = "not a chunk's name"


class Fault(NamedTuple):
    """A chunk that nobody may use: where it is, and what is wrong with it."""

    place: str
    damage: str


@dataclass
class VerifyReport:
    """What was found.

    Attributes:
        chunks: looked at, sound or not.
        size_bytes: of those.
        fixed: how many of the faults were set aside or removed.
    """

    chunks: int = 0
    size_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    fixed: int = 0


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
        target: a folder of the disk tier, a pack, or the URL of a Redis.
        fix: move damaged chunks of a folder to ``.quarantine`` in it; those in Redis are removed.
        remove: with ``fix``, delete them instead.
        options: of the Redis tier, beside the URL.
        tick: told of every chunk.

    Raises:
        ConfigError: there is no such folder, or the URL is wrong.
        FolderOwnedError: ``fix``, and an engine is using the folder.
        TierError: the Redis does not answer.
    """
    if SCHEMES.get(target.partition("://")[0]) == "redis":
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
    if not found and not (folder / ".lock").exists():
        raise ConfigError(f"{folder} is no folder of the disk tier: there is no namespace in it")
    report = VerifyReport()
    with ExitStack() as locks:
        if fix:  # a running engine would count bytes that are gone, and find names that it did not make
            for owned in sorted({shelf.home.parent for shelf in found}):
                locks.callback(FolderLock(owned).release)
        listed = [(shelf, list(_places(shelf))) for shelf in found]
        total = sum(len(places) for _, places in listed)
        for shelf, places in listed:
            for place in places:
                size_bytes = _verify_place(shelf, place, report)
                tick(total, size_bytes)
                if fix and report.faults and report.faults[-1].place == str(place.path):
                    _set_aside(shelf, place.path, remove=remove)
                    report.fixed += 1
    return report


def _places(shelf: Shelf) -> Iterator[Place]:
    try:
        yield from shelf.places()
    except OSError as error:
        raise ConfigError(f"the folder {shelf.home} cannot be read: {error.strerror}") from error


def _verify_place(shelf: Shelf, place: Place, report: VerifyReport) -> int:
    """Look at one name, and note what is wrong; the bytes read."""
    if place.ref is None:
        report.faults.append(Fault(str(place.path), NOT_A_NAME))
        return 0
    found = shelf.read(place.ref)
    if found is None:  # an engine has removed it meanwhile
        return 0
    report.chunks += 1
    if isinstance(found, str):
        report.faults.append(Fault(str(place.path), found))
        return 0
    report.size_bytes += len(found)
    return len(found)


def _set_aside(shelf: Shelf, path: Path, *, remove: bool) -> None:
    """Take a name away from where chunks are looked for.

    Raises:
        ConfigError: the folder does not let go of it.
    """
    try:
        if not remove:
            aside = shelf.home.parent / QUARANTINE / shelf.home.name
            aside.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            target = aside / path.name
            number = 0
            while os.path.lexists(target):
                number += 1
                target = aside / f"{path.name}.{number}"
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be taken away: {error.strerror}") from error


def _verify_redis(url: str, options: Mapping[str, object], *, fix: bool, tick: Tick) -> VerifyReport:
    from kvstore.redis_shelf import RedisShelf  # noqa: PLC0415 - redis-py may not be installed

    shelf = RedisShelf(url, options)
    report = VerifyReport()
    bad = []
    try:
        places = shelf.places()
        for place in places:
            shelf.layout(place.home, places)
            damage = shelf.check(place)
            report.chunks += 1
            facts = shelf.facts(place) if damage is None else None
            size_bytes = facts.payload_bytes if facts else 0
            report.size_bytes += size_bytes
            tick(len(places), size_bytes)
            if damage is not None:
                report.faults.append(Fault(str(place), damage))
                bad.append(place)
        if fix:
            shelf.remove(bad)
            report.fixed = len(bad)
    finally:
        shelf.close()
    return report
