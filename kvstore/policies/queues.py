"""Queue of sized keys, used by the policies with fixed rules."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.keys import PrefixKey


class SizedQueue(OrderedDict[PrefixKey, int]):
    """Keys with their sizes, oldest first, and the sum of the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.used_bytes = 0

    def push(self, key: PrefixKey, size_bytes: int) -> None:
        """Add a key as the newest."""
        self[key] = size_bytes
        self.used_bytes += size_bytes

    def take(self, key: PrefixKey) -> int:
        """Remove a key and return its size."""
        size_bytes = self.pop(key)
        self.used_bytes -= size_bytes
        return size_bytes

    def discard(self, key: PrefixKey) -> bool:
        """Remove a key if present; returns True if it was."""
        if key not in self:
            return False
        self.take(key)
        return True

    def pop_oldest(self) -> None:
        """Remove the oldest key."""
        self.take(next(iter(self)))

    def resize(self, key: PrefixKey, more_bytes: int) -> None:
        """Correct the size of a key without moving it."""
        self[key] += more_bytes
        self.used_bytes += more_bytes
