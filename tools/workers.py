"""Number of an engine's workers, and the folders they use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workers:
    """Workers on this machine, one for each GPU.

    Attributes:
        per_replica: workers of a replica: the product of tensor and pipeline parallelism.
        replicas: size of data parallelism.
    """

    per_replica: int = 1
    replicas: int = 1

    @property
    def count(self) -> int:
        """Number of all workers."""
        return self.per_replica * self.replicas

    def folders(self, base: Path) -> list[Path]:
        """Return each worker's part of a folder in ``local_disk``, with the names of the vLLM adapter."""
        homes = [base / f"replica-{number}" for number in range(self.replicas)] if self.replicas > 1 else [base]
        if self.per_replica == 1:
            return homes
        return [home / f"rank-{rank}-of-{self.per_replica}" for home in homes for rank in range(self.per_replica)]
