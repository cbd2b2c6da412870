"""Announcements to KV-aware routers of the blocks in memory and on disk, by the hashes that vLLM gives them.

Nothing is queued: once a step, changes are compared with earlier announcements. Chunks overlap where one has grown
from the tail of another, and listeners may not count. So a block is announced with the first chunk that has it, and
withdrawn with the last. No vLLM types.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvstore.index.plans import Place
from kvstore.model.chunks import ChunkRef

if TYPE_CHECKING:
    from kvstore.index.index import ChunkIndex
    from kvstore.model.keys import PrefixHasher, PrefixKey

ANNOUNCED = (Place.MEMORY, Place.DISK)
"""A remote tier is as near to every engine as to this one, and does not report what it evicts."""


class Adapter(Protocol):
    """The parts of vLLM's ``LoRARequest`` that events carry."""

    @property
    def adapter_id(self) -> int:
        """Its number in vLLM."""

    @property
    def name(self) -> str:
        """The name clients use."""


class Described(Protocol):
    """The parts of vLLM's ``Request`` that events carry."""

    lora_request: Adapter | None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and what was sampled."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes that vLLM gives its whole blocks."""


class Context(NamedTuple):
    """Parts of events that only vLLM can tell.

    Attributes:
        extra_keys: for each block what its hash covers besides tokens; empty if it covers nothing else.
        session_id: the session of the request that has the blocks; None without one.
    """

    extra_keys: tuple[tuple[object, ...] | None, ...] = ()
    session_id: str | None = None


NO_CONTEXT: Final = Context()

ContextOf = Callable[[Any, range], Context]
"""Function that returns the context of some of a request's blocks. The request is vLLM's."""


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks as vLLM names them; ``parent`` is the hash of the block before."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: array[int]
    lora: Adapter | None
    context: Context = NO_CONTEXT

    def behind(self, num_blocks: int) -> Blocks:
        """Return the blocks without the first ``num_blocks``."""
        return self._cut(slice(num_blocks, None), self.hashes[num_blocks - 1]) if num_blocks else self

    def up_to(self, num_blocks: int) -> Blocks:
        """Return the first ``num_blocks``."""
        return self._cut(slice(0, num_blocks), self.parent)

    def _cut(self, part: slice, parent: bytes | None) -> Blocks:
        block_tokens = len(self.token_ids) // len(self.hashes)
        end = None if part.stop is None else part.stop * block_tokens
        token_ids = self.token_ids[part.start * block_tokens : end]
        context = self.context._replace(extra_keys=self.context.extra_keys[part])
        return Blocks(self.hashes[part], parent, token_ids, self.lora, context)


class Stored(NamedTuple):
    """Event for blocks that can be found in a place."""

    place: Place
    blocks: Blocks


class Removed(NamedTuple):
    """Event for blocks that have left a place."""

    place: Place
    hashes: list[bytes]


