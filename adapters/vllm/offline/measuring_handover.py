"""Time from the end of a prompt's computation until its KV is at another engine, for ``kvstore bench``.

    python -m kvstore.adapters.vllm.offline.measuring_handover MODEL VOCABULARY ROUNDS URL

prints its samples as ``measuring`` does. The receiver is the cache server at the URL, which is asked for the chunks of
a prompt until it has them; the limit is a fifth of the time that the prompt took to compute.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final
from urllib.parse import SplitResult, urlsplit

from vllm import LLM

from kvstore.adapters.vllm.offline.engine import connector_of
from kvstore.adapters.vllm.offline.measuring import MARK, STORE, Sample, ask, opened
from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.errors import KVStoreError
from kvstore.model.keys import NO_EXTRAS
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup

PROMPT_TOKENS: Final = 2048
SHARE: Final = 0.2  # of the time to compute
PRODUCER: Final = {
    **STORE,
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"kvstore.enable_pd": True, "kvstore.pd_buffer_size": 256 << 20},
}
_WAIT_S: Final = 60.0


def _hand_over(llm: LLM, tier: Tier, facts: WorkerFacts, prompt: Sequence[int], receiver: SplitResult) -> Sample:
    """Return a share of the seconds that a prompt took, and those from its end until the receiver had its KV."""
    spec = {"req_id": "bench", "receiver_host": receiver.hostname, "receiver_init_port": receiver.port}
    refs = chunk_refs(hash_tokens(facts.layout, prompt, NO_EXTRAS), with_tail=True)
    computing_s, _ = ask(llm, [prompt], extra_args={"kv_transfer_params": {"disagg_spec": spec}})
    end_s = time.perf_counter()
    while not all(tier.contains(refs)):
        if time.perf_counter() - end_s > _WAIT_S:
            raise KVStoreError(f"{len(prompt)} tokens have not been handed over within {_WAIT_S:.0f} s")
        time.sleep(0.0005)
    return SHARE * computing_s, time.perf_counter() - end_s


def measure(model: str, vocabulary: int, rounds: int, url: str) -> list[Sample]:
    """Return one sample per round, after a warm-up that does not count; ``url`` is the receiver's."""
    rng = random.Random(4)  # noqa: S311 - prompts that are the same in every run
    with opened(model, PRODUCER) as llm:
        (facts,) = connector_of(llm).facts
        tier = open_tier("server", TierSetup(facts.namespace, facts.layout, UNBOUNDED_BYTES, {"url": url}))
        with closing(tier):
            prompts = [[rng.randrange(5, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(1 + rounds)]
            return [_hand_over(llm, tier, facts, prompt, urlsplit(url)) for prompt in prompts][1:]


if __name__ == "__main__":
    samples = measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print(MARK + json.dumps({"handover": samples}), flush=True)  # noqa: T201 - to the process that started this one
