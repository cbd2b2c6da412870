"""Store without bytes: kvstore's index, used as the connector uses it, with moves that take no time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Place, chunk_refs
from kvstore.model.keys import PrefixHasher


class Found(NamedTuple):
    """Part of a sequence that was found.

    Attributes:
        num_tokens: tokens from its start on.
        parts: chunks that were loaded for it, in order, each with its place and its used tokens.
    """

    num_tokens: int
    parts: list[tuple[Place, int]]


class Replay:
    """Replay of requests, each of which loads its stored chunks and stores the rest before the next one.

    Args:
        index: an empty index; it must allow as many writes in flight as a sequence has chunks.
        block_ends: False finds only whole chunks and tails, as before hits could end at any block.

    Attributes:
        most_slots: maximum slots in use so far.
    """

    def __init__(self, index: ChunkIndex, *, block_ends: bool = True) -> None:
        self.index = index
        self.most_slots = 0
        self._block_ends = block_ends

    def ask(self, hasher: PrefixHasher, answer_tokens: int | None = None) -> Found:
        """Look up, load and store one sequence, and return the part that was found.

        The request ends with an answer of ``answer_tokens``, if that is known.
        """
        index, named = self.index, hasher if self._block_ends else None
        match = index.lookup(hasher)
        loads = index.prepare_load(match.refs, hasher=named)
        index.complete_load(loads, set(), set())
        first = match.num_tokens // hasher.chunk_tokens
        refs = chunk_refs(hasher, with_tail=True)
        stores = index.prepare_store(
            refs[first:],
            hasher.chunk_keys()[:first],
            hasher=named,
            noted={step.ref.prefix_key for step in loads},
        )
        self.most_slots = max(self.most_slots, index.slots_in_use)
        index.complete_store(stores, set())
        for step in stores:
            for target in step.targets:
                index.complete_write(step.ref.prefix_key, target, stored=True)
        index.take_removals()
        if answer_tokens is not None:
            index.end_request([ref.prefix_key for ref in (*match.refs, *refs[first:])], answer_tokens)
        if named is None:
            stored = {step.ref.prefix_key for step in stores}
            for number, key in enumerate(hasher.chunk_keys()):
                if key in stored:
                    index.remove(hasher.block_keys(number)[:-1])  # its tails, as no hit could end inside the chunk
        return Found(match.num_tokens, list(_parts(loads, match.num_tokens, hasher)))


def _parts(loads: list[LoadStep], num_tokens: int, hasher: PrefixHasher) -> Iterator[tuple[Place, int]]:
    for number, step in enumerate(loads):
        yield step.source, min(hasher.chunk_tokens, num_tokens - number * hasher.chunk_tokens)
