"""An engine that drains: it turns other engines away, goes on by itself, and says what is still to be written."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, consumer, flush, producer, to
from support.redis_server import wait_for

from kvstore.adapters.vllm.requests.params import parse_handover
from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.config import StoreConfig
from kvstore.model.chunks import Outcome
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.processes import free_port

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))
OTHER = [token + 1 for token in PROMPT]
WHOLE = len(PROMPT) - 1
DONE = {"status": "closing", "unwritten": 0, "unreached": 0}


def drain(vllm: FakeVllm) -> dict[str, Any]:
    return dict(SchedulerControls(vllm.scheduler, StoreConfig(), {}).drain())


def level(vllm: FakeVllm) -> float | None:
    vllm.scheduler.take_tally()
    return vllm.scheduler.totals.levels().get("draining")


@pytest.fixture
def decode() -> Iterator[FakeVllm]:
    with closing(consumer()) as engine:
        yield engine


@pytest.fixture
def prefill() -> Iterator[FakeVllm]:
    with closing(producer(Wire())) as engine:
        yield engine


def test_a_receiver_takes_no_more_and_reads_what_it_has(decode: FakeVllm, prefill: FakeVllm) -> None:
    first = prefill.ask("first", PROMPT, handover=to(decode))
    flush(prefill)
    assert drain(decode) == DONE
    decode.ask("first", PROMPT, handover=answered(first))
    assert decode.loaded_tokens["first"] == WHOLE
    second = prefill.ask("second", OTHER, handover=to(decode))
    flush(prefill)
    decode.ask("second", OTHER, handover=parse_handover(second.answer, "second"))
    assert decode.loaded_tokens["second"] == 0
    assert (decode.recovered, prefill.recovered) == (0, 0)
    decode.settle()
    decode.assert_nothing_leaked()


def test_a_receiver_that_is_new_to_the_sender_refuses(decode: FakeVllm, prefill: FakeVllm) -> None:
    assert drain(decode) == DONE
    request = prefill.ask("first", PROMPT, handover=to(decode))
    flush(prefill)
    assert answered(request) is None or answered(request).spec.num_transferred_tokens == 0  # type: ignore[union-attr]
    decode.ask("first", PROMPT, handover=answered(request))
    assert decode.loaded_tokens["first"] == 0


def test_a_sender_begins_no_hand_over_and_ends_those_under_way(decode: FakeVllm) -> None:
    wire, drained = Wire(), list[dict[str, Any]]()
    with closing(producer(wire)) as prefill:
        wire.before_layers = lambda: drained.append(drain(prefill)) if not drained else None
        request = prefill.ask("first", PROMPT, handover=to(decode))
        decode.ask("first", PROMPT, handover=answered(request))
        assert drained == [DONE]
        assert decode.loaded_tokens["first"] == WHOLE
        request = prefill.ask("second", OTHER, handover=to(decode))
        assert request.answer is None


def test_peers_stop_asking_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with closing(FakeVllm(Setup(port=port, ranks=2, local_cpu=False))) as keeper:
        keeper.ask("first", PROMPT)
        keeper.settle()
        with closing(FakeVllm(Setup(ranks=2, peers=(f"kvs://127.0.0.1:{port}",), saves=False))) as reader:
            reader.ask("first", PROMPT)
            assert reader.loaded_tokens["first"] > 0
            assert drain(keeper) == DONE
            reader.forget_local()
            with caplog.at_level(logging.WARNING):
                for number in range(3):
                    reader.ask(f"again {number}", PROMPT)
                    reader.ask(f"other {number}", OTHER)
            assert reader.loaded_tokens["again 2"] == 0
            assert 1 <= caplog.text.count("about to end") <= 2, "one line for each rank"
            assert reader.recovered == 0
        keeper.forget_local()
        keeper.ask("again", PROMPT)
        assert keeper.loaded_tokens["again"] > 0, "its own server answers it, over old and new connections"
        keeper.ask("new", OTHER)
        keeper.settle()
        keeper.forget_local()
        keeper.ask("new again", OTHER)
        assert keeper.loaded_tokens["new again"] > 0, "and stores what it computes"
        assert (keeper.index.counters.sends_done, keeper.index.counters.sends_failed) == (8, 0)


def test_it_says_how_many_chunks_are_still_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, put = Event(), DiskTier.put

    def put_later(self: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
        assert may_write.wait(HANG_GUARD_S)
        return put(self, transfers)

    monkeypatch.setattr(DiskTier, "put", put_later)
    with closing(FakeVllm(Setup(folder=tmp_path, ranks=2))) as vllm:
        try:
            vllm.ask("first", PROMPT)
            assert drain(vllm) == {**DONE, "unwritten": 4}
            vllm.ask("second", OTHER)
            assert drain(vllm)["unwritten"] == 8, "requests go on"
        finally:
            may_write.set()
        wait_for("all is written", lambda: drain(vllm) == DONE)  # without a step: an idle vLLM plans none
    assert len({path.name for path in tmp_path.rglob("*.safetensors")}) == 8


def test_a_gauge_shows_it_with_the_next_step(decode: FakeVllm) -> None:
    controls = SchedulerControls(decode.scheduler, StoreConfig(), {})
    assert (level(decode), controls.info()["draining"]) == (0, False)
    controls.drain()
    assert (level(decode), controls.info()["draining"]) == (1, True)


def test_a_worker_that_does_not_answer_is_told(decode: FakeVllm) -> None:
    decode.workers[0]._drains.close()
    assert drain(decode) == {**DONE, "unreached": 1}
