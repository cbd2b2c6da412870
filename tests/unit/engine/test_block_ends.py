"""Hits end at blocks: any prefix that two prompts share is found, even if they part inside a chunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parting import PROMPTS, check_strangers, shared_tokens
from support.remote import REMOTE, install
from support.rig import BLOCK, CHUNK, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine.requests import hash_tokens
from kvstore.model.keys import NO_EXTRAS


@pytest.fixture
def rig() -> Rig:
    return Rig()


class Stock:
    """Chunks of an engine that never runs out of room: whole ones, and the tails that no longer chunk holds.

    Attributes:
        chunks: each with all tokens before it.
        written: of these, those stored since the last restart, which are in memory.
        spare: held tails that may keep a slot, because what holds them may be on disk only.
    """

    def __init__(self) -> None:
        self.chunks: set[tuple[int, ...]] = set()
        self.written: set[tuple[int, ...]] = set()
        self.spare: set[tuple[int, ...]] = set()

    def add(self, prompt: list[int]) -> None:
        whole = {tuple(prompt[:end]) for end in range(CHUNK, len(prompt) + 1, CHUNK)}
        tail = tuple(prompt[: len(prompt) // BLOCK * BLOCK])
        before = set(self.chunks)
        self.chunks |= whole
        if len(tail) % CHUNK:  # one that a longer tail holds is dropped, too, once it is offered again
            holders = {chunk for chunk in self.chunks if self._holds(chunk, tail)}
            self.chunks = self.chunks - {tail} if holders else self.chunks | {tail}
            self.spare = self.spare | {tail} if holders and not holders & self.written else self.spare - {tail}
        self.chunks -= {tail for tail in self.chunks if any(self._holds(chunk, tail) for chunk in whole)}
        self.written |= self.chunks - before

    def restart(self) -> None:
        """Forget memory."""
        self.written.clear()

    def _holds(self, chunk: tuple[int, ...], tail: tuple[int, ...]) -> bool:
        begin = (len(chunk) - 1) // CHUNK * CHUNK
        return begin < len(tail) < len(chunk) and chunk[: len(tail)] == tail


@schedules(60)
@given(prompts=st.lists(PROMPTS, max_size=10), restarts=st.sets(st.integers(0, 9)), on_disk=st.booleans())
def test_the_longest_common_prefix_is_found(prompts: list[list[int]], restarts: set[int], *, on_disk: bool) -> None:
    """No block is stored twice."""
    rig, stock = Rig(), Stock()
    with TemporaryDirectory() as folder:
        where = {"local_disk": Path(folder)} if on_disk else {}
        engine, stored = rig.open(slots=64, **where), list[list[int]]()
        try:
            for number, prompt in enumerate(prompts):
                if number in restarts:
                    assert engine.flush()
                    engine.close()
                    engine, stored = rig.open(slots=64, **where), stored if on_disk else []
                    stock = stock if on_disk else Stock()
                    stock.restart()
                expected = shared_tokens(prompt, stored)
                assert engine.lookup(prompt) == rig.retrieve(engine, prompt) == expected
                rig.store(engine, prompt)
                stored.append(prompt)
                stock.add(prompt)
                assert engine.flush()
                assert len(stock.chunks) <= len(engine._planner.index) <= len(stock.chunks | stock.spare)
                assert engine.lookup(prompt) == len(prompt) // BLOCK * BLOCK
        finally:
            engine.close()


@schedules(60)
@given(prompts=st.lists(PROMPTS, max_size=8), hold_s=st.sampled_from([0.0, 60.0]))
def test_strangers_find_what_they_have_in_common(prompts: list[list[int]], hold_s: float) -> None:
    """They use a remote tier, through engines that have nothing themselves."""
    rig = Rig()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        check_strangers(rig, lambda: rig.open(slots=64, remote=replace(REMOTE, hold_s=hold_s)), prompts)


@pytest.mark.parametrize("shared", range(CHUNK, 2 * CHUNK, BLOCK // 2))
@pytest.mark.parametrize("from_disk", [False, True])
def test_a_part_of_a_chunk_touches_no_other_block(rig: Rig, tmp_path: Path, shared: int, from_disk: bool) -> None:
    """It may be loaded by layer, too, and from any block on. The rig checks every block that was not to be loaded."""
    one = tokens_of(1, 3 * CHUNK)
    other, found = [*one[:shared], *tokens_of(2, 2 * CHUNK)], shared // BLOCK * BLOCK
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, one)
        assert engine.flush()
    with rig.open(local_disk=tmp_path) as engine:
        if not from_disk:
            assert engine.prefetch(other) == found
        for skip in range(0, found + BLOCK, BLOCK):
            assert rig.retrieve(engine, other, skip) == max(0, found - skip)
        mapping = rig.slot_mapping(blocks := rig.blocks(len(other)), len(other))
        rig.poison()
        *_, loaded = engine.retrieve_layer(other, slot_mapping=mapping)
        assert loaded is not None
        assert int(loaded.sum()) == found
        for block in range(found // BLOCK):
            assert (rig.held(blocks[block]) == rig.expected(other, block)).all()


def test_two_chunks_that_share_blocks_both_lead_to_them(rig: Rig) -> None:
    head = tokens_of(1, CHUNK + 2 * BLOCK)
    one, other, asked = ([*head, *tokens_of(seed, CHUNK)] for seed in (2, 3, 4))
    for first, second in ((one, other), (other, one)):
        with rig.open() as engine:
            rig.store(engine, first)
            rig.store(engine, second)
            assert rig.retrieve(engine, asked) == len(head)
            engine._planner.index.remove(
                engine._planner.index.lookup(hash_tokens(rig.layout, first, NO_EXTRAS)).refs[1][:1]
            )
            assert rig.retrieve(engine, asked) == len(head), "the other one still does"


def test_what_is_cleared_is_found_by_no_way(rig: Rig) -> None:
    one = tokens_of(1, 2 * CHUNK)
    with rig.open() as engine:
        rig.store(engine, one)
        assert engine.clear(one[: 2 * BLOCK]) == 1
        assert engine.lookup(one) == engine.lookup(one[: 2 * BLOCK]) == 0


def test_chunks_stored_before_are_served_as_they_were(rig: Rig, tmp_path: Path) -> None:
    """The folder has no note of trails; chunks that are offered again are found by their block ends from then on."""
    one = tokens_of(1, 2 * CHUNK)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, one[: CHUNK + 2 * BLOCK])
        assert engine.flush()
    (note,) = tmp_path.glob("*/trails")
    note.unlink()
    with rig.open(local_disk=tmp_path) as engine:
        assert engine.lookup(one) == CHUNK + 2 * BLOCK, "the tail, by its key"
        assert engine.lookup(one[: CHUNK + BLOCK]) == CHUNK
        assert rig.store(engine, one[: CHUNK + 2 * BLOCK]) == 0
        assert rig.retrieve(engine, one[: CHUNK + BLOCK]) == CHUNK + BLOCK


def test_a_prompt_that_ends_inside_a_chunk_takes_nothing(rig: Rig, tmp_path: Path) -> None:
    one = tokens_of(1, 2 * CHUNK)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, one) == 2 * CHUNK
        assert engine.flush()
        for end in range(CHUNK + BLOCK, 2 * CHUNK, BLOCK):
            assert rig.store(engine, one[:end]) == 0
            assert rig.retrieve(engine, one[:end]) == end
        assert engine.stats().slots_in_use == 2
        assert engine.flush()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, one[: CHUNK + BLOCK]) == BLOCK, "nothing is in memory yet"
        assert rig.store(engine, one[: CHUNK + BLOCK]) == 0
        assert rig.retrieve(engine, one[: CHUNK + BLOCK]) == CHUNK + BLOCK
        assert engine.flush()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2, "nor on disk after a restart"


def test_a_chunk_is_written_in_the_stead_of_a_tail(rig: Rig, tmp_path: Path) -> None:
    """Its queue was full when the chunk was stored, so the next offer of a tail of it writes it."""
    one = tokens_of(1, 2 * CHUNK)
    with rig.open(local_disk=tmp_path, max_write_queue=1) as engine:
        rig.store(engine, one)
        assert not engine.flush()
        assert rig.store(engine, one[: CHUNK + BLOCK]) == 0
        assert engine.flush()
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, one) == 2 * CHUNK


def test_a_pin_of_a_prompt_that_ends_inside_a_chunk_holds_the_chunk(rig: Rig) -> None:
    one, short = tokens_of(1, 2 * CHUNK), tokens_of(1, CHUNK + 2 * BLOCK)
    others = [tokens_of(seed, CHUNK) for seed in range(2, 20)]
    with rig.open() as engine:
        rig.store(engine, short)
        assert engine.pin(short) == len(short)
        rig.store(engine, one)  # the tail becomes a part of its second chunk
        for other in others:
            rig.store(engine, other)
        assert rig.retrieve(engine, short) == len(short)
        assert engine.pin(short) == len(short), "once more, now by the chunk"
        engine.unpin(short)
        for other in others:
            rig.store(engine, other)
        assert rig.retrieve(engine, short) == 0
