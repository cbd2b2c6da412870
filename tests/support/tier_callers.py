"""Callers of a tier on several threads, which know what each of their chunks may be: never other bytes than stored.

A chunk's bytes follow from its name and the epoch. In a calm round a caller knows of each chunk if it is held. An error
leaves a doubt about its chunk until the next settlement: it may be there or not, but no other bytes may.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

import numpy as np

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.layout import KVLayout
from kvstore.testing.harness import make_buffer, make_ref
from kvstore.tiers.base import BoundedTier, Tier, Transfer
from support.server_client import content

CHUNKS = 12  # of each caller
_BLOCKS = (1, 3, 4)
_ATTEMPTS = 20
_PAUSE_S = 0.5
Answer = TypeVar("Answer")


class State(Enum):
    """Knowledge of a caller about a chunk."""

    ABSENT = "absent"
    HELD = "held"
    DOUBTFUL = "doubtful"


def patiently(call: Callable[[], Answer]) -> Answer:
    """Call again while a tier does not answer, as it may after its connections were cut; at last it must."""
    for _ in range(_ATTEMPTS):
        try:
            return call()
        except TierError:
            time.sleep(_PAUSE_S)
    return call()


class Caller:
    """One thread's calls about its own chunks.

    Attributes:
        counts: calls and outcomes.
        wrong: descriptions of reads that brought wrong bytes.
        unexpected: descriptions of other answers that cannot be right.
    """

    def __init__(self, number: int, layout: KVLayout, seed: int, *, knows_all: bool) -> None:
        self.counts = Counter[str]()
        self.wrong: list[str] = []
        self.unexpected: list[str] = []
        self.epoch = 0
        self._layout = layout
        self._knows_all = knows_all
        self._dice = random.Random(f"{seed}/{number}")
        names = range(number * CHUNKS, (number + 1) * CHUNKS)
        self.states = {make_ref(name, _BLOCKS[name % len(_BLOCKS)]): State.ABSENT for name in names}

    def call(self, tier: Tier) -> None:
        """Make one call of any kind."""
        self.counts["calls"] += 1
        refs = self._dice.sample(list(self.states), self._dice.choice([1, 1, 1, 2, 4]))
        kind = self._dice.randrange(100)
        act = self._put if kind < 35 else self._get if kind < 75 else self._ask if kind < 88 else self._remove
        try:
            act(tier, refs)
        except TierError:
            self.counts["errors"] += 1
            self.doubt(refs)

    def call_all(self, tier: Tier, calls: int) -> None:
        for _ in range(calls):
            self.call(tier)

    def doubt(self, refs: Sequence[ChunkRef]) -> None:
        self.states.update(dict.fromkeys(refs, State.DOUBTFUL))

    def enter(self, epoch: int) -> None:
        """Expect nothing of earlier epochs any more."""
        self.epoch = epoch
        self.states = dict.fromkeys(self.states, State.ABSENT)

    def settle(self, tier: Tier) -> None:
        """Read every chunk, and know afterwards which are held; damaged ones must be found out."""
        for ref, state in self.states.items():
            outcome = patiently(lambda ref=ref: self._read(tier, [ref]))[0]  # type: ignore[misc]
            if outcome is Outcome.HIT and state is State.ABSENT:
                self.unexpected.append(f"{ref} is there, although it was removed")
            if outcome in {Outcome.MISS, Outcome.CORRUPT} and state is State.HELD:
                self.unexpected.append(f"{ref} is gone: {outcome}")
            if outcome is Outcome.FAILED:
                self.unexpected.append(f"{ref} cannot be read in a calm moment")
            self.states[ref] = State.HELD if outcome is Outcome.HIT else State.ABSENT

    def _expected(self, ref: ChunkRef) -> ByteArray:
        return content(ref, 8 * self.epoch + ref.num_blocks, self._layout.payload_bytes(ref.num_blocks))

    def _put(self, tier: Tier, refs: Sequence[ChunkRef]) -> None:
        transfers = [Transfer(ref, make_buffer(self._layout.slot_bytes)) for ref in refs]
        for ref, buffer, *_ in transfers:
            expected = self._expected(ref)
            buffer[: len(expected)] = expected
        for ref, outcome in zip(refs, tier.put(transfers), strict=True):
            self.counts[outcome.value] += 1
            self.states[ref] = State.HELD if outcome is Outcome.STORED else State.DOUBTFUL

    def _get(self, tier: Tier, refs: Sequence[ChunkRef]) -> None:
        for ref, outcome in zip(refs, self._read(tier, refs), strict=True):
            if outcome is Outcome.HIT and self.states[ref] is State.ABSENT:
                self.unexpected.append(f"{ref} is there, although it was removed")
            if outcome in {Outcome.MISS, Outcome.CORRUPT} and self.states[ref] is State.HELD:
                self.unexpected.append(f"{ref} is gone: {outcome}")

    def _read(self, tier: Tier, refs: Sequence[ChunkRef]) -> list[Outcome]:
        transfers = [Transfer(ref, make_buffer(self._layout.slot_bytes)) for ref in refs]
        outcomes = tier.get(transfers)
        for outcome, (ref, buffer, *_) in zip(outcomes, transfers, strict=True):
            self.counts[outcome.value] += 1
            expected = self._expected(ref)
            if outcome is Outcome.HIT and not np.array_equal(buffer[: len(expected)], expected):
                self.wrong.append(f"other bytes than those of {ref} in epoch {self.epoch}")
        return outcomes

    def _ask(self, tier: Tier, refs: Sequence[ChunkRef]) -> None:
        for ref, presence in zip(refs, tier.contains(refs), strict=True):
            state = self.states[ref]
            if self._knows_all and state is not State.DOUBTFUL and bool(presence) != (state is State.HELD):
                self.unexpected.append(f"{ref} is said to be {'there' if presence else 'gone'}, but is {state.value}")

    def _remove(self, tier: Tier, refs: Sequence[ChunkRef]) -> None:
        tier.remove(refs)
        for ref in refs:
            # One that may still be written by a call that failed is removed for certain only later.
            self.states[ref] = State.ABSENT if self.states[ref] is not State.DOUBTFUL else State.DOUBTFUL


class Callers:
    """Callers on threads of their own, for rounds of calls at the same time.

    Args:
        number: of threads.
        layout: of the chunks.
        seed: of their calls.
        knows_all: True if the tier knows at any moment which chunks it holds; otherwise its lookups are hints.
    """

    def __init__(self, number: int, layout: KVLayout, seed: int, *, knows_all: bool = True) -> None:
        self.all = [Caller(which, layout, seed, knows_all=knows_all) for which in range(number)]

    def round(self, tier: Tier, calls: int) -> None:
        """Let each make so many calls; returns when all have ended."""
        self._each(lambda caller: caller.call_all(tier, calls))

    def settle(self, tier: Tier) -> None:
        """Let each read all of its chunks; a bounded tier must list those that are held."""
        for caller in self.all:
            caller.settle(tier)
        if isinstance(tier, BoundedTier):
            listed = {ref for ref, _ in tier.scan()}
            held = {ref for caller in self.all for ref, state in caller.states.items() if state is State.HELD}
            assert listed == held, f"the tier lists {len(listed)} chunks, and {len(held)} can be read"

    def enter(self, epoch: int) -> None:
        for caller in self.all:
            caller.enter(epoch)

    def doubt_all(self) -> None:
        for caller in self.all:
            caller.doubt(list(caller.states))

    def counts(self) -> Counter[str]:
        return sum((caller.counts for caller in self.all), Counter[str]())

    def _each(self, act: Callable[[Caller], object]) -> None:
        errors: list[BaseException] = []

        def run(caller: Caller) -> None:
            try:
                act(caller)
            except BaseException as error:  # noqa: BLE001 - raised below, on the test's thread
                errors.append(error)

        threads = [threading.Thread(target=run, args=(caller,), name="test-caller") for caller in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
