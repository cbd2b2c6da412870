"""Sizes for ``kvstore calc``: KV from one token to a prompt, tokens that fit in memory, and GPU memory used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.format import chunkfile
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.groups import GroupKind
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.layout import KVLayout, round_up
from kvstore.paged.footprint import DeviceBytes, device_bytes
from kvstore.tools.modelgroups import Geometry, KVModel

GIB = 1 << 30
PIN_S_PER_GIB = 0.19  # of 16 GiB on a virtual machine with an H100
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 10_000
_ANY_KEY: Final = bytes(PREFIX_KEY_BYTES)


@dataclass(frozen=True)
class GroupSizes:
    """Layers that keep KV of one kind, on one worker.

    Attributes:
        kind: ``full``, ``window``, ``local`` or ``state``.
        layers: number of layers.
        block_tokens: tokens in one of their blocks.
        block_bytes: bytes of a block in all of them.
        span_tokens: tokens before the next one that a window covers, or the chunk size of local attention.
    """

    kind: str
    layers: int
    block_tokens: int
    block_bytes: int
    span_tokens: int


@dataclass(frozen=True)
class CheckpointSizes:
    """Checkpoint at the end of a prompt.

    Attributes:
        at_tokens: tokens before it.
        size_bytes: bytes of the windows and states.
        parts: number of chunks it is stored as.
        worth_tokens: tokens whose chunks have the same size; None if the model has no chunks.
    """

    at_tokens: int
    size_bytes: int
    parts: int
    worth_tokens: int | None


@dataclass(frozen=True)
class PromptSizes:
    """Chunks and checkpoints stored for one prompt, by the default rule.

    Attributes:
        tokens: tokens of the prompt.
        chunks: whole chunks before its last token.
        checkpoints: checkpoints at its end, or at each chunk's end if one is no larger than a chunk.
        stored_bytes: payload bytes of all chunks and checkpoints.
        loaded_bytes: payload bytes that a hit at its end loads: the chunks, and one checkpoint.
        promoted_bytes: bytes stored if vLLM lets every layer keep all tokens; None if it does not.
        slots: memory slots that the chunks and checkpoints occupy.
    """

    tokens: int
    chunks: int
    checkpoints: int
    stored_bytes: int
    loaded_bytes: int
    promoted_bytes: int | None
    slots: int


@dataclass(frozen=True)
class Sizes:
    """Computed sizes, for one worker.

    Attributes:
        geometry: geometry of the layers that keep all tokens; without such layers, of the first attention layers.
        groups: layers of each kind.
        tp_size: size of tensor parallelism.
        alignment_tokens: tokens after which a block of every layer ends.
        chunk_tokens: requested chunk size, rounded up to a multiple of ``alignment_tokens`` if checkpoints are needed.
        bytes_per_token: bytes of a token in the layers that keep all tokens.
        chunk_bytes: payload of a full chunk; without layers that keep all tokens, of the largest part of a checkpoint.
        file_bytes: size of the chunk's file on disk, without a codec.
        checkpoint: checkpoint at the prompt's end; None if the model needs none.
        prompt: chunks and checkpoints stored for a prompt.
        holds_tokens: tokens of such prompts that fit, in whole chunks, by memory size in GiB.
        pin_s: approximate seconds to pin the memory, by memory size in GiB.
        device: GPU memory that is used, in bytes.
    """

    geometry: Geometry
    groups: tuple[GroupSizes, ...]
    tp_size: int
    alignment_tokens: int
    chunk_tokens: int
    bytes_per_token: int
    chunk_bytes: int
    file_bytes: int
    checkpoint: CheckpointSizes | None
    prompt: PromptSizes
    holds_tokens: dict[str, int]
    pin_s: dict[str, float]
    device: DeviceBytes

    @property
    def loaded_bytes_per_token(self) -> int:
        """Bytes that a hit loads per token of the prompt."""
        return self.prompt.loaded_bytes // _whole_tokens(self.prompt.tokens, self.chunk_tokens)


def calculate(
    model: KVModel,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    block_tokens: int = BLOCK_TOKENS,
    tp_size: int = 1,
    memory_gib: Sequence[float] = (),
    gpu_tier_gib: float = 0.0,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Sizes:
    """Compute all sizes, for a prompt with at least one whole chunk before its last token.

    Raises:
        ConfigError: the heads cannot be divided among ``tp_size`` workers.
        LayoutError: the chunk size is not a multiple of the block size, or is less than a block of a checkpoint.
    """
    groups = model.groups(block_tokens, tp_size)
    if groups.needs_checkpoints:
        chunk_tokens = round_up(chunk_tokens, groups.block_tokens)
    layout = model.chunk_layout(block_tokens, chunk_tokens, tp_size)
    prompt_tokens = max(prompt_tokens, chunk_tokens + 1)
    end_tokens = _whole_tokens(prompt_tokens, chunk_tokens)
    checkpoints = Checkpoints((groups,), (layout,))
    promoted = model.promoted_bytes_per_token(tp_size) if groups.needs_checkpoints else None
    prompt = _prompt(checkpoints, prompt_tokens, promoted)
    bytes_per_token = model.bytes_per_token(tp_size)
    return Sizes(
        model.attention[0].geometry,
        tuple(
            GroupSizes(one.kind.value, one.layers, one.block_tokens, one.layers * one.page_bytes, one.span_tokens)
            for one in model.alike(block_tokens, tp_size)
        ),
        tp_size,
        groups.block_tokens,
        chunk_tokens,
        bytes_per_token,
        layout.payload_bytes(layout.blocks_per_chunk),
        chunkfile.file_bytes(layout, layout.blocks_per_chunk),
        _checkpoint(checkpoints, end_tokens, bytes_per_token),
        prompt,
        {f"{gib:g}": _held_tokens(gib, layout, prompt) for gib in memory_gib},
        {f"{gib:g}": gib * PIN_S_PER_GIB for gib in memory_gib},
        device_bytes(layout, tier_bytes=int(gpu_tier_gib * GIB)),
    )


def _whole_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """Return the tokens of a prompt's whole chunks, without its last token, which is always computed."""
    return (prompt_tokens - 1) // chunk_tokens * chunk_tokens


