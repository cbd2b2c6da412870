"""LRU: evicts the least recently used chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy


class LRU(Policy):
    """Evicts the least recently used first; admits everything, and remembers no evicted keys.

    Chains are touched from their end to their head, so that a chunk is evicted before the prefix it depends on.
    """

    name = "LRU"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._recency: OrderedDict[PrefixKey, None] = OrderedDict()

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return 0

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:  # noqa: ARG002 - unused
        for key in reversed(chain):
            if key in self._recency:
                self._recency.move_to_end(key)

    def _on_add(self, key: PrefixKey) -> None:
        self._recency[key] = None

    def _on_evict(self, key: PrefixKey) -> None:
        del self._recency[key]

    def _on_remove(self, key: PrefixKey) -> None:
        self._recency.pop(key, None)

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:  # noqa: ARG002 - newcomers always win
        yield from self._recency
