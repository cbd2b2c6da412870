"""Comparison of stored chunks with the same chunks, recomputed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.profiler import record_function

from kvstore.adapters.vllm.plan import StepResult
from kvstore.format.deviation import tolerance
from kvstore.model.throttle import Throttle
from kvstore.ops import metrics
from kvstore.ops.metrics import Tally
from kvstore.transfer.mover import LoadJob, Mover, as_block_ids

logger = logging.getLogger(__name__)


class Verifier:
    """Verifier of one worker. For the model's thread.

    Args:
        mover: the model's.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._layout = mover.paged.layout
        self._worst_deviation = 0.0
        self._throttle = Throttle(logger)

    def verify(self, jobs: Sequence[LoadJob], result: StepResult, tally: Tally, *, trusted: bool) -> None:
        """Compare chunks with their blocks, computed in the step of ``result``, unless these are not ``trusted``."""
        with record_function("kvstore::verify"):
            unread, lost = self._mover.load([job._replace(block_ids=as_block_ids(())) for job in jobs])
            result.unread |= unread
            result.lost_chunks |= lost
            for job in jobs if trusted else ():  # otherwise what was computed may be wrong
                found = self._mover.deviation(job)
                if found is not None:
                    self._note(job, found, result, tally)

    def _note(self, job: LoadJob, found: float, result: StepResult, tally: Tally) -> None:
        is_equal = found <= tolerance(self._layout)
        tally.count(metrics.VERIFIED_CHUNKS.key("equal" if is_equal else "mismatch"))
        if found > self._worst_deviation:
            self._worst_deviation = found
            tally.show(metrics.VERIFY_DEVIATION.key(), found, self._layout.fingerprint)
        if is_equal:
            return
        result.mismatches.add(job.step.ref.prefix_key)
        self._throttle.log(
            "mismatch",
            "a stored chunk is removed: it deviates from the recomputed KV by %.3g, and at most %.3g is tolerated",
            found,
            tolerance(self._layout),
            level=logging.ERROR,
        )
