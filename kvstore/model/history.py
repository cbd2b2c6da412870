"""Events in the history of a chunk: when it was stored, moved and removed, and why. Traces record them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvstore.model.keys import PrefixKey


class Fate(Enum):
    """Kind of an event."""

    STORED = "stored"  # its bytes are in memory
    READ = "read"  # a load brought it to memory from a slower tier
    WRITTEN = "written"  # a slower tier has it
    REFUSED = "refused"  # a place did not take it
    FAILED = "failed"  # it could not be stored or written
    EVICTED = "evicted"  # it made room for another one
    EXPIRED = "expired"  # its time to live ended
    REMOVED = "removed"  # on request
    LOST = "lost"  # a load found it missing or damaged
    UNREAD = "unread"  # a load failed, and the chunk may still be there


class Cause(Enum):
    """Cause of an event, where its kind does not say it."""

    NONE = ""
    POLICY = "policy"  # it was worth less than what is there
    QUOTA = "quota"  # its owner's quota was full of chunks in use
    IN_USE = "in_use"  # no slot could be freed
    QUEUE = "queue"  # too many chunks were waiting to be written
    FULL = "full"  # the tier had no room, or its quota was used up
    DOWN = "down"  # the tier was left out
    LIFETIME = "lifetime"  # the tier keeps no times to live
    UNWRITTEN = "unwritten"  # memory is for staging only, and no slower tier took it
    LEAVING = "leaving"  # its former bytes were still being removed
    CLEARED = "cleared"  # all chunks were removed by an operator
    RESET = "reset"  # all chunks were removed for new weights
    WRONG = "wrong"  # computing it again gave other bytes
    REPLACED = "replaced"  # a later checkpoint of the same conversation replaced it


class ChunkEvent(NamedTuple):
    """An event of one chunk.

    Attributes:
        fate, cause: its kind and cause.
        key: the chunk; empty for all chunks.
        first_key: the key of its first block; empty if unknown.
        place: ``memory``, ``disk``, ``remote``, or empty for all of them.
        newcomer: the chunk for which it made room; empty if that is not known.
    """

    fate: Fate
    key: PrefixKey = b""
    first_key: PrefixKey = b""
    place: str = ""
    cause: Cause = Cause.NONE
    newcomer: PrefixKey = b""
