"""Tests that every transport must pass that hands chunks over to another engine's server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest

from kvstore import channels
from kvstore.channels import open_channel
from kvstore.channels.base import Channel
from kvstore.handover.offering import Exposed, open_offering
from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Parcel, Transport
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.progress import Progress
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.exposing import random_bytes
from kvstore.testing.harness import LARGE, MINE, ODD, OTHER
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer

STORED, FULL, FAILED = Outcome.STORED, Outcome.FULL, Outcome.FAILED
BIG = KVLayout((3 << 18,) * 6, planes=1, block_tokens=16, chunk_tokens=32)  # a layer of a chunk has 1.5 MiB
SMALL = KVLayout((40_000,) * 30, planes=1, block_tokens=16, chunk_tokens=64)  # a layer of a chunk has 156 KiB
LAYOUTS = {"odd": ODD, "large": LARGE, "small": SMALL, "big": BIG}
_POOL_BYTES = 128 << 20
_NUM_SLOTS = 8
_CLOSE_S = 20.0  # far more than a bounded close takes


class TransportConformance:
    """Tests of a sender with a buffer, and a receiver. Subclass it under a name that begins with ``Test``.

    Attributes:
        channel: the class of the channel under test; None for payload in messages.
    """

    channel: ClassVar[type[Channel] | None] = None

    @pytest.fixture(autouse=True)
    def _ends(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        if self.channel is not None:
            where = f"{self.channel.__module__}:{self.channel.__qualname__}"
            entry = EntryPoint(self.channel.name, where, channels.GROUP)
            monkeypatch.setattr(channels, "BUILT_IN", (entry,))
        with ExitStack() as self._opened:
            yield

    # -- hooks -------------------------------------------------------------------------------------------------------

    def open_receiver(self, namespace: Namespace, layout: KVLayout, pool_bytes: int) -> EmbeddedServer:
        """Open the server of an engine that receives."""
        name = self.channel.name if self.channel is not None else None
        return EmbeddedServer(namespace, layout, EmbeddedOptions(pool_bytes, "127.0.0.1", 0, channel=name))

    def open_transport(self, url: str, layout: KVLayout, memory: ByteArray, timeout_s: float) -> Transport:
        """Open a transport to the receiver for chunks of ``MINE``, which lie in ``memory``."""
        settings = {"timeout_s": timeout_s}
        if self.channel is None:
            return open_transport(url, MINE, layout, settings)
        channel = open_channel(self.channel.name, memory)
        assert channel is not None, "the channel cannot be used here"
        self._opened.callback(channel.close)
        return open_offering(url, MINE, layout, settings, Exposed(channel, memory))

    # -- shorthands --------------------------------------------------------------------------------------------------

    def start(self, layout: KVLayout = ODD, *, pool_bytes: int = _POOL_BYTES, namespace: Namespace = MINE) -> Transport:
        """Open a receiver, and return a transport to it."""
        self.layout = layout
        self.server = self.open_receiver(namespace, layout, pool_bytes)
        self._opened.callback(self.server.close)
        self.transport = self.connect(f"kvs://127.0.0.1:{self.server.port}")
        return self.transport

    def connect(self, url: str, *, timeout_s: float = 10.0) -> Transport:
        """Return a transport to a receiver, with a new buffer."""
        self.memory = np.zeros(_NUM_SLOTS * self.layout.slot_bytes, np.uint8)
        transport = self.open_transport(url, self.layout, self.memory, timeout_s)
        self._opened.callback(transport.close)
        return transport

    def parcel(self, number: int, slot: int, num_blocks: int | None = None) -> Parcel:
        """Fill a slot of the buffer with a chunk, and return its parcel."""
        ref = ChunkRef(number.to_bytes(16, "big"), num_blocks or self.layout.blocks_per_chunk)
        size, begin = self.layout.payload_bytes(ref.num_blocks), slot * self.layout.slot_bytes
        payload = self.memory[begin : begin + size]
        payload[:] = self.wanted(number, ref.num_blocks)
        return Parcel(ref, payload)

    def wanted(self, number: int, num_blocks: int) -> ByteArray:
        """Return the payload that a chunk must hold."""
        return random_bytes(self.layout.payload_bytes(num_blocks), number)

    def found(self, refs: Sequence[ChunkRef]) -> list[ByteArray | None]:
        """Return the payloads of some chunks as the receiver's engine reads them; None for each that it lacks."""
        with closing(self._tier()) as tier:
            buffers = [np.zeros(self.layout.slot_bytes, np.uint8) for _ in refs]
            outcomes = tier.get([Transfer(ref, buffer) for ref, buffer in zip(refs, buffers, strict=True)])
            sizes = [self.layout.payload_bytes(ref.num_blocks) for ref in refs]
            read = zip(outcomes, buffers, sizes, strict=True)
            return [buffer[:size] if outcome is Outcome.HIT else None for outcome, buffer, size in read]

    def _tier(self) -> Tier:
        return open_tier("server", TierSetup(MINE, self.layout, UNBOUNDED_BYTES, {"url": self.server.url}))

    def require(self, *numbers: int) -> None:
        """Check that the receiver has these chunks, byte for byte."""
        num_blocks = self.layout.blocks_per_chunk
        refs = [ChunkRef(number.to_bytes(16, "big"), num_blocks) for number in numbers]
        for number, payload in zip(numbers, self.found(refs), strict=True):
            assert payload is not None, f"chunk {number} is not there"
            assert np.array_equal(payload, self.wanted(number, num_blocks)), f"chunk {number} has wrong bytes"

    def all_layers(self) -> Iterator[range]:
        """Return an iterator over one range with all layers."""
        return iter([range(self.layout.num_layers)])

    # -- tests -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("step", [1, 2, 1000])
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_what_is_handed_over_is_found_there(self, name: str, step: int) -> None:
        transport = self.start(LAYOUTS[name])
        layers = self.layout.num_layers
        sent = [self.parcel(number, number - 1) for number in (1, 2, 3)]
        ranges = [range(begin, min(begin + step, layers)) for begin in range(0, layers, step)]
        assert transport.deliver(sent, iter(ranges)) == [STORED] * 3
        self.require(1, 2, 3)

    def test_shorter_chunks_than_others(self) -> None:
        transport = self.start()
        sent = [self.parcel(1, 0, 1), self.parcel(2, 1, 3)]
        assert transport.deliver(sent, self.all_layers()) == [STORED] * 2
        for parcel, found in zip(sent, self.found([parcel.ref for parcel in sent]), strict=True):
            assert found is not None
            assert np.array_equal(found, parcel.payload), parcel.ref

    @pytest.mark.parametrize("name", ["odd", "small", "big"])
    def test_a_layer_is_not_read_before_it_is_named(self, name: str) -> None:
        transport = self.start(LAYOUTS[name])
        parcel = self.parcel(1, 0)
        ref, payload = parcel.ref, parcel.payload
        wanted = payload.copy()
        payload[:] = 0

        def computed() -> Iterator[range]:
            for layer in range(self.layout.num_layers):
                begin, end = self.layout.layer_range(layer, ref.num_blocks)
                payload[begin:end] = wanted[begin:end]
                assert self.found([ref]) == [None]
                yield range(layer, layer + 1)

        assert transport.deliver([parcel], computed()) == [STORED]
        self.require(1)

    @pytest.mark.parametrize("name", ["odd", "big"])
    def test_without_the_last_layer_nothing_is_found(self, name: str) -> None:
        transport = self.start(LAYOUTS[name])
        for layers in range(self.layout.num_layers):
            sent = [self.parcel(1, 0), self.parcel(2, 1)]
            assert transport.deliver(sent, iter([range(layers)] if layers else [])) == [FAILED] * 2
            assert self.found([parcel.ref for parcel in sent]) == [None, None]
        assert transport.deliver(sent, self.all_layers()) == [STORED] * 2
        self.require(1, 2)

    def test_the_buffer_is_used_again(self) -> None:
        """Once a delivery has returned, the receiver has the bytes, even if the buffer changes."""
        transport = self.start(BIG)
        for number in range(1, 9):
            assert transport.deliver([self.parcel(number, 0)], self.all_layers()) == [STORED]
        self.memory[:] = 0
        self.require(*range(1, 9))

    def test_what_is_there_is_not_sent_again(self) -> None:
        transport = self.start()
        assert transport.deliver([self.parcel(1, 0)], self.all_layers()) == [STORED]
        other = Parcel(self.parcel(1, 0).ref, self.parcel(9, 1).payload)  # wrong bytes, if they were sent
        assert transport.deliver([other, self.parcel(2, 2)], self.all_layers()) == [STORED] * 2
        self.require(1, 2)

    def test_more_than_may_be_on_its_way_at_once(self) -> None:
        transport = self.start(BIG, pool_bytes=72 << 20)  # a quarter of it is two chunks
        sent = [self.parcel(number, number) for number in range(6)]
        assert transport.deliver(sent, self.all_layers()) == [STORED] * 6
        self.require(0, 5)

    def test_more_than_the_receiver_holds(self) -> None:
        """A chunk without room leaves nothing behind, and the next delivery finds all of the memory free."""
        transport = self.start(BIG, pool_bytes=10 << 20)  # one chunk
        with closing(self._tier()) as tier:
            assert transport.deliver([self.parcel(1, 0)], self.all_layers()) == [STORED]
            lent = tier.get([Transfer(self.parcel(1, 0).ref, np.zeros(self.layout.slot_bytes, np.uint8))])
            assert lent == [Outcome.HIT]
        outcomes = transport.deliver([self.parcel(2, 1), self.parcel(3, 2)], self.all_layers())
        assert set(outcomes) <= {STORED, FULL}
        for number, outcome in zip((2, 3), outcomes, strict=True):
            found = self.found([ChunkRef(number.to_bytes(16, "big"), self.layout.blocks_per_chunk)])[0]
            assert found is None or outcome is STORED
        assert transport.deliver([self.parcel(4, 0)], self.all_layers()) == [STORED]
        self.require(4)

    def test_a_sender_that_fails_leaves_nothing(self) -> None:
        transport = self.start(BIG)

        def fails() -> Iterator[range]:
            yield range(3)
            raise KeyboardInterrupt

        parcel = self.parcel(1, 0)
        with pytest.raises(KeyboardInterrupt):
            transport.deliver([parcel], fails())
        assert self.found([parcel.ref]) == [None]
        assert transport.deliver([parcel], self.all_layers()) == [STORED]
        self.require(1)

    def test_a_receiver_that_goes_away(self) -> None:
        self.start(BIG)
        transport = self.connect(f"kvs://127.0.0.1:{self.server.port}", timeout_s=0.5)

        def computed() -> Iterator[range]:
            yield range(2)
            self.server.close()
            yield range(2, self.layout.num_layers)

        with pytest.raises(TierError):
            transport.deliver([self.parcel(1, 0)], computed())

    def test_a_receiver_that_comes_back(self) -> None:
        """A transport that has failed is closed, and another one made."""
        self.start()
        self.server.close()
        with suppress(TierError):
            self.transport.deliver([self.parcel(1, 0)], self.all_layers())
        assert self.start().deliver([self.parcel(2, 0)], self.all_layers()) == [STORED]
        self.require(2)

    def test_nobody_there(self) -> None:
        self.layout = ODD
        transport = self.connect("kvs://127.0.0.1:1", timeout_s=0.5)
        with pytest.raises(TierError):
            transport.deliver([self.parcel(1, 0)], self.all_layers())

    def test_another_kind_of_engine_is_refused_by_name(self) -> None:
        transport = self.start(namespace=OTHER)
        with pytest.raises(TierError, match="model"):
            transport.deliver([self.parcel(1, 0)], self.all_layers())

    def test_the_receiver_is_told_what_is_on_its_way(self) -> None:
        transport = self.start()
        first, second = Progress("me", 8, {7: 96}), Progress("me", 9, {8: 32})

        def computed() -> Iterator[range]:
            self._await(first)
            transport.tell(second)
            self._await(second)
            yield range(self.layout.num_layers)

        transport.tell(first)
        assert transport.deliver([self.parcel(1, 0)], computed()) == [STORED]
        transport.tell(first)
        self._await(Progress("me", 9, {7: 96, 8: 32}), Progress("me", 8, {7: 96}))

    def _await(self, *wanted: Progress) -> None:
        until_s = time.monotonic() + _CLOSE_S
        while self.server.senders.get("me") not in wanted:
            assert time.monotonic() < until_s, f"the receiver knows {self.server.senders}"
            time.sleep(0.005)

    def test_close_from_another_thread(self) -> None:
        """A close during a delivery ends it at the latest with its last layer."""
        transport = self.start(BIG)
        reached, closed = threading.Event(), threading.Event()
        ended: list[object] = []

        def computed() -> Iterator[range]:
            yield range(2)
            reached.set()
            closed.wait(_CLOSE_S)

        def deliver() -> None:
            try:
                ended.append(transport.deliver([self.parcel(1, 0)], computed()))
            except (TierError, ClosedError) as error:
                ended.append(error)

        sender = threading.Thread(target=deliver)
        sender.start()
        assert reached.wait(_CLOSE_S)
        closing_thread = threading.Thread(target=transport.close)
        closing_thread.start()
        closed.set()
        for thread in (sender, closing_thread):
            thread.join(_CLOSE_S)
            assert not thread.is_alive(), "close is not bounded"
        assert len(ended) == 1
        assert ended != [[STORED]]
        transport.close()
        assert self.found([self.parcel(1, 0).ref]) == [None]
