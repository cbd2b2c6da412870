"""The parts of a cache server without sockets: its stock, and the desk that answers its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvstore.chunks import ChunkRef, Outcome
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.geometry import Geometry
from kvstore.protocol.outcomes import outcome_of
from kvstore.protocol.pieces import checksum
from kvstore.protocol.runs import PAGE_BYTES, Run
from kvstore.server.core import Core
from kvstore.server.owner import Owner
from kvstore.server.pool import FreePages, Pool
from kvstore.server.service import Service
from kvstore.server.sessions import Peer, Session, Sessions
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

LAYOUT = KVLayout((PAGE_BYTES // 2,), 1, 16, 64)  # a chunk of four blocks takes two pages
CHUNK_BYTES = 2 * PAGE_BYTES
ONE, TWO, THREE = make_ref(1, 4), make_ref(2, 4), make_ref(3, 4)
HANG_GUARD_S = 30.0
LATER_S = 1e9


class Shop:
    """A stock with room for two chunks in memory and one on disk, and one namespace."""

    def __init__(self, chunks: int = 2, disk_chunks: int = 1, quota_bytes: int | None = None) -> None:
        self.free = FreePages(2 * chunks)
        quotas = {} if quota_bytes is None else {"mine": quota_bytes}
        pool_bytes = chunks * CHUNK_BYTES
        self.stock = Stock(
            pool_bytes, self.free, disk_bytes=disk_chunks * CHUNK_BYTES, policy="LRU", disk_policy="LRU", quotas=quotas
        )
        self.space = self._enter()
        self.sessions = Sessions(self.stock, pool_bytes)

    def _enter(self) -> Space:
        space = self.stock.enter(Namespace({"model": "mine"}), LAYOUT)
        assert space is not None
        return space

    def reserve(self, ref: ChunkRef) -> Chunk | None:
        return self.stock.reserve(self.space, ref, 1 << 60)

    def store(self, ref: ChunkRef) -> Chunk:
        chunk = self.reserve(ref)
        assert chunk is not None
        assert self.stock.complete(chunk, is_whole=True) is Outcome.STORED
        return chunk

    def client(self, token: bytes = b"") -> Session:
        return self.sessions.begin(Peer(0, b"one"), self.space, 1 << 60, token, 0.0)


class Desk:
    """A service over a small pool. What it sends is in ``sent``; ``settle`` lets what its threads reported happen."""

    def __init__(self, owner: Owner | None = None) -> None:
        allocated: list[Run] = []
        self.pool = Pool(8 * CHUNK_BYTES, allocated.append)
        assert self.pool.wait_allocated(HANG_GUARD_S)
        for run in allocated:
            self.pool.add(run)
        self.stock = Stock(self.pool.num_bytes, self.pool.free)
        self.sessions = Sessions(self.stock, self.pool.num_bytes)
        self.now_s = 0.0
        self.sent: list[messages.Answer] = []
        self.reports: list[Callable[[], None]] = []
        self.reported = threading.Semaphore(0)
        self.open_tokens: set[bytes] = set()
        core = Core(
            self.pool,
            self.stock,
            self.sessions,
            None,
            send=lambda _peer, answer, _frames: self.sent.append(answer),
            report=self._report,
            is_open=self._is_open,
            stats=dict,
            may_order=lambda _peer: True,
            now=lambda: self.now_s,
        )
        self.service = Service(core, max_writes=1, pin_max_s=LATER_S, owner=owner)
        self.peer = Peer(0, b"one")

    def _report(self, work: Callable[[], None]) -> None:
        self.reports.append(work)
        self.reported.release()

    def _is_open(self, token: bytes) -> bool:
        return token in self.open_tokens

    def settle(self, count: int) -> None:
        for _ in range(count):
            assert self.reported.acquire(timeout=HANG_GUARD_S)
            self.reports.pop(0)()

    def ask(self, request: messages.Request, *frames: bytes) -> Any:
        before = len(self.sent)
        self.service.handle(self.peer, [messages.encode(request), *frames])
        return self.sent[-1] if len(self.sent) > before else None

    def hello(self, token: bytes = b"") -> Any:
        fields: dict[str, str | int] = {"model": "mine"}
        return self.ask(messages.Hello(1, messages.PROTOCOL_VERSION, fields, Geometry.of(LAYOUT), 0, token))

    def lease(self, request: type[messages.Reserve | messages.Acquire], ref: ChunkRef) -> int:
        (grant,) = self.ask(request(2, messages.pack_refs([ref]))).grants
        assert grant.lease
        return int(grant.lease)

    def send(self, lease: int, payload: bytes, offset: int = 0) -> None:
        self.ask(messages.Piece(3, lease, offset, checksum_of(payload)), payload)

    def commit(self, lease: int) -> Outcome:
        return outcome_of(self.ask(messages.Commit(4, [lease], True)).outcomes[0])

    def store(self, ref: ChunkRef) -> None:
        lease = self.lease(messages.Reserve, ref)
        self.send(lease, bytes(CHUNK_BYTES))
        self.settle(1)
        assert self.commit(lease) is Outcome.STORED


def checksum_of(payload: bytes) -> bytes:
    return checksum([memoryview(payload)])
