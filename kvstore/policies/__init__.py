"""Policies: which chunks are evicted when room is needed, and which new ones are worth storing."""

from __future__ import annotations

from typing import Final

from kvstore.errors import ConfigError
from kvstore.policies.adaptive import Adaptive
from kvstore.policies.arc import ARC
from kvstore.policies.base import Policy
from kvstore.policies.lfu import LFU
from kvstore.policies.lru import LRU
from kvstore.policies.s3fifo import S3FIFO

__all__ = ["ARC", "LFU", "LRU", "POLICIES", "S3FIFO", "Adaptive", "Policy", "choose_policy", "open_policy"]

POLICIES: Final[dict[str, type[Policy]]] = {cls.name: cls for cls in (LRU, LFU, ARC, S3FIFO, Adaptive)}
"""By name, as ``cache_policy`` gives it."""

_SUBSTITUTES: Final = {"FIFO": S3FIFO.name, "MRU": Adaptive.name}
"""LMCache's policies that are not available here, and what is used instead."""


def choose_policy(name: str) -> tuple[str, str | None]:
    """The policy that a name stands for, in upper or lower case, and a warning if another one is used instead.

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
    """A new policy for a tier of this capacity.

    Raises:
        ConfigError: no policy has this name.
    """
    return POLICIES[choose_policy(name)[0]](capacity_bytes)
