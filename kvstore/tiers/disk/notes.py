"""Notes next to the chunks of a folder, by which a restart knows more of them: trails, owners, retention.

A note that cannot be written or read costs no chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvstore.format.ownerrecords import Owned, OwnerNote
from kvstore.format.retentions import RetentionNote
from kvstore.format.trailrecords import TrailNote
from kvstore.model.errors import TierError
from kvstore.model.keys import PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.retention import Retention
from kvstore.tiers.base import BoundedTier, Transfer
from kvstore.tiers.disk.chunks import Chunks
from kvstore.tiers.disk.folder import reason

logger = logging.getLogger(__name__)


class ChunkNotes:
    """Notes in the folder of a namespace, which go with it. Thread-safe.

    Args:
        chunks: held in the folder.
        layout: of the chunks.
        warn: logs a cause and a message.
    """

    def __init__(self, chunks: Chunks, layout: KVLayout, warn: Callable[[str, str], None]) -> None:
        self._chunks = chunks
        self._warn = warn
        self._trails = TrailNote(layout)
        self._owners = OwnerNote()
        self._retentions = RetentionNote()

    def add(self, stored: Transfer) -> None:
        """Note the trail of a chunk, without which it is found only as a whole, and its owner."""
        try:
            with suppress(FileNotFoundError):  # cleared meanwhile
                self._trails.add(self._chunks.home, stored.trail, len(self._chunks), self._chunks.keys)
                owned = Owned(stored.ref.prefix_key, stored.owner)
                self._owners.add(self._chunks.home, owned, len(self._chunks), self._chunks.keys)
        except OSError as error:
            self._warn("trail", f"cannot note the trail or owner of a chunk: {reason(error)}")

    def trails(self) -> dict[PrefixKey, bytes]:
        """Return the trails of the chunks held that were stored with one."""
        try:
            return self._trails.read(self._chunks.home, self._chunks.keys())
        except OSError as error:
            self._warn("trail", f"cannot read the note of trails: {reason(error)}")
            return {}

    def owners(self) -> dict[PrefixKey, bytes]:
        """Return the ids of the owners of the chunks held that were stored with one."""
        try:
            noted = self._owners.read(self._chunks.home, self._chunks.keys())
        except OSError as error:
            self._warn("owner", f"cannot read the note of owners: {reason(error)}")
            return {}
        return {key: owned.owner for key, owned in noted.items()}

    def retain(self, retentions: Iterable[Retention]) -> None:
        """Note which chunks stay until when; without it, they stay until a restart."""
        try:
            with suppress(FileNotFoundError):  # cleared meanwhile
                self._retentions.add_all(self._chunks.home, retentions, len(self._chunks), self._chunks.keys)
        except OSError as error:
            self._warn("retain", f"cannot note which chunks are retained: {reason(error)}")

    def retained(self) -> list[Retention]:
        """Return the last retention noted of each chunk held."""
        try:
            return list(self._retentions.read(self._chunks.home, self._chunks.keys()).values())
        except OSError as error:
            self._warn("retain", f"cannot read the note of retained chunks: {reason(error)}")
            return []


def trails_in(tier: BoundedTier) -> dict[PrefixKey, bytes]:
    """Return the trails that a tier has kept; on failure, log it and return none, because only hits are lost."""
    try:
        return tier.trails()
    except TierError as error:
        logger.warning("cannot read the stored trails, so chunks on disk are found only by their whole keys: %s", error)
        return {}


def owners_in(tier: BoundedTier) -> dict[PrefixKey, bytes]:
    """Return the owners that a tier has noted; on failure, log it and return none, as if there were no names."""
    try:
        return tier.owners()
    except TierError as error:
        logger.warning("cannot read whose the chunks on disk are, so they count against the quota *: %s", error)
        return {}


def retained_in(tier: BoundedTier) -> list[Retention]:
    """Return the retention that a tier has noted; on failure, log it and return none, as if the time were over."""
    try:
        return tier.retained()
    except TierError as error:
        logger.warning("cannot read which chunks on disk are retained, so none are: %s", error)
        return []
