"""Tests of a cache server's memory: its allocation by the server, and its release after the server's end."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.cache_server import ServerProcess, ServerThread, mapped_pools, serving_ipc
from support.gate import Gate
from support.redis_server import wait_for
from support.served import BIG, WAIT_S, A, check_read, open_tier, works

from kvstore.memory import preparing
from kvstore.memory.mapped import populate
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import TierError
from kvstore.server.pool import _PIECE_BYTES
from kvstore.testing.harness import EVEN, make_payload, make_ref, make_transfer


def held_pools() -> int:
    """Return the number of servers' pools that this process keeps through descriptors or mappings."""
    connections = (os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path))
    return mapped_pools() + sum("kvstore-pool" in connection for connection in connections)


def resident_bytes(server: ServerThread) -> list[int]:
    """Measure how much of each mapping of a server's memory this process has in its page tables."""
    inode = os.fstat(server.hub.pool.fd).st_ino
    text = Path("/proc/self/smaps").read_text()
    return [int(size) << 10 for size in re.findall(rf" {inode} +/memfd.*\n(?:.+\n)*?Rss: +(\d+) kB", text)]


class TestItComesBack:
    def test_from_an_idle_client_of_one_that_was_killed(self, process: ServerProcess) -> None:
        """An idle client makes no call that would fail, and then maps the next server's memory."""
        before = held_pools()
        tier = open_tier(process.url)
        assert works(tier)
        assert held_pools() > before
        process.kill()
        wait_for("nothing of it is left", lambda: held_pools() == before)
        process.start()
        wait_for("the tier works again", lambda: works(tier))
        assert check_read(tier, A) is Outcome.HIT
        tier.close()
        assert held_pools() == before

    def test_from_an_idle_client_of_one_that_has_ended(self) -> None:
        before = mapped_pools()
        with serving_ipc() as server:
            tier = open_tier(server.url)
            assert works(tier)
            assert mapped_pools() > before
        wait_for("nothing of it is left", lambda: mapped_pools() == before)
        tier.close()

    def test_when_what_was_lent_is_given_back(self) -> None:
        before = mapped_pools()
        with serving_ipc() as server:
            tier = open_tier(server.url)
            assert works(tier)
            loan = tier.borrow([A])
        payload = make_payload(EVEN, A)
        assert loan.payloads[0] is not None
        assert loan.payloads[0].tobytes() == payload
        assert mapped_pools() > before
        loan.end()
        wait_for("nothing of it is left", lambda: mapped_pools() == before)
        tier.close()

    def test_when_a_copy_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The memory stays as long as a call copies from it."""
        gate = Gate()
        monkeypatch.setattr(np, "concatenate", gate.before(np.concatenate))
        before = mapped_pools()
        with serving_ipc() as server:
            tier = open_tier(server.url)
            assert works(tier)
            outcomes: list[Outcome] = []

            def read() -> None:
                with suppress(TierError):  # it could not return the pages
                    outcomes.append(check_read(tier, A))

            reading = threading.Thread(target=read)
            reading.start()
            assert gate.reached.wait(WAIT_S)
        gate.open()
        reading.join(WAIT_S)
        assert outcomes in ([], [Outcome.HIT])
        wait_for("nothing of it is left", lambda: mapped_pools() == before)
        tier.close()

    def test_when_a_use_has_ended_that_did_not_notice(self) -> None:
        gate = Gate()
        before = mapped_pools()
        with serving_ipc() as server:
            tier = open_tier(server.url)
            assert works(tier)
            using = threading.Thread(target=tier._connections.use, args=(lambda _: gate(),))
            using.start()
            assert gate.reached.wait(WAIT_S)
        assert mapped_pools() > before
        gate.open()
        using.join(WAIT_S)
        wait_for("nothing of it is left", lambda: mapped_pools() == before)
        tier.close()

    def test_from_a_forked_child(self, process: ServerProcess) -> None:
        before = held_pools()
        tier = open_tier(process.url)
        assert works(tier)
        wait_for("all of it is mapped", lambda: all("populate" not in thread.name for thread in threading.enumerate()))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, bytes([held_pools()]))
            os._exit(0)
        assert os.read(reader, 1) == bytes([before])
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        assert check_read(tier, A) is Outcome.HIT
        tier.close()

    def test_not_when_another_client_ends(self) -> None:
        with serving_ipc() as server:
            one, other = open_tier(server.url), open_tier(server.url)
            assert works(one)
            assert works(other)
            mapped = mapped_pools()
            one.close()
            assert mapped_pools() == mapped - 1
            assert check_read(other, A) is Outcome.HIT
            other.close()


@pytest.fixture
def slow_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServerThread, Gate]]:
    """Yield a server that has allocated one piece of its memory, and waits at a gate before the second."""
    gate = Gate()

    def populate_late(memory: ByteArray, begin: int, end: int, stops: Callable[[], bool]) -> bool:
        if begin:
            gate()
        return populate(memory, begin, end, stops)

    monkeypatch.setattr(preparing, "populate", populate_late)
    with serving_ipc(pool_bytes=2 * _PIECE_BYTES) as server:
        assert gate.reached.wait(WAIT_S)
        wait_for("the first piece is there", lambda: server.hub.pool.free.num_free > 0)
        yield server, gate
        gate.open()


class TestWhoAllocatesIt:
    """Tests of which process allocates pages, because the container of the first to touch a page is charged for it."""

    def test_clients_touch_only_what_the_server_has_allocated(self, slow_server: tuple[ServerThread, Gate]) -> None:
        server, gate = slow_server
        tier = open_tier(server.url)
        assert works(tier)
        wait_for("both have mapped the first piece", lambda: resident_bytes(server) == [_PIECE_BYTES] * 2)
        tier.close()
        assert os.fstat(server.hub.pool.fd).st_blocks * 512 == _PIECE_BYTES
        tier = open_tier(server.url)
        assert works(tier)
        gate.open()
        wait_for("both have mapped all of it", lambda: resident_bytes(server) == [2 * _PIECE_BYTES] * 2)
        tier.close()

    def test_who_needs_pages_waits_until_they_are_allocated(self, slow_server: tuple[ServerThread, Gate]) -> None:
        """Requests wait for pages that are not allocated yet, and nothing is evicted for them."""
        server, gate = slow_server
        tier = open_tier(server.url, BIG)
        refs = [make_ref(number) for number in range(7)]  # of 4 MiB each
        outcomes: list[Outcome] = []
        storing = threading.Thread(
            target=lambda: outcomes.extend(tier.put([make_transfer(BIG, ref) for ref in refs])), daemon=True
        )
        storing.start()
        wait_for("the first piece is full", lambda: server.hub.pool.free.num_free == 0)
        wait_for("a client waits", lambda: any(s.num_late for s in list(server.hub.sessions.by_peer.values())))
        assert os.fstat(server.hub.pool.fd).st_blocks * 512 == _PIECE_BYTES
        gate.open()
        storing.join(WAIT_S)
        assert outcomes == [Outcome.STORED] * 7
        assert tier.contains(refs) == [True] * 7
        tier.close()

    def test_a_server_that_ends_meanwhile_leaves_nobody_waiting(self, slow_server: tuple[ServerThread, Gate]) -> None:
        server, gate = slow_server
        tier = open_tier(server.url, BIG)
        refs = [make_ref(number) for number in range(7)]
        errors: list[TierError] = []

        def store() -> None:
            try:
                tier.put([make_transfer(BIG, ref) for ref in refs])
            except TierError as error:
                errors.append(error)

        storing = threading.Thread(target=store)
        storing.start()
        wait_for("a client waits", lambda: any(s.num_late for s in list(server.hub.sessions.by_peer.values())))
        server.hub.stop()
        gate.open()
        server.close()
        storing.join(WAIT_S)
        assert not storing.is_alive()
        assert len(errors) == 1
        tier.close()
