"""A remote tier in a dictionary, that several engines of one test share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.engine import opening
from kvstore.engine.options import RemoteOptions
from kvstore.handover.transport import Parcel, Transport
from kvstore.model.chunks import Outcome
from support.rig import FakeTier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pytest

    from kvstore.model.chunks import ChunkRef, Presence
    from kvstore.model.keys import Namespace
    from kvstore.model.layout import KVLayout
    from kvstore.model.lifetime import Lifetime
    from kvstore.protocol.progress import Progress
    from kvstore.tiers.base import Tier, TierSetup, Transfer


class FakeServer:
    """Server that all engines share: the chunks of every namespace, and what its tiers were asked."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, dict[ChunkRef, bytes]] = {}
        self.trails: dict[bytes, dict[ChunkRef, bytes]] = {}
        self.questions: list[Sequence[ChunkRef]] = []
        self.puts: list[ChunkRef] = []
        self.reads: list[tuple[ChunkRef, int]] = []  # with the leading blocks that were asked for; 0 for all
        self.reads_fronts = False
        self.keeps_lifetimes = False
        self.ends: dict[ChunkRef, float] = {}  # of the chunks that have a time to live, in any namespace
        self.before_contains: Any = lambda: None
        self.before_get: Any = lambda: None
        self.before_put: Any = lambda: None

    def open(self, _kind: str, setup: TierSetup) -> Tier:
        return _FakeRemote(self, setup)

    def connect(self, _url: str, namespace: Namespace, _layout: KVLayout, _settings: Mapping[str, object]) -> Transport:
        """Open a transport for an engine that hands chunks over."""
        return _FakeTransport(self, namespace)

    def all_chunks(self) -> dict[ChunkRef, bytes]:
        """Return the chunks of all namespaces together."""
        copies = [dict(chunks) for chunks in list(self.chunks.values())]  # at once each: lanes may be writing
        return {ref: payload for chunks in copies for ref, payload in chunks.items()}

    def lose(self, refs: Iterable[ChunkRef]) -> None:
        """Evict chunks, as a server does when it likes."""
        for ref in list(refs):
            for chunks in self.chunks.values():
                chunks.pop(ref, None)


class _FakeRemote(FakeTier):
    def __init__(self, server: FakeServer, setup: TierSetup) -> None:
        super().__init__(setup.capacity_bytes)
        self._server = server
        self._layout = setup.layout
        self.stored_bytes = setup.layout.payload_bytes  # type: ignore[method-assign]
        self._enter(setup.namespace)

    def _enter(self, namespace: Namespace) -> None:
        self.chunks = self._server.chunks.setdefault(namespace.id, {})
        self.told_trails = self._server.trails.setdefault(namespace.id, {})
        self.namespace_id = namespace.id

    @property
    def reads_fronts(self) -> bool:
        return self._server.reads_fronts

    @property
    def keeps_lifetimes(self) -> bool:
        return self._server.keeps_lifetimes

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        for ref, until_s in lifetimes:
            end_s = self._server.ends.get(ref)
            if end_s is not None and until_s is None:
                del self._server.ends[ref]
            elif end_s is not None and until_s is not None:
                self._server.ends[ref] = max(end_s, until_s)

    def _end_chunks(self) -> None:
        now_s = time.time()
        for ref in [ref for ref, end_s in self._server.ends.items() if end_s <= now_s]:
            del self._server.ends[ref]
            self.chunks.pop(ref, None)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._server.before_get()
        self._server.reads += [(transfer.ref, transfer.front_blocks) for transfer in transfers]
        self._end_chunks()
        return [
            self._get_front(item) if item.front_blocks else super(_FakeRemote, self).get([item])[0]
            for item in transfers
        ]

    def _get_front(self, transfer: Transfer) -> Outcome:
        assert self.reads_fronts
        payload = self.chunks.get(transfer.ref)
        if payload is None:
            return Outcome.MISS
        ranges = self._layout.front_ranges(transfer.ref.num_blocks, transfer.front_blocks)
        front = b"".join(payload[begin:end] for begin, end in ranges)
        transfer.buffer[: len(front)] = np.frombuffer(front, np.uint8)
        return Outcome.HIT

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        self._server.before_contains()
        self._server.questions.append(refs)
        self._end_chunks()
        return [ref in self.chunks and self._server.ends.get(ref, True) for ref in refs]

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._server.before_put()
        self._server.puts += [transfer.ref for transfer in transfers]
        for item in transfers:
            assert item.until_s is None or self.keeps_lifetimes
            self._server.ends.pop(item.ref, None)
            self._server.ends |= {} if item.until_s is None else {item.ref: item.until_s}
        return super().put(transfers)

    def reset(self, namespace: Namespace) -> None:
        with self._lock:
            self.chunks.clear()
            self._enter(namespace)


class _FakeTransport(Transport):
    def __init__(self, server: FakeServer, namespace: Namespace) -> None:
        self._server = server
        self._namespace = namespace

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        self._server.before_put()
        taken = [bytearray(len(parcel.payload)) for parcel in parcels]
        is_whole = False
        for _ in ready:
            for place, parcel in zip(taken, parcels, strict=True):
                place[:] = parcel.payload.tobytes()
            is_whole = True
        self._server.before_put()
        chunks = self._server.chunks.setdefault(self._namespace.id, {})
        for place, parcel in zip(taken, parcels, strict=True):
            if is_whole:
                chunks.setdefault(parcel.ref, bytes(place))
        return [Outcome.STORED if is_whole else Outcome.FAILED] * len(parcels)

    def tell(self, progress: Progress) -> None:
        pass

    def close(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Let engines opened from now on with ``REMOTE`` use this server."""
    server = FakeServer()
    monkeypatch.setattr(opening, "open_tier", server.open)
    return server


REMOTE = RemoteOptions("redis://fake", lookup_timeout_s=5.0, hold_s=60.0, max_queue=64)
