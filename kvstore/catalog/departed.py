"""Why chunks are no longer here: a bounded memory of keys, which explains misses."""

from __future__ import annotations

from kvstore.catalog.plans import MissReason
from kvstore.keys import PrefixKey

MAX_DEPARTED = 65_536  # about 8 MB; beyond that the older half is dropped, and looks as if it had never been stored


class Departed:
    """The last chunks that went, and why. Not the policies' ghosts: some policies keep none, and none knows why."""

    def __init__(self, max_keys: int = MAX_DEPARTED) -> None:
        self._max_keys = max_keys
        self._young: dict[PrefixKey, MissReason] = {}  # two halves: one large dictionary stalls when it is made anew
        self._old: dict[PrefixKey, MissReason] = {}

    def note(self, key: PrefixKey, reason: MissReason) -> None:
        """Note that a chunk went, and why."""
        if len(self._young) >= self._max_keys // 2 and key not in self._young:
            self._young, self._old = {}, self._young
        self._young[key] = reason

    def reason(self, key: PrefixKey) -> MissReason | None:
        """Why a chunk went last time; None if that is not known."""
        return self._young.get(key) or self._old.get(key)
