"""An operator's connection to a cache server, for the ``kvstore`` command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.catalog.sequence import chunk_refs, tail_refs
from kvstore.chunks import ChunkRef
from kvstore.errors import TierError
from kvstore.keys import KeyExtras, PrefixHasher
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.tiers.server.link import Link
from kvstore.tiers.server.url import ServerTarget

_HERE = ("memory", "disk")


@dataclass(frozen=True)
class Found:
    """What one namespace has of a prompt.

    Attributes:
        namespace_id: the name of the namespace, in hex.
        space_id: that of the namespace with this geometry, which the server takes in questions.
        fields: of the namespace.
        num_tokens: found, from the first on.
        chunks: where each chunk is that was found, and why the next one is missing.
        refs: the chunks found.
    """

    namespace_id: str
    space_id: str
    fields: dict[str, Any]
    num_tokens: int
    chunks: list[str]
    refs: list[ChunkRef]


class Operator:
    """Sends questions and orders. Belongs to one thread.

    Raises:
        TierError: the server cannot be reached.
    """

    def __init__(self, target: ServerTarget) -> None:
        self._context = open_context()
        try:
            self._link = Link(self._context, target)
        except BaseException:
            close_context(self._context)
            raise

    def ping(self) -> str:
        """``ok``, or ``closing``."""
        return str(self._ask(messages.Ping(self._link.new_serial()))["status"])

    def stats(self) -> dict[str, Any]:
        """All counters; ``docs/server.md`` has their names."""
        return self._ask(messages.Stats(self._link.new_serial()))

    def clear(self, namespace_id: str = "") -> int:
        """Forget the chunks of a namespace, or of all; how many there were."""
        return int(self._ask(messages.ClearSpaces(self._link.new_serial(), bytes.fromhex(namespace_id)))["chunks"])

    def pin(self, found: Found, *, is_wanted: bool, seconds: int = 0) -> int:
        """Pin what was found of a prompt, or unpin it; how many chunks.

        A pin ends after ``seconds``, but at the latest after the server's longest time, which 0 stands for.
        """
        packed = messages.pack_refs(found.refs[: messages.MAX_REFS])
        request = messages.Pin(self._link.new_serial(), bytes.fromhex(found.space_id), packed, is_wanted, seconds)
        return int(self._ask(request)["chunks"])

    def pins(self) -> dict[str, Any]:
        """What is pinned: ``pins``, a list in the order in which they end, and how many are ``left_out``."""
        return self._ask(messages.Pins(self._link.new_serial()))

    def unpin(self, namespace_id: str = "") -> int:
        """Unpin all chunks of a namespace, or of all; how many were pinned."""
        return int(self._ask(messages.UnpinSpaces(self._link.new_serial(), bytes.fromhex(namespace_id)))["chunks"])

    def find(self, tokens: Sequence[int], extras: KeyExtras, model: str = "") -> list[Found]:
        """What each namespace has of a prompt, or only those of a model."""
        spaces = self.stats()["namespaces"]
        wanted = [space for space in spaces if model in str(space["fields"].get("model", "")) or model == space["id"]]
        return [self._find(space, tokens, extras) for space in wanted]

    def close(self) -> None:
        """Disconnect."""
        self._link.close()
        close_context(self._context)

    def _find(self, space: dict[str, Any], tokens: Sequence[int], extras: KeyExtras) -> Found:
        hasher = PrefixHasher(space["chunk_tokens"], space["block_tokens"], extras)
        hasher.update(tokens)
        whole = chunk_refs(hasher, with_tail=False)
        space_id = space.get("space", space["id"])  # an earlier server has one id
        where = self._explain(space_id, whole)
        there = next((number for number, text in enumerate(where) if not text.startswith(_HERE)), len(whole))
        tails = tail_refs(hasher, there)
        ends = self._explain(space_id, tails)
        tail = max((number for number, text in enumerate(ends) if text.startswith(_HERE)), default=-1)
        refs, chunks = whole[:there], where[: there + 1]
        if tail >= 0:
            refs, chunks = [*refs, tails[tail]], [*where[:there], ends[tail]]
        num_tokens = sum(ref.num_blocks for ref in refs) * hasher.block_tokens
        return Found(space["id"], space_id, space["fields"], num_tokens, chunks, refs)

    def _explain(self, space_id: str, refs: Sequence[ChunkRef]) -> list[str]:
        found: list[str] = []
        for begin in range(0, len(refs), messages.MAX_REFS):
            packed = messages.pack_refs(refs[begin : begin + messages.MAX_REFS])
            found += self._ask(messages.Explain(self._link.new_serial(), bytes.fromhex(space_id), packed))["chunks"]
        return found

    def _ask(self, request: messages.Request) -> dict[str, Any]:
        try:
            tree = json.loads(self._link.ask(request, messages.Report).body)
        except ValueError as error:
            raise TierError(f"the cache server's report cannot be read: {error}") from error
        if not isinstance(tree, dict):
            raise TierError("the cache server's report cannot be read")
        return tree
