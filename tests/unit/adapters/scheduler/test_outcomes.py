"""Outcomes of hand-overs at the consumer, over real sockets: it waits for chunks that arrive, and for nothing else.

The deadline is an hour, so a test whose request waits for it does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, FakeRequest
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, consumer, flush, producer, throw_away, to
from support.redis_server import wait_for

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.protocol import messages
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.service import Service
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock

PROMPT = list(range(2 * CHUNK + 2 * BLOCK + 1))
WHOLE = len(PROMPT) - 1


class Gate:
    """Gate that holds up the sender's thread until it is opened, and knows when the thread waits."""

    def __init__(self) -> None:
        self.came, self.may_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.came.set()
        assert self.may_go.wait(HANG_GUARD_S)


@contextmanager
def engines(wire: Wire, **how: Any) -> Iterator[tuple[FakeVllm, FakeVllm]]:
    with closing(consumer(**how)) as second, closing(producer(wire, **how)) as first:
        yield first, second
        first.settle()
        second.settle()
        first.assert_nothing_leaked()
        second.assert_nothing_leaked()
        assert not len(second.scheduler._handovers.waits)
        assert second.scheduler._handovers.waits.timeouts == 0


def waits(vllm: FakeVllm, request: FakeRequest) -> bool:
    """Tell if a request still waits after five steps."""
    for _ in range(5):
        vllm.step()
    return request.state == "waiting"


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_of_it_is_waited_for(ranks: int) -> None:
    wire, gate = Wire(), Gate()
    wire.before_layers = gate
    with engines(wire, ranks=ranks) as (first, second):
        asked = first.add("one", PROMPT, handover=to(second))
        first.run()
        request = second.add("one", PROMPT, handover=answered(asked))
        assert waits(second, request)
        gate.may_go.set()
        second.run()
        assert second.loaded_tokens["one"] == WHOLE


def test_what_one_rank_loses_is_computed_at_once() -> None:
    """The other rank's part has arrived, and is of no use."""
    wire, gate = Wire(), Gate()
    wire.after_delivery = gate
    with engines(wire, ranks=2) as (first, second):
        wire.before_delivery = lambda: _break(threading.get_ident() == min(_senders(first)))
        asked = first.ask("one", PROMPT, handover=to(second))
        request = second.add("one", PROMPT, handover=answered(asked))
        gate.may_go.set()
        second.run()
        assert request.state == "finished"
        assert second.loaded_tokens["one"] == 0


def _senders(vllm: FakeVllm) -> list[int]:
    """Return the threads that send, one for each rank."""
    pushers = [worker._pushes._pusher for worker in vllm.workers]
    return [sender._thread.ident or 0 for pusher in pushers if pusher for sender in pusher._senders.values()]


def _break(breaks: bool) -> None:
    if breaks:
        raise TierError("broken on purpose")


def test_a_sender_that_dies_is_not_waited_for() -> None:
    """Its connection ends in the middle of a chunk."""
    wire, gate = Wire(), Gate()

    def dies() -> None:
        gate()
        raise TierError("died")

    wire.before_layers = dies
    with engines(wire) as (first, second):
        asked = first.ask("one", PROMPT, handover=to(second))
        assert gate.came.wait(HANG_GUARD_S)
        request = second.add("one", PROMPT, handover=answered(asked))
        assert waits(second, request)
        gate.may_go.set()
        second.run()
        assert second.loaded_tokens["one"] == 0


def test_a_sender_that_never_came_is_not_waited_for() -> None:
    with closing(consumer()) as second:
        spec = DisaggSpec("client", "127.0.0.1", (1,), sender="nobody", handover=3, num_coming_tokens=WHOLE)
        second.ask("one", PROMPT, handover=Handover(spec))
        assert second.loaded_tokens["one"] == 0
        assert second.scheduler._handovers.waits.timeouts == 0


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ({"num_transferred_tokens": CHUNK}, CHUNK),
        ({"num_transferred_tokens": BLOCK, "num_coming_tokens": CHUNK}, CHUNK),
        ({}, WHOLE),
    ],
    ids=["arrived", "on their way", "not told"],
)
def test_no_more_is_waited_for_than_the_sender_has_told(told: dict[str, Any], tokens: int) -> None:
    with closing(consumer()) as second:
        request = second.add("one", PROMPT, handover=Handover(DisaggSpec("client", "127.0.0.1", (1,), **told)))
        assert second.scheduler._handovers.waits._waits["one"].num_tokens == tokens
        second.abort(request)


