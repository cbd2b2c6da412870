"""Every layout through the whole engine: loads bring the same bytes into other blocks, and touch nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support.layouts import LAYOUTS, B, N, Paged, alike, ordered, put_blocks, snapshot, take_blocks

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.model.errors import LayoutError
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv

CHUNK_BLOCKS = 4
TOKENS = list(range(6 * N))  # a chunk, and a tail of two blocks
SOURCES = [7, 0, 11, 3, 8, 5]
TARGETS = [2, 9, 0, 7, 10, 6]
SKIPS = (0, 3)  # blocks that the request has already
# Elements of two bytes and of one; those of the other type of one byte, which are the same bytes, in the soak only.
DTYPES = [
    torch.bfloat16,
    pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow),
    pytest.param(torch.uint8, marks=pytest.mark.soak),
]


def open_engine(paged: Paged, folder: Path | None) -> CacheEngine:
    bound = bind_paged_kv(paged.caches, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
    options = EngineOptions(
        4 * bound.layout.slot_bytes,
        local_disk=folder,
        max_local_disk_bytes=1 << 24 if folder else 0,
        use_odirect=False,
    )
    return CacheEngine(bound, Namespace({"layout": bound.layout.fingerprint}), options)


def slots_of(blocks: list[int]) -> list[int]:
    return [block * N + token for block in blocks for token in range(N)]


def store(engine: CacheEngine, *, layerwise: bool) -> None:
    slots = slots_of(SOURCES)
    stored = (
        [*engine.store_layer(TOKENS, slot_mapping=slots)][-1] if layerwise else engine.store(TOKENS, slot_mapping=slots)
    )
    assert stored == len(TOKENS)


def retrieve(engine: CacheEngine, skip_blocks: int, *, layerwise: bool) -> None:
    """Load all but the first blocks, which the request has already."""
    slots, mask = slots_of(TARGETS), [token >= skip_blocks * N for token in range(len(TOKENS))]
    if layerwise:
        loaded = [*engine.retrieve_layer(TOKENS, mask, slot_mapping=slots)][-1]
    else:
        loaded = engine.retrieve(TOKENS, mask, slot_mapping=slots)
    assert loaded is not None
    assert loaded.tolist() == mask


@cache
def expected(layout: str, dtype: torch.dtype) -> dict[int, list[bytes]]:
    """Compute the contents of all storages after a load element by element, for each number of skipped blocks."""
    paged = LAYOUTS[layout](dtype)
    paged.fill(seed=1)
    stored = take_blocks(paged, SOURCES)
    wanted = {}
    for skip_blocks in SKIPS:
        paged.fill(seed=2)
        put_blocks(paged, TARGETS[skip_blocks:], [by_block[skip_blocks:] for by_block in stored])
        wanted[skip_blocks] = snapshot(paged)
    return wanted


@pytest.mark.parametrize("layerwise", [False, True], ids=["bulk", "layerwise"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout: str, dtype: torch.dtype, tmp_path: Path, *, on_disk: bool, layerwise: bool) -> None:
    wanted = expected(layout, dtype)
    paged = LAYOUTS[layout](dtype)
    folder = tmp_path / "disk" if on_disk else None
    paged.fill(seed=1)
    before = snapshot(paged)
    engine = open_engine(paged, folder)
    store(engine, layerwise=layerwise)
    assert snapshot(paged) == before
    if on_disk:
        assert engine.flush()
        engine.close()
        engine = open_engine(paged, folder)
    with engine:
        for skip_blocks in SKIPS:
            paged.fill(seed=2)
            retrieve(engine, skip_blocks, layerwise=layerwise)
            assert snapshot(paged) == wanted[skip_blocks], f"without the first {skip_blocks} blocks"
        assert (engine.stats().mover.chunks_loaded_from_disk > 0) is on_disk


@pytest.mark.parametrize(
    "paged",
    [
        pytest.param(Paged(ordered("LHBNC", torch.bfloat16)), id="LHBNC"),
        pytest.param(Paged(ordered("BHLNC", torch.bfloat16)), id="BHLNC"),
        pytest.param(Paged(alike((2, 2, B, N, 5), torch.bfloat16)), id="blocks in the middle"),
    ],
)
def test_a_block_in_pieces_is_refused(paged: Paged) -> None:
    with pytest.raises(LayoutError, match=r"layer layer\.0: .*not supported"):
        bind_paged_kv(paged.caches, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
