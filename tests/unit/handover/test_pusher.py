"""Hand-overs of KV that a model computes: the order of gathers, trust in chunks, and receivers that fail or hang."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES, Rig

from kvstore.handover.pusher import STALL_S, PushCounters, Pusher, StepPush, _Room
from kvstore.handover.sender import Delivery, Sender
from kvstore.handover.tracker import PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.memory import slabs
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.paged.streams import Streams
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import as_block_ids

NUMBERS = itertools.count()  # each chunk is a separate hand-over
HERE, THERE = Receiver("here", 1), Receiver("there", 2)


class Inbox(Transport):
    """A receiver in memory."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkRef, ByteArray] = {}
        self.seen: list[range] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: Exception | None = None
        self.has_lost_count = False
        self.calls = 0
        self.is_closed = False

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.has_lost_count:
            return []
        done_layers = 0
        for layers in ready:
            self.seen.append(layers)
            done_layers = layers.stop
        assert self.may_go.wait(10)
        if done_layers < 2:
            return [Outcome.FAILED] * len(parcels)
        self.chunks.update({parcel.ref: parcel.payload.copy() for parcel in parcels})
        return [Outcome.STORED] * len(parcels)

    def tell(self, progress: Progress) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.is_closed = True
        if isinstance(self.error, RuntimeError):
            raise self.error


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    for number, cache in enumerate(rig.caches.values()):
        for block in range(rig.num_blocks):
            cache[block] = (7 * block + number) % 251
    return rig


@pytest.fixture
def inboxes() -> dict[Receiver, Inbox]:
    return {HERE: Inbox(), THERE: Inbox()}


Open = Callable[..., Pusher]


@pytest.fixture
def open_pusher(rig: Rig, inboxes: dict[Receiver, Inbox]) -> Iterator[Open]:
    opened: list[Pusher] = []

    def open_(slots: int = 8) -> Pusher:
        opened.append(Pusher(rig.paged, slots * SLOT_BYTES, inboxes.__getitem__, PushCounters()))
        return opened[-1]

    yield open_
    for inbox in inboxes.values():
        inbox.may_go.set()
    for pusher in opened:
        pusher.close(10)


def job(number: int, num_blocks: int = BLOCKS_PER_CHUNK) -> PushJob:
    blocks = range(number * BLOCKS_PER_CHUNK, number * BLOCKS_PER_CHUNK + num_blocks)
    return PushJob(ChunkRef(number.to_bytes(16, "big"), num_blocks), as_block_ids(blocks), next(NUMBERS))


def payload_of(rig: Rig, one: PushJob) -> ByteArray:
    payload = np.empty(rig.layout.payload_bytes(one.ref.num_blocks), np.uint8)
    rig.paged.gather(one.block_ids, payload)
    return payload


def test_the_buffer_is_pinned_for_the_device_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(slabs, "find_pinner", asked.append)
    monkeypatch.setattr(slabs, "node_near", lambda device: None)
    streams = Streams(torch.device("cpu"))
    paged = SimpleNamespace(device=torch.device("cuda", 1), layout=Rig().layout, streams=streams, reach=streams.reach)
    pusher = Pusher(cast("Any", paged), SLOT_BYTES, lambda _: Inbox(), PushCounters())
    pusher.close(0.0)
    assert asked == [torch.device("cuda", 1)]


@pytest.mark.parametrize("layers", [(), (0,), (0, 1), (1, 0)])
def test_all_arrives_however_many_layers_are_named(
    rig: Rig, inboxes: dict[Receiver, Inbox], open_pusher: Open, layers: tuple[int, ...]
) -> None:
    pusher = open_pusher()
    step = pusher.begin([(HERE, [job(0), job(1)]), (THERE, [job(2, 1)])])
    for layer in layers:
        step.reach(layer)
    step.finish(trusted=True)
    wanted = {one.ref: payload_of(rig, one) for one in (job(0), job(1), job(2, 1))}
    rig.poison()  # the blocks are free as soon as the step ends
    assert pusher.flush(10)
    found = {**inboxes[HERE].chunks, **inboxes[THERE].chunks}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[ref], payload) for ref, payload in wanted.items())
    assert len(inboxes[THERE].chunks) == 1
    assert pusher.counters == PushCounters(sent=3, sent_bytes=sum(map(len, wanted.values())))
    assert len(pusher.take_seconds()) == 2


