"""The workers of an engine: how many there are, and which folders they use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workers:
    """The workers on this machine, one for each GPU.

    Attributes:
        per_replica: the size of tensor times pipeline parallelism.
        replicas: the size of data parallelism.
    """

    per_replica: int = 1
    replicas: int = 1

    @property
    def count(self) -> int:
        """Of all of them."""
        return self.per_replica * self.replicas

    def folders(self, base: Path) -> list[Path]:
        """Each worker's part of a folder in ``local_disk``, as the adapter for vLLM names it."""
        homes = [base / f"replica-{number}" for number in range(self.replicas)] if self.replicas > 1 else [base]
        if self.per_replica == 1:
            return homes
        return [home / f"rank-{rank}-of-{self.per_replica}" for home in homes for rank in range(self.per_replica)]
