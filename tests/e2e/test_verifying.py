"""Tests of verification: KV recomputed by real vLLM deviates within the tolerance; wrong chunks are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.vllm_engine import CHUNK_TOKENS, Engine, Prompt, StoreSetup

from kvstore.ops import metrics

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def verified(engine: Engine) -> tuple[float, float, float]:
    """Return the number of equal chunks, the number of unequal ones, and the largest deviation."""
    totals = engine.store_scheduler.totals
    found = [totals[metrics.VERIFIED_CHUNKS.key(result)] for result in ("equal", "mismatch")]
    return found[0], found[1], totals.levels().get(metrics.VERIFY_DEVIATION.key(), 0.0)


def spoil(engine: Engine) -> int:
    """Give all slots the bytes of another chunk."""
    cpu, index = engine.store_worker._tiers.cpu, engine.store_scheduler.index
    slots = [cpu.read(chunk.slot, chunk.ref) for chunk in index._chunks.values()]
    slots = [slot for slot in slots if slot is not None and len(slot) == max(map(len, slots))]
    copies = [slot.copy() for slot in slots]
    for slot, copy in zip(slots, copies[1:] + copies[:1], strict=True):
        slot[:] = copy
    return len(slots)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_verifying(tiny_model: Path, prompts: list[Prompt], dtype: str, tmp_path: Path) -> None:
    long = [prompt for prompt in prompts[:22] if len(prompt) > CHUNK_TOKENS]  # these share nothing with each other
    store = StoreSetup(tmp_path / "disk", extra={"kvstore.verify_fraction": 1.0})
    with Engine(tiny_model, store, dtype=dtype, disable_log_stats=False) as engine:
        plain = engine.generate(long)
        engine.forget_local()
        again = engine.generate(long[::-1])[::-1]  # in other batches
        engine.settle()
        equal, mismatches, deviation = verified(engine)
        print(f"{dtype}: {equal:.0f} chunks, deviation {deviation:.2g}")
        assert equal > 10
        assert mismatches == 0
        if dtype == "float32":
            assert [output.token_ids for output in again] == [output.token_ids for output in plain]
        spoilt = spoil(engine)
        assert spoilt > 10
        engine.forget_local()
        engine.generate(long)
        engine.settle()
        _, mismatches, deviation = verified(engine)
        assert mismatches == spoilt
        assert deviation > 0.5
        engine.forget_local()
        engine.generate(long)
        engine.settle()
        assert verified(engine)[1] == spoilt, "they were stored anew"
        engine.assert_idle()
