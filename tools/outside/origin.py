"""Origin of runs: only figures of the same code and machine may stand side by side."""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path

import kvstore
from kvstore.model.version import __version__
from kvstore.tools.bench.load import cpu_name
from kvstore.tools.outside.engines import GPU_TOKENS, SHAPE


def origin() -> str:
    """Return in words: kvstore's version and a digest of its sources, vLLM's version, model, cache and processor."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(kvstore.__file__).parent, followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(name.encode() + b"\0" + Path(folder, name).read_bytes())
    shape = "x".join(map(str, (SHAPE.layers, SHAPE.hidden, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim)))
    return (
        f"kvstore {__version__} ({digest.hexdigest()[:12]}), vLLM {metadata.version('vllm')}, "
        f"a Llama of {shape}, {GPU_TOKENS} tokens, {cpu_name()}, {os.cpu_count()} cores"
    )
