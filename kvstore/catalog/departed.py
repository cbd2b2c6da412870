"""Why chunks are no longer here: a bounded memory of keys, which explains misses."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.catalog.plans import MissReason
from kvstore.keys import PrefixKey

MAX_DEPARTED = 65_536  # about 12 MB; beyond that the oldest are dropped, and look as if they had never been stored


class Departed:
    """The last chunks that went, and why. Not the policies' ghosts: some policies keep none, and none knows why."""

    def __init__(self, max_keys: int = MAX_DEPARTED) -> None:
        self._max_keys = max_keys
        self._reasons: OrderedDict[PrefixKey, MissReason] = OrderedDict()  # the oldest first

    def note(self, key: PrefixKey, reason: MissReason) -> None:
        """Note that a chunk went, and why."""
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._max_keys:
            self._reasons.popitem(last=False)

    def reason(self, key: PrefixKey) -> MissReason | None:
        """Why a chunk went last time; None if that is not known."""
        return self._reasons.get(key)
