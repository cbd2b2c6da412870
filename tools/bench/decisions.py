"""Bench line of the cache server's longest decision, the time that one message or slice delays all others.

The service runs on the measuring thread, without sockets and without memory behind its pages. The limit is a target.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.layout import KVLayout
from kvstore.tools.bench.lines import target
from kvstore.tools.bench.samples import NAMESPACE, require
from kvstore.tools.serve.process import without_full_collections

if TYPE_CHECKING:
    from kvstore.protocol import messages

NUM_CHUNKS = 40_000
NAME = "server: longest decision, 40,000 chunks"
_ROUNDS = 5
_BLOCKS = 4
_LAYOUT = KVLayout((64,), 1, 16, 16 * _BLOCKS)


@target(
    5e-3,
    NAME,
    "target",
    "a lookup, scan and removal of 4,096 chunks, pins of as many, places for 64, reports, a clear of all",
)
def longest_decisions() -> Iterator[float]:
    """Fill a server, send it the slowest requests, and clear it, once per round."""
    with without_full_collections():
        server = _Server()
        for _ in range(_ROUNDS):
            yield server.round()


class _Server:
    """A service that runs on the caller's thread, with the namespace of one client."""

    def __init__(self) -> None:
        from kvstore.protocol import messages  # noqa: PLC0415 - of an extra
        from kvstore.protocol.payload import PAGE_BYTES  # noqa: PLC0415
        from kvstore.protocol.payload import Geometry as Shape  # noqa: PLC0415
        from kvstore.server.clients import IPC, OURSELVES  # noqa: PLC0415
        from kvstore.server.core import Core  # noqa: PLC0415
        from kvstore.server.operators import stats  # noqa: PLC0415
        from kvstore.server.pool import FreePages, Pool  # noqa: PLC0415
        from kvstore.server.service import Service  # noqa: PLC0415
        from kvstore.server.sessions import Peer, Sessions  # noqa: PLC0415
        from kvstore.server.stock import Stock  # noqa: PLC0415

        class Pages(Pool):
            """A pool without memory, because no byte is written."""

            def __init__(self) -> None:
                self.num_bytes = NUM_CHUNKS * PAGE_BYTES
                self.free = FreePages(NUM_CHUNKS)
                self._left_pages = 0

        pool = Pages()
        self._stock = Stock(pool.num_bytes, pool.free)
        self._jobs: deque[Callable[[], None]] = deque()
        self._answers: list[messages.Answer] = []
        self._messages = messages
        self._longest_s = 0.0
        core = Core(
            pool,
            self._stock,
            Sessions(self._stock, pool.num_bytes, {IPC: 1}),
            None,
            send=lambda _peer, answer, _frames: self._answers.append(answer),
            report=self._jobs.append,
            is_open=lambda _token: True,
            stats=lambda: stats(core, 0.0, 0),
            sender=lambda _peer: OURSELVES,
            now=time.monotonic,
        )
        self._service = Service(core, max_writes=1, pin_max_s=3600.0)
        self._peer = Peer(IPC, b"bench")
        token = bytes(messages.TOKEN_BYTES)
        self._ask(messages.Hello(1, messages.PROTOCOL_VERSION, dict(NAMESPACE.fields), Shape.of(_LAYOUT), 0, token))
        (self._space,) = self._stock.spaces.values()

    def round(self) -> float:
        """Return the seconds of the longest decision."""
        messages, most = self._messages, self._messages.MAX_REFS
        refs = [ref for _ in range(0, NUM_CHUNKS, messages.MAX_MOVES) for ref in self._store(messages.MAX_MOVES)]
        require(len(self._space.chunks) == NUM_CHUNKS, f"{NAME}: {len(self._space.chunks)} chunks are there")
        some, self._longest_s = messages.pack_refs(refs[:most]), 0.0
        self._ask(messages.Stats(2))
        self._ask(messages.Lookup(3, some))
        self._ask(messages.Scan(4, NUM_CHUNKS - 10))
        self._ask(messages.Explain(5, self._space.id, some))
        self._ask(messages.Pin(6, self._space.id, some, True))
        self._ask(messages.Pins(7))
        self._store(messages.MAX_MOVES)
        self._ask(messages.UnpinSpaces(8, b""))
        self._ask(messages.Remove(9, some))
        self._ask(messages.Clear(10))
        require(not self._space.used_bytes and not self._stock.has_cleared, f"{NAME}: it is not empty")
        return self._longest_s

    def _store(self, count: int) -> Sequence[ChunkRef]:
        refs = [ChunkRef(secrets.token_bytes(PREFIX_KEY_BYTES), _BLOCKS) for _ in range(count)]
        granted = self._ask(self._messages.Reserve(11, self._messages.pack_refs(refs)))
        assert isinstance(granted, self._messages.Granted)
        for ref, grant in zip(refs, granted.grants, strict=True):
            trail = secrets.token_bytes((_BLOCKS - 1) * PREFIX_KEY_BYTES) + ref.prefix_key
            self._ask(self._messages.Describe(12, grant.lease, trail))
        self._ask(self._messages.Commit(13, [grant.lease for grant in granted.grants], True))
        return refs

    def _ask(self, request: messages.Request) -> messages.Answer | None:
        frame = self._messages.encode(request)
        self._time(lambda: self._service.handle(self._peer, [frame]))
        while self._jobs or self._service.has_leisure_work:
            self._time(self._jobs.popleft() if self._jobs else self._service.do_leisure_work)
        return self._answers.pop() if self._answers else None

    def _time(self, decision: Callable[[], None]) -> None:
        begin_s = time.thread_time()
        decision()
        self._longest_s = max(self._longest_s, time.thread_time() - begin_s)
