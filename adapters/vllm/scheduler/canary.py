"""Sampling of hits that are computed, to compare the stored KV with the computed KV."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.adapters.vllm.requests.rows import RowMap, TablesOf
from kvstore.adapters.vllm.requests.tracker import RequestTracker
from kvstore.adapters.vllm.scheduler.steps import InFlightStep, StepTracker
from kvstore.index.index import ChunkIndex
from kvstore.model.chunks import ChunkRef
from kvstore.transfer.mover import LoadJob

_WHOLE = 1 - 1e-9  # ten times 0.1 is a little less than 1


class Canary:
    """Sampler of hits, which plans the comparison of their chunks. For the scheduler's thread.

    A sampled hit is computed from the end of vLLM's own prefix cache, and not from a chunk in its middle, because the
    chunks after a wrong one deviate, too, and would be blamed.

    Args:
        fraction: sampled share of all hits; 0.1 samples every tenth.
        block_tokens: tokens in a block.
        plans: has the next plan.
    """

    def __init__(self, fraction: float, block_tokens: int, plans: StepTracker) -> None:
        self._fraction = fraction
        self._block_tokens = block_tokens
        self._share = 0.0  # reaches 1 with the next hit to be sampled
        self._taken: dict[str, bool] = {}  # by request, as vLLM asks again
        self._pending: dict[str, list[tuple[ChunkRef, int]]] = {}  # chunks to be compared, with their first block
        self._plans = plans

    def takes(self, request_id: str, chunks: Iterable[tuple[ChunkRef, int]], num_local_tokens: int) -> bool:
        """Tell if a request computes its hit on ``chunks``, each given with its first block."""
        if not self._fraction:
            return False
        first_block = num_local_tokens // self._block_tokens
        whole = [(ref, begin) for ref, begin in chunks if begin >= first_block]
        if request_id not in self._taken:
            self._share += self._fraction
            self._taken[request_id] = self._share >= _WHOLE
            self._share -= self._taken[request_id]
        if self._taken[request_id]:
            self._pending[request_id] = whole
        return self._taken[request_id] and bool(whole)

    @property
    def waiting(self) -> Iterable[str]:
        """The requests that have chunks to be compared."""
        return self._pending.keys()

    def take_due(self, request_id: str, written_tokens: int) -> list[tuple[ChunkRef, int]]:
        """Return the chunks that are complete once a request has ``written_tokens``, each once."""
        pending = self._pending.get(request_id)
        if not pending:
            return []
        ready = [
            (ref, begin) for ref, begin in pending if (begin + ref.num_blocks) * self._block_tokens <= written_tokens
        ]
        self._pending[request_id] = pending[len(ready) :]
        return ready

    def plan(
        self, tracker: RequestTracker, num_scheduled_tokens: int, tables_of: TablesOf, index: ChunkIndex, rows: RowMap
    ) -> list[tuple[ChunkRef, range]]:
        """Plan to compare the chunks that the coming step completes, if they are still there.

        Return them with the positions of their blocks.
        """
        request, found = tracker.request, []
        written_tokens = min(request.num_computed_tokens + num_scheduled_tokens, request.num_tokens)
        for ref, begin in self.take_due(request.request_id, written_tokens):
            block_ids = rows.of_chunk(tables_of(request.request_id), begin, ref.num_blocks)
            if block_ids is None or index.is_loading(ref.prefix_key):
                continue
            for step in index.prepare_load([ref]):
                self._plans.meta(request.request_id).verifies.append(LoadJob(step, block_ids, 0))
            found.append((ref, ref.blocks_from(begin)))
        return found

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._taken.pop(request_id, None)
        self._pending.pop(request_id, None)


def complete_verifies(index: ChunkIndex, step: InFlightStep) -> list[ChunkRef]:
    """Release the chunks that a step compared, have those with wrong bytes removed everywhere, and return these."""
    result = step.result
    index.complete_load(step.verifies, result.unread, result.lost_chunks)
    mismatches = set() if step.distrusted else result.mismatches
    wrong = [verify.ref for verify in step.verifies if verify.ref.prefix_key in mismatches]
    index.condemn(wrong)
    return wrong
