"""The epoch of a namespace, and walks through all its keys: what is there, and what is nobody's any more."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from kvstore.tiers.redis.chunk import PART_BYTES, ChunkIO, Home
from kvstore.tiers.redis.ledger import WRITE_ID_BYTES
from kvstore.tiers.redis.wire import Link, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.chunks import ChunkRef
    from kvstore.layout import KVLayout
    from kvstore.tiers.redis.calls import Calls
    from kvstore.tiers.redis.nodes import Node

_PAGE_KEYS = 1000
_EPOCH_DIGITS = 16
_PART_DIGITS = 9  # a number with more of them is no part
_NO_PART = 10**_PART_DIGITS


class Sweeper:
    """Walks through the keys of a namespace in steps, and holds no connection between them. Thread-safe.

    Every method may raise ``TierError``: a server failed.
    """

    def __init__(self, calls: Calls, io: ChunkIO, layout: KVLayout) -> None:
        self._calls = calls
        self._io = io
        self._layout = layout

    def epoch(self, home: Home) -> bytes:
        """The epoch that holds now in the namespace of ``home``."""
        return self._calls.at(home.epoch_tag, lambda link: _epoch(link, home))

    def renew(self, home: Home) -> Home:
        """Begin a new epoch: the namespace's chunks of before are unreachable from here on."""
        new = Home(home.namespace_id, _new_epoch())
        self._calls.at(new.epoch_tag, lambda link: link.call("SET", new.epoch_key, new.epoch))
        return new

    def walk(self, home: Home) -> tuple[dict[ChunkRef, int], int]:
        """All chunks with their sizes, the longest untouched first; and how many were deleted, without a commit."""
        idle_s: dict[ChunkRef, int] = {}
        last_part: dict[ChunkRef, int] = {}
        for node, keys in self._pages(home):
            self._delete_foreign(home, node, keys)
            parsed = [(key, home.parse(key)) for key in keys]
            commits = []
            for key, place in parsed:
                if place is None or not self._is_possible(place[0]):
                    continue
                ref, purpose = place
                if purpose == b"c":
                    commits.append((key, ref))
                elif purpose.isdigit() and len(purpose) < _PART_DIGITS:
                    last_part[ref] = max(int(purpose), last_part.get(ref, 0))
            questions = [[pack("OBJECT", "IDLETIME", key)] for key, _ in commits]
            for (_, ref), answer in zip(commits, self._calls.ask_node(node, questions), strict=True):
                if answer is not None:  # it has gone meanwhile
                    idle_s[ref] = answer if isinstance(answer, int) else 0
        swept = 0
        for ref in last_part.keys() - idle_s.keys():  # its commit was evicted
            if self._calls.at(home.tag(ref), lambda link, ref=ref: self._io.discard(link, home, ref, None)):  # type: ignore[misc]
                swept += 1
        return self._sizes(home, sorted(idle_s, key=lambda ref: -idle_s[ref]), last_part), swept

    def _sizes(self, home: Home, refs: Sequence[ChunkRef], last_part: dict[ChunkRef, int]) -> dict[ChunkRef, int]:
        """The length of all values of every chunk.

        With a codec, its last part tells. To ask for it counts as a use of that part, but not of the chunk's commit.
        """
        sizes = {ref: self._io.stored_bytes(ref.num_blocks) for ref in refs}
        if self._io.codec_name == "none":
            return sizes
        known = [ref for ref in refs if last_part.get(ref, _NO_PART) < self._io.max_parts(ref.num_blocks)]
        for begin in range(0, len(known), _PAGE_KEYS):
            page = known[begin : begin + _PAGE_KEYS]
            keys = [home.keys(ref, last_part[ref] + 1)[-1] for ref in page]
            questions = [(home.tag(ref), [pack("STRLEN", key)]) for ref, key in zip(page, keys, strict=True)]
            for ref, length in zip(page, self._calls.ask_all(questions), strict=True):
                data_bytes = last_part[ref] * PART_BYTES + length - WRITE_ID_BYTES if isinstance(length, int) else 0
                if 0 < data_bytes <= self._layout.payload_bytes(ref.num_blocks):  # otherwise no chunk, or gone
                    sizes[ref] = self._io.size_of(ref.num_blocks, data_bytes)
        return sizes

    def _is_possible(self, ref: ChunkRef) -> bool:
        return 0 < ref.num_blocks <= self._layout.blocks_per_chunk

    def sweep(self, home: Home) -> None:
        """Delete all keys of the namespace's former epochs."""
        for node, keys in self._pages(home):
            self._delete_foreign(home, node, keys)

    def _pages(self, home: Home) -> Iterator[tuple[Node, list[bytes]]]:
        """All keys of the namespace, in steps; no connection is held between them."""
        for node in self._calls.nodes.masters():
            cursor: object = b"0"
            while True:
                with node.link() as link:
                    page = link.call("SCAN", bytes(cursor), "MATCH", home.pattern, "COUNT", _PAGE_KEYS)  # type: ignore[call-overload]
                cursor, keys = page  # type: ignore[misc]
                yield node, keys  # type: ignore[misc]
                if cursor == b"0":
                    break

    def _delete_foreign(self, home: Home, node: Node, keys: Sequence[bytes]) -> None:
        """Delete those keys that belong to another epoch than the one that holds now, asked for after they were seen.

        An epoch is never used again, so what is of another one is nobody's any more.
        """
        if all(home.parse(key) for key in keys):
            return
        now = Home(home.namespace_id, self.epoch(home))
        dead = [key for key in keys if now.parse(key) is None]
        with node.link() as link:
            link.ask([pack("UNLINK", key) for key in dead])


def _new_epoch() -> bytes:
    return secrets.token_hex(_EPOCH_DIGITS // 2).encode()


def _epoch(link: Link, home: Home) -> bytes:
    """The epoch that holds now. Where there is none, because it never was or was evicted, a new one begins."""
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