def _checkpoint(checkpoints: Checkpoints, end_tokens: int, bytes_per_token: int) -> CheckpointSizes | None:
    groups = checkpoints.groups
    if not groups.needs_checkpoints:
        return None
    size_bytes = groups.checkpoint_bytes(end_tokens)
    return CheckpointSizes(
        end_tokens,
        size_bytes,
        len([*checkpoints.refs(_ANY_KEY, end_tokens)]),
        size_bytes // bytes_per_token if bytes_per_token else None,
    )


def _prompt(checkpoints: Checkpoints, prompt_tokens: int, promoted_bytes_per_token: int | None) -> PromptSizes:
    layout, groups = checkpoints.layouts[0], checkpoints.groups
    size = layout.chunk_tokens
    end_tokens = _whole_tokens(prompt_tokens, size)
    num_chunks = end_tokens // size if groups.full else 0
    ends = range(size, end_tokens + 1, size) if groups.needs_checkpoints else ()
    wanted = [end for end in ends if checkpoints.is_wanted(end - size, end, (end_tokens,))]
    parts = {end: [ref.num_blocks for ref in checkpoints.refs(_ANY_KEY, end)] for end in wanted}
    chunk_bytes = num_chunks * layout.payload_bytes(layout.blocks_per_chunk)
    return PromptSizes(
        prompt_tokens,
        num_chunks,
        len(wanted),
        chunk_bytes + sum(layout.payload_bytes(num_blocks) for of in parts.values() for num_blocks in of),
        chunk_bytes + sum(layout.payload_bytes(num_blocks) for num_blocks in parts.get(end_tokens, ())),
        None if promoted_bytes_per_token is None else end_tokens * promoted_bytes_per_token,
        num_chunks + sum(map(len, parts.values())),
    )


def _held_tokens(memory_gib: float, layout: KVLayout, prompt: PromptSizes) -> int:
    slots, size = int(memory_gib * GIB) // layout.slot_bytes, layout.chunk_tokens
    return slots * _whole_tokens(prompt.tokens, size) // prompt.slots // size * size


def kept(group: GroupSizes) -> str:
    """Describe the tokens or state that layers keep."""
    match GroupKind(group.kind):
        case GroupKind.FULL:
            return "all tokens"
        case GroupKind.WINDOW:
            return f"a window of {group.span_tokens + 1:,} tokens"
        case GroupKind.LOCAL:
            return f"the tokens since a multiple of {group.span_tokens:,}"
        case GroupKind.STATE:
            return f"a state of {group.block_bytes // group.layers:,} bytes"
