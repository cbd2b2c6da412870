"""A storage behind a tier whose calls wait until the test lets them continue, or fail when the test says so.

A call takes effect when it continues, and in the namespace that the tier has then, as a server does with a message
that was long on its way.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from support.gate import HANG_GUARD_S
from support.rig import FakeTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.model.chunks import ByteArray, ChunkRef, Presence
    from kvstore.model.keys import Namespace
    from kvstore.model.layout import KVLayout
    from kvstore.tiers.base import Transfer

BEGINNING = 8  # bytes of a payload that tell it from others
OPERATIONS = ("put", "get", "more", "contains", "remove", "clear", "reset")  # "more": the layers behind the first ones


class GatedStore:
    """Store that all tiers over it share: the chunks of every namespace, and a gate for the calls. Thread-safe."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, dict[ChunkRef, bytes]] = {}
        self.damaged: set[ChunkRef] = set()
        self.stored: list[tuple[bytes, bytes]] = []  # namespace of each, and how the payload begins
        self.faults: Counter[str] = Counter()  # how many of the next calls fail
        self._held: set[str] = set()
        self._waiting: Counter[str] = Counter()
        self._changed = threading.Condition()

    def hold(self, operation: str) -> None:
        """Let calls wait from now on, before they do anything."""
        with self._changed:
            self._held.add(operation)

    def release(self, *operations: str) -> None:
        """Let the calls that wait continue, and all later ones."""
        with self._changed:
            self._held.difference_update(operations)
            self._changed.notify_all()

    def is_held(self, operation: str) -> bool:
        """Tell if calls wait."""
        return operation in self._held

    def wait_for(self, is_reached: Callable[[Counter[str]], bool]) -> bool:
        """Wait until as many calls wait as the test wants; False if they never do."""
        with self._changed:
            return self._changed.wait_for(lambda: is_reached(self._waiting), HANG_GUARD_S)

    def notice(self) -> None:
        """Let ``wait_for`` look again, because something else has changed."""
        with self._changed:
            self._changed.notify_all()

    def pass_by(self, operation: str) -> None:
        """Let a call pass, or wait if it must.

        Raises:
            TierError: the call was to fail.
        """
        with self._changed:
            fails = self.faults[operation] > 0
            self.faults[operation] -= fails
            self._waiting[operation] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: operation not in self._held, HANG_GUARD_S)
            self._waiting[operation] -= 1
        if fails:
            raise TierError(f"{operation} fails on purpose")


class GatedTier(FakeTier):
    """A tier over such a storage, in one of its namespaces."""

    def __init__(self, store: GatedStore, namespace: Namespace, layout: KVLayout, *, reads_layers: bool) -> None:
        super().__init__()
        self._store = store
        self._layout = layout
        self._reads_layers = reads_layers
        self._enter(namespace)

    @property
    def reads_layers(self) -> bool:
        return self._reads_layers

    def _enter(self, namespace: Namespace) -> None:
        self.namespace_id = namespace.id
        self.chunks = self._store.chunks.setdefault(namespace.id, {})

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        self._store.pass_by("contains")
        return super().contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._store.pass_by("get")
        return self._copy(transfers, None)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        self._store.pass_by("more" if layers.start else "get")
        return self._copy(transfers, layers)

    def _copy(self, transfers: Sequence[Transfer], layers: range | None) -> list[Outcome]:
        return [self._copy_one(transfer.ref, transfer.buffer, layers) for transfer in transfers]

    def _copy_one(self, ref: ChunkRef, buffer: ByteArray, layers: range | None) -> Outcome:
        with self._lock:
            payload = self.chunks.get(ref)
            if payload is not None and ref in self._store.damaged:
                del self.chunks[ref]
                return Outcome.CORRUPT
        if payload is None:
            return Outcome.MISS
        begin, end = 0, len(payload)
        if layers is not None:
            begin = self._layout.layer_range(layers.start, ref.num_blocks)[0]
            end = self._layout.layer_range(layers[-1], ref.num_blocks)[1]
        buffer[begin:end] = np.frombuffer(payload, np.uint8)[begin:end]
        return Outcome.HIT

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._store.pass_by("put")
        self._store.damaged.difference_update(transfer.ref for transfer in transfers)
        outcomes = super().put(transfers)
        for transfer, outcome in zip(transfers, outcomes, strict=True):
            if outcome is Outcome.STORED:
                assert self.namespace_id is not None
                self._store.stored.append((self.namespace_id, transfer.buffer[:BEGINNING].tobytes()))
        return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        self._store.pass_by("remove")
        super().remove(refs)

    def clear(self) -> None:
        self._store.pass_by("clear")
        super().clear()

    def reset(self, namespace: Namespace) -> None:
        with self._lock:
            before = self.chunks
            self._enter(namespace)
        self._store.pass_by("reset")  # can only fail to discard the old ones
        with self._lock:
            before.clear()
