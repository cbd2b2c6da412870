"""Parts of a soak: a part does batches, each of which follows from its seed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Batch:
    """Result of a batch.

    Attributes:
        count: things done, in the part's unit.
        wrong: wrong bytes or outputs among them.
        what: description of the first wrong one.
        notes: other counts, by name.
        memory: bytes that the server under load has of its own; empty if none is watched.
    """

    count: int
    wrong: int = 0
    what: str = ""
    notes: dict[str, int] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)


Do = Callable[[int], Batch]
"""Do the batch of a seed. Any exception is a failure."""


class Part(NamedTuple):
    """One kind of load.

    Attributes:
        name: on the command line.
        unit: the things that are counted.
        wanted: their number at full size.
        open: starts what all batches share, in an empty folder; closed after a failure, and opened again.
        memory_growth_bytes: limit of a server's growth, from the first half of its samples to the second.
    """

    name: str
    unit: str
    wanted: int
    open: Callable[[Path], AbstractContextManager[Do]]
    memory_growth_bytes: int = 64 << 20
