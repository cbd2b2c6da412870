"""Which chunk goes first when room is needed.

A policy orders keys; it knows neither sizes nor leases. Whoever evicts walks ``oldest_first`` and takes what it may.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvstore.keys import PrefixKey


class LRU:
    """Least recently used first.

    Chains are touched from their end to their head, so that a chunk always goes before the prefix it hangs on.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[PrefixKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._order

    def add(self, key: PrefixKey) -> None:
        """Start to order a key, as the one used last."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch_chain(self, keys: Iterable[PrefixKey]) -> None:
        """Note that a chain was used; ``keys`` come head first, unknown ones are skipped."""
        for key in reversed(list(keys)):
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, key: PrefixKey) -> None:
        """Stop ordering a key; unknown ones are ignored."""
        self._order.pop(key, None)

    def oldest_first(self) -> Iterator[PrefixKey]:
        """All keys in the order in which they should go. The policy must not change while this is walked."""
        return iter(self._order)
