"""Bounded memory of the keys of removed chunks, with the reasons, to explain misses."""

from __future__ import annotations

from kvstore.catalog.plans import MissReason
from kvstore.keys import PrefixKey

MAX_DEPARTED = 65_536  # about 8 MB; beyond that the older half is dropped, as if never stored


class Departed:
    """The chunks removed last, and why. The policies' ghosts give no reasons, and some policies keep none."""

    def __init__(self, max_keys: int = MAX_DEPARTED) -> None:
        self._max_keys = max_keys
        self._young: dict[PrefixKey, MissReason] = {}  # two halves, because resizing one large dictionary stalls
        self._old: dict[PrefixKey, MissReason] = {}

    def note(self, key: PrefixKey, reason: MissReason) -> None:
        """Note that a chunk was removed, and why."""
        if len(self._young) >= self._max_keys // 2 and key not in self._young:
            self._young, self._old = {}, self._young
        self._young[key] = reason

    def reason(self, key: PrefixKey) -> MissReason | None:
        """Return the reason of a chunk's last removal; None if unknown."""
        return self._young.get(key) or self._old.get(key)
