"""Read-only tier of chunks stored by engines of another tensor-parallel size, split and joined by KV head."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.memory.scratch import Scratch
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence, in_all
from kvstore.model.heads import Division
from kvstore.model.layout import ALIGNMENT_BYTES, round_up
from kvstore.tiers.asking import Question, contains, look
from kvstore.tiers.base import Tier, Transfer, payload_view, start_closing
from kvstore.tiers.foreign import ForeignTier


class ReshardedTier(ForeignTier):
    """Tier that reads a chunk of ours from the parts that hold its heads, one after the other. Thread-safe.

    A chunk is found if all its parts are. The tier is read-only; callers track removals themselves.

    Args:
        division: the other engine's division of our heads.
        tiers: one for each part, opened for its namespace. ``close`` closes them.
        timeout_s: longest wait of a read for a buffer; there are few, each as long as the longest part.
    """

    name = "resharded"

    def __init__(self, division: Division, tiers: Sequence[Tier], timeout_s: float) -> None:
        super().__init__(division.layout)
        self._division = division
        self._parts = tuple(zip(division.parts, tiers, strict=True))
        self._scratch = Scratch(division.part_bytes, timeout_s)

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if all parts hold theirs. Each part is only asked about chunks that all before it hold.

        Raises:
            TierError: a part's storage failed.
        """
        return self._held(refs, contains)

    def look(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Look up like ``contains``, for a prompt.

        Raises:
            TierError: a part's storage failed.
        """
        return self._held(refs, look)

    def _held(self, refs: Sequence[ChunkRef], question: Question) -> list[Presence]:
        self._check_open()
        held: dict[ChunkRef, Presence] = dict.fromkeys(refs, True)
        for _, tier in self._parts:
            if held:
                told = zip(held.items(), question(tier, [*held]), strict=True)
                held = {ref: in_all((before, presence)) for (ref, before), presence in told if presence}
        return [held.get(ref, False) for ref in refs]

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return the trails that the first part names; the others may lack those chunks, which ``contains`` shows.

        Raises:
            TierError: its storage failed.
        """
        self._check_open()
        return self._parts[0][1].nearest(trails)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them.

        Raises:
            TierError: a part's storage failed, or all buffers were in use for too long.
        """
        payloads = [payload_view(self._division.layout, transfer) for transfer in transfers]
        self._check_open()
        pairs = zip(transfers, payloads, strict=True)
        return [self.counters.count(self._get(transfer.ref, payload), len(payload)) for transfer, payload in pairs]

    def close(self) -> None:
        """Close the tiers of all parts; waits for the slowest."""
        super().close()
        for closing in start_closing([tier for _, tier in self._parts]):
            closing.join()

    def _get(self, ref: ChunkRef, payload: ByteArray) -> Outcome:
        for part, tier in self._parts:
            with self._scratch.borrowed() as scratch:
                need_bytes = round_up(part.layout.payload_bytes(ref.num_blocks), ALIGNMENT_BYTES)
                (outcome,) = tier.get([Transfer(ref, scratch[:need_bytes])])
                if outcome is not Outcome.HIT:
                    return outcome
                self._division.take(part, scratch, payload, ref.num_blocks)
        return Outcome.HIT
