"""Eviction policies: which chunks are evicted to make room, and which new ones are worth storing."""

from __future__ import annotations

from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.policies.adaptive import Adaptive
from kvstore.policies.arc import ARC
from kvstore.policies.base import Policy
from kvstore.policies.lfu import LFU
from kvstore.policies.lru import LRU
from kvstore.policies.s3fifo import S3FIFO

__all__ = ["ARC", "LFU", "LRU", "POLICIES", "S3FIFO", "Adaptive", "Policy", "choose_policy", "open_policy"]

POLICIES: Final[dict[str, type[Policy]]] = {cls.name: cls for cls in (LRU, LFU, ARC, S3FIFO, Adaptive)}
"""Policies by name, as given in ``cache_policy``."""

_SUBSTITUTES: Final = {"FIFO": S3FIFO.name, "MRU": Adaptive.name}
"""LMCache's policies that are not available here, with their substitutes."""


def choose_policy(name: str) -> tuple[str, str | None]:
    """Return the policy of a name in any case, and a warning if a substitute is used.

    Raises:
        ConfigError: no policy has this name.
    """
    wanted = name.upper().replace("-", "")
    if wanted in POLICIES:
        return wanted, None
    if wanted in _SUBSTITUTES:
        used = _SUBSTITUTES[wanted]
        return used, f"cache_policy {name!r} is not available: {used} is used instead"
    raise ConfigError(f"cache_policy is {name!r}: use one of {', '.join(POLICIES)}")


def open_policy(name: str, capacity_bytes: int) -> Policy:
    """Return a new policy for a tier of this capacity.

    Raises:
        ConfigError: no policy has this name.
    """
    return POLICIES[choose_policy(name)[0]](capacity_bytes)
