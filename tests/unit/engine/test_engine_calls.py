"""Calls that the engine refuses, and engines that cannot be opened."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checks import check_idle
from support.gate import HANG_GUARD_S
from support.remote import REMOTE
from support.remote import install as install_remote
from support.rig import POISON, Rig, tokens_of

from kvstore.model.errors import ClosedError, ConfigError, FolderOwnedError, InvalidCallError, TierError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_slot_mappings_that_are_refused(rig: Rig) -> None:
    tokens = tokens_of(1, 20)
    good = rig.slot_mapping(rig.blocks(20), 20)
    cases: list[tuple[list[int], str]] = [
        (good[:-1], "shape"),
        (
            [*good[:9], good[9] + 1, *good[10:]],
            rf"slot_mapping\[9\] = {good[9] + 1}: tokens must fill whole blocks of 4 slots",
        ),
        ([*good[:4], *(slot + 1 for slot in good[4:8]), *good[8:]], rf"slot_mapping\[4\] = {good[4] + 1}: "),
        ([*good[:16], -4, -3, -2, -1], r"slot_mapping\[16\] = -4 is not in 0..255"),
        ([*good[:8], *([-1] * 4), *good[12:]], r"slot_mapping\[8\] = -1: "),
        ([*good[:16], 256, 257, 258, 259], r"slot_mapping\[16\] = 256 is not in 0..255"),
    ]
    with rig.open() as engine:
        for mapping, message in cases:
            with pytest.raises(InvalidCallError, match=message):
                engine.store(tokens, slot_mapping=mapping)
        rig.store(engine, tokens)
        for mapping, message in cases:
            with pytest.raises(InvalidCallError, match=message):
                engine.retrieve(tokens, slot_mapping=mapping)
        check_idle(engine)
        assert all((rig.held(block) == POISON).all() for block in range(rig.num_blocks))


def test_slots_of_masked_and_unfinished_blocks_do_not_matter(rig: Rig) -> None:
    tokens = tokens_of(1, 22)
    block_ids = rig.blocks(22)
    mapping = rig.compute(tokens, block_ids)
    mapping[20:] = [-1, 10**9]
    with rig.open() as engine:
        assert engine.store(tokens, slot_mapping=mapping) == 20
        rig.poison()
        mapping[:8] = [-1] * 8
        loaded = engine.retrieve(tokens, [False] * 8 + [True] * 14, slot_mapping=mapping)
        assert loaded.tolist() == [False] * 8 + [True] * 12 + [False] * 2
        rig.check(tokens, block_ids, 8, 20)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True] * 19, "shape"),
        ([True] * 8 + [False] * 12, "token 8 is False again"),
        ([False] * 4 + [True] * 4 + [False] * 4 + [True] * 8, "token 8 is False again"),
        ([False] * 3 + [True] * 17, "3 tokens, not a multiple of the block size 4"),
    ],
)
def test_masks_that_are_refused(rig: Rig, mask: list[bool], message: str) -> None:
    tokens, mapping = tokens_of(1, 20), rig.slot_mapping(rig.blocks(20), 20)
    with rig.open() as engine:
        for call in (engine.store, engine.retrieve):
            with pytest.raises(InvalidCallError, match=message):
                call(tokens, mask, slot_mapping=mapping)
        check_idle(engine)


def test_bad_tokens(rig: Rig) -> None:
    with rig.open() as engine:
        for bad in ([-1] * 4, [2**32] * 4, np.zeros((2, 2)), np.zeros(4)):
            with pytest.raises(InvalidCallError):
                engine.lookup(bad)


def test_everything_is_refused_after_close(rig: Rig, tmp_path: Path) -> None:
    engine = rig.open(local_disk=tmp_path)
    tokens, mapping = tokens_of(1, 16), rig.slot_mapping(rig.blocks(16), 16)
    rig.store(engine, tokens)
    assert engine.close()
    assert engine.close()
    for call in (
        lambda: engine.lookup(tokens),
        lambda: engine.store(tokens, slot_mapping=mapping),
        lambda: engine.retrieve(tokens, slot_mapping=mapping),
        lambda: engine.clear(tokens),
        engine.clear,
        engine.flush,
    ):
        with pytest.raises(ClosedError):
            call()
    assert engine.stats().index.stored == 1


def test_what_cannot_be_opened_leaves_no_lock_behind(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not hold one chunk"):
        rig.open(slots=0, local_disk=tmp_path)
    with pytest.raises(ConfigError, match="lower max_local_cpu_size"):
        rig.open(slots=2**50, local_disk=tmp_path)
    with pytest.raises(ConfigError, match="single chunk"):
        rig.open(local_disk=tmp_path, max_local_disk_bytes=10)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.disk.tier.DiskTier.scan", lambda _self: 1 / 0)
        with pytest.raises(TierError, match="ZeroDivisionError"):
            rig.open(local_disk=tmp_path)
    with rig.open(local_disk=tmp_path) as engine:
        with pytest.raises(FolderOwnedError):
            rig.open(local_disk=tmp_path)
        assert rig.store(engine, tokens_of(1, 16)) == 16


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvstore")}


@pytest.mark.parametrize(
    "options",
    [
        {"cache_policy": "LRUU"},
        {"disk_policy": "LRUU"},
        {"cache_policy": "LRUU", "remote": REMOTE},
        {"disk_io_threads": 0},
        {"disk_io_threads": -1},
        {"io_timeout_s": 0.0},
        {"remote": replace(REMOTE, io_threads=0)},
        {"remote": replace(REMOTE, lookup_timeout_s=0.0)},
        {"remote": replace(REMOTE, peers=("kvs://127.0.0.1:1", "nowhere"))},
    ],
    ids=",".join,
)
@pytest.mark.parametrize("num_folders", [1, 2])
def test_a_start_that_fails_late_leaves_nothing_open(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_folders: int
) -> None:
    folders = tuple(tmp_path / str(number) for number in range(num_folders))
    before = our_threads()
    with monkeypatch.context() as patch:
        install_remote(patch)
        with pytest.raises(ValueError, match=r"LRUU|max_workers|positive|failures >= 1|nowhere"):
            rig.open(local_disk=folders, **options)
    for thread in our_threads() - before:
        thread.join(HANG_GUARD_S)
        assert not thread.is_alive(), thread.name
    assert not our_threads() - before
    with rig.open(local_disk=folders) as engine:
        assert rig.store(engine, tokens_of(1, 16)) == 16
