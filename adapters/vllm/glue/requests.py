"""What vLLM's requests say: their keys, their adapters, and what their clients ask for."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from kvstore.adapters.vllm.requests.adapterfiles import Adapter
from kvstore.adapters.vllm.requests.params import NO_PARAMS, Handover, RequestParams, parse_handover, parse_params
from kvstore.keys import Feature, KeyExtras

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PROBES: Final = "kvstore.probe\0"


def handover_of(request: Request) -> Handover | None:
    """What the request says about other engines that share it.

    Raises:
        FieldError: a field is wrong.
    """
    return parse_handover(request.kv_transfer_params, request.request_id)


def request_params(request: Request, counted: Collection[str]) -> RequestParams:
    """What the client asks of the cache, in ``counted`` fields; ``kv_transfer_params`` override other arguments.

    Raises:
        FieldError: a field is wrong.
    """
    sampling = request.sampling_params
    if sampling is None:
        return NO_PARAMS
    return parse_params(sampling.extra_args, request.kv_transfer_params, counted=counted)


def is_shareable(request: Request) -> bool:
    """Whether a request's tokens determine its KV.

    Prompt embeddings appear as zero tokens, pooling may attend both ways, and sessions rewrite their tokens.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return False
    return request.pooling_params is None and not request.resumable


def adapter_of(request: Request) -> Adapter | None:
    """The LoRA adapter that a request names, if any."""
    adapter = request.lora_request
    if adapter is None:
        return None
    return Adapter(adapter.lora_int_id, str(adapter.lora_name), adapter.lora_path, bool(adapter.load_inplace))


def key_extras(request: Request, params: RequestParams = NO_PARAMS, lora_files: str = "") -> KeyExtras:
    """What decides a request's KV in addition to its tokens; ``lora_files`` is the fingerprint of its adapter."""
    adapter = adapter_of(request)
    return KeyExtras(
        lora=(adapter.name, lora_files) if adapter is not None else None,
        cache_salt=f"{_PROBES}{params.probe}" if params.probe else request.cache_salt,
        tags=params.tags,
        features=tuple(
            Feature(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ),
    )
