"""Fairness of the one event loop that passes on all streams: large bodies let other streams run."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from support.fake_engine import FakeEngine

from kvstore.tools.proxy import upstream
from kvstore.tools.proxy.upstream import Pool, Times

LONGEST_PIECE_BYTES = 512 << 10


def test_others_have_their_turn_while_a_body_of_megabytes_passes(
    decode: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream's task runs between any two pieces of the body, none of which is long."""
    prompt = b'{"prompt": [' + b",".join([b"100000"] * 900_000) + b"]}"
    turns = 0
    seen: list[tuple[int, int]] = []  # the length of each piece, and the turns that others had before it
    write = upstream._Connection._write

    async def watched(connection: upstream._Connection, data: bytes) -> None:
        seen.append((len(data), turns))
        await write(connection, data)

    async def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send() -> None:
        pool = Pool(decode.url, Times(5, 20), None)
        other = asyncio.create_task(stream())
        told = {"content-type": "application/json"}
        try:
            async with pool.asked("POST", "/v1/completions", told, [prompt]) as answer:
                await answer.read(1 << 20)
                assert answer.status == 200
        finally:
            other.cancel()
            pool.close()

    monkeypatch.setattr(upstream._Connection, "_write", watched)
    asyncio.run(send())
    assert sum(length for length, _ in seen) > len(prompt) > 6 << 20
    assert max(length for length, _ in seen) <= LONGEST_PIECE_BYTES
    begins = [begin for _, begin in seen]
    assert all(later > before for before, later in pairwise(begins))
    assert len(decode.last.body["prompt"]) == 900_000
