"""Messages between the scheduler side and the worker side, one per step each way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.handover.tracker import PushJob, Settled
from kvstore.index.plans import Place, TierState
from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import Groups
from kvstore.model.heads import Division
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.ops.metrics import Tally
from kvstore.protocol.hosts import this_host
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import LoadJob, StoreJob

NO_REQUEST: Final = ""
"""Id of a fetch into memory, for which no request waits."""


@dataclass
class ReqMeta:
    """One request's part in a step.

    Attributes:
        req_id: vLLM's id of the request.
        loads: chunks to load into its blocks before the forward pass.
        stores: chunks to store from its blocks after the forward pass.
        lost_block_ids: blocks whose promised chunk is gone, to be reported as failed.
        verifies: chunks to compare, after the forward pass, with the blocks that hold the same tokens, recomputed.
        finished: the request has ended, and vLLM keeps its blocks until its stores are reported.
        pushes: chunks to hand over to another engine, from its blocks after the forward pass.
        receiver: that engine.
    """

    req_id: str
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    lost_block_ids: list[int] = field(default_factory=list)
    verifies: list[LoadJob] = field(default_factory=list)
    finished: bool = False
    pushes: list[PushJob] = field(default_factory=list)
    receiver: DisaggSpec | None = None


@dataclass
class Fetch:
    """An asynchronous load, for which its request waits but no step does.

    Attributes:
        number: counts the fetches, from 1.
        req_id: vLLM's id of the request; ``NO_REQUEST`` to load chunks into their slots only.
        loads: chunks to load into its blocks.
        lost_block_ids: as in ``ReqMeta``.
        has_gaps: the request lacks blocks before those that are loaded, so it must start over if a block fails.
    """

    number: int
    req_id: str
    loads: list[LoadJob] = field(default_factory=list)
    lost_block_ids: list[int] = field(default_factory=list)
    has_gaps: bool = False


class Sourced(NamedTuple):
    """Chunks of a request, with the engine that the request names as their source."""

    source: str
    refs: Sequence[ChunkRef]


@dataclass
class StepPlan:
    """Scheduler to workers: the chunks to move in this step. Every worker carries out the same plan on its shard.

    Attributes:
        number: counts the steps, from 1.
        used: chunks that arrived for requests that have begun, and are not read; their places may be reused.
        ended_handovers: numbers of hand-overs of which no later plan has chunks.
        computes: the step computes something; vLLM returns nothing for other steps unless a connector reports.
        acked: the last step whose report the scheduler had processed when it made this plan.
        requests: the requests with something to move; if there is any, every rank reports the step.
        fetches: loads to begin, of which every rank reports the end.
        preempts: blocks of preempted requests are about to be overwritten.
        removals: chunks to remove from the disk before anything else.
        recalls: chunks to remove from the remote tier, too.
        retained: chunks that stay on disk, also after a restart, until a time in seconds since 1970.
        limited: chunks in slower tiers whose time to live has become longer, or has no end any more.
        epoch: unless empty, forget every chunk first, and store later ones under this epoch of the namespace.
        sourced: chunks to load for requests that name an engine to read them from.
    """

    number: int
    acked: int
    requests: list[ReqMeta] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    preempts: bool = False
    removals: list[ChunkRef] = field(default_factory=list)
    recalls: list[ChunkRef] = field(default_factory=list)
    retained: list[Retention] = field(default_factory=list)
    limited: list[Lifetime] = field(default_factory=list)
    epoch: str = ""
    sourced: list[Sourced] = field(default_factory=list)
    used: list[ChunkRef] = field(default_factory=list)
    ended_handovers: list[int] = field(default_factory=list)
    computes: bool = False


@dataclass
class LoadsResult:
    """Chunks that loads failed to bring; all others are loaded once every rank has ended the loads."""

    failed_loads: set[PrefixKey] = field(default_factory=set)
    lost_chunks: set[PrefixKey] = field(default_factory=set)  # of these, missing or damaged
    ranks_ended: int = 0

    def merge(self, other: Self) -> None:
        """Add another part; a chunk that failed on one rank has failed."""
        self.failed_loads |= other.failed_loads
        self.lost_chunks |= other.lost_chunks
        self.ranks_ended += other.ranks_ended


@dataclass
class FetchResult(LoadsResult):
    """Progress or result of a fetch, with its duration on the slowest rank.

    Attributes:
        arrived: chunks that have reached their slots while it continues, with the number of ranks.
    """

    load_s: float = 0.0
    arrived: Counter[PrefixKey] = field(default_factory=Counter)

    def merge(self, other: Self) -> None:
        """Add another rank's part."""
        super().merge(other)
        self.load_s = max(self.load_s, other.load_s)
        self.arrived += other.arrived


@dataclass
class StepResult(LoadsResult):
    """Failures of one step; the rest of its plan is done once every rank has ended the step.

    A rank may report a step in two parts: its loads with the forward pass, and its stores with a later one, if a draft
    model runs in between, or if stores are asynchronous.
    """

    failed_stores: set[PrefixKey] = field(default_factory=set)
    unread: set[PrefixKey] = field(default_factory=set)  # could not be compared
    mismatches: set[PrefixKey] = field(default_factory=set)  # the stored KV differs from the computed KV
    lost_blocks: bool = False
    ranks_loaded: int = 0

    def merge(self, other: Self) -> None:
        """Add another part of the same step, of this rank or another."""
        super().merge(other)
        self.failed_stores |= other.failed_stores
        self.unread |= other.unread
        self.mismatches |= other.mismatches
        self.lost_blocks |= other.lost_blocks
        self.ranks_loaded += other.ranks_loaded

    @property
    def is_poisoned(self) -> bool:
        """True if the step computed on blocks that were never loaded."""
        return bool(self.failed_loads) or self.lost_blocks