class Announcer:
    """Blocks of the chunks in the index, and their announcements. For the scheduler's thread.

    Chunks that a disk held at start are known by their keys alone, and so are those brought from a remote tier before
    a request asks for them. They are announced when a request has their tokens, or when a chunk that shares blocks with
    them is removed, as these blocks can still be found.

    Args:
        block_tokens: tokens of a block.
        context_of: returns the context of a request's blocks.
    """

    def __init__(self, block_tokens: int, context_of: ContextOf) -> None:
        self._block_tokens = block_tokens
        self._context_of = context_of
        self._known: dict[PrefixKey, Blocks] = {}  # of chunks in the index
        self._trails: dict[PrefixKey, bytes] = {}  # of these, as far as they are known
        self._described: list[PrefixKey] = []  # since the last call
        self._by_place = {place: _PlaceEvents() for place in ANNOUNCED}

    def describe(self, ref: ChunkRef, blocks: range, request: Described) -> None:
        """Note a request's blocks as those of a chunk in the index; of another sequence's chunk these are the first."""
        first_block, end_block = blocks.start, blocks.stop
        known = self._known.get(ref.prefix_key)
        is_known = known is not None and len(known.hashes) >= len(blocks)
        if is_known or end_block > len(hashes := request.block_hashes):
            return
        tokens = request.all_token_ids[first_block * self._block_tokens : end_block * self._block_tokens]
        self._known[ref.prefix_key] = Blocks(
            tuple(hashes[first_block:end_block]),
            hashes[first_block - 1] if first_block else None,
            array("I", tokens),
            request.lora_request,
            self._context_of(request, blocks),
        )
        self._described.append(ref.prefix_key)

    def describe_held(self, index: ChunkIndex, blocks: range, request: Described, hasher: PrefixHasher) -> None:
        """Note the blocks of a request's tail that is not in the index as those of the chunks that hold them."""
        chunk, first_block = blocks.start // hasher.blocks_per_chunk, blocks.start
        if len(blocks) < hasher.blocks_per_chunk:
            trail = b"".join(hasher.block_keys(chunk)[: len(blocks)])
            for place in ANNOUNCED:
                key, num_blocks = index.nearest(trail, place)
                if num_blocks:
                    self.describe(ChunkRef(key, num_blocks), range(first_block, first_block + num_blocks), request)

    def take(self, index: ChunkIndex) -> list[Stored | Removed]:
        """Return the events that bring listeners up to date."""
        changes = index.take_changes()
        # A chunk may leave and come back, from a tier that has no trail of it.
        self._trails.update((key, trail) for key, trail in changes.items() if trail and key in self._known)
        heirs = [heir for key in changes if key in self._known for heir in self._heirs(index, key)]
        changed = [key for key in dict.fromkeys([*changes, *self._described, *heirs]) if key in self._known]
        self._described.clear()
        events: list[Stored | Removed] = []
        for place, at_place in self._by_place.items():
            gone: list[PrefixKey] = []
            for key in changed:
                is_here = index.holds(key, place)
                blocks = self._known[key]
                if is_here and at_place.num_blocks(key) < len(blocks.hashes):
                    said = at_place.add(key, blocks.hashes)
                    if said < len(blocks.hashes):
                        events.append(Stored(place, blocks.behind(said)))
                elif not is_here and at_place.num_blocks(key):
                    gone.append(key)
            hashes = [name for key in gone for name in at_place.remove(key, self._known[key].hashes)]
            if hashes:
                events.append(Removed(place, hashes))
        for key in changed:
            if key not in index:
                del self._known[key]
                self._trails.pop(key, None)
        return events

    def _heirs(self, index: ChunkIndex, key: PrefixKey) -> Iterator[PrefixKey]:
        """Yield chunks that still hold the first blocks of one that has left a place, and note these blocks."""
        blocks, trail = self._known[key], self._trails.get(key, b"")
        for place, at_place in self._by_place.items():
            if not at_place.num_blocks(key) or index.holds(key, place):
                continue
            heir, num_shared = index.nearest(trail, place)
            known = self._known.get(heir)
            if min(num_shared, len(blocks.hashes)) > (len(known.hashes) if known is not None else 0):
                self._known[heir] = blocks.up_to(num_shared)
                yield heir


class _PlaceEvents:
    """Chunks announced in one place, and the number of them that have each block.

    A block's hash names all tokens before it, so chunks that share a block share all their blocks before it.
    """

    def __init__(self) -> None:
        self._num_blocks: dict[PrefixKey, int] = {}  # announced of each chunk
        self._num_chunks: dict[bytes, int] = {}  # by block

    def num_blocks(self, key: PrefixKey) -> int:
        """Return the number of announced blocks of a chunk."""
        return self._num_blocks.get(key, 0)

    def add(self, key: PrefixKey, hashes: tuple[bytes, ...]) -> int:
        """Add a chunk, or more of its blocks, and return how many of the first were announced already."""
        counts, said = self._num_chunks, self.num_blocks(key)
        for name in hashes[said:]:
            others = counts.get(name, 0)
            counts[name] = others + 1
            said += others > 0
        self._num_blocks[key] = len(hashes)
        return said

    def remove(self, key: PrefixKey, hashes: tuple[bytes, ...]) -> list[bytes]:
        """Remove a chunk, and return those of its blocks that no other chunk has."""
        counts, gone = self._num_chunks, []
        for name in hashes[: self._num_blocks.pop(key)]:
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
                gone.append(name)
        return gone
