"""Tests of many hand-overs over real sockets, of which many fail: no byte is wrong, and no request waits in vain.

The deadline is an hour, so a request that waits for it exceeds the test's time limit. `support/fake_vllm.py` checks the
KV of every token that a request attends to.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from random import Random

import pytest
from support.fake_parts import BLOCK, CHUNK, FakeRequest
from support.fake_vllm import FakeVllm
from support.handed_over import Wire, answered, consumer, flush, producer, throw_away, to
from support.schedules import seeds

from kvstore.adapters.vllm.requests.params import Handover
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock

HANDOVERS = 200
WHOLE_SHARE = 0.2  # least share of whole hand-overs, for any seed; most runs have many more


class Play:
    """Engines, a wire between them, and random faults drawn from a seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = Random(seed)
        self.ranks = self.rng.choice([1, 2])
        self.wire = Wire()
        self.fails = 0.0  # probability that a delivery fails, at each of its stages
        self.is_full = 0.0  # probability that there is no room for a chunk
        self.wire.before_delivery = self.wire.before_layers = self.wire.after_delivery = self._may_fail
        self.second = consumer(ranks=self.ranks)
        self.first = self._producer()
        real = Stock.reserve

        def reserve(stock: Stock, space: Space, ref: ChunkRef, owner: bytes) -> Generator[None, None, Chunk | None]:
            return None if self.rng.random() < self.is_full else (yield from real(stock, space, ref, owner))

        monkeypatch.setattr(Stock, "reserve", reserve)
        monkeypatch.setattr("kvstore.handover.sender.PROBE_INTERVAL_S", 0.01)

    def _producer(self) -> FakeVllm:
        budget, slots = self.rng.choice([CHUNK, 10, 64]), self.rng.choice([1, 3, 30])
        return producer(self.wire, ranks=self.ranks, budget=budget, push_slots=slots, seed=self.rng.randrange(99))

    def _may_fail(self) -> None:
        if self.rng.random() < self.fails:
            raise TierError("broken on purpose")

    def hand_over(self, number: int) -> bool:
        """Run one request from first to last token; return True if all whole blocks of the prompt were loaded."""
        rng = self.rng
        self.fails = rng.choice([0.0, 0.0, 0.1, 0.5])
        self.is_full = rng.choice([0.0, 0.0, 0.3, 1.0])
        if rng.random() < 0.05:  # the producer dies, with all that it has not sent
            self.first.close()
            self.first = self._producer()
        tokens = [rng.randrange(50) for _ in range(rng.randrange(2, 4 * CHUNK))]
        asked = self.first.add(f"asked {number}", tokens, handover=to(self.second))
        for _ in range(rng.randrange(3)):
            self.first.step()
        if rng.random() < 0.05:
            self.first.abort(asked)
        self.first.run()
        if rng.random() < 0.3:
            flush(self.first)
        if rng.random() < 0.1:
            throw_away(self.second)
        return self._go_on(number, tokens, answered(asked))

    def _go_on(self, number: int, tokens: list[int], handover: Handover | None) -> bool:
        name = f"request {number}"
        request: FakeRequest = self.second.add(name, tokens, handover=handover, max_tokens=self.rng.randint(1, 4))
        if self.rng.random() < 0.05:
            self.second.step()
            self.second.abort(request)
        self.second.run(max_steps=2000)
        return self.second.loaded_tokens.get(name, 0) == (len(tokens) - 1) // BLOCK * BLOCK

    def end(self) -> None:
        """Check that no lease, no room in a buffer, no waiting request and no hand-over under way is left."""
        self.fails = self.is_full = 0.0
        self.first.settle()
        flush(self.first)
        self.second.settle()
        self.first.assert_nothing_leaked()
        self.second.assert_nothing_leaked()
        waits = self.second.scheduler._handovers.waits
        assert not len(waits)
        assert waits.timeouts == 0
        for sender in self.first.workers:
            pusher = sender._pushes._pusher
            assert pusher is not None
            assert not pusher.tracker._entries
            assert len(pusher.room._free) == pusher.pool.num_slots
        for receiver in self.second.workers:
            server = receiver._server
            assert server is not None
            assert not server._hub.sessions.num_leases

    def close(self) -> None:
        """End both engines."""
        self.first.close()
        self.second.close()


@pytest.mark.parametrize("seed", seeds(1))
def test_hand_overs_under_random_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Play(seed, monkeypatch)) as play:
        num_whole = sum(play.hand_over(number) for number in range(HANDOVERS))
        play.end()
    assert num_whole > WHOLE_SHARE * HANDOVERS
