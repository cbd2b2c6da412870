"""Stores and loads that advance one layer per ``next()``: the same as in one go, whatever happens in between."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import rig as rigs
from support.checks import check_idle
from support.faults import Fault, FaultInjector, FaultKind
from support.remote import REMOTE
from support.remote import install as install_remote
from support.rig import BLOCK, CHUNK, POISON, FakeTier, Rig, tokens_of
from support.schedules import schedules

from kvstore import assembly
from kvstore.chunks import Outcome
from kvstore.errors import ClosedError, InvalidCallError
from kvstore.layout import KVLayout
from kvstore.tiers.disk.striped import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.transfer import layerwise
from kvstore.transfer.layerwise import layer_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.chunks import ChunkRef
    from kvstore.engine import CacheEngine
    from kvstore.tiers.base import Tier, Transfer

LAYERS = 6
TOKENS = tokens_of(1, 58)  # three chunks, a tail of two blocks, and two tokens more
WHOLE = 56
HANG_GUARD_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig(num_layers=LAYERS)


@pytest.fixture(params=[1, 1 << 20], ids=["a layer a read", "all layers in one read"])
def read_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size_bytes: int = request.param
    monkeypatch.setattr(layerwise, "READ_BYTES", size_bytes)
    return size_bytes


@pytest.fixture
def layer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of its own for every layer."""
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)


def store_layers(rig: Rig, engine: CacheEngine, tokens: Sequence[int], **keywords: Any) -> int:
    """Compute a sequence layer by layer, each just before its ``next()``, and poison the cache at the end."""
    block_ids = rig.blocks(len(tokens), seed=len(tokens))
    mapping = rig.compute(tokens, block_ids)
    computed = [cache.clone() for cache in rig.caches.values()]
    rig.poison()
    storing = engine.store_layer(tokens, slot_mapping=mapping, **keywords)
    for cache, layer in zip(rig.caches.values(), computed, strict=True):
        cache.copy_(layer)
        assert next(storing) is None
        cache.fill_(POISON)
    (stored,) = storing
    assert stored is not None
    return stored


