"""Agreement of ``kvstore calc`` with the sizes that are really stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.format import chunkfile
from kvstore.model.errors import ConfigError
from kvstore.paged.binding import bind_paged_kv
from kvstore.tools.calc import calculate
from kvstore.tools.modelconfig import model_of
from kvstore.tools.modelgroups import Attention, Geometry, KVModel

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def model(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plain(geometry: Geometry) -> KVModel:
    """Return a model whose layers all keep all tokens."""
    return KVModel((Attention(geometry),))


def test_a_paged_cache_has_these_sizes() -> None:
    """Sizes are those of real tensors, as vLLM would register them."""
    geometry = Geometry(layers=4, kv_heads=2, head_elements=2 * 64, dtype="float32")
    caches = {f"layer.{n}": torch.zeros(8, 2, 32, 128) for n in range(4)}  # [blocks, heads, tokens, K and V]
    layout = bind_paged_kv(caches, num_blocks=8, block_tokens=32, chunk_tokens=256).layout
    sizes = calculate(plain(geometry), block_tokens=32, memory_gib=[1])
    assert sizes.bytes_per_token * 32 == layout.block_bytes
    assert sizes.chunk_bytes == layout.payload_bytes(8)
    assert sizes.file_bytes == chunkfile.file_bytes(layout, 8)
    assert sizes.holds_tokens == {"1": (1 << 30) // layout.slot_bytes * 256}


def test_llama_and_latent_attention(tmp_path: Path) -> None:
    """The figures are the well-known ones: 128 KiB a token for Llama-3.1-8B, 68.6 KiB for DeepSeek-V3."""
    assert model_of(model(tmp_path, LLAMA_8B)).bytes_per_token() == 131_072
    assert model_of(model(tmp_path, LLAMA_8B)).bytes_per_token(tp_size=4) == 32_768
    assert model_of(tmp_path, "fp8").bytes_per_token() == 65_536
    assert model_of(model(tmp_path, DEEPSEEK)).bytes_per_token() == 61 * 576 * 2
    assert model_of(model(tmp_path, {"text_config": LLAMA_8B})).bytes_per_token() == 131_072


def test_heads_are_repeated_where_there_are_too_few(tmp_path: Path) -> None:
    assert Geometry(1, 2, 128, "float16").bytes_per_token(tp_size=8) == 256
    with pytest.raises(ConfigError, match="cannot be divided among 3"):
        calculate(plain(Geometry(1, 8, 128, "float16")), tp_size=3)


def test_what_does_not_say_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        model_of(tmp_path)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        model_of(model(tmp_path, {}))
    with pytest.raises(ConfigError, match="int3"):
        model_of(model(tmp_path, LLAMA_8B), "int3")


def test_what_a_gpu_gives() -> None:
    """It gives three buffers to each of three threads, for a chunk or what copies well, and whole slots of the tier."""
    geometry = Geometry(layers=32, kv_heads=8, head_elements=256, dtype="bfloat16")
    sizes = calculate(
        plain(geometry), chunk_tokens=256, block_tokens=16, tp_size=1, memory_gib=[10, 200], gpu_tier_gib=1.01
    )
    assert sizes.device.staging == 9 * (32 << 20)
    assert sizes.device.tier == 32 * (32 << 20)
    assert sizes.device.total >= sizes.device.staging + sizes.device.tier
    large = calculate(plain(geometry), chunk_tokens=512)
    small = calculate(plain(geometry), tp_size=8)
    assert large.device.staging == 2 * sizes.device.staging
    assert small.device.staging == sizes.device.staging
    assert sizes.pin_s == {"10": pytest.approx(1.9), "200": pytest.approx(38.0)}


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [("llama-8b", 131_072), ("llama-70b-tp8", 40_960), ("qwen-0.5b", 12_288), ("deepseek-mla", 61 * 576 * 2)],
)
def test_geometries_that_have_a_name(name: str, token_bytes: int, run: Any, run_json: Any) -> None:
    code, sizes = run_json("calc", "--geometry", name, "--gpu-tier", "1")
    assert (code, sizes["bytes_per_token"]) == (0, token_bytes)
    assert sizes["device"]["staging"] > 0
    assert 0 < sizes["device"]["tier"] <= 1 << 30
    assert "of a GPU" in run("calc", "--geometry", name, "--gpu").stdout
    assert "of a GPU" not in run("calc", "--geometry", name).stdout


def test_a_geometry_without_a_name(run: Any) -> None:
    assert run("calc", "--geometry", "gpt-2").exit_code == 2


def test_command(tmp_path: Path, run: Any, run_json: Any) -> None:
    code, sizes = run_json("calc", "--model", model(tmp_path, LLAMA_8B), "--memory", "20", "--tp", "2")
    assert (code, sizes["bytes_per_token"], sizes["holds_tokens"]) == (0, 65_536, {"20": 327_680})
    code, sizes = run_json("calc", "--layers", 32, "--kv-heads", 8, "--head-size", 128)
    assert sizes["chunk_bytes"] == 32 << 20
    assert "a token takes 131,072 bytes" in run("calc", "--model", tmp_path).stdout
    assert run("calc").exit_code == 2
    assert run("calc", "--model", tmp_path, "--memory", "x").exit_code == 2
    assert run("calc", "--model", tmp_path, "--chunk-size", "100").exit_code == 2


def test_costs_of_an_object_store(run: Any, run_json: Any) -> None:
    """Requests are chunks, workers load at once; a hit pays once it makes up for the first byte's delay."""
    arguments = ["calc", "--geometry", "llama-8b", "--prompt", "10000", "--s3", "--load", "2", "--prefill", "5000"]
    code, tree = run_json(*arguments)
    costs = tree["s3"]
    assert code == 0
    assert (costs["requests"], costs["size_bytes"]) == (39, 39 * 32 << 20)
    assert costs["load_s"] == pytest.approx(0.03 + 39 * (32 << 20) / 2e9)
    assert costs["compute_s"] == 2.0
    tokens = costs["pays_from_tokens"]
    assert 0.03 + tokens * tree["bytes_per_token"] / 2e9 == pytest.approx(tokens / 5000, rel=0.02)
    assert run_json(*arguments, "--tp", "2")[1]["s3"]["requests"] == 78
    assert run_json(*arguments[:-1], "1e9")[1]["s3"]["pays_from_tokens"] is None
    assert "for no length" in run(*arguments[:-1], "1e9").stdout
    assert "in S3 a prompt of 10,000 tokens" in run(*arguments).stdout
