"""Chunks with a time to live among what tools read: shown, checked, and in no pack."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE, flip_payload, make_ref, make_transfer

from kvstore.format.chunkfile import chunk_name
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.inspection import inspect_target
from kvstore.tools.pack import Source, Target, export, import_pack
from kvstore.tools.verify import verify

LAYOUT = replace(EVEN, element="bf16")
LASTING, PASSING = make_ref(1), make_ref(2)
END_S = 4_000_000_000


def path_of(folder: Path, ref: ChunkRef, until_s: int | None = END_S) -> Path:
    return folder / MINE.id.hex() / chunk_name(ref, until_s)


def open_tier(folder: Path) -> DiskTier:
    tier = DiskTier(folder, MINE, LAYOUT, 1 << 24)
    tier.scan()
    return tier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(open_tier(tmp_path / "cache")) as tier:
        for ref, until_s in ((LASTING, None), (PASSING, END_S)):
            assert tier.put([make_transfer(ref, LAYOUT)._replace(until_s=until_s)]) == [Outcome.STORED]
    return tmp_path / "cache"


def test_a_pack_has_none(folder: Path, tmp_path: Path) -> None:
    """It would keep them for ever. Those that are asked for by their prompts are missing."""
    source = Source(folder)
    assert source.refs() == [LASTING]
    report = export(source, tmp_path / "all.kvpack")
    assert (report.chunks, report.missing) == (1, 0)
    report = export(source, tmp_path / "some.kvpack", refs=[LASTING, PASSING])
    assert (report.chunks, report.missing) == (1, 1)


def test_an_imported_chunk_has_no_end(folder: Path, tmp_path: Path) -> None:
    export(Source(folder), tmp_path / "a.kvpack")
    with closing(open_tier(tmp_path / "target")) as tier:
        assert tier.put([make_transfer(LASTING, LAYOUT)._replace(until_s=END_S)]) == [Outcome.STORED]
    report = import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",)))
    assert (report.chunks, report.present) == (0, 1)
    with closing(open_tier(tmp_path / "target")) as tier:
        assert (tier.contains([LASTING]), tier.lifetimes()) == ([True], [])


def test_a_damaged_file_does_not_cost_another_of_the_same_chunk(folder: Path) -> None:
    sound = path_of(folder, LASTING, None)
    damaged = path_of(folder, LASTING)
    damaged.write_bytes(sound.read_bytes())
    flip_payload(damaged)
    report = verify(str(folder), fix=True)
    assert report.chunks == 3
    assert [(fault.place, fault.fixed) for fault in report.faults] == [(str(damaged), True)]
    assert sound.exists()
    assert not damaged.exists()
    assert path_of(folder, PASSING).exists()


def test_the_end_is_shown(folder: Path) -> None:
    shown = inspect_target(str(path_of(folder, PASSING)))
    assert (shown["sound"], shown["expires"]) == (True, "2096-10-02T07:06:40+00:00")
    found = inspect_target(PASSING.prefix_key.hex(), folder=folder)
    assert found["expires"] == shown["expires"]
    assert "expires" not in inspect_target(str(path_of(folder, LASTING, None)))
