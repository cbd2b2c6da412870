"""Quotas on real vLLM: who floods the cache takes nothing from others, whose hits and outputs stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.invariants import check_invariants
from support.vllm_engine import Completion, Engine, StoreSetup, assert_same_outputs, make_prompts, whole_blocks

from kvstore.model.keys import KeyExtras
from kvstore.ops import metrics

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

PROMPT = make_prompts()[18]  # 513 tokens
FLOOD = make_prompts()[19:40]
SALTS = {"loud": "a secret of the loud one", "calm": "a secret of the calm one"}
NAMES = {who: KeyExtras(cache_salt=salt).salt_name for who, salt in SALTS.items()}


@pytest.mark.parametrize("by", ["salt", "tag:team"], ids=["salt", "tag"])
def test_a_flood_takes_nothing_from_others(tiny_model: Path, tmp_path: Path, by: str) -> None:
    with Engine(tiny_model) as engine:
        plain = engine.generate([PROMPT, *FLOOD], logprobs=2)

    names = NAMES if by == "salt" else {who: who for who in SALTS}
    quotas = {
        "kvstore.quota_by": by,
        "kvstore.local_cpu_quotas": f"{names['loud']}=0.004, {names['calm']}=0.004",
        "kvstore.local_disk_quotas": f"{names['loud']}=0.008, {names['calm']}=0.008",
        "kvstore.cache_policy": "LRU",
    }
    setup = StoreSetup(tmp_path / "disk", cpu_gib=0.01, disk_gib=0.02, extra=quotas)

    def ask(engine: Engine, who: str, prompts: list[list[int]]) -> list[Completion]:
        salts = [SALTS[who]] * len(prompts) if by == "salt" else None
        return engine.generate(prompts, salts=salts, logprobs=2, asks={"kvstore.tag.team": who})

    with Engine(tiny_model, setup) as engine:
        ask(engine, "calm", [PROMPT])
        for _ in range(3):
            ask(engine, "loud", FLOOD)
            engine.settle()
            engine.forget_local()
        index = engine.store_scheduler.index
        check_invariants(index)
        loud, calm, _ = index.owners
        assert (loud.name, calm.name) == (names["loud"], names["calm"])
        assert loud.evicted_memory > 10
        assert loud.evicted_disk > 10
        assert (calm.evicted_memory, calm.evicted_disk) == (0, 0)
        hit = ask(engine, "calm", [PROMPT])
        assert hit[0].cached_tokens >= whole_blocks(len(PROMPT))
        assert_same_outputs(plain[:1], hit)
        assert_same_outputs(plain[1:], ask(engine, "loud", FLOOD))
        engine.settle()
        totals = engine.store_scheduler.totals
        assert totals[metrics.QUOTA_HIT_TOKENS.key(names["calm"])] >= whole_blocks(len(PROMPT))
        assert totals[metrics.QUOTA_STORED_CHUNKS.key(names["loud"])] == loud.stored > 0
        held = set(loud.disk)
    with Engine(tiny_model, setup) as engine:
        index = engine.store_scheduler.index
        check_invariants(index)
        loud, calm, _ = index.owners
        assert set(loud.disk) == held, "a restart knows whose the chunks on disk are"
        hit = ask(engine, "calm", [PROMPT])
        assert hit[0].cached_tokens >= whole_blocks(len(PROMPT))
        assert_same_outputs(plain[:1], hit)
        engine.assert_idle()
