"""S3-FIFO, of Yang, Zhang, Qiu, Yue and Vinayak (SOSP 2023), with sizes in bytes and chains of chunks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy
from kvstore.policies.queues import SizedQueue

SMALL_SHARE = 0.1
MAX_USES = 3


class S3FIFO(Policy):
    """A small queue in front of a main one: chunks that are not used again while in the small one are evicted soon.

    A use only raises a counter. When room is needed, unused chunks are evicted and used ones move: from the small queue
    to the main one, or to the end of the main one with one use less. A key that is still remembered when it returns
    starts in the main queue.
    """

    name = "S3FIFO"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._small, self._main, self._ghosts = SizedQueue(), SizedQueue(), SizedQueue()
        self._uses: dict[PrefixKey, int] = {}  # uses of the chunks in the tier since they were added
        self._new: set[PrefixKey] = set()  # added since the last touch

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return len(self._ghosts)

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        for key in reversed(chain):
            if key in self._new:  # added head first, but evicted from the end
                (self._small if key in self._small else self._main).move_to_end(key)
            elif key in used and key in self._uses:
                self._uses[key] = min(self._uses[key] + 1, MAX_USES)
        self._new.clear()

    def _on_add(self, key: PrefixKey) -> None:
        self._new.add(key)
        self._uses[key] = 0
        queue = self._main if self._ghosts.discard(key) else self._small
        queue.push(key, self._sizes[key])

    def _on_resize(self, key: PrefixKey, more_bytes: int) -> None:
        (self._small if key in self._small else self._main).resize(key, more_bytes)

    def _on_evict(self, key: PrefixKey) -> None:
        if key in self._small:
            self._ghosts.push(key, self._sizes[key])
        self._leave(key)
        while self._ghosts and self._ghosts.used_bytes > self.capacity_bytes * (1 - SMALL_SHARE):
            self._ghosts.pop_oldest()

    def _on_remove(self, key: PrefixKey) -> None:
        self._ghosts.discard(key)
        if key in self._uses:
            self._leave(key)

    def _leave(self, key: PrefixKey) -> None:
        del self._uses[key]
        self._new.discard(key)
        (self._small if key in self._small else self._main).take(key)

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:  # noqa: ARG002 - newcomers always win
        """Move used chunks like the hand of a clock; changes the order, but not which chunks are in the tier."""
        offered: list[tuple[SizedQueue, PrefixKey]] = []
        try:
            while self._small or self._main:
                above = self._small.used_bytes > self.capacity_bytes * SMALL_SHARE
                queue = self._small if self._small and (above or not self._main) else self._main
                key = next(iter(queue))
                queue.take(key)
                if self._uses[key]:
                    self._uses[key] = self._uses[key] - 1 if queue is self._main else 0
                    self._main.push(key, self._sizes[key])
                else:
                    offered.append((queue, key))
                    yield key
        finally:  # chunks keep their place until they are evicted
            for queue, key in reversed(offered):
                queue.push(key, self._sizes[key])
                queue.move_to_end(key, last=False)
