"""A client takes memory only from a server that its own user, or root, runs, and that cannot shrink it."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.cache_server import mapped_pools, serving_ipc, short_folder
from support.redis_server import wait_for
from support.served import A, open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError, TierSetupError
from kvstore.protocol.messages import TOKEN_BYTES
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tiers.server.hold import Hold, Watcher

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW = 0x0002, 0x0004
_NOBODY = 65534
WAIT_S = 10.0


def memfd(seals: int) -> int:
    fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    return fd


def sealed() -> int:
    return memfd(_F_SEAL_SHRINK)


def growing() -> int:
    return memfd(_F_SEAL_GROW)


def no_memfd() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


class Stranger:
    """A program that listens in the place of a cache server, and hands out a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "pool"))

    def serve(self, make_file: Callable[[], int]) -> None:
        self._socket.listen()
        threading.Thread(target=self._hand_out, args=(make_file,), daemon=True).start()

    def _hand_out(self, make_file: Callable[[], int]) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:  # closed: no client came
            return
        fd = make_file()
        with client, suppress(BrokenPipeError):
            socket.send_fds(client, [bytes(TOKEN_BYTES)], [fd])
        os.close(fd)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with short_folder() as folder:
        stranger = Stranger(folder)
        yield stranger
        stranger.close()


def test_sealed_memory_is_taken(stranger: Stranger) -> None:
    stranger.serve(sealed)
    hold = Hold(stranger.folder, WAIT_S)
    assert hold.pool_bytes == PAGE_BYTES
    hold.close()


@pytest.mark.parametrize("make_file", [growing, no_memfd])
def test_memory_that_could_shrink_is_refused(stranger: Stranger, make_file: Callable[[], int]) -> None:
    """A process that has mapped it would be killed by SIGBUS."""
    stranger.serve(make_file)
    before = psutil.Process().num_fds()
    with pytest.raises(TierSetupError, match="not sealed"):
        Hold(stranger.folder, WAIT_S)
    wait_for("the stranger has closed its own", lambda: psutil.Process().num_fds() <= before)


@pytest.mark.parametrize("mode", [0o755, 0o720, 0o701])
def test_a_folder_that_others_can_enter_is_refused(stranger: Stranger, mode: int) -> None:
    stranger.serve(sealed)
    stranger.folder.chmod(mode)
    with pytest.raises(TierSetupError, match=f"mode {mode:04o}: it must .* be closed to others"):
        Hold(stranger.folder, WAIT_S)


def test_the_folder_of_another_user_is_refused(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger.serve(sealed)
    if os.geteuid() == 0:  # a user that trusts only itself
        os.chown(stranger.folder, _NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: _NOBODY)
    with pytest.raises(TierSetupError, match="it must belong to user"):
        Hold(stranger.folder, WAIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as somebody else")
def test_the_server_of_another_user_is_refused(stranger: Stranger) -> None:
    """It may be in a folder of ours, into which it was put somehow."""
    os.seteuid(_NOBODY)  # the kernel records who listens
    try:
        stranger.serve(sealed)
    finally:
        os.seteuid(0)
    with pytest.raises(TierSetupError, match=f"runs as user {_NOBODY}"):
        Hold(stranger.folder, WAIT_S)


def test_memory_of_another_size_than_announced_is_refused() -> None:
    before = mapped_pools()
    with serving_ipc() as server:
        server.hub.pool.num_bytes -= PAGE_BYTES
        tier = open_tier(server.url)
        with pytest.raises(TierSetupError, match=r"announces \d+ bytes"):
            tier.put([make_transfer(EVEN, A)])
        assert mapped_pools() == before + 1  # the server's own
        server.hub.pool.num_bytes += PAGE_BYTES
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.close()


def test_no_server_is_an_outage_and_not_a_configuration() -> None:
    with short_folder() as folder, pytest.raises(TierError, match="cannot be reached") as caught:
        Hold(folder / "none", WAIT_S)
    assert not isinstance(caught.value, TierSetupError)


def test_memory_that_takes_long_to_unmap_does_not_hold_up_close(stranger: Stranger) -> None:
    stranger.serve(sealed)
    hold = Hold(stranger.folder, WAIT_S)
    watcher = Watcher(lambda: None)
    watcher.watch(hold)
    may_end, is_done = threading.Event(), threading.Event()

    def unmap() -> None:
        may_end.wait()
        is_done.set()

    watcher.do(unmap)
    watcher.close(timeout_s=0.01)
    assert not is_done.is_set()
    may_end.set()
    assert is_done.wait(WAIT_S), "it goes on all the same"
    hold.close()


def test_a_server_that_goes_while_its_tier_is_closed(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may see that it is to end before it is woken for that."""
    stranger.serve(sealed)
    hold = Hold(stranger.folder, WAIT_S)
    watcher = Watcher(lambda: None)
    watcher.watch(hold)
    thread, write = watcher._thread, os.eventfd_write
    assert thread is not None

    def write_late(wake: int, number: int) -> None:
        hold._socket.shutdown(socket.SHUT_RDWR)
        thread.join(0.3)
        write(wake, number)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    watcher.close(WAIT_S)
    assert not thread.is_alive()
    hold.close()
