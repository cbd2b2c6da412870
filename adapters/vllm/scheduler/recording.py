"""The trace of an engine: what its requests found, and what happened to its chunks. See ``docs/FORMAT.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.requests.params import WITHOUT_CACHE
from kvstore.adapters.vllm.requests.tracker import RequestTracker
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import chunk_refs
from kvstore.model.history import ChunkEvent
from kvstore.policies.recorder import TraceRecorder
from kvstore.policies.traces import LookedUp, Tiers


class Recording:
    """Recording of one engine, which does nothing without ``record_trace``. For the scheduler's thread.

    Args:
        options: name the file, and what requests may do.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        name = options.config.record_trace
        self._recorder = TraceRecorder.open_next(Path(name).expanduser(), options.rules.chunk_tokens) if name else None

    @property
    def note_event(self) -> Callable[[ChunkEvent], None] | None:
        """Takes what happens to chunks; None if nothing is recorded."""
        return self._recorder.note if self._recorder is not None else None

    def connected(self, facts: Sequence[WorkerFacts]) -> None:
        """Record the sizes of the tiers."""
        if self._recorder is None:
            return
        disk_bytes = min(rank.disk_capacity_bytes for rank in facts)
        self._recorder.note(
            Tiers(
                slots=min(rank.num_slots for rank in facts),
                slot_bytes=max(rank.slot_bytes for rank in facts),
                disk_bytes=disk_bytes,
                chunk_bytes=max(rank.stored_bytes[-1] for rank in facts) if disk_bytes else 0,
                keeps_in_memory=self._options.config.local_cpu,
                has_remote=self._options.remote is not None,
            )
        )

    def looked_up(
        self, tracker: RequestTracker, index: ChunkIndex, end_tokens: int, *, enabled: bool, is_late: bool
    ) -> None:
        """Record the lookup of a request that has just been counted.

        ``end_tokens`` is the end of what can be stored of it. ``is_late`` tells that the remote tier did not answer
        in time.
        """
        if self._recorder is None:
            return
        stats, hasher = tracker.stats, tracker.hasher
        missing = index.missing_keys(hasher, stats.found_tokens, end_tokens) if stats.reason is not None else ()
        self._recorder.note(
            LookedUp(
                tracker.request.request_id,
                stats.num_tokens,
                stats.num_local_tokens,
                stats.found_tokens,
                {place.value: num_tokens for place, num_tokens in stats.hit.items() if num_tokens},
                stats.reason.value if stats.reason is not None else "",
                tuple(missing),
                tuple(self._notes(tracker, enabled=enabled, is_late=is_late)),
            )
        )

    def ended(self, tracker: RequestTracker) -> None:
        """Record the chunks that a request used, its tail included, as it ends."""
        hasher, request = tracker.hasher, tracker.request
        if self._recorder is not None and (refs := chunk_refs(hasher, with_tail=True)):
            num_tokens = sum(ref.num_blocks for ref in refs) * hasher.block_tokens
            answer_tokens = request.num_tokens - request.num_prompt_tokens
            self._recorder.record([ref.prefix_key for ref in refs], num_tokens, answer_tokens, request.request_id)

    def close(self) -> None:
        """Write what is left, within seconds."""
        if self._recorder is not None:
            self._recorder.close()

    def _notes(self, tracker: RequestTracker, *, enabled: bool, is_late: bool) -> Iterator[str]:
        params, options = tracker.params, self._options
        if not enabled:
            yield "disabled"
        if not options.loads:
            yield "engine_loads_nothing"
        if not options.saves:
            yield "engine_saves_nothing"
        if params is WITHOUT_CACHE:
            yield "without_cache"
        elif params.skip_load:
            yield "skip_load"
        if params.skip_save and params is not WITHOUT_CACHE:
            yield "skip_save"
        elif options.saves and not tracker.saves and params is not WITHOUT_CACHE:
            yield "priority_limit"
        if params.max_save_tokens is not None:
            yield "max_save_tokens"
        if is_late:
            yield "remote_late"
