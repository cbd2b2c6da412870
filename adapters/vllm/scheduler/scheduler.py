"""The scheduler side: owns the index, answers lookups, plans each step. No I/O, no tensors, no vLLM types."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from kvstore.adapters.vllm.plan import (
    FetchResult,
    ReqMeta,
    StepPlan,
    StepReport,
    StepResult,
    WorkerFacts,
    shards_of,
)
from kvstore.adapters.vllm.requests import blocks
from kvstore.adapters.vllm.requests.disagg import Handover
from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, RequestView, SaveRules, SaveSpec
from kvstore.adapters.vllm.scheduler.canary import Canary
from kvstore.adapters.vllm.scheduler.choice import LoadChoice, LoadRules, StepClock
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions, Handovers
from kvstore.adapters.vllm.scheduler.loads import BlocksOf, LoadPlanner, overlapping
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup, find_tokens
from kvstore.adapters.vllm.scheduler.saves import SavePlanner
from kvstore.adapters.vllm.telemetry.accounts import NO_HIT, Accounts, HitSplit
from kvstore.adapters.vllm.telemetry.announcer import Announcer, Removed, Stored
from kvstore.assembly import RemoteOptions, open_directory
from kvstore.catalog.index import QUESTION_ROUNDS, ChunkIndex
from kvstore.catalog.leases import LeaseView
from kvstore.catalog.plans import LoadStep, Match, Place
from kvstore.catalog.remote_view import NOTHING_TOLD, RemoteView
from kvstore.chunks import ChunkRef
from kvstore.engine import all_refs, new_epoch, pin_name
from kvstore.errors import InvalidCallError
from kvstore.keys import NO_EXTRAS, KeyExtras, Namespace, PrefixHasher
from kvstore.ops import metrics
from kvstore.ops.metrics import Tally, Totals
from kvstore.policies import Adaptive
from kvstore.policies.traces import TraceRecorder
from kvstore.transfer.mover import LoadJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerOptions:
    """What the configuration says about lookups and plans."""

    rules: SaveRules
    loads: bool = True
    saves: bool = True
    local_cpu: bool = True
    priority_limit: int | None = None
    min_retrieve_tokens: int = 0
    min_remote_tokens: int = 0
    max_tokens_per_load: int = 0
    max_write_queue: int | None = None
    remote: RemoteOptions | None = None
    cache_policy: str = Adaptive.name
    disk_policy: str | None = None
    record_trace: Path | None = None
    load_rules: LoadRules = field(default_factory=LoadRules)
    async_save: bool = False
    announces: bool = False
    verify_fraction: float = 0.0
    handover: HandoverOptions | None = None
    pin_max_s: float = 86_400.0

    @property
    def lets_out(self) -> bool:
        """Whether workers give away what a step computes, as soon as it ends: to another engine or a remote tier."""
        sends = self.saves and self.remote is not None and self.remote.max_queue != 0
        return sends or (self.handover is not None and self.handover.sends)

    def load_rules_for(self, num_ranks: int) -> LoadRules:
        """How so many ranks load.

        A rank knows only what it could not load itself, and computes on what another could not. What it has given away
        by the time the scheduler has heard of it cannot be taken back, so then nothing is computed before all ranks
        have what they were to load.
        """
        return replace(self.load_rules, async_load=True) if num_ranks > 1 and self.lets_out else self.load_rules


@dataclass
class _Step:
    """A plan under way."""

    acked: int
    verifies: list[LoadStep] = field(default_factory=list)
    result: StepResult = field(default_factory=StepResult)
    is_loaded: bool = False
    distrusted: bool = False  # it may have computed on what another step failed to load


class StoreScheduler:
    """One per engine. Called by vLLM's scheduler from one thread."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._rules = options.rules
        self._index: ChunkIndex | None = None  # until the workers have said what they own
        self._num_ranks = 0
        self._trackers: dict[str, RequestTracker] = {}
        self._pins: dict[str, tuple[PrefixHasher, int]] = {}  # of ended requests, until that step is reported
        self._choice = LoadChoice(options.load_rules)
        self._clock = StepClock()
        self._running: set[str] = set()  # requests of the last step that have not ended
        self._last_hit = ("", NO_HIT)  # of the request last allocated
        self._loads: LoadPlanner | None = None  # with the index
        self._saves: SavePlanner | None = None
        self._verifies: list[ReqMeta] = []  # for the next plan
        self._step = _Step(acked=0)  # what the next plan will hold
        self._in_flight: dict[int, _Step] = {}
        self._remote: RemoteLookup | None = None
        self._namespaces: list[Namespace] = []  # one for each shard
        trace = options.record_trace
        self._recorder = TraceRecorder.open_next(trace, options.rules.chunk_tokens) if trace else None
        self._number = 0
        self._acked = 0
        self._last_poisoned = 0
        self._epoch = ""  # to be entered with the next plan
        self._canary = Canary(options.verify_fraction, options.rules.block_tokens) if options.verify_fraction else None
        self._recalls: list[ChunkRef] = []  # chunks with wrong bytes, which the remote tier may have
        rules = options.rules
        self._accounts = Accounts(rules.block_tokens, rules.block_tokens if rules.save_tails else rules.chunk_tokens)
        self._handovers = Handovers(options.handover, rules) if options.handover else None
        self._announcer = Announcer(rules.block_tokens) if options.announces else None
        self._enabled = True
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()

    @property
    def index(self) -> ChunkIndex | None:
        """The catalog, once the workers have reported."""
        return self._index

    def connect(self, facts: Sequence[WorkerFacts]) -> None:
        """Take in what the workers own. A chunk counts only if every rank holds its part."""
        first = facts[0]
        sizes = [dict(rank.survivors) for rank in facts]
        held = [set(rank) for rank in sizes]
        complete = set.intersection(*held)

        def stored_bytes(num_blocks: int) -> int:
            return max(rank.stored_bytes[num_blocks - 1] for rank in facts)

        remote = self._options.remote
        if remote is not None:
            shards = shards_of(facts, remote)
            self._namespaces = [shard.namespace for shard in shards]
            directory = open_directory(shards)
            view = RemoteView(remote.hold_s)
            self._remote = RemoteLookup(directory, view, remote.lookup_timeout_s, remote.sources)
        index = ChunkIndex(
            min(rank.num_slots for rank in facts),
            keep_in_memory=self._options.local_cpu,
            disk_capacity_bytes=min(rank.disk_capacity_bytes for rank in facts),
            stored_bytes=stored_bytes,
            max_writes=self._options.max_write_queue,
            remote=self._remote.view if self._remote else None,
            max_sends=remote.max_queue if remote else None,
            cache_policy=self._options.cache_policy,
            disk_policy=self._options.disk_policy,
            tracks_changes=self._options.announces,
        )
        index.adopt((ref, max(rank[ref] for rank in sizes)) for ref, _ in first.survivors if ref in complete)
        self._index = index
        self._num_ranks = len(facts)
        self._choice = LoadChoice(self._options.load_rules_for(self._num_ranks))
        self._loads = LoadPlanner(index, self._rules, self._choice, self._num_ranks)
        self._saves = SavePlanner(index, self._num_ranks)
        self._saves.strays = list(set.union(*held) - complete)
        ranks = len(facts)
        logger.info(
            "%d chunks known from disk; CPU pool %.2f GiB in all (%.2f GiB x %d workers), disk %.2f GiB in all%s",
            len(index),
            ranks * first.num_slots * first.slot_bytes / 2**30,
            first.num_slots * first.slot_bytes / 2**30,
            ranks,
            ranks * first.disk_capacity_bytes / 2**30,
            "; and a remote tier" if remote else "",
        )

    # -- operators -----------------------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether requests are looked up and stored. May be asked by any thread."""
        return self._enabled

    def set_enabled(self, *, enabled: bool) -> None:
        """Switch the cache off or on; what is stored stays. May be called by any thread, and counts at once.

        Loads and stores already planned are carried out. After it was off, what running requests have computed
        meanwhile is stored, as far as they still hold it.
        """
        self._enabled = enabled

    @property
    def totals(self) -> Totals:
        """Sums since the start, as of the last step. Thread-safe."""
        return self._accounts.totals

    def call_soon(self, action: Callable[[], object]) -> None:
        """Hand something over to the scheduler's thread: it is done when the next request comes or step is planned."""
        self._actions.put(action)

    def _carry_out_actions(self) -> None:
        while not self._actions.empty():
            self._actions.get_nowait()()

    def clear(self) -> int:
        """Forget all chunks in memory and on disk, and return how many there were. A remote tier, shared, is kept."""
        return self._index.remove_all() if self._index is not None else 0

    def pins(self) -> list[LeaseView]:
        """The pins that requests have asked for, on ``time.monotonic``. May be called by any thread."""
        return self._index.lease_views() if self._index is not None else []

    def unpin_all(self) -> int:
        """End all pins, those of requests that have just ended too, and return how many there were."""
        names = {*self._pins, *(view.name for view in self.pins())}
        for name in names:
            self._unpin(name)
        return len(names)

    def find(self, token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS) -> Counter[Place]:
        """How many leading tokens of a sequence are known, by the fastest tier that has them. From any thread.

        Raises:
            InvalidCallError: a token id is none.
        """
        hasher = PrefixHasher(self._rules.chunk_tokens, self._rules.block_tokens, extras)
        hasher.update(token_ids)
        return find_tokens(hasher, self._index, self._remote) if self._index is not None else Counter()

    def take_tally(self) -> Tally:
        """What was counted since the last call, the workers' numbers included."""
        timeouts = {
            metrics.LOOKUP_TIMEOUTS.key(): self._remote.timeouts if self._remote is not None else 0,
            metrics.HANDOVER_TIMEOUTS.key(): self._handovers.timeouts if self._handovers is not None else 0,
        }
        tally = self._accounts.take(self._index, enabled=self._enabled, totals=timeouts)
        self._accounts.summarize(time.monotonic())
        return tally

    def take_events(self) -> list[Stored | Removed]:
        """Which blocks came and went since the last call, if that is to be announced."""
        return [] if self._announcer is None or self._index is None else self._announcer.take(self._index)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request: RequestView,
        extras: KeyExtras,
        params: RequestParams = NO_PARAMS,
        handover: Handover | None = None,
    ) -> None:
        """Track a request whose KV may be shared. Requests never added are passed by."""
        self._carry_out_actions()
        limit = self._options.priority_limit
        is_wanted = not params.skip_save and (limit is None or request.priority <= limit)
        tracker = RequestTracker.start(request, extras, self._rules, params, saves=self._options.saves and is_wanted)
        try:
            tracker.hasher.update(request.all_token_ids)
        except InvalidCallError as error:  # clients choose their prompts' token ids, and nobody has checked them yet
            logger.warning("a request is not cached: %s", error)
            return
        self._trackers[request.request_id] = tracker
        if handover is not None and self._handovers is not None:
            source = self._handovers.start(tracker, handover)
            if source is not None and self._remote is not None:
                self._remote.begin(request.request_id, source.url)
        if params.pin is not None:
            tracker.pin_name = pin_name(tracker.hasher)
        if params.pin is False:
            self._unpin(tracker.pin_name)
        self._accounts.open(request.request_id)

    def num_new_matched_tokens(self, request: RequestView, num_local_tokens: int) -> int | None:
        """How many tokens beyond vLLM's own ``num_local_tokens`` can be loaded; at least one is left to compute.

        None means to ask again. Either the remote tier has not answered yet; or the local tokens rest on a load that
        may yet fail: vLLM lets requests share blocks before they are loaded, and when the load fails, it does not
        compute all of them anew.

        Cheap, and without effect but to remember the answer: vLLM asks again while a request waits.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None or self._index is None or self._loads is None:
            return 0
        tracker.load = None
        self._accounts.asked(request.request_id, request.num_tokens, num_local_tokens)
        if not self._options.loads:
            return 0
        tracker.hasher.update(request.all_token_ids)
        if self._loads.rests_on_unverified(tracker, num_local_tokens):
            return None
        if tracker.params.skip_load or tracker.load_failed or not self._enabled:
            return 0
        if self._handovers is not None and self._handovers.asked_just_now(request.request_id):
            return None
        match = self._lookup(self._index, request.request_id, tracker.hasher, num_local_tokens)
        if match is None or self._waits_for_more(request.request_id, tracker.hasher, match, num_local_tokens):
            return None
        spec = self._usable(tracker, match, num_local_tokens)
        if spec.num_external_tokens and self._is_verified(tracker, match, num_local_tokens):
            spec = replace(spec, num_external_tokens=0)
        self._accounts.answered(request.request_id, match, spec.num_external_tokens)
        return self._promise(self._loads, tracker, spec) if spec.num_external_tokens else 0

    def is_async_load(self, request_id: str) -> bool:
        """Whether the request is to wait for what was just promised to it, and no step."""
        tracker = self._trackers.get(request_id)
        return tracker is not None and tracker.load is not None and tracker.load.async_load

    def _usable(self, tracker: RequestTracker, match: Match, num_local_tokens: int) -> LoadSpec:
        """What of a match is to be loaded."""
        last_tokens = max(1, self._rules.skip_last_tokens)
        num_external_tokens = min(match.num_tokens, tracker.request.num_tokens - last_tokens) - num_local_tokens
        told = self._remote.told(tracker.request.request_id) if self._remote is not None else NOTHING_TOLD
        spec = LoadSpec(match, num_local_tokens, num_external_tokens, told)
        if num_external_tokens > 0 and self._options.min_remote_tokens and not tracker.is_handed_over:
            num_external_tokens = self._tokens_worth_fetching(spec)
        if num_external_tokens <= 0 or num_external_tokens < self._options.min_retrieve_tokens:
            return replace(spec, num_external_tokens=0)
        if most_tokens := self._options.max_tokens_per_load:
            num_external_tokens = min(num_external_tokens, most_tokens - most_tokens % self._rules.block_tokens)
        return replace(spec, num_external_tokens=num_external_tokens)

    def _tokens_worth_fetching(self, spec: LoadSpec) -> int:
        """The tokens of a hit, without what comes from elsewhere if that is too short."""
        assert self._loads is not None
        num_remote_tokens = self._loads.sources(spec)[Place.REMOTE]
        if num_remote_tokens >= self._options.min_remote_tokens or not num_remote_tokens:
            return spec.num_external_tokens
        return self._loads.first_remote_token(spec) - spec.num_local_tokens

    def _promise(self, loads: LoadPlanner, tracker: RequestTracker, spec: LoadSpec) -> int | None:
        """Choose how to load, if at all; None while others are bringing what is needed."""
        tokens = loads.sources(spec)
        others_run = not self._running <= {tracker.request.request_id}
        async_load = self._choice.is_async(tokens, others_run=others_run)
        if loads.must_wait(spec.match, async_load=async_load):
            return None
        if self._choice.declines(tokens):
            self._accounts.declined(tracker.request.request_id)
            return 0
        tracker.load = replace(spec, async_load=async_load)
        return spec.num_external_tokens

    def _is_verified(self, tracker: RequestTracker, match: Match, num_local_tokens: int) -> bool:
        """Whether a request computes its hit all the same, so that it can be compared."""
        if self._canary is None:
            return False
        request_id, end_block = tracker.request.request_id, match.num_tokens // self._rules.block_tokens
        if not self._canary.takes(request_id, overlapping(match, self._rules, 0, end_block), num_local_tokens):
            return False
        self._accounts.verified(request_id)
        return True

    def _lookup(self, index: ChunkIndex, request_id: str, hasher: PrefixHasher, num_local_tokens: int) -> Match | None:
        """The longest prefix in any tier; None while the remote one has yet to answer."""
        for _ in range(QUESTION_ROUNDS):
            index.advance(time.monotonic())
            told = self._remote.told(request_id) if self._remote is not None else NOTHING_TOLD
            match = index.lookup(hasher, num_local_tokens, told)
            if self._remote is None:
                return match
            questions = index.questions(hasher, match, num_local_tokens, told)
            if not questions:
                self._remote.settled(request_id)
                return match
            if not self._remote.answered(request_id, questions):
                return None
        assert self._remote is not None
        self._remote.settled(request_id)
        return index.lookup(hasher, num_local_tokens, self._remote.told(request_id))

    def _waits_for_more(self, request_id: str, hasher: PrefixHasher, match: Match, num_local_tokens: int) -> bool:
        """Whether more of a request is on its way from another engine. What is not there yet is asked for again."""
        if self._handovers is None or self._remote is None:
            return False
        waits = self._handovers.must_wait(request_id, max(match.num_tokens, num_local_tokens))
        if waits:
            self._remote.view.forget_missing(all_refs(hasher))
            self._remote.told(request_id).forget_missing()
        return waits

    def answer(self, request_id: str, *, first_token: int | None) -> dict[str, object] | None:
        """``kv_transfer_params`` for the answer to a request that ends now, before ``finish_request``."""
        tracker = self._trackers.get(request_id)
        if tracker is None or self._handovers is None or not self._enabled:
            return None
        return self._handovers.answer(tracker, first_token=first_token)

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Plan the load of what vLLM took of the last answer: ``num_external_tokens``, possibly fewer, possibly 0."""
        self._last_hit = (request_id, NO_HIT)
        tracker = self._trackers.get(request_id)
        if tracker is None or self._index is None or self._loads is None:
            return
        spec, tracker.load = tracker.load, None
        if spec is not None and num_external_tokens:
            self._last_hit = (request_id, self._loads.plan(tracker, spec, block_ids, num_external_tokens))
            end_block = -(-(spec.num_local_tokens + num_external_tokens) // self._rules.block_tokens)
            first_block = spec.num_local_tokens // self._rules.block_tokens
            self._describe(self._index, tracker, overlapping(spec.match, self._rules, first_block, end_block))
        if self._remote is not None:
            self._remote.end(request_id)
        self._accounts.admitted(request_id, self._last_hit[1], self._index, tracker.hasher)

    def hit_split(self, request_id: str) -> HitSplit:
        """How the load just planned for a request divides over the tiers."""
        last_id, hit = self._last_hit
        return hit if request_id == last_id else NO_HIT

    def _describe(self, index: ChunkIndex, tracker: RequestTracker, chunks: Iterable[tuple[ChunkRef, int]]) -> None:
        """Let chunks be announced, each given with its first block. Routers know nothing of tags."""
        if self._announcer is not None and not tracker.params.tags:
            for ref, begin in chunks:
                if ref.prefix_key in index:
                    self._announcer.describe(ref, begin, tracker.request)

    def spoilt_blocks(self, failed_block_ids: AbstractSet[int]) -> set[int]:
        """The blocks that could not be loaded, and those computed from them. To be asked before ``complete``."""
        return self._loads.spoilt_blocks(failed_block_ids) if self._loads is not None else set(failed_block_ids)

    def finish_request(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Stop tracking. True if vLLM must keep the blocks until the workers report the request's last store."""
        self._running.discard(request_id)
        if self._remote is not None:
            self._remote.end(request_id)
        if self._canary is not None:
            self._canary.end(request_id)
        if self._handovers is not None:
            self._handovers.end(request_id)
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return False
        if self._recorder is not None:
            self._record(self._recorder, tracker.hasher)
        keeps_blocks = self._saves is not None and self._save_rest(self._saves, tracker, block_ids)
        if tracker.params.pin and self._index is not None and self._saves is not None:
            self._pins[tracker.pin_name] = (tracker.hasher, self._number + self._saves.has_coming)
            self._hold_pins(self._index)
        self._accounts.close(request_id)
        return keeps_blocks

    def _save_rest(self, saves: SavePlanner, tracker: RequestTracker, block_ids: Sequence[int]) -> bool:
        """Store what is left of a request that has ended. Whether a worker has yet to read its blocks."""
        request_id = tracker.request.request_id
        if not block_ids or (self._loads is not None and self._loads.is_fetching(request_id)):
            return False  # it has computed nothing; vLLM itself keeps blocks that are being loaded
        if self._enabled and (save := tracker.take_final_save()):
            self._plan_save(request_id, tracker, save, block_ids)
        if not saves.is_coming(request_id) and not (self._options.async_save and saves.is_storing(request_id)):
            return False
        saves.end_with(request_id)
        return True

    def _hold_pins(self, index: ChunkIndex) -> None:
        """Pin what ended requests used, once all that they, and others with the same prompt, stored is reported."""
        for name, (hasher, last_step) in list(self._pins.items()):
            if last_step <= self._number and min(self._in_flight, default=last_step + 1) > last_step:
                index.lease(name, index.lookup(hasher).refs, self._options.pin_max_s)
                del self._pins[name]

    def _unpin(self, name: str) -> None:
        self._pins.pop(name, None)
        if self._index is not None:
            self._index.release(name)

    def _record(self, recorder: TraceRecorder, hasher: PrefixHasher) -> None:
        """Note which chunks a request used, its tail included."""
        tail = hasher.block_keys(len(hasher.chunk_keys()))
        whole_tokens = len(hasher.chunk_keys()) * hasher.chunk_tokens
        if keys := [*hasher.chunk_keys(), *tail[-1:]]:
            recorder.record(keys, whole_tokens + len(tail) * hasher.block_tokens)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan_step(
        self, num_scheduled_tokens: Mapping[str, int], block_ids_of: BlocksOf, *, preempts: bool = False
    ) -> StepPlan:
        """Make the plan of the step that computes ``num_scheduled_tokens`` per request, and may preempt others."""
        self._carry_out_actions()
        if self._enabled and self._index is not None:
            for req_id, num_tokens in num_scheduled_tokens.items():
                tracker = self._trackers.get(req_id)
                if tracker is not None and self._canary is not None:
                    self._plan_verify(self._index, self._canary, tracker, num_tokens, block_ids_of)
                if tracker is not None and self._handovers is not None:
                    self._handovers.plan(tracker, num_tokens, block_ids_of)
                if tracker is None or tracker.is_saved:
                    continue
                save = tracker.take_save(num_tokens)
                if save is not None:
                    self._plan_save(req_id, tracker, save, block_ids_of(req_id))
        if self._loads is not None:
            self._loads.note_blocks(num_scheduled_tokens, block_ids_of)
        if self._remote is not None:
            self._remote.end_pass()
        self._running = set(num_scheduled_tokens)
        plan = self._emit(preempts=preempts)
        num_tokens = sum(num_scheduled_tokens.values())
        plan.computes = num_tokens > 0
        loads_within = any(meta.loads for meta in plan.requests)
        self._clock.planned(plan.number, time.monotonic(), 0 if loads_within else num_tokens)
        return plan

    def _plan_verify(
        self,
        index: ChunkIndex,
        canary: Canary,
        tracker: RequestTracker,
        num_scheduled_tokens: int,
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> None:
        """Add the chunks that the step completes and that are to be compared, if they are still there."""
        request = tracker.request
        written_tokens = min(request.num_computed_tokens + num_scheduled_tokens, request.num_tokens)
        for ref, begin in canary.take_due(request.request_id, written_tokens):
            block_ids = blocks.whole(block_ids_of(request.request_id), begin, ref.num_blocks)
            if block_ids is None or index.is_loading(ref.prefix_key):
                continue
            for step in index.prepare_load([ref]):
                self._verifies.append(ReqMeta(request.request_id, verifies=[LoadJob(step, block_ids, 0)]))
                self._step.verifies.append(step)
            self._describe(index, tracker, [(ref, begin)])

    def _emit(self, *, preempts: bool) -> StepPlan:
        self._number += 1
        plan = StepPlan(self._number, self._acked, preempts=preempts, recalls=self._recalls, epoch=self._epoch)
        if self._index is not None and self._loads is not None and self._saves is not None:
            plan.removals = self._saves.take_strays() + self._index.take_removals()
            plan.requests = [
                *self._loads.take_step(self._number),
                *self._verifies,
                *(self._handovers.take_step() if self._handovers else ()),
                *self._saves.take_step(self._number),
            ]
            plan.fetches = self._loads.take_fetches()
            plan.sourced = self._loads.take_sourced()
        self._step.acked = self._acked
        if plan.requests:
            self._in_flight[plan.number] = self._step
        self._step = _Step(acked=0)
        self._verifies, self._recalls, self._epoch = [], [], ""
        return plan

    def _plan_save(self, req_id: str, tracker: RequestTracker, save: SaveSpec, block_ids: Sequence[int]) -> None:
        """Add a request's new chunks to the next plan."""
        if self._index is None or self._saves is None:
            return
        self._index.advance(time.monotonic())  # a time to live begins here
        planned = self._saves.plan(tracker, save, block_ids)
        self._describe(self._index, tracker, save.first_blocks().items())
        self._accounts.stored(req_id, planned)

    def complete(self, report: StepReport) -> None:
        """Take in what the workers, all ranks merged, did."""
        if report.computed is not None:
            self._choice.computed(*self._clock.ended(report.computed, time.monotonic()))
        self._accounts.add(report.tally)
        if self._index is None or self._saves is None:
            return
        self._index.set_disk_answers(answers=report.disk_answers)
        self._index.set_remote_answers(answers=report.remote_answers)
        for number, result in sorted(report.steps.items()):
            step = self._in_flight[number]
            step.result.merge(result)
            if not step.is_loaded and step.result.ranks_loaded == self._num_ranks:
                self._complete_loads(number, step)
            if step.result.ranks_ended == self._num_ranks:
                del self._in_flight[number]
                self._complete_saves(self._index, self._saves, number, step)
        for number, fetched in report.fetches.items():
            self._complete_fetch(number, fetched)
        may_save_again = [self._saves.complete_write(written) for written in report.writes]
        if any(may_save_again):
            self._restart_saving()
        self._hold_pins(self._index)

    def _complete_loads(self, number: int, step: _Step) -> None:
        step.is_loaded = True
        self._acked = number
        if step.result.is_poisoned:
            self._last_poisoned = number
        # A step planned before the failed load was known computed on its garbage too, on every rank.
        step.distrusted = step.acked < self._last_poisoned <= number
        if self._loads is not None:
            self._loads.complete_step(number, step.result)

    def _complete_fetch(self, number: int, result: FetchResult) -> None:
        assert self._loads is not None
        failed_id = self._loads.complete_fetch(number, result)
        if failed_id in self._trackers:
            self._trackers[failed_id].load_failed = True

    def _complete_saves(self, index: ChunkIndex, saves: SavePlanner, number: int, step: _Step) -> None:
        wrong = self._complete_verifies(index, step)
        saves.complete_step(number, step.result.failed_stores, distrusted=step.distrusted)
        if step.result.failed_stores or step.distrusted or wrong:
            self._restart_saving()
        if step.distrusted and self._handovers is not None:
            self._handovers.restart()

    def _complete_verifies(self, index: ChunkIndex, step: _Step) -> list[ChunkRef]:
        """Let go of what was compared, and have chunks with wrong bytes removed everywhere."""
        result = step.result
        index.complete_load(step.verifies, result.unread, result.lost_chunks)
        mismatches = set() if step.distrusted else result.mismatches
        wrong = [verify.ref for verify in step.verifies if verify.ref.prefix_key in mismatches]
        index.condemn(wrong)
        self._recalls += wrong
        return wrong

    def _restart_saving(self) -> None:
        for tracker in self._trackers.values():
            tracker.restart_saving()

    def reset_cache(self) -> None:
        """Forget everything: the weights have changed.

        The namespace names the weights that vLLM was started with, so what comes is kept under a new epoch of it.
        Requests that have computed something hold KV of the old weights until they end, and are tracked no longer.
        """
        if self._index is not None and self._saves is not None:
            self._saves.cancel_coming()
            self._index.clear()
            self._pins.clear()
        self._epoch = new_epoch()
        if self._remote is not None:
            self._remote.reset([namespace.at_epoch(self._epoch) for namespace in self._namespaces])
        for req_id, tracker in self._trackers.items():
            if tracker.request.num_computed_tokens:
                self._accounts.close(req_id)
                if self._handovers is not None:
                    self._handovers.end(req_id)
        self._trackers = {
            req_id: tracker for req_id, tracker in self._trackers.items() if not tracker.request.num_computed_tokens
        }
        self._restart_saving()

    def close(self) -> None:
        """End the questions to the remote tier, and the trace."""
        if self._remote is not None:
            self._remote.close()
        if self._recorder is not None:
            self._recorder.close()
