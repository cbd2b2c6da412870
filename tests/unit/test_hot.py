"""Chunks kept on the device: faster the third time, never wrong, and nobody misses them. The device is the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.checks import check_idle
from support.rig import SLOT_BYTES, Rig, tokens_of

from kvstore.errors import ConfigError, TierError
from kvstore.tiers.gpu import GpuTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.engine import CacheEngine

TOKENS = tokens_of(1, 40)  # two chunks and a tail


@pytest.fixture
def rig() -> Rig:
    return Rig()


def from_gpu(engine: CacheEngine) -> int:
    """Chunks loaded from the device so far; no slot of it is lost."""
    hot = engine._tiers.hot
    assert hot is not None
    assert {ref for ref, _ in hot._gpu.scan()} == set(hot._order)
    return engine.stats().mover.chunks_loaded_from_gpu


def test_the_third_load_comes_from_the_device(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for expected in (0, 0, 3, 6):
            assert rig.retrieve(engine, TOKENS) == 40
            assert from_gpu(engine) == expected
        assert rig.retrieve(engine, TOKENS, skip=24) == 16, "from the middle of a chunk"
        assert from_gpu(engine) == 8
        check_idle(engine)


def test_a_part_of_a_chunk_is_not_kept_as_the_whole(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(4):
            assert rig.retrieve(engine, TOKENS, skip=24) == 16
        assert from_gpu(engine) == 2, "the tail, which was loaded whole"
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 3
        check_idle(engine)


def test_what_was_used_last_stays(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=3 * SLOT_BYTES) as engine:
        for seed in (1, 2):
            rig.store(engine, tokens_of(seed, 40))
            for _ in range(3):
                assert rig.retrieve(engine, tokens_of(seed, 40)) == 40
        assert from_gpu(engine) == 6
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 6, "displaced by the second sequence"
        check_idle(engine)


@pytest.mark.parametrize("forget", ["clear", "reset_cache"])
def test_what_is_forgotten_is_forgotten_there_too(rig: Rig, forget: str) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(3):
            rig.retrieve(engine, TOKENS)
        getattr(engine, forget)()
        assert rig.retrieve(engine, TOKENS) == 0
        rig.store(engine, TOKENS)
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 3
        check_idle(engine)


def test_it_outlives_a_place_in_memory(rig: Rig, tmp_path: Path) -> None:
    with rig.open(slots=3, local_disk=tmp_path, max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(3):
            rig.retrieve(engine, TOKENS)
        rig.store(engine, tokens_of(2, 48))
        assert engine.flush(30.0)
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 6
        check_idle(engine)


@pytest.mark.parametrize("call", ["gather", "scatter"])
def test_a_device_that_fails_is_left_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def broken(*_: object) -> None:
        raise TierError("broken on purpose")

    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        monkeypatch.setattr(GpuTier, call, broken)
        for _ in range(5):
            assert rig.retrieve(engine, TOKENS) == 40
        assert engine.stats().mover.chunks_loaded_from_gpu == 0
        assert caplog.text.count("the GPU tier is left out from now on: broken on purpose") == 1


def test_a_pool_without_room_for_a_chunk_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="max_local_gpu_size"):
        rig.open(max_local_gpu_bytes=SLOT_BYTES - 1)
    with rig.open():
        pass
