"""Tiers: where chunks live outside the slab pool. ``base.py`` holds the contract, this file the registry.

A tier has a name and a factory, which takes a ``TierSetup``. Ours are listed in ``BUILT_IN``; those of other packages
are found by the entry-point group ``kvstore.tiers``. ``docs/tiers.md`` shows how to write one.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.tiers.base import Tier, TierSetup

GROUP = "kvstore.tiers"

# Names, not imports: a tier is imported when it is opened.
BUILT_IN = (
    EntryPoint("cpu", "kvstore.tiers.cpu:CpuTier.open", GROUP),
    EntryPoint("disk", "kvstore.tiers.disk:DiskTier.open", GROUP),
    EntryPoint("gpu", "kvstore.tiers.gpu:GpuTier.open", GROUP),
    EntryPoint("pack", "kvstore.tiers.pack:PackTier.open", GROUP),
    EntryPoint("redis", "kvstore.tiers.redis:RedisTier.open", GROUP),
    EntryPoint("server", "kvstore.tiers.server:ServerTier.open", GROUP),
)

SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "unix", "redis-sentinel", "redis-cluster"), "redis"),
    "pack": "pack",
    **dict.fromkeys(("kvs", "kvs+ipc"), "server"),
}
"""The name of the tier behind each scheme of a remote URL."""

READ_ONLY = frozenset({"pack"})
"""Tiers to which nothing is sent."""


def tier_behind(url: str) -> str:
    """The name of the tier that a remote URL leads to.

    Raises:
        ConfigError: its scheme leads to none.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"a remote URL begins with one of {known}, not with {scheme[:20]!r}")
    return SCHEMES[scheme]


def known_tiers() -> dict[str, list[EntryPoint]]:
    """The factories of every name, ours first. More than one is a conflict, told when that name is opened."""
    known: dict[str, list[EntryPoint]] = {}
    for entry in (*BUILT_IN, *entry_points(group=GROUP)):
        others = known.setdefault(entry.name, [])
        if entry.value not in {other.value for other in others}:  # the same package may be found twice
            others.append(entry)
    return known


def open_tier(name: str, setup: TierSetup) -> Tier:
    """Open the tier that is registered under ``name``.

    Raises:
        ConfigError: there is no such tier, several packages claim the name, or its package cannot be imported; or what
            the tier itself objects to.
    """
    known = known_tiers()
    entries = known.get(name, [])
    if not entries:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"there is no tier {name!r}: {hint}known are {', '.join(sorted(known))}")
    if len(entries) > 1:
        claims = " and ".join(entry.value for entry in entries)
        raise ConfigError(f"the tier {name!r} is claimed by {claims}: uninstall all but one")
    try:
        factory = entries[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the tier {name!r} cannot be loaded from {entries[0].value}: {error}") from error
    tier: Tier = factory(setup)
    return tier
