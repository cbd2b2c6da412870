"""Offers of stored KV to requests: looked up in all tiers, cut to what is worth loading, and promised."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, WaitsFor
from kvstore.adapters.vllm.scheduler.canary import Canary
from kvstore.adapters.vllm.scheduler.choice import LoadChoice
from kvstore.adapters.vllm.scheduler.handovers import Handovers
from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.parts import overlapping
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Match, Place


@dataclass(eq=False)
class Matching:
    """Offers to an engine's requests, for which vLLM may ask several times. For the scheduler's thread.

    Attributes:
        options: limits of what is worth loading.
        index: the index of all chunks.
        remote: lookups at the remote tier.
        loads: knows which loads are in flight.
        choice: chooses how to load, if at all.
        handovers: knows the KV that other engines have promised.
        canary: samples hits that are computed nevertheless.
        running: requests of the last step that have not ended.
    """

    options: SchedulerOptions
    index: ChunkIndex
    remote: RemoteLookup
    loads: LoadPlanner
    choice: LoadChoice
    handovers: Handovers
    canary: Canary
    running: set[str] = field(default_factory=set)

    def offer(self, tracker: RequestTracker, num_local_tokens: int, *, enabled: bool) -> int | None:
        """Return the tokens promised beyond vLLM's own ``num_local_tokens``; None if vLLM must ask again."""
        request, hasher = tracker.request, tracker.hasher
        is_barred = tracker.params.skip_load or tracker.load_failed or not enabled
        if not is_barred and self._waits_still(tracker, num_local_tokens):
            return None
        hasher.update(request.all_token_ids)
        if self.loads.rests_on_unverified(tracker, num_local_tokens):
            return None
        if is_barred:
            return 0
        if self.handovers.waits.asked_just_now(request.request_id):
            return None
        match = self._lookup(tracker, num_local_tokens)
        if match is None or self._waits_for_more(tracker, match, num_local_tokens):
            return None
        if self.loads.has_chunks:  # only chunks show how far others had the same tokens
            tracker.parted_tokens = match.chunk_tokens - match.chunk_tokens % hasher.chunk_tokens
        spec = self._usable(tracker, match, num_local_tokens)
        if spec.num_external_tokens and self._is_verified(tracker, match, num_local_tokens):
            spec = replace(spec, num_external_tokens=0)
        tracker.stats.answered(match, spec.num_external_tokens)
        return self._promise(tracker, spec) if spec.num_external_tokens else 0

    def _waits_still(self, tracker: RequestTracker, num_local_tokens: int) -> bool:
        """Tell if the reason for a request's wait still holds, so that no lookup is needed. Takes at most 5 us."""
        waits, request = tracker.waits_for, tracker.request
        if waits is not None:
            is_asked_again = (waits.num_tokens, waits.num_local_tokens) == (request.num_tokens, num_local_tokens)
            if is_asked_again and self.loads.is_coming(waits.key):
                return True
            tracker.waits_for = None
        return self.remote.waits(request.request_id)

    def _limit_tokens(self, tracker: RequestTracker) -> int:
        """Return the token up to which a hit is of use: the last token is computed in any case."""
        return tracker.request.num_tokens - max(1, self.options.rules.skip_last_tokens)

    def _lookup(self, tracker: RequestTracker, num_local_tokens: int) -> Match | None:
        """Return the longest prefix in any tier; None while the remote tier has yet to answer."""
        hasher, request_id = tracker.hasher, tracker.request.request_id
        limit_tokens = self._limit_tokens(tracker)
        for _ in range(self.index.question_rounds):
            self.index.advance(time.monotonic())
            told = self.remote.told(request_id)
            match = self.index.lookup(hasher, num_local_tokens, told, limit_tokens)
            questions = self.index.questions(hasher, match, num_local_tokens, told)
            if not questions:
                self.remote.settled(request_id)
                return match
            if not self.remote.answered(request_id, questions):
                return None
        self.remote.settled(request_id)
        return self.index.lookup(hasher, num_local_tokens, self.remote.told(request_id), limit_tokens)

    def _waits_for_more(self, tracker: RequestTracker, match: Match, num_local_tokens: int) -> bool:
        """Tell if another engine is still sending KV of a request, and have missing chunks looked up again."""
        request_id = tracker.request.request_id
        num_known_tokens = max(match.num_tokens, num_local_tokens)
        waits = self.remote.is_open and self.handovers.waits.must_wait(request_id, num_known_tokens)
        if waits:
            self.remote.view.forget_missing(self.index.asked_again(tracker.hasher, match))
            self.remote.told(request_id).forget_missing()
            if source := self.handovers.waits.take_source(request_id):
                self.remote.begin(request_id, source)
        return waits

    def _usable(self, tracker: RequestTracker, match: Match, num_local_tokens: int) -> LoadSpec:
        """Return the part of a match that is to be loaded."""
        told = self.remote.told(tracker.request.request_id)
        spec = self._spec(tracker, LoadSpec(match, num_local_tokens, 0, told), self._limit_tokens(tracker))
        if spec.num_external_tokens > 0 and self.options.config.min_remote_tokens and not tracker.is_handed_over:
            worth_tokens = self._tokens_worth_fetching(spec)
            if worth_tokens < spec.num_external_tokens:
                spec = self._spec(tracker, spec, num_local_tokens + worth_tokens)
        spec = self._without_slow_end(tracker, spec)
        least_tokens, most_tokens = (
            max(1, self.options.config.min_retrieve_tokens),
            self.options.config.max_tokens_per_load,
        )
        if most_tokens and spec.num_external_tokens > max(most_tokens, least_tokens - 1):
            most_tokens -= most_tokens % self.options.rules.block_tokens
            spec = self._spec(tracker, spec, num_local_tokens + most_tokens)
            least_tokens = min(least_tokens, most_tokens)
        # Checked last, because the last checkpoint before a bound may lie far before it.
        return spec if spec.num_external_tokens >= least_tokens else replace(spec, num_external_tokens=0)

    def _spec(self, tracker: RequestTracker, spec: LoadSpec, limit_tokens: int) -> LoadSpec:
        """Return a load that ends at ``limit_tokens`` or before, and at a checkpoint if the model needs them.

        With several groups it ends with a block of each.
        """
        match = spec.match
        if self.loads.needs_checkpoints and match.num_tokens > limit_tokens:
            match = self.index.lookup(tracker.hasher, spec.num_local_tokens, spec.told, limit_tokens)
        known_tokens = match.num_tokens - self.options.rules.lookahead_tokens  # those that follow may be others
        end_tokens = min(known_tokens, limit_tokens)
        if self.loads.ends_in_blocks:
            end_tokens -= end_tokens % self.options.rules.block_tokens
        return replace(spec, match=match, num_external_tokens=end_tokens - spec.num_local_tokens)

    def _without_slow_end(self, tracker: RequestTracker, spec: LoadSpec) -> LoadSpec:
        """Return a load without its last chunk, if computing the few blocks wanted of that chunk is faster."""
        parts = overlapping(spec.match, self.options.rules, spec.num_local_tokens, max(0, spec.num_external_tokens))
        last = next(iter(deque(parts, maxlen=1)), None)
        if last is None or last.is_own or self.loads.needs_checkpoints:
            return spec
        block_tokens = self.options.rules.block_tokens
        source = self.index.source(last.ref, spec.told) or Place.MEMORY
        carried = {source: self.loads.carried_of(last, source)}
        if source is Place.MEMORY or not self.choice.is_slower(carried, (last.stop - last.start) * block_tokens):
            return spec
        tracker.stats.declined()
        match = self.index.lookup(tracker.hasher, spec.num_local_tokens, spec.told, reads_parts=False)
        return self._spec(tracker, replace(spec, match=match), spec.num_local_tokens + spec.num_external_tokens)

    def _tokens_worth_fetching(self, spec: LoadSpec) -> int:
        """Return the tokens of a hit, or those before the first chunk of the remote tier if too few are there."""
        num_remote_tokens = self.loads.sources(spec)[Place.REMOTE]
        if num_remote_tokens >= self.options.config.min_remote_tokens or not num_remote_tokens:
            return spec.num_external_tokens
        return self.loads.first_remote_token(spec) - spec.num_local_tokens

    def _is_verified(self, tracker: RequestTracker, match: Match, num_local_tokens: int) -> bool:
        """Tell if a request computes its hit, to compare it with the stored KV."""
        parts = overlapping(match, self.options.rules, 0, match.num_tokens)
        chunks = ((part.ref, part.begin) for part in parts if part.is_own)
        takes = self.canary.takes(tracker.request.request_id, chunks, num_local_tokens)
        tracker.stats.is_verified |= takes
        return takes

    def _promise(self, tracker: RequestTracker, spec: LoadSpec) -> int | None:
        """Choose how to load, if at all, and return the tokens; None while another request's load brings them."""
        carried = self.loads.carried(spec)
        others_run = not self.running <= {tracker.request.request_id}
        async_load = self.choice.is_async(carried, others_run=others_run)
        # While vLLM runs ahead, a load within a step must not fail, so it waits for what a canary reads, too.
        any_load = async_load or self.options.load_rules.runs_ahead
        if (key := self.loads.awaited(spec, any_load=any_load)) is not None:
            tracker.waits_for = WaitsFor(key, tracker.request.num_tokens, spec.num_local_tokens)
            return None
        if self.choice.declines(carried, spec.num_external_tokens):
            tracker.stats.declined()
            return 0
        tracker.load = replace(spec, async_load=async_load)
        return spec.num_external_tokens
