"""How long after a prompt has been computed its KV is at another engine, for ``kvstore bench``.

    python -m kvstore.adapters.vllm.measuring_handover MODEL VOCABULARY ROUNDS

prints its samples as ``measuring`` does. The receiver is a cache server in a process of its own, which is asked for the
last chunk until it has it; the limit is a fifth of the time that the prompt took to compute.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvstore.adapters.vllm.connector import FactsMetadata, KVStoreConnector
from kvstore.adapters.vllm.measuring import BLOCK_TOKENS, MARK, Sample
from kvstore.adapters.vllm.steps import WorkerFacts
from kvstore.engine import chunk_refs
from kvstore.errors import KVStoreError
from kvstore.keys import PrefixHasher
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, ChunkRef, Tier, TierSetup

PROMPT_TOKENS: Final = 2048
SHARE: Final = 0.2  # of the time to compute
_BUFFER_BYTES: Final = 256 << 20
_START_S: Final = 60.0
_HOST: Final = "127.0.0.1"


@contextmanager
def _receiver() -> Iterator[int]:
    """A cache server as a process; its port."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "server.yaml")
        config.write_text(f"max_local_cpu_size: 0.5\nserver_listen: kvs://{_HOST}:{port}\n", encoding="utf-8")
        command = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
        try:
            _wait_for_port(port)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_for_port(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex((_HOST, port)) == 0:
                return
        time.sleep(0.1)
    raise KVStoreError(f"the receiving server did not start within {_START_S:.0f} s")


@contextmanager
def _producer(model: str) -> Iterator[tuple[LLM, WorkerFacts]]:
    """A vLLM that hands over what it computes, and what its worker said of itself."""
    said: list[WorkerFacts] = []
    shake = KVStoreConnector.get_handshake_metadata

    def listen(connector: KVStoreConnector) -> object:
        metadata = shake(connector)
        if isinstance(metadata, FactsMetadata) and metadata.facts is not None:
            said.append(metadata.facts)
        return metadata

    settings: dict[str, Any] = {"kvstore.enable_pd": True, "kvstore.pd_buffer_size": _BUFFER_BYTES}
    with patch.object(KVStoreConnector, "get_handshake_metadata", listen):
        llm = LLM(
            model=model,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=2 * PROMPT_TOKENS,
            enforce_eager=True,
            disable_log_stats=True,
            enable_prefix_caching=False,
            seed=0,
            kv_transfer_config={
                "kv_connector": "KVStoreConnector",
                "kv_role": "kv_producer",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings,
            },
        )
    try:
        yield llm, said[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def _refs(prompt: Sequence[int], facts: WorkerFacts) -> list[ChunkRef]:
    hasher = PrefixHasher(facts.layout.chunk_tokens, facts.layout.block_tokens)
    hasher.update(prompt)
    return chunk_refs(hasher, facts.layout.blocks_per_chunk, with_tail=True)


def _hand_over(llm: LLM, tier: Tier, facts: WorkerFacts, prompt: Sequence[int], port: int) -> Sample:
    """A part of the seconds that a prompt took, and those from its end until all of it was there."""
    spec = {"req_id": "bench", "receiver_host": _HOST, "receiver_init_port": port}
    extra = {"kv_transfer_params": {"disagg_spec": spec}}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
    refs = _refs(prompt, facts)
    begin_s = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
    end_s = time.perf_counter()
    while not all(tier.contains(refs)):
        if time.perf_counter() - end_s > _START_S:
            raise KVStoreError(f"{len(prompt)} tokens have not been handed over within {_START_S:.0f} s")
        time.sleep(0.0005)
    return SHARE * (end_s - begin_s), time.perf_counter() - end_s


def measure(model: str, vocabulary: int, rounds: int) -> list[Sample]:
    """One sample a round, after one that does not count."""
    rng = random.Random(4)  # noqa: S311 - prompts that are the same in every run
    with _receiver() as port, _producer(model) as (llm, facts):
        url = f"kvs://{_HOST}:{port}"
        tier = open_tier("server", TierSetup(facts.namespace, facts.layout, UNBOUNDED_BYTES, {"url": url}))
        try:
            prompts = [[rng.randrange(5, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(1 + rounds)]
            return [_hand_over(llm, tier, facts, prompt, port) for prompt in prompts][1:]
        finally:
            tier.close()


if __name__ == "__main__":
    samples = measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(MARK + json.dumps({"handover": samples}), flush=True)  # noqa: T201 - to the process that started this one
