"""Payloads of the conformance suite for tiers with a codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.testing import buffers, harness, partial_reads, threads

if TYPE_CHECKING:
    import pytest

    from kvstore.model.chunks import ChunkRef
    from kvstore.model.layout import KVLayout


def let_some_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two chunks of three repeat themselves in all payloads of the suite, so that a codec shrinks them."""
    random_payload = harness.make_payload

    def make_payload(layout: KVLayout, ref: ChunkRef, version: int = 0) -> bytes:
        random = random_payload(layout, ref, version)
        return random if ref.prefix_key[0] % 3 == 0 else (random[:40] * len(random))[: len(random)]

    for module in (harness, buffers, partial_reads, threads):
        monkeypatch.setattr(module, "make_payload", make_payload)
