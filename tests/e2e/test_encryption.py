"""Tests of real vLLM with encryption at rest: one salt's KV is a miss for others, whoever has which key."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.key_files import write_keys
from support.s3_server import S3Server
from support.vllm_engine import (
    Completion,
    Engine,
    StoreSetup,
    assert_same_outputs,
    is_all_cached,
    make_prompts,
    through_memory,
    whole_blocks,
)

from kvstore.format import chunkfile

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

PROMPTS = make_prompts()[14:20]
BUCKET = "engines"


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Completion]:
    with Engine(tiny_model) as engine:
        return engine.generate(PROMPTS)


def asked(model: Path, store: StoreSetup, salt: str | None) -> list[Completion]:
    """Ask a new engine for all prompts, and let it keep its KV."""
    with Engine(model, store) as engine:
        outputs = engine.generate(PROMPTS, salts=[salt] * len(PROMPTS))
        engine.settle()
        engine.assert_idle()
        return outputs


def is_miss(outputs: list[Completion]) -> bool:
    """Tell if nothing was loaded. Later prompts share prefixes with the first in vLLM's own cache."""
    assert whole_blocks(len(PROMPTS[0])) > 0
    return outputs[0].cached_tokens == 0


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["folder", "disk", "s3"])
def test_kv_of_one_salt_is_a_miss_for_another(
    tiny_model: Path, plain: list[Completion], tmp_path: Path, kind: str
) -> None:
    server = S3Server(tmp_path / "s3").start() if kind == "s3" else None
    try:
        if server is not None:
            server.make_bucket(BUCKET)
        keys = write_keys(tmp_path / "keys", "all", acme="acme", bolt="bolt")
        secrets = {"acme": "bolt", "bolt": "acme"}
        swapped = write_keys(tmp_path / "swapped", "all", secrets=secrets, acme="acme", bolt="bolt")

        def store(path: Path) -> StoreSetup:
            setup = StoreSetup(tmp_path / "kv")
            if kind != "disk":
                setup = through_memory(server.url(BUCKET) if server else f"file://{tmp_path}/kv")
            setup.extra["kvstore.encryption_keys"] = str(path)
            return setup

        def outputs(path: Path, salt: str | None) -> list[Completion]:
            found = asked(tiny_model, store(path), salt)
            assert_same_outputs(plain, found)
            return found

        assert is_miss(outputs(keys, "acme"))
        assert is_miss(outputs(keys, "bolt"))
        assert is_all_cached(PROMPTS, outputs(keys, "acme"))
        assert is_miss(outputs(swapped, "acme"))
        assert is_miss(outputs(swapped, "bolt"))
        assert is_all_cached(PROMPTS, outputs(swapped, "acme")), "it was stored again"
        assert is_miss(outputs(keys, "acme"))
    finally:
        if server is not None:
            server.kill()
    if kind != "s3":
        seals = {chunkfile.seal_of(file.read_bytes()[:4096]) for file in (tmp_path / "kv").rglob("*-*.safetensors")}
        assert {seal.partition(" ")[0] for seal in seals} == {"acme", "bolt"}
        assert len(seals) > len(PROMPTS)
