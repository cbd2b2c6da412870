"""Raw access to the chunk files of a disk tier, past all wrappers around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.format.chunkfile import chunk_name
from kvstore.testing import BoundedTierConformance
from kvstore.testing.harness import MINE

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.model.chunks import ChunkRef

NOT_COUNTED = {".lock", "namespace.json", "layout.json", "trails"}


class DiskFiles(BoundedTierConformance):
    persistent = True
    checks_bytes = True

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        path = self.path(ref)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        self.path(ref).write_bytes(value)

    def raw_remove(self, ref: ChunkRef) -> None:
        self.path(ref).unlink()

    def raw_used_bytes(self) -> int:
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.name not in NOT_COUNTED)
        return sum(path.stat().st_size for path in files)

    def path(self, ref: ChunkRef) -> Path:
        return self.folder / MINE.id.hex() / chunk_name(ref)
