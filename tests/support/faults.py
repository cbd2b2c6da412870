"""Makes a tier fail as planned, for tests: the idea of LevelDB's fault-injecting environment, at the seam of a tier.

    broken = FaultInjector(tier, [Fault(FaultKind.ERROR, "put", calls=range(3)), Fault(FaultKind.FLIP, share=0.1)])

The first fault that applies is injected. Faults are drawn from the seed, the operation, the number of the call and the
position in its batch, so the same sequence of an operation's calls meets the same faults, whatever other threads do.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import xxhash

from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import InvalidCallError, TierError
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.guards.guard import TierWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from kvstore.model.keys import Namespace

OPERATIONS = ("scan", "contains", "get", "get_layers", "put", "remove", "clear", "reset")


class FaultKind(Enum):
    """Kinds of faults, with the operations in which they can occur."""

    ERROR = "error"  # any: raises TierError, as after an I/O error of the whole tier; the inner tier is not asked
    HANG = "hang"  # any: waits until it is released, then continues normally
    FAILED = "failed"  # get, get_layers, put: this chunk cannot be moved (EIO)
    MISS = "miss"  # get, get_layers: this chunk is not found this time
    CORRUPT = (
        "corrupt"  # get, get_layers: this chunk is damaged; it is removed from the inner tier, as the contract says
    )
    FULL = "full"  # put: no room for this chunk (ENOSPC)
    FLIP = "flip"  # get: one byte of the payload is changed after the inner tier has verified it


_OF_CALLS = (FaultKind.ERROR, FaultKind.HANG)
_OF_CHUNKS = {
    "get": (FaultKind.FAILED, FaultKind.MISS, FaultKind.CORRUPT, FaultKind.FLIP),
    "get_layers": (FaultKind.FAILED, FaultKind.MISS, FaultKind.CORRUPT),
    "put": (FaultKind.FAILED, FaultKind.FULL),
}


@dataclass(frozen=True)
class Call:
    """A call that a fault may apply to.

    Attributes:
        operation: one of ``OPERATIONS``.
        number: of this operation, from 0.
        refs: the chunks it is about: all of the batch for ``ERROR`` and ``HANG``, otherwise one.
    """

    operation: str
    number: int
    refs: tuple[ChunkRef, ...]


@dataclass(frozen=True)
class Fault:
    """One line of a plan, all of whose conditions must be met.

    Attributes:
        kind: the fault.
        operation: in which operation; None for each in which it can occur.
        calls: in which calls of that operation, counted from 0; None means all.
        when: any other condition, asked on the caller's thread.
        share: of the calls (``ERROR``, ``HANG``) or chunks that meet all other conditions, drawn from the seed.
    """

    kind: FaultKind
    operation: str | None = None
    calls: Container[int] | None = None
    when: Callable[[Call], bool] | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        can = {name for name in OPERATIONS if self.kind in (*_OF_CALLS, *_OF_CHUNKS.get(name, ()))}
        if self.operation is not None and self.operation not in can:
            raise InvalidCallError(f"{self.kind.name} cannot happen in {self.operation!r}, only in {sorted(can)}")

    def meets(self, call: Call) -> bool:
        """Tell if a call meets the conditions, apart from the share."""
        return (
            self.operation in (None, call.operation)
            and (self.calls is None or call.number in self.calls)
            and (self.when is None or self.when(call))
        )


class FaultInjector(TierWrapper):
    """Injects faults into the calls to a tier. Thread-safe; the plan may change at any time."""

    def __init__(self, inner: Tier, plan: Iterable[Fault] = (), seed: int = 0) -> None:
        super().__init__(inner)
        self._seed = seed
        self._plan = tuple(plan)
        self._state = threading.Condition()
        self._calls: Counter[str] = Counter()
        self._injected: Counter[FaultKind] = Counter()
        self._hanging = 0
        self._releases = 0

    def inject(self, *faults: Fault) -> None:
        """Replace the plan. Hanging calls continue to hang."""
        self._plan = faults

    def heal(self) -> None:
        """Drop the plan and release hanging calls."""
        self.inject()
        self.release()

    def release(self) -> None:
        """Release the calls that hang now; later ones hang as planned."""
        with self._state:
            self._releases += 1
            self._state.notify_all()

    def wait_until_hanging(self, calls: int = 1, timeout_s: float = 30.0) -> bool:
        """Wait until that many calls hang; False if the time is over first."""
        with self._state:
            return self._state.wait_for(lambda: self._hanging >= calls, timeout_s)

    @property
    def injected(self) -> dict[FaultKind, int]:
        """Number of faults injected so far, by kind."""
        with self._state:
            return dict(self._injected)

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward, or raise or hang as planned."""
        self._enter("scan", ())
        return super().scan()

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        """Forward, or raise or hang as planned."""
        self._enter("contains", refs)
        return self.inner.contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward the chunks that are not to fail, and spoil bytes as planned.

        Raises:
            TierError: as planned, or by the tier.
        """
        faults = self._draw("get", transfers)
        outcomes = _merge(faults, self.inner.get(self._sound(transfers, faults)))
        for item, kind, outcome in zip(transfers, faults, outcomes, strict=True):
            if kind is FaultKind.FLIP and outcome is Outcome.HIT:
                item.buffer[item.ref.num_blocks // 2] ^= 0xFF  # a block has at least one byte: not in the padding
        return outcomes

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward the chunks that are not to fail.

        Raises:
            TierError: as planned, or by the tier.
        """
        faults = self._draw("get_layers", transfers)
        return _merge(faults, self.inner.get_layers(self._sound(transfers, faults), layers))

    def _sound(self, transfers: Sequence[Transfer], faults: Sequence[FaultKind | None]) -> list[Transfer]:
        """Return the transfers to read, after removing the chunks that are to be damaged, as the contract says."""
        planned = list(zip(transfers, faults, strict=True))
        if damaged := [item.ref for item, kind in planned if kind is FaultKind.CORRUPT]:
            self.inner.remove(damaged)
        return [item for item, kind in planned if kind in (None, FaultKind.FLIP)]

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward the chunks that are not to fail.

        Raises:
            TierError: as planned, or by the tier.
        """
        faults = self._draw("put", transfers)
        sound = [item for item, kind in zip(transfers, faults, strict=True) if kind is None]
        return _merge(faults, self.inner.put(sound))

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward, or raise or hang as planned."""
        fixed = tuple(refs)
        self._enter("remove", fixed)
        self.inner.remove(fixed)

    def clear(self) -> None:
        """Forward, or raise or hang as planned."""
        self._enter("clear", ())
        self.inner.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forward, or hang as planned; a planned error is raised when it is done, as the contract says."""
        try:
            self._enter("reset", ())
        finally:
            self.inner.reset(namespace)

    def _enter(self, operation: str, refs: Sequence[ChunkRef]) -> Call:
        """Count a call, and let it raise or hang."""
        with self._state:
            call = Call(operation, self._calls[operation], tuple(refs))
            self._calls[operation] += 1
        kind = self._choose(call, _OF_CALLS, 0)
        if kind is FaultKind.ERROR:
            cause = OSError(errno.EIO, os.strerror(errno.EIO))
            raise TierError(f"injected: {operation} number {call.number} of the {self.name} tier fails") from cause
        if kind is FaultKind.HANG:
            self._hang()
        return call

    def _draw(self, operation: str, transfers: Sequence[Transfer]) -> list[FaultKind | None]:
        """Return the fault of each chunk of a batch."""
        call = self._enter(operation, [item.ref for item in transfers])
        return [
            self._choose(Call(operation, call.number, (item.ref,)), _OF_CHUNKS[operation], position)
            for position, item in enumerate(transfers)
        ]

    def _choose(self, call: Call, kinds: Sequence[FaultKind], position: int) -> FaultKind | None:
        for line, fault in enumerate(self._plan):
            if fault.kind not in kinds or not fault.meets(call):
                continue
            die = f"{self._seed}/{line}/{call.operation}/{call.number}/{position}"
            if xxhash.xxh3_64_intdigest(die.encode()) < fault.share * 2**64:
                with self._state:
                    self._injected[fault.kind] += 1
                return fault.kind
        return None

    def _hang(self) -> None:
        with self._state:
            releases = self._releases
            self._hanging += 1
            self._state.notify_all()
            self._state.wait_for(lambda: self._releases > releases)
            self._hanging -= 1


def _merge(faults: Sequence[FaultKind | None], answers: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes in order: those of the faults, and between them those of the inner tier."""
    remaining = iter(answers)
    return [next(remaining) if kind in (None, FaultKind.FLIP) else Outcome(kind.value) for kind in faults]
