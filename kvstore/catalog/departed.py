"""Why chunks are no longer here: a bounded memory of keys, so that a miss can be explained."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.catalog.plans import MissReason
    from kvstore.keys import PrefixKey

MAX_DEPARTED = 65_536  # about 12 MB; beyond that the oldest are forgotten, and look as if they never had been stored


class Departed:
    """The last chunks that went, and why. A policy's ghosts will not do: some policies keep none, and none says why."""

    def __init__(self, max_keys: int = MAX_DEPARTED) -> None:
        self._max_keys = max_keys
        self._reasons: OrderedDict[PrefixKey, MissReason] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, key: PrefixKey, reason: MissReason) -> None:
        """A chunk went."""
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._max_keys:
            self._reasons.popitem(last=False)

    def reason(self, key: PrefixKey) -> MissReason | None:
        """Why it went last time; None if nothing is known of it."""
        return self._reasons.get(key)
