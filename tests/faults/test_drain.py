"""An engine that drains: it turns other engines away, goes on by itself, and says what is still to be written."""

from __future__ import annotations

import logging
import os
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
from typer.testing import CliRunner

from kvstore.adapters.vllm.requests.params import parse_handover
from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.config import StoreConfig
from kvstore.model.chunks import Outcome
from kvstore.ops.drains import Listening, workers_here
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.cli import app
from kvstore.tools.commands import engines
from kvstore.tools.processes import free_port

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))
OTHER = [token + 1 for token in PROMPT]
WHOLE = len(PROMPT) - 1
DONE = {"status": "closing", "unwritten": 0, "unreached": 0}


def drain(vllm: FakeVllm) -> dict[str, Any]:
    return dict(SchedulerControls(vllm.scheduler, StoreConfig(), {}).drain())


def mark_of(vllm: FakeVllm) -> str:
    """Return the name of an engine for ``--engine``."""
    return vllm.workers[0]._drains.name.split("-")[2]


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


class TestHostsWithoutTheScheduler:
    """The command finds the workers there. Each test names its engine, as those of other tests may run here, too."""

    def run(self, engine: str, *words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["engine", "drain", "--workers", "--engine", engine, *words])
        return result.exit_code, result.stdout or result.stderr

    def test_their_workers_write_and_turn_others_away(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        may_write, put, port = Event(), DiskTier.put, free_port()

        def put_later(self: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            assert may_write.wait(HANG_GUARD_S)
            return put(self, transfers)

        monkeypatch.setattr(DiskTier, "put", put_later)
        with closing(FakeVllm(Setup(folder=tmp_path, ranks=2, port=port))) as vllm:
            engine = mark_of(vllm)
            try:
                vllm.ask("first", PROMPT)
                # A chunk on its way from memory to the disk may count twice for a moment.
                four = (1, "4 chunks are still to be written\n")
                wait_for("all wait for the disk", lambda: self.run(engine, "--wait-s", "0") == four)
            finally:
                may_write.set()
            assert self.run(engine) == (0, "0 chunks are still to be written\n")
            with closing(FakeVllm(Setup(ranks=2, peers=(f"kvs://127.0.0.1:{port}",), saves=False))) as reader:
                reader.ask("first", PROMPT)
                assert reader.loaded_tokens["first"] == 0
        code, said = self.run(engine)
        assert (code, engine in said) == (2, False)

    def test_those_of_another_engine_are_left_alone(self, decode: FakeVllm, prefill: FakeVllm) -> None:
        assert mark_of(decode) != mark_of(prefill)
        assert self.run(f"{os.getpid()}-{id(prefill)}")[0] == 0, "by its id"
        first = prefill.ask("first", PROMPT, handover=to(decode))
        flush(prefill)
        decode.ask("first", PROMPT, handover=answered(first))
        assert decode.loaded_tokens["first"] == WHOLE

    def test_where_several_engines_run_one_must_be_named(
        self, decode: FakeVllm, prefill: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        marks = {mark_of(decode), mark_of(prefill)}
        ours = [worker for worker in workers_here() if worker.engine in marks]
        monkeypatch.setattr(engines, "workers_here", lambda: ours)
        code, said = self.run("")
        assert (code, all(mark in said for mark in marks)) == (2, True)
        assert self.run("another")[0] == 2
        monkeypatch.setattr(engines, "workers_here", lambda: ours[:1])
        assert self.run("")[0] == 0
        monkeypatch.setattr(engines, "workers_here", list)
        assert self.run("")[0] == 2

    def test_whoever_does_not_say_whose_it_is_decides_nothing(
        self, decode: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Anybody on this host may listen under such a name, and let nobody in."""
        (ours,) = (worker for worker in workers_here() if worker.engine == mark_of(decode))
        other = Listening("nobody listens here", "0" * 8, 0)
        monkeypatch.setattr(engines, "workers_here", lambda: [other, ours])
        assert self.run("") == (0, "0 chunks are still to be written\n")
        monkeypatch.setattr(engines, "workers_here", lambda: [other._replace(engine=ours.engine), ours])
        assert self.run("", "--wait-s", "0")[0] == 1, "it may be a worker"

    def test_one_that_does_not_answer_is_a_failure(self, decode: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
        def hangs(_timeout_s: float) -> None:
            raise TimeoutError

        server = decode.workers[0]._server
        assert server is not None
        monkeypatch.setattr(server, "drain", hangs)
        said = "0 chunks are still to be written, and 1 workers do not say\n"
        assert self.run(mark_of(decode), "--wait-s", "0") == (1, said)


def test_a_worker_that_does_not_answer_is_told(decode: FakeVllm) -> None:
    decode.workers[0]._drains.close()
    assert drain(decode) == {**DONE, "unreached": 1}
