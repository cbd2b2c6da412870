"""Tests of chunks on disk through lossless codecs: outputs equal those without one, in float32 and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.vllm_engine import (
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    whole_blocks,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def codecs_on_disk(folder: Path) -> set[str]:
    headers = (path.read_bytes()[8:4096] for path in folder.rglob("*.safetensors"))
    return {json.loads(header)["__metadata__"]["codec"] for header in headers}


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def from_disk(model: Path, folder: Path, prompts: list[Prompt], dtype: str, codec: str) -> list[Completion]:
    """Store the prompts, restart, and answer from disk, one at a time, because in bfloat16 batches matter."""
    store = StoreSetup(folder, extra={"kvstore.local_disk_serde": codec})
    with Engine(model, store, dtype=dtype) as engine:
        engine.generate_one_by_one(prompts)
        engine.settle()
    with Engine(model, store, dtype=dtype) as engine:
        outputs = engine.generate_one_by_one(prompts)
        counters = engine.store_worker._tiers.disk.counters
        assert (counters.corrupt, counters.swept, counters.failed) == (0, 0, 0)
        assert counters.hits > 0
        engine.assert_idle()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.cached_tokens >= whole_blocks(len(prompt))
    return outputs


@pytest.mark.parametrize("codec", [pytest.param("lz4", marks=pytest.mark.soak), "split"])
@pytest.mark.sweep
def test_float32_as_plain_vllm(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    tmp_path: Path,
    codec: str,
) -> None:
    outputs = from_disk(tiny_model, tmp_path / "disk", prompts, "float32", codec)
    assert_same_outputs(plain_outputs, outputs)
    assert codecs_on_disk(tmp_path / "disk") == {codec}


@pytest.mark.soak
def test_bfloat16_as_without_a_codec(tiny_model: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    some = [prompt for prompt in prompts if len(prompt) > 64][:10]
    plain = from_disk(tiny_model, tmp_path / "none", some, "bfloat16", "none")
    for codec in ("lz4", "split"):
        outputs = from_disk(tiny_model, tmp_path / codec, some, "bfloat16", codec)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert codecs_on_disk(tmp_path / codec) == {codec}
    assert bytes_on_disk(tmp_path / "split") < 0.8 * bytes_on_disk(tmp_path / "none")
