"""A stand-in for vLLM with its tiers, for tests of warming."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import KeyExtras
from kvstore.model.layout import KVLayout
from support.diskwork import EVEN


def refs_of(layout: KVLayout, tokens: list[int], extras: KeyExtras) -> list[ChunkRef]:
    """Return the chunks of a sequence, in order."""
    return chunk_refs(hash_tokens(layout, tokens, extras), with_tail=True)


class WarmEngine:
    """Engine that keeps the chunks of what it computes, but drops those in ``lost`` the first ``losses`` times."""

    layout: KVLayout = EVEN
    max_tokens = 2000
    vocab_size = 1000
    saves_tails = True
    max_chunks_at_once = 8
    tokenizer: Any = None

    def __init__(self) -> None:
        self.held: set[ChunkRef] = set()
        self.computed: list[int] = []  # the length of every computed prompt
        self.batches: list[int] = []
        self.lost: set[ChunkRef] = set()
        self.losses = 0
        self.supersedes = False
        self.within: set[ChunkRef] = set()  # tails that whole chunks hold

    def refs(self, tokens: Sequence[int]) -> list[ChunkRef]:
        return refs_of(self.layout, list(tokens), KeyExtras())

    def chunk_bytes(self, ref: ChunkRef) -> int:
        return self.layout.payload_bytes(ref.num_blocks)

    def stored(self, refs: Sequence[ChunkRef], trails: Mapping[ChunkRef, bytes]) -> list[bool]:
        """Tell which chunks are stored; without a trail, a longer chunk that holds a tail does not count."""
        within = {ref for ref in self.within if trails.get(ref, b"").endswith(ref.prefix_key)}
        return [ref in self.held or ref in within for ref in refs]

    def compute(self, work: Sequence[tuple[array[int], str | None]]) -> int:
        self.batches.append(len(work))
        for tokens, salt in work:
            self.computed.append(len(tokens))
            extras = KeyExtras(cache_salt=salt)
            refs = refs_of(self.layout, tokens.tolist(), extras)
            self.held.update(ref for ref in refs if ref not in self.lost or not self.losses)
            if self.supersedes:
                whole = [number for number, ref in enumerate(refs) if ref.num_blocks == 8]
                for number in whole:
                    for end in range(32, 256, 32):
                        tail = refs_of(self.layout, tokens[: number * 256 + end].tolist(), extras)[-1]
                        self.held.discard(tail)
                        self.within.add(tail)
        self.losses = max(0, self.losses - 1)
        return sum(len(tokens) for tokens, _ in work)

    def wait(self, refs: Sequence[ChunkRef], trails: Mapping[ChunkRef, bytes]) -> list[ChunkRef]:
        return [ref for ref, there in zip(refs, self.stored(refs, trails), strict=True) if not there]