def test_the_last_layer_waits_for_the_end_of_the_step(inboxes: dict[Receiver, Inbox], open_pusher: Open) -> None:
    pusher = open_pusher()
    step = pusher.begin([(HERE, [job(0)])])
    step.reach(0)
    step.reach(1)
    assert not pusher.flush(0.2)
    assert inboxes[HERE].seen == [range(1)]
    step.finish(trusted=True)
    assert pusher.flush(10)
    assert inboxes[HERE].seen == [range(1), range(1, 2)]


def test_a_step_that_is_not_trusted_hands_over_nothing(inboxes: dict[Receiver, Inbox], open_pusher: Open) -> None:
    pusher = open_pusher(slots=2)
    for _ in range(3):  # and keeps no room
        step = pusher.begin([(HERE, [job(0), job(1), job(2)])])
        step.reach(0)
        step.finish(trusted=False)
        assert pusher.flush(10)
    assert not inboxes[HERE].chunks
    assert pusher.counters.sent == 0
    step = pusher.begin([(HERE, [job(0), job(1)])])
    step.finish(trusted=True)
    assert pusher.flush(10)
    assert len(inboxes[HERE].chunks) == 2


def test_more_than_the_buffer_holds(rig: Rig, inboxes: dict[Receiver, Inbox], open_pusher: Open) -> None:
    pusher = open_pusher(slots=2)
    jobs = [job(number) for number in range(9)]
    step = pusher.begin([(HERE, jobs)])
    step.reach(0)
    step.reach(1)
    step.finish(trusted=True)
    assert pusher.flush(10)
    found = inboxes[HERE].chunks
    assert len(found) == 9
    assert all(np.array_equal(found[one.ref], payload_of(rig, one)) for one in jobs)


class Waits:
    """Stands in for the wait for room: time passes only there. After ``frees_s`` each, a slot is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *frees_s: float) -> None:
        self.seconds: list[float] = []
        frees = iter(frees_s)

        def wait(room: _Room, timeout_s: float) -> float:
            free_s = next(frees, timeout_s + 1)
            if free_s <= timeout_s:
                room.give_back([0])
            self.seconds.append(min(free_s, timeout_s))
            return self.seconds[-1]

        monkeypatch.setattr(_Room, "_wait", wait)


def test_a_step_waits_once_for_room_however_many_chunks_lack_it(
    inboxes: dict[Receiver, Inbox], open_pusher: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, pusher = Waits(monkeypatch), open_pusher(slots=2)
    inboxes[HERE].may_go.clear()
    pusher.begin([(HERE, [job(number) for number in range(8)])]).finish(trusted=True)
    assert waits.seconds == [STALL_S]
    assert pusher.counters.refused == 6


def test_a_step_whose_room_comes_slowly_does_not_wait_as_long_for_each_chunk(
    open_pusher: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, pusher = Waits(monkeypatch, STALL_S / 2, STALL_S / 4, STALL_S / 2, STALL_S / 2), open_pusher(slots=1)
    monkeypatch.setattr(StepPush, "_start", lambda *_: None)  # the slots are not returned
    refused: list[PushJob] = []
    monkeypatch.setattr(pusher, "refuse", refused.append)
    assert pusher.room.take(1) == [0]
    step = StepPush(pusher)
    step.add([job(number) for number in range(5)], cast("Sender", None))
    step.finish(trusted=True)
    assert waits.seconds == [STALL_S / 2, STALL_S / 4, STALL_S / 4]
    assert [one.ref for one in refused] == [job(number).ref for number in (2, 3, 4)]


def test_steps_after_one_that_waited_in_vain_do_not_wait_until_something_was_taken(
    inboxes: dict[Receiver, Inbox], open_pusher: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, pusher = Waits(monkeypatch), open_pusher(slots=2)
    inboxes[HERE].may_go.clear()
    for _ in range(3):
        pusher.begin([(HERE, [job(0), job(1), job(2)])]).finish(trusted=True)
    assert waits.seconds == [STALL_S]
    assert pusher.counters.refused == 1 + 3 + 3
    inboxes[HERE].may_go.set()
    assert pusher.flush(10)
    inboxes[HERE].may_go.clear()
    pusher.begin([(HERE, [job(0), job(1), job(2)])]).finish(trusted=True)
    assert waits.seconds == [STALL_S, STALL_S], "it had been free in between"
    inboxes[HERE].may_go.set()
    assert pusher.flush(10)
    pusher.begin([(THERE, [job(2)])]).finish(trusted=True)
    assert pusher.flush(10)
    assert len(inboxes[THERE].chunks) == 1


def test_a_receiver_that_fails_is_left_alone_for_a_while(
    inboxes: dict[Receiver, Inbox], open_pusher: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pusher = open_pusher(slots=2)
    inboxes[HERE].error = TierError("it is of another kind: dtype")
    for _ in range(5):
        pusher.begin([(HERE, [job(0)]), (THERE, [job(1)])]).finish(trusted=True)
        assert pusher.flush(10)
    assert inboxes[HERE].calls == 1
    assert inboxes[HERE].is_closed
    assert pusher.counters.failed == 5
    assert pusher.counters.sent == 5
    (line,) = [record.message for record in caplog.records if "dtype" in record.message]
    assert line.startswith("KV cannot be handed over to here:1, which has to compute it: it is of another kind: dtype")
    monkeypatch.setattr("kvstore.handover.sender.PROBE_INTERVAL_S", 0.0)
    pusher._senders[HERE]._broken_until_s = 0.0
    inboxes[HERE].error = None
    pusher.begin([(HERE, [job(0)])]).finish(trusted=True)
    assert pusher.flush(10)
    assert len(inboxes[HERE].chunks) == 1


def test_a_defect_of_a_transport_costs_its_own_deliveries_only(
    inboxes: dict[Receiver, Inbox], open_pusher: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception would end the thread, and deliveries that wait for it would hold the buffer forever."""
    pusher = open_pusher(slots=2)
    for number, (error, has_lost_count) in enumerate([(RuntimeError("a bug"), False), (None, True), (None, False)]):
        inboxes[HERE].error, inboxes[HERE].has_lost_count = error, has_lost_count
        pusher.begin([(HERE, [job(0)]), (THERE, [job(1)])]).finish(trusted=True)
        assert pusher.flush(10)
        assert len(pusher.room._free) == 2
        assert (pusher.counters.failed, pusher.counters.sent) == (min(number + 1, 2), number + 1 + number // 2)
        pusher._senders[HERE]._broken_until_s = 0.0
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a defect: handing KV over to here:1 has failed",
        "a defect: disconnecting from here:1 has failed",
    ]
    assert "0 outcomes for 1 chunks" in caplog.text


