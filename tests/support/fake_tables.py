"""Simulates vLLM's block manager: one pool of ids, a table for each group of each request, prefixes that they share."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvstore.model.groups import GroupKind
from support.fake_parts import FakeRequest

NULL = 0


@dataclass(frozen=True)
class FakeGroup:
    """Layers of one kind, which keep for a window the ``span`` before the next token, for local attention its chunk."""

    kind: GroupKind
    block: int
    span: int = 0

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token before this one that it attends to; of a state, the last whose state is needed."""
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.WINDOW:
                return max(0, num_tokens - self.span)
            case GroupKind.LOCAL:
                return num_tokens - num_tokens % self.span
            case GroupKind.STATE:
                return max(0, num_tokens - 1)

    def needed_blocks(self, num_tokens: int) -> range:
        """Return the positions of the blocks that a request needs to continue at a token."""
        return range(self.first_needed(num_tokens) // self.block, -(-num_tokens // self.block))


class FakeTables:
    """The blocks of one engine.

    Args:
        groups: of the model.
        num_blocks: in the pool of all groups, the null block included.
    """

    def __init__(self, groups: Sequence[FakeGroup], num_blocks: int) -> None:
        self.groups = tuple(groups)
        self.align = lcm(*(group.block for group in groups))
        self.num_blocks = num_blocks
        self.free: deque[int] = deque(range(1, num_blocks))
        self.uses = dict.fromkeys(range(num_blocks), 0)
        self.hashes: OrderedDict[tuple[int, str, tuple[int, ...]], int] = OrderedDict()  # the local prefix cache
        self.hash_of: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        self.deferred_frees: list[tuple[int, list[int]]] = []
        self.planned = self.processed = 0  # steps
        self.taken: list[int] = []  # blocks given away since the last step
        self.copies: list[tuple[int, int]] = []  # at the begin of this step: from a block to one that was taken
        self.cached_at: dict[int, int] = {}  # the step since which a block can be found
        self.offers: dict[str, list[tuple[int, int, int]]] = {}  # states: group, block, token

    def retains(self) -> bool:
        """Tell if the state at a boundary is kept, and offered."""
        raise NotImplementedError

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.hashes.clear()
        self.hash_of.clear()

    def _local_hit(self, request: FakeRequest) -> tuple[int, list[list[int]]]:
        """Return the most tokens at which all groups can continue, and the tables there, with nulls for the others."""
        tokens = tuple(request.all_token_ids)
        for end in range((len(tokens) - 1) // self.align * self.align, 0, -self.align):
            tables = []
            for number, group in enumerate(self.groups):
                needed = group.needed_blocks(end)
                found = [self.hashes.get((number, request.salt, tokens[: (at + 1) * group.block])) for at in needed]
                if None in found:
                    break
                table = [NULL] * needed.start + [block for block in found if block is not None]
                tables.append(table + [NULL] * (end // group.block - len(table)))
            else:
                return end, tables
        return 0, [[] for _ in self.groups]

    def _cache(self, request: FakeRequest, end_tokens: int) -> None:
        """Offer the whole blocks before a token to the local cache, and states to connectors."""
        tokens = tuple(request.all_token_ids)
        for number, group in enumerate(self.groups):
            table = request.tables[number]
            is_state = group.kind is GroupKind.STATE
            for at in range(request.offered[number] if is_state else 0, end_tokens // group.block):
                block, key = table[at], (number, request.salt, tokens[: (at + 1) * group.block])
                if block == NULL or (is_state and not self.retains()):
                    continue
                if block not in self.hash_of and key not in self.hashes:
                    self.hashes[key] = block
                    self.hash_of[block] = key
                    self.cached_at[block] = self.planned
                if is_state:
                    self.offers.setdefault(request.request_id, []).append((number, block, (at + 1) * group.block))
            request.offered[number] = max(request.offered[number], end_tokens // group.block)

    def _uncache(self, block: int) -> None:
        key = self.hash_of.pop(block, None)
        if key is not None:
            del self.hashes[key]

    def _admit(self, request: FakeRequest, local: tuple[int, list[list[int]]], external: int) -> bool:
        """Give a request its shared blocks and those of a load; False if there is no room."""
        num_local, shared = local
        total = num_local + external
        tables: list[list[int]] = []
        for group, table in zip(self.groups, shared, strict=True):
            skipped = min(group.first_needed(total) // group.block, -(-total // group.block))
            tables.append([NULL] * skipped + table[skipped:])
        own = {block for table in tables for block in table if block != NULL}
        missing = [
            -(-total // group.block) - len(table) if external else 0
            for group, table in zip(self.groups, tables, strict=True)
        ]
        if sum(missing) + sum(self.uses[block] == 0 for block in own) > len(self.free):
            return False
        for block in own:
            self._use(block)
        for table, count in zip(tables, missing, strict=True):
            table += [self._take() for _ in range(count)]
        request.tables, request.local = tables, num_local
        request.offered = [num_local // group.block for group in self.groups]
        return True

    def _grow(self, request: FakeRequest, end_tokens: int) -> bool:
        """Give a request the blocks for a step up to a token; blocks that have left the windows are freed first."""
        self._leave_windows(request)
        missing = []
        for group, table in zip(self.groups, request.tables, strict=True):
            count = -(-end_tokens // group.block) - len(table)
            missing.append(min(1, max(0, count)) if group.kind is GroupKind.STATE else max(0, count))
        if sum(missing) > len(self.free):
            return False
        for group, table, count in zip(self.groups, request.tables, missing, strict=True):
            if group.kind is GroupKind.STATE and count:
                table.extend([NULL] * (-(-end_tokens // group.block) - 1 - len(table)))
            table.extend(self._take() for _ in range(count))
        return True

    def _copy_shared(self, request: FakeRequest, number: int) -> None:
        """Give a request a copy of a group's last shared block, if that holds what its hash says.

        Until the step has ended no other request gets either of them.
        """
        table, at = request.tables[number], request.local // self.groups[number].block - 1
        if at < 0 or table[at] == NULL or not self.free or self.cached_at[table[at]] >= self.processed:
            return
        source, table[at] = table[at], self._take()
        self.copies.append((source, table[at]))
        self.deferred_frees.append((self.planned + 1, [source]))

    def _leave_windows(self, request: FakeRequest) -> None:
        """Free blocks that no later token needs, except those of which a step is under way."""
        done = max(0, request.num_computed_tokens - request.in_flight_tokens)
        for group, table in zip(self.groups, request.tables, strict=True):
            for at in range(min(group.first_needed(done) // group.block, len(table))):
                if table[at] != NULL:
                    self._release([table[at]])
                    table[at] = NULL

    def _take(self) -> int:
        block = self.free.popleft()
        self._uncache(block)
        assert self.uses[block] == 0
        self.uses[block] = 1
        self.taken.append(block)
        return block

    def _use(self, block: int) -> None:
        if self.uses[block] == 0:
            self.free.remove(block)
        self.uses[block] += 1

    def _free_request(self, request: FakeRequest) -> None:
        blocks = [block for table in request.tables for block in table if block != NULL]
        request.tables = [[] for _ in self.groups]
        self.offers.pop(request.request_id, None)
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
            assert self.uses[block] >= 0
            if self.uses[block] == 0 and block in self.hash_of:
                self.free.append(block)
            elif self.uses[block] == 0:
                self.free.appendleft(block)  # given away first, as it cannot be found: to be overwritten soon
