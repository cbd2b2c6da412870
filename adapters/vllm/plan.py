"""What travels between the scheduler side and the worker side, once a step each way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.catalog.plans import Place
from kvstore.checkpoints.groups import Groups
from kvstore.chunks import ChunkRef
from kvstore.handover.ledger import PushJob, Settled
from kvstore.heads import Division
from kvstore.keys import Namespace, PrefixKey
from kvstore.layout import KVLayout
from kvstore.ops.metrics import Tally
from kvstore.options import RemoteOptions, Shard
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import LoadJob, StoreJob


@dataclass
class ReqMeta:
    """One request's part in a step.

    Attributes:
        req_id: vLLM's id of the request.
        loads: chunks to bring into its blocks before the forward pass.
        stores: chunks to take from its blocks after the forward pass.
        lost_block_ids: blocks that were promised to be loaded, but whose chunk is gone: to be reported as failed.
        verifies: chunks to compare, after the forward pass, with the blocks that hold the same, computed again.
        finished: the request has ended, and vLLM keeps its blocks until its stores are reported.
        pushes: chunks to hand over to another engine, from its blocks after the forward pass.
        receiver: which engine.
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
    """An asynchronous load: its request waits for it, and no step does.

    Attributes:
        number: counts the fetches, from 1.
        req_id: vLLM's id of the request.
        loads: chunks to bring into its blocks.
        lost_block_ids: as in ``ReqMeta``.
        has_gaps: the request lacks blocks before those that are loaded. It cannot go on from a block that fails, and
            starts over.
    """

    number: int
    req_id: str
    loads: list[LoadJob] = field(default_factory=list)
    lost_block_ids: list[int] = field(default_factory=list)
    has_gaps: bool = False


class Sourced(NamedTuple):
    """Chunks of a request that names an engine which has them."""

    source: str
    refs: Sequence[ChunkRef]


@dataclass
class StepPlan:
    """Scheduler to workers: what to move in this step; every worker carries out the same plan on its shard.

    Attributes:
        number: counts the steps, from 1.
        used: chunks that came for requests that have begun, and are not read; others may take their places.
        ended_handovers: numbers of hand-overs of which no later plan has chunks.
        computes: the step computes something; vLLM passes on nothing of other steps unless a connector reports.
        acked: the last step whose report the scheduler had taken in when it made this plan.
        requests: the requests with something to move; if there is any, every rank reports the step.
        fetches: loads to begin, of which every rank reports the end.
        preempts: blocks of preempted requests are about to be overwritten.
        removals: chunks that must leave the disk, before anything else.
        recalls: chunks that must also leave the remote tier.
        epoch: unless empty, forget every chunk first, and keep those to come under this epoch of the namespace.
        sourced: chunks to load for requests that name an engine to read them from.
    """

    number: int
    acked: int
    requests: list[ReqMeta] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    preempts: bool = False
    removals: list[ChunkRef] = field(default_factory=list)
    recalls: list[ChunkRef] = field(default_factory=list)
    epoch: str = ""
    sourced: list[Sourced] = field(default_factory=list)
    used: list[ChunkRef] = field(default_factory=list)
    ended_handovers: list[int] = field(default_factory=list)
    computes: bool = False


@dataclass
class LoadsResult:
    """What loads did not bring; the rest is there once every rank has ended them."""

    failed_loads: set[PrefixKey] = field(default_factory=set)
    lost_chunks: set[PrefixKey] = field(default_factory=set)  # of these, missing or damaged
    ranks_ended: int = 0

    def merge(self, other: Self) -> None:
        """Add another part: what failed on one rank failed."""
        self.failed_loads |= other.failed_loads
        self.lost_chunks |= other.lost_chunks
        self.ranks_ended += other.ranks_ended


