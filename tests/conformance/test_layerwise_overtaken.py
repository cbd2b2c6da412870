"""Tests of stores and loads by layers that are given up, or overtaken by other calls."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
from support import rig as rigs
from support.checks import check_idle
from support.layer_calls import (
    HANG_GUARD_S,
    LAYERS,
    TOKENS,
    WHOLE,
    Load,
    PartTier,
    end_abandoned,
    load_layers,
    store_layers,
)
from support.remote import REMOTE
from support.remote import install as install_remote
from support.rig import POISON, Rig, tokens_of
from support.uses import uses_of

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.model.chunks import Answer, Asked
    from kvstore.tiers.base import Transfer


@pytest.fixture
def rig() -> Rig:
    return Rig(num_layers=LAYERS)


# Generators given up


@pytest.mark.parametrize("advances", range(LAYERS + 2))
@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("way", ["close", "collect"])
def test_abandoned_loads(
    rig: Rig,
    tmp_path: Path,
    advances: int,
    from_disk: bool,
    way: str,
    layer_reads: None,
) -> None:
    with rig.open(local_disk=tmp_path, local_cpu=not from_disk) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        for _ in range(advances):
            next(load.loading)
        if way == "close":
            load.loading.close()
        del load
        gc.collect()
        end_abandoned(engine)
        assert uses_of(engine._planner.index) == 0
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


@pytest.mark.parametrize("advances", range(LAYERS + 2))
def test_abandoned_stores(rig: Rig, tmp_path: Path, advances: int) -> None:
    mapping = rig.compute(TOKENS, rig.blocks(len(TOKENS)))
    stored = WHOLE if advances >= LAYERS else 0
    with rig.open(local_disk=tmp_path) as engine:
        storing = engine.store_layer(TOKENS, slot_mapping=mapping)
        for _ in range(advances):
            assert engine.lookup(TOKENS) == 0
            next(storing)
        storing.close()
        end_abandoned(engine)
        assert engine.lookup(TOKENS) == stored
        assert rig.store(engine, TOKENS) == WHOLE - stored
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


@pytest.mark.parametrize("advances", range(1, LAYERS - 1))
@pytest.mark.parametrize("fails", [False, True])
def test_what_has_come_in_part_is_not_in_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, advances: int, fails: bool, layer_reads: None
) -> None:
    """A chunk whose load was given up, or lacks layers, is read again as a whole."""
    tier = PartTier(rig.layout)
    rigs.install(monkeypatch, tier)
    with rig.open(local_disk=rigs.__file__) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
    with rig.open(local_disk=rigs.__file__) as engine:
        load = Load(rig, engine, TOKENS)
        get_layers, victim = tier.get_layers, next(iter(tier.chunks))

        def fail_one(transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
            return [Outcome.FAILED] if transfers[0].ref == victim else get_layers(transfers, layers)

        with monkeypatch.context() as patch:
            next(load.loading)
            if fails:
                patch.setattr(tier, "get_layers", fail_one)
            for _ in range(1, advances):
                next(load.loading)
            load.loading.close()
            end_abandoned(engine)
        assert engine.stats().mover.chunks_loaded_from_disk == 0
        assert rig.retrieve(engine, TOKENS) == WHOLE
        assert engine.stats().mover.chunks_loaded_from_disk == 4
        check_idle(engine)


def test_nothing_is_written_after_a_load_was_given_up(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    layer_reads: None,
) -> None:
    """The slots of a load that was given up are not written to by reads still under way, and may be reused at once."""
    tier, gate = PartTier(rig.layout), threading.Event()
    rigs.install(monkeypatch, tier)
    with rig.open(local_disk=rigs.__file__, local_cpu=False, disk_io_threads=1) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        tier.before_get = lambda: len(tier.asked) < 4 or gate.wait(HANG_GUARD_S)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        load.loading.close()
        rig.poison()
        gate.set()
        engine._mover.in_background(lambda: None).result(HANG_GUARD_S)  # the layer under way has arrived
        assert all((rig.held(block) == POISON).all() for block in range(rig.num_blocks))
        end_abandoned(engine)
        assert all((rig.held(block) == POISON).all() for block in range(rig.num_blocks))
        assert load_layers(rig, engine, TOKENS) == WHOLE


@pytest.mark.parametrize("from_disk", [False, True])
def test_copies_that_raise(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    from_disk: bool,
    layer_reads: None,
) -> None:
    with rig.open(local_disk=tmp_path, local_cpu=not from_disk) as engine:
        storing = engine.store_layer(TOKENS, slot_mapping=rig.compute(TOKENS, rig.blocks(len(TOKENS))))
        next(storing)
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "gather_layers", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(storing)
        end_abandoned(engine)
        assert engine.lookup(TOKENS) == 0
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "scatter_layers", lambda layers, _: layers.start < 2 or 1 / 0)
            next(load.loading)
            next(load.loading)
            with pytest.raises(ZeroDivisionError):
                next(load.loading)
        end_abandoned(engine)
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


def test_the_collector_may_come_while_this_thread_has_the_locks(rig: Rig) -> None:
    with rig.open() as engine:
        rig.store(engine, TOKENS)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        with engine._move_lock, engine._planner.lock:
            load.loading.close()  # hangs here if it waits for either
        end_abandoned(engine)


def test_close_with_open_generators(rig: Rig, tmp_path: Path, layer_reads: None) -> None:
    engine = rig.open(local_disk=tmp_path, local_cpu=False)
    rig.store(engine, TOKENS)
    check_idle(engine)
    load = Load(rig, engine, TOKENS)
    storing = engine.store_layer(tokens_of(2, 16), slot_mapping=rig.compute(tokens_of(2, 16), rig.blocks(16)))
    next(load.loading)
    next(storing)
    assert engine.close(HANG_GUARD_S)
    for generator in (load.loading, storing):
        with pytest.raises(ClosedError):
            next(generator)
    with rig.open(local_disk=tmp_path) as engine:
        assert engine.lookup(tokens_of(2, 16)) == 0
        assert load_layers(rig, engine, TOKENS) == WHOLE


# Other calls in between


def test_a_store_and_a_load_of_one_step(rig: Rig, tmp_path: Path, layer_reads: None) -> None:
    """As in a model, each layer is loaded and computed, and its new KV is stored."""
    tokens = tokens_of(1, 64)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens[:32])
    with rig.open(local_disk=tmp_path) as engine:
        block_ids = rig.blocks(64, seed=9)
        mapping = rig.compute(tokens, block_ids)
        computed = [cache.clone() for cache in rig.caches.values()]
        rig.poison()
        loading = engine.retrieve_layer(tokens[:32], slot_mapping=mapping[:32])
        storing = engine.store_layer(tokens, [False] * 32 + [True] * 32, slot_mapping=mapping)
        for layer, cache in enumerate(rig.caches.values()):
            assert next(loading) is None
            cache[block_ids[8:16]] = computed[layer][block_ids[8:16]]
            assert next(storing) is None
        (loaded,), (stored,) = loading, storing
        assert loaded is not None
        assert loaded.all()
        assert stored == 32
        check_idle(engine)
        assert rig.retrieve(engine, tokens) == 64


@pytest.mark.parametrize("what", ["all", "others", "weights"])
def test_a_store_that_is_overtaken_stores_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    server = install_remote(monkeypatch)
    with rig.open(local_disk=tmp_path, remote=REMOTE) as engine:
        storing = engine.store_layer(TOKENS, slot_mapping=rig.compute(TOKENS, rig.blocks(len(TOKENS))))
        next(storing)
        if what == "weights":
            engine.reset_cache()
        else:
            engine.clear(None if what == "all" else tokens_of(2, 16))
        assert [*storing][-1] == 0
        check_idle(engine)
        assert engine.lookup(TOKENS) == 0
        assert not server.all_chunks()
        assert store_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_load_that_is_overtaken_by_clear(
    rig: Rig,
    tmp_path: Path,
    from_disk: bool,
    reset: bool,
    read_bytes: int,
) -> None:
    with rig.open(local_disk=tmp_path, local_cpu=not from_disk) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        engine.reset_cache() if reset else engine.clear()
        assert load.run_rest() == 0
        check_idle(engine)
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == WHOLE
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


@pytest.mark.parametrize("others", [False, True])
def test_a_load_that_is_overtaken_by_clear_of_a_sequence(rig: Rig, tmp_path: Path, others: bool) -> None:
    """In memory the slots keep their bytes until the load has ended, although the chunks were forgotten."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        engine.clear(tokens_of(2, 16) if others else TOKENS)
        rig.poison()
        for _ in range(LAYERS - 1):
            assert next(load.loading) is None
        for layer in range(2, LAYERS):  # the second one may have been under way
            assert load.right_tokens(layer) == 0
        assert load.run_rest() == 0
        check_idle(engine)
        assert engine.lookup(TOKENS) == (WHOLE if others else 0)


