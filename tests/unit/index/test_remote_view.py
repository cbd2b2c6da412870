"""A tier that several engines share: they find each other's chunks, and its faults cost only misses."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.checks import check_idle
from support.remote import REMOTE, FakeServer, install
from support.rig import BLOCK, BLOCKS_PER_CHUNK, CHUNK, Rig, tokens_of

from kvstore.index.plans import all_refs
from kvstore.index.remote_view import RemoteAnswers, RemoteView
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import PrefixHasher
from kvstore.transfer.lane import Flushed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.engine.engine import CacheEngine
    from kvstore.model.keys import Namespace

TOKENS = tokens_of(1, 40)  # two chunks and a tail of two blocks
HANG_GUARD_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return install(monkeypatch)


def store_elsewhere(rig: Rig, tokens: list[int] = TOKENS) -> None:
    """Let another engine store a sequence and close."""
    with rig.open(remote=REMOTE) as engine:
        assert rig.store(engine, tokens) == len(tokens)
        assert engine.flush(HANG_GUARD_S)


def broken() -> None:
    raise TierError("broken on purpose")


# Chunks of others


@pytest.mark.parametrize("local_cpu", [True, False])
def test_what_one_engine_stored_another_finds(rig: Rig, server: FakeServer, local_cpu: bool) -> None:
    store_elsewhere(rig)
    with rig.open(remote=REMOTE, local_cpu=local_cpu) as engine:
        assert engine.lookup(TOKENS) == 40
        assert engine.stats().slots_in_use == 0
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.stats().mover.chunks_loaded_from_remote == 3
        assert engine.stats().slots_in_use == (3 if local_cpu else 0)
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.stats().mover.chunks_loaded_from_remote == (3 if local_cpu else 6)
        check_idle(engine)


@pytest.mark.parametrize("known", [0, 16, 24, 32, 36])
def test_a_part_of_a_sequence(rig: Rig, server: FakeServer, known: int) -> None:
    """Whole chunks and tails are found, also those inside a chunk, which take a second round of questions."""
    if known:
        store_elsewhere(rig, TOKENS[:known])
    with rig.open(remote=REMOTE) as engine:
        assert engine.lookup(TOKENS) == known
        assert len(server.questions) <= 2 + (known > 0) * len(server.puts)  # and those before each put
        assert rig.retrieve(engine, TOKENS) == known
        assert rig.store(engine, TOKENS) == 40 - known + known % CHUNK
        check_idle(engine)


def test_one_sequence_from_all_tiers(rig: Rig, server: FakeServer, tmp_path: Path) -> None:
    tokens = tokens_of(1, 4 * CHUNK)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens[:CHUNK])
    store_elsewhere(rig, tokens[: 3 * CHUNK])
    server.lose(ref for ref in all_refs(hasher_of(tokens))[:2])
    with rig.open(local_disk=tmp_path, remote=REMOTE) as engine:
        rig.store(engine, tokens[: 2 * CHUNK])
        engine.flush(HANG_GUARD_S)
        server.lose(ref for ref in all_refs(hasher_of(tokens))[:2])
        assert engine.lookup(tokens) == 3 * CHUNK
        assert rig.retrieve(engine, tokens) == 3 * CHUNK
        check_idle(engine)


def test_answers_are_remembered_for_a_while(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    server.questions.clear()
    with rig.open(remote=REMOTE) as engine:
        for _ in range(3):
            assert engine.lookup(TOKENS) == 40
        assert len(server.questions) == 1
    server.questions.clear()
    with rig.open(remote=replace(REMOTE, hold_s=0.0)) as engine:
        assert [engine.lookup(TOKENS) for _ in range(3)] == [40, 40, 40], "an answer counts for the call that asked"
        assert len(server.questions) == 3, "and for no other"
        assert rig.retrieve(engine, TOKENS) == 40


def test_an_answer_counts_for_its_time_and_no_longer() -> None:
    view, ref = RemoteView(3.0), ChunkRef(b"k" * 16, 2)
    view.note([ref], [True], 0.0)
    assert view.holds(ref, 2.9) is True
    assert view.holds(ref, 3.0) is None


@pytest.mark.parametrize("hold_s", [0.0, 60.0])
def test_an_answer_that_is_held_for_nobody_else_is_enough_to_load(rig: Rig, server: FakeServer, hold_s: float) -> None:
    store_elsewhere(rig)
    for load in ("retrieve", "layers", "prefetch"):
        with rig.open(remote=replace(REMOTE, hold_s=hold_s)) as engine:
            if load == "prefetch":
                assert engine.prefetch(TOKENS) == 40
            elif load == "retrieve":
                assert rig.retrieve(engine, TOKENS) == 40
            else:
                mapping = rig.slot_mapping(rig.blocks(40, seed=7), 40)
                *_, loaded = engine.retrieve_layer(TOKENS, slot_mapping=mapping)
                assert loaded is not None
                assert int(loaded.sum()) == 40
            check_idle(engine)


def test_a_stale_yes_ends_in_a_recompute(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    with rig.open(remote=REMOTE) as engine:
        assert engine.lookup(TOKENS) == 40
        server.lose(all_refs(hasher_of(TOKENS))[1:])
        assert rig.retrieve(engine, TOKENS) == CHUNK
        assert engine.lookup(TOKENS) == CHUNK
        assert rig.store(engine, TOKENS) == 40 - CHUNK
        assert engine.flush(HANG_GUARD_S)
        assert len(server.all_chunks()) == 3
        check_idle(engine)


def test_a_prefetch_brings_it_into_memory(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    with rig.open(remote=REMOTE) as engine:
        assert engine.prefetch(TOKENS) == 40
        server.chunks.clear()
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


# Sends


def test_what_is_there_is_not_sent_again(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    server.puts.clear()
    with rig.open(remote=REMOTE) as engine:  # not asked before it stores: two replicas computed the same
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(HANG_GUARD_S)
        assert engine.stats().index.sends_done == 3
    with rig.open(remote=REMOTE) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
        assert rig.store(engine, TOKENS) == 0
        check_idle(engine)
    assert server.puts == []


def test_what_the_disk_kept_is_sent_when_it_is_used(rig: Rig, server: FakeServer, tmp_path: Path) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    with rig.open(local_disk=tmp_path, remote=REMOTE) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
        assert rig.store(engine, TOKENS) == 0
        assert engine.flush(HANG_GUARD_S)
        assert len(server.puts) == 3
        check_idle(engine)


def test_the_queue_is_bounded_and_made_good_for(rig: Rig, server: FakeServer) -> None:
    gate = threading.Event()
    server.before_put = lambda: gate.wait(HANG_GUARD_S)
    with rig.open(remote=replace(REMOTE, max_queue=1)) as engine:
        assert rig.store(engine, TOKENS) == 40
        assert engine.stats().index.sends_dropped == 2
        gate.set()
        assert engine.flush(HANG_GUARD_S) == Flushed(full=2)
        for dropped in (1, 0):
            assert rig.store(engine, TOKENS) == 0
            assert engine.flush(HANG_GUARD_S) == Flushed(full=dropped)
        assert len(server.all_chunks()) == 3
        check_idle(engine)


def test_what_has_a_time_to_live_is_not_sent(rig: Rig, server: FakeServer) -> None:
    with rig.open(remote=REMOTE) as engine:
        rig.store(engine, TOKENS, ttl_s=100.0)
        assert engine.flush(HANG_GUARD_S)
        assert server.puts == []


# Chunks that are forgotten


def test_clear_of_a_sequence(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    store_elsewhere(rig, tokens_of(2, 40))
    with rig.open(remote=REMOTE) as engine:
        assert engine.lookup(TOKENS) == 40
        assert engine.clear(TOKENS) == 0, "none of them is here"
        assert engine.lookup(TOKENS) == 0
        assert engine.lookup(tokens_of(2, 40)) == 40
        check_idle(engine)


@pytest.mark.parametrize("forget", ["clear", "reset_cache"])
def test_forgetting_everything(rig: Rig, server: FakeServer, forget: str) -> None:
    with rig.open(remote=REMOTE) as engine:
        rig.store(engine, TOKENS)
        assert engine.flush(HANG_GUARD_S)
        getattr(engine, forget)()
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(HANG_GUARD_S)
        assert engine.clear() == 3
        check_idle(engine)


def test_a_lookup_in_the_middle_of_a_reset_leaves_no_answer_about_what_is_gone(
    rig: Rig, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may look up between any two of its parts."""
    store_elsewhere(rig)
    with rig.open(remote=REMOTE) as engine:
        reset = engine._mover.reset

        def look_then_reset(namespace: Namespace) -> None:
            assert engine.lookup(TOKENS) == 40
            reset(namespace)

        monkeypatch.setattr(engine._mover, "reset", look_then_reset)
        engine.reset_cache()
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(HANG_GUARD_S)
        assert len(server.all_chunks()) == 3, "sent, although others have the old ones"
        check_idle(engine)


