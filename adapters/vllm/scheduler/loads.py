"""Plans the loads that vLLM decided on, within a step or asynchronous, and follows them until every rank has reported.

vLLM's prefix cache offers the blocks of a load within a step to others at once, before the load is known to succeed.
Those of an asynchronous load are not shared before it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.adapters.vllm.plan import NO_REQUEST, Fetch, FetchResult, LoadTime, Sourced, StepResult
from kvstore.adapters.vllm.requests import blocks
from kvstore.adapters.vllm.requests.rows import RowMap, Tables, TablesOf
from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadChoice, slowest
from kvstore.adapters.vllm.scheduler.parts import Part, overlapping, with_blocks
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.adapters.vllm.telemetry.stats import HitTokens
from kvstore.index.index import ChunkIndex
from kvstore.index.owners import Owner
from kvstore.index.plans import LoadStep, Place
from kvstore.index.remote_view import RemoteAnswers
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher, PrefixKey
from kvstore.paged.base import BlockIds
from kvstore.paged.grouped import any_present
from kvstore.transfer.mover import LoadJob, as_block_ids

_MAX_UNTIMED = 64  # a rank may never report its time
_NO_BLOCKS = as_block_ids(())
_NOT_LOADED = 1  # stands for any block that a request lacks: it starts over


@dataclass
class _Unverified:
    """A load within a step that may yet fail.

    Attributes:
        req_id: the request it is for.
        block: position of its first block in the request.
        key: the key of that block's end.
        block_ids: that block and all after it, those computed since included.
    """

    req_id: str
    block: int
    key: PrefixKey
    block_ids: set[int] = field(default_factory=set)


class _Load(NamedTuple):
    """A chunk, and the rows into which it is loaded."""

    ref: ChunkRef
    rows: BlockIds

    @classmethod
    def to(cls, ref: ChunkRef, rows: BlockIds | None) -> _Load | None:
        """Create a load, or None without rows."""
        return None if rows is None else cls(ref, rows)


@dataclass
class _StepLoads:
    """Loads of one step."""

    steps: list[LoadStep] = field(default_factory=list)
    carried: Counter[Place] = field(default_factory=Counter)
    unverified: list[_Unverified] = field(default_factory=list)
    time: LoadTime = field(default_factory=LoadTime)


@dataclass
class _Fetching:
    """An asynchronous load that is planned or in flight."""

    req_id: str
    steps: list[LoadStep]
    carried: Counter[Place]
    is_whole: bool  # nothing that it needs was missing when it was planned
    result: FetchResult = field(default_factory=FetchResult)
    brought: set[PrefixKey] = field(default_factory=set)  # chunks of it for which others need not wait any more


class LoadPlanner:
    """Planner of an engine's loads. For the scheduler's thread.

    Args:
        index: of all chunks.
        rules: the sizes of blocks and chunks.
        choice: learns the times of loads.
        num_ranks: number of ranks that report each load.
        rows: maps block tables to rows.
        plans: has the next plan.
    """

    def __init__(
        self,
        index: ChunkIndex,
        rules: SaveRules,
        choice: LoadChoice,
        num_ranks: int,
        rows: RowMap,
        *,
        plans: StepTracker,
    ) -> None:
        self._index = index
        self._rules = rules
        self._choice = choice
        self._num_ranks = num_ranks
        self._rows = rows
        self._plans = plans
        self._in_flight: dict[int, _StepLoads] = {}  # by step, the next included
        self._untimed: dict[int, _StepLoads] = {}  # done, but some rank has yet to report its time
        self._fetching: dict[int, _Fetching] = {}
        self._fetched_keys: Counter[PrefixKey] = Counter()  # of chunks that asynchronous loads bring
        self._number = 0

    @property
    def needs_checkpoints(self) -> bool:
        """True if a load can only end at a checkpoint."""
        return self._rows.checkpoints is not None

    @property
    def has_chunks(self) -> bool:
        """True if chunks are stored, and not only checkpoints."""
        return self._rows.has_chunks

    @property
    def ends_in_blocks(self) -> bool:
        """True if a load can only end where a block of every group ends."""
        return self._rows.is_grouped

    # -- before a load -----------------------------------------------------------------------------------------------

    def sources(self, spec: LoadSpec) -> Counter[Place]:
        """Count the tokens of a load that would come from each place."""
        tokens = self._by_source(spec, lambda part, _: (part.stop - part.start) * self._rules.block_tokens)
        if not self._rows.has_chunks:
            sources = [self._index.source(ref, spec.told) for ref in spec.match.checkpoint]
            tokens[slowest(source for source in sources if source is not None)] += spec.num_external_tokens
        return tokens

    def carried(self, spec: LoadSpec) -> Counter[Place]:
        """Count the tokens that a load would carry from each place: of a chunk not in memory, all that is read.

        A part of a checkpoint counts for as many tokens of a chunk as have its bytes.
        """
        tokens = self._by_source(spec, self.carried_of)
        for ref in spec.match.checkpoint:
            tokens[self._index.source(ref, spec.told) or Place.MEMORY] += ref.num_blocks * self._rules.block_tokens
        return tokens

    def _by_source(self, spec: LoadSpec, tokens_of: Callable[[Part, Place], int]) -> Counter[Place]:
        tokens: Counter[Place] = Counter()
        for part in overlapping(spec.match, self._rules, spec.num_local_tokens, spec.num_external_tokens):
            source = self._index.source(part.ref, spec.told) or Place.MEMORY
            tokens[source] += tokens_of(part, source)
        return tokens

    def carried_of(self, part: Part, source: Place) -> int:
        """Return the tokens that are carried for the wanted blocks of a chunk."""
        if source is Place.MEMORY:
            return (part.stop - part.start) * self._rules.block_tokens
        can_cut = source is Place.REMOTE and part.front_blocks and not self._rows.is_grouped
        is_cut = can_cut and self._index.front(part.ref, part.front_blocks)
        return (part.front_blocks if is_cut else part.ref.num_blocks) * self._rules.block_tokens

    def blocks_of(
        self, tracker: RequestTracker, spec: LoadSpec, num_external_tokens: int
    ) -> Iterator[tuple[ChunkRef, range]]:
        """Yield the chunks of a load with their blocks' positions in the request; leading blocks also as a tail."""
        for part in overlapping(spec.match, self._rules, spec.num_local_tokens, num_external_tokens):
            yield part.ref, part.known
            if part.front_blocks:
                yield ChunkRef(self._block_key(tracker.hasher, part.stop - 1), part.front_blocks), part.known

    def first_remote_token(self, spec: LoadSpec) -> int:
        """Return the first token of the first chunk that a load would bring from a remote tier.

        If only a checkpoint would come from there, return the first token of the load, as the rest is of no use alone.
        """
        parts = overlapping(spec.match, self._rules, spec.num_local_tokens, spec.num_external_tokens)
        starts = (part.start for part in parts if self._index.source(part.ref, spec.told) is Place.REMOTE)
        return next(starts, spec.num_local_tokens // self._rules.block_tokens) * self._rules.block_tokens

    def awaited(self, spec: LoadSpec, *, any_load: bool) -> PrefixKey | None:
        """Return the key of the last chunk to be loaded that another request's load brings, and which may still fail.

        Chunks arrive in order, so the others have mostly arrived with that one, and no lookup is needed before. Without
        ``any_load``, only asynchronous loads count.
        """
        parts = overlapping(spec.match, self._rules, spec.num_local_tokens, spec.num_external_tokens)
        keys = [ref.prefix_key for ref in (*(part.ref for part in parts), *spec.match.checkpoint)]
        return next((key for key in reversed(keys) if self.is_coming(key, any_load=any_load)), None)

    def is_coming(self, key: PrefixKey, *, any_load: bool = True) -> bool:
        """Tell if a load in flight brings a chunk; without ``any_load``, only asynchronous loads count."""
        return self._index.is_loading(key) and (any_load or self._fetched_keys[key] > 0)

    def rests_on_unverified(self, tracker: RequestTracker, num_local_tokens: int) -> bool:
        """Tell if the first ``num_local_tokens`` include a block whose load has not been reported."""
        num_local_blocks = num_local_tokens // self._rules.block_tokens
        return any(
            load.block < num_local_blocks and self._block_key(tracker.local_hasher(), load.block) == load.key
            for load in self._unverified()
        )

    def is_fetching(self, request_id: str) -> bool:
        """Tell if a request waits for an asynchronous load."""
        return any(fetching.req_id == request_id for fetching in self._fetching.values())

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, tracker: RequestTracker, spec: LoadSpec, tables: Tables, num_external_tokens: int) -> HitTokens:
        """Plan to load ``num_external_tokens`` of a promise, and return their split by tier.

        Tokens before a sliding window have no blocks, and are not loaded.
        """
        plan = self._plan_groups if self._rows.is_grouped else self._plan_blocks
        tokens = plan(tracker, spec, tables, num_external_tokens)
        disk_tokens = min(num_external_tokens, tokens[Place.DISK])
        remote_tokens = min(num_external_tokens - disk_tokens, tokens[Place.REMOTE])
        memory_tokens = num_external_tokens - disk_tokens - remote_tokens
        return {Place.MEMORY: memory_tokens, Place.DISK: disk_tokens, Place.REMOTE: remote_tokens}

    def _plan_blocks(
        self, tracker: RequestTracker, spec: LoadSpec, tables: Tables, num_external_tokens: int
    ) -> Counter[Place]:
        """Plan to load blocks of the only group, and return the tokens by source. Other blocks are computed."""
        table, block_tokens, request_id = tables[0], self._rules.block_tokens, tracker.request.request_id
        first_block = spec.num_local_tokens // block_tokens
        end_block = -(-(spec.num_local_tokens + num_external_tokens) // block_tokens)
        parts = overlapping(spec.match, self._rules, spec.num_local_tokens, num_external_tokens)
        wanted = list(with_blocks(parts, table))
        steps = self._prepare(tracker, spec, [part.ref for part in wanted], wanted[-1].front_blocks if wanted else 0)
        jobs, tokens, carried, loaded_end = [], Counter[Place](), Counter[Place](), first_block
        for step, part in zip(steps, wanted, strict=False):
            jobs.append(LoadJob(step, as_block_ids(table[part.start : part.stop]), part.start - part.begin))
            tokens[step.source] += (part.stop - part.start) * block_tokens
            num_carried = part.stop - part.start if step.source is Place.MEMORY else step.ref.num_blocks
            carried[step.source] += num_carried * block_tokens
            loaded_end = part.stop
        lost_block_ids = blocks.present(table[loaded_end:end_block])
        if spec.async_load:
            has_gaps = blocks.NULL_BLOCK in table[:end_block]
            self._plan_fetch(Fetch(0, request_id, jobs, lost_block_ids, has_gaps), carried, steps)
        else:
            self._plan_within(tracker, first_block, jobs, lost_block_ids, carried)
        return tokens

    def _plan_groups(
        self, tracker: RequestTracker, spec: LoadSpec, tables: Tables, num_external_tokens: int
    ) -> Counter[Place]:
        """Plan to load chunks and the checkpoint behind them. If any part is missing, the request starts over."""
        loads = self._group_loads(spec, tables, num_external_tokens)
        tokens, carried = self.sources(spec), self.carried(spec)  # before each has a slot in memory
        steps = self._prepare(tracker, spec, [load.ref for load in loads or ()])
        is_whole = loads is not None and len(steps) == len(loads)
        jobs = [LoadJob(step, load.rows, 0) for step, load in zip(steps, loads or (), strict=False)]
        lost_block_ids = [] if is_whole else [_NOT_LOADED]
        fetch = Fetch(0, tracker.request.request_id, jobs, lost_block_ids, has_gaps=True)
        self._plan_fetch(fetch, carried, steps, is_whole=is_whole)
        return tokens if is_whole else Counter()

    def _group_loads(self, spec: LoadSpec, tables: Tables, num_external_tokens: int) -> list[_Load] | None:
        """Return a hit's loads with their rows; None if the request lacks a block, or takes less than was promised."""
        begin_tokens, rows, match = spec.num_local_tokens, self._rows, spec.match
        if rows.checkpoints is not None and begin_tokens + num_external_tokens != match.num_tokens:
            return None
        loads: list[_Load | None] = []
        for ref, begin, start, stop, _ in overlapping(match, self._rules, begin_tokens, num_external_tokens):
            loads.append(_Load.to(ref, rows.to_load(tables, begin, start, stop, ref.num_blocks)))
        if rows.checkpoints is not None:
            for ref, part in zip(match.checkpoint, rows.checkpoints.rows(match.num_tokens), strict=True):
                loads.append(_Load.to(ref, rows.part_to_load(tables, part, begin_tokens)))
        found = [load for load in loads if load is not None]
        if len(found) < len(loads):
            return None
        # Where the request has all of a part's blocks, the part is used from memory, and not read from elsewhere.
        return [load for load in found if any_present(load.rows) or self._index.in_memory(load.ref.prefix_key)]

    def _prepare(
        self, tracker: RequestTracker, spec: LoadSpec, refs: Sequence[ChunkRef], front_blocks: int = 0
    ) -> list[LoadStep]:
        """Plan to load chunks into their slots as far as possible; of the last one, ``front_blocks`` unless 0."""
        checkpoint = spec.match.checkpoint if set(refs).issuperset(spec.match.checkpoint) else ()
        hasher = tracker.hasher if self._rows.checkpoints is None else None
        owner = self._index.owners.of(tracker.hasher)
        steps = self._index.prepare_load(refs, spec.told, checkpoint, hasher, front_blocks, owner=owner)
        tracker.noted.update(step.ref.prefix_key for step in steps)
        remote_refs = [step.read for step in steps if step.source is Place.REMOTE]
        if spec.told.source and remote_refs:
            self._plans.next.sourced.append(Sourced(spec.told.source, remote_refs))
        return steps

    def bring(
        self,
        refs: Sequence[ChunkRef],
        told: RemoteAnswers,
        checkpoint: Sequence[ChunkRef],
        trails: Mapping[PrefixKey, bytes],
        owner: Owner | None,
    ) -> int | None:
        """Plan to load those of an owner's chunks, a prefix, that are not in memory into slots, for no request.

        Returns the number of the fetch; None if there is nothing to load, or no room.
        """
        steps = self._index.prepare_load(refs, told, checkpoint, trails=trails, is_use=False, owner=owner)
        jobs = [LoadJob(step, _NO_BLOCKS, 0) for step in steps if step.source is not Place.MEMORY]
        if not jobs:
            self._index.complete_load(steps, frozenset(), frozenset())
            return None
        self._plan_fetch(Fetch(0, NO_REQUEST, jobs), Counter(), steps)
        return self._number

    def is_under_way(self, number: int) -> bool:
        """Tell if some rank has yet to report the end of a fetch."""
        return number in self._fetching

    def _plan_fetch(
        self, fetch: Fetch, carried: Counter[Place], steps: list[LoadStep], *, is_whole: bool = True
    ) -> None:
        self._number += 1
        fetch.number = self._number
        self._plans.next.fetches.append(fetch)
        self._fetching[fetch.number] = _Fetching(fetch.req_id, steps, carried, is_whole)
        self._fetched_keys.update(step.ref.prefix_key for step in steps if step.source is not Place.MEMORY)

    def _plan_within(
        self,
        tracker: RequestTracker,
        first_block: int,
        jobs: list[LoadJob],
        lost_block_ids: list[int],
        carried: Counter[Place],
    ) -> None:
        meta = self._plans.meta(tracker.request.request_id)
        meta.loads, meta.lost_block_ids = jobs, lost_block_ids
        loads = self._in_flight.setdefault(self._plans.next.number, _StepLoads())
        loads.steps += (job.step for job in jobs)
        loads.carried.update(carried)
        # A slot that another load is filling counts, too: a failure of that load is one of this load.
        if lost_block_ids or not all(self._index.in_memory(job.step.ref.prefix_key) for job in jobs):
            key = self._block_key(tracker.local_hasher(), first_block)
            loads.unverified.append(_Unverified(meta.req_id, first_block, key))

    def note_blocks(self, num_scheduled_tokens: Mapping[str, int], tables_of: TablesOf) -> None:
        """Note the blocks of requests in the coming step whose loads may yet fail."""
        for load in self._unverified():
            if load.req_id in num_scheduled_tokens:
                load.block_ids.update(tables_of(load.req_id)[0][load.block :])

    # -- results -----------------------------------------------------------------------------------------------------

    def complete_step(self, number: int, result: StepResult) -> None:
        """Complete the loads of a step, which every rank has reported."""
        loads = self._in_flight.pop(number, None)
        if loads is None:
            return
        self._index.complete_load(loads.steps, result.failed_loads, result.lost_chunks)
        if not result.is_poisoned:
            self._untimed[number] = loads
            self._note_time(number, LoadTime())
        while len(self._untimed) > _MAX_UNTIMED:
            self._untimed.pop(next(iter(self._untimed)))

    def note_times(self, times: Mapping[int, LoadTime]) -> None:
        """Note the times that ranks have reported for the loads of steps."""
        for number, time in times.items():
            self._note_time(number, time)

    def _note_time(self, number: int, time: LoadTime) -> None:
        loads = self._untimed.get(number) or self._in_flight.get(number)
        if loads is None:
            return
        loads.time.merge(time)
        if loads.time.ranks == self._num_ranks and self._untimed.pop(number, None) is not None:
            self._choice.loaded(loads.carried, loads.time.seconds)

    def complete_fetch(self, number: int, result: FetchResult) -> str | None:
        """Add a rank's result of a fetch. Return the request's id if this is the last rank and something has failed."""
        fetching = self._fetching[number]
        fetching.result.merge(result)
        result = fetching.result
        if result.ranks_ended < self._num_ranks:
            self._note_arrivals(fetching)
            return None
        del self._fetching[number]
        self._index.complete_load(fetching.steps, result.failed_loads, result.lost_chunks)
        slow = (step.ref.prefix_key for step in fetching.steps if step.source is not Place.MEMORY)
        self._fetched_keys -= Counter(key for key in slow if key not in fetching.brought)
        if result.failed_loads or not fetching.steps or not fetching.is_whole:
            return fetching.req_id
        if fetching.req_id != NO_REQUEST:
            self._choice.loaded(fetching.carried, result.load_s)
        return None

    def _note_arrivals(self, fetching: _Fetching) -> None:
        """Let others use the chunks that have arrived in every rank's memory while the rest of a load is in flight."""
        for step in fetching.steps:
            key = step.ref.prefix_key
            is_new = step.source is not Place.MEMORY and key not in fetching.brought
            if is_new and fetching.result.arrived[key] == self._num_ranks:
                fetching.brought.add(key)
                self._fetched_keys[key] -= 1
                self._index.note_arrival(step)

    def spoilt_blocks(self, failed_block_ids: AbstractSet[int]) -> set[int]:
        """Return the blocks that could not be loaded, and those computed from them. Call before ``complete_step``."""
        behind = (load.block_ids for load in self._unverified() if not load.block_ids.isdisjoint(failed_block_ids))
        return set(failed_block_ids).union(*behind)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _unverified(self) -> Iterator[_Unverified]:
        for loads in self._in_flight.values():
            yield from loads.unverified

    def _block_key(self, hasher: PrefixHasher, block: int) -> PrefixKey:
        chunk, inside = divmod(block, self._rules.chunk_tokens // self._rules.block_tokens)
        return hasher.block_keys(chunk)[inside]
