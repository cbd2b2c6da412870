"""Engines with quotas: an engine tells its disk whose a chunk is, and a restart with other quotas holds to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checks import check_idle
from support.invariants import check_invariants
from support.rig import CHUNK, FILE_BYTES, SLOT_BYTES, Rig, tokens_of

from kvstore.model.errors import ConfigError
from kvstore.model.keys import KeyExtras
from kvstore.model.quotas import QuotaRules

RED, BLUE = (KeyExtras(cache_salt=salt) for salt in ("a secret of red", "of blue"))


def quotas(in_memory: int, on_disk: int) -> QuotaRules:
    """Return quotas for so many chunks of red."""
    return QuotaRules(None, {RED.salt_name: in_memory * SLOT_BYTES}, {RED.salt_name: on_disk * FILE_BYTES})


def test_a_flood_stays_within_its_quota_and_a_restart_knows_whose_chunks_are_whose(tmp_path: Path) -> None:
    rig, folder = Rig(), tmp_path / "kv"
    with rig.open(slots=16, local_disk=folder, quotas=quotas(4, 8)) as engine:
        rig.store(engine, tokens_of(0, 4 * CHUNK), extras=BLUE)
        for number in range(1, 12):
            rig.store(engine, tokens_of(number, CHUNK), extras=RED)
            engine.flush()
        check_idle(engine)
        red, others = engine._planner.index.owners
        assert (red.memory.used_bytes, len(red.disk), others.evicted_memory, others.evicted_disk) == (4, 8, 0, 0)
        assert rig.retrieve(engine, tokens_of(0, 4 * CHUNK), extras=BLUE) == 4 * CHUNK
    with rig.open(slots=16, local_disk=folder, quotas=quotas(4, 2)) as engine:
        index = engine._planner.index
        check_invariants(index)
        red, others = index.owners
        assert (len(red.disk), len(others.disk)) == (2, 4)
        found = [rig.retrieve(engine, tokens_of(number, CHUNK), extras=RED) for number in range(1, 12)]
        assert sorted(found) == [0] * 9 + [CHUNK] * 2
        assert rig.retrieve(engine, tokens_of(0, 4 * CHUNK), extras=BLUE) == 4 * CHUNK
        check_idle(engine)
    with rig.open(slots=16, local_disk=folder) as engine:
        assert rig.retrieve(engine, tokens_of(1 + found.index(CHUNK), CHUNK), extras=RED) == CHUNK
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_chunks_stored_without_quotas_count_against_those_that_come(tmp_path: Path) -> None:
    rig, folder = Rig(), tmp_path / "kv"
    with rig.open(slots=16, local_disk=folder) as engine:
        rig.store(engine, tokens_of(1, 3 * CHUNK), extras=RED)
        rig.store(engine, tokens_of(1, 2 * CHUNK), extras=BLUE)
        rig.store(engine, tokens_of(1, CHUNK))
        engine.flush()
    with rig.open(slots=16, local_disk=folder, quotas=quotas(4, 8)) as engine:
        red, others = engine._planner.index.owners
        assert (len(red.disk), len(others.disk)) == (3, 3)


def test_a_reset_ends_what_was_counted(tmp_path: Path) -> None:
    rig = Rig()
    with rig.open(slots=16, local_disk=tmp_path / "kv", quotas=quotas(4, 8)) as engine:
        for reset in (engine.clear, engine.reset_cache):
            rig.store(engine, tokens_of(1, 3 * CHUNK), extras=RED)
            reset()
            engine.flush()
            red, _ = engine._planner.index.owners
            assert (red.memory.used_bytes, red.disk.used_bytes, red.memory.num_idle) == (0, 0, 0)
        assert rig.store(engine, tokens_of(1, 3 * CHUNK), extras=RED) == 3 * CHUNK
        check_idle(engine)
        check_invariants(engine._planner.index)


def test_pins_of_one_owner_are_bounded(tmp_path: Path) -> None:
    rig = Rig()
    with rig.open(slots=16, local_disk=tmp_path / "kv", quotas=quotas(4, 8)) as engine:
        rig.store(engine, tokens_of(1, 4 * CHUNK), extras=RED)
        rig.store(engine, tokens_of(1, 4 * CHUNK), extras=BLUE)
        assert engine.pin(tokens_of(1, 4 * CHUNK), extras=RED) == 2 * CHUNK
        assert engine.pin(tokens_of(1, 4 * CHUNK), extras=BLUE) == 4 * CHUNK


def test_a_quota_below_one_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not hold one chunk"):
        Rig().open(slots=16, local_disk=tmp_path / "kv", quotas=quotas(4, 0))
