"""The connector that vLLM loads: a thin shell around ``StoreScheduler`` and ``StoreWorker``.

vLLM makes one object per role. A load happens within the step that needs it, at once or layer by layer, or
asynchronously, while its request waits. Stores are gathered when a step ends, or while the next one runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.adapters.vllm.glue import interface

interface.require()  # before anything is imported by name from a vLLM that may lack it

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore.adapters.vllm import refusals
from kvstore.adapters.vllm.glue import capabilities, logs
from kvstore.adapters.vllm.glue.adapterloads import adapter_files
from kvstore.adapters.vllm.glue.binding import hold_nothing
from kvstore.adapters.vllm.glue.groups import announced_group, group_ids, has_states
from kvstore.adapters.vllm.glue.metadata import FactsMetadata, PlanMetadata, ReportMetadata
from kvstore.adapters.vllm.glue.opening import admin_server, open_worker
from kvstore.adapters.vllm.glue.options import fitting_config, scheduler_options
from kvstore.adapters.vllm.glue.requests import (
    adapter_of,
    extra_args_of,
    features_of,
    hints_of,
    is_shareable,
    key_extras,
)
from kvstore.adapters.vllm.glue.spans import Spans
from kvstore.adapters.vllm.glue.support import check_supported, frees_blocks, log_limits, stores_nothing
from kvstore.adapters.vllm.glue.weightloads import leave_alone, reset_with_weights
from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.requests.arrivals import Arrivals, Known
from kvstore.adapters.vllm.requests.params import WITHOUT_CACHE
from kvstore.adapters.vllm.requests.request_fields import RequestFields
from kvstore.adapters.vllm.requests.rows import States, Tables
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.scheduler.startup import Surroundings, log_start
from kvstore.adapters.vllm.telemetry.events import as_kv_events
from kvstore.adapters.vllm.telemetry.prometheus import StoreMetrics, StoreStats
from kvstore.config import load_config
from kvstore.model.errors import KVStoreError
from kvstore.ops.admin_http import AdminServer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstore.adapters.vllm.worker.worker import StoreWorker
    from kvstore.index.index import ChunkIndex

logger = logging.getLogger(__name__)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """KV cache offload to CPU memory, disk and remote tiers; docs/configuration.md describes its settings.

    Attributes:
        facts: the facts of all workers, once the scheduler side has them; for our own tools.
        index: the index of all chunks, from then on; for our own tools.
    """

    @refusals.noted
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Check everything that can be checked before vLLM serves.

        Raises:
            ConfigError: the configuration, a flag or the version of vLLM cannot be used; the message says what to do.
            LayoutError: the model's KV cache cannot be stored.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        logs.join_vllm()
        loaded = load_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config, log_warnings=role is KVConnectorRole.SCHEDULER
        )
        self._config = fitting_config(loaded.config, kv_cache_config, logs_change=role is KVConnectorRole.SCHEDULER)
        interface.require_hooks(KVStoreConnector, KVConnectorBase_V1)
        check_supported(vllm_config, kv_cache_config, self._config)
        self._frees_blocks = frees_blocks(kv_cache_config)
        self._group_ids = group_ids(kv_cache_config)
        self._has_states = has_states(kv_cache_config)
        self._stores_nothing = stores_nothing(vllm_config, kv_cache_config)
        self._arrivals = Arrivals(adapter_files(role), self._config.lookup_timeout_ms / 1000)
        self._gave_up = False
        self.facts: list[WorkerFacts] = []
        self.index: ChunkIndex | None = None
        self._scheduler: StoreScheduler | None = None
        self._worker: StoreWorker | None = None
        self._admin: AdminServer | None = None
        self._spans = Spans()
        if role is KVConnectorRole.SCHEDULER:
            log_limits(vllm_config, kv_cache_config)
            options = scheduler_options(vllm_config, kv_cache_config, self._config)
            self._scheduler = StoreScheduler(options)
            reset_with_weights(self._scheduler)
            transfer = vllm_config.kv_transfer_config
            around = Surroundings(vllm.__version__, str(transfer.kv_role), transfer.kv_load_failure_policy)
            self._log_start = partial(log_start, loaded, options, around)
            self._fields = RequestFields(self._config, self._scheduler.count_wrong_field)
            self._admin = admin_server(vllm_config, self._config, self._scheduler)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the cache is best-effort, so a dropped save is only a later miss."""
        return False

    # -- worker side ---------------------------------------------------------------------------------------------------

    @refusals.noted
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Find the blocks in the caches, allocate the memory and open the folder.

        Raises:
            KVStoreError: this failed, and the cache is required.
        """
        if hold_nothing(kv_caches):
            return  # a profiling run
        if self._stores_nothing is not None:
            self._gave_up = True
            return
        try:
            self._worker = open_worker(self._vllm_config, self._kv_cache_config, self._config, kv_caches)
        except KVStoreError as error:
            self._go_without(error)

    def _go_without(self, error: KVStoreError) -> None:
        """Let vLLM run without the cache, or raise if it is required."""
        if self._config.required:
            raise error
        self._gave_up = True
        logger.warning("vLLM runs without the cache, because required is false: %s", error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler what this worker owns, or that it runs without the cache."""
        if self._worker is None:
            return FactsMetadata(None) if self._gave_up else None
        return FactsMetadata(self._worker.facts())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for stores that read blocks of preempted requests, before a step overwrites them."""
        if self._worker is not None and isinstance(kv_connector_metadata, PlanMetadata):
            self._worker.prepare(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, PlanMetadata):
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Load the KV that the step needs, or start to, before the forward pass."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is loaded, unless all layers already are."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Store a layer, unless all layers are stored together when the step ends."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Carry out the step's stores, or start them."""
        if self._worker is not None:
            self._worker.store()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose last store has ended, and those whose asynchronous load has ended."""
        if self._worker is None:
            return None, None
        self._worker.end_empty_step()
        self._worker.end_loads()
        return self._worker.take_ended_requests() or None, self._worker.take_fetched_requests() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the result of ``get_finished``, with the requests that must start over because their load failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded, which vLLM then computes."""
        return self._worker.take_failed_block_ids() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report of finished and failed work; None if there is none."""
        report = self._worker.take_report() if self._worker else None
        return ReportMetadata(report) if report else None

    def shutdown(self) -> None:
        """Wait for writes, within the configured bound, and release memory, threads, port and folder."""
        if self._admin is not None:
            self._admin.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            leave_alone(self._scheduler)
            self._scheduler.close()
        self._arrivals.close()
        self._spans.close()

    def unregister_kv_caches(self) -> None:
        """Finish all work on the caches before vLLM sleeps, which has already reset the connector.

        Raises:
            KVStoreError: something has not ended in time.
        """
        if self._worker is not None and not self._worker.drain(self._config.blocking_timeout_secs):
            raise KVStoreError(
                f"vLLM cannot sleep now: a load or store has not ended within {self._config.blocking_timeout_secs} s "
                "(blocking_timeout_secs). Let it sleep again before you wake it up: other ranks may sleep already"
            )

    def restore_kv_caches(self) -> None:
        """Resume after sleep: the caches have kept their addresses and lost their content."""
        if self._worker is not None:
            self._worker.restore()

    # -- scheduler side ------------------------------------------------------------------------------------------------

    @refusals.noted
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Connect to the workers, in the order of their ranks. vLLM calls this again on wake-up, with nothing new."""
        if self.facts:
            return
        ranks = [metadata[rank] for rank in sorted(metadata)]
        ours = [rank for rank in ranks if isinstance(rank, FactsMetadata)]
        facts = self.facts = [rank.facts for rank in ours if rank.facts is not None]
        if len(ours) < len(ranks):  # MultiConnector passes on the metadata of its first connector that has any
            logger.warning(
                "nothing is cached: another connector answered the handshake first, so list %s first",
                KVStoreConnector.__name__,
            )
        elif 0 < len(facts) < len(ranks):  # a chunk counts only if every rank holds its part
            logger.warning(
                "nothing is cached: %d of %d workers run without the cache", len(ranks) - len(facts), len(ranks)
            )
        elif facts and self._scheduler is not None:
            try:
                self._scheduler.connect(facts)
            except KVStoreError as error:
                self._go_without(error)
            else:
                self.index = self._scheduler.index
                self._log_start(self.index, facts)

    def on_new_request(self, request: Request) -> None:
        """Track a request if its KV may be shared. A request with wrong fields does not use the cache."""
        weakest_first = (hints_of(request), extra_args_of(request), request.kv_transfer_params)
        params, handover = self._fields.read(request.request_id, *weakest_first)

        def admit(known: Known | None) -> None:
            """Track the request, without the cache if the inputs of its keys are unknown."""
            if known is None:
                self._scheduling.add_request(request, key_extras(request), WITHOUT_CACHE)
            else:
                self._scheduling.add_request(request, key_extras(request, params, known), params, handover)

        if is_shareable(request):
            features = features_of(request, self._vllm_config)
            self._arrivals.add(request.request_id, adapter_of(request), features, admit)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond vLLM's own prefix cache, and True if the request waits."""
        if not self._arrivals.is_admitted(request.request_id):
            return None, False
        self._spans.asked(request, num_computed_tokens)
        num_tokens = self._scheduling.num_new_matched_tokens(request, num_computed_tokens)
        if self._has_states:
            capabilities.end_step_at(request, self._scheduling.parted_tokens(request.request_id))
        return num_tokens, bool(num_tokens) and self._scheduling.is_async_load(request.request_id)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load that vLLM decided on."""
        self._scheduling.allocated(request.request_id, self._tables(blocks.get_block_ids()), num_external_tokens)
        self._spans.allocated(request.request_id, self._scheduling.hit_tokens(request.request_id))

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Split a hit by the tiers that hold it; only versions of vLLM that name hit sources call this."""
        return capabilities.hit_sources(self._scheduling.hit_tokens(request.request_id))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step."""
        self._arrivals.end_pass()
        state = scheduler_output.kv_connector_block_state
        plan = self._scheduling.plan_step(
            scheduler_output.num_scheduled_tokens,
            lambda req_id: self._tables(state.get_block_ids(req_id)),
            preempts=self._frees_blocks or bool(scheduler_output.preempted_req_ids),
            states_of=lambda req_id: self._states(state.boundary_state_offloads.get(req_id, ())),
        )
        self._spans.planned(plan, len(self.facts))
        return PlanMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the merged report of the workers."""
        failed_block_ids = connector_output.invalid_block_ids
        if failed_block_ids and self._kv_cache_manager is not None:
            # vLLM leaves them in its prefix cache, to be computed again; but another request may find them first.
            self._kv_cache_manager.evict_blocks(self._scheduling.spoilt_blocks(failed_block_ids))
        reported = connector_output.kv_connector_worker_meta
        if isinstance(reported, ReportMetadata):
            self._spans.completed(reported.report)
            self._scheduling.complete(reported.report)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the statistics since the last call, the workers' included; None on the worker side."""
        return StoreStats.of(self._scheduler.take_tally()) if self._scheduler else None

    def has_pending_push_work(self) -> bool:
        """Tell if vLLM should plan steps although it has no requests, because chunks are brought to memory."""
        return self._scheduler is not None and self._scheduler.has_work

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the blocks that entered or left memory and disk, as events for listeners to vLLM's KV events."""
        group = announced_group(self._kv_cache_config) or 0
        spec = self._kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return as_kv_events(self._scheduling.take_events(), spec, group)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Call ``request_finished_all_groups`` for the only group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request; True keeps its blocks for one more step, if something is left to store.

        The parameters returned may name the place of the request's KV, and a wrong field of the request.
        """
        request_id = request.request_id
        self._arrivals.end(request_id)
        self._spans.finished(request_id)
        answer = self._scheduling.answer(request_id, first_token=next(iter(request.output_token_ids), None))
        answer = self._fields.answer(request_id, answer)
        return self._scheduling.finish_request(request_id, self._tables(block_ids)), answer

    def reset_cache(self) -> bool | None:
        """Forget everything, because the weights have changed."""
        self._scheduling.reset_cache()
        return True

    def _tables(self, block_ids: Sequence[list[int]]) -> Tables:
        """Return the block tables of the stored groups."""
        return [block_ids[number] for number in self._group_ids] if len(block_ids) > 1 else block_ids

    def _states(self, offers: Iterable[tuple[int, int, int]]) -> States:
        """Return the blocks that hold a state after the step, according to vLLM, by group and the state's token."""
        return {
            (self._group_ids.index(group), num_tokens): block
            for group, block, num_tokens in offers
            if group in self._group_ids
        }

    @property
    def _scheduling(self) -> StoreScheduler:
        assert self._scheduler is not None, "a scheduler-side method was called on a worker-side connector"
        return self._scheduler

    # -- class --------------------------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Tell if layer hooks are used. vLLM calls this before it loads the model, so a wrong key is refused early."""
        return load_config(extra_config, log_warnings=False).config.use_layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild the statistics from the numbers that vLLM has sent."""
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return our metrics for vLLM's ``/metrics``."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