class Load:
    """A ``retrieve_layer`` into blocks of its own."""

    def __init__(self, rig: Rig, engine: CacheEngine, tokens: Sequence[int], skip: int = 0) -> None:
        self.rig, self.tokens, self.skip = rig, tokens, skip
        self.block_ids = rig.blocks(len(tokens), seed=len(tokens) + 1)
        mask = [position >= skip for position in range(len(tokens))] if skip else None
        mapping = rig.slot_mapping(self.block_ids, len(tokens))
        self.loading = engine.retrieve_layer(tokens, mask, slot_mapping=mapping)

    def layer_is_right(self, layer: int, block: int) -> bool:
        part = np.split(self.rig.expected(self.tokens, block), LAYERS)[layer]
        return np.array_equal(self.rig.layer(layer, self.block_ids[block]), part)

    def right_tokens(self, layer: int) -> int:
        """How many tokens behind the skipped ones have their KV in one layer."""
        blocks = range(self.skip // BLOCK, len(self.tokens) // BLOCK)
        return sum(self.layer_is_right(layer, block) for block in blocks) * BLOCK

    def run_rest(self) -> int:
        """Whatever layers are left. Returns the tokens loaded."""
        *_, loaded = self.loading
        assert loaded is not None
        self.rig.check(self.tokens, self.block_ids, self.skip, self.skip + int(loaded.sum()))
        return int(loaded.sum())

    def run(self) -> int:
        """All layers, each of which must be right as soon as it is announced. Returns the tokens loaded."""
        right = []
        for layer in range(LAYERS):
            assert next(self.loading) is None
            right.append(self.right_tokens(layer))
        (loaded,) = self.loading
        assert loaded is not None
        assert (loaded.dtype, loaded.shape, loaded.device.type) == (torch.bool, (len(self.tokens),), "cpu")
        count = int(loaded.sum())
        assert bool(loaded[self.skip : self.skip + count].all())
        assert min(right) >= count
        if count:
            self.rig.check(self.tokens, self.block_ids, self.skip, self.skip + count)
        return count


def load_layers(rig: Rig, engine: CacheEngine, tokens: Sequence[int], skip: int = 0) -> int:
    """Retrieve into a poisoned cache; blocks that were skipped or not asked for must be untouched."""
    rig.poison()
    load = Load(rig, engine, tokens, skip)
    count = load.run()
    touched = {load.block_ids[block] for block in range(skip // BLOCK, len(tokens) // BLOCK)}
    assert all((rig.held(b) == POISON).all() for b in range(rig.num_blocks) if b not in touched)
    return count


def end_abandoned(engine: CacheEngine) -> None:
    """The next call that moves KV, and the end of all that went before."""
    engine.prefetch([])
    check_idle(engine)


# The same as in one go


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 15, 16, 20, 32, 35, 63])
def test_round_trip_in_memory(rig: Rig, num_tokens: int) -> None:
    tokens, whole = tokens_of(1, num_tokens), num_tokens - num_tokens % BLOCK
    with rig.open() as engine:
        assert load_layers(rig, engine, tokens) == 0  # nothing known
        assert store_layers(rig, engine, tokens) == whole
        assert load_layers(rig, engine, tokens) == rig.retrieve(engine, tokens) == whole
        assert store_layers(rig, engine, tokens) == 0  # known
        check_idle(engine)


@pytest.mark.parametrize("direct", [None, False])
def test_round_trip_over_the_disk(
    rig: Rig, tmp_path: Path, direct: bool | None, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Transfer]] = []
    get_layers = DiskTier.get_layers

    def noted(tier: DiskTier, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        asked.append(transfers)
        return get_layers(tier, transfers, layers)

    monkeypatch.setattr(DiskTier, "get_layers", noted)
    with rig.open(local_disk=tmp_path, use_odirect=direct) as engine:
        assert store_layers(rig, engine, TOKENS) == WHOLE
    with rig.open(local_disk=tmp_path, use_odirect=direct) as engine:
        assert load_layers(rig, engine, TOKENS) == WHOLE
        assert engine.stats().mover.chunks_loaded_from_disk == 4
        assert load_layers(rig, engine, TOKENS) == WHOLE  # promoted
        stats = engine.stats()
        assert (stats.mover.chunks_loaded_from_disk, stats.mover.chunks_loaded) == (4, 8)
        assert stats.mover.bytes_scattered == 2 * rig.layout.payload_bytes(WHOLE // BLOCK)
        assert stats.disk is not None
        assert stats.disk.hits == 4  # however many reads it took
        assert [len(transfers) for transfers in asked] == [1] * 4 * (LAYERS if read_bytes == 1 else 1)
        assert stats.disk.bytes_read == rig.layout.payload_bytes(WHOLE // BLOCK)
        check_idle(engine)


@pytest.mark.parametrize("skip", [0, 4, 16, 20, 36, 52, 56, 58])
@pytest.mark.parametrize("from_disk", [False, True])
def test_masked_retrieve(rig: Rig, tmp_path: Path, skip: int, from_disk: bool, layer_reads: None) -> None:
    engine = rig.open(local_disk=tmp_path)
    rig.store(engine, TOKENS)
    if from_disk:
        engine.close()
        engine = rig.open(local_disk=tmp_path)
    with engine:
        assert load_layers(rig, engine, TOKENS, skip) == max(0, WHOLE - skip)
        check_idle(engine)


@pytest.mark.parametrize(("skip", "stored"), [(0, 44), (4, 28), (16, 28), (36, 0), (47, 0)])
def test_masked_store(rig: Rig, skip: int, stored: int) -> None:
    tokens = tokens_of(1, 47)
    with rig.open() as engine:
        assert store_layers(rig, engine, tokens, mask=[position >= skip for position in range(47)]) == stored
        assert store_layers(rig, engine, tokens) == 44 - stored
        assert rig.retrieve(engine, tokens) == 44
        check_idle(engine)


@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_prefix_spread_over_three_tiers(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local_cpu: bool,
    read_bytes: int,
) -> None:
    server = install_remote(monkeypatch)
    tokens = tokens_of(1, 60)
    with rig.open(remote=REMOTE) as engine:
        rig.store(engine, tokens)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens[:32])
    with rig.open(local_disk=tmp_path, remote=REMOTE, local_cpu=local_cpu) as engine:
        rig.retrieve(engine, tokens[:16])
        assert load_layers(rig, engine, tokens) == 60
        assert engine.stats().mover.chunks_loaded_from_remote == 2
        check_idle(engine)
        engine.clear()
    assert len(server.all_chunks()) == 0


def test_several_folders(rig: Rig, tmp_path: Path, layer_reads: None) -> None:
    folders = (tmp_path / "a", tmp_path / "b")
    tokens = tokens_of(1, 128)
    with rig.open(local_disk=folders, slots=16) as engine:
        assert store_layers(rig, engine, tokens) == 128
    with rig.open(local_disk=folders, slots=16) as engine:
        assert load_layers(rig, engine, tokens) == 128
        stats = engine.stats().disk
        assert stats is not None
        assert (stats.hits, stats.bytes_read) == (8, rig.layout.payload_bytes(32))
        check_idle(engine)


@schedules()
@given(
    stored=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90), st.booleans()), max_size=4),
    asked=st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(0, 22)),
    slots=st.integers(1, 8),
    local_cpu=st.booleans(),
    read_bytes=st.sampled_from([1, 600, 1 << 20]),
)
def test_it_loads_what_retrieve_loads(
    tmp_path_factory: pytest.TempPathFactory,
    stored: list[tuple[int, int, bool]],
    asked: tuple[int, int, int],
    slots: int,
    local_cpu: bool,
    read_bytes: int,
) -> None:
    rig, counts = Rig(num_layers=LAYERS), []
    seed, length, skip_blocks = asked
    skip = min(skip_blocks, length // BLOCK) * BLOCK
    for retrieve in (load_layers, Rig.retrieve):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layerwise, "READ_BYTES", read_bytes)
            folder = tmp_path_factory.mktemp("disk")
            with rig.open(slots=slots, local_cpu=local_cpu, local_disk=folder, use_odirect=False) as engine:
                for which, count, by_layer in stored:
                    (store_layers if by_layer else Rig.store)(rig, engine, tokens_of(which, count))
                    assert engine.flush()
                counts.append(retrieve(rig, engine, tokens_of(seed, length), skip))
                check_idle(engine)
    assert counts[0] == counts[1]


