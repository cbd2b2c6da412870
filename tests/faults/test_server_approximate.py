"""Tests of a cache server with a lossy disk codec, where chunks read from disk have other bytes and checksums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.cache_server import serving_tcp
from support.served import open_tier, settle

from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.layout import KVLayout
from kvstore.server.disk_tiers import DiskOptions
from kvstore.testing.harness import make_buffer, make_ref
from kvstore.tiers.base import Transfer

LAYOUT = KVLayout((2 * 16 * 64 * 4,) * 4, 1, 16, 64, element="f32", page_axes=(2, 16, 64))
REFS = [make_ref(number) for number in range(4)]


def payload_of(number: int) -> ByteArray:
    values = np.random.default_rng(number).normal(size=LAYOUT.slot_bytes // 4)
    return values.astype(np.float32).view(np.uint8)


def test_chunks_that_come_back_from_disk_are_sent_with_checksums_of_what_came_back(tmp_path: Path) -> None:
    """Chunks are read twice, because the second time the server has kept the checksum of the first."""
    disk = DiskOptions(tmp_path, 64 << 20, codec="int8")
    with serving_tcp(pool_bytes=2 * LAYOUT.slot_bytes, disk=disk) as server:
        tier = open_tier(server.url, layout=LAYOUT)
        for number, ref in enumerate(REFS):
            assert tier.put([Transfer(ref, payload_of(number))]) == [Outcome.STORED]
            settle(server)
        for _ in range(2):
            for number, ref in enumerate(REFS):
                buffer = make_buffer(LAYOUT.slot_bytes)
                assert tier.get([Transfer(ref, buffer)]) == [Outcome.HIT]
                np.testing.assert_allclose(
                    buffer.view(np.float32), payload_of(number).view(np.float32), atol=0.05, rtol=0
                )
        tier.close()
