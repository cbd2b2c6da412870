"""Completion of loads: chunks that arrived become readable, and failed ones are forgotten or marked."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvstore.catalog.entries import LOADING, NO_FILE, READY, SENT, STORED, THERE, UNREAD, Entries, Entry
from kvstore.catalog.leases import Uses
from kvstore.catalog.plans import LoadStep, MissReason, Place
from kvstore.catalog.slots import Slots
from kvstore.catalog.writes import RemoteSends
from kvstore.keys import PrefixKey


@dataclass(frozen=True, eq=False)
class Loads:
    """Takes the results of loads.

    Attributes:
        chunks, slots, remote, uses: the parts of the index.
    """

    chunks: Entries
    slots: Slots
    remote: RemoteSends
    uses: Uses

    def complete(
        self, steps: Iterable[LoadStep], failed: AbstractSet[PrefixKey], lost: AbstractSet[PrefixKey], now_s: float
    ) -> None:
        """Take the results of loads. Chunks in ``failed`` did not arrive; those also in ``lost`` are forgotten."""
        for step in steps:
            chunk = self.chunks[step.ref.prefix_key]
            if step.ref.prefix_key in failed:
                self._fail(chunk, step, now_s, is_lost=step.ref.prefix_key in lost)
            else:
                self._take_in(chunk, step)
            self.uses.end(chunk)

    def note_arrival(self, step: LoadStep) -> None:
        """Mark a chunk as readable from its slot. Its use continues, as the copy to the blocks may be pending."""
        chunk = self.chunks[step.ref.prefix_key]
        if chunk.memory is LOADING and chunk.slot == step.slot:
            self._take_in(chunk, step)

    def _take_in(self, chunk: Entry, step: LoadStep) -> None:
        if step.source is Place.MEMORY or chunk.forgotten or self._has_arrived(chunk, step):
            return
        chunk.memory = READY
        if chunk.disk is UNREAD:
            chunk.disk = STORED
        if step.source is Place.REMOTE and step.holder is None and chunk.remote is not SENT:
            chunk.remote = THERE
        self.chunks.note_change(chunk)
        self.uses.supersede(chunk)

    @staticmethod
    def _has_arrived(chunk: Entry, step: LoadStep) -> bool:
        return step.source is not Place.MEMORY and chunk.memory is READY and chunk.slot == step.slot

    def _fail(self, chunk: Entry, step: LoadStep, now_s: float, *, is_lost: bool) -> None:
        self.chunks.counters.failed_loads += 1
        if self._has_arrived(chunk, step):
            return  # only its way to the blocks failed
        if step.source is Place.REMOTE:
            self._fail_remote(chunk, step, now_s)
            return
        # The slot lacks its chunk's bytes. If it has changed since, the load only waited for a read that failed.
        is_mislabelled = step.source is Place.MEMORY and chunk.in_memory and chunk.slot == step.slot
        if is_lost or is_mislabelled:
            self.chunks.counters.lost_chunks += not chunk.forgotten
            self.chunks.note_gone(chunk, MissReason.LOST)
            self.uses.forget(chunk)
        elif step.source is Place.DISK:
            chunk.disk = UNREAD
            self.slots.drop(chunk)

    def _fail_remote(self, chunk: Entry, step: LoadStep, now_s: float) -> None:
        """Note a chunk as missing at the remote tier or not to be read there soon. A copy on disk is kept."""
        if self.remote.view is not None:
            self.remote.view.deny([step.read], now_s)
        if chunk.forgotten:
            return
        if chunk.disk is NO_FILE:
            self.uses.forget(chunk)
        else:
            self.slots.drop(chunk)
