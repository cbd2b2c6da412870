"""ARC, the adaptive replacement cache of Megiddo and Modha (FAST 2003), with sizes in bytes and chains of chunks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy
from kvstore.policies.queues import SizedQueue


class ARC(Policy):
    """Balances chunks used once against those used more often, by the misses on recently evicted chunks.

    ``_once`` and ``_again`` (T1 and T2) hold chunks in the tier, the least recently used first; ``_gone_once`` and
    ``_gone_again`` (B1 and B2) hold remembered keys. ``_target_bytes`` is the target size of ``_once``.
    """

    name = "ARC"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._once, self._again = SizedQueue(), SizedQueue()
        self._gone_once, self._gone_again = SizedQueue(), SizedQueue()
        self._target_bytes = 0.0

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return len(self._gone_once) + len(self._gone_again)

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        for key in reversed(chain):
            if key in self._again:
                self._again.move_to_end(key)
            elif key in self._once:
                if key in used:
                    self._again.push(key, self._once.take(key))
                else:
                    self._once.move_to_end(key)
            elif key in used:
                self._on_miss(key)

    def _on_miss(self, key: PrefixKey) -> None:
        """Adapt to a miss on a remembered key: the queue from which it was evicted was too small."""
        once, again = self._gone_once, self._gone_again
        if key in once:
            step = max(1.0, again.used_bytes / once.used_bytes)
            self._target_bytes = min(self._target_bytes + step * once[key], self.capacity_bytes)
            again.push(key, once.take(key))  # used twice, if it is stored now
        elif key in again:
            step = max(1.0, once.used_bytes / again.used_bytes)
            self._target_bytes = max(self._target_bytes - step * again[key], 0.0)
            again.move_to_end(key)

    def _on_add(self, key: PrefixKey) -> None:
        self._gone_once.discard(key)
        queue = self._again if self._gone_again.discard(key) else self._once
        queue.push(key, self._sizes[key])

    def _on_resize(self, key: PrefixKey, more_bytes: int) -> None:
        (self._once if key in self._once else self._again).resize(key, more_bytes)

    def _on_evict(self, key: PrefixKey) -> None:
        if key in self._once:
            self._gone_once.push(key, self._once.take(key))
        else:
            self._gone_again.push(key, self._again.take(key))
        while self._gone_once and self._once.used_bytes + self._gone_once.used_bytes > self.capacity_bytes:
            self._gone_once.pop_oldest()
        while self.num_ghosts and self._gone_once.used_bytes + self._gone_again.used_bytes > self.capacity_bytes:
            (self._gone_again or self._gone_once).pop_oldest()

    def _on_hold(self, key: PrefixKey) -> None:  # its uses are no misses, by which the target would move
        (self._once if key in self._once else self._again).take(key)

    def _on_remove(self, key: PrefixKey) -> None:
        for queue in (self._once, self._again, self._gone_once, self._gone_again):
            queue.discard(key)

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        once, again = iter(self._once), iter(self._again)
        once_bytes = self._once.used_bytes
        comes_again = newcomer in self._gone_again
        while True:
            above = once_bytes > self._target_bytes or (comes_again and once_bytes == self._target_bytes)
            key = next(once, None) if above else next(again, None)
            if key is None:
                break
            if above:
                once_bytes -= self._once[key]
            yield key
        yield from once
        yield from again
