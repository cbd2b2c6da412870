"""Patch for Mamba2 with prefix caching in vLLM's CPU build."""

from __future__ import annotations

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2


def end_steps_at_states() -> None:
    """Make vLLM end prefill steps where it wants to keep a state, in this process.

    vLLM 0.32 takes the state from inside a step, which the CPU kernel does not support: the engine ends with an
    IndexError.
    """
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
