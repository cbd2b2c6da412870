"""Access to other engines' chunks: their servers, and the chunks stored by engines of other tensor-parallel sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from kvstore.engine.options import RemoteOptions
from kvstore.format.sealing import open_ring
from kvstore.model.heads import Division, Part
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers import READ_ONLY, open_tier, tier_behind
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup
from kvstore.tiers.disk.reader import FolderReader
from kvstore.tiers.guards import GuardOptions, guarded, guarded_parts
from kvstore.tiers.ranks import at_rank
from kvstore.tiers.resharded import ReshardedTier

_MARK: Final = " tp"  # in the name of a place, before the tensor-parallel size of the engines that store there
_OpenPart = Callable[[Part, Namespace], Tier]


class OtherEngines:
    """The places of other engines' chunks, all of which are only read. Thread-safe.

    Chunks of engines of other tensor-parallel sizes are in a shared tier, unless it is read-only, in the folders of
    their workers, and at the peers. If we listen, they are also at those of our servers to which their workers send.

    Args:
        options: the places and their settings.
        layout: the geometry of our chunks.
        guard: options of each place's guard.

    Attributes:
        places: their names; peers, and a shared tier in addition to our server, are named by their URLs.
    """

    def __init__(self, options: RemoteOptions, layout: KVLayout, guard: GuardOptions) -> None:
        self._options = options
        self._layout = layout
        self._guard = guard
        self._divisions = {f"{_MARK}{division.size}": division for division in options.divisions}
        self._divided = {
            f"{where}{mark}": (division, open_part)
            for mark, division in self._divisions.items()
            for where, open_part in _places_of(division, options).items()
        }
        shared = () if options.shared is None else (options.shared,)
        peers = options.peers or ()
        divided = (place for url in peers for place in self.places_at(url)[1:])
        self.places = (*shared, *peers, *self._divided, *divided)

    def places_at(self, peer: str) -> tuple[str, ...]:
        """Return the names of the places at a peer, given its URL."""
        return (peer, *(f"{peer}{mark}" for mark in self._divisions))

    def open(self, place: str, namespace: Namespace) -> Tier:
        """Open a place, also one at a peer or a source by its URL, for a namespace of ours. Does not connect.

        Raises:
            ConfigError: a URL or a setting is wrong.
        """
        peer, *mark = place.rpartition(_MARK)
        division = self._divisions.get("".join(mark))
        if place in self._divided:
            tier = _open_divided(*self._divided[place], namespace, self._guard.timeout_s)
        elif division is not None:
            open_part = partial(_open_at_peer, self._options, peer)
            tier = _open_divided(division, open_part, namespace, self._guard.timeout_s)
        elif place == self._options.shared:
            setup = shared_setup(self._options, namespace, self._layout)
            tier = open_tier(tier_behind(place), replace(setup, guard=partial(guarded, options=self._guard)))
        else:
            tier = _open_peer(self._options, place, self._options.rank, namespace, self._layout)
        return guarded_parts(tier, self._guard)


def shared_setup(options: RemoteOptions, namespace: Namespace, layout: KVLayout) -> TierSetup:
    """Return the setup of the shared, read-only tier that is used in addition to our own server."""
    return TierSetup(namespace, layout, UNBOUNDED_BYTES, {**options.shared_settings, "url": options.shared})


def _places_of(division: Division, options: RemoteOptions) -> dict[str, _OpenPart]:
    places: dict[str, _OpenPart] = {}
    if options.is_own:
        places["sent"] = partial(_open_sent, options)
        if options.shared is not None and tier_behind(options.shared) not in READ_ONLY:
            places["shared"] = partial(_open_beside, options, options.shared)
    elif options.url is not None and tier_behind(options.url) not in READ_ONLY:
        places["shared"] = partial(_open_shared, options, options.url)
    if any(part.folders for part in division.parts):
        places["disk"] = partial(_open_folders, division)
    return places


def _open_divided(division: Division, open_part: _OpenPart, namespace: Namespace, timeout_s: float) -> Tier:
    with ExitStack() as opened:
        tiers = []
        for part in division.parts:
            tiers.append(open_part(part, part.namespace(namespace)))
            opened.callback(tiers[-1].close)
        tier = ReshardedTier(division, tiers, timeout_s)
        opened.pop_all()
    return tier


def _open_shared(options: RemoteOptions, url: str, part: Part, namespace: Namespace) -> Tier:
    setup = TierSetup(namespace, part.layout, UNBOUNDED_BYTES, {**options.settings, "url": url})
    return open_tier(tier_behind(url), setup)


def _open_beside(options: RemoteOptions, url: str, part: Part, namespace: Namespace) -> Tier:
    return open_tier(tier_behind(url), shared_setup(options, namespace, part.layout))


def _open_sent(options: RemoteOptions, part: Part, namespace: Namespace) -> Tier:
    if part.sends_to == options.rank and options.url is not None:
        return _open_shared(options, options.url, part, namespace)
    url = options.servers[part.sends_to]
    settings = options.settings if urlsplit(url).scheme != "kvs" else options.peer_settings
    setup = TierSetup(namespace, part.layout, UNBOUNDED_BYTES, {**settings, "url": url})
    return open_tier(tier_behind(url), setup)


def _open_folders(division: Division, part: Part, namespace: Namespace) -> Tier:
    return FolderReader(
        part.folders, namespace, part.layout, codec=division.codec, keys=open_ring(division.encryption_keys)
    )


def _open_at_peer(options: RemoteOptions, url: str, part: Part, namespace: Namespace) -> Tier:
    return _open_peer(options, url, part.rank, namespace, part.layout)


def _open_peer(options: RemoteOptions, url: str, rank: int, namespace: Namespace, layout: KVLayout) -> Tier:
    """Open the server of a worker of another engine, given the URL of its first worker."""
    address = at_rank(url, rank)
    settings = {**options.peer_settings, "url": address}
    tier = open_tier(tier_behind(address), TierSetup(namespace, layout, UNBOUNDED_BYTES, settings))
    where = urlsplit(address)
    tier.name = f"peer-{where.hostname}:{where.port}"  # log lines must name the peer
    return tier