@dataclass
class LoadTime:
    """Duration of a step's loads on the slowest of ``ranks`` ranks. A device reports it some steps later."""

    seconds: float = 0.0
    ranks: int = 0

    def merge(self, other: LoadTime) -> None:
        """Add other ranks."""
        self.seconds = max(self.seconds, other.seconds)
        self.ranks += other.ranks


class Written(NamedTuple):
    """Result of a write-behind: ``stored`` is True if the chunk was stored, ``size_bytes`` its size on disk.

    ``is_full`` tells that the tier had no room.
    """

    target: Place
    ref: ChunkRef
    stored: bool
    size_bytes: int | None = None
    is_full: bool = False


@dataclass
class StepReport:
    """Workers to scheduler: results of steps, fetches, and writes to slower tiers, ended since the last report.

    Attributes:
        computed: the step that this report comes with, if it computed something.
        load_times: times of the loads of steps that have ended, by step number.
        tiers: state of the slower tiers.
        settled: outcomes of chunks that were handed over.
        senders: changed progress of hand-overs from other engines, by rank and the engine's name; None for an engine
            that has gone.
    """

    steps: dict[int, StepResult] = field(default_factory=dict)
    fetches: dict[int, FetchResult] = field(default_factory=dict)
    writes: list[Written] = field(default_factory=list)
    tiers: TierState = field(default_factory=TierState)
    tally: Tally = field(default_factory=Tally)
    computed: int | None = None
    load_times: dict[int, LoadTime] = field(default_factory=dict)
    settled: Settled = field(default_factory=Settled)
    senders: dict[int, dict[str, Progress | None]] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """True if anything has ended or changed."""
        ended = self.steps or self.fetches or self.writes or self.load_times
        return bool(ended or self.settled or self.senders)

    def merge(self, other: StepReport) -> None:
        """Add another rank's report."""
        self.computed = self.computed or other.computed
        for number, theirs in other.steps.items():
            self.steps.setdefault(number, StepResult()).merge(theirs)
        for number, time in other.load_times.items():
            self.load_times.setdefault(number, LoadTime()).merge(time)
        for number, fetched in other.fetches.items():
            self.fetches.setdefault(number, FetchResult()).merge(fetched)
        self.writes += other.writes
        self.tiers = self.tiers.joined(other.tiers)
        self.tally.add(other.tally)
        self.settled.merge(other.settled)
        for rank, changed in other.senders.items():
            self.senders.setdefault(rank, {}).update(changed)


@dataclass(frozen=True)
class WorkerFacts:
    """Worker to scheduler, once at start: the resources of the worker.

    Attributes:
        num_slots: slots of its CPU pool.
        slot_bytes: bytes of each slot.
        disk_capacity_bytes: bound of its disk tier; 0 without one.
        stored_bytes: bytes on disk of a chunk of 1, 2, ... blocks.
        survivors: the chunks that its disk tier held, with their bytes, least recently used first.
        trails: those of the survivors, as far as the tier knows them.
        owners: the ids of the survivors' owners, as far as the tier knows them.
        retained: those of the survivors that stay until a time, in seconds since 1970.
        limited: those of the survivors that have a time to live, in seconds since 1970.
        keeps_lifetimes: its disk tier keeps times to live.
        sends_lifetimes: its remote tier does; later the state of the tiers says so.
        namespace: that of the chunks in its tiers.
        layout: their geometry.
        host: that of its process, as ``this_host`` names it.
        remote_url: address at which other hosts reach its remote tier; None if they cannot, or there is none.
        server_url: address of its server for other engines, as this engine's processes reach it; None without one.
        groups: the groups of layers whose KV it keeps; None for one group that keeps all tokens.
        remote_problem: the reason why its remote tier cannot be used now; None if it can, or there is none.
        slots_take_turns: as in ``ChunkIndex``.
        gpu_bytes: bytes of its GPU tier; 0 without one.
        reads_fronts: as in ``ChunkIndex``.
        divisions: as in ``RemoteOptions``.
        drain_name: name for orders to drain, which processes of its host can send.
    """

    num_slots: int
    slot_bytes: int
    disk_capacity_bytes: int
    stored_bytes: Sequence[int]
    survivors: Sequence[tuple[ChunkRef, int]]
    namespace: Namespace
    layout: KVLayout
    host: str = field(default_factory=this_host)
    remote_url: str | None = field(default=None, repr=False)  # it may have a password
    server_url: str | None = None
    groups: Groups | None = None
    remote_problem: str | None = None
    slots_take_turns: bool = False
    gpu_bytes: int = 0
    trails: Mapping[PrefixKey, bytes] = field(default_factory=dict)
    owners: Mapping[PrefixKey, bytes] = field(default_factory=dict)
    retained: Sequence[Retention] = ()
    limited: Sequence[Lifetime] = ()
    keeps_lifetimes: bool = False
    sends_lifetimes: bool = False
    reads_fronts: bool = False
    divisions: tuple[Division, ...] = ()
    drain_name: str = ""
