"""The scheduler side: answers lookups, plans each step, processes the workers' reports. No tensors, no vLLM types."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from queue import SimpleQueue

from kvstore.adapters.vllm.plan import FetchResult, StepPlan, StepReport, WorkerFacts
from kvstore.adapters.vllm.requests.params import NO_PARAMS, Handover, RequestParams
from kvstore.adapters.vllm.requests.rows import NO_STATES, States, StatesOf, Tables, TablesOf
from kvstore.adapters.vllm.requests.tracker import RequestTracker, RequestView, SaveSpec
from kvstore.adapters.vllm.scheduler.canary import Canary, complete_verifies
from kvstore.adapters.vllm.scheduler.choice import StepClock, prefilled
from kvstore.adapters.vllm.scheduler.connected import Connected
from kvstore.adapters.vllm.scheduler.handovers import Handovers
from kvstore.adapters.vllm.scheduler.hints import DEMOTE, DROP
from kvstore.adapters.vllm.scheduler.lookup import find_tokens
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.recording import Recording
from kvstore.adapters.vllm.scheduler.steps import InFlightStep, StepTracker
from kvstore.adapters.vllm.telemetry.announcer import Announcer, Removed, Stored
from kvstore.adapters.vllm.telemetry.stats import NO_HIT, HitTokens, SchedulerStats
from kvstore.index.index import ChunkIndex
from kvstore.index.leases import LeaseView
from kvstore.index.plans import Place, pin_name
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS, KeyExtras, PrefixHasher, new_epoch
from kvstore.ops import metrics
from kvstore.ops.metrics import Tally

logger = logging.getLogger(__name__)


def _no_states(_request_id: str) -> States:
    return NO_STATES


class StoreScheduler:
    """Scheduler side of one engine, called by vLLM's scheduler from one thread.

    Attributes:
        enabled: True if requests are looked up and stored. Any thread may switch it, at once; stored chunks are kept.
            Loads and stores already planned are carried out. After it is switched on again, KV that running requests
            have computed meanwhile is stored, as far as they still hold it.
        totals: sums since the start, as of the last step. Thread-safe.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        rules, config = options.rules, options.config
        self._options = options
        self._rules = rules
        self._connected: Connected | None = None  # until the workers have sent their facts
        self._trackers: dict[str, RequestTracker] = {}
        self._steps = StepTracker()
        self._clock = StepClock()
        self._last_hit = ("", NO_HIT)  # of the request last allocated
        self._recording = Recording(options)
        self._epoch = ""  # to be entered with the next plan
        self._canary = Canary(config.verify_fraction, rules.block_tokens, self._steps)
        end_tokens = rules.block_tokens if rules.save_tails else rules.chunk_tokens
        self._stats = SchedulerStats(rules.block_tokens, end_tokens, config.log_request_sample)
        self.count_wrong_field = self._stats.wrong_field
        self._handovers = Handovers(options.handover, rules, self._steps)
        self._announcer = Announcer(rules.block_tokens, options.announces) if options.announces else None
        self.enabled = True
        self.totals = self._stats.totals
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()

    @property
    def index(self) -> ChunkIndex | None:
        """The index, once the workers have reported."""
        return self._connected.index if self._connected is not None else None

    def connect(self, facts: Sequence[WorkerFacts]) -> None:
        """Connect to the workers; until then nothing is cached.

        Raises:
            KVStoreError: the remote tier cannot be opened.
        """
        self._connected = Connected.to(
            facts,
            self._options,
            self._handovers,
            self._canary,
            self._steps,
            count_hint=self._stats.hint,
            note_event=self._recording.note_event,
        )
        self._recording.connected(facts)

    # -- operators -----------------------------------------------------------------------------------------------------

    def call_soon(self, action: Callable[[], object]) -> None:
        """Make the scheduler's thread run an action when the next request arrives or the next step is planned."""
        self._actions.put(action)

    def _carry_out_actions(self) -> None:
        while not self._actions.empty():
            self._actions.get_nowait()()

    def clear(self) -> int:
        """Forget all chunks in memory and on disk, and return how many there were. A shared remote tier is kept."""
        return self._connected.index.remove_all() if self._connected is not None else 0

    def drain(self) -> Sequence[str]:
        """Begin no hand-overs from now on; return the ``drain_names`` of the workers. From any thread."""
        self._handovers.is_draining = True
        return self._connected.drain_names if self._connected is not None else ()

    def pins(self) -> list[LeaseView]:
        """Return the pins that requests have asked for, on ``time.monotonic``. May be called by any thread."""
        return self._connected.index.lease_views() if self._connected is not None else []

    def unpin_all(self) -> int:
        """End all pins, including those of requests that have just ended, and return how many there were."""
        return self._connected.hints.end_all() if self._connected is not None else 0

    def find(self, token_ids: Sequence[int], extras: KeyExtras = NO_EXTRAS) -> Counter[Place]:
        """Count the leading tokens of a sequence that are known, by the fastest tier that has them. From any thread.

        Raises:
            InvalidCallError: a token id is out of range.
        """
        hasher = PrefixHasher(self._rules.chunk_tokens, self._rules.block_tokens, extras)
        hasher.update(token_ids)
        connected = self._connected
        return find_tokens(hasher, connected.index, connected.remote) if connected is not None else Counter()

    def take_tally(self) -> Tally:
        """Return the counts since the last call, the workers' included."""
        connected = self._connected
        totals = {
            metrics.LOOKUP_TIMEOUTS.key(): connected.remote.timeouts if connected is not None else 0,
            metrics.HANDOVER_TIMEOUTS.key(): self._handovers.waits.timeouts,
            metrics.PREFETCHED_CHUNKS.key(): connected.prefetches.num_chunks if connected is not None else 0,
        }
        levels = {metrics.ENABLED.key(): self.enabled, metrics.DRAINING.key(): self._handovers.is_draining}
        tally = self._stats.take(self.index, totals, levels)
        self._stats.summarize(time.monotonic())
        return tally

    @property
    def has_work(self) -> bool:
        """True if the next step moves something even if it computes nothing."""
        connected = self._connected
        return self.enabled and connected is not None and connected.prefetches.is_busy(time.monotonic())

    def take_events(self) -> list[Stored | Removed]:
        """Return the blocks stored and removed since the last call, if they are to be announced."""
        if self._announcer is None or self._connected is None:
            return []
        return self._announcer.take(self._connected.index)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request: RequestView,
        extras: KeyExtras,
        params: RequestParams = NO_PARAMS,
        handover: Handover | None = None,
    ) -> None:
        """Track a request whose KV may be shared. Requests never added are not cached."""
        self._carry_out_actions()
        limit = self._options.config.priority_limit
        is_wanted = not params.skip_save and (limit is None or request.priority <= limit)
        tracker = RequestTracker(request, extras, self._rules, params, saves=self._options.saves and is_wanted)
        try:
            tracker.hasher.update(request.all_token_ids)
        except InvalidCallError as error:  # clients choose their prompts' token ids, which are not checked before
            logger.warning("request not cached: %s", error)
            return
        self._trackers[request.request_id] = tracker
        connected = self._connected
        if handover is not None:
            source = self._handovers.start(tracker, handover)
            if source is not None and connected is not None:
                connected.remote.begin(request.request_id, source.url)
        if params.pin is not None:
            tracker.pin_name = pin_name(tracker.hasher)
        if connected is not None:
            connected.prefetches.note_prompt(tracker.hasher.chunk_keys())
            if params.pin is False:
                connected.hints.end(tracker.pin_name)

    def num_new_matched_tokens(self, request: RequestView, num_local_tokens: int) -> int | None:
        """Return the tokens to load beyond vLLM's own ``num_local_tokens``; at least one is left to compute.

        None means to ask again, because the remote tier has not answered yet or the local tokens rest on a load that
        may yet fail. vLLM lets requests share blocks before they are loaded, and when the load fails, it does not
        compute all of them again.

        This is cheap and has no effect but to remember the answer, because vLLM asks again while a request waits.
        """
        tracker, connected = self._trackers.get(request.request_id), self._connected
        if tracker is None or connected is None:
            return 0
        tracker.load = None
        tracker.stats.asked(request.num_tokens, num_local_tokens)
        if not self._options.loads:
            return 0
        return connected.matching.offer(tracker, num_local_tokens, enabled=self.enabled)

    def is_async_load(self, request_id: str) -> bool:
        """Tell if the request, and not the step, waits for the load that was just promised."""
        tracker = self._trackers.get(request_id)
        return tracker is not None and tracker.load is not None and tracker.load.async_load

    def parted_tokens(self, request_id: str) -> int:
        """Return the end of the chunks found in the last lookup of the prompt; 0 unless it needs a checkpoint there."""
        tracker = self._trackers.get(request_id)
        return tracker.parted_tokens if tracker is not None else 0

    def answer(self, request_id: str, *, first_token: int | None) -> dict[str, object] | None:
        """Return ``kv_transfer_params`` for the answer to a request that ends now, before ``finish_request``."""
        tracker = self._trackers.get(request_id)
        if tracker is None or not self.enabled:
            return None
        return self._handovers.answer(tracker, first_token=first_token)

    def allocated(self, request_id: str, tables: Tables, num_external_tokens: int) -> None:
        """Plan the load of the ``num_external_tokens`` that vLLM took of the last answer, possibly fewer or 0."""
        self._last_hit = (request_id, NO_HIT)
        tracker, connected = self._trackers.get(request_id), self._connected
        if tracker is None or connected is None:
            return
        spec, tracker.load, tracker.load_failed = tracker.load, None, False
        if tracker.stats.waits:  # vLLM calls again when such a load has ended
            tracker.stats.has_waited()
        tracker.stats.waits = spec is not None and spec.async_load and num_external_tokens > 0
        self._handovers.admitted(tracker, connected.index, spec if num_external_tokens else None)
        if spec is not None and num_external_tokens:
            self._last_hit = (request_id, connected.loads.plan(tracker, spec, tables, num_external_tokens))
            self._describe(connected.index, tracker, connected.loads.blocks_of(tracker, spec, num_external_tokens))
        if self._stats.admitted(tracker.stats, self._last_hit[1], connected.index, tracker.hasher):
            end_tokens, is_late = self._stats.end_of(tracker.stats), connected.remote.told(request_id).is_incomplete
            self._recording.looked_up(tracker, connected.index, end_tokens, enabled=self.enabled, is_late=is_late)
        connected.remote.end(request_id)

    def hit_tokens(self, request_id: str) -> HitTokens:
        """Return the tokens by tier of the load just planned for a request."""
        last_id, hit = self._last_hit
        return hit if request_id == last_id else NO_HIT

    def _describe(self, index: ChunkIndex, tracker: RequestTracker, chunks: Iterable[tuple[ChunkRef, range]]) -> None:
        """Have chunks announced, each given with its blocks, unless they have tags or probes, unknown to routers."""
        if self._announcer is not None and not (tracker.params.tags or tracker.params.probe):
            for ref, known in chunks:
                if ref.prefix_key in index:
                    self._announcer.describe(ref, known, tracker.request)
                else:
                    self._announcer.describe_held(index, known, tracker.request, tracker.hasher)

    def spoilt_blocks(self, failed_block_ids: AbstractSet[int]) -> set[int]:
        """Return the blocks that could not be loaded, and those computed from them. Call before ``complete``."""
        connected = self._connected
        return connected.loads.spoilt_blocks(failed_block_ids) if connected is not None else set(failed_block_ids)

    def finish_request(self, request_id: str, tables: Tables) -> bool:
        """Stop tracking a request. Return True if vLLM must keep its blocks until the workers report its last store."""
        connected = self._connected
        if connected is not None:
            connected.matching.running.discard(request_id)
            connected.remote.end(request_id)
        self._canary.end(request_id)
        self._handovers.end(request_id)
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return False
        answer_tokens = tracker.request.num_tokens - tracker.request.num_prompt_tokens
        self._recording.ended(tracker)
        keeps_blocks = connected is not None and self._save_rest(connected, tracker, tables)
        if connected is not None:
            connected.index.end_request(tracker.noted, answer_tokens)
            self._hold_prompt(connected, tracker)
        self._stats.log_request(request_id, tracker.stats)
        return keeps_blocks

    def _hold_prompt(self, connected: Connected, tracker: RequestTracker) -> None:
        """Carry out the hints of a request that has ended about its prompt."""
        params, last_step = tracker.params, self._steps.number + connected.saves.has_coming
        if params.pin:
            connected.hints.add(tracker.pin_name, tracker.hasher, last_step)
        if params.retain_s is not None:
            connected.hints.retain(tracker.request.request_id, tracker.hasher, last_step, params.retain_s)
        if params.drop or params.demote:
            hint = DROP if params.drop else DEMOTE
            connected.hints.give_up(tracker.request.request_id, tracker.hasher, last_step, hint)
        num_chunks = tracker.request.num_prompt_tokens // tracker.hasher.chunk_tokens
        if params.prefetch_s is not None and num_chunks and not params.drop:
            request_id, anchor = tracker.request.request_id, tracker.hasher.chunk_keys()[num_chunks - 1]
            expect = connected.prefetches.announce(request_id, anchor, params.prefetch_s, tracker.hasher)
            connected.hints.expect(request_id, tracker.hasher, last_step, expect)

    def _save_rest(self, connected: Connected, tracker: RequestTracker, tables: Tables) -> bool:
        """Store the rest of a request that has ended. Return True if a worker has yet to read its blocks."""
        request_id, saves = tracker.request.request_id, connected.saves
        if not any(tables) or connected.loads.is_fetching(request_id):
            return False  # it has computed nothing; vLLM itself keeps blocks that are being loaded
        if self.enabled and (save := tracker.take_final_save()):
            self._plan_save(connected, tracker, save, tables, NO_STATES)
        is_stored = not saves.is_coming(request_id) and not (self._options.async_save and saves.is_storing(request_id))
        tells_more = self._options.saves and tracker.params.retain_s is not None  # it needs one more step
        if is_stored and not tells_more:
            return False
        saves.end_with(request_id)
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan_step(
        self,
        num_scheduled_tokens: Mapping[str, int],
        tables_of: TablesOf,
        *,
        preempts: bool = False,
        states_of: StatesOf = _no_states,
    ) -> StepPlan:
        """Plan the step that computes ``num_scheduled_tokens`` per request and may preempt others.

        ``states_of`` returns the states that a request has after the step, according to vLLM.
        """
        self._carry_out_actions()
        if self._connected is not None:
            self._plan_moves(self._connected, num_scheduled_tokens, tables_of, states_of)
        plan = self._steps.take_plan(preempts=preempts)
        plan.epoch, self._epoch = self._epoch, ""
        plan.computes = any(num_scheduled_tokens.values())
        loads_within = any(meta.loads for meta in plan.requests)
        num_tokens = 0 if loads_within else prefilled(num_scheduled_tokens.values())
        self._clock.planned(plan.number, time.monotonic(), num_tokens)
        return plan

    def _plan_moves(
        self, connected: Connected, num_scheduled_tokens: Mapping[str, int], tables_of: TablesOf, states_of: StatesOf
    ) -> None:
        """Add to the next plan what its step moves, besides the loads, which vLLM has decided on before."""
        self._steps.next.retained = connected.hints.take_retained()
        self._steps.next.recalls = connected.index.take_recalls()  # first: what it stores is recalled with a later one
        if self.enabled:
            for req_id in self._canary.waiting:
                tracker = self._trackers.get(req_id)
                if tracker is not None and (num_tokens := num_scheduled_tokens.get(req_id, 0)):
                    chunks = self._canary.plan(tracker, num_tokens, tables_of, connected.index, connected.rows)
                    self._describe(connected.index, tracker, chunks)
            for req_id in self._handovers.outgoing:
                tracker = self._trackers.get(req_id)
                if tracker is not None and (num_tokens := num_scheduled_tokens.get(req_id, 0)):
                    self._handovers.outgoing.plan(tracker, num_tokens, tables_of, connected.rows, states_of)
            for req_id, num_tokens in num_scheduled_tokens.items():
                tracker = self._trackers.get(req_id)
                if tracker is None or tracker.is_saved:
                    continue
                begin_tokens = tracker.request.num_computed_tokens
                if save := tracker.take_save(num_tokens):
                    tables, step_tokens = tables_of(req_id), (begin_tokens, begin_tokens + num_tokens)
                    states = connected.rows.states_at(tables, step_tokens, states_of(req_id))
                    self._plan_save(connected, tracker, save, tables, states)
            connected.prefetches.plan(time.monotonic(), is_idle=not (num_scheduled_tokens or self._trackers))
        connected.loads.note_blocks(num_scheduled_tokens, tables_of)
        connected.remote.end_pass()
        connected.matching.running = set(num_scheduled_tokens)
        self._steps.next.removals += connected.index.take_removals()
        self._steps.next.limited = connected.hints.take_limited()

    def _plan_save(
        self, connected: Connected, tracker: RequestTracker, save: SaveSpec, tables: Tables, states: States
    ) -> None:
        """Add a request's new chunks to the next plan."""
        connected.index.advance(time.monotonic())  # a time to live begins here
        tracker.stats.stored_chunks += connected.saves.plan(tracker, save, tables, states)
        blocks = ((ref, ref.blocks_from(begin)) for ref, begin in save.first_blocks().items())
        self._describe(connected.index, tracker, blocks)

    def complete(self, report: StepReport) -> None:
        """Process the workers' report, merged over all ranks."""
        self._stats.add(report.tally)
        self._handovers.complete(report)
        connected = self._connected
        if connected is None:
            return
        if report.computed is not None:
            connected.choice.computed(*self._clock.ended(report.computed, time.monotonic()))
        connected.index.set_tiers(report.tiers)
        connected.loads.note_times(report.load_times)
        for number, result in sorted(report.steps.items()):
            step = self._steps.merge(number, result)
            if not step.is_loaded and step.result.ranks_loaded == connected.num_ranks:
                self._steps.end_loads(number)
                connected.loads.complete_step(number, step.result)
            if step.result.ranks_ended == connected.num_ranks:
                del self._steps.in_flight[number]
                self._complete_saves(connected, number, step)
        for number, fetched in report.fetches.items():
            self._complete_fetch(connected, number, fetched)
        may_save_again = [connected.saves.complete_write(written) for written in report.writes]
        if any(may_save_again):
            self._restart_saving()
        connected.hints.hold()

    def _complete_fetch(self, connected: Connected, number: int, result: FetchResult) -> None:
        failed_id = connected.loads.complete_fetch(number, result)
        if failed_id in self._trackers:
            self._trackers[failed_id].load_failed = True

    def _complete_saves(self, connected: Connected, number: int, step: InFlightStep) -> None:
        wrong = complete_verifies(connected.index, step)
        connected.saves.complete_step(number, step.result.failed_stores, distrusted=step.distrusted)
        if step.result.failed_stores or step.distrusted or wrong:
            self._restart_saving()
        if step.distrusted:
            self._handovers.outgoing.restart()

    def _restart_saving(self) -> None:
        for tracker in self._trackers.values():
            tracker.restart_saving()

    def reset_cache(self) -> None:
        """Forget everything, because the weights have changed.

        The namespace names the weights that vLLM was started with, so later chunks are stored under a new epoch of it.
        Requests that have computed something hold KV of the old weights until they end, and are tracked no longer.
        """
        self._epoch = new_epoch()
        if self._connected is not None:
            self._connected.saves.cancel_coming()
            self._connected.index.clear()
            self._connected.index.take_removals()  # they belong to the old epoch, which is removed as a whole
            self._connected.index.take_retentions()
            self._connected.hints.cancel_coming()
            self._connected.prefetches.cancel()
            self._connected.remote.reset(self._epoch)
        for req_id, tracker in list(self._trackers.items()):
            if tracker.request.num_computed_tokens:
                del self._trackers[req_id]
                self._stats.log_request(req_id, tracker.stats)
                self._handovers.end(req_id)
        self._restart_saving()

    def close(self) -> None:
        """End the questions to the remote tier, and the trace."""
        if self._connected is not None:
            self._connected.remote.close()
        self._recording.close()
