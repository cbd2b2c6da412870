"""Validation of the arguments of ``CacheEngine``: tokens, mask and slot mapping become keys and block ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS, KeyExtras, PrefixHasher
from kvstore.model.layout import KVLayout
from kvstore.paged.base import BlockIds

Tokens = Sequence[int] | npt.NDArray[Any] | torch.Tensor
Slots = Sequence[int] | npt.NDArray[Any] | torch.Tensor


class Request(NamedTuple):
    """A validated call: the tokens from ``begin`` on, and the ids of all their whole blocks."""

    hasher: PrefixHasher
    begin: int
    blocks: BlockIds
    told: RemoteAnswers = NO_ANSWERS  # answers of the remote tier


def check_request(
    layout: KVLayout,
    num_blocks: int,
    tokens: Tokens,
    mask: Tokens | None,
    slot_mapping: Slots,
    *,
    extras: KeyExtras = NO_EXTRAS,
    whole_chunks: bool = False,
) -> Request:
    """Validate a call. Covers the unmasked tokens; with ``whole_chunks``, starts at the next chunk boundary.

    Raises:
        InvalidCallError: mask or slots break the rules of ``CacheEngine``; the message names the first bad one.
    """
    hasher = hash_tokens(layout, tokens, extras)
    begin = _skipped(layout, mask, hasher.num_tokens)
    if whole_chunks:
        begin += -begin % layout.chunk_tokens
    return Request(hasher, begin, _blocks(layout, num_blocks, slot_mapping, begin, hasher.num_tokens))


def hash_tokens(layout: KVLayout, tokens: Tokens, extras: KeyExtras) -> PrefixHasher:
    """Hash a sequence into its prefix keys."""
    hasher = PrefixHasher(layout.chunk_tokens, layout.block_tokens, extras)
    hasher.update(tokens.tolist() if isinstance(tokens, torch.Tensor | np.ndarray) else tokens)
    return hasher


def _skipped(layout: KVLayout, mask: Tokens | None, num_tokens: int) -> int:
    """Return the number of leading False values in a mask, which are skipped."""
    if mask is None:
        return 0
    flags = _on_host(mask, np.bool_)
    if flags.shape != (num_tokens,):
        raise InvalidCallError(f"the mask has shape {flags.shape}, but there are {num_tokens} tokens")
    skip_tokens = int(flags.argmax()) if flags.any() else num_tokens
    if not flags[skip_tokens:].all():
        again = skip_tokens + int(flags[skip_tokens:].argmin())
        raise InvalidCallError(f"the mask must be F...FT...T, but token {again} is False again")
    if skip_tokens % layout.block_tokens and skip_tokens != num_tokens:
        raise InvalidCallError(
            f"the mask skips {skip_tokens} tokens, not a multiple of the block size {layout.block_tokens}"
        )
    return skip_tokens


def _blocks(layout: KVLayout, num_blocks: int, slot_mapping: Slots, begin: int, num_tokens: int) -> BlockIds:
    """Return the block ids of all whole blocks from token ``begin`` on."""
    slots = _on_host(slot_mapping, np.int64)
    if slots.shape != (num_tokens,):
        raise InvalidCallError(f"slot_mapping has shape {slots.shape}, but there are {num_tokens} tokens")
    size = layout.block_tokens
    end = max(begin, num_tokens - num_tokens % size)
    rows = slots[begin:end].reshape(-1, size)
    block_ids: BlockIds = rows[:, 0] // size if len(rows) else np.empty(0, np.int64)
    bad = rows != block_ids[:, None] * size + np.arange(size)
    if bad.any():
        position = begin + int(bad.reshape(-1).argmax())
        raise InvalidCallError(
            f"slot_mapping[{position}] = {int(slots[position])}: tokens must fill whole blocks of {size} slots, each "
            f"starting at a multiple of {size}"
        )
    outside = (block_ids < 0) | (block_ids >= num_blocks)
    if outside.any():
        position = begin + int(outside.argmax()) * size
        raise InvalidCallError(
            f"slot_mapping[{position}] = {int(slots[position])} is not in 0..{num_blocks * size - 1}"
        )
    return np.ascontiguousarray(block_ids)


def _on_host(values: Tokens, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=dtype)
