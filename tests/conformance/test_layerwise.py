"""Tests of stores and loads that advance one layer per ``next()``, with the same results as in one go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rig as rigs
from support.checks import check_idle
from support.faults import Fault, FaultInjector, FaultKind
from support.layer_calls import HANG_GUARD_S, LAYERS, TOKENS, WHOLE, Load, PartTier, load_layers, store_layers
from support.remote import REMOTE
from support.remote import install as install_remote
from support.rig import BLOCK, CHUNK, POISON, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine import opening
from kvstore.model.chunks import Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.transfer import layerwise
from kvstore.transfer.layerwise import layer_groups

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.base import Tier


@pytest.fixture
def rig() -> Rig:
    return Rig(num_layers=LAYERS)


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


# Order of reads


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
        engine._mover._lanes[next(iter(engine._mover._lanes))]._readers.shutdown(wait=True)  # ends all requested reads
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


# Faults


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

    monkeypatch.setattr(opening, "open_folders", open_broken)
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
        with pytest.raises(InvalidCallError, match="positive, not 0"):
            engine.store_layer(TOKENS, slot_mapping=[0], ttl_s=0)
