"""Reads vLLM's requests: their keys, their adapters and their multimodal items."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvstore.adapters.vllm.requests.adapterfiles import Adapter
from kvstore.adapters.vllm.requests.arrivals import NOTHING_KNOWN, Known
from kvstore.adapters.vllm.requests.contents import Unnamed
from kvstore.adapters.vllm.requests.params import MAX_TTL_S, NO_PARAMS, RequestParams
from kvstore.model.keys import Feature, KeyExtras

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

_MAX_HINTS: Final = 64
_FLAG_HINTS: Final = {"demote", "drop"}
_PROBES: Final = "kvstore.probe\0"
_COUNTED: Final = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")  # from a renderer elsewhere, or behind a LoRA's name


def extra_args_of(request: Request) -> dict[str, Any] | None:
    """Return the arguments of a request that vLLM only passes on; None without any."""
    return request.sampling_params.extra_args if request.sampling_params is not None else None


def hints_of(request: Request) -> dict[str, object]:
    """Return the fields that a router's hints stand for: the longest ``retain`` of an envelope, ``demote``, ``drop``.

    Others are ignored. Dynamo and SGLang send the same envelope, new in vLLM 0.32, and name the time ``ttl_seconds``.
    """
    envelope = getattr(request, "kv_hints", None)
    actions = envelope.actions[:_MAX_HINTS] if envelope is not None else ()
    asked = [action.payload.get("ttl_seconds") for action in actions if action.action_type == "retain"]
    times_s = [ttl_s for ttl_s in asked if isinstance(ttl_s, int | float) and ttl_s > 0]
    fields: dict[str, object] = {
        f"kvstore.{action.action_type}": True for action in actions if action.action_type in _FLAG_HINTS
    }
    return fields | ({"kvstore.retain": min(max(times_s), MAX_TTL_S)} if times_s else {})


def is_shareable(request: Request) -> bool:
    """Tell if a request's tokens determine its KV.

    Prompt embeddings appear as zero tokens, pooling may attend both ways, and sessions rewrite their tokens.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return False
    return request.pooling_params is None and not request.resumable


def adapter_of(request: Request) -> Adapter | None:
    """Return the LoRA adapter that a request names, if any."""
    adapter = request.lora_request
    if adapter is None:
        return None
    return Adapter(adapter.lora_int_id, str(adapter.lora_name), adapter.lora_path, bool(adapter.load_inplace))


def features_of(request: Request, config: VllmConfig) -> list[Feature | Unnamed]:
    """Return a request's multimodal items in order of offset, named where vLLM's identifier determines the content.

    vLLM hashes content only for its own caches. Without its prefix cache and its processor cache it counts requests
    from 0 in each process, and may hash the count together with the processor's arguments, so that the identifier
    looks like a content hash; all inputs are then in this process. Otherwise a client's identifiers are accepted, as
    in vLLM's prefix cache. With a cache, the inputs may be in another process, and only their address in this one.
    """
    multimodal = config.model_config.multimodal_config if request.mm_features else None
    counts = (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not config.cache_config.enable_prefix_caching
    )
    return [_feature_of(feature, counts=counts) for feature in request.mm_features]


def _feature_of(feature: MultiModalFeatureSpec, *, counts: bool) -> Feature | Unnamed:
    offset, length = feature.mm_position.offset, feature.mm_position.length
    if not counts and not _COUNTED.search(feature.identifier):
        return Feature(feature.identifier, offset, length)
    data = feature.data if counts and feature.data is not None else {}
    return Unnamed(feature.modality, {name: element.data for name, element in data.items()}, offset, length)


def key_extras(request: Request, params: RequestParams = NO_PARAMS, known: Known = NOTHING_KNOWN) -> KeyExtras:
    """Collect the inputs of a request's keys other than its tokens."""
    adapter = adapter_of(request)
    return KeyExtras(
        lora=(adapter.name, known.files) if adapter is not None else None,
        cache_salt=f"{_PROBES}{params.probe}" if params.probe else request.cache_salt,
        tags=params.tags,
        features=known.features,
    )
