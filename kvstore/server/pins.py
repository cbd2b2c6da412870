"""Chunks that are kept from eviction: pinned by an operator, or held for the owner of the server."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.policies import Policy
from kvstore.server.spaces import Chunk, Space


@dataclass
class _Group:
    chunks: dict[Chunk, None] = field(default_factory=dict)
    num_bytes: int = 0


class Pins:
    """All pins, in groups of one namespace that end in the same second. Belongs to the thread that decides.

    Args:
        memory: the policy of the memory. It never contains pinned chunks, so that no search for room visits them.
        max_bytes: the most bytes that may be pinned; of one tenant half of them.
    """

    def __init__(self, memory: Policy, max_bytes: int) -> None:
        self.used_bytes = 0
        self._memory = memory
        self._max_bytes = max_bytes
        self._of_tenant = Counter[str]()
        self._groups: dict[bytes, dict[int, _Group]] = {}  # by namespace, then by end

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over all pinned chunks."""
        for groups in self._groups.values():
            for group in groups.values():
                yield from group.chunks

    def pin(self, space: Space, refs: Iterable[ChunkRef], end_s: float) -> int:
        """Pin chunks until ``end_s``, as far as the bound allows; return their number."""
        count = 0
        for ref in refs:
            chunk = space.chunks.get(ref)
            if chunk is None:
                continue
            if not chunk.is_pinned and not self._has_room(space, chunk.size_bytes):
                break
            self.set(chunk, end_s)
            count += 1
        return count

    def unpin(self, chunks: Iterable[Chunk]) -> int:
        """Unpin chunks; return the number that were pinned."""
        pinned = [chunk for chunk in chunks if chunk.is_pinned]
        for chunk in pinned:
            self.drop(chunk)
            if chunk.runs:
                self._memory.add(chunk.key, chunk.size_bytes)
        return len(pinned)

    def move(self, tail: Chunk) -> None:
        """Move the pin of a tail that is dropped to a longer chunk with its blocks, as far as the bound allows."""
        space, num_blocks = tail.space, tail.ref.num_blocks
        near = takewhile(lambda found: found[1] == num_blocks, space.trails.neighbours(tail.trail))
        refs = (chunk_of(trail) for trail, _ in near)
        longer = next((space.chunks[ref] for ref in refs if ref != tail.ref), None)
        if longer is None or longer.pin_end_s >= tail.pin_end_s:
            return
        if self._has_room(space, (0 if longer.is_pinned else longer.size_bytes) - tail.size_bytes):
            self.set(longer, tail.pin_end_s)

    def _has_room(self, space: Space, num_bytes: int) -> bool:
        if self.used_bytes + num_bytes > self._max_bytes:
            return False
        return not space.tenant or self._of_tenant[space.tenant] + num_bytes <= self._max_bytes // 2

    def _count(self, space: Space, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        if space.tenant:
            self._of_tenant[space.tenant] += num_bytes

    def set(self, chunk: Chunk, end_s: float) -> None:
        """Pin a chunk until ``end_s``; replaces an earlier pin."""
        self.drop(chunk)
        self._memory.evict(chunk.key)
        chunk.pin_end_s = max(1, math.floor(end_s))
        group = self._groups.setdefault(chunk.space.id, {}).setdefault(chunk.pin_end_s, _Group())
        group.chunks[chunk] = None
        group.num_bytes += chunk.size_bytes
        self._count(chunk.space, chunk.size_bytes)

    def drop(self, chunk: Chunk) -> None:
        """Unpin a chunk that is dropped."""
        if not chunk.is_pinned:
            return
        groups = self._groups[chunk.space.id]
        group = groups[chunk.pin_end_s]
        del group.chunks[chunk]
        group.num_bytes -= chunk.size_bytes
        if not group.chunks:
            del groups[chunk.pin_end_s]
            if not groups:
                del self._groups[chunk.space.id]
        self._count(chunk.space, -chunk.size_bytes)
        chunk.pin_end_s = 0

    def forget(self, space: Space) -> None:
        """Unpin all chunks of a namespace that was cleared."""
        self._count(space, -sum(group.num_bytes for group in self._groups.pop(space.id, {}).values()))

    def due(self, now_s: float) -> list[Chunk]:
        """Return the chunks with expired pins; they are still pinned."""
        due = [group for groups in self._groups.values() for end_s, group in groups.items() if end_s <= now_s]
        return [chunk for group in due for chunk in group.chunks]

    def listed(self, now_s: float, at_most: int, spaces: Container[bytes]) -> dict[str, object]:
        """Report the pins of some namespaces, by end and namespace, the first to end first."""
        chunks, sizes = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
        for space_id, groups in self._groups.items():
            for end_s, group in groups.items() if space_id in spaces else ():
                name = next(iter(group.chunks)).space.namespace.id.hex()
                chunks[end_s, name] += len(group.chunks)
                sizes[end_s, name] += group.num_bytes
        found = [
            {"namespace": name, "chunks": count, "bytes": sizes[end_s, name], "ends_in_s": max(0, round(end_s - now_s))}
            for (end_s, name), count in sorted(chunks.items())
        ]
        return {"pins": found[:at_most], "left_out": max(0, len(found) - at_most)}


class Holds:
    """All holds, which last equally long. Belongs to the thread that decides."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Chunk, float] = OrderedDict()  # the first to end first
        self._readers: dict[Chunk, int] = {}  # workers that have yet to read it, if several of the owner's do
        self._over: set[Chunk] = set()  # chunks that are still there, and were not read in time

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, chunk: Chunk, end_s: float, num_readers: int = 1) -> None:
        """Hold a chunk until ``num_readers`` of the owner's workers have read it, at most until ``end_s``.

        ``end_s`` must not be before the end of any other hold. Only the first hold of a chunk counts until it is
        dropped, so that a sender cannot prolong it with repeated requests.
        """
        if chunk in self._over or chunk in self._ends:
            return
        self._ends[chunk] = end_s
        if num_readers > 1:
            self._readers[chunk] = num_readers

    def note_read(self, chunk: Chunk, *, by_owner: bool) -> None:
        """Drop the hold once the owner's worker here has read the chunk, or as many clients as workers need it."""
        num_left = self._readers.get(chunk, 1)
        if num_left > 1:
            self._readers[chunk] = num_left - 1
        elif by_owner or chunk in self._readers:
            self.drop(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Drop the hold of a chunk that was read, or is gone."""
        self._ends.pop(chunk, None)
        self._readers.pop(chunk, None)
        self._over.discard(chunk)

    def expire(self, now_s: float) -> None:
        """End the holds of chunks that were not read in time."""
        while self._ends and next(iter(self._ends.values())) <= now_s:
            chunk, _ = self._ends.popitem(last=False)
            self._readers.pop(chunk, None)
            self._over.add(chunk)
