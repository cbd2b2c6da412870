"""A folder in which the commands of the documentation can be run: the same chunks, files and damage every time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import KeyExtras, Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.models import TINY, as_text, build_llama, random_tokens
from support.diskwork import flip_payload, make_transfer, path_of
from support.hybrid_configs import HYBRIDS

LAYOUT = KVLayout((32 * 4 * 128,) * 4, 1, 32, 256, "LBHNC", "bf16", (4, 32, 128))
NAMESPACE = Namespace(
    {
        "chunk_tokens": 256,
        "dtype": "torch.bfloat16",
        "format": "1",
        "layout": LAYOUT.fingerprint,
        "model": "id support-bot",
        "shard": "pp 0/1 tp 0/1",
    }
)
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}
LMCACHE = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20
local_disk: "file:///mnt/nvme/lmcache/"
max_local_disk_size: 200
remote_url: "redis://cache:6379"
remote_serde: "naive"
cache_policy: LRU
enable_p2p: true
extra_config:
  use_odirect: true
"""
TRACE = """\
{"format":"kvstore-trace","version":1,"chunk_tokens":256}
{"time_s":0.0,"num_tokens":600,"keys":["9f86d081884c7d65","9a2fb0a361ae1d1c","1b4f0e9851971998"]}
{"time_s":1.0,"num_tokens":600,"keys":["9f86d081884c7d65","9a2fb0a361ae1d1c","1b4f0e9851971998"]}
"""
PROMPTS = [random_tokens(length, vocab=TINY.vocab, seed=length) for length in (700, 300, 1000)]


def refs_of(prompt: list[int]) -> list[ChunkRef]:
    hasher = hash_tokens(LAYOUT, prompt, KeyExtras())
    return chunk_refs(hasher, with_tail=True)


def make_sandbox(folder: Path) -> None:
    """``cache``, ``broken`` (one bit of one chunk), ``llama/``, configurations of models and ours, prompts, a trace."""
    refs = [ref for prompt in PROMPTS for ref in refs_of(prompt)]
    for name in ("cache", "broken"):
        tier = DiskTier(folder / name, NAMESPACE, LAYOUT, 1 << 28)
        for number, ref in enumerate(refs):
            assert tier.put([make_transfer(ref, LAYOUT)]) == [Outcome.STORED]
            os.utime(path_of(folder / name, ref, NAMESPACE), (number, number))
        tier.close()
    flip_payload(path_of(folder / "broken", refs[1], NAMESPACE))
    build_llama(folder / "llama", TINY)
    for name, model in {"llama-8b": LLAMA_8B, "qwen3-next": HYBRIDS["Qwen3-Next-80B-A3B"]}.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(model), encoding="utf-8")
    lines = [json.dumps({"prompt": as_text(prompt)}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "trace.jsonl").write_text(TRACE, encoding="utf-8")
    (folder / "lmcache.yaml").write_text(LMCACHE, encoding="utf-8")
    config = "max_local_cpu_size: 0.25\nlocal_disk: cache\nmax_local_disk_size: 0.25\n"
    (folder / "kvstore.yaml").write_text(config, encoding="utf-8")
