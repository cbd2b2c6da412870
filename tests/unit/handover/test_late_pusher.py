"""Hand-overs on a device that does nothing until the host waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from support.gate import HANG_GUARD_S
from support.late_bench import FULL, LAYERS, Bench, blocks_of, ref_of
from support.late_device import Failure
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES

from kvstore.handover.pusher import PushCounters, Pusher
from kvstore.handover.tracker import PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.model.chunks import Outcome
from kvstore.paged.streams import Direction
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import as_block_ids


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench.running() as bench:
        yield bench


class Inbox(Transport):
    """A receiver in memory, which takes each layer as soon as it may."""

    def __init__(self, layer_bytes: int) -> None:
        self.layer_bytes = layer_bytes
        self.found: list[bytes] = []
        self.may_go = threading.Event()

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        assert self.may_go.wait(HANG_GUARD_S)
        layers = 0
        for part in ready:
            layers = part.stop
            for parcel in parcels:
                self.found.append(parcel.payload[part.start * self.layer_bytes : layers * self.layer_bytes].tobytes())
        return [Outcome.STORED if layers == LAYERS else Outcome.FAILED] * len(parcels)

    def tell(self, progress: Progress) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("slots", [1, 2])
def test_what_is_handed_over_is_what_the_step_has_computed(bench: Bench, slots: int) -> None:
    """The model's thread does not wait, and continues to write the blocks."""
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    pusher = Pusher(bench.paged, slots * SLOT_BYTES, lambda _: inbox, PushCounters())
    inbox.may_go.set()
    step = pusher.begin([(Receiver("there", 1), [push_job(1), push_job(2)])])
    step.reach(0)
    step.finish(trusted=True)
    for number in (1, 2):
        bench.overwrite(number)
    assert pusher.flush(HANG_GUARD_S)
    assert pusher.counters.sent == 2
    assert set(b"".join(inbox.found)) == {*blocks_of(1), *blocks_of(2)}
    pusher.close(HANG_GUARD_S)


def test_a_step_that_hands_over_waits_for_nothing(bench: Bench) -> None:
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
    step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
    for layer in range(LAYERS):
        step.reach(layer)
    step.finish(trusted=True)
    assert bench.host_waits == 0
    inbox.may_go.set()
    assert pusher.flush(HANG_GUARD_S)
    pusher.close(HANG_GUARD_S)


def test_small_layers_are_handed_over_together_when_all_of_them_are_computed() -> None:
    with Bench.running(copy_bytes=1 << 18) as bench:
        inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
        inbox.may_go.set()
        pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
        step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
        bench.device.counts.clear()
        for layer in range(LAYERS):
            for block in blocks_of(1):
                bench.model_computes(layer, block, 77)
            step.reach(layer)
        assert bench.device.counts["run"] == 1
        step.finish(trusted=True)
        assert pusher.flush(HANG_GUARD_S)
        assert pusher.counters.sent == 1
        assert set(b"".join(inbox.found)) == {77}
        pusher.close(HANG_GUARD_S)


@pytest.mark.parametrize("full_at", range(LAYERS))
def test_a_full_device_hands_over_nothing(bench: Bench, full_at: int) -> None:
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    inbox.may_go.set()
    pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
    step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
    for layer in range(LAYERS):
        if layer == full_at:
            bench.device.failures.append(Failure(FULL))
        step.reach(layer)
    step.finish(trusted=True)
    assert pusher.flush(HANG_GUARD_S)
    assert pusher.counters == PushCounters(failed=1)
    pusher.close(HANG_GUARD_S)


def test_a_buffer_is_not_let_go_while_a_copy_that_nobody_waits_for_is_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delivery has failed, so no sender waits for it; the memory is unpinned, and may be given back."""
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    inbox.may_go.set()
    pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
    step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
    bench.device.failures.extend([None, Failure(FULL, is_under_way=True)])
    step.reach(0)
    step.finish(trusted=True)
    assert pusher.flush(HANG_GUARD_S)
    copies = bench.paged.streams.copying[Direction.OUT]  # type: ignore[attr-defined]
    under_way = [copies.launched - copies.done]
    monkeypatch.setattr(pusher.pool, "close", lambda: under_way.append(copies.launched - copies.done))
    pusher.close(HANG_GUARD_S)
    assert under_way[0] > 0
    assert under_way[1] == 0


def push_job(number: int) -> PushJob:
    return PushJob(ref_of(number), as_block_ids(blocks_of(number)))
