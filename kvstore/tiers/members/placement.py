"""Placement of chunks on members by rendezvous hashing: a chunk belongs to the member whose score for it is highest.

A member that leaves gives up its own chunks only, and one that comes takes its part from all others. Clients that know
the same names agree without asking each other. (Thaler and Ravishankar, 1998.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.model.chunks import ChunkRef

_DOMAIN: Final = b"kvstore/member/1\0"


def seed_of(name: str) -> int:
    """Return the number that stands for a member in scores."""
    return int.from_bytes(hashlib.sha256(_DOMAIN + name.encode()).digest()[:8], "little")


def owners(refs: Sequence[ChunkRef], seeds: Sequence[int]) -> list[int]:
    """Return the place of each chunk's owner among the members with these seeds, at least one."""
    keys = np.frombuffer(b"".join(ref.prefix_key[:8] for ref in refs), "<u8")
    scores = keys ^ np.array(seeds, np.uint64)[:, None]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # of splitmix64
        scores = (scores ^ (scores >> np.uint64(shift))) * np.uint64(factor)
    places: list[int] = (scores ^ (scores >> np.uint64(31))).argmax(axis=0).tolist()
    return places
