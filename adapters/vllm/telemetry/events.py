"""Announcements as events that vLLM publishes with its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvstore.adapters.vllm.telemetry.announcer import Blocks, Removed, Stored
from kvstore.index.plans import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheSpec

_MEDIA: Final = {Place.MEMORY: MEDIUM_CPU, Place.DISK: MEDIUM_STORAGE}


def as_kv_events(announced: Iterable[Stored | Removed], spec: KVCacheSpec, group: int = 0) -> Iterator[KVCacheEvent]:
    """Yield events for listeners; ``spec`` is that of the layer group that keeps all tokens, ``group`` its number."""
    for event in announced:
        medium = _MEDIA[event.place]
        if isinstance(event, Stored):
            yield _stored(event.blocks, medium, spec, group)
        else:
            yield BlockRemoved([_as_published(name) for name in event.hashes], medium, group_idx=group)


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
    )


def _as_published(name: bytes) -> bytes | int:
    """Return bytes, or 64 bits as a number, as vLLM's environment variable selects for its own events."""
    converted: bytes | int = maybe_convert_block_hash(BlockHash(name))
    return converted
