"""Prompts that part inside a chunk that another engine handed over: real servers, a producer and a consumer."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.fake_parts import BLOCK, CHUNK
from support.handed_over import Wire, consumer, flush, producer, throw_away, to

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
