"""The worker side: owns the memory and the disk, and carries out the scheduler's plans. No policy, no vLLM types."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch.profiler import record_function

from kvstore.adapters.vllm.plan import (
    NO_REQUEST,
    FetchResult,
    StepPlan,
    StepReport,
    WorkerFacts,
)
from kvstore.adapters.vllm.worker.background import Background, Fetched
from kvstore.adapters.vllm.worker.layered import LayeredLoad, LayerOrder
from kvstore.adapters.vllm.worker.pushes import Pushes, PushOptions
from kvstore.adapters.vllm.worker.reporter import Reporter
from kvstore.adapters.vllm.worker.verifier import Verifier
from kvstore.engine.opening import log_device_bytes, open_tiers
from kvstore.engine.options import EngineOptions
from kvstore.index.plans import Place
from kvstore.model.errors import TierError
from kvstore.model.groups import Groups
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.ops import metrics
from kvstore.ops.drains import DrainListener
from kvstore.ops.meters import WorkerMeter
from kvstore.paged.base import PagedKV, copy_threads
from kvstore.paged.footprint import WORKER_THREADS
from kvstore.transfer.counters import MoverCounters
from kvstore.transfer.layerwise import LayerStore
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob
from kvstore.transfer.stopwatch import Stopwatch

if TYPE_CHECKING:
    from kvstore.server.embedded import EmbeddedServer  # needs an extra

logger = logging.getLogger(__name__)

_POLL_S = 0.001
_DRAIN_S = 2.0  # for the server of this worker


@dataclass(frozen=True, kw_only=True)  # adjacent flags: one taken for another is a wrong byte
class WorkerOptions:
    """Options of a worker for moving KV.

    Attributes:
        layer_names: the model's layers, in the order of the layout.
        layerwise: the KV of a step is moved layer by layer, with the model. KV for other engines always is.
        async_save: stores run while the next step computes; otherwise a step ends when they have been gathered.
        push: options for handing KV over to other engines; None if it is not handed over.
        names_layers_early: the model names a layer before all of it is computed, as micro-batches do, so KV to store or
            hand over is gathered when the step ends.
        overwrites_early: blocks that are taken from a request may be overwritten before ``prepare`` is called.
        groups: the groups of layers whose KV is kept; None for one group that keeps all tokens.
        runs_ahead: vLLM plans a step before it knows of the loads that failed in the one before.
        remote_url: as in ``WorkerFacts``.
        engine_id: vLLM's.
    """

    layer_names: tuple[str, ...] = ()
    layerwise: bool = False
    async_save: bool = False
    push: PushOptions | None = None
    names_layers_early: bool = False
    overwrites_early: bool = False
    groups: Groups | None = None
    runs_ahead: bool = False
    remote_url: str | None = None
    engine_id: str = ""


class StoreWorker:
    """Worker side of a rank, called by the model runner from one thread; fetches and slow writes run on others."""

    def __init__(
        self,
        paged: PagedKV,
        namespace: Namespace,
        engine: EngineOptions,
        options: WorkerOptions | None = None,
        server: EmbeddedServer | None = None,
    ) -> None:
        """Open the tiers. ``server`` becomes the remote one, and is closed with them.

        Raises:
            ConfigError, FolderOwnedError, TierError: see ``open_tiers``. The server is still open then, and nothing
                else.
        """
        if server is not None and engine.remote is not None:
            engine = replace(engine, remote=replace(engine.remote, url=server.url, is_own=True))
        self._namespace = namespace
        self._engine = engine
        self._server = server
        options = self._options = options or WorkerOptions()
        self._layer_numbers = {name: number for number, name in enumerate(options.layer_names)}
        self._paged = paged
        self._layout = paged.layout
        problems: list[str] = []  # logged by the scheduler side, once for all ranks
        self._tiers = open_tiers(paged, namespace, engine, problems)
        self._remote_problem = next(iter(problems), None)
        rank = engine.remote.rank if engine.remote is not None else 0
        self._reporter = Reporter(self._tiers, server, rank)
        with ExitStack() as opened:
            opened.callback(self._tiers.close)
            lanes = self._tiers.open_lanes(engine, self._reporter.note_written)
            self._mover = Mover(
                paged,
                self._tiers.cpu,
                lanes,
                self._tiers.hot,
                staging_only=not (engine.local_cpu or options.layerwise),
                copy_threads=copy_threads(),
            )
            self._pushes = Pushes(paged, namespace, options.push)
            opened.callback(self._pushes.close, 0)
            self._verifier = Verifier(self._mover)
            self._background = Background(self._mover)  # takes memory on the device, which may have none left
            self._drains = DrainListener(self._drain_order, options.engine_id)
            opened.pop_all()
        log_device_bytes(paged, self._tiers, threads=WORKER_THREADS)
        self._counters = partial(_moved, self._mover, self._background)
        self._meter = WorkerMeter(self._tiers, self._counters)
        self._failed_block_ids: set[int] = set()
        self._fetched_requests: set[str] = set()
        self._failed_requests: set[str] = set()  # of these, those that must start over
        self._ended_requests: set[str] = set()
        self._poisoned_step = 0  # the last step that computed on blocks that were never loaded
        self._plan: StepPlan | None = None
        self._loads_began = self._loads_ended = False  # those of the plan
        self._layered_load: LayeredLoad | None = None
        self._layer_store: LayerStore | None = None
        self._computed = LayerOrder()

    def facts(self) -> WorkerFacts:
        """Return this worker's facts for the scheduler. Call it once."""
        disk, survivors, trails = self._tiers.disk, list(self._tiers.survivors), dict(self._tiers.trails)
        retained, limited, owners = list(self._tiers.retained), list(self._tiers.limited), dict(self._tiers.owners)
        tiers = self._tiers
        for found in (tiers.survivors, tiers.trails, tiers.retained, tiers.limited, tiers.owners):
            found.clear()
        return WorkerFacts(
            num_slots=self._tiers.cpu.num_slots,
            slot_bytes=self._layout.slot_bytes,
            disk_capacity_bytes=disk.usable_bytes if disk else 0,
            stored_bytes=tuple(
                disk.stored_bytes(count + 1) if disk else 0 for count in range(self._layout.blocks_per_chunk)
            ),
            survivors=survivors,
            trails=trails,
            owners=owners,
            retained=retained,
            limited=limited,
            keeps_lifetimes=self._tiers.keeps_lifetimes,
            sends_lifetimes=self._tiers.remote is not None and self._tiers.remote.keeps_lifetimes,
            namespace=self._namespace,
            layout=self._layout,
            remote_url=self._options.remote_url,
            server_url=self._server.url if self._server else None,
            groups=self._options.groups,
            remote_problem=self._remote_problem,
            slots_take_turns=self._tiers.slots_take_turns,
            reads_fronts=self._tiers.reads_fronts,
            gpu_bytes=self._tiers.hot.size_bytes if self._tiers.hot else 0,
            divisions=self._engine.remote.divisions if self._engine.remote else (),
            drain_name=self._drains.name,
        )

    def prepare(self, plan: StepPlan) -> None:
        """Ensure that stores have read blocks before these are given to other requests."""
        if plan.preempts:
            self._background.fence()

    def begin_step(self, plan: StepPlan) -> None:
        """Start a step's plan: carry out its removals, and start its fetches."""
        self._plan, self._loads_began, self._loads_ended = plan, False, False
        self._computed = LayerOrder()
        self._reporter.report.computed = plan.number if plan.computes else None
        if plan.epoch:
            self._background.revoke_fetches()
            self._background.forget_saves()
            self._mover.remove(Place.REMOTE, plan.recalls)  # before: other engines may still be in that epoch
            namespace = self._namespace.at_epoch(plan.epoch)
            if self._server is not None:
                self._server.enter(namespace)
            self._mover.reset(namespace)  # the slower tiers follow later, in order with later writes
            self._pushes.enter(namespace)
        if plan.used and self._server is not None:
            self._server.let_go(plan.used)
        for sourced in plan.sourced:
            self._tiers.read_from(sourced.source, sourced.refs)
        self._mover.remove(Place.DISK, plan.removals)
        self._mover.note_times(plan.retained, plan.limited)
        if plan.recalls and not plan.epoch:  # or a write that an earlier step planned would begin after its removal
            self._background.follow_saves(partial(self._mover.remove, Place.REMOTE, plan.recalls))
        for fetch in plan.fetches:
            self._background.fetch(fetch)

    def load(self) -> None:
        """Load, or start to if loads are layer by layer. A second call in a step does nothing."""
        plan = self._plan
        if plan is None or self._loads_began:
            return
        self._loads_began = True
        jobs = [job for meta in plan.requests for job in meta.loads]
        if not jobs:
            return
        if self._options.layerwise:
            self._layered_load = LayeredLoad(self._mover, jobs)
            return
        watch = Stopwatch(self._paged)
        with record_function("kvstore::load"), watch:
            loaded = self._mover.load(jobs)
        self._note_loads(plan, jobs, loaded, watch)

    def wait_for_layer(self, layer_name: str) -> None:
        """Load a layer that the model is about to use."""
        layer = self._layer_numbers.get(layer_name)
        if self._layered_load is not None and layer is not None:
            self._layered_load.reach(layer)

    def save_layer(self, layer_name: str) -> None:
        """Store and hand over a layer that the model has computed, if layers are moved one by one."""
        layer = self._layer_numbers.get(layer_name)
        plan = self._plan
        if layer is None or plan is None or self._options.names_layers_early or plan.acked < self._poisoned_step:
            return
        self._pushes.begin(plan.requests)
        if self._layer_store is None and self._options.layerwise and not self._options.async_save:
            jobs = [job for meta in plan.requests for job in meta.stores]
            self._layer_store = LayerStore(self._mover, jobs) if jobs else None
        for number in self._computed.reach(layer):
            self._pushes.reach(number)
            if self._layer_store is not None:
                self._layer_store.move(number)

    def end_loads(self) -> None:
        """End the step's loads after the forward pass, and collect the asynchronous moves that have ended."""
        plan = self._plan
        if plan is not None and not self._loads_ended:
            self._loads_ended = True
            self._settle_loads(plan)
        for number, key in self._background.take_arrived():
            self._reporter.report.fetches.setdefault(number, FetchResult()).arrived[key] += 1
        for fetched in self._background.take_fetched():
            self._note_fetched(fetched)
        for saved in self._background.take_saved():
            self._reporter.report.tally.observe(metrics.STORE_SECONDS.key(), [saved.seconds])
            self._note_stores(saved.step, saved.failed, saved.ended)

    def end_empty_step(self) -> None:
        """End a step in which the model computed nothing, for which vLLM 0.30 does not ask for ``store``."""
        if self._plan is not None and not self._plan.computes:
            self.store()

    def _settle_loads(self, plan: StepPlan) -> None:
        if self._layered_load is not None:
            load, self._layered_load = self._layered_load, None
            with record_function("kvstore::load"):
                loaded = load.finish()
            self._note_loads(plan, load.jobs, loaded, load.watch)
        lost_block_ids = [block for meta in plan.requests for block in meta.lost_block_ids]
        if lost_block_ids:
            self._reporter.result_of(plan.number).lost_blocks = True
            self._fail_blocks(plan, lost_block_ids)
        if plan.requests:
            self._reporter.result_of(plan.number).ranks_loaded = 1

    def _note_loads(self, plan: StepPlan, jobs: list[LoadJob], loaded: LoadResult, watch: Stopwatch) -> None:
        self._reporter.note_load(plan.number, watch)
        result = self._reporter.result_of(plan.number)
        result.failed_loads |= loaded.failed
        result.lost_chunks |= loaded.lost
        if loaded.failed:
            self._fail_blocks(plan, _blocks_of(jobs, loaded.failed))

    def _fail_blocks(self, plan: StepPlan, block_ids: Collection[int]) -> None:
        """Note blocks that a step failed to load, so that vLLM computes them; stop the engine where it would not.

        While vLLM runs ahead, it delivers the tokens of the steps that it has planned meanwhile, and it miscounts the
        computed tokens of requests that share such a block (vLLM 0.30 to 0.32). Only loads from memory happen within
        its steps, so nothing fails but a copy to a device whose memory is full, with which vLLM itself ends soon.
        """
        self._failed_block_ids.update(block_ids)
        self._poisoned_step = plan.number
        if self._options.runs_ahead:
            raise TierError(
                f"{len(block_ids)} blocks could not be loaded from memory within a step, and vLLM schedules "
                "asynchronously, so it would deliver tokens computed on garbage: the engine stops. If its GPU had no "
                "memory left, lower --gpu-memory-utilization; else start vLLM with --no-async-scheduling and report it"
            )

    def _note_fetched(self, fetched: Fetched) -> None:
        fetch, loaded, seconds = fetched
        ended = FetchResult(loaded.failed, loaded.lost, ranks_ended=1, load_s=seconds)
        self._reporter.report.fetches.setdefault(fetch.number, FetchResult()).merge(ended)
        if fetch.req_id == NO_REQUEST:
            return
        self._reporter.report.tally.observe(metrics.LOAD_SECONDS.key(), [seconds])
        self._fetched_requests.add(fetch.req_id)
        failed_block_ids = _blocks_of(fetch.loads, loaded.failed).union(fetch.lost_block_ids)
        if fetch.has_gaps and failed_block_ids:
            self._failed_requests.add(fetch.req_id)
        else:
            self._failed_block_ids |= failed_block_ids

    def store(self) -> None:
        """Carry out the stores of the step, or start them, and end the step."""
        plan = self._plan
        if plan is None:
            return
        self.load()  # unless the runner has called it
        self.end_loads()
        self._plan = None
        if not plan.requests:
            self._pushes.end_step(plan, trusted=True)
            return
        jobs = [job for meta in plan.requests for job in meta.stores]
        ended = {meta.req_id for meta in plan.requests if meta.finished}
        # Blocks may hold garbage from a failed load until the scheduler knows of it and has them computed again.
        trusted = plan.acked >= self._poisoned_step
        for meta in plan.requests:
            if meta.verifies:
                result = self._reporter.result_of(plan.number)
                self._verifier.verify(meta.verifies, result, self._reporter.report.tally, trusted=trusted)
        self._pushes.end_step(plan, trusted=trusted)
        if self._options.async_save:
            self._reporter.result_of(plan.number).failed_stores |= set() if trusted else self._mover.refuse(jobs)
            self._background.save(plan.number, jobs if trusted else [], ended)
            if self._options.overwrites_early:
                self._background.fence()
        else:
            self._note_stores(plan.number, self._store(jobs, trusted=trusted), ended)

    def _store(self, jobs: list[StoreJob], *, trusted: bool) -> set[PrefixKey]:
        layer_store, self._layer_store = self._layer_store, None
        if not jobs:
            return set()
        begin_s = time.perf_counter()
        with record_function("kvstore::store"):
            if layer_store is not None:
                for number in self._computed.rest(self._layout.num_layers) if trusted else ():
                    layer_store.move(number)
                failed = layer_store.finish(trusted=trusted)
            else:
                failed = self._mover.store(jobs) if trusted else self._mover.refuse(jobs)
        self._reporter.report.tally.observe(metrics.STORE_SECONDS.key(), [time.perf_counter() - begin_s])
        return failed

    def _note_stores(self, step: int, failed: set[PrefixKey], ended: Collection[str]) -> None:
        result = self._reporter.result_of(step)
        result.failed_stores |= failed
        result.ranks_ended = 1
        self._ended_requests.update(ended)

    def take_fetched_requests(self) -> set[str]:
        """Return requests whose fetch has ended; ``take_failed_block_ids`` returns blocks that it failed to load."""
        fetched, self._fetched_requests = self._fetched_requests, set()
        return fetched

    def take_failed_requests(self) -> set[str]:
        """Return requests whose fetch failed and that must start over, as they lack blocks before those that failed."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_ended_requests(self) -> set[str]:
        """Return requests whose last store has ended, so that vLLM may free their blocks."""
        ended, self._ended_requests = self._ended_requests, set()
        return ended

    def take_failed_block_ids(self) -> set[int]:
        """Return blocks that were to be loaded and hold garbage, which vLLM then computes."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Return everything since the last report; None if nothing happened and nothing was computed."""
        report, has_news = self._reporter.take()
        report.settled = self._pushes.take_settled()
        if not (has_news or report.settled):
            return None if report.computed is None else report
        self._meter.read(report.tally)
        self._pushes.read(report.tally)
        return report

    def drain(self, timeout_s: float) -> bool:
        """Finish all work on the model's blocks, between two steps. Return False if time ran out first.

        Used before the device's memory is taken away: nothing starts before the next step.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._layered_load is not None:
            load, self._layered_load = self._layered_load, None
            load.finish()
        self._pushes.finish(trusted=False)
        is_idle = self._background.wait(timeout_s)
        ends = [*self._paged.streams.ends(), *self._background.ends()]
        while not (self._tiers.cpu.is_settled and all(map(self._paged.streams.is_reached, ends))):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return is_idle

    def restore(self) -> None:
        """Resume after ``drain`` with device memory that has lost its content. Copies there end with the reset."""
        self._paged.restore()

    def close(self) -> None:
        """Wait for pending writes, within the configured bound, and release everything, whatever fails."""
        timeout_s = self._engine.io_timeout_s
        self._background.stop()
        with ExitStack() as closing:
            if self._server is not None:
                closing.callback(self._server.close)
            closing.callback(self._close_mover)
            closing.callback(self._pushes.close, timeout_s)
            closing.callback(self._drains.close)  # called first, because an order uses the others
            if not self.drain(timeout_s):
                logger.warning("a load or store is abandoned: it has not ended within %s s", timeout_s)

    def _drain_order(self) -> int:
        """Let the server turn other engines away; return the chunks still to be written. On the listener's thread."""
        if self._server is not None:
            self._server.drain(_DRAIN_S)
        saving = self._background.num_saving  # before, as they go from here to the slower tiers
        return saving + self._mover.flush(0.0).pending

    def _close_mover(self) -> None:
        timeout_s = self._engine.io_timeout_s
        if not self._mover.close(timeout_s):
            logger.warning("chunks lost at shutdown: they were not written to the slower tiers within %s s", timeout_s)


def _moved(mover: Mover, background: Background) -> MoverCounters:
    """Sum the counters of moves within steps and asynchronous moves."""
    return MoverCounters.sum([mover.counters, background.counters()])


def _blocks_of(jobs: list[LoadJob], failed: set[PrefixKey]) -> set[int]:
    """Return the blocks of the chunks that failed."""
    return {int(block) for job in jobs if job.step.ref.prefix_key in failed for block in job.block_ids}