def test_what_a_full_receiver_refuses_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks before the refused one are loaded."""
    real = Stock.reserve

    def reserve(stock: Stock, space: Space, ref: ChunkRef, owner: bytes) -> Generator[None, None, Chunk | None]:
        return None if space.chunks else (yield from real(stock, space, ref, owner))

    wire = Wire()
    with engines(wire, budget=CHUNK) as (first, second):
        asked = first.add("one", PROMPT, handover=to(second))
        first.step()
        flush(first)
        monkeypatch.setattr(Stock, "reserve", reserve)
        first.run()
        second.ask("one", PROMPT, handover=answered(asked))
        assert second.loaded_tokens["one"] == CHUNK


def test_what_was_thrown_away_there_is_not_waited_for() -> None:
    wire = Wire()
    with engines(wire) as (first, second):
        asked = first.ask("one", PROMPT, handover=to(second))
        flush(first)
        throw_away(second)
        second.ask("one", PROMPT, handover=answered(asked))
        assert second.loaded_tokens["one"] == 0


def test_what_the_step_got_wrong_is_not_waited_for() -> None:
    """The request of a prompt that is taken back is computed; a later hand-over has another number."""
    wire = Wire()
    with engines(wire, budget=CHUNK) as (first, second):
        request = first.add("one", PROMPT, handover=to(second))
        first.step()
        first.abort(request)
        first.ask("two", [9] * CHUNK, handover=to(second))
        flush(first)
        spec = to(second).spec
        assert spec is not None
        told = DisaggSpec(
            "client",
            spec.receiver_host,
            spec.receiver_init_port,
            sender=first.scheduler._handovers.outgoing._name,
            handover=0,
            num_coming_tokens=WHOLE,
        )
        second.ask("one", PROMPT, handover=Handover(told))
        assert second.loaded_tokens["one"] == CHUNK


def test_hand_overs_behind_one_that_is_slow_are_waited_for() -> None:
    """Nothing was reported of them when their request came, but their sender is connected."""
    wire, gate = Wire(), Gate()
    wire.before_layers = gate
    others = [token + 100 for token in PROMPT]
    with engines(wire) as (first, second):
        first.ask("one", PROMPT, handover=to(second))
        assert gate.came.wait(HANG_GUARD_S)
        asked = first.ask("two", others, handover=to(second))
        request = second.add("two", others, handover=answered(asked))
        assert waits(second, request)
        gate.may_go.set()
        second.run()
        assert second.loaded_tokens["two"] == WHOLE


LONG = [token % 50 for token in range(12 * CHUNK + 1)]
BUFFER = 8 * PAGE_BYTES  # of eight chunks


def test_twelve_chunks_into_a_buffer_of_eight() -> None:
    """Eight are used, and four are computed at once."""
    wire = Wire()
    with engines(wire, server_bytes=BUFFER) as (first, second):
        asked = first.ask("one", LONG, handover=to(second))
        second.ask("one", LONG, handover=answered(asked))
        assert second.loaded_tokens["one"] == 8 * CHUNK
        first.settle()
        counters = first.workers[0]._pushes._pusher.counters  # type: ignore[union-attr]
        assert counters.sent == 8
        assert counters.refused >= 1
        assert counters.refused + counters.failed == 4, "what comes behind is not tried"


def test_what_was_handed_over_stays_until_it_is_read() -> None:
    """A second hand-over is refused before its bytes are sent; a third one replaces chunks that were read."""
    wire = Wire()
    with engines(wire, server_bytes=BUFFER) as (first, second):
        prompts = [[seed, *LONG[: 8 * CHUNK]] for seed in range(3)]
        asked = [first.ask(str(seed), prompts[seed], handover=to(second)) for seed in (0, 1)]
        flush(first)
        second.ask("1", prompts[1], handover=answered(asked[1]))
        assert second.loaded_tokens["1"] == 0
        second.ask("0", prompts[0], handover=answered(asked[0]))
        assert second.loaded_tokens["0"] == 8 * CHUNK
        last = first.ask("2", prompts[2], handover=to(second))
        second.ask("2", prompts[2], handover=answered(last))
        assert second.loaded_tokens["2"] == 8 * CHUNK


def test_what_a_full_receiver_refuses_is_read_where_the_answer_says() -> None:
    """The producer keeps it, and lets others read it."""
    first = producer(Wire(), keeps=True)
    with closing(first), closing(consumer(source=first, server_bytes=BUFFER)) as second:
        asked = first.ask("one", LONG, handover=to(second))
        first.settle()
        flush(first)
        second.ask("one", LONG, handover=answered(asked))
        assert second.loaded_tokens["one"] == 12 * CHUNK
        asked = first.ask("two", [7, *LONG], handover=to(second))
        second.add("two", [7, *LONG], handover=answered(asked))
        first.close()  # with all that it keeps: it is not even asked
        second.run()
        assert second.loaded_tokens["two"] <= 8 * CHUNK
        assert second.scheduler._handovers.waits.timeouts == 0


def test_a_host_that_is_not_listed_is_not_asked_for_what_was_refused() -> None:
    with closing(producer(Wire(), keeps=True)) as first, closing(consumer(server_bytes=BUFFER)) as second:
        asked = first.ask("one", LONG, handover=to(second))
        first.settle()
        second.ask("one", LONG, handover=answered(asked))
        assert second.loaded_tokens["one"] == 8 * CHUNK


def test_what_is_here_already_is_not_held_there() -> None:
    """It is handed over again and not read, as the consumer has it in memory."""
    with engines(Wire(), server_bytes=BUFFER) as (first, second):
        prompt, other = [3, *LONG[: 8 * CHUNK]], [4, *LONG[: 8 * CHUNK]]
        for name in ("one", "again"):
            asked = first.ask(name, prompt, handover=to(second))
            flush(first)
            second.forget_local()
            second.ask(name, prompt, handover=answered(asked))
            assert second.loaded_tokens[name] == 8 * CHUNK
        assert second.workers[0]._counters().chunks_loaded_from_remote == 8
        asked = first.ask("other", other, handover=to(second))
        second.ask("other", other, handover=answered(asked))
        assert second.loaded_tokens["other"] == 8 * CHUNK


def test_what_nobody_reads_makes_room_after_the_deadline() -> None:
    with closing(consumer(timeout_s=0.05, server_bytes=BUFFER)) as second, closing(producer(Wire())) as first:
        first.ask("one", LONG[: 8 * CHUNK + 1], handover=to(second))
        flush(first)
        server = second.workers[0]._server
        assert server is not None
        wait_for("the deadline ends", lambda: not len(server._hub.stock.holds))
        other = [7, *LONG[: 8 * CHUNK]]
        asked = first.ask("two", other, handover=to(second))
        flush(first)
        second.ask("two", other, handover=answered(asked))
        assert second.loaded_tokens["two"] == 8 * CHUNK


def test_an_older_receiver_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would disconnect the sender of an unknown message; a request that continues there waits until its deadline."""
    real_hello, real_answer = Service._hello, Service._answer
    heard: list[object] = []

    def hello(service: Service, peer: object, client: object, request: messages.Hello) -> messages.Answer:
        if request.version != 1:
            return messages.Refused(request.serial, messages.Refusal.VERSION, "this server speaks version 1")
        return real_hello(service, peer, client, request)  # type: ignore[arg-type]

    def answer(service: Service, session: object, request: object, payload: object) -> messages.Answer | None:
        heard.append(request)
        return real_answer(service, session, request, payload)  # type: ignore[arg-type]

    monkeypatch.setattr(Service, "_hello", hello)
    monkeypatch.setattr(Service, "_answer", answer)
    wire = Wire()
    with closing(consumer(timeout_s=0.2)) as second, closing(producer(wire)) as first:
        asked = first.ask("one", PROMPT, handover=to(second))
        flush(first)
        assert not [request for request in heard if isinstance(request, messages.Sending)]
        second.ask("one", PROMPT, handover=answered(asked))
        assert second.loaded_tokens["one"] == WHOLE


def test_a_receiver_forgets_a_sender_that_has_gone() -> None:
    wire = Wire()
    with closing(consumer()) as second:
        with closing(producer(wire)) as first:
            first.ask("one", PROMPT, handover=to(second))
            flush(first)
            server = second.workers[0]._server
            assert server is not None
            wait_for("the receiver knows the sender", lambda: len(server.senders) == 1)
        wait_for("the receiver forgets the sender", lambda: not server.senders)
