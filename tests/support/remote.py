"""A remote tier in a dictionary, that several engines of one test share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import opening
from kvstore.opening import RemoteOptions
from support.rig import FakeTier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

    from kvstore.keys import Namespace
    from kvstore.tiers.base import ChunkRef, Outcome, Tier, TierSetup, Transfer


class FakeServer:
    """What all engines see: the chunks of every namespace, and what its tiers were asked."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, dict[ChunkRef, bytes]] = {}
        self.questions: list[Sequence[ChunkRef]] = []
        self.puts: list[ChunkRef] = []
        self.before_contains: Any = lambda: None
        self.before_get: Any = lambda: None
        self.before_put: Any = lambda: None

    def open(self, _kind: str, setup: TierSetup) -> Tier:
        return _FakeRemote(self, setup)

    def all_chunks(self) -> dict[ChunkRef, bytes]:
        """Of all namespaces together."""
        return {ref: payload for chunks in self.chunks.values() for ref, payload in chunks.items()}

    def lose(self, refs: Iterable[ChunkRef]) -> None:
        """Evict chunks, as a server does when it likes."""
        for ref in list(refs):
            for chunks in self.chunks.values():
                chunks.pop(ref, None)


class _FakeRemote(FakeTier):
    def __init__(self, server: FakeServer, setup: TierSetup) -> None:
        super().__init__(setup.capacity_bytes)
        self._server = server
        self.stored_bytes = setup.layout.payload_bytes  # type: ignore[method-assign]
        self._enter(setup.namespace)

    def _enter(self, namespace: Namespace) -> None:
        self.chunks = self._server.chunks.setdefault(namespace.id, {})

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._server.before_get()
        return super().get(transfers)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        self._server.before_contains()
        self._server.questions.append(refs)
        return super().contains(refs)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self._server.before_put()
        self._server.puts += [ref for ref, _ in transfers]
        return super().put(transfers)

    def reset(self, namespace: Namespace) -> None:
        self.clear()
        self._enter(namespace)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Let engines opened from now on with ``REMOTE`` use this server."""
    server = FakeServer()
    monkeypatch.setattr(opening, "open_tier", server.open)
    return server


REMOTE = RemoteOptions("redis://fake", lookup_timeout_s=5.0, hold_s=60.0, max_queue=64)
