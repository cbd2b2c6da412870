"""Requests whose KV is sent to another engine, with the chunks to send next and those known to have arrived."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.adapters.vllm.requests.pieces import Piece, pieces_of
from kvstore.adapters.vllm.requests.rows import RowMap, StatesOf, TablesOf
from kvstore.adapters.vllm.requests.tracker import RequestTracker, SaveRules, chunks_of
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.handover.tracker import PushJob, Settled
from kvstore.model.keys import PrefixHasher
from kvstore.protocol.progress import ALL_TOKENS


@dataclass
class _Outgoing:
    """Hand-over of one request.

    Attributes:
        spec: the destination.
        wants_first_token: its answer names that token.
        useful_tokens: tokens of the prompt up to the first chunk that was left out.
        number: number of the hand-over; None until something is sent.
        num_chunks: chunks given to the workers so far.
        is_complete: its tail was given to them, too.
        checkpoints: tokens of the checkpoints that were sent, the last one last; None for a model without.
        awaited: by the token at which a chunk begins, the ranks that have not confirmed it.
        lost_tokens: the token at which the first chunk begins that does not arrive.
    """

    spec: DisaggSpec
    wants_first_token: bool
    useful_tokens: int
    number: int | None = None
    num_chunks: int = 0
    is_complete: bool = False
    checkpoints: list[int] | None = None
    awaited: Counter[int] = field(default_factory=Counter)
    lost_tokens: int = ALL_TOKENS

    def usable(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` a hit can bring."""
        if self.checkpoints is None:
            return num_tokens
        return max((end for end in self.checkpoints if end <= num_tokens), default=0)


class Kept(NamedTuple):
    """Place of the KV that an engine saves: the engine itself, or else a tier that others share with it."""

    own: tuple[str, int] | None = None
    shared: str | None = None


NOWHERE: Final = Kept()


