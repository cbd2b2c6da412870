"""LFU: evicts the least frequently used chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy


class LFU(Policy):
    """Evicts the least often used first, and among those the least recently used.

    Counts outlive eviction while their keys are remembered. A chunk used less than all those in the tier is refused.
    """

    name = "LFU"
    filters = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._counts: dict[PrefixKey, int] = {}  # of chunks in the tier
        self._ghosts: OrderedDict[PrefixKey, int] = OrderedDict()  # counts of remembered keys
        self._queues: dict[int, OrderedDict[PrefixKey, None]] = {}  # by count, the least recently used first

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return len(self._ghosts)

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        for key in reversed(chain):
            count = self._counts.get(key)
            if count is None:
                if key in used:
                    self._remember(key, self._ghosts.get(key, 0) + 1)
            elif key in used:
                self._leave_queue(key)
                self._enter_queue(key, count + 1)
            else:
                self._queues[count].move_to_end(key)

    def _on_add(self, key: PrefixKey) -> None:
        self._enter_queue(key, self._ghosts.pop(key, 1))

    def _on_evict(self, key: PrefixKey) -> None:
        self._remember(key, self._leave_queue(key))

    def _on_remove(self, key: PrefixKey) -> None:
        self._ghosts.pop(key, None)
        if key in self._counts:
            self._leave_queue(key)

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        limit = None if newcomer is None else self._ghosts.get(newcomer, 1)
        for count in sorted(self._queues):
            if limit is not None and count > limit:
                return
            yield from self._queues[count]

    def _remember(self, key: PrefixKey, count: int) -> None:
        self._ghosts[key] = count
        self._ghosts.move_to_end(key)
        while len(self._ghosts) > self.max_ghosts:
            self._ghosts.popitem(last=False)

    def _enter_queue(self, key: PrefixKey, count: int) -> None:
        self._counts[key] = count
        self._queues.setdefault(count, OrderedDict())[key] = None

    def _leave_queue(self, key: PrefixKey) -> int:
        """Take a key out of its queue and return its count."""
        count = self._counts.pop(key)
        queue = self._queues[count]
        del queue[key]
        if not queue:
            del self._queues[count]
        return count
