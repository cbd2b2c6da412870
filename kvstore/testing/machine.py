"""Tests of any order of calls: a tier and a dictionary as its model, which must agree after every step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.testing.harness import FEW_CHUNKS, TierHarness, make_ref

SETTINGS = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking a failure takes minutes on slow storage
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
_REFS = st.builds(make_ref, st.integers(0, 5), st.sampled_from([1, 3, 4]))


class TierMachine(RuleBasedStateMachine):
    """A tier, with room for six full chunks if it has a bound, and a model: the chunks that it holds, by version.

    Args:
        new_harness: makes a fresh harness; its folder is set here.
    """

    def __init__(self, new_harness: Callable[[], TierHarness]) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory(prefix="kvstore-")
        self.harness = new_harness()
        self.harness.begin(Path(self._temporary.name))
        self.harness.start(chunks=FEW_CHUNKS)
        self.model: dict[ChunkRef, int] = {}

    def teardown(self) -> None:
        """Close the tier and delete its storage."""
        self.harness.stop()
        self._temporary.cleanup()

    @rule(ref=_REFS, version=st.integers(0, 3))
    def put(self, ref: ChunkRef, version: int) -> None:
        """Put a chunk, which is stored if it fits next to the others, and refused if not."""
        (outcome,) = self.harness.put(ref, version=version)
        assert outcome in self.harness.put_answers(ref, self.model)
        if outcome is Outcome.STORED:
            self.model[ref] = version

    @rule(refs=st.lists(_REFS, max_size=5))
    def put_batch(self, refs: list[ChunkRef]) -> None:
        """Put a batch, whose chunks get the same answers as alone; with several parts, in any order."""
        outcomes = self.harness.put(*refs)
        for ref, outcome in zip(refs, outcomes, strict=True):
            assert outcome in self.harness.put_answers(ref, self.model, refs)
            if outcome is Outcome.STORED:
                self.model[ref] = 0

    @rule(ref=_REFS)
    def get(self, ref: ChunkRef) -> None:
        """Read a chunk; a hit has the bytes of the version that was put last."""
        expected = Outcome.HIT if ref in self.model else Outcome.MISS
        assert self.harness.get(ref, version=self.model.get(ref, 0)) == [expected]

    @rule(refs=st.lists(_REFS, max_size=4))
    def remove(self, refs: list[ChunkRef]) -> None:
        """Remove known and unknown chunks."""
        self.harness.tier.remove(refs)
        for ref in refs:
            self.model.pop(ref, None)

    @rule()
    def clear(self) -> None:
        """Clear the tier and the model."""
        self.harness.tier.clear()
        self.model.clear()

    @precondition(lambda self: self.harness.persistent)
    @rule()
    def restart(self) -> None:
        """Open the tier again, which keeps all chunks."""
        self.harness.restart()

    @precondition(lambda self: self.harness.checks_bytes and self.model)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip one bit of a chunk that is held."""
        ref = data.draw(st.sampled_from(sorted(self.model)))
        value = bytearray(self.harness.raw_read(ref) or b"")
        value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.harness.raw_write(ref, bytes(value))
        (outcome,) = self.harness.get(ref, version=self.model[ref])
        assert outcome in {Outcome.CORRUPT, Outcome.HIT}  # a hit, with the right bytes, if it was in padding
        if outcome is Outcome.CORRUPT:
            del self.model[ref]

    @precondition(lambda self: self.harness.checks_bytes and self.model)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Delete the stored bytes of a chunk that is held."""
        ref = data.draw(st.sampled_from(sorted(self.model)))
        self.harness.raw_remove(ref)
        assert self.harness.get(ref, version=self.model.pop(ref)) == [Outcome.MISS]

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Compare the chunks that it reports, the chunks in the storage, and the bytes."""
        assert self.harness.held() == set(self.model)
        refs = [make_ref(number, blocks) for number in range(6) for blocks in (1, 3, 4)]
        assert self.harness.tier.contains(refs) == [ref in self.model for ref in refs]
        assert all((self.harness.raw_read(ref) is not None) == (ref in self.model) for ref in refs[::4])
        self.harness.check_bytes()


class MachineTests(TierHarness):
    """Test that runs the machine on the tier of a test class."""

    def test_any_order_of_calls(self) -> None:
        """Hypothesis searches for an order of calls in which tier and model differ."""
        # Any factory works, although the type asks for a class.
        run_state_machine_as_test(lambda: TierMachine(type(self)), settings=SETTINGS)  # type: ignore[arg-type]