def test_close_is_bounded_and_leaves_no_thread(inboxes: dict[Receiver, Inbox], open_pusher: Open) -> None:
    pusher = open_pusher()
    inboxes[HERE].may_go.clear()
    pusher.begin([(HERE, [job(0)]), (THERE, [job(1)])]).finish(trusted=True)
    pusher.begin([(HERE, [job(2)])]).finish(trusted=True)
    pusher.close(0.2)
    inboxes[HERE].may_go.set()
    for thread in threading.enumerate():
        if thread.name == "kvstore-push":
            thread.join(10)
    assert not any(thread.name == "kvstore-push" for thread in threading.enumerate())
    assert inboxes[HERE].is_closed
    assert inboxes[THERE].is_closed


def test_the_longest_unused_receiver_goes_when_there_are_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.handover.pusher.MAX_RECEIVERS", 2)
    inboxes = {Receiver("host", port): Inbox() for port in range(1, 5)}
    pusher = Pusher(rig.paged, 4 * SLOT_BYTES, inboxes.__getitem__, PushCounters())
    for receiver in inboxes:
        pusher.begin([(receiver, [job(receiver.port)])]).finish(trusted=True)
        assert pusher.flush(10)
    pusher.close(10)
    assert all(inbox.is_closed and len(inbox.chunks) == 1 for inbox in inboxes.values())


def test_the_buffer_is_not_used_again_while_it_is_gathered_into(
    rig: Rig, inboxes: dict[Receiver, Inbox], open_pusher: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that fails at once must not free places that the model's thread still fills."""
    inboxes[HERE].error = TierError("gone")
    pusher, settled, finished = open_pusher(), threading.Event(), threading.Event()
    real_wait, real_note = Delivery.wait, pusher._note
    noted: list[bool] = []

    def wait(delivery: Delivery, beat: Callable[[], object]) -> None:
        settled.set()
        real_wait(delivery, beat)

    def note(*arguments: Any) -> None:
        noted.append(finished.is_set())
        real_note(*arguments)
        settled.set()

    monkeypatch.setattr(Delivery, "wait", wait)
    monkeypatch.setattr(pusher, "_note", note)
    step = pusher.begin([(HERE, [job(0)])])
    assert settled.wait(10)
    finished.set()
    step.finish(trusted=True)
    assert pusher.flush(10)
    assert noted == [True]
