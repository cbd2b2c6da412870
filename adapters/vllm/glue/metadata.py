"""Messages of the two sides in the classes that vLLM sends between its processes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.adapters.vllm.plan import StepPlan, StepReport, WorkerFacts


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A rank's report on its way to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's report into this one."""
        assert isinstance(other, ReportMetadata)
        self.report.merge(other.report)
        return self


@dataclass
class FactsMetadata(KVConnectorHandshakeMetadata):
    """A worker's facts on their way to the scheduler; None if the worker runs without the cache."""

    facts: WorkerFacts | None
