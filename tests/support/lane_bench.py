"""A lane over numbered slots, each filled with its number, and a tier that records what it is asked to remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.transfer.lane import Lane
from support.gate import HANG_GUARD_S
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES, FakeTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OLD = Namespace({"model": "rig"})
NEW = OLD.at_epoch("new")
NEWER = OLD.at_epoch("newer")


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, BLOCKS_PER_CHUNK)


class Bench:
    """A lane over slots that are filled with their numbers, and a tier that records what it is asked to remove."""

    def __init__(self, *, asks: bool = False) -> None:
        self.cpu = LabelledPool(SlabPool(16, SLOT_BYTES))
        self.tier = FakeTier()
        self.tier.namespace_id = OLD.id
        self.forgotten: list[object] = []
        self.before_forgetting: Callable[[], object] = lambda: None
        self._watch()
        self.written: list[tuple[ChunkRef, bool]] = []
        self.lane = Lane(
            self.cpu,
            self.tier,
            lambda ref, outcome: self.written.append((ref, outcome is Outcome.STORED)),
            asks_before_write=self.tier if asks else None,
            namespace_id=OLD.id,
        )

    def _watch(self) -> None:
        remove, clear, reset = self.tier.remove, self.tier.clear, self.tier.reset

        def note(what: object) -> None:
            self.forgotten.append(what)
            self.before_forgetting()

        def watched_remove(refs: Sequence[ChunkRef]) -> None:
            note(sorted(refs))
            remove(refs)

        def watched_clear() -> None:
            note("clear")
            clear()

        def watched_reset(namespace: Namespace) -> None:
            note(namespace)
            reset(namespace)

        self.tier.remove = watched_remove  # type: ignore[method-assign, assignment]
        self.tier.clear = watched_clear  # type: ignore[method-assign]
        self.tier.reset = watched_reset  # type: ignore[method-assign]

    def fill(self, number: int) -> None:
        self.cpu.claim(number)[:] = number
        self.cpu.publish(number, ref_of(number))

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.fill(number)
            self.lane.write(ref_of(number), number)

    def store(self, *numbers: int) -> None:
        self.write(*numbers)
        assert self.lane.flush(HANG_GUARD_S)
        self.written.clear()

    def read(self, number: int) -> Outcome:
        return self.lane.read(ref_of(number), 15).result(HANG_GUARD_S).outcome

    def held(self) -> set[ChunkRef]:
        return set(self.tier.chunks)
