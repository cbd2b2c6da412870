"""A sender is heard as long as a chunk is on its way, even during waits; a receiver gives up one that is silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from threading import Event

import pytest
from support.fake_parts import CHUNK
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, consumer, flush, producer, to
from support.redis_server import wait_for
from support.relay import Mood, Relay
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES, Rig

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.handover import sender as sender_module
from kvstore.handover import tcp
from kvstore.handover.pusher import PushCounters, Pusher
from kvstore.handover.tracker import PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import as_block_ids

HERE = Receiver("here", 1)
BEAT_S = 0.02
PROMPT = list(range(2 * CHUNK + 1))


class Listener(Transport):
    """A receiver that takes everything, and counts how often it hears from the sender."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.last: Progress | None = None

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        for _ in ready:
            pass
        return [Outcome.STORED] * len(parcels)

    def tell(self, progress: Progress) -> None:
        self.num_heard += 1
        self.last = progress

    def close(self) -> None:
        """Do nothing."""

    def is_heard(self) -> bool:
        """Tell if the sender is heard again and again; fails after a while if it is not."""
        before = self.num_heard
        wait_for("the sender is heard", lambda: self.num_heard >= before + 5)
        return True


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def pusher(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pusher]:
    monkeypatch.setattr(sender_module, "BEAT_S", BEAT_S)
    pusher = Pusher(Rig().paged, 4 * SLOT_BYTES, lambda _: listener, PushCounters())
    yield pusher
    pusher.close(10)


def job(begin_tokens: int = 0) -> PushJob:
    ref = ChunkRef(begin_tokens.to_bytes(16, "big"), BLOCKS_PER_CHUNK)
    return PushJob(ref, as_block_ids(range(BLOCKS_PER_CHUNK)), 0, begin_tokens)


def test_a_step_that_takes_long(pusher: Pusher, listener: Listener) -> None:
    step = pusher.begin([(HERE, [job()])])
    step.reach(0)
    assert listener.is_heard()
    step.finish(trusted=True)
    assert pusher.flush(10)


def test_between_two_steps(pusher: Pusher, listener: Listener) -> None:
    """The hand-over is not complete; once it is, the next one may have begun, of which nothing was reported yet."""
    pusher.begin([(HERE, [job()])]).finish(trusted=True)
    assert pusher.flush(10)
    assert listener.is_heard()
    pusher.complete([0])
    wait_for("the receiver knows that it is over", lambda: listener.last is not None and not listener.last.open)
    assert listener.is_heard()


def test_a_chunk_that_is_wanted_no_longer(pusher: Pusher, listener: Listener) -> None:
    """Another hand-over to the same receiver waits for its step meanwhile."""
    pusher.begin([(HERE, [job()])]).finish(trusted=True)
    assert pusher.flush(10)
    step = pusher.begin([(HERE, [job(16), job(32)])])
    pusher.tracker.settle(job(8), has_arrived=False)
    assert listener.is_heard()
    step.finish(trusted=True)
    assert pusher.flush(10)


def test_who_hangs_is_given_up_and_waited_for_again_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays connected, like a stopped process or a lost host. The deadline is an hour."""
    monkeypatch.setattr(tcp, "BEAT_S", BEAT_S)
    came, may_go, wire = Event(), Event(), Wire()

    def hang() -> None:
        came.set()
        assert may_go.wait(HANG_GUARD_S)

    wire.before_layers = hang
    with closing(consumer()) as second, closing(producer(wire)) as first:
        asked = first.ask("one", PROMPT, handover=to(second))
        assert came.wait(HANG_GUARD_S)
        request = second.add("one", PROMPT, handover=answered(asked))
        second.run()
        assert request.state == "finished"
        assert second.loaded_tokens["one"] == 0
        assert second.scheduler._handovers.waits.timeouts == 0
        may_go.set()
        flush(first)
        asked = first.ask("two", [7, *PROMPT], handover=to(second))
        second.ask("two", [7, *PROMPT], handover=answered(asked))
        assert second.loaded_tokens["two"] == 2 * CHUNK


def test_a_way_that_was_cut_is_there_again_before_the_next_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ reconnects by itself, to a server that does not know the sender then, and no request waits for it."""
    monkeypatch.setattr(tcp, "BEAT_S", BEAT_S)
    monkeypatch.setattr(sender_module, "BEAT_S", BEAT_S)
    with closing(consumer()) as second, closing(producer(Wire())) as first:
        port = second.setup.port
        assert port is not None
        server = second.workers[0]._server
        assert server is not None
        with Relay(port) as relay:
            first.ask("one", PROMPT, handover=Handover(DisaggSpec("client", "127.0.0.1", (relay.port,))))
            flush(first)
            wait_for("the sender is known", lambda: server.senders)
            said = server.senders
            relay.mood = Mood.HUNG
            relay.aim(port)
            wait_for("the sender is gone", lambda: not server.senders)
            relay.mood = Mood.FAST
            wait_for("it is known again", lambda: server.senders.keys() == said.keys())


def test_a_receiver_that_is_gone_between_two_steps(
    pusher: Pusher, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is not received does not end the sender."""
    pusher.begin([(HERE, [job()])]).finish(trusted=True)
    assert pusher.flush(10)

    def gone(_: Progress) -> None:
        raise TierError("gone")

    monkeypatch.setattr(listener, "tell", gone)
    sender = pusher._senders[HERE]
    wait_for("the sender has noticed", lambda: not sender.answers)
    assert sender.is_alive
