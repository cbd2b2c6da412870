"""Tests of NIXL as a channel: it keeps the contract, and does not change the process that imports it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvstore.channels.base import Peer, Reading, State
from kvstore.model.errors import ChannelError
from kvstore.testing.channels import ChannelConformance

nixl = pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)


class TestNixl(ChannelConformance):
    """NIXL through shared memory, or another transport that UCX chooses here."""

    channel = nixl.NixlChannel


def test_what_others_log_is_not_touched() -> None:
    """NIXL by itself silences errors of logging, and prints lines to stdout."""
    program = (
        "import logging, numpy; from kvstore.channels.nixl import NixlChannel; channel = NixlChannel();"
        "channel.register(numpy.zeros(4096, numpy.uint8)); channel.close(); print(logging.raiseExceptions)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_closing_does_not_wait_for_a_call_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl, "_CLOSE_WAIT_S", 0.01)
    channel = nixl.NixlChannel()
    channel.register(np.zeros(4096, np.uint8))
    with channel._lock, caplog.at_level(logging.WARNING):
        channel.close()
    assert "is stuck in a call" in caplog.text
    with pytest.raises(ChannelError, match="closed"):
        channel.attach(channel.describe())
    channel.close()
    assert channel._agent is None


class _Agent:
    """Agent that reports states set by a test, by the order in which transfers were begun."""

    def __init__(self, real: Any, is_locked: Callable[[], bool]) -> None:
        self._real = real
        self._is_locked = is_locked
        self.begun: list[str] = []
        self.states: dict[str, str] = {}
        self.released: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def initialize_xfer(self, *_: object) -> str:
        return f"transfer {len(self.begun)}"

    def transfer(self, handle: str) -> str:
        assert self._is_locked(), "a channel that is closed between two parts would not find the first"
        self.begun.append(handle)
        return self.states.get(handle, "PROC")

    def check_xfer_state(self, handle: str) -> str:
        return self.states.get(handle, "PROC")

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)


@pytest.fixture
def reader() -> Iterator[tuple[Any, _Agent, Callable[[], Reading]]]:
    """Yield a channel, its agent, and a function that begins a read of three parts."""
    channel, memory = nixl.NixlChannel(), np.zeros(1 << 16, np.uint8)
    with closing(channel):
        channel.register(memory)
        peer = Peer("a peer")
        channel._peers[peer] = nixl._Memory(memory.ctypes.data, memory.nbytes)
        real, agent = channel._agent, _Agent(channel._agent, channel._lock.locked)
        channel._agent = agent
        yield channel, agent, lambda: channel.read(peer, 0, [memory[:10], memory[100:200], memory[300:310]])
        channel._agent = real
        channel._readings.clear()


@pytest.mark.parametrize("fails", range(3))
def test_a_read_has_not_failed_while_others_of_its_parts_may_be_written(
    reader: tuple[Any, _Agent, Callable[[], Reading]], fails: int
) -> None:
    """NIXL reports a failure as soon as one of the ranges of a transfer has failed."""
    channel, agent, read = reader
    reading = read()
    others = [f"transfer {number}" for number in range(3) if number != fails]
    agent.states[f"transfer {fails}"] = "ERR"
    assert channel.look(reading) is State.PENDING
    agent.states[others[1]] = "DONE"
    assert channel.look(reading) is State.PENDING
    agent.states[others[0]] = "DONE"
    assert channel.look(reading) is State.FAILED
    assert sorted(agent.released) == sorted(agent.begun)
    assert not channel._readings


@pytest.mark.parametrize("fails", [1, 2])
def test_what_was_begun_before_a_part_that_cannot_be_is_waited_for(
    reader: tuple[Any, _Agent, Callable[[], Reading]], fails: int
) -> None:
    channel, agent, read = reader
    agent.states[f"transfer {fails}"] = "ERR"
    reading = read()
    assert agent.begun == [f"transfer {number}" for number in range(fails + 1)]
    assert channel.look(reading) is State.PENDING
    agent.states |= {f"transfer {number}": "DONE" for number in range(fails)}
    assert channel.look(reading) is State.FAILED


def test_a_read_of_which_nothing_was_begun_is_none(reader: tuple[Any, _Agent, Callable[[], Reading]]) -> None:
    channel, agent, read = reader
    agent.states["transfer 0"] = "ERR"
    with pytest.raises(ChannelError, match="cannot start the read"):
        read()
    assert not channel._readings
