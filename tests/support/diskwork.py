"""Chunks whose payload follows from their name, the folder's size found without the tier, and a process to kill."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.chunkfile import chunk_name
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.disk.tier import DiskTier
from support.forked import ForkedProcess, forker

if TYPE_CHECKING:
    from collections.abc import Sequence

EVEN = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256)
MINE = Namespace({"model": "mine"})
OTHER = Namespace({"model": "other"})
CHUNK_BYTES = chunkfile.file_bytes(EVEN, 8)
CAPACITY_BYTES = 16 * CHUNK_BYTES
REPOSITORY = Path(__file__).parents[2]

Open = Callable[..., DiskTier]


def make_ref(number: int, num_blocks: int = 8) -> ChunkRef:
    return ChunkRef(number.to_bytes(2, "little") * 8, num_blocks)


def make_slot(layout: KVLayout = EVEN) -> ByteArray:
    """Return an empty, page-aligned buffer for one chunk."""
    return np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)


def make_transfer(ref: ChunkRef, layout: KVLayout = EVEN, salt: int = 0) -> Transfer:
    """Return the transfer of a chunk whose payload follows from its ref; the padding is dirty."""
    slot = make_slot(layout)
    size = layout.payload_bytes(ref.num_blocks)
    seed = int.from_bytes(ref.prefix_key, "little") + ref.num_blocks + (salt << 130)
    slot[:] = 0xAA
    slot[:size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return Transfer(ref, slot)


def put(tier: Tier, *refs: ChunkRef, layout: KVLayout = EVEN) -> list[Outcome]:
    return tier.put([make_transfer(ref, layout) for ref in refs])


def get(tier: Tier, ref: ChunkRef, layout: KVLayout = EVEN) -> Outcome:
    """Read a chunk; a hit must have the right bytes."""
    slot = make_slot(layout)
    (outcome,) = tier.get([Transfer(ref, slot)])
    if outcome is Outcome.HIT:
        size = layout.payload_bytes(ref.num_blocks)
        assert np.array_equal(slot[:size], make_transfer(ref, layout).buffer[:size])
    return outcome


def bytes_on_disk(*folders: Path) -> int:
    """Return the sum over the folders, found independently of the tier."""
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            total += sum(
                os.lstat(Path(parent, n)).st_size
                for n in names
                if n not in {".lock", "namespace.json", "layout.json", "trails"}
            )
    return total


def path_of(folder: Path, ref: ChunkRef, namespace: Namespace = MINE) -> Path:
    return folder / namespace.id.hex() / chunk_name(ref)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def flip_payload(path: Path) -> None:
    flip(path, 4096 + 20_000)


def flip_header(path: Path) -> None:
    flip(path, 100)


def start_storing(folders: Sequence[Path], capacity_bytes: int, seed: int, inside: Path) -> ForkedProcess:
    """Start a process that stores, replaces, removes and clears at random until it is killed; returns once it runs.

    The byte in the file ``inside`` is 1 while it stores.
    """
    inside.write_bytes(b"\0")
    words = ["support.storing", capacity_bytes, seed, inside, *folders]
    process = forker().start(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
