"""Test of a converted configuration of LMCache, which starts vLLM and keeps prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lmcache_file import EVERYTHING
from support.vllm_engine import Engine, StoreSetup, make_prompts, whole_blocks

from kvstore.tools.configs import from_lmcache

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@pytest.mark.sweep
def test_the_result_starts(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is not there and so not used; the disk keeps computed KV for the next start."""
    source = tmp_path / "lmcache.yaml"
    text = EVERYTHING.replace("/var/tmp/lmcache/", f"{tmp_path}/disk/").replace("@cache:6379", "@127.0.0.1:9")
    source.write_text(text.replace("7001", "0"), encoding="utf-8")
    converted = tmp_path / "kvstore.yaml"
    converted.write_text(from_lmcache(source).text, encoding="utf-8")
    monkeypatch.setenv("KVSTORE_CONFIG_FILE", str(converted))
    prompt = make_prompts()[21]  # 1,500 tokens
    for cached in (0, whole_blocks(len(prompt))):
        with Engine(tiny_model, StoreSetup(cpu_gib=0.25)) as engine:
            assert engine.generate([prompt])[0].cached_tokens == cached
            engine.settle()
    assert list((tmp_path / "disk").rglob("*.safetensors"))
