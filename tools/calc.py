"""``kvstore calc``: the size of KV, of a token to a prompt, how many tokens fit in memory, and what a GPU gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.checkpoints.groups import Kind
from kvstore.checkpoints.parts import Checkpoints
from kvstore.format import chunkfile
from kvstore.keys import PREFIX_KEY_BYTES
from kvstore.layout import KVLayout, round_up
from kvstore.paged.footprint import DeviceBytes, device_bytes
from kvstore.tools.modelgroups import Geometry, KVModel

GIB = 1 << 30
PIN_S_PER_GIB = 0.11  # what drivers take, by other people's figures
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 10_000
_ANY_KEY: Final = bytes(PREFIX_KEY_BYTES)


@dataclass(frozen=True)
class GroupSizes:
    """Layers that keep the same, on one worker.

    Attributes:
        kind: ``full``, ``window``, ``local`` or ``state``.
        layers: how many there are.
        block_tokens: tokens in a block of theirs.
        block_bytes: of a block in all of them.
        span_tokens: of a window, the tokens before the next one that it shows; of local attention, its chunk.
    """

    kind: str
    layers: int
    block_tokens: int
    block_bytes: int
    span_tokens: int


@dataclass(frozen=True)
class CheckpointSizes:
    """The checkpoint at the end of a prompt.

    Attributes:
        at_tokens: tokens before it.
        size_bytes: of the windows and states.
        parts: how many chunks it is stored as.
        worth_tokens: tokens whose chunks are as large; None if the model has no chunks.
    """

    at_tokens: int
    size_bytes: int
    parts: int
    worth_tokens: int | None


@dataclass(frozen=True)
class PromptSizes:
    """What is stored of one prompt, by the default rule.

    Attributes:
        tokens: of the prompt.
        chunks: whole ones before its last token.
        checkpoints: at its end, or at each chunk's end where one is no larger than a chunk.
        stored_bytes: payloads of all of these.
        loaded_bytes: payloads that a hit at its end takes: the chunks, and one checkpoint.
        promoted_bytes: what is stored if vLLM lets every layer keep all tokens; None if it does not.
        slots: of memory that they occupy.
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
    """The answer, for one worker.

    Attributes:
        geometry: of the layers that keep all tokens; without any, of others.
        groups: layers of each kind.
        alignment_tokens: after so many a block of every layer ends.
        chunk_tokens: as wanted, or rounded up to a multiple of that.
        bytes_per_token: in the layers that keep all tokens.
        chunk_bytes: payload of a full chunk; without layers that keep all tokens, of the largest part of a checkpoint.
        file_bytes: size of its file on disk, without a codec.
        checkpoint: None if the model needs none.
        prompt: what is stored of a prompt.
        holds_tokens: for each memory size asked for, in GiB, how many tokens of such prompts fit, in whole chunks.
        pin_s: for each of these, about how long it takes to pin it.
        device: bytes of a GPU that are taken.
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
        """What a hit takes for each of a prompt's tokens."""
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
    """Work out all sizes. A prompt has at least one whole chunk before its last token.

    Raises:
        ConfigError: the heads cannot be divided among so many workers.
        LayoutError: the chunk size is not a multiple of the block size, or less than a block of a checkpoint.
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
    """The tokens of a prompt's whole chunks. Its last token is always computed."""
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
    """What layers keep, for people."""
    match Kind(group.kind):
        case Kind.FULL:
            return "all tokens"
        case Kind.WINDOW:
            return f"a window of {group.span_tokens + 1:,} tokens"
        case Kind.LOCAL:
            return f"the tokens since a multiple of {group.span_tokens:,}"
        case Kind.STATE:
            return f"a state of {group.block_bytes // group.layers:,} bytes"
