"""A lookup over a remote tier whose answers a test sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.index.remote_view import RemoteView
from kvstore.model.chunks import ChunkRef
from kvstore.testing.harness import EVEN, MINE, make_ref
from kvstore.tiers.base import Tier
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.peers import PeersTier
from support.gate import HANG_GUARD_S, Gate
from support.rig import FakeTier

SOURCE = "kvs://source:1"


class Remote(FakeTier):
    """A tier that gives the set answers, and counts the questions."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.there: set[ChunkRef] = set()
        self.questions: list[Sequence[ChunkRef]] = []
        self.before: Callable[[], object] = lambda: None

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        self.questions.append(refs)
        found = [ref in self.there for ref in refs]
        self.before()
        return found


class World:
    """A lookup over a tier, as `StoreScheduler` uses it."""

    def __init__(self) -> None:
        self.remote, self.source = Remote(), Remote()
        self.tier = PeersTier(self.remote, (), lambda *_: self.source, MINE, EVEN, sources=[SOURCE])
        self.gates: list[Gate] = []
        self.lookup = self.new()

    def new(self, *, hold_s: float = 60.0, timeout_s: float = HANG_GUARD_S) -> RemoteLookup:
        tiers: list[Tier] = [self.tier]
        self.lookup = RemoteLookup(RemoteDirectory(tiers), RemoteView(hold_s), timeout_s, [SOURCE], [MINE])
        return self.lookup

    def hang(self, tier: Remote) -> Gate:
        gate = Gate()
        self.gates.append(gate)
        tier.before = gate
        return gate

    def ask(self, request_id: str, refs: Sequence[ChunkRef]) -> list[bool]:
        """Ask as a request that returns with every step until it has an answer."""
        asked = threading.Event()
        for _ in range(10_000):
            if self.lookup.answered(request_id, refs):
                return self.holds(request_id, refs)
            self.lookup.end_pass()
            asked.wait(0.001)
        raise AssertionError("nobody answers")

    def holds(self, request_id: str, refs: Sequence[ChunkRef]) -> list[bool]:
        now_s, told = time.monotonic(), self.lookup.told(request_id)
        return [self.lookup.view.holds(ref, now_s, told) is True for ref in refs]

    def unknown(self, refs: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Return the chunks that another request would have to ask about."""
        return self.lookup.view.unknown(refs, time.monotonic())


def refs(*numbers: int) -> list[ChunkRef]:
    return [make_ref(number) for number in numbers]