# How it reads


class PartTier(FakeTier):
    """A tier in memory that can read layers, and notes which."""

    @property
    def reads_layers(self) -> bool:
        return True

    def __init__(self, layout: KVLayout) -> None:
        super().__init__()
        self.layout = layout
        self.asked: list[tuple[ChunkRef, int]] = []

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        self.before_get()
        for ref, buffer, _ in transfers:
            begin = self.layout.layer_range(layers.start, ref.num_blocks)[0]
            end = self.layout.layer_range(layers[-1], ref.num_blocks)[1]
            buffer[begin:end] = np.frombuffer(self.chunks[ref], np.uint8)[begin:end]
            self.asked += [(ref, layer) for layer in layers]
        return [Outcome.HIT] * len(transfers)


def test_the_first_layers_of_all_chunks_come_before_the_next_ones(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    layer_reads: None,
) -> None:
    tier = PartTier(rig.layout)
    rigs.install(monkeypatch, tier)
    with rig.open(local_disk=rigs.__file__, local_cpu=False, disk_io_threads=1) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        assert load.right_tokens(0) == WHOLE
        assert load.run_rest() == WHOLE
    assert [layer for _, layer in tier.asked] == [layer for layer in range(LAYERS) for _ in range(4)]


def test_it_does_not_read_far_ahead(rig: Rig, monkeypatch: pytest.MonkeyPatch, layer_reads: None) -> None:
    tier = PartTier(rig.layout)
    rigs.install(monkeypatch, tier)
    with rig.open(local_disk=rigs.__file__, local_cpu=False) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        engine._mover._lanes[next(iter(engine._mover._lanes))]._readers.shutdown(wait=True)  # all that was asked for
        assert {layer for _, layer in tier.asked} == set(
            range(2 + layerwise.READ_AHEAD_GROUPS)
        )  # layer 1 is on its way


def test_groups_of_layers() -> None:
    def groups(*page_kib: int) -> list[list[int]]:
        layout = KVLayout(tuple(size << 10 for size in page_kib), planes=2, block_tokens=16, chunk_tokens=256)
        return [list(group) for group in layer_groups(layout)]  # a layer of a chunk has 32 pages

    assert groups(32, 64, 32) == [[0], [1], [2]]
    assert groups(16, 16, 8, 8, 8, 8, 32, 1) == [[0, 1], [2, 3, 4], [5, 6], [7]]
    assert groups(1, 1) == [[0, 1]]


# What goes wrong


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_a_chunk_damaged_in_the_middle(rig: Rig, tmp_path: Path, layer: int, layer_reads: None) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS[:32])
        assert engine.flush()
        rig.store(engine, TOKENS)
    for path in tmp_path.glob("*/*/*.safetensors"):
        content = bytearray(path.read_bytes())
        if rig.expected(TOKENS, 5).tobytes()[:64] in bytes(content):  # the second chunk has the blocks 4 to 7
            content[4096 + layer * CHUNK * 16 + 70] ^= 1
            path.write_bytes(content)
    with rig.open(local_disk=tmp_path) as engine:
        rig.poison()
        load = Load(rig, engine, TOKENS)
        for done in range(LAYERS):
            assert next(load.loading) is None
            right = [load.layer_is_right(done, block) for block in range(WHOLE // BLOCK)]
            assert right == [True] * 4 + [done < layer] * 4 + [True] * 6
            if done >= layer:
                assert all((rig.layer(done, load.block_ids[block]) == POISON).all() for block in range(4, 8))
        (loaded,) = load.loading
        assert loaded is not None
        assert loaded.tolist() == [True] * CHUNK + [False] * (len(TOKENS) - CHUNK)
        check_idle(engine)
        assert engine.stats().index.lost_chunks == 1
        assert rig.retrieve(engine, TOKENS) == CHUNK
        assert rig.store(engine, TOKENS) == CHUNK  # computed again
        assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.FAILED, FaultKind.MISS, FaultKind.CORRUPT])
