"""Questions about chunks, as tiers pass them on to others: ``Tier.contains`` or ``Tier.look``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.model.chunks import ChunkRef, Presence
from kvstore.tiers.base import Tier

Question: TypeAlias = Callable[[Tier, Sequence[ChunkRef]], Sequence[Presence | None]]


def contains(tier: Tier, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
    """Call ``Tier.contains``."""
    return tier.contains(refs)


def look(tier: Tier, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
    """Call ``Tier.look``."""
    return tier.look(refs)
