"""Tests of calls from several threads: reads return only whole chunks, under any concurrent calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, TierHarness, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import Transfer

A = make_ref(1)
_PUT_ANSWERS = {Outcome.STORED, Outcome.FULL, Outcome.FAILED}
_GET_ANSWERS = {Outcome.HIT, Outcome.MISS}


def together(*jobs: Callable[[], object]) -> None:
    """Run the jobs at the same time, and raise an error that one of them raised."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        for running in [threads.submit(job) for job in jobs]:
            running.result()


class ThreadTests(TierHarness):
    """Tests under concurrent calls; every thread checks the contents."""

    def test_many_threads_and_chunks(self) -> None:
        """All calls on a few chunks, in a tier that is often full if it has a bound."""
        tier = self.start(chunks=5)

        def work(seed: int) -> None:
            dice = random.Random(seed)  # noqa: S311 - not a secret
            for step in range(60):
                ref = make_ref(dice.randrange(7), dice.choice([1, 4]))
                action = dice.randrange(20)
                if action < 8:
                    assert set(self.put(ref)) <= _PUT_ANSWERS
                elif action < 16:
                    assert set(self.get(ref)) <= _GET_ANSWERS
                elif action < 19:
                    tier.remove([ref])
                elif (chance := dice.randrange(6)) < 2:
                    tier.clear()
                elif chance == 2:
                    tier.reset(Namespace({"model": f"reset {seed} {step}"}))
                self.check_bound()

        together(*(lambda seed=seed: work(seed) for seed in range(6)))
        self.check_bytes()
        refs = list(self.held())
        assert self.get(*refs) == [Outcome.HIT] * len(refs)
        events = tier.counters
        assert events.hits + events.misses + events.stored + events.full + events.failed > 0

    def test_threads_on_different_chunks(self) -> None:
        """Threads on different chunks do not disturb each other, and every call succeeds."""
        self.start()

        def work(first: int) -> None:
            refs = [make_ref(number) for number in range(first, first + 12)]
            for ref in refs:
                assert self.put(ref) == [Outcome.STORED]
            assert self.get(*refs) == [Outcome.HIT] * 12

        together(*(lambda first=first: work(first) for first in (0, 100, 200, 300)))
        assert len(self.held()) == 48
        self.check_bytes()

    def test_counters_lose_nothing_between_threads(self) -> None:
        """All threads together count one event for each chunk."""
        tier = self.start()
        self.put(A)
        together(*(lambda: [self.get(A, make_ref(2)) for _ in range(50)] for _ in range(4)))
        assert (tier.counters.hits, tier.counters.misses) == (200, 200)

    def test_concurrent_puts_of_one_chunk(self) -> None:
        """It is held once, with the bytes of one of them."""
        self.start()
        for _ in range(5):
            together(*(lambda version=version: self.put(A, version=version) for version in range(4)))
            assert self._version_read(4) is not None
            assert self.held() == {A}
            self.check_bytes()

    def test_a_chunk_is_seen_whole_or_not_at_all(self) -> None:
        """During its first put, a chunk is whole or missing."""
        tier = self.start()
        for number in range(20):
            ref = make_ref(number)
            together(partial(self.put, ref), *(partial(self.get, ref) for _ in range(4)))
            assert self.get(ref) == [Outcome.HIT]
            tier.remove([ref])

    def test_get_while_it_is_replaced(self) -> None:
        """A read returns the old bytes or the new ones, whole."""
        self.start()
        self.put(A)

        def replace() -> None:
            for number in range(30):
                assert self.put(A, version=number % 2) == [Outcome.STORED]

        together(replace, *(lambda: [self._version_read(2) for _ in range(60)] for _ in range(3)))
        assert self._version_read(2) == 1

    def test_get_while_it_is_removed(self) -> None:
        """A read is a hit with the right bytes or a miss, and never reports damage."""
        tier = self.start(chunks=3)

        def churn() -> None:
            for number in range(40):
                self.put(A)
                tier.remove([A])
                self.put(make_ref(2 + number % 5))  # takes the room that A has given back
                tier.remove([make_ref(2 + number % 5)])

        def read() -> None:
            for _ in range(80):
                assert set(self.get(A)) <= _GET_ANSWERS

        together(churn, read, read)
        assert tier.counters.corrupt == 0
        self.check_bytes()

    def test_puts_that_reset_overtakes_store_nothing(self) -> None:
        """A chunk that is found always belongs to the tier's current epoch."""
        tier = self.start()
        epochs = [Namespace({"epoch": number}) for number in range(12)]
        entered = 0

        def write() -> None:
            for _ in range(20):
                number = entered  # this epoch may end before the put begins, or during it
                transfer = make_transfer(EVEN, A, number)._replace(namespace_id=epochs[number].id)
                assert set(self.put_all([transfer])) <= _PUT_ANSWERS

        def turn() -> None:
            nonlocal entered
            for number, epoch in enumerate(epochs):
                tier.reset(epoch)
                entered = number
                assert self._version_read(len(epochs)) in (None, number)
                self.put(make_ref(2))

        tier.reset(epochs[0])
        together(turn, write, write, write)
        assert self._version_read(len(epochs)) in (None, len(epochs) - 1)
        self.check_bytes()

    def test_close_while_calls_are_running(self) -> None:
        """They end in an answer, or in ``ClosedError``."""
        tier = self.start()

        def work() -> None:
            try:
                for number in range(200):
                    assert set(self.put(make_ref(number % 8))) <= _PUT_ANSWERS
                    assert set(self.get(make_ref(number % 8))) <= _GET_ANSWERS
            except ClosedError:
                return

        together(work, work, lambda: [self.get(A) for _ in range(3)] and tier.close())

    def _version_read(self, versions: int) -> int | None:
        """Return the version of ``A`` that the tier serves; None for a miss. Fails if the bytes are of no version."""
        buffer = make_buffer(EVEN.slot_bytes)
        (outcome,) = self.tier.get([Transfer(A, buffer)])
        if outcome is Outcome.MISS:
            return None
        assert outcome is Outcome.HIT
        candidates = [make_payload(EVEN, A, version) for version in range(versions)]
        assert buffer.tobytes() in candidates, "bytes of several versions, or of none"
        return candidates.index(buffer.tobytes())
