"""Differences between the supported versions of vLLM, detected by inspection and not by version number."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstore.index.plans import Place

if TYPE_CHECKING:
    from kvstore.adapters.vllm.telemetry.stats import HitTokens


class Capability(NamedTuple):
    """Something that only some versions of vLLM have.

    Attributes:
        since: the first version that has it.
        changes: what it changes for users.
    """

    since: str
    changes: str


COUNTS_REPLICAS: Final = Capability(
    "0.31", "of ranks that hold the same KV (MLA) one sends it to a shared tier; before, each sends and reads its own"
)
NAMES_HIT_SOURCES: Final = Capability("0.32", "vLLM's own metrics split a hit by memory, disk and remote tier")
SLEEPS: Final = Capability("0.33", "connectors are told of sleep: it may be used on GPUs, with the GPU tier too")


def _find(module: str, name: str) -> Any:  # noqa: ANN401 - whatever that version has there
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError:
        return None


_CacheHitSource: Final = _find("vllm.v1.metrics.cache_hit_source", "CacheHitSource")

FOUND: Final[Mapping[Capability, bool]] = {
    COUNTS_REPLICAS: "kv_tp_replicas" in KVCacheConfig.__dataclass_fields__,
    NAMES_HIT_SOURCES: _CacheHitSource is not None,
    SLEEPS: hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
}
"""All capabilities: True for those that the installed vLLM has."""


def kv_replicas(kv_cache_config: KVCacheConfig) -> int:
    """Return the number of consecutive ranks with the same KV; 1 before 0.31, where vLLM does not say."""
    return max(1, kv_cache_config.kv_tp_replicas) if FOUND[COUNTS_REPLICAS] else 1


def hit_sources(hit: HitTokens) -> dict[Any, int]:
    """Return a hit's tokens by vLLM's names of the tiers; only called with versions that have names."""
    names = {
        Place.MEMORY: _CacheHitSource.HOST,
        Place.DISK: _CacheHitSource.DISK,
        Place.REMOTE: _CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
    return {names[place]: num_tokens for place, num_tokens in hit.items() if num_tokens}


def end_step_at(request: Any, num_tokens: int) -> None:  # noqa: ANN401 - of versions that may lack the attribute
    """Make vLLM end a prefill step at a token and keep the state there.

    vLLM does this where prompts diverge in its own prefix cache, but the store knows more prompts.
    """
    known_tokens = getattr(request, "shared_prefix_boundary", None)
    if known_tokens is not None:
        request.shared_prefix_boundary = max(known_tokens, num_tokens)
