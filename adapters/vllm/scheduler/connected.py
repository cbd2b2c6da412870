"""Parts of the scheduler side that exist once the workers have sent their facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.requests.rows import RowMap
from kvstore.adapters.vllm.scheduler.canary import Canary
from kvstore.adapters.vllm.scheduler.choice import LoadChoice
from kvstore.adapters.vllm.scheduler.handovers import Handovers
from kvstore.adapters.vllm.scheduler.hints import PromptHints
from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.adapters.vllm.scheduler.matching import Matching
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.prefetches import Prefetches
from kvstore.adapters.vllm.scheduler.saves import SavePlanner
from kvstore.adapters.vllm.scheduler.shards import check_hosts, shards_of
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.engine.opening import open_directory
from kvstore.engine.options import RemoteOptions, Shard
from kvstore.index.index import ChunkIndex
from kvstore.index.owners import Owners
from kvstore.index.plans import TierState
from kvstore.index.remote_view import RemoteView
from kvstore.index.retained import Limits
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.history import ChunkEvent
from kvstore.model.layout import KVLayout
from kvstore.protocol.hosts import this_host
from kvstore.tiers.directory import RemoteDirectory


@dataclass(frozen=True)
class Connected:
    """The index and the planners that use it.

    Attributes:
        num_ranks: number of workers that report each step.
        index: the index of all chunks.
        remote: lookups at the remote tier.
        choice: learns the speed of loads and steps.
        matching: makes offers to requests.
        loads: plans loads.
        saves: plans stores.
        hints: carry out what clients say of their prompts.
        prefetches: bring prompts to memory before their conversations go on.
        rows: maps block tables to the rows of chunks and checkpoints.
        drain_names: the workers' names for orders to drain; empty for a worker on another host.
    """

    num_ranks: int
    index: ChunkIndex
    remote: RemoteLookup
    choice: LoadChoice
    matching: Matching
    loads: LoadPlanner
    saves: SavePlanner
    hints: PromptHints
    prefetches: Prefetches
    rows: RowMap
    drain_names: Sequence[str] = ()

    @classmethod
    def to(
        cls,
        facts: Sequence[WorkerFacts],
        options: SchedulerOptions,
        handovers: Handovers,
        canary: Canary,
        steps: StepTracker,
        *,
        count_hint: Callable[[str, str], None],
        note_event: Callable[[ChunkEvent], None] | None = None,
    ) -> Connected:
        """Connect to the workers. A chunk counts only if every rank holds its part.

        Raises:
            KVStoreError: the remote tier cannot be opened, or the workers are where they cannot be used.
        """
        check_hosts(facts, options.remote)
        shards = shards_of(facts, options.remote)
        options = options if shards else replace(options, remote=None)
        sizes = [dict(rank.survivors) for rank in facts]
        held = [set(rank) for rank in sizes]
        complete = set.intersection(*held)
        remote, num_ranks = _open_remote(shards, options.remote), len(facts)
        rows = _row_map(facts, options)
        index = _new_index(facts, options, remote, rows.checkpoints, note_event)
        index.set_tiers(TierState(remote_keeps_lifetimes=all(rank.sends_lifetimes for rank in facts)))
        found = ((ref, max(rank[ref] for rank in sizes)) for ref, _ in facts[0].survivors if ref in complete)
        index.adopt(
            found,
            {key: trail for rank in facts for key, trail in rank.trails.items()},
            {key: owner for rank in facts for key, owner in rank.owners.items()},
        )
        hints = PromptHints(index, steps, options.config, count_hint)
        hints.restore((one for rank in facts for one in rank.retained), (one for rank in facts for one in rank.limited))
        index.settle()
        handovers.connect(num_ranks, remote.names_peer, takes_parts=bool(facts[0].divisions))
        choice = LoadChoice(options.load_rules_for(num_ranks))
        loads = LoadPlanner(index, options.rules, choice, num_ranks, rows, plans=steps)
        saves = SavePlanner(index, num_ranks, rows, steps)
        steps.next.removals += set.union(*held) - complete
        matching = Matching(options, index, remote, loads, choice, handovers, canary)
        names = [rank.drain_name if rank.host == this_host() else "" for rank in facts]
        prefetches = Prefetches(index, loads, remote, keeps=options.config.local_cpu and options.loads)
        return cls(num_ranks, index, remote, choice, matching, loads, saves, hints, prefetches, rows, names)


def _open_remote(shards: Sequence[Shard], remote: RemoteOptions | None) -> RemoteLookup:
    if remote is None:
        return RemoteLookup(RemoteDirectory(()), RemoteView(0.0), 0.0)
    namespaces = [shard.namespace for shard in shards]
    view = RemoteView(remote.hold_s)
    return RemoteLookup(open_directory(shards), view, remote.lookup_timeout_s, remote.sources, namespaces)


def _row_map(facts: Sequence[WorkerFacts], options: SchedulerOptions) -> RowMap:
    ranks = tuple(rank.groups or _one_group(rank.layout) for rank in facts)
    if not ranks[0].needs_checkpoints:
        return RowMap(ranks[0])
    layouts = tuple(rank.layout for rank in facts)
    return RowMap(ranks[0], Checkpoints(ranks, layouts, options.config.checkpoint_interval))


def _one_group(layout: KVLayout) -> Groups:
    return Groups((Group(GroupKind.FULL, layout.block_tokens, layout.block_bytes),))


def _new_index(
    facts: Sequence[WorkerFacts],
    options: SchedulerOptions,
    remote: RemoteLookup,
    checkpoints: Checkpoints | None,
    note_event: Callable[[ChunkEvent], None] | None,
) -> ChunkIndex:
    def stored_bytes(num_blocks: int) -> int:
        return max(rank.stored_bytes[num_blocks - 1] for rank in facts)

    disk_capacity_bytes = min(rank.disk_capacity_bytes for rank in facts)
    chunk_bytes = max(rank.stored_bytes[-1] for rank in facts) if disk_capacity_bytes else 1
    return ChunkIndex(
        min(rank.num_slots for rank in facts),
        keep_in_memory=options.config.local_cpu,
        disk_capacity_bytes=disk_capacity_bytes,
        stored_bytes=stored_bytes,
        max_writes=options.config.max_write_queue,
        remote=remote.view if options.remote else None,
        max_sends=options.remote.max_queue if options.remote else None,
        cache_policy=options.config.cache_policy,
        disk_policy=options.config.disk_cache_policy,
        tracks_changes=options.announces is not None,
        note_event=note_event,
        checkpoints=checkpoints,
        slots_take_turns=any(rank.slots_take_turns for rank in facts),
        reads_fronts=all(rank.reads_fronts for rank in facts),
        retention=Limits.of_disk(disk_capacity_bytes // chunk_bytes, options.config.retain_share),
        disk_keeps_lifetimes=all(rank.keeps_lifetimes for rank in facts),
        owners=Owners(
            options.config.quotas, slot_bytes=max(rank.slot_bytes for rank in facts), chunk_bytes=chunk_bytes
        ),
    )
