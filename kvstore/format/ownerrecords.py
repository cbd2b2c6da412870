"""Owners in records, for the note by which a restart knows against whose quota a chunk on disk counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.format.notes import SUM_BYTES, Note, bodies, sealed
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.quotas import OWNER_BYTES

OWNERS_FILE: Final = "owners"


class Owned(NamedTuple):
    """The key of a chunk, and the id of its owner, see ``QuotaRules.owner_of``."""

    key: PrefixKey
    owner: bytes


class OwnerRecords:
    """Writer and reader of the records of owners.

    Attributes:
        record_bytes: the size of each record.
    """

    record_bytes = SUM_BYTES + PREFIX_KEY_BYTES + OWNER_BYTES

    def takes(self, item: Owned) -> bool:
        """Tell if there is an owner to note."""
        return len(item.owner) == OWNER_BYTES

    def record(self, item: Owned) -> bytes:
        """Return the record of an owner that it ``takes``."""
        return sealed(item.key + item.owner)

    def read(self, data: bytes) -> Iterator[Owned]:
        """Yield what those records say that are whole and sound."""
        for body in bodies(data, self.record_bytes):
            yield Owned(body[:PREFIX_KEY_BYTES], body[PREFIX_KEY_BYTES:])

    def key_of(self, item: Owned) -> PrefixKey:
        """Return the key of the chunk."""
        return item.key


class OwnerNote(Note[Owned]):
    """Note of the owners of the chunks in a namespace's folder."""

    def __init__(self) -> None:
        super().__init__(OWNERS_FILE, OwnerRecords())
