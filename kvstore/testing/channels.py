"""Tests that every channel must pass: its own contract, and that of a transport over it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from kvstore.channels.base import MAX_DESCRIPTION_BYTES, Channel, Peer, Reading, State
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ChannelError
from kvstore.testing.exposing import random_bytes
from kvstore.testing.transports import BIG, STORED, TransportConformance

_MEMORY_BYTES = 6 << 20
_READ_S = 30.0  # far more than a read takes
_SEED = 7


class Exposing(NamedTuple):
    """A process that lets its memory be read."""

    process: subprocess.Popen[str]
    description: bytes


class ChannelConformance(TransportConformance):
    """Tests of a channel. Subclass it under a name that begins with ``Test``, and set ``channel``."""

    channel: ClassVar[type[Channel] | None] = None

    # -- shorthands --------------------------------------------------------------------------------------------------

    @pytest.fixture
    def here(self) -> Iterator[Channel]:
        """Yield a channel of this process, with ``self.target`` registered."""
        with closing(self.open_channel()) as channel:
            self.target = np.zeros(_MEMORY_BYTES, np.uint8)
            channel.register(self.target)
            yield channel

    @pytest.fixture(scope="class")
    @classmethod
    def there(cls) -> Iterator[Exposing]:
        """Yield another process, whose memory holds ``random_bytes(_MEMORY_BYTES, _SEED)``."""
        with cls.exposing() as other:
            yield other

    def open_channel(self) -> Channel:
        """Return a channel without memory."""
        assert self.channel is not None
        return self.channel()

    @classmethod
    @contextmanager
    def exposing(cls) -> Iterator[Exposing]:
        """Yield another process that lets its memory be read."""
        assert cls.channel is not None
        where = (cls.channel.__module__, cls.channel.__qualname__, str(_MEMORY_BYTES), str(_SEED))
        command = [sys.executable, "-m", "kvstore.testing.exposing", *where]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=path) as process:
            assert process.stdout is not None
            try:
                lines = (line.strip() for line in process.stdout)
                yield Exposing(process, next(bytes.fromhex(line) for line in lines if _is_hex(line)))
            finally:
                process.kill()

    @staticmethod
    def ended(channel: Channel, reading: Reading) -> State:
        """Wait for the end of a read, and return its state."""
        until_s = time.monotonic() + _READ_S
        while (state := channel.look(reading)) is State.PENDING:
            assert time.monotonic() < until_s, "the read does not end"
            time.sleep(0.001)
        return state

    def read(self, channel: Channel, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> State:
        """Begin a read, and wait for its end."""
        return self.ended(channel, channel.read(peer, offset_bytes, parts))

    # -- tests -------------------------------------------------------------------------------------------------------

    def test_memory_of_another_process_is_read(self, here: Channel, there: Exposing) -> None:
        wanted, peer = random_bytes(_MEMORY_BYTES, _SEED), here.attach(there.description)
        for begin, end in ((0, 1), (5, 4096), (1 << 20, 3 << 20), (0, _MEMORY_BYTES)):
            assert self.read(here, peer, begin, [self.target[begin:end]]) is State.DONE
            assert np.array_equal(self.target[begin:end], wanted[begin:end])
            assert not self.target[end:].any()

    def test_several_parts_are_one_read(self, here: Channel, there: Exposing) -> None:
        wanted, peer = random_bytes(_MEMORY_BYTES, _SEED), here.attach(there.description)
        ends = (2 << 20, (2 << 20) + 999, 100), ((2 << 20) + 1000, 3 << 20, 1099)
        parts = [self.target[begin:end] for begin, end, _ in ends]
        assert self.read(here, peer, 100, parts) is State.DONE
        for begin, end, source in ends:
            assert np.array_equal(self.target[begin:end], wanted[source : source + end - begin])
        assert not self.target[: 2 << 20].any()
        assert not self.target[3 << 20 :].any()

    def test_many_reads_at_once(self, here: Channel, there: Exposing) -> None:
        wanted, peer = random_bytes(_MEMORY_BYTES, _SEED), here.attach(there.description)
        step = _MEMORY_BYTES // 24
        begins = range(0, _MEMORY_BYTES, step)
        readings = [here.read(peer, begin, [self.target[begin : begin + step]]) for begin in begins]
        assert len(set(readings)) == len(readings)
        assert {self.ended(here, reading) for reading in reversed(readings)} == {State.DONE}
        assert np.array_equal(self.target, wanted)

    def test_two_peers_are_told_apart(self, here: Channel, there: Exposing) -> None:
        with closing(self.open_channel()) as other:
            memory = np.full(4096, 3, np.uint8)
            other.register(memory)
            peers = here.attach(other.describe()), here.attach(there.description)
            with other.serving():
                for peer, first in zip(peers, (3, random_bytes(_MEMORY_BYTES, _SEED)[0]), strict=True):
                    assert self.read(here, peer, 0, [self.target[:1]]) is State.DONE
                    assert self.target[0] == first

    @pytest.mark.parametrize(("offset", "size"), [(_MEMORY_BYTES, 1), (_MEMORY_BYTES - 9, 10), (1 << 50, 1), (-1, 1)])
    def test_nothing_outside_is_read(self, here: Channel, there: Exposing, offset: int, size: int) -> None:
        peer = here.attach(there.description)
        with pytest.raises(ChannelError):
            here.read(peer, offset, [self.target[:size]])
        assert self.read(here, peer, 0, [self.target[:1]]) is State.DONE

    def test_a_description_stays_the_same(self, here: Channel) -> None:
        description = here.describe()
        assert 0 < len(description) <= MAX_DESCRIPTION_BYTES
        assert here.describe() == description

    def test_without_memory_there_is_nothing_to_describe(self) -> None:
        with closing(self.open_channel()) as channel, pytest.raises(ChannelError):
            channel.describe()

    def test_what_is_no_description(self, here: Channel, there: Exposing) -> None:
        sound = there.description
        for junk in (b"", b"\0", b"abc" * 500, sound[: len(sound) // 2], bytes(random_bytes(500, 1))):
            with pytest.raises(ChannelError):
                here.attach(junk)
        assert self.read(here, here.attach(sound), 0, [self.target[:9]]) is State.DONE

    def test_a_damaged_description(self, here: Channel, there: Exposing) -> None:
        sound = there.description
        for at in range(0, len(sound), max(1, len(sound) // 40)):
            damaged = bytearray(sound)
            damaged[at] ^= 0xFF
            with pytest.raises(ChannelError):
                here.attach(bytes(damaged))

    def test_a_peer_may_come_again(self, here: Channel, there: Exposing) -> None:
        peer = here.attach(there.description)
        assert self.read(here, peer, 0, [self.target[:9]]) is State.DONE
        here.detach(peer)
        with pytest.raises(ChannelError):
            here.read(peer, 0, [self.target[:9]])
        here.detach(peer)
        assert self.read(here, here.attach(there.description), 0, [self.target[:9]]) is State.DONE

    def test_a_peer_that_was_killed(self, here: Channel, there: Exposing) -> None:
        """Reads from a killed peer are refused or fail in bounded time, and other peers are not affected."""
        with self.exposing() as victim:
            peer = here.attach(victim.description)
            assert self.read(here, peer, 0, [self.target[:9]]) is State.DONE
            victim.process.kill()
            victim.process.wait()
            with suppress(ChannelError):
                assert self.read(here, peer, 0, [self.target[: 1 << 20]]) is State.FAILED
            here.detach(peer)
        assert self.read(here, here.attach(there.description), 0, [self.target[:9]]) is State.DONE

    def test_after_close(self, there: Exposing) -> None:
        with closing(self.open_channel()) as channel:
            target = np.zeros(4096, np.uint8)
            channel.register(target)
            peer = channel.attach(there.description)
            channel.close()
            channel.close()
            with pytest.raises(ChannelError):
                channel.read(peer, 0, [target])
            with pytest.raises(ChannelError):
                channel.attach(there.description)
            channel.detach(peer)
            with channel.serving():
                pass

    def test_bytes_go_through_the_channel(self) -> None:
        transport = self.start(BIG)
        sent = [self.parcel(1, 0), self.parcel(2, 1)]
        assert transport.deliver(sent, self.all_layers()) == [STORED] * 2
        counted = self.server.stats(_READ_S)["channel"]
        assert (counted["read_bytes"], counted["failed"]) == (sum(len(parcel.payload) for parcel in sent), 0)

    def test_a_receiver_without_the_channel_gets_messages(self) -> None:
        kind, type(self).channel = self.channel, None
        try:
            self.start(BIG)
        finally:
            type(self).channel = kind
        transport = self.connect(f"kvs://127.0.0.1:{self.server.port}")
        assert transport.deliver([self.parcel(1, 0)], self.all_layers()) == [STORED]
        self.require(1)


def _is_hex(line: str) -> bool:
    try:
        return bool(bytes.fromhex(line))
    except ValueError:
        return False
