"""The worker side: owns the memory and the folder, and carries out the scheduler's plans. No policy, no vLLM types."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

from kvstore import metrics
from kvstore.adapters.vllm.steps import ReqMeta, StepPlan, StepReport, StepResult, WorkerFacts, Written
from kvstore.deviation import tolerance
from kvstore.keys import Namespace
from kvstore.meters import WorkerMeter
from kvstore.metrics import Metric
from kvstore.movers import LoadJob, Mover, as_block_ids
from kvstore.opening import EngineOptions, open_tiers
from kvstore.pages import PagedKV
from kvstore.plans import Place
from kvstore.throttle import Throttle
from kvstore.tiers.base import ChunkRef

logger = logging.getLogger(__name__)


class StoreWorker:
    """One per rank. Called by the model runner from one thread; writes to disk go on behind it."""

    def __init__(self, paged: PagedKV, namespace: Namespace, options: EngineOptions) -> None:
        """Open the tiers.

        Raises:
            ConfigError, FolderOwnedError, TierError: see ``open_tiers``.
        """
        self._namespace = namespace
        self._options = options
        self._layout = paged.layout
        self._tiers = open_tiers(paged, namespace, options)
        self._written: deque[Written] = deque()
        lanes = self._tiers.open_lanes(options, self._on_written)
        self._mover = Mover(paged, self._tiers.cpu, lanes, self._tiers.hot)
        self._meter = WorkerMeter(self._tiers, self._mover.counters)
        self._report = StepReport()
        self._said_answers = (True, True)
        self._failed_block_ids: set[int] = set()
        self._ended_requests: set[str] = set()
        self._worst_deviation = 0.0
        self._throttle = Throttle()
        self._poisoned_step = 0  # the last step that computed on blocks that were never loaded
        self._plan: StepPlan | None = None

    def facts(self) -> WorkerFacts:
        """What this worker owns; for the scheduler, once."""
        disk, survivors = self._tiers.disk, list(self._tiers.survivors)
        self._tiers.survivors.clear()
        return WorkerFacts(
            num_slots=self._tiers.cpu.num_slots,
            slot_bytes=self._layout.slot_bytes,
            disk_capacity_bytes=disk.usable_bytes if disk else 0,
            stored_bytes=tuple(
                disk.stored_bytes(count + 1) if disk else 0 for count in range(self._layout.blocks_per_chunk)
            ),
            survivors=survivors,
            namespace=self._namespace,
            layout=self._layout,
        )

    def begin_step(self, plan: StepPlan) -> None:
        """Take in a step's plan; forget what it says is gone."""
        self._plan = plan
        if plan.epoch:
            self._mover.reset(self._namespace.at_epoch(plan.epoch))
        self._mover.remove(Place.DISK, plan.removals)
        self._mover.remove(Place.REMOTE, plan.recalls)

    def load(self) -> None:
        """Carry out the loads. Safe to call where there are none, and more than once a step."""
        plan = self._plan
        if plan is None:
            return
        for meta in plan.requests:
            if meta.loads or meta.lost_block_ids:
                with self._measured("kvstore::load", metrics.LOAD_SECONDS):
                    self._load_request(plan, meta)

    @contextmanager
    def _measured(self, what: str, metric: Metric) -> Iterator[None]:
        """Time a part of a step, and name it in a profile."""
        begin_s = time.perf_counter()
        with record_function(what):
            yield
        self._report.tally.observe(metric.key(), [time.perf_counter() - begin_s])

    def _load_request(self, plan: StepPlan, meta: ReqMeta) -> None:
        result = self._result_of(plan)
        failed, lost = self._mover.load(meta.loads)
        result.failed_loads |= failed
        result.lost_chunks |= lost
        result.lost_blocks |= bool(meta.lost_block_ids)
        for job in meta.loads:
            if job.step.ref.prefix_key in failed:
                self._failed_block_ids.update(job.block_ids.tolist())
        self._failed_block_ids.update(meta.lost_block_ids)
        if result.is_poisoned:
            self._poisoned_step = plan.number
        meta.loads, meta.lost_block_ids = [], []

    def store(self) -> None:
        """Carry out the stores of the step, and end it."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        # Blocks may hold garbage from a failed load until the scheduler has heard of it and has them computed anew.
        trusted = plan.acked >= self._poisoned_step
        if plan.requests:
            self._result_of(plan).ranks_ended = 1
        for meta in plan.requests:
            if meta.verifies:
                self._verify_request(plan, meta, trusted=trusted)
            if meta.stores:
                self._store_request(plan, meta, trusted=trusted)
            if meta.finished:
                self._ended_requests.add(meta.req_id)

    def _store_request(self, plan: StepPlan, meta: ReqMeta, *, trusted: bool) -> None:
        result = self._result_of(plan)
        if not trusted:
            result.failed_stores |= self._mover.refuse(meta.stores)
            return
        with self._measured("kvstore::store", metrics.STORE_SECONDS):
            result.failed_stores |= self._mover.store(meta.stores)

    def _verify_request(self, plan: StepPlan, meta: ReqMeta, *, trusted: bool) -> None:
        result = self._result_of(plan)
        with record_function("kvstore::verify"):
            unread, lost = self._mover.load([job._replace(block_ids=as_block_ids(())) for job in meta.verifies])
            result.unread |= unread
            result.lost_chunks |= lost
            for job in meta.verifies if trusted else ():  # or what was computed is what is wrong
                found = self._mover.deviation(job)
                if found is not None:
                    self._note_deviation(job, found, result)

    def _note_deviation(self, job: LoadJob, found: float, result: StepResult) -> None:
        is_equal = found <= tolerance(self._layout)
        self._report.tally.count(metrics.VERIFIED_CHUNKS.key("equal" if is_equal else "mismatch"))
        if found > self._worst_deviation:
            self._worst_deviation = found
            self._report.tally.show(metrics.VERIFY_DEVIATION.key(), found, self._layout.fingerprint)
        if is_equal:
            return
        result.mismatches.add(job.step.ref.prefix_key)
        if self._throttle.is_due("mismatch"):
            logger.error(
                "a stored chunk deviates by %.3g from the same computed again, and %.3g is tolerated: it is removed; "
                "this stays unsaid for a minute",
                found,
                tolerance(self._layout),
            )

    def _on_written(self, target: Place, ref: ChunkRef, stored: bool) -> None:
        size_bytes = self._tiers.size_on_disk(ref) if stored and target is Place.DISK else None
        self._written.append(Written(target, ref, stored, size_bytes))

    def _result_of(self, plan: StepPlan) -> StepResult:
        return self._report.steps.setdefault(plan.number, StepResult())

    def take_ended_requests(self) -> set[str]:
        """Requests whose last store is done, so that vLLM may free their blocks."""
        ended, self._ended_requests = self._ended_requests, set()
        return ended

    def take_failed_block_ids(self) -> set[int]:
        """Blocks that were to be loaded and hold garbage: vLLM computes them."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Everything since the last report; None if nothing happened."""
        report, self._report = self._report, StepReport()
        while self._written:
            report.writes.append(self._written.popleft())
        answers = report.disk_answers, report.remote_answers = self._tiers.disk_answers, self._tiers.remote_answers
        changed, self._said_answers = answers != self._said_answers, answers
        if not (report.steps or report.writes or changed):
            return None
        self._meter.read(report.tally)
        return report

    def close(self) -> None:
        """Let pending writes reach the disk, within the configured bound, and release everything."""
        if not self._mover.close(self._options.io_timeout_s):
            logger.warning(
                "shutting down: the slower tiers did not take all chunks within %s s; those left are lost",
                self._options.io_timeout_s,
            )
