"""Collects the results of a rank for its next report to the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.adapters.vllm.plan import LoadTime, StepReport, StepResult, Written
from kvstore.engine.opening import OpenTiers
from kvstore.engine.planner import tier_state
from kvstore.index.plans import Place, TierState
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.ops import metrics
from kvstore.protocol.progress import Progress
from kvstore.transfer.stopwatch import Stopwatch

if TYPE_CHECKING:
    from kvstore.server.embedded import EmbeddedServer  # needs an extra


class Reporter:
    """Collector of one rank's results. For the model's thread, except ``note_written``.

    Args:
        tiers: the rank's tiers, whose state is reported when it changes.
        server: its server for other engines, which knows the progress of their transfers.
        rank: its number.

    Attributes:
        report: the report under construction.
    """

    def __init__(self, tiers: OpenTiers, server: EmbeddedServer | None, rank: int) -> None:
        self.report = StepReport()
        self._tiers = tiers
        self._server = server
        self._rank = rank
        self._written: deque[Written] = deque()
        self._watches: deque[tuple[int, Stopwatch]] = deque()  # of loads that the device may not have ended, by step
        self._reported_tiers = TierState()
        self._reported_senders: Mapping[str, Progress] = {}

    def result_of(self, step: int) -> StepResult:
        """Return the result of a step, to be filled in."""
        return self.report.steps.setdefault(step, StepResult())

    def note_written(self, target: Place, ref: ChunkRef, outcome: Outcome) -> None:
        """Note a write-behind that has ended. Thread-safe."""
        disk = self._tiers.disk if target is Place.DISK else None
        stored = outcome is Outcome.STORED
        size_bytes = disk.size_of(ref) if stored and disk is not None else None
        self._written.append(Written(target, ref, stored, size_bytes, outcome is Outcome.FULL))

    def note_load(self, step: int, watch: Stopwatch) -> None:
        """Note the loads of a step, whose time is reported once the device has ended them."""
        self._watches.append((step, watch))

    def take(self) -> tuple[StepReport, bool]:
        """Return everything since the last call, without what is counted elsewhere, and True if anything changed."""
        self._read_watches()
        self._read_senders()
        report, self.report = self.report, StepReport()
        while self._written:
            report.writes.append(self._written.popleft())
        report.tiers = tier_state(self._tiers.disk, self._tiers.remote)
        has_changed, self._reported_tiers = report.tiers != self._reported_tiers, report.tiers
        return report, has_changed or report.has_news

    def _read_watches(self) -> None:
        while self._watches and self._watches[0][1].has_stopped:
            step, watch = self._watches.popleft()
            self.report.tally.observe(metrics.LOAD_SECONDS.key(), [watch.seconds])
            self.report.load_times[step] = LoadTime(watch.seconds, ranks=1)

    def _read_senders(self) -> None:
        """Report the progress of other engines' transfers to this worker, if it has changed."""
        if self._server is not None and (senders := self._server.senders) is not self._reported_senders:
            before, self._reported_senders = self._reported_senders, senders
            changed = {name: progress for name, progress in senders.items() if progress is not before.get(name)}
            self.report.senders[self._rank] = {**changed, **dict.fromkeys(before.keys() - senders.keys())}