def test_what_the_remote_said_before_a_clear_counts_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    server = install_remote(monkeypatch)
    with rig.open(remote=REMOTE) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        for slot in range(engine.stats().slots):
            engine._tiers.cpu.claim(slot)
        rig.retrieve(engine, TOKENS)  # memory has lost it: only the remote tier holds it
        engine._planner.view.clear()  # type: ignore[union-attr]
        answer = engine._planner.directory.answer  # type: ignore[union-attr]

        def overtaken(refs: Sequence[Asked]) -> Sequence[Answer]:
            answers = answer(refs)
            monkeypatch.setattr(engine._planner.directory, "answer", answer)  # a clear also asks
            engine.clear(TOKENS)
            return answers

        monkeypatch.setattr(engine._planner.directory, "answer", overtaken)
        assert engine.lookup(TOKENS) == 0
        monkeypatch.undo()
        assert not server.all_chunks()


def test_two_loads_of_one_chunk(rig: Rig, tmp_path: Path, layer_reads: None) -> None:
    """The second one must not take the half-filled slot of the first for a chunk."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    with rig.open(local_disk=tmp_path) as engine:
        first = Load(rig, engine, TOKENS)
        next(first.loading)
        elsewhere = rig.slot_mapping(rig.blocks(58, among=sorted(set(range(64)) - set(first.block_ids))), 58)
        assert not engine.retrieve(TOKENS, slot_mapping=elsewhere).any()
        assert first.run_rest() == WHOLE
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


def test_many_threads(tmp_path: Path, layer_reads: None) -> None:
    """Each thread has its own blocks of one cache; all announced layers are right, and nothing is left in use."""
    rig = Rig(num_blocks=160, num_layers=LAYERS)
    errors: list[BaseException] = []
    with rig.open(local_disk=tmp_path, slots=8, use_odirect=False) as engine:

        def work(number: int) -> None:
            blocks = list(range(number * 40, number * 40 + 40))
            try:
                for turn in range(6):
                    tokens = tokens_of((number + turn) % 3, 40)
                    mapping = rig.compute(tokens, blocks[:10])
                    for count, _ in enumerate(engine.store_layer(tokens, slot_mapping=mapping)):
                        if turn == 4 and count == 2:
                            break
                    *_, loaded = engine.retrieve_layer(tokens, slot_mapping=rig.slot_mapping(blocks[20:30], 40))
                    assert loaded is not None
                    rig.check(tokens, blocks[20:30], 0, int(loaded.sum()))
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_GUARD_S)
        assert not errors
        end_abandoned(engine)