@pytest.mark.parametrize("call", [0, 5, 9, 23])
def test_a_tier_that_fails_in_the_middle(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: FaultKind,
    call: int,
    layer_reads: None,
) -> None:
    def open_broken(*arguments: Any, wrap: object, **keywords: Any) -> Tier:
        fault = Fault(kind, "get_layers", calls=(call,))
        return FaultInjector(open_folders(*arguments, **keywords), [fault])

    monkeypatch.setattr(assembly, "open_folders", open_broken)
    with rig.open(local_disk=tmp_path, local_cpu=False, disk_io_threads=1) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        count = load_layers(rig, engine, TOKENS)
        assert count == call % 4 * CHUNK  # the chunks before the one that failed
        check_idle(engine)
        if kind in {FaultKind.ERROR, FaultKind.FAILED}:  # the chunk is still there
            assert load_layers(rig, engine, TOKENS) == WHOLE
        check_idle(engine)


def test_a_read_that_hangs_keeps_its_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch, layer_reads: None) -> None:
    tier, gate = PartTier(rig.layout), threading.Event()
    rigs.install(monkeypatch, tier)
    with rig.open(local_disk=rigs.__file__, local_cpu=False, io_timeout_s=0.3, slots=2) as engine:
        rig.store(engine, TOKENS[:16])
        check_idle(engine)
        tier.before_get = lambda: gate.wait(HANG_GUARD_S)
        try:
            assert load_layers(rig, engine, TOKENS[:16]) == 0
            assert len(engine._mover._stuck) == 1
            ((slot, pending),) = engine._mover._stuck.items()
            assert engine._mover.is_stuck(slot)
            rig.store(engine, tokens_of(2, 32))  # needs both slots: one of the chunks fails
            assert engine.stats().index.failed_stores == 1
        finally:
            gate.set()
        assert [read.result(HANG_GUARD_S) for read in pending] == [[Outcome.HIT]] * len(pending)
        check_idle(engine)
        assert store_layers(rig, engine, tokens_of(3, 32)) == 32


def test_bad_calls_are_refused_at_once(rig: Rig) -> None:
    with rig.open() as engine:
        for call in (engine.store_layer, engine.retrieve_layer):
            with pytest.raises(InvalidCallError, match="slot_mapping"):
                call(TOKENS, slot_mapping=[0])
            with pytest.raises(InvalidCallError, match="mask"):
                call(TOKENS, [True], slot_mapping=[0])
        with pytest.raises(InvalidCallError, match="0 s"):
            engine.store_layer(TOKENS, slot_mapping=[0], ttl_s=0)


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
        assert engine._index.uses == 0
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
    """Given up before all layers were asked for, or with layers that do not come: it is read again, as a whole."""
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
    """Its slots may be used for something else at once, though reads are still on their way."""
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
        engine._mover.aside(lambda: None).result(HANG_GUARD_S)  # the layer that was on its way has come
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
            patch.setattr(engine._mover.paged, "gather_layer", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(storing)
        end_abandoned(engine)
        assert engine.lookup(TOKENS) == 0
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "scatter_layer", lambda layer, _: layer < 2 or 1 / 0)
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
        with engine._move_lock, engine._index_lock:
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
    """As a model does it: a layer is loaded, computed, and what is new of it is stored."""
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
    """In memory the slots keep their bytes until the load has ended; all the same they were forgotten."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        load = Load(rig, engine, TOKENS)
        next(load.loading)
        engine.clear(tokens_of(2, 16) if others else TOKENS)
        rig.poison()
        for _ in range(LAYERS - 1):
            assert next(load.loading) is None
        for layer in range(2, LAYERS):  # the second one may have been on its way
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
        engine._view.clear()  # type: ignore[union-attr]
        answer = engine._directory.answer  # type: ignore[union-attr]

        def overtaken(refs: Sequence[ChunkRef]) -> Sequence[bool | None]:
            answers = answer(refs)
            engine.clear(TOKENS)
            return answers

        monkeypatch.setattr(engine._directory, "answer", overtaken)
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
    """Each with its own blocks of one cache; what is announced is right, and nothing is left over."""
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
