"""Prompts that part inside a chunk that another engine handed over: real servers, a producer and a consumer."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from support.fake_parts import BLOCK, CHUNK
from support.handed_over import Wire, consumer, flush, producer, throw_away, to

from kvstore.adapters.vllm.requests.params import RequestParams

PROMPT = list(range(2 * CHUNK + 3 * BLOCK + 1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shared", [BLOCK, CHUNK + BLOCK, 2 * CHUNK - 1, 2 * CHUNK + 2 * BLOCK])
def test_a_part_of_what_was_handed_over_is_loaded(ranks: int, shared: int) -> None:
    """A prompt that was not handed over loads it, at a receiver that has not read the chunk."""
    with closing(consumer(ranks=ranks)) as second, closing(producer(Wire(), ranks=ranks)) as first:
        first.ask("asked", PROMPT, handover=to(second))
        flush(first)
        second.ask("other", [*PROMPT[:shared], *range(200, 200 + CHUNK)])
        assert second.loaded_tokens["other"] == shared // BLOCK * BLOCK


def test_a_tail_has_the_trail_of_its_own_blocks() -> None:
    """This holds even if it is sent again after the request has decoded beyond it."""
    with closing(consumer()) as second, closing(producer(Wire(), budget=CHUNK)) as first:
        request = first.add("asked", PROMPT, handover=to(second), max_tokens=2 * CHUNK)
        while request.num_tokens < len(PROMPT) + CHUNK:
            first.step()
        flush(first)
        throw_away(second)
        first.scheduler._handovers.outgoing.restart()
        first.run()
        flush(first)
        (space,) = second.workers[0]._server._hub.stock.spaces.values()  # type: ignore[union-attr]
        told = {chunk.ref.num_blocks: chunk.trail for chunk in space.chunks.values()}
        assert sorted(told) == [3, CHUNK // BLOCK]
        assert all(len(trail) == num_blocks * 16 for num_blocks, trail in told.items())


def test_a_tail_of_one_block_needs_no_trail() -> None:
    with closing(consumer()) as second, closing(producer(Wire())) as first:
        first.ask("asked", PROMPT[: CHUNK + BLOCK + 1], handover=to(second))
        flush(first)
        (space,) = second.workers[0]._server._hub.stock.spaces.values()  # type: ignore[union-attr]
        assert {chunk.ref.num_blocks: bool(chunk.trail) for chunk in space.chunks.values()} == {
            1: False,
            CHUNK // BLOCK: True,
        }
        second.ask("other", [*PROMPT[: CHUNK + BLOCK], *range(200, 200 + CHUNK)])
        assert second.loaded_tokens["other"] == CHUNK + BLOCK


@pytest.mark.parametrize("ttl_s", [None, 600.0], ids=["endless", "with an end"])
def test_a_time_to_live_goes_along(ttl_s: float | None) -> None:
    """The receiver would otherwise keep the prompt without end."""
    with closing(consumer()) as second, closing(producer(Wire())) as first:
        end_s = time.monotonic() + 600.0
        first.ask("asked", PROMPT, handover=to(second), params=RequestParams(ttl_s=ttl_s))
        flush(first)
        (space,) = second.workers[0]._server._hub.stock.spaces.values()  # type: ignore[union-attr]
        assert len(space.chunks) == 3
        for until_s in (chunk.until_s for chunk in space.chunks.values()):
            assert until_s is None if ttl_s is None else until_s is not None and abs(until_s - end_s) < 2
        second.ask("other", PROMPT[: 2 * CHUNK + 1])
        assert second.loaded_tokens["other"] == 2 * CHUNK
        connected = second.scheduler._connected
        assert connected is not None
        loaded = [chunk.expires_s for chunk in connected.index._chunks.values()]
        assert loaded
        assert all(until_s is None if ttl_s is None else until_s is not None for until_s in loaded)
