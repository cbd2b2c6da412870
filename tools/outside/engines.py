"""Engines that are compared: vLLM without kvstore twice, and with it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from kvstore.adapters.vllm.flag import TRANSFER_FLAG, connector_config
from kvstore.tools.models import LlamaShape, as_text, random_tokens
from kvstore.tools.outside.generator import MODEL_NAME, SEED
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import REQUEST_TIMEOUT_S, TOKENS_LOADED, client_of, complete, samples_of
from kvstore.tools.vllmserver import DRAIN_TIMEOUT_S, ServerFailedError, VllmProcess, find_vllm

PLAIN: Final = "plain vLLM"
AGAIN: Final = "plain vLLM, again"
KVSTORE: Final = "kvstore, memory"
ENGINES: Final = (PLAIN, AGAIN, KVSTORE)
LEFT_OUT: Final = "vLLM's OffloadingConnector and SimpleCPUOffloadConnector: they refuse to start on a CPU"
SHAPE: Final = LlamaShape(layers=8, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=1408, vocab=2305)
"""Model of which 2,000 tokens take vLLM much longer to compute than all its other work for a request."""
GPU_TOKENS: Final = 3584
_BLOCK_TOKENS: Final = 32
_MAX_MODEL_TOKENS: Final = 3072
_SAMPLES: Final = 6
_SAMPLE_TOKENS: Final = 1500  # six of these do not fit into vLLM's cache
_ANSWER_TOKENS: Final = 16
_CONFIG: Final = "# Sizes are in GiB.\nchunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 2\n"
_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}
_ASKED: Final = "vllm:prompt_tokens_total"
_OWN_HITS: Final = "vllm:prefix_cache_hits_total"
_MOVED: Final = "vllm:kvstore_moved_bytes_total"
_COUNTED_SHARE: Final = 0.9


class Counts(NamedTuple):
    """Counts of vLLM and kvstore.

    Attributes:
        prompt_tokens: tokens of prompts.
        own_hit_tokens: found in vLLM's own cache.
        loaded_tokens: found by the connector; vLLM counts them before they are loaded.
        loaded_bytes: bytes that kvstore moved into vLLM's cache.
    """

    prompt_tokens: int
    own_hit_tokens: int
    loaded_tokens: int
    loaded_bytes: int

    def since(self, before: Counts) -> Counts:
        """Return what was counted since ``before``."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def has_moved_all(self) -> bool:
        """True if the bytes of all loaded tokens were moved; the last ones may be counted a moment later."""
        return self.loaded_bytes >= _COUNTED_SHARE * self.loaded_tokens * SHAPE.token_bytes


@dataclass
class OutsideVllm(VllmProcess):
    """Process of one engine.

    Attributes:
        engine: one of ``ENGINES``.
        model: folder of the model.
        folder: folder for its configuration and log.
        port: port of the server.
    """

    engine: str
    model: Path
    folder: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.drains = False
        self.log = self.folder / f"{self.engine.replace(', ', '-').replace(' ', '-')}.log"

    def command(self) -> list[str]:
        """Return the command line: its own prefix cache is on, and so small that a working set does not fit."""
        template, blocks = self.folder / "chat.jinja", str(GPU_TOKENS // _BLOCK_TOKENS)
        template.write_text(_TEMPLATE, encoding="utf-8")
        words = [
            *(str(find_vllm()), "serve", str(self.model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", blocks, "--enable-prefix-caching"),
            *("--max-model-len", str(_MAX_MODEL_TOKENS), "--chat-template", str(template)),
            *("--shutdown-timeout", str(DRAIN_TIMEOUT_S)),
        ]
        return words if self.engine != KVSTORE else [*words, TRANSFER_FLAG, json.dumps(connector_config())]

    def variables(self) -> dict[str, str]:
        """Return its environment, without the caller's settings of kvstore."""
        config = self.folder / "kvstore.yaml"
        config.write_text(_CONFIG, encoding="utf-8")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
        return {**inherited, **_ENVIRONMENT, "KVSTORE_CONFIG_FILE": str(config)}

    def forget(self) -> None:
        """Empty vLLM's cache, and kvstore's.

        Raises:
            ServerFailedError: vLLM does not do it.
        """
        try:
            with client_of(self.url, REQUEST_TIMEOUT_S) as client:
                external = {} if self.engine != KVSTORE else {"reset_external": "true"}
                answer = client.post("/reset_prefix_cache", params=external).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerFailedError(f"vLLM did not empty its cache: {error!r}", self.log) from error
        if answer.content and answer.json().get("success") is False:
            raise ServerFailedError("vLLM did not empty its cache", self.log)
        complete(self.url, MODEL_NAME, as_text(random_tokens(8, vocab=SHAPE.vocab, seed=0)), output_tokens=2)

    def counts(self) -> Counts:
        """Return what was counted so far."""
        totals = dict.fromkeys((_ASKED, _OWN_HITS, TOKENS_LOADED, _MOVED), 0.0)
        with client_of(self.url, REQUEST_TIMEOUT_S) as client:
            for sample in samples_of(client.get("/metrics")):
                if sample.name in totals and sample.labels.get("direction") != "store":
                    totals[sample.name] += sample.value
        return Counts(*map(int, totals.values()))

    def sample_outputs(self) -> list[str]:
        """Return greedy answers to fixed prompts, asked twice, the second time after vLLM's own cache has lost them."""
        prompts = [random_tokens(_SAMPLE_TOKENS, vocab=SHAPE.vocab, seed=SEED + number) for number in range(_SAMPLES)]
        return [
            complete(self.url, MODEL_NAME, as_text(prompt), output_tokens=_ANSWER_TOKENS).text
            for prompt in [*prompts, *prompts]
        ]
