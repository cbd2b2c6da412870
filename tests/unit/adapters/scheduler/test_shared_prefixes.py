"""A request that shares a prefix with one whose load takes long: it uses what has arrived, and waits for no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import one_after_the_other
from support.gate import HANG_GUARD_S, Gate
from support.redis_server import wait_for

from kvstore.model.chunks import Outcome
from kvstore.model.keys import PrefixHasher
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.tier import DiskTier

SHARED = list(range(CHUNK))
LONG = SHARED + [number % 50 for number in range(6 * CHUNK)]
SHORT = [*SHARED, 9, 8, 7, 6, 5]


def test_who_shares_a_chunk_does_not_wait_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, one user's long context on a hung disk delays no other user with the same system prompt."""
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(LONG)
    last, gate, get = hasher.chunk_keys()[-1], Gate(), DiskTier.get

    def get_or_hang(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
        if any(transfer.ref.prefix_key == last for transfer in transfers):
            gate()
        return get(tier, transfers)

    with one_after_the_other(Setup(folder=tmp_path, async_load=True, async_save=True)) as build:
        vllm = build()
        vllm.ask("before", LONG)
        vllm.settle()
        vllm = build()
        monkeypatch.setattr(DiskTier, "get", get_or_hang)
        long = vllm.add("long", LONG)
        vllm.step()
        assert gate.reached.wait(HANG_GUARD_S)
        short = vllm.add("short", SHORT)

        def is_done() -> bool:
            vllm.step()
            return short.num_computed_tokens >= len(SHORT)

        try:
            wait_for("the short one is computed", is_done)
            assert any(request is long for request, _ in vllm.loading.values()), "the long one still waits"
        finally:
            gate.open()
        vllm.run()