def test_after_changed_weights_nobody_shares(rig: Rig, server: FakeServer) -> None:
    with rig.open(remote=REMOTE) as engine:
        engine.reset_cache()
        rig.store(engine, TOKENS)
        assert engine.flush(HANG_GUARD_S)
        assert len(server.all_chunks()) == 3
        with rig.open(remote=REMOTE) as other:
            assert other.lookup(TOKENS) == 0


def test_after_changed_weights_what_was_stored_since_is_asked_for(rig: Rig, server: FakeServer) -> None:
    with rig.open(slots=3, remote=REMOTE) as engine:
        engine.reset_cache()
        rig.store(engine, TOKENS)
        assert engine.flush(HANG_GUARD_S)
        rig.store(engine, tokens_of(2, 48))  # takes the pool's place
        assert engine.flush(HANG_GUARD_S), "or its slots would be in use"
        assert engine._planner.view is not None
        engine._planner.view.clear()
        assert engine.lookup(TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40


# Faults


def test_a_tier_that_cannot_be_asked(rig: Rig, server: FakeServer, tmp_path: Path) -> None:
    """The other tiers continue."""
    store_elsewhere(rig)
    server.before_contains = server.before_get = server.before_put = broken
    with rig.open(remote=REMOTE, local_disk=tmp_path) as engine:
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(HANG_GUARD_S) == Flushed(failed=3)
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.stats().index.sends_failed == 3
        check_idle(engine)


def test_a_tier_that_cannot_be_read(rig: Rig, server: FakeServer) -> None:
    store_elsewhere(rig)
    with rig.open(remote=REMOTE) as engine:
        server.before_get = broken
        assert engine.lookup(TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 0
        assert engine.lookup(TOKENS) == 0, "not asked for again so soon"
        assert rig.store(engine, TOKENS) == 40
        check_idle(engine)


def test_a_lookup_that_hangs(rig: Rig, server: FakeServer, hanging: Callable[[], object]) -> None:
    server.before_contains = hanging
    with rig.open(remote=replace(REMOTE, lookup_timeout_s=0.1), io_timeout_s=0.2) as engine:
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40


def test_a_read_that_hangs(rig: Rig, server: FakeServer, hanging: Callable[[], object]) -> None:
    store_elsewhere(rig)
    server.before_get = hanging
    with rig.open(remote=REMOTE, io_timeout_s=0.2) as engine:
        assert rig.retrieve(engine, TOKENS) == 0
        assert engine.stats().mover.read_timeouts == 3
        assert rig.store(engine, TOKENS) > 0


@pytest.fixture
def hanging() -> object:
    gate = threading.Event()
    yield lambda: gate.wait(HANG_GUARD_S)
    gate.set()


@pytest.mark.parametrize("required", [False, True])
def test_a_tier_that_does_not_answer_at_start(
    rig: Rig, server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, required: bool
) -> None:
    def open_broken(kind: str, setup: object) -> object:
        tier = server.open(kind, setup)  # type: ignore[arg-type]
        monkeypatch.setattr(tier, "check", broken)
        return tier

    monkeypatch.setattr("kvstore.engine.opening.open_tier", open_broken)
    if required:
        with pytest.raises(TierError, match="broken on purpose"):
            rig.open(remote=replace(REMOTE, required=True))
        return
    with rig.open(remote=REMOTE) as engine:
        assert "cannot be used now: broken on purpose" in caplog.text
        assert works(rig, engine)


def works(rig: Rig, engine: CacheEngine) -> bool:
    return rig.store(engine, TOKENS) == 40 == rig.retrieve(engine, TOKENS)


# The view


def test_a_view_forgets() -> None:
    view = RemoteView(hold_s=10)
    one, two = (ChunkRef(bytes([number]) * 16, 1) for number in range(2))
    view.note([one, two], [True, False], now_s=0)
    assert (view.holds(one, 9), view.holds(two, 9)) == (True, False)
    assert view.unknown([one, two], 9) == []
    assert view.unknown([one, two], 10) == [one, two]
    view.note([one], [True], now_s=20)
    view.forget([one])
    assert view.holds(one, 20) is None


def test_a_view_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.index.remote_view.MAX_ANSWERS", 3)
    view = RemoteView(hold_s=10)
    refs = [ChunkRef(bytes([number]) * 16, 1) for number in range(5)]
    view.note(refs, [True] * 5, now_s=0)
    assert [view.holds(ref, 0) for ref in refs] == [None, None, True, True, True]


@pytest.mark.parametrize("hold_s", [0.0, 3.0])
@pytest.mark.parametrize("forgets", [False, True])
def test_who_asks_again_and_again_keeps_only_what_counts(hold_s: float, *, forgets: bool) -> None:
    """A request may wait for blocks, or for chunks of another engine, and asks at each step until then."""
    view, told = RemoteView(hold_s), RemoteAnswers()
    ref = ChunkRef(bytes(16), 1)
    for now_s in range(100):
        view.tell(told, {ref: now_s % 2 == 0 and not forgets}, now_s, view.serial)
        if forgets:
            told.forget_missing()
        assert len(told._heard) <= 3
    assert view.holds(ref, 99, told) is (None if forgets else False)


def hasher_of(tokens: list[int]) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(tokens)
    return hasher


def test_all_refs_are_those_a_store_may_make() -> None:
    refs = all_refs(hasher_of(TOKENS))
    assert [ref.num_blocks for ref in refs] == [BLOCKS_PER_CHUNK] * 2 + [1, 2, 3] * 2 + [1, 2]
    assert len({ref.prefix_key for ref in refs}) == len(refs)
