"""KV cache groups of a model from its configuration: what they keep, and what is stored of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.doc_tables import hybrid_table, section
from support.hybrid_configs import FULL, HYBRIDS, WINDOW

from kvstore.model.errors import ConfigError, LayoutError
from kvstore.model.groups import GroupKind
from kvstore.tools.calc import calculate
from kvstore.tools.modelconfig import parse_model
from kvstore.tools.modelgroups import Attention, Geometry, KVModel

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
    },
}


def kinds(config: dict[str, Any]) -> dict[str, int]:
    """Count the layers of each kind."""
    model = parse_model({**HEADS, **config})
    found = {one.kind.value: one.geometry.layers for one in model.attention}
    return {**found, "state": model.states} if model.states else found


@pytest.mark.parametrize(
    ("name", "state_dtype", "chunk", "checkpoint"),
    [
        ("gpt-oss-20b", None, (256, 6_291_456), 3_145_728),
        ("Gemma-3-27B", None, (256, 20_971_520), 436_207_616),
        ("Qwen3-Next-80B-A3B", None, (544, 13_369_344), 39_518_208),
        ("Qwen3-Next-80B-A3B", "float32", (1056, 25_952_256), 77_266_944),
        ("Granite-4.0-H-Small", None, (528, 8_650_752), 77_322_240),
        ("LFM2-1.2B", None, (256, 3_145_728), 81_920),
    ],
)
def test_chunks_and_checkpoints(name: str, state_dtype: str | None, chunk: tuple[int, int], checkpoint: int) -> None:
    sizes = calculate(parse_model(HYBRIDS[name], state_dtype=state_dtype))
    assert sizes.checkpoint is not None
    assert (sizes.chunk_tokens, sizes.chunk_bytes) == chunk
    assert sizes.checkpoint.size_bytes == checkpoint
    assert sizes.checkpoint.worth_tokens == checkpoint // sizes.bytes_per_token


def test_a_small_checkpoint_is_stored_with_every_chunk() -> None:
    small = calculate(parse_model(HYBRIDS["gpt-oss-20b"])).prompt
    assert (small.chunks, small.checkpoints, small.slots) == (39, 39, 78)
    assert small.stored_bytes == 39 * (6_291_456 + 3_145_728)
    assert small.loaded_bytes == 39 * 6_291_456 + 3_145_728
    assert small.promoted_bytes == 39 * 2 * 6_291_456
    large = calculate(parse_model(HYBRIDS["Gemma-3-27B"])).prompt
    assert (large.chunks, large.checkpoints) == (39, 1)
    assert large.stored_bytes == large.loaded_bytes >= 39 * 20_971_520 + 436_207_616
    assert large.promoted_bytes == 39 * 20_971_520 // 10 * 62


def test_states_cannot_be_promoted() -> None:
    """Parts of a checkpoint are whole blocks of a chunk, like vLLM's padded ones."""
    prompt = calculate(parse_model(HYBRIDS["Granite-4.0-H-Small"])).prompt
    assert (prompt.chunks, prompt.checkpoints, prompt.slots, prompt.promoted_bytes) == (18, 1, 27, None)
    assert prompt.stored_bytes == 27 * 8_650_752


def test_local_attention_keeps_nothing_where_its_chunk_ends() -> None:
    token_bytes = 36 * 4096
    sizes = [calculate(parse_model(SCOUT), prompt_tokens=tokens) for tokens in (8192 + 1, 10_000)]
    assert [size.checkpoint and size.checkpoint.size_bytes for size in sizes] == [0, 1792 * token_bytes]
    assert [size.prompt.checkpoints for size in sizes] == [1, 2]


def test_windows_alone_are_in_chunks() -> None:
    config = {**HEADS, "model_type": "mistral", "num_hidden_layers": 32}
    windows, plain = (calculate(parse_model({**config, "sliding_window": tokens})) for tokens in (4096, None))
    assert (windows.checkpoint, windows.prompt) == (None, plain.prompt)
    assert windows.bytes_per_token == plain.bytes_per_token
    assert [group.kind for group in windows.groups] == ["window"]


