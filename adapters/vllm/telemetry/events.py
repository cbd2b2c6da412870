"""Announcements as events that vLLM publishes with its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvstore.adapters.vllm.telemetry.announcer import Blocks, Context, Removed, Stored
from kvstore.index.plans import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

_MEDIA: Final = {Place.MEMORY: MEDIUM_CPU, Place.DISK: MEDIUM_STORAGE}
_OURS: Final = {"locality": "LOCAL", "ownership": "kvstore"}


def context_of(request: Request, blocks: range, block_tokens: int) -> Context:
    """Return what the hashes of a request's blocks cover besides tokens, as vLLM's own events have it."""
    session_id = getattr(request, "session_id", None)  # new in vLLM 0.32
    if not (request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None):
        return Context(session_id=session_id)  # the usual case
    keys, feature = list[Any](), 0
    for block in blocks:
        begin = block * block_tokens
        own, feature = generate_block_hash_extra_keys(request, begin, begin + block_tokens, feature)
        keys.append(own)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)(keys)  # tagged since vLLM 0.32
    return Context(tuple(untagged or ()), session_id)


def as_kv_events(announced: Iterable[Stored | Removed], spec: KVCacheSpec, group: int = 0) -> Iterator[KVCacheEvent]:
    """Yield events for listeners; ``spec`` is that of the layer group that keeps all tokens, ``group`` its number."""
    for event in announced:
        medium = _MEDIA[event.place]
        if isinstance(event, Stored):
            yield _stored(event.blocks, medium, spec, group)
        else:
            hashes = [_as_published(name) for name in event.hashes]
            yield BlockRemoved(hashes, medium, group_idx=group, **_known(BlockRemoved, **_OURS))


def _stored(blocks: Blocks, medium: str, spec: KVCacheSpec, group: int) -> BlockStored:
    return BlockStored(
        block_hashes=[_as_published(name) for name in blocks.hashes],
        parent_block_hash=None if blocks.parent is None else _as_published(blocks.parent),
        token_ids=blocks.token_ids.tolist(),
        block_size=spec.block_size,
        lora_id=blocks.lora.adapter_id if blocks.lora else None,
        medium=medium,
        lora_name=blocks.lora.name if blocks.lora else None,
        group_idx=group,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        **_known(
            BlockStored,
            extra_keys=list(blocks.context.extra_keys) or None,
            session_id=blocks.context.session_id,
            **_OURS,
        ),
    )


def _known(kind: type[msgspec.Struct], **fields: object) -> dict[str, Any]:
    """Return those fields that this vLLM's event has."""
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


def _as_published(name: bytes) -> bytes | int:
    """Return bytes, or 64 bits as a number, as vLLM's environment variable selects for its own events."""
    converted: bytes | int = maybe_convert_block_hash(BlockHash(name))
    return converted
