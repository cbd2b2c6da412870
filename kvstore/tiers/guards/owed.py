"""Chunks that a tier must still forget: removals that failed, or that nobody could carry out.

What keeps their order with puts:

- A chunk that is owed is not there for whoever asks, though the tier may still have it.
- A put that has succeeded ends what is owed; one that fails leaves it as it was, as the old bytes may still be there.
- While a removal is under way, or was given up and may yet take effect, its chunks cannot be put: it would take them.
- While a chunk is being put, what is owed of it waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.chunks import ChunkRef


class OwedRemovals:
    """The removals that one tier owes, and what is under way. Thread-safe; nothing here waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: dict[ChunkRef, None] = {}  # in order
        self._leaving: Counter[ChunkRef] = Counter()
        self._putting: Counter[ChunkRef] = Counter()

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, ref: ChunkRef) -> bool:
        return ref in self._owed

    def refs(self) -> tuple[ChunkRef, ...]:
        """All that is owed now."""
        with self._lock:
            return tuple(self._owed)

    def hidden(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Those of some chunks that must not be read: they were removed, whatever the tier may still have."""
        if not self._owed and not self._leaving:
            return set()
        with self._lock:
            return {ref for ref in refs if ref in self._owed or ref in self._leaving}

    def owe(self, refs: Iterable[ChunkRef]) -> None:
        """Note removals that nobody carries out now."""
        with self._lock:
            self._owed.update(dict.fromkeys(refs))

    def forget(self, refs: Sequence[ChunkRef]) -> None:
        """They have gone some other way."""
        with self._lock:
            for ref in refs:
                self._owed.pop(ref, None)

    def begin_removal(self, refs: Iterable[ChunkRef]) -> tuple[ChunkRef, ...]:
        """Take up a removal: what is to be removed with it. To be ended by ``end_removal``."""
        with self._lock:
            going = {ref: None for ref in self._owed if ref not in self._putting} | dict.fromkeys(refs)
            for ref in going:
                self._owed.pop(ref, None)
            self._leaving.update(going.keys())
            return tuple(going)

    def end_removal(self, refs: Iterable[ChunkRef]) -> None:
        """A removal does nothing any more. If it has failed, ``owe`` comes first."""
        with self._lock:
            _subtract(self._leaving, refs)

    def begin_put(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Take up a put; those of its chunks that cannot be put now. The others are to be ended by ``end_put``."""
        with self._lock:
            wanted = set(refs)
            refused = {ref for ref in wanted if ref in self._leaving}
            self._putting.update(wanted - refused)
            return refused

    def end_put(self, refs: Iterable[ChunkRef], stored: Iterable[ChunkRef]) -> None:
        """A put has ended, and the tier has new bytes of what it has ``stored``."""
        with self._lock:
            _subtract(self._putting, refs)
            for ref in stored:
                self._owed.pop(ref, None)


def _subtract(counts: Counter[ChunkRef], refs: Iterable[ChunkRef]) -> None:
    for ref in refs:
        counts[ref] -= 1
        if counts[ref] <= 0:
            del counts[ref]