def test_plain_models_have_chunks_only() -> None:
    sizes = calculate(parse_model({**HEADS, "num_hidden_layers": 2}), memory_gib=[1])
    assert (sizes.checkpoint, sizes.prompt.promoted_bytes, sizes.prompt.checkpoints) == (None, None, 0)
    assert sizes.prompt.stored_bytes == 39 * sizes.chunk_bytes == 9984 * sizes.loaded_bytes_per_token
    with pytest.raises(LayoutError, match="not a multiple"):
        calculate(parse_model({**HEADS, "num_hidden_layers": 2}), chunk_tokens=100)


def test_memory_holds_checkpoints_too() -> None:
    """Each part of a checkpoint takes a whole slot."""
    sizes = calculate(parse_model(HYBRIDS["gpt-oss-20b"]), memory_gib=[1])
    assert sizes.holds_tokens == {"1": (1 << 30) // 6_291_456 // 2 * 256}


def test_a_prompt_has_a_whole_chunk() -> None:
    sizes = calculate(parse_model(HYBRIDS["Qwen3-Next-80B-A3B"]), prompt_tokens=1)
    assert (sizes.prompt.tokens, sizes.prompt.chunks, sizes.prompt.checkpoints) == (545, 1, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt_oss", "num_hidden_layers": 24, "sliding_window": 128}, {"full": 12, "window": 12}),
        ({"model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}, {"full": 13, "window": 13}),
        ({"model_type": "cohere2", "num_hidden_layers": 32, "sliding_window": 4096}, {"full": 8, "window": 24}),
        (
            {"model_type": "x", "num_hidden_layers": 12, "sliding_window": 64, "sliding_window_pattern": 3},
            {"full": 4, "window": 8},
        ),
        ({"model_type": "phi3", "num_hidden_layers": 32, "sliding_window": 2047}, {"window": 32}),
        ({"model_type": "mistral", "num_hidden_layers": 32}, {"window": 32}),
        ({"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": None}, {"full": 32}),
        ({"model_type": "x", "sliding_window": None, "layer_types": [WINDOW, FULL]}, {"full": 2}),
        ({"model_type": "gemma3n_text", "sliding_window": 512, "num_hidden_layers": 35}, {"full": 4, "window": 16}),
        ({"num_hidden_layers": 40, "use_sliding_window": False, "sliding_window": 4096}, {"full": 40}),
        (
            {"num_hidden_layers": 28, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
            {"full": 21, "window": 7},
        ),
        (
            {"num_hidden_layers": 4, "attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 1]},
            {"full": 1, "local": 3},
        ),
        (
            {"attention_chunk_size": 64, "layer_types": ["chunked_attention"] * 3 + [FULL]},
            {"full": 1, "local": 3},
        ),
        (
            {
                "model_type": "jamba",
                "num_hidden_layers": 32,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            {"full": 4, "state": 28},
        ),
        ({**MAMBA2, "model_type": "bamba", "num_hidden_layers": 8, "attn_layer_indices": [3]}, {"full": 1, "state": 7}),
        ({**MAMBA2, "model_type": "falcon_h1", "num_hidden_layers": 6}, {"full": 6, "state": 6}),
        (
            {**MAMBA2, "model_type": "zamba2", "layers_block_type": ["mamba", "mamba", "hybrid"]},
            {"full": 1, "state": 3},
        ),
        (
            {**MAMBA2, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"},
            {"full": 1, "state": 2},
        ),
        (
            {**MAMBA2, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"]},
            {"full": 1, "state": 2},
        ),
    ],
)
def test_what_layers_keep(config: dict[str, Any], expected: dict[str, int]) -> None:
    assert kinds(config) == expected


def test_how_far_windows_reach() -> None:
    """It is one token fewer than the number written there, because of the next token, except for Cohere."""
    config = {**HEADS, "num_hidden_layers": 4, "sliding_window": 4096, "sliding_window_pattern": 4}
    assert parse_model({**config, "model_type": "gemma3"}).attention[1].span_tokens == 4095
    assert parse_model({**config, "model_type": "cohere2"}).attention[1].span_tokens == 4096


def test_gemma_4_has_other_heads_where_it_keeps_all_tokens() -> None:
    """All blocks have the same bytes, so their numbers of tokens differ, and chunks are whole blocks of both."""
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
    }
    full, window = parse_model(config).attention
    assert (full.geometry.kv_heads, full.geometry.head_elements) == (4, 1024)
    assert (window.geometry.kv_heads, window.geometry.head_elements) == (16, 512)
    groups = parse_model(config).groups(16)
    assert {(group.kind, group.block_tokens) for group in groups.groups} == {
        (GroupKind.FULL, 32),
        (GroupKind.WINDOW, 16),
    }
    assert calculate(parse_model(config), chunk_tokens=16).chunk_tokens == 32
    same = parse_model({**config, "attention_k_eq_v": False}).attention[0]
    assert same.geometry.kv_heads == 16


def test_states_and_their_types() -> None:
    """Nemotron-H keeps its matrices in float32 by default; an explicit type wins."""
    nano = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    inputs, matrices = (128 * 80 + 2 * 8 * 128) * 3, 128 * 80 * 128
    for config, wanted, size in (
        (nano, None, 4),
        ({**nano, "mamba_ssm_cache_dtype": "bfloat16"}, None, 2),
        (nano, "bfloat16", 2),
        (nano, "auto", 4),
    ):
        state = parse_model(config, state_dtype=wanted).state
        assert state is not None
        assert state.state_bytes() == 2 * inputs + size * matrices
    assert parse_model(nano, state_dtype="bfloat16").block_tokens(16) == 672  # as vLLM logs it of Nemotron-Nano-9B-v2


def test_kv_in_fp8_makes_longer_blocks() -> None:
    model = parse_model(HYBRIDS["Qwen3-Next-80B-A3B"], "fp8")
    assert model.block_tokens(16) == 1072
    assert model.state == parse_model(HYBRIDS["Qwen3-Next-80B-A3B"]).state


def test_states_are_divided_among_workers() -> None:
    """Groups of heads are repeated if there are fewer than workers."""
    granite = parse_model(HYBRIDS["Granite-4.0-H-Small"]).state
    assert granite is not None
    assert granite.state_bytes(4) == 2 * 3 * (8192 + 2 * 4 * 128) // 4 + 2 * 128 * 64 * 128 // 4
    with pytest.raises(ConfigError, match="cannot be divided among 3"):
        granite.state_bytes(3)
    sizes = calculate(parse_model(HYBRIDS["Qwen3-Next-80B-A3B"]), tp_size=2)
    assert (sizes.chunk_tokens, sizes.bytes_per_token) == (544, 12_288)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": [FULL, "lightning"]}, "lightning"),
        ({"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config"),
        ({"layer_types": ["mamba"] * 4, **MAMBA2}, "no attention layers"),
        ({"model_type": "minimax", "layer_types": [FULL, "linear_attention"]}, "'minimax'"),
        ({**MAMBA2, "layer_types": [FULL, "mamba"], "dtype": "int3"}, "int3"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model({**HEADS, **config})


def test_a_block_of_a_checkpoint_fits_into_a_chunk() -> None:
    """Otherwise the error says what to do. Kinds with almost as many layers are one group each."""
    geometry = Geometry(10, 1, 128, "bfloat16")
    larger = Attention(Geometry(14, 1, 128, "bfloat16"), GroupKind.WINDOW, 127)
    with pytest.raises(LayoutError, match="chunk_size higher"):
        calculate(KVModel((Attention(geometry), larger)), chunk_tokens=16)
    assert calculate(KVModel((Attention(geometry), larger)), chunk_tokens=32).chunk_tokens == 32


def test_command(tmp_path: Path, run: Any, run_json: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS["Qwen3-Next-80B-A3B"]), encoding="utf-8")
    code, sizes = run_json("calc", "--model", tmp_path, "--state-dtype", "float32", "--prompt", 5000)
    assert (code, sizes["alignment_tokens"], sizes["chunk_tokens"]) == (0, 1056, 1056)
    assert sizes["checkpoint"] == {"at_tokens": 4224, "size_bytes": 77_266_944, "parts": 3, "worth_tokens": 3144}
    assert [group["kind"] for group in sizes["groups"]] == ["full", "state"]
    assert (sizes["prompt"]["tokens"], sizes["prompt"]["promoted_bytes"]) == (5000, None)
    text = run("calc", "--model", tmp_path).stdout
    assert "chunk_size 256 becomes 544" in text
    assert "36 layers keep only a state of 1,097,728 bytes" in text
    assert "hybrid manager" not in text
    assert run("calc", "--model", tmp_path, "--state-dtype", "int3").exit_code == 2
    assert run("calc", "--model", tmp_path, "--tp", "3").exit_code == 2


def test_the_table_of_the_documentation() -> None:
    assert section("sizing.md", "hybrids") == hybrid_table()