@dataclass
class FetchResult(LoadsResult):
    """News of a fetch, and how long it took on the slowest rank.

    Attributes:
        arrived: the chunks that have come to their slots, while it goes on; on how many ranks.
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
    """What failed in one step; the rest of its plan is done once every rank has ended the step.

    A rank may report a step in two parts: its loads with the forward pass, and its stores with a later one, if a draft
    model runs in between, or if stores are asynchronous.
    """

    failed_stores: set[PrefixKey] = field(default_factory=set)
    unread: set[PrefixKey] = field(default_factory=set)  # could not be compared
    mismatches: set[PrefixKey] = field(default_factory=set)  # what is stored is not what was computed
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
        """Whether the step computed on blocks that were never loaded."""
        return bool(self.failed_loads) or self.lost_blocks


@dataclass
class LoadTime:
    """What the loads of a step took on the slowest of so many ranks. A device tells it some steps later."""

    seconds: float = 0.0
    ranks: int = 0

    def merge(self, other: LoadTime) -> None:
        """Add other ranks."""
        self.seconds = max(self.seconds, other.seconds)
        self.ranks += other.ranks


class Written(NamedTuple):
    """A write-behind that has ended: whether the chunk was stored, and how many bytes it takes on disk."""

    target: Place
    ref: ChunkRef
    stored: bool
    size_bytes: int | None = None


@dataclass
class StepReport:
    """Workers to scheduler: results of steps, fetches, and writes to slower tiers, ended since the last report.

    Attributes:
        computed: the step that this report comes with, if it computed something.
        load_times: of steps whose loads have ended, by their numbers.
        remote_keeps_trails: the remote tier keeps the trails of what is sent there, as far as is known.
        settled: what became of chunks that were handed over.
        senders: what has changed of what other engines have on its way here, by ranks and the engines' names; None for
            one that has gone.
    """

    steps: dict[int, StepResult] = field(default_factory=dict)
    fetches: dict[int, FetchResult] = field(default_factory=dict)
    writes: list[Written] = field(default_factory=list)
    disk_answers: bool = True
    remote_answers: bool = True
    remote_keeps_trails: bool = False
    tally: Tally = field(default_factory=Tally)
    computed: int | None = None
    load_times: dict[int, LoadTime] = field(default_factory=dict)
    settled: Settled = field(default_factory=Settled)
    senders: dict[int, dict[str, Progress | None]] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """Whether anything has ended, or come up."""
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
        self.disk_answers &= other.disk_answers
        self.remote_answers &= other.remote_answers
        self.remote_keeps_trails &= other.remote_keeps_trails
        self.tally.add(other.tally)
        self.settled.merge(other.settled)
        for rank, changed in other.senders.items():
            self.senders.setdefault(rank, {}).update(changed)


@dataclass(frozen=True)
class WorkerFacts:
    """Worker to scheduler, once at start: what the worker owns.

    Attributes:
        num_slots: slots of its CPU pool.
        slot_bytes: bytes of each.
        disk_capacity_bytes: bound of its disk tier; 0 without one.
        stored_bytes: bytes on disk of a chunk of 1, 2, ... blocks.
        survivors: the chunks its disk tier held, with their bytes, the longest untouched first.
        trails: those of the survivors, as far as the tier knows them.
        namespace: whose chunks its tiers hold.
        layout: their geometry.
        server_url: of the server that it has opened for others, where this engine's processes reach it; None without.
        groups: of layers whose KV it keeps; None for one that keeps all tokens.
        remote_problem: why its remote tier cannot be used now; None if it can, or there is none.
        slots_take_turns: as of ``ChunkIndex``.
        gpu_bytes: of its GPU tier; 0 without one.
        reads_fronts: as of ``ChunkIndex``.
        divisions: as of ``RemoteOptions``.
    """

    num_slots: int
    slot_bytes: int
    disk_capacity_bytes: int
    stored_bytes: Sequence[int]
    survivors: Sequence[tuple[ChunkRef, int]]
    namespace: Namespace
    layout: KVLayout
    server_url: str | None = None
    groups: Groups | None = None
    remote_problem: str | None = None
    slots_take_turns: bool = False
    gpu_bytes: int = 0
    trails: Mapping[PrefixKey, bytes] = field(default_factory=dict)
    reads_fronts: bool = False
    divisions: tuple[Division, ...] = ()


def shards_of(facts: Sequence[WorkerFacts], remote: RemoteOptions) -> list[Shard]:
    """Where to ask for each part of a chunk, given the workers in the order of their ranks.

    Workers that hold the same KV share their part at a remote tier, unless each has a server, or peers, of its own.
    """
    shards = {}
    servers = tuple(worker.server_url for worker in facts if worker.server_url is not None)
    for rank, worker in enumerate(facts):
        where = replace(remote, url=worker.server_url, is_own=True, servers=servers) if worker.server_url else remote
        options = replace(where, rank=rank, divisions=worker.divisions)
        name = worker.namespace.id, options.url, rank if options.peers is not None else 0
        shards[name] = Shard(worker.namespace, worker.layout, options)
    return list(shards.values())
