"""The parts of a cache server without sockets: its stock, and the desk that answers its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.outcomes import outcome_of
from kvstore.protocol.payload import PAGE_BYTES, Geometry, Run, checksum
from kvstore.server.clients import IPC, OURSELVES, TCP
from kvstore.server.core import Core
from kvstore.server.disk import Disk
from kvstore.server.disk_tiers import DiskOptions
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


T = TypeVar("T")


def whole(steps: Generator[None, None, T]) -> T:
    """Carry out work in steps between which nothing else happens."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


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
        self.sessions = Sessions(self.stock, pool_bytes, {IPC: 8, TCP: 8})

    def _enter(self) -> Space:
        space = self.stock.spaces.enter(Namespace({"model": "mine"}), LAYOUT)
        assert space is not None
        return space

    def reserve(self, ref: ChunkRef) -> Chunk | None:
        return whole(self.stock.reserve(self.space, ref))

    def acquire(self, ref: ChunkRef) -> Chunk | Outcome:
        return whole(self.stock.acquire(self.space, ref))

    def store(self, ref: ChunkRef) -> Chunk:
        chunk = self.reserve(ref)
        assert chunk is not None
        assert self.stock.complete(chunk, is_whole=True) is Outcome.STORED
        return chunk

    def client(self, token: bytes = b"") -> Session:
        return self.sessions.begin(Peer(0, b"one"), OURSELVES, self.space, token, 0.0)


class Desk:
    """A service over a small pool. Its answers are in ``sent``; ``settle`` carries out the reports of its threads."""

    def __init__(self, owner: Owner | None = None, disk: DiskOptions | None = None) -> None:
        allocated: list[Run] = []
        self.pool = Pool(8 * CHUNK_BYTES, allocated.append)
        assert self.pool.wait_allocated(HANG_GUARD_S)
        for run in allocated:
            self.pool.add(run)
        self.disk = Disk(disk, self._report) if disk is not None else None
        disk_bytes = disk.capacity_bytes if disk else 0
        self.stock = Stock(self.pool.num_bytes, self.pool.free, disk_bytes=disk_bytes, now=self._now)
        self.sessions = Sessions(self.stock, self.pool.num_bytes, {IPC: 8, TCP: 8})
        self.now_s = 0.0
        self.step_s = 0.0  # how long each reading of the clock takes
        self.sent: list[messages.Answer] = []
        self.reports: list[Callable[[], None]] = []
        self.reported = threading.Semaphore(0)
        self.open_tokens: set[bytes] = set()
        self.client = OURSELVES
        core = Core(
            self.pool,
            self.stock,
            self.sessions,
            self.disk,
            send=lambda _peer, answer, _frames: self.sent.append(answer),
            report=self._report,
            is_open=self._is_open,
            stats=dict,
            sender=lambda _peer: self.client,
            now=self._now,
        )
        self.service = Service(core, max_writes=1, pin_max_s=LATER_S, owner=owner)
        self.peer = Peer(0, b"one")

    def _now(self) -> float:
        self.now_s += self.step_s
        return self.now_s

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

    def hello(self, token: bytes = b"", version: int = messages.PROTOCOL_VERSION) -> Any:
        fields: dict[str, str | int] = {"model": "mine"}
        return self.ask(messages.Hello(1, version, fields, Geometry.of(LAYOUT), 0, token))

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
