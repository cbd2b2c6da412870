"""Protocol of a load generator, and its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from kvstore.model.errors import KVStoreError

MODEL_NAME: Final = "outside"
SEED: Final = 1


class SkippedError(KVStoreError):
    """A generator cannot run here; the message is the reason."""


class UnreadableError(KVStoreError):
    """A generator's result is missing, or not in its format."""


@dataclass(frozen=True)
class Place:
    """Folders and files of a run.

    Attributes:
        folder: for installed generators, converted traces, logs and results.
        model: the model's folder, which is also that of its tokenizer.
        traces: folder with public traces; None if there is none.
        lmbenchmark: checkout of LMBenchmark; None if there is none.
        share: size of the loads; 1 is full size.
    """

    folder: Path
    model: Path
    traces: Path | None = None
    lmbenchmark: Path | None = None
    share: float = 1.0

    @property
    def runs(self) -> Path:
        """Folder of the runs of this size."""
        return self.folder / f"share-{self.share:g}"

    def scaled(self, count: int) -> int:
        """Return a count at the size of this run, at least 1."""
        return max(1, round(self.share * count))

    def trace(self, origin: str, *names: str) -> Path:
        """Return the file or folder of a public trace: the first of ``names`` that exists.

        Raises:
            SkippedError: there is none.
        """
        found = [self.traces / name for name in names] if self.traces is not None else []
        for path in found:
            if path.exists():
                return path
        raise SkippedError(f"{names[0]} is not in --traces: it comes from {origin}")


@dataclass(frozen=True)
class Numbers:
    """Measurements of one run, as its generator states them.

    Attributes:
        ttft_p50_s: median time to the first token.
        ttft_p99_s: its 99th percentile.
        requests_per_s: finished requests per second.
        requests: finished requests.
        failed: failed requests.
        own: further figures of the generator, by name.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    requests: int
    failed: int
    own: Mapping[str, float] = field(default_factory=dict)


class Generator(Protocol):
    """Load generator with a fixed load."""

    @property
    def name(self) -> str:
        """Name of the load, unique among all."""

    @property
    def about(self) -> str:
        """Program, version and load, in a line."""

    def prepare(self, place: Place) -> None:
        """Install the program and convert its input, once before all runs.

        Raises:
            SkippedError: it cannot run here.
        """

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line of a run against the vLLM at ``url``, with results in the folder ``out``."""

    def variables(self, place: Place) -> Mapping[str, str]:
        """Return environment variables added to this process's."""

    def read(self, out: Path) -> Numbers:
        """Return the results in ``out``.

        Raises:
            UnreadableError: they are missing, or not in the generator's format.
        """


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
