"""Codes of Mooncake that a call returns when it touches no memory any more."""

from __future__ import annotations

from typing import Final

MISSING: Final = -704
UNFINISHED: Final = -703  # the only copy, which is being written
TOO_SMALL: Final = -600  # the buffer, for an object that is no chunk of ours
NO_ROOM: Final = -200
LEASE_OVER: Final = -707  # of an object that was read for long; looked at when the transfer has ended
MASTER_AWAY: Final = -900  # it is asked before a transfer, or after its end
_AT_REST: Final = frozenset((MISSING, UNFINISHED, TOO_SMALL, NO_ROOM, LEASE_OVER, MASTER_AWAY))


def may_still_run(code: int) -> bool:
    """Tell if a transfer may still read or write memory after its call has returned a code."""
    return code < 0 and code not in _AT_REST
