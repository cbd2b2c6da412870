"""Owed removals: chunks that a tier must still remove, because a removal failed or the tier was bypassed.

They are ordered with puts as follows:

- While the removal of a chunk is owed, it cannot be read, although the tier may still hold it.
- A put that succeeds settles the removal; one that fails does not, as the old bytes may still be stored.
- While a removal is under way, or timed out and may still take effect, its chunks cannot be put, or it would remove
  them.
- While a chunk is being put, its owed removal waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.chunks import ChunkRef


class OwedRemovals:
    """Removals that one tier owes, and the removals and puts under way. Thread-safe; no call waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: dict[ChunkRef, None] = {}  # in order
        self._leaving: Counter[ChunkRef] = Counter()
        self._putting: Counter[ChunkRef] = Counter()

    def __len__(self) -> int:
        return len(self._owed)

    def refs(self) -> tuple[ChunkRef, ...]:
        """Return all chunks whose removal is owed now."""
        with self._lock:
            return tuple(self._owed)

    def hidden(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Return the chunks among ``refs`` that must not be read, because they were removed."""
        if not self._owed and not self._leaving:
            return set()
        with self._lock:
            return {ref for ref in refs if ref in self._owed or ref in self._leaving}

    def owe(self, refs: Iterable[ChunkRef]) -> None:
        """Record removals that are not carried out now."""
        with self._lock:
            self._owed.update(dict.fromkeys(refs))

    def forget(self, refs: Sequence[ChunkRef]) -> None:
        """Settle removals of chunks that were removed in another way."""
        with self._lock:
            for ref in refs:
                self._owed.pop(ref, None)

    def begin_removal(self, refs: Iterable[ChunkRef]) -> tuple[ChunkRef, ...]:
        """Begin a removal; returns the chunks to remove, including owed ones. End it with ``end_removal``."""
        with self._lock:
            going = {ref: None for ref in self._owed if ref not in self._putting} | dict.fromkeys(refs)
            for ref in going:
                self._owed.pop(ref, None)
            self._leaving.update(going.keys())
            return tuple(going)

    def end_removal(self, refs: Iterable[ChunkRef]) -> None:
        """End a removal that can no longer take effect. If it failed, call ``owe`` first."""
        with self._lock:
            self._leaving -= Counter(refs)

    def begin_put(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Begin a put. Returns the chunks that cannot be put now; end the put of the others with ``end_put``."""
        with self._lock:
            wanted = set(refs)
            refused = {ref for ref in wanted if ref in self._leaving}
            self._putting.update(wanted - refused)
            return refused

    def end_put(self, refs: Iterable[ChunkRef], stored: Iterable[ChunkRef]) -> None:
        """End a put, which settles the removal of the chunks that it has ``stored``."""
        with self._lock:
            self._putting -= Counter(refs)
            for ref in stored:
                self._owed.pop(ref, None)
