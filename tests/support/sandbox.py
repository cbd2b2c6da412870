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
{"format":"kvstore-trace","version":2,"chunk_tokens":256,"start_s":1795000000.0}
{"time_s":0.0,"tiers":{"slots":4,"slot_bytes":8388608,"disk_bytes":0,"chunk_bytes":0,"keeps_in_memory":true,\
"has_remote":false}}
{"time_s":0.1,"lookup":"cmpl-7d40-0-a1","num_tokens":600,"reason":"never_stored","missing":["9f86d081884c7d65"]}
{"time_s":0.5,"event":"stored","place":"memory","chunks":[["9f86d081884c7d65"],["9a2fb0a361ae1d1c"],\
["1b4f0e9851971998"]]}
{"time_s":0.9,"num_tokens":600,"id":"cmpl-7d40-0-a1","keys":["9f86d081884c7d65","9a2fb0a361ae1d1c","1b4f0e9851971998"]}
{"time_s":20.0,"lookup":"cmpl-90aa-0-b2","num_tokens":600,"reason":"never_stored","missing":["ef2d127de37b942b"]}
{"time_s":20.1,"event":"evicted","place":"memory","chunks":[["1b4f0e9851971998","","7c9fa136d4413fa6"],\
["9a2fb0a361ae1d1c","","e3b0c44298fc1c14"]]}
{"time_s":20.5,"event":"stored","place":"memory","chunks":[["ef2d127de37b942b"],["7c9fa136d4413fa6"],\
["e3b0c44298fc1c14"]]}
{"time_s":20.9,"num_tokens":600,"id":"cmpl-90aa-0-b2","keys":["ef2d127de37b942b","7c9fa136d4413fa6","e3b0c44298fc1c14"]}
{"time_s":61.0,"lookup":"cmpl-7d41-0-c3","num_tokens":600,"hit_tokens":{"memory":256},"found_tokens":256,\
"reason":"evicted","missing":["9a2fb0a361ae1d1c"]}
{"time_s":61.9,"num_tokens":600,"id":"cmpl-7d41-0-c3","keys":["9f86d081884c7d65","9a2fb0a361ae1d1c","1b4f0e9851971998"]}
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
