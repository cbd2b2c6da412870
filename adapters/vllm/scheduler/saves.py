"""Plans the stores of each step and their write-behind, and follows them until every rank has reported."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvstore.adapters.vllm.plan import Written
from kvstore.adapters.vllm.requests.pieces import Piece, pieces_of
from kvstore.adapters.vllm.requests.rows import NO_STATES, RowMap, States, Tables
from kvstore.adapters.vllm.requests.tracker import RequestTracker, SaveSpec
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, StoreStep
from kvstore.model.history import Cause
from kvstore.model.keys import PrefixKey
from kvstore.model.lifetime import clock_ahead_s
from kvstore.transfer.mover import StoreJob, as_block_ids

_NO_BLOCKS: Final = as_block_ids([])


@dataclass
class _Write:
    """A write-behind that some ranks have not reported yet."""

    ranks_left: int
    stored: bool = True
    in_vain: bool = False  # its chunk failed on another rank, and cannot be stored again until this ends
    left_behind: bool = False  # stored by at least one rank
    size_bytes: int = 0  # the most that it takes on any rank
    is_full: bool = False  # a rank's tier had no room


class SavePlanner:
    """Planner of an engine's stores. For the scheduler's thread.

    Args:
        index: of all chunks.
        num_ranks: number of ranks that report each store and each write.
        rows: maps block tables to rows.
        plans: has the next plan.
    """

    def __init__(self, index: ChunkIndex, num_ranks: int, rows: RowMap, plans: StepTracker) -> None:
        self._index = index
        self._num_ranks = num_ranks
        self._rows = rows
        self._plans = plans
        self._in_flight: dict[int, dict[str, list[StoreStep]]] = {}  # by step, the next included, and request
        self._writes: dict[tuple[Place, PrefixKey], _Write] = {}

    @property
    def has_coming(self) -> bool:
        """True if the next plan will store something."""
        return self._plans.next.number in self._in_flight

    def is_coming(self, req_id: str) -> bool:
        """Tell if the next plan stores something of a request."""
        return req_id in self._in_flight.get(self._plans.next.number, ())

    def is_storing(self, req_id: str) -> bool:
        """Tell if the next step, or one in flight, stores something of a request."""
        return any(req_id in stores for stores in self._in_flight.values())

    def plan(self, tracker: RequestTracker, save: SaveSpec, tables: Tables, states: States = NO_STATES) -> int:
        """Add a request's new chunks to the next plan and return their number: 0 if all are known or there is no room.

        Chunks whose blocks the request no longer has, or never had, are left out, and so are checkpoints.
        """
        req_id = tracker.request.request_id
        pieces = list(pieces_of(self._rows, save, tables, states))
        sources = {piece.ref: piece.rows for piece in pieces if piece.rows is not None}
        left_out = takewhile(lambda piece: piece.rows is None, pieces)
        before = [*save.prefix, *(piece.ref.prefix_key for piece in left_out)]
        # A tail is not superseded where its checkpoint may be the only one: a prompt that ends there would miss.
        steps = self._index.prepare_store(
            list(sources),
            before,
            hasher=tracker.hasher,
            by_blocks=self._rows.checkpoints is None,
            ttl_s=tracker.params.ttl_s,
            noted=tracker.noted,
            checkpoints={piece.checkpoint for piece in pieces if piece.checkpoint},
        )
        self._supersede(tracker, pieces)
        tracker.noted.update(piece.ref.prefix_key for piece in pieces)
        if not steps:
            return 0
        meta, ahead_s = self._plans.meta(req_id), clock_ahead_s()
        self._in_flight.setdefault(self._plans.next.number, {}).setdefault(req_id, []).extend(steps)
        for step in steps:
            # A chunk that is written in place of a tail is read from memory, and not from this request's blocks.
            meta.stores.append(StoreJob(step.later(ahead_s), sources.get(step.ref, _NO_BLOCKS)))
            for target in step.targets:
                self._writes[target, step.ref.prefix_key] = _Write(self._num_ranks)
        return len(steps)

    def _supersede(self, tracker: RequestTracker, pieces: Sequence[Piece]) -> None:
        """Keep only the last of the checkpoints behind a request's prompt, as the next turn continues from there."""
        behind = tracker.request.num_prompt_tokens
        for piece in pieces:
            if not piece.checkpoint or not all(ref.prefix_key in self._index for ref in piece.checkpoint):
                continue  # without room for it, the previous one is better than none
            tracker.checkpoint_tokens = max(tracker.checkpoint_tokens, piece.end_tokens)
            if piece.end_tokens > behind and piece.checkpoint != tracker.decoded:
                self._index.remove((ref.prefix_key for ref in tracker.decoded), Cause.REPLACED)
                tracker.decoded = piece.checkpoint

    def end_with(self, req_id: str) -> None:
        """Make the workers report the end of the last store of a request that has ended."""
        self._plans.meta(req_id).finished = True

    def complete_step(self, number: int, failed_keys: AbstractSet[PrefixKey], *, distrusted: bool) -> None:
        """Complete the stores of a step, which every rank has ended; if it is ``distrusted``, all of them failed."""
        for steps in self._in_flight.pop(number, {}).values():
            keys = {step.ref.prefix_key for step in steps}
            failed = keys if distrusted else keys & failed_keys
            self._index.complete_store(steps, failed)
            self._note_in_vain(steps, failed)

    def complete_write(self, written: Written) -> bool:
        """Note that a rank has ended a write. Return True if its chunk, which had failed, may be offered again now."""
        target, ref, stored, size_bytes, is_full = written
        write = self._writes[target, ref.prefix_key]
        write.ranks_left -= 1
        write.stored &= stored
        write.left_behind |= stored
        write.size_bytes = max(write.size_bytes, size_bytes or 0)
        write.is_full |= is_full
        if write.ranks_left:
            return False
        del self._writes[target, ref.prefix_key]
        self._index.complete_write(
            ref.prefix_key,
            target,
            stored=write.stored,
            size_bytes=write.size_bytes or None,
            is_full=write.is_full,
        )
        if target is Place.DISK and write.left_behind and not write.stored:
            self._plans.next.removals.append(ref)  # some ranks only have their part
        return write.in_vain

    def cancel_coming(self) -> None:
        """Fail the coming stores of ended requests, which the workers would carry out after they have cleared."""
        for req_id, steps in self._in_flight.pop(self._plans.next.number, {}).items():
            self._plans.meta(req_id).stores = []
            for step in steps:
                self._index.complete_store([step], {step.ref.prefix_key})
                for target in step.targets:
                    del self._writes[target, step.ref.prefix_key]
                    self._index.complete_write(step.ref.prefix_key, target, stored=False)

    def _note_in_vain(self, steps: Sequence[StoreStep], failed: AbstractSet[PrefixKey]) -> None:
        """Note the writes, still in flight on some ranks, of chunks that failed on another."""
        for step in steps:
            for target in step.targets if step.ref.prefix_key in failed else ():
                if write := self._writes.get((target, step.ref.prefix_key)):
                    write.in_vain = True
