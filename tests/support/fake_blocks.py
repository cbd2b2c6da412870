"""Plays vLLM's block manager: free blocks, and blocks that requests with equal prefixes share."""

from __future__ import annotations

from collections import OrderedDict, deque

from support.fake_parts import BLOCK, FakeRequest


class FakeBlocks:
    """The blocks of one engine."""

    def __init__(self, num_blocks: int) -> None:
        self.free: deque[int] = deque(range(1, num_blocks))  # vLLM keeps block 0 for itself
        self.uses = dict.fromkeys(range(num_blocks), 0)
        self.hashes: OrderedDict[tuple[str, tuple[int, ...]], int] = OrderedDict()  # the local prefix cache
        self.hash_of: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.deferred_frees: list[tuple[int, list[int]]] = []
        self.planned = self.processed = 0  # steps
        self.taken: list[int] = []  # blocks given away since the last step
        self.copies: list[tuple[int, int]] = []  # that this step begins with: from a block to one that was taken
        self.cached_at: dict[int, int] = {}  # the step since which a block can be found

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.hashes.clear()
        self.hash_of.clear()

    def _local_hit(self, request: FakeRequest) -> list[int]:
        blocks = []
        for number in range((request.num_tokens - 1) // BLOCK):
            block = self.hashes.get((request.salt, tuple(request.all_token_ids[: (number + 1) * BLOCK])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _cache(self, request: FakeRequest, number: int) -> None:
        key = (request.salt, tuple(request.all_token_ids[: (number + 1) * BLOCK]))
        block = request.blocks[number]
        if block not in self.hash_of and key not in self.hashes:
            self.hashes[key] = block
            self.hash_of[block] = key
            self.cached_at[block] = self.planned

    def _copy_block(self, request: FakeRequest, number: int) -> None:
        """Give a request a copy of a block that it shares, if that holds what its hash says.

        Until the step has ended nobody else gets either of them.
        """
        source = request.blocks[number]
        if not self.free or self.cached_at[source] >= self.processed:
            return
        block = self.free.popleft()
        self._uncache(block)
        self.uses[block] = 1
        request.blocks[number] = block
        self.taken.append(block)
        self.copies.append((source, block))
        self.deferred_frees.append((self.planned + 1, [source]))

    def _uncache(self, block: int) -> None:
        key = self.hash_of.pop(block, None)
        if key is not None:
            del self.hashes[key]

    def _use(self, block: int) -> None:
        if self.uses[block] == 0 and block in self.free:
            self.free.remove(block)
        self.uses[block] += 1

    def _grow(self, request: FakeRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.popleft()
            self._uncache(block)
            self.uses[block] = 1
            request.blocks.append(block)
            self.taken.append(block)
        return True

    def _free_request(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks, []
        if request.in_flight:  # a step under way may still write them
            self.deferred_frees.append((self.planned, blocks))
        else:
            self._release(blocks)

    def _drain_deferred_frees(self) -> None:
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed:
            self._release(self.deferred_frees.pop(0)[1])

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.uses[block] -= 1
            if self.uses[block] == 0:
                self.free.append(block)
