"""One event loop passes on all streams: whoever sends much lets the others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from support.fake_engine import FakeEngine

from kvstore.tools.proxy import engines
from kvstore.tools.proxy.engines import Engine, EngineClient
from kvstore.tools.proxy.objects import Parts
from kvstore.tools.proxy.options import ProxyOptions

LONGEST_PIECE_BYTES = 512 << 10


def test_others_have_their_turn_while_a_body_of_megabytes_passes(
    decode: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream's task runs between any two pieces of it, none of which is long."""
    prompt = b'{"prompt": [' + b",".join([b"100000"] * 900_000) + b"]}"
    turns = 0
    seen: list[tuple[int, int]] = []  # the length of each piece, and the turns that others had before it
    cut = engines._pieces

    async def watched(content: Parts) -> AsyncIterator[bytes]:
        async for piece in cut(content):
            seen.append((len(piece), turns))
            yield piece

    async def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send() -> None:
        client = EngineClient(ProxyOptions((decode.url,), (decode.url,)))
        other = asyncio.create_task(stream())
        told = {"content-type": "application/json"}
        asked = (Engine("decode", decode.url), "POST", "/v1/completions", told, [prompt])
        try:
            async with client.asked(*asked) as answer:
                await answer.aread()
                assert answer.is_success
        finally:
            other.cancel()
            await client.close()

    monkeypatch.setattr(engines, "_pieces", watched)
    asyncio.run(send())
    assert sum(length for length, _ in seen) == len(prompt) > 6 << 20
    assert max(length for length, _ in seen) <= LONGEST_PIECE_BYTES
    begins = [begin for _, begin in seen]
    assert all(later > before for before, later in pairwise(begins))
    assert len(decode.last.body["prompt"]) == 900_000
