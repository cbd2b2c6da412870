"""Watch of the peers that DNS or a file names: engines that come and go, without the one that looks.

Each engine of a group finds all of them by the same URL, itself included. It leaves itself out by its own address, as
it would otherwise ask its own server over the network. One that is not recognised costs such questions only.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from kvstore.model.errors import KVStoreError
from kvstore.model.throttle import Throttle
from kvstore.tiers.members.addresses import LOOK_INTERVAL_S, MAX_MEMBERS, Member, Members, parse_members

logger = logging.getLogger(__name__)

EMPTY_S: Final = 60.0
"""Time for which a name server must know no address before the peers are given up."""
_FIRST_ANSWER_S: Final = 3.0
_END_S: Final = 2.0  # the system's resolver may take longer, and cannot be interrupted


class PeerWatch:
    """Looks peers up every few seconds, on a thread from ``start`` to ``close``. Thread-safe.

    A lookup that fails keeps the peers that it named last. So does an empty answer of a name server, which may have a
    hiccup, until there was no other for a minute; an empty file counts at once.

    Args:
        urls: ``kvs+dns://``, ``kvs+srv://`` or ``kvs+file://``, see ``addresses.py``; at most 64 peers of all are used.
        own: host and port of this engine's first server; None if it has none.

    Raises:
        ConfigError: a URL is wrong, or needs a package that is missing.
    """

    def __init__(self, urls: Iterable[str], own: tuple[str, int] | None = None) -> None:
        self._sources = [parse_members(url) for url in urls]
        self._own = own
        self._named: dict[int, list[Member]] = {}  # the last answer, by source
        self._empty_since_s: dict[int, float] = {}  # of sources whose last answers were empty
        self._is_own: dict[Member, bool] = {}  # of those named now
        self._known: Mapping[Member, str] = {}  # those in use, with their URLs
        self._changed: Callable[[Sequence[str]], None] = lambda _: None
        self._throttle = Throttle(logger)
        self._ended, self._has_looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvstore-members", daemon=True)

    def start(self, changed: Callable[[Sequence[str]], None]) -> None:
        """Start to look, and wait a moment for the first answer.

        Args:
            changed: called on the thread with the URLs of all peers, when these are others than before. If it raises a
                ``KVStoreError`` or a ``RuntimeError``, it is called again soon.
        """
        self._changed = changed
        self._thread.start()
        self._has_looked.wait(_FIRST_ANSWER_S)

    def names(self, host: str, port: int | None = None) -> bool:
        """Tell if a peer that is in use now has this host, as name or address, and this port. Never waits."""
        wanted = host.lower()
        places = [place for member, url in self._known.items() for place in (_place(url), _place(f"//{member.name}"))]
        return any(wanted == at and port in {None, its_port} for at, its_port in places)

    def close(self) -> None:
        """End the thread, within 2 seconds or with its lookup. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except (KVStoreError, RuntimeError) as error:  # or no thread can be started
                self._throttle.log("change", "the peers are not changed now: %s", error)
            self._has_looked.set()
            self._ended.wait(random.uniform(*LOOK_INTERVAL_S))  # noqa: S311 - not a secret

    def _look(self) -> None:
        for number, source in enumerate(self._sources):
            try:
                self._named[number] = self._find(number, source)
            except KVStoreError as error:
                self._empty_since_s.pop(number, None)
                self._throttle.log(f"find {number}", "the last known peers are kept: %s", error)
        named = sorted({member for found in self._named.values() for member in found})
        self._is_own = {member: self._is_own[member] for member in named if member in self._is_own}
        others = [member for member in named if not self._is_this_engine(member)]
        if len(others) > MAX_MEMBERS:
            self._throttle.log("many", "only %d of %d peers are used", MAX_MEMBERS, len(others))
        queries = {member: source.query for n, source in enumerate(self._sources) for member in self._named.get(n, ())}
        known = {member: _with(member.url, queries[member]) for member in others[:MAX_MEMBERS]}
        if known != self._known and not self._ended.is_set():
            self._changed([*dict.fromkeys(known.values())])
            came, left = known.keys() - self._known.keys(), self._known.keys() - known.keys()
            self._known = known
            logger.info("%d peers: %d came, %d left", len(known), len(came), len(left))

    def _find(self, number: int, source: Members) -> list[Member]:
        found, last = source.find(), self._named.get(number, [])
        if found or not (last and source.is_asked):
            self._empty_since_s.pop(number, None)
            return found
        now_s = time.monotonic()
        if now_s - self._empty_since_s.setdefault(number, now_s) >= EMPTY_S:
            return found
        self._throttle.log(f"none {number}", "no peers are named now: the last known ones are kept for %.0f s", EMPTY_S)
        return last

    def _is_this_engine(self, member: Member) -> bool:
        if self._own is None:
            return False
        if member not in self._is_own:
            try:
                self._is_own[member] = _is_at(self._own, member)
            except (OSError, UnicodeError):  # a name is not known now; perhaps next time
                return False
        return self._is_own[member]


def _with(url: str, query: str) -> str:
    return f"{url}?{query}" if query else url


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _is_at(own: tuple[str, int], member: Member) -> bool:
    """Tell if a member is the server at a host and port of this engine."""
    host, port = _place(member.url)
    if port != own[1] or host is None:
        return False
    if own[0].lower() in {host, _place(f"//{member.name}")[0]}:
        return True
    here, there = _addresses(own[0]), _addresses(host)
    listens_on_all = any(ipaddress.ip_address(address).is_unspecified for address in here)
    return not here.isdisjoint(there) or (listens_on_all and any(map(_is_of_this_host, there)))


def _addresses(host: str) -> set[str]:
    return {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _is_of_this_host(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
