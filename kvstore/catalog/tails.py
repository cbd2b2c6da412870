"""The tails of chunks, which go once their whole chunk is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.catalog.entries import NO_FILE, WRITING, Entries, Entry
from kvstore.catalog.leases import Leases
from kvstore.catalog.plans import StoreStep
from kvstore.catalog.sequence import superseded_tails
from kvstore.catalog.uses import Uses
from kvstore.keys import PrefixHasher


@dataclass(frozen=True, eq=False)
class Tails:
    """Knows which tails a chunk supersedes.

    Attributes:
        chunks, leases, uses: the parts of the index.
    """

    chunks: Entries
    leases: Leases
    uses: Uses

    def note(self, steps: Iterable[StoreStep], hasher: PrefixHasher) -> None:
        """Whole chunks of a sequence are about to be stored: note the tails that they supersede."""
        for key, tails in superseded_tails(hasher, {step.ref.prefix_key for step in steps}).items():
            self.chunks[key].tails = tails

    def supersede(self, chunk: Entry) -> None:
        """Forget the tails of a chunk that has just been stored.

        A tail on disk stays until its whole chunk is there too, or a crash in between would lose both. One that is
        leased stays: it goes in its turn, like any other chunk.
        """
        if not self.chunks.is_known(chunk.ref.prefix_key):  # it was removed meanwhile
            return
        chunk.tails = tuple(key for key in chunk.tails if self.chunks.is_known(key))
        if chunk.disk is WRITING:
            return
        tails, chunk.tails = chunk.tails, ()
        for key in tails:
            tail = self.chunks[key]
            if key in self.leases or (chunk.expires_s is not None and tail.expires_s is None):
                continue  # held, or there for longer
            if chunk.on_disk or tail.disk is NO_FILE:
                self.chunks.counters.superseded_tails += 1
                self.uses.remove(tail)