class OutgoingHandovers:
    """Hand-overs from one engine. For the scheduler's thread.

    Attributes:
        num_ranks: number of workers that send.

    Args:
        rules: the sizes of blocks and chunks.
        plans: has the next plan.
    """

    def __init__(self, rules: SaveRules, plans: StepTracker) -> None:
        self.num_ranks = 1
        self._rules = rules
        self._handovers: dict[str, _Outgoing] = {}
        self._plans = plans
        self._name = secrets.token_hex(8)
        self._following = 0
        self._by_number: dict[int, _Outgoing] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests."""
        return iter(self._handovers)

    def begin(self, tracker: RequestTracker, spec: DisaggSpec, *, wants_first_token: bool) -> None:
        """Start to hand a request's prompt over."""
        request = tracker.request
        self._handovers[request.request_id] = _Outgoing(spec, wants_first_token, request.num_prompt_tokens)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        handover = self._handovers.pop(request_id, None)
        if handover is not None:
            self._end_number(handover)

    def plan(
        self,
        tracker: RequestTracker,
        num_scheduled_tokens: int,
        tables_of: TablesOf,
        rows: RowMap,
        states_of: StatesOf,
    ) -> None:
        """Add to the next plan the pieces of a prompt that the coming step of ``num_scheduled_tokens`` completes."""
        request = tracker.request
        handover = self._handovers.get(request.request_id)
        if handover is None or handover.is_complete:
            return
        # Up to its last whole block: a state that a step leaves there is gone with the next.
        prompt_tokens = hit_tokens(tracker, self._rules, request.num_prompt_tokens)
        written_tokens = request.num_computed_tokens + num_scheduled_tokens
        is_complete = written_tokens >= prompt_tokens
        limit_tokens = min(written_tokens, prompt_tokens)
        tracker.hasher.update(request.all_token_ids)
        tail_tokens = prompt_tokens if is_complete else 0
        chunks = chunks_of(tracker.hasher, self._rules, handover.num_chunks, limit_tokens, tail_tokens)
        handover.num_chunks = max(handover.num_chunks, limit_tokens // self._rules.chunk_tokens)
        handover.is_complete = is_complete
        if rows.checkpoints is not None and handover.checkpoints is None:
            handover.checkpoints = []
        if chunks is not None:
            tables = tables_of(request.request_id)
            steps_tokens = (request.num_computed_tokens, written_tokens)
            states = rows.states_at(tables, steps_tokens, states_of(request.request_id))
            chunks = replace(chunks, marks=(prompt_tokens,))
            self._push(tracker, handover, rows, pieces_of(rows, chunks, tables, states))
        if is_complete and handover.number is not None:
            self._plans.next.ended_handovers.append(handover.number)

    def _push(self, tracker: RequestTracker, handover: _Outgoing, rows: RowMap, pieces: Iterable[Piece]) -> None:
        """Add pieces to the next plan."""
        number, request_id = self._number(handover), tracker.request.request_id
        meta = self._plans.meta(request_id)
        meta.receiver = handover.spec
        ttl_s = tracker.params.ttl_s
        until_s = None if ttl_s is None else time.time() + ttl_s
        for piece in pieces:
            begin_tokens = piece.begin * self._rules.block_tokens
            if piece.rows is None:  # it has left a sliding window
                handover.useful_tokens = min(handover.useful_tokens, begin_tokens)
                continue
            # Where hits end at checkpoints, parts of chunks are never requested.
            trail = _trail_of(tracker.hasher, piece) if rows.checkpoints is None else b""
            is_needed = not piece.checkpoint
            meta.pushes.append(PushJob(piece.ref, piece.rows, number, begin_tokens, is_needed, trail, until_s))
            handover.awaited[begin_tokens] += self.num_ranks
            needs_nothing = rows.checkpoints is not None and not rows.checkpoints.rows(piece.end_tokens)
            if handover.checkpoints is not None and (piece.checkpoint or needs_nothing):
                handover.checkpoints.append(piece.end_tokens)

    def _number(self, handover: _Outgoing) -> int:
        """Return the number of a hand-over, which begins now if it has none."""
        if handover.number is None:
            handover.number, self._following = self._following, self._following + 1
            self._by_number[handover.number] = handover
            handover.spec = replace(handover.spec, sender=self._name, handover=handover.number)
        return handover.number

    def restart(self) -> None:
        """Send all chunks again, as some were computed on garbage; those that have arrived are left out then."""
        for request_id, handover in self._handovers.items():
            self._end_number(handover)
            self._handovers[request_id] = _Outgoing(handover.spec, handover.wants_first_token, handover.useful_tokens)

    def note_settled(self, settled: Settled) -> None:
        """Process the outcomes of chunks that were handed over."""
        for (number, begin_tokens), count in settled.arrived.items():
            if (handover := self._by_number.get(number)) is not None:
                handover.awaited[begin_tokens] -= count
        for number, begin_tokens in settled.lost.items():
            if (handover := self._by_number.get(number)) is not None:
                handover.lost_tokens = min(handover.lost_tokens, begin_tokens)

    def _end_number(self, handover: _Outgoing) -> None:
        """Send nothing more of a hand-over."""
        if handover.number is not None:
            del self._by_number[handover.number]
            if not handover.is_complete:
                self._plans.next.ended_handovers.append(handover.number)

    def answer(self, tracker: RequestTracker, kept: Kept, *, first_token: int | None) -> dict[str, object] | None:
        """Return ``kv_transfer_params`` for a request's answer; None if it is not handed over.

        Chunks that do not arrive can be read where they are ``kept``.
        """
        request = tracker.request
        handover = self._handovers.get(request.request_id)
        if handover is None:
            return None
        computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens) if handover.is_complete else 0
        useful_tokens = min(computed_tokens, handover.useful_tokens)
        arriving_tokens = min(useful_tokens, handover.lost_tokens)
        coming_tokens = useful_tokens if any(kept) else arriving_tokens
        coming_tokens = handover.usable(coming_tokens - coming_tokens % self._rules.block_tokens)
        awaited_tokens = min((begin for begin, ranks in handover.awaited.items() if ranks > 0), default=ALL_TOKENS)
        spec = replace(
            handover.spec,
            num_transferred_tokens=handover.usable(min(coming_tokens, arriving_tokens, awaited_tokens)),
            num_coming_tokens=coming_tokens,
            kept_host=kept.own[0] if kept.own is not None else None,
            kept_port=kept.own[1] if kept.own is not None else None,
            kept_url=kept.shared if kept.own is None else None,
            is_last_prefill=handover.is_complete,
        )
        answer: dict[str, object] = {"disagg_spec": spec.as_params()} if coming_tokens else {}
        if handover.wants_first_token and first_token is not None:
            answer["first_tok"] = first_token
        return answer


def hit_tokens(tracker: RequestTracker, rules: SaveRules, num_tokens: int) -> int:
    """Return how many of ``num_tokens`` elsewhere a hit of a prompt can bring, in whole blocks."""
    num_tokens = max(0, min(num_tokens, tracker.request.num_prompt_tokens - rules.spares_last_token))
    return num_tokens - num_tokens % rules.block_tokens


def _trail_of(hasher: PrefixHasher, piece: Piece) -> bytes:
    """Return the keys at the ends of a chunk's blocks; none for a chunk of one block, which its own key names."""
    if piece.ref.num_blocks == 1:
        return b""
    return b"".join(hasher.block_keys(piece.begin // hasher.blocks_per_chunk)[: piece.ref.num_blocks])
