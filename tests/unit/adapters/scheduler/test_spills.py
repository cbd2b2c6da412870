"""Chunks that a full receiver refuses, in a tier that both engines share: the answer names it, and they are read there.

Over real sockets. The deadline is an hour, so a test whose request waits for it does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from support.cache_server import ServerThread, serving_tcp
from support.fake_parts import CHUNK, FakeRequest
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, consumer, flush, producer, to

from kvstore.adapters.vllm.requests.params import Handover
from kvstore.adapters.vllm.scheduler import handovers
from kvstore.model.chunks import Outcome
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.tiers.base import Transfer
from kvstore.tiers.server.tier import ServerTier

LONG = [token % 50 for token in range(12 * CHUNK + 1)]
BUFFER = 8 * PAGE_BYTES  # of eight chunks


@pytest.fixture
def shared() -> Iterator[ServerThread]:
    with serving_tcp() as server:
        yield server


@pytest.fixture
def engines(shared: ServerThread) -> Iterator[tuple[FakeVllm, FakeVllm]]:
    with (
        closing(consumer(shared=shared.url, server_bytes=BUFFER)) as second,
        closing(producer(Wire(), shared=shared.url)) as first,
    ):
        yield first, second
        first.settle()
        second.settle()
        first.assert_nothing_leaked()
        second.assert_nothing_leaked()
        assert second.scheduler._handovers.waits.timeouts == 0


def spec_of(request: FakeRequest) -> dict[str, object]:
    spec = (request.answer or {})["disagg_spec"]
    assert isinstance(spec, dict)
    return spec


def test_what_a_full_receiver_refuses_is_read_there(engines: tuple[FakeVllm, FakeVllm], shared: ServerThread) -> None:
    first, second = engines
    asked = first.ask("one", LONG, handover=to(second))
    assert spec_of(asked)["kept_url"] == shared.url
    assert spec_of(asked)["num_coming_tokens"] == 12 * CHUNK
    second.ask("one", LONG, handover=answered(asked))
    assert second.loaded_tokens["one"] == 12 * CHUNK


def test_what_is_still_being_written_there_is_waited_for(
    engines: tuple[FakeVllm, FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer may precede the write. The wait is short if the chunk never arrives."""
    monkeypatch.setattr(handovers, "SOURCE_GRACE_S", HANG_GUARD_S)
    first, second = engines
    real, came, may_go = ServerTier.put, threading.Event(), threading.Event()

    def put(tier: ServerTier, transfers: Sequence[Transfer]) -> list[Outcome]:
        came.set()
        assert may_go.wait(HANG_GUARD_S)
        return real(tier, transfers)

    monkeypatch.setattr(ServerTier, "put", put)
    asked = first.ask("one", LONG, handover=to(second))
    flush(first)
    assert came.wait(HANG_GUARD_S)
    request = second.add("one", LONG, handover=answered(asked))
    for _ in range(10):
        second.step()
    assert request.state == "waiting"
    may_go.set()
    second.run()
    assert second.loaded_tokens["one"] == 12 * CHUNK


@pytest.mark.parametrize("is_known", [True, False], ids=["nothing is there", "another tier"])
def test_what_is_not_there_is_computed(
    engines: tuple[FakeVllm, FakeVllm], monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    first, second = engines
    monkeypatch.setattr(ServerTier, "put", lambda _, transfers: [Outcome.FULL] * len(transfers))
    if is_known:
        monkeypatch.setattr(handovers, "SOURCE_GRACE_S", 0.01)
    asked = first.ask("one", LONG, handover=to(second))
    flush(first)
    handover = answered(asked)
    assert handover is not None
    assert handover.spec is not None
    if not is_known:
        spec = {**spec_of(asked), "kept_url": "redis://elsewhere"}
        handover = Handover(type(handover.spec)(**spec))  # type: ignore[arg-type]
    second.ask("one", LONG, handover=handover)
    assert second.loaded_tokens["one"] == 8 * CHUNK


def test_who_saves_nothing_keeps_nothing(shared: ServerThread) -> None:
    with (
        closing(consumer(shared=shared.url, server_bytes=BUFFER)) as second,
        closing(producer(Wire(), shared=shared.url, saves=False)) as first,
    ):
        assert "kept_url" not in spec_of(first.ask("one", LONG, handover=to(second)))


def test_nothing_is_written_to_the_shared_tier_by_who_receives(shared: ServerThread) -> None:
    with closing(consumer(shared=shared.url)) as second, closing(producer(Wire())) as first:
        asked = first.ask("one", LONG, handover=to(second))
        second.ask("one", LONG, handover=answered(asked))
        second.settle()
        assert second.loaded_tokens["one"] == 12 * CHUNK
        assert not shared.hub.stock.num_in_memory
