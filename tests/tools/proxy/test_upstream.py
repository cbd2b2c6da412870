"""Connections to engines: reuse, time-outs, and limits on the harm of faulty engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvstore.tools.proxy import upstream
from kvstore.tools.proxy.upstream import NoConnectionError, Pool, SilenceError, Times, UpstreamError

OK = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nX-Other: c\r\nContent-Length: 2\r\n\r\nhi"
Work = Callable[[Pool], Awaitable[None]]


class Peer:
    """Server that answers each request with the next of these bytes; None closes the connection."""

    def __init__(self, *answers: bytes | None, holds: bool = True) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.closed = 0
        self.heads: list[bytes] = []
        self._holds = holds

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
            if self._holds:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()

    def run(self, work: Work, silent_s: float = 20) -> None:
        async def run() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Times(5, silent_s), None)
            try:
                await work(pool)
            finally:
                pool.close()
                server.close()

        asyncio.run(run())


async def get(pool: Pool, most_bytes: int = 1 << 20) -> tuple[int, bytes]:
    async with pool.asked("GET", "/x", {"a": "b"}, ()) as answer:
        return answer.status, await answer.read(most_bytes)


def test_a_connection_is_used_again() -> None:
    peer = Peer(OK, OK, OK)

    async def work(pool: Pool) -> None:
        for _ in range(3):
            assert await get(pool) == (200, b"hi")

    peer.run(work)
    assert peer.connections == 1
    assert peer.heads[0].startswith(b"GET /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\na: b\r\n" in peer.heads[0]


def test_only_headers_for_clients_are_kept() -> None:
    async def work(pool: Pool) -> None:
        async with pool.asked("GET", "/", {}, ()) as answer:
            assert answer.headers == {"content-type": "a/b"}

    Peer(OK).run(work)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", b"hi!"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
    ],
    ids=["chunked", "continue", "empty", "close"],
)
def test_answers_of_all_kinds(answer: bytes, content: bytes) -> None:
    peer = Peer(answer, OK)

    async def work(pool: Pool) -> None:
        assert await get(pool) == (200, content)
        assert await get(pool) == (200, b"hi")

    peer.run(work)
    assert peer.connections == (2 if b"close" in answer else 1)


def test_an_answer_that_ends_with_its_connection() -> None:
    async def work(pool: Pool) -> None:
        assert await get(pool) == (200, b"all of it")

    Peer(b"HTTP/1.1 200 OK\r\n\r\nall of it", holds=False).run(work)


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\nhi" + OK,
        b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nhi",
        b"",
        None,
    ],
    ids=["nonsense", "too short", "no end", "upgrade", "099", "600", "nothing", "closed"],
)
def test_an_answer_that_is_none(answer: bytes | None) -> None:
    async def work(pool: Pool) -> None:
        with pytest.raises(UpstreamError):
            await get(pool)
        assert not pool._idle

    Peer(answer, holds=False).run(work)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED + b"2\r\nhi\r\n0\r\nX: "],
    ids=["a head", "what follows the body"],
)
def test_a_head_without_end(begin: bytes) -> None:
    async def work(pool: Pool) -> None:
        with pytest.raises(UpstreamError, match="what came is no answer"):
            await get(pool)

    Peer(begin + b"x" * (1 << 20)).run(work, silent_s=2)


def test_a_long_answer_in_small_chunks_is_no_head() -> None:
    async def work(pool: Pool) -> None:
        assert await get(pool) == (200, b"x" * 50_000)

    Peer(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n").run(work)


def test_more_than_an_answer_is_not_taken_for_the_next_one() -> None:
    peer = Peer(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK)

    async def work(pool: Pool) -> None:
        assert await get(pool) == (200, b"hi")
        assert await get(pool) == (200, b"hi")

    peer.run(work)
    assert peer.connections == 2


def test_a_connection_that_the_engine_has_closed_is_not_used() -> None:
    peer = Peer(OK, None, OK)

    async def work(pool: Pool) -> None:
        await get(pool)
        (kept,) = pool._idle
        kept._transport.abort()  # type: ignore[union-attr]
        await asyncio.sleep(0)
        peer.answers.pop(0)
        assert await get(pool) == (200, b"hi")

    peer.run(work)
    assert peer.connections == 2


def test_nor_one_that_was_idle_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_KEPT_S", 0.0)
    peer = Peer(OK, OK)

    async def work(pool: Pool) -> None:
        await get(pool)
        pool.sweep()
        assert not pool._idle
        await get(pool)

    peer.run(work)
    assert peer.connections == 2


def test_a_caller_that_leaves_ends_the_request() -> None:
    peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi")

    async def work(pool: Pool) -> None:
        async with pool.asked("GET", "/", {}, ()):
            pass
        assert not pool._idle
        while not peer.closed:
            await asyncio.sleep(0.01)

    peer.run(work)


def test_silence() -> None:
    async def work(pool: Pool) -> None:
        with pytest.raises(SilenceError):
            await get(pool)

    Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi").run(work, silent_s=0.05)


def test_nobody_there() -> None:
    async def work(_pool: Pool) -> None:
        with pytest.raises(NoConnectionError, match="ConnectionRefused"):
            await get(Pool("http://127.0.0.1:1", Times(5, 5), None))
        with pytest.raises(NoConnectionError):
            await get(Pool("http://a..b:1", Times(5, 5), None))

    Peer().run(work)


def test_an_answer_is_not_read_ahead_without_bound() -> None:
    """A client that reads slowly slows the engine down, too."""
    size = 64 << 20

    async def work(pool: Pool) -> None:
        async with pool.asked("GET", "/", {}, ()) as answer:
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert answer._connection._buffered_bytes < 4 << 20
            assert sum([len(piece) async for piece in answer.pieces()]) == size

    Peer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size).run(work)


def test_a_whole_answer_is_bounded() -> None:
    async def work(pool: Pool) -> None:
        with pytest.raises(UpstreamError, match="more than 1000 bytes"):
            await get(pool, 1000)

    size = 4 << 20
    Peer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size).run(work)
