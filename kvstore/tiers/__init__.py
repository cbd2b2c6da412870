"""Tiers: storage of chunks outside the slab pool. ``base.py`` holds the contract, this file the registry.

A tier has a name and a factory, which takes a ``TierSetup``. ``BUILT_IN`` lists ours; other packages announce theirs in
the entry-point group ``kvstore.tiers``. A tier behind remote URLs also has schemes: ours are in ``BUILT_IN_SCHEMES``,
those of other packages in the group ``kvstore.schemes``, where the value is the same factory. Only this module decides
the meaning of a scheme. ``docs/tiers.md`` shows how to write a tier; the names that this takes can be imported from
here, each of which is loaded when it is first used.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.format import chunkfile
    from kvstore.model.chunks import ChunkRef, Outcome
    from kvstore.model.keys import ChunkKey
    from kvstore.tiers.base import (
        GIVEN_BY_URL,
        UNBOUNDED_BYTES,
        BoundedTier,
        Tier,
        TierCounters,
        TierSetup,
        Transfer,
        payload_view,
    )

__all__ = [
    "GIVEN_BY_URL",
    "UNBOUNDED_BYTES",
    "BoundedTier",
    "ChunkKey",
    "ChunkRef",
    "Outcome",
    "Tier",
    "TierCounters",
    "TierSetup",
    "Transfer",
    "chunkfile",
    "known_schemes",
    "known_tiers",
    "load_tier",
    "open_tier",
    "payload_view",
]

_MODULES = {
    "ChunkKey": "kvstore.model.keys",
    "ChunkRef": "kvstore.model.chunks",
    "Outcome": "kvstore.model.chunks",
    "chunkfile": "kvstore.format.chunkfile",
}  # all others are in kvstore.tiers.base

GROUP = "kvstore.tiers"
SCHEME_GROUP = "kvstore.schemes"

# Names, not imports: opening a tier imports it.
BUILT_IN = (
    EntryPoint("disk", "kvstore.tiers.disk.tier:DiskTier.open", GROUP),
    EntryPoint("members", "kvstore.tiers.members.tier:MembersTier.open", GROUP),
    EntryPoint("mooncake", "kvstore.tiers.mooncake.tier:MooncakeTier.open", GROUP),
    EntryPoint("object", "kvstore.tiers.object.tier:ObjectTier.open", GROUP),
    EntryPoint("pack", "kvstore.tiers.pack:PackTier.open", GROUP),
    EntryPoint("redis", "kvstore.tiers.redis.tier:RedisTier.open", GROUP),
    EntryPoint("server", "kvstore.tiers.server.tier:ServerTier.open", GROUP),
)

BUILT_IN_SCHEMES = tuple(
    EntryPoint(scheme, next(entry.value for entry in BUILT_IN if entry.name == name), SCHEME_GROUP)
    for name, schemes in {
        "redis": ("redis", "rediss", "unix", "redis-sentinel", "redis-cluster"),
        "mooncake": ("mooncake", "mooncakestore"),
        "object": ("s3", "az", "gs", "file"),
        "pack": ("pack",),
        "server": ("kvs", "kvs+ipc"),
        "members": ("kvs+dns", "kvs+srv", "kvs+file"),
    }.items()
    for scheme in schemes
)

_EXTRAS = {"members": "server", "redis": "redis", "server": "server"}  # the extra that a tier needs

READ_ONLY = frozenset({"pack"})
"""Tiers that store nothing."""


def tier_behind(url: str) -> str:
    """Return the name of the tier that a remote URL leads to. Imports no tier.

    Raises:
        ConfigError: its scheme leads to none, or several packages claim it.
    """
    scheme, mark, rest = url.partition("://")
    if scheme == "kvs" and "," in rest.partition("?")[0]:
        return "members"  # a list
    schemes = known_schemes()
    entries = schemes.get(scheme, []) if mark else []
    if not entries:
        known = ", ".join(f"{name}://" for name in schemes)
        raise ConfigError(f"a remote URL begins with one of {known}, not with {scheme[:20]!r}")
    factory = _only(entries, f"the scheme {scheme}://").value
    name = next((name for name, tiers in known_tiers().items() if factory in {tier.value for tier in tiers}), None)
    if name is None:
        raise ConfigError(
            f"the scheme {scheme}:// leads to {factory}, which is no tier: its package must announce it in {GROUP}, too"
        )
    return name


def leads_to(url: str | None, name: str) -> bool:
    """Tell if a URL leads to the tier of that name; a path or None leads to no tier."""
    try:
        return url is not None and tier_behind(url) == name
    except ConfigError:
        return False


def known_schemes() -> dict[str, list[EntryPoint]]:
    """Return the factories of each scheme of remote URLs, like ``known_tiers``."""
    return _known(BUILT_IN_SCHEMES, SCHEME_GROUP)


def known_tiers() -> dict[str, list[EntryPoint]]:
    """Return the factories of every name, ours first. Several are a conflict, reported when that name is opened."""
    return _known(BUILT_IN, GROUP)


def _known(built_in: tuple[EntryPoint, ...], group: str) -> dict[str, list[EntryPoint]]:
    known: dict[str, list[EntryPoint]] = {}
    for entry in (*built_in, *entry_points(group=group)):
        others = known.setdefault(entry.name, [])
        if entry.value not in {other.value for other in others}:  # a package may be found twice
            others.append(entry)
    return known


def _only(entries: list[EntryPoint], what: str) -> EntryPoint:
    if len(entries) > 1:
        claims = " and ".join(entry.value for entry in entries)
        raise ConfigError(f"{what} is claimed by {claims}: uninstall all but one")
    return entries[0]


def open_tier(name: str, setup: TierSetup) -> Tier:
    """Open the tier that is registered under ``name``.

    Raises:
        ConfigError: see ``load_tier``; or the tier refuses its setup.
    """
    return load_tier(name)(setup)


def load_tier(name: str) -> Callable[[TierSetup], Tier]:
    """Import the factory that is registered under ``name``.

    Raises:
        ConfigError: there is no such tier, several packages claim the name, or its package cannot be imported.
    """
    known = known_tiers()
    entries = known.get(name, [])
    if not entries:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"there is no tier {name!r}: {hint}known are {', '.join(sorted(known))}")
    entry = _only(entries, f"the tier {name!r}")
    try:
        factory: Callable[[TierSetup], Tier] = entry.load()
    except (ImportError, AttributeError) as error:
        has_remedy = "pip install" in str(error) or name not in _EXTRAS
        remedy = "" if has_remedy else f": pip install 'vllm-kvstore[{_EXTRAS[name]}]'"
        raise ConfigError(f"the tier {name!r} cannot be loaded from {entry.value}: {error}{remedy}") from error
    return factory


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_MODULES.get(name, "kvstore.tiers.base"))
        value = globals()[name] = module if name == "chunkfile" else getattr(module, name)
        return value
