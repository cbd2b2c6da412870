"""Mamba2 with prefix caching in vLLM's CPU build."""

from __future__ import annotations

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2


def end_steps_at_states() -> None:
    """Have vLLM end a step of prefill where it wants to keep a state, in this process.

    vLLM 0.32 takes it from inside the step, which the CPU's kernel cannot give: the engine ends with an IndexError.
    """
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
