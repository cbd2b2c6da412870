"""Slots of the memory shared with Mooncake's process, each for one chunk on its way.

A slot is never given to another chunk while a call runs on it: Mooncake's reads write late, and its writes read late.
One whose caller has given up is *held*, until the call itself has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvstore.model.chunks import ByteArray


class Slots:
    """Slots in a row. Thread-safe.

    Args:
        memory: of all of them.
        slot_bytes: of each.
    """

    def __init__(self, memory: ByteArray, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._number = len(memory) // slot_bytes
        self._free = list(reversed(range(self._number)))  # the last one used is taken first, as it is in the caches
        self._changed = threading.Condition()
        self._held = 0
        self._lost: set[int] = set()

    @property
    def held(self) -> int:
        """Number of slots that wait for the end of a call whose caller has given up."""
        return self._held

    @property
    def are_scarce(self) -> bool:
        """True if half of them are held, and the rest should not join them."""
        return 2 * self._held >= self._number

    def take(self, most: int, timeout_s: float) -> list[int]:
        """Return up to ``most`` slots as soon as there is one; none if time ran out, or they become scarce."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self.are_scarce, timeout_s)
            if self.are_scarce:
                return []
            return [self._free.pop() for _ in range(min(most, len(self._free)))]

    def give_back(self, numbers: Sequence[int]) -> None:
        """Give slots back on which no call runs; those that are lost are not free again."""
        with self._changed:
            self._free.extend(number for number in numbers if number not in self._lost)
            self._changed.notify_all()

    def hold(self, numbers: Sequence[int], call: Future[Any]) -> None:
        """Give slots back once the call has ended that runs on them."""
        with self._changed:
            self._held += len(numbers)
            self._changed.notify_all()

        def release(_: object) -> None:
            with self._changed:
                self._held -= len(numbers)
            self.give_back(numbers)

        call.add_done_callback(release)  # at once if it has just ended

    def lose(self, numbers: Sequence[int]) -> None:
        """Hold slots for good, as a transfer may write to them at any time."""
        with self._changed:
            self._held += len(numbers)
            self._lost.update(numbers)
            self._changed.notify_all()

    def view(self, number: int) -> ByteArray:
        """Return the memory of a slot."""
        return self._memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def offset(self, number: int) -> int:
        """Return the offset of a slot from the first one."""
        return number * self._slot_bytes
