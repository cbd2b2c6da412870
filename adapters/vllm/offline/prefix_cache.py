"""vLLM's own prefix cache without a model: its ``KVCacheManager``, with one request after the other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvstore.model.errors import ConfigError


class PrefixCache:
    """Blocks of one group with full attention, evicted as in vLLM.

    Args:
        num_blocks: blocks that hold tokens.
        block_tokens: tokens in each.
        longest_tokens: tokens of the longest prompt.
    """

    def __init__(self, num_blocks: int, block_tokens: int, longest_tokens: int) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float16)
        group = KVCacheGroupSpec(["layer"], spec)
        # One more block, because vLLM uses the first as its null block.
        config = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[group])
        sizes = {"scheduler_block_size": block_tokens, "hash_block_size": block_tokens}
        taken = inspect.signature(KVCacheManager).parameters  # they differ between versions
        self._manager = KVCacheManager(
            config,
            max_model_len=longest_tokens,
            **{name: tokens for name, tokens in sizes.items() if name in taken},
        )
        self._hasher = get_request_block_hasher(block_tokens, hash_function)
        self._asked = 0

    def ask(self, prompt: Sequence[int]) -> int:
        """Look a prompt up, allocate blocks for the rest, and return the tokens that were found.

        Raises:
            ConfigError: there are too few blocks for it.
        """
        self._asked += 1
        request = Request(str(self._asked), list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        found_tokens: int
        blocks, found_tokens = self._manager.get_computed_blocks(request)[:2]  # later versions return more
        if self._manager.allocate_slots(request, len(prompt) - found_tokens, found_tokens, blocks) is None:
            raise ConfigError(f"a prompt of {len(prompt):,} tokens does not fit in the prefix cache: make it larger")
        self._manager.free(request)
        return found_tokens
