"""Opening of a disk tier over one or more folders, with checks of what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import BoundedTier
from kvstore.tiers.disk.folder import unusable
from kvstore.tiers.disk.striped import StripedTier
from kvstore.tiers.disk.survey import check_room
from kvstore.tiers.disk.tier import DiskTier

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

Wrap = Callable[[DiskTier], BoundedTier]


def open_folders(
    folders: Sequence[Path],
    namespace: Namespace,
    layout: KVLayout,
    capacity_bytes: int,
    *,
    direct: bool | None = None,
    codec: str = "none",
    keys: KeyRing | None = None,
    wrap: Wrap | None = None,
) -> BoundedTier:
    """Open a disk tier over one or more folders.

    Args:
        folders: one per disk.
        namespace: of the chunks.
        layout: of the chunks.
        capacity_bytes: of all folders together; each gets an equal share.
        direct: True bypasses the page cache, False does not, None lets each folder probe.
        codec: encodes the chunks, see ``kvstore.format.codecs``.
        keys: encrypt the chunks; None for no encryption.
        wrap: adds guards around each folder's tier, such as a deadline and a circuit breaker.

    Raises:
        ConfigError: a folder is named twice, is inside another one, cannot be used, or has no room.
        FolderOwnedError: another engine uses one of the folders.
    """
    if not folders:
        raise ConfigError("a disk tier needs at least one folder: name one in local_disk")
    _refuse_overlaps(folders)
    share_bytes = capacity_bytes // len(folders)
    with ExitStack() as opened:
        disks: list[DiskTier] = []
        open_one = partial(DiskTier, direct=direct, codec=codec, keys=keys, checks_room=False)
        for folder in folders:
            disks.append(open_one(folder, namespace, layout, share_bytes))
            opened.callback(disks[-1].close)
        _check_shared_room(folders, share_bytes)
        tiers: list[BoundedTier] = []
        for disk in disks:
            tiers.append(wrap(disk) if wrap else disk)
            opened.callback(tiers[-1].close)
        opened.pop_all()
    return tiers[0] if len(tiers) == 1 else StripedTier(disks, tiers, layout)


def _refuse_overlaps(folders: Sequence[Path]) -> None:
    """Refuse folders that contain each other, also through links.

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
    """Check that folders on one filesystem fit into it together.

    Raises:
        ConfigError: they do not, or a folder cannot be read.
    """
    by_device: dict[int, list[Path]] = {}
    for folder in folders:
        try:
            by_device.setdefault(folder.stat().st_dev, []).append(folder)
        except OSError as error:
            raise unusable(folder, error) from error
    for neighbours in by_device.values():  # each folder once, as it may hold hundreds of thousands of files
        try:
            check_room(neighbours, share_bytes * len(neighbours))
        except OSError as error:
            raise unusable(neighbours[0], error) from error
