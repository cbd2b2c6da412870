"""Several cache servers for tests, and the tier over them as an engine opens it."""

from __future__ import annotations

import numpy as np

from kvstore.engine.opening import open_remote
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_payload, make_transfer
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.guards import layers
from kvstore.tiers.members.placement import owners, seed_of
from kvstore.tiers.members.tier import MembersTier

QUICKLY = (0.02, 0.05)  # between two looks for members


def open_members(url: str, *, namespace: Namespace = MINE, wait_s: float = 5.0, **settings: object) -> Tier:
    """Open the tier as a worker does."""
    return open_remote(namespace, EVEN, RemoteOptions(url, {"timeout_s": wait_s, **settings}), wait_s, problems=[])


def members_in(tier: Tier) -> MembersTier:
    *_, inner = layers(tier)
    assert isinstance(inner, MembersTier)
    return inner


def names_in(tier: Tier) -> list[str]:
    return sorted(member.place.name for member in members_in(tier)._members)


def store(tier: Tier, refs: list[ChunkRef], version: int = 0) -> list[Outcome]:
    return [tier.put([make_transfer(EVEN, ref, version)])[0] for ref in refs]


def read(tier: Tier, refs: list[ChunkRef], version: int = 0) -> set[ChunkRef]:
    """Read chunks one by one, and return those that were hits, whose bytes are compared."""
    hits = set()
    for ref in refs:
        buffer = make_buffer(EVEN.slot_bytes)
        if tier.get([Transfer(ref, buffer)]) == [Outcome.HIT]:
            payload = np.frombuffer(make_payload(EVEN, ref, version), np.uint8)
            assert (buffer[: len(payload)] == payload).all(), f"the wrong bytes of {ref}"
            hits.add(ref)
    return hits


def held(tier: Tier, refs: list[ChunkRef]) -> set[ChunkRef]:
    return {ref for ref, presence in zip(refs, tier.contains(refs), strict=True) if presence}


def owned(names: list[str], refs: list[ChunkRef]) -> dict[str, set[ChunkRef]]:
    """Return the chunks of each member."""
    places = owners(refs, [seed_of(name) for name in names])
    return {name: {ref for ref, at in zip(refs, places, strict=True) if names[at] == name} for name in names}
