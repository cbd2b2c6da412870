"""Chunks with times to live in a folder that engines share, and what an older engine sees of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.format.chunkfile import END_BYTES, end_of
from kvstore.model.chunks import ChunkRef, Outcome, chunk_of
from kvstore.tiers.object.folder import FolderStore
from kvstore.tiers.object.manifest import decode, ref_of
from kvstore.tiers.object.names import parse_place
from kvstore.tiers.object.store import Reading
from kvstore.tiers.object.tier import ObjectTier
from support.diskwork import make_ref, make_transfer

A, B, C = make_ref(1), make_ref(2, 3), make_ref(3)
START_S = time.time()
END_S = float(int(START_S)) + 10_000
OLD_STAMP = re.compile("[0-9a-f]{12}-[0-9a-f]{8}")
MAGIC, NEW_MAGIC = b"KVSLOG1\0", b"KVSLOG2\0"


class WatchedStore(FolderStore):
    """Folder that calls hooks while a chunk is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.on_read: list[Callable[[], object]] = []

    @contextmanager
    def open(
        self, name: str, offset: int = 0, num_bytes: int | None = None, version: str = ""
    ) -> Iterator[Reading | None]:
        with super().open(name, offset, num_bytes, version) as reading:
            for hook in self.on_read:
                hook()
            yield reading


Open = Callable[[], ObjectTier]


def put_until(tier: ObjectTier, ref: ChunkRef, until_s: float | None) -> None:
    assert tier.put([make_transfer(ref)._replace(until_s=until_s)]) == [Outcome.STORED]


def wait_for(tier: ObjectTier, expected: Sequence[bool | float], refs: Sequence[ChunkRef] = (A, B, C)) -> None:
    """Wait until a tier answers what is expected."""
    end_s = time.monotonic() + 10.0
    while (told := tier.contains(refs[: len(expected)])) != list(expected):
        assert time.monotonic() < end_s, told
        time.sleep(0.01)


def at(monkeypatch: pytest.MonkeyPatch, time_s: float) -> None:
    """Let the clock show a time from now on."""
    begin_s = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: time_s + time.monotonic() - begin_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


def names(store: FolderStore) -> list[str]:
    return sorted(listed.name for listed in store.list(""))


def objects(store: FolderStore) -> dict[ChunkRef, int]:
    """Return the end in the header of each chunk; 0 for none."""
    places = [place for name in names(store) if (place := parse_place(name)) is not None]
    return {place.ref: end_of(store.read(place.name, END_BYTES) or b"", place.key) or 0 for place in places}


def drop_manifests(store: FolderStore, *folders: str) -> None:
    store.delete(name for name in names(store) if any(f"/{folder}/" in name for folder in folders))


def seen_by_an_older_engine(store: FolderStore) -> set[ChunkRef]:
    """Return the chunks that a version without times to live finds in the manifests that it reads."""
    stamped = [name for name in names(store) if OLD_STAMP.fullmatch(name.rpartition("/")[2])]
    bases = [name for name in names(store) if re.fullmatch("[0-9a-f]{16}/[0-9a-f]{16}/base/.*", name)]
    read = bases[-1:] + [name for name in stamped if "/log/" in name]
    found: set[ChunkRef] = set()
    for name in read:
        data = store.read(name, 1 << 20)
        assert data is not None
        if not data.startswith(MAGIC):
            assert data.startswith(NEW_MAGIC), "which counts as damaged"
            assert "/log/" in name, "so it must hold nothing else"
            continue
        manifest = decode(data)
        assert manifest is not None
        found |= {ref_of(key) for key in manifest.stored.tolist()} | set(map(chunk_of, manifest.trails))
        found -= {ref_of(key) for key in manifest.removed.tolist()}
    return found
