"""Models with several KV cache groups, or with states: which are served, and how they are told apart."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support.vllm_objects import BLOCK, CONFIG, cache_config, hybrid, mamba, spec, vllm_config
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheGroupSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from kvstore.adapters.vllm.glue import binding, capabilities, groups, support
from kvstore.adapters.vllm.glue.support import check_supported
from kvstore.model.errors import ConfigError, LayoutError
from kvstore.paged.binding import bind_paged_kv

pytestmark = pytest.mark.vllm


def test_several_groups_and_states_are_served() -> None:
    check_supported(vllm_config(), hybrid(), CONFIG)
    check_supported(vllm_config(), cache_config(KVCacheGroupSpec(["layer.0"], mamba())), CONFIG)


def test_a_group_that_cannot_be_stored_beside_one_that_can_is_refused() -> None:
    """vLLM ends if a block of several groups could not be loaded, even if only one of them is stored."""
    ring = CircularBufferSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    found = cache_config(KVCacheGroupSpec(["ring"], ring), KVCacheGroupSpec(["layer.0"], spec()))
    with pytest.raises(LayoutError, match="only one of this model's KV cache groups can be stored"):
        check_supported(vllm_config(), found, CONFIG)


def test_several_groups_with_a_draft_model_are_refused() -> None:
    config = vllm_config()
    config.speculative_config = SimpleNamespace()
    with pytest.raises(LayoutError, match=r"speculative decoding.*--disable-hybrid-kv-cache-manager"):
        check_supported(config, hybrid(), CONFIG)


@pytest.mark.parametrize("key", ["local_disk_serde", "remote_serde"])
def test_several_groups_are_not_quantized(key: str) -> None:
    with pytest.raises(ConfigError, match="int8"):
        check_supported(vllm_config(), hybrid(), CONFIG.model_copy(update={key: "int8"}))


@pytest.mark.parametrize(("mode", "is_stored"), [("none", False), ("align", True)])
def test_states_without_prefix_caching_are_not_stored(mode: str, *, is_stored: bool) -> None:
    config = vllm_config()
    config.cache_config.mamba_cache_mode = mode
    assert (support.stores_nothing(config, hybrid()) is None) is is_stored
    assert support.stores_nothing(config, cache_config()) is None


@pytest.mark.parametrize(
    ("unit_tokens", "is_told"), [(BLOCK // 2, True), (BLOCK, False), (None, False)], ids=["finer", "blocks", "unknown"]
)
def test_states_that_vllm_keeps_inside_blocks_are_told(
    unit_tokens: int | None, *, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``--prefix-match-unit`` lets prompts leave their states where no block of all groups ends."""
    found, config = hybrid(), vllm_config()
    found.hash_block_size = unit_tokens
    monkeypatch.setattr(logging.getLogger("kvstore"), "propagate", True)
    support.log_limits(config, found)
    support.log_limits(config, cache_config())
    told = [message for message in caplog.messages if "without --prefix-match-unit" in message]
    assert len(told) == is_told


@pytest.mark.parametrize("is_cpu", [True, False])
def test_mla_on_a_cpu_is_not_stored(monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool) -> None:
    """vLLM's CPU kernels for prompts ignore cached KV, no matter which cache it is in."""
    config = vllm_config()
    config.model_config.use_mla = True
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: is_cpu)
    assert (support.stores_nothing(config, cache_config()) is not None) is is_cpu


def test_vllm_ends_a_step_where_prompts_part() -> None:
    """A step ends at the later of the hits in vLLM's prefix cache and in ours; 0 stands for no place."""
    request = SimpleNamespace(shared_prefix_boundary=64)
    capabilities.end_step_at(request, 0)
    assert request.shared_prefix_boundary == 64
    capabilities.end_step_at(request, 832)
    assert request.shared_prefix_boundary == 832
    older = SimpleNamespace()
    capabilities.end_step_at(older, 832)
    assert not vars(older)


def test_kv_that_depends_on_more_than_the_prefix_is_refused() -> None:
    rings = RSWASpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, rswa_window=8)
    with pytest.raises(LayoutError, match="RSWASpec"):
        check_supported(vllm_config(), cache_config(KVCacheGroupSpec(["layer.0"], rings)), CONFIG)
    ring = CircularBufferSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    with pytest.raises(LayoutError, match="no KV cache that can be shared"):
        check_supported(vllm_config(), cache_config(KVCacheGroupSpec(["layer.0"], ring)), CONFIG)
    both_ways = replace(spec(), non_causal=True)
    with pytest.raises(LayoutError, match="attend to later tokens"):
        check_supported(vllm_config(), cache_config(KVCacheGroupSpec(["layer.0"], both_ways)), CONFIG)
    group_ids = groups.group_ids(cache_config(KVCacheGroupSpec(["ring"], ring), KVCacheGroupSpec(["layer.0"], spec())))
    assert group_ids == (1,), "a ring beside others is not stored"


@pytest.mark.parametrize(("blocks", "expected"), [((48,), 96), ((16,), 64), ((48, 32), 96), ((80,), 80)])
def test_a_chunk_size_that_does_not_fit_is_rounded_up(blocks: tuple[int, ...], expected: int) -> None:
    found = cache_config(*(KVCacheGroupSpec([f"layer.{size}"], spec(size)) for size in blocks))
    check_supported(vllm_config(), found, CONFIG)
    assert groups.fitting_chunk_size(found, CONFIG) == expected


def test_buffers_hold_the_largest_piece_of_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device groups share the buffers of the first one, whose chunk may be smaller than that of another."""
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=48)
    names = [f"full.{number}" for number in range(3)]
    found = cache_config(KVCacheGroupSpec(["window"], window), KVCacheGroupSpec(names, spec()))
    asked: list[int] = []

    def bind(*_: Any, piece_bytes: int, **how: Any) -> Any:
        asked.append(piece_bytes)
        return bind_paged_kv(*_, piece_bytes=piece_bytes, **how)

    monkeypatch.setattr(binding, "bind_paged_kv", bind)
    monkeypatch.setattr(binding, "_packing", lambda *_: "")
    tensors = {name: torch.zeros(8, 2, BLOCK, 2, 64) for name in ["window", *names]}
    paged = binding.paged_kv_of(tensors, found, vllm_config(), 4 * BLOCK)
    assert asked == [paged.layout.payload_bytes(4)] * 2
