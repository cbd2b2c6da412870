"""Raw access to the chunk files of a disk tier, past all wrappers, and payloads that its codecs shrink."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.testing import BoundedTierConformance, buffers, harness, partial_reads, threads
from kvstore.testing.harness import MINE
from kvstore.tiers.disk import folder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.model.chunks import ChunkRef
    from kvstore.model.layout import KVLayout

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
        return self.folder / MINE.id.hex() / folder.chunk_name(ref)


def let_some_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two chunks of three repeat themselves in all payloads of the suite, so that a codec shrinks them."""
    random_payload = harness.make_payload

    def make_payload(layout: KVLayout, ref: ChunkRef, version: int = 0) -> bytes:
        random = random_payload(layout, ref, version)
        return random if ref.prefix_key[0] % 3 == 0 else (random[:40] * len(random))[: len(random)]

    for module in (harness, buffers, partial_reads, threads):
        monkeypatch.setattr(module, "make_payload", make_payload)
