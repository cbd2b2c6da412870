"""The epoch of a namespace, and the deletion of keys that belong to former epochs."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from kvstore.tiers.redis.chunk import Home
from kvstore.tiers.redis.wire import Link, pack

if TYPE_CHECKING:
    from kvstore.tiers.redis.calls import Calls

_EPOCH_DIGITS = 16


class Sweeper:
    """Reads and renews epochs, and sweeps up after them. Thread-safe. Every method may raise ``TierError``."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def epoch(self, home: Home) -> bytes:
        """The current epoch of the namespace of ``home``."""
        return self._calls.at(home.epoch_tag, lambda link: _epoch(link, home))

    def renew(self, home: Home) -> Home:
        """Begin a new epoch: the namespace's earlier chunks are unreachable from here on."""
        new = Home(home.namespace_id, _new_epoch())
        self._calls.at(new.epoch_tag, lambda link: link.call("SET", new.epoch_key, new.epoch))
        return new

    def sweep(self, home: Home) -> None:
        """Delete all keys of the namespace's former epochs.

        The current epoch is asked for after keys were seen. No epoch is used again, so keys of another one are unused.
        """
        for node, keys in self._calls.pages(home.pattern):
            if all(home.parse(key) for key in keys):
                continue
            now = Home(home.namespace_id, self.epoch(home))
            dead = [key for key in keys if now.parse(key) is None]
            with node.link() as link:
                link.ask([pack("UNLINK", key) for key in dead])


def _new_epoch() -> bytes:
    return secrets.token_hex(_EPOCH_DIGITS // 2).encode()


def _epoch(link: Link, home: Home) -> bytes:
    """The current epoch. If there is none, because it never was or was evicted, a new one begins."""
    found = link.ask([pack("GET", home.epoch_key)])[0]
    if found is None:
        link.call("SET", home.epoch_key, _new_epoch(), "NX")
        found = link.call("GET", home.epoch_key)
    if isinstance(found, bytes) and len(found) == _EPOCH_DIGITS:
        return found
    if isinstance(found, ResponseError) and not str(found).startswith("WRONGTYPE"):
        raise found
    fresh = _new_epoch()  # somebody wrote something else there
    link.call("SET", home.epoch_key, fresh)
    return fresh
