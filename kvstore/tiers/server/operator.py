"""Operator's connection to a cache server, for the ``kvstore`` command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.index.plans import chunk_refs, tail_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import KeyExtras, PrefixHasher
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.url import ServerTarget

_HERE = ("memory", "disk")


@dataclass(frozen=True)
class Found:
    """Chunks of a prompt that were found in one namespace.

    Attributes:
        namespace_id: the name of the namespace, in hex.
        space_id: the id of the namespace with this geometry, by which requests name it.
        fields: of the namespace.
        num_tokens: tokens found, from the first on.
        chunks: the location of each chunk found, and the reason why the next one is missing.
        refs: the chunks found; the last one may hold more than the prompt.
    """

    namespace_id: str
    space_id: str
    fields: dict[str, Any]
    num_tokens: int
    chunks: list[str]
    refs: list[ChunkRef]


class _Near(NamedTuple):
    """Chunk that holds leading blocks of another one, their number, and its location."""

    ref: ChunkRef
    num_blocks: int
    where: str


class Operator:
    """Connection that sends an operator's requests. Belongs to one thread.

    Raises:
        TierError: the server cannot be reached.
    """

    def __init__(self, target: ServerTarget) -> None:
        self._context = open_context()
        with ExitStack() as failed:
            failed.callback(close_context, self._context)
            self._connection = ServerConnection(self._context, target)
            failed.pop_all()

    def ping(self) -> str:
        """Return ``ok``, or ``closing``."""
        return str(self._ask(messages.Ping)["status"])

    def stats(self) -> dict[str, Any]:
        """Return all counters; ``docs/server.md`` has their names."""
        return self._ask(messages.Stats)

    def clear(self, namespace_id: str = "") -> int:
        """Remove the chunks of one namespace or all; returns their number."""
        return int(self._ask(messages.ClearSpaces, bytes.fromhex(namespace_id))["chunks"])

    def pin(self, found: Found, *, is_wanted: bool, seconds: int = 0) -> int:
        """Pin the chunks found of a prompt, or unpin them; returns their number.

        A pin ends after ``seconds``, at most the server's longest time, which is also the meaning of 0.
        """
        packed = messages.pack_refs(found.refs[: messages.MAX_REFS])
        return int(self._ask(messages.Pin, bytes.fromhex(found.space_id), packed, is_wanted, seconds)["chunks"])

    def pins(self) -> dict[str, Any]:
        """Return the pinned chunks: ``pins``, a list by end of the pin, and the number that are ``left_out``."""
        return self._ask(messages.Pins)

    def unpin(self, namespace_id: str = "") -> int:
        """Unpin all chunks of one namespace or all; returns the number that were pinned."""
        return int(self._ask(messages.UnpinSpaces, bytes.fromhex(namespace_id))["chunks"])

    def find(self, tokens: Sequence[int], extras: KeyExtras, model: str = "") -> list[Found]:
        """Return the chunks of a prompt found in each namespace, or only in those of a model."""
        spaces = self.stats()["namespaces"]
        wanted = [space for space in spaces if model in str(space["fields"].get("model", "")) or model == space["id"]]
        return [self._find(space, tokens, extras) for space in wanted]

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
        close_context(self._context)

    def _find(self, space: dict[str, Any], tokens: Sequence[int], extras: KeyExtras) -> Found:
        hasher = PrefixHasher(space["chunk_tokens"], space["block_tokens"], extras)
        hasher.update(tokens)
        whole = chunk_refs(hasher, with_tail=False)
        space_id = space.get("space", space["id"])  # an earlier server has one id
        where = self._explain(space_id, whole)
        there = next((number for number, text in enumerate(where) if not _is_here(text)), len(whole))
        num_ends = len(hasher.block_keys(there))
        tails = tail_refs(hasher, there)
        ends, near = self._explain_ends(space_id, tails)
        refs, chunks = whole[:there], where[: there + 1]
        if near is not None:
            refs = [*refs, near.ref]
        if near is not None and near.num_blocks == num_ends:
            chunks = [*where[:there], near.where]
        elif near is not None and there == len(whole):
            chunks = [*where[:there], ends[-1]]
        num_blocks = there * hasher.blocks_per_chunk + (near.num_blocks if near is not None else 0)
        return Found(space["id"], space_id, space["fields"], num_blocks * hasher.block_tokens, chunks, refs)

    def _explain(self, space_id: str, refs: Sequence[ChunkRef]) -> list[str]:
        found: list[str] = []
        for begin in range(0, len(refs), messages.MAX_REFS):
            found += self._report(space_id, refs[begin : begin + messages.MAX_REFS])["chunks"]
        return found

    def _explain_ends(self, space_id: str, tails: Sequence[ChunkRef]) -> tuple[list[str], _Near | None]:
        """Return the location of each tail of a chunk, and the tail or longer chunk with most of its blocks."""
        tree = self._report(space_id, tails[: messages.MAX_REFS]) if tails else {"chunks": []}
        ends = [*tree["chunks"], *self._explain(space_id, tails[messages.MAX_REFS :])]
        there = [_Near(ref, ref.num_blocks, text) for ref, text in zip(tails, ends, strict=True) if _is_here(text)]
        if "nearest" in tree:  # an earlier server reports none
            key, num_blocks, shared_blocks, text = tree["nearest"]
            there.insert(0, _Near(ChunkRef(bytes.fromhex(key), num_blocks), shared_blocks, text))
        return ends, max(reversed(there), key=lambda near: near.num_blocks, default=None)

    def _report(self, space_id: str, refs: Sequence[ChunkRef]) -> dict[str, Any]:
        return self._ask(messages.Explain, bytes.fromhex(space_id), messages.pack_refs(refs))

    def _ask(self, kind: type[messages.Request], *fields: object) -> dict[str, Any]:
        request = kind(self._connection.new_serial(), *fields)
        try:
            tree = json.loads(self._connection.ask(request, messages.Report).body)
        except ValueError as error:
            raise TierError(f"the cache server's report cannot be read: {error}") from error
        if not isinstance(tree, dict):
            raise TierError("the cache server's report cannot be read")
        return tree


def _is_here(text: str) -> bool:
    return text.startswith(_HERE)
