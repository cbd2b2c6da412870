"""KV and states that the layers of a model keep, and the KV cache groups that vLLM forms, computed without vLLM.

vLLM's rules are in its ``v1/core/kv_cache_utils.py`` (groups), ``platforms/interface.py`` (blocks that hold a state)
and ``model_executor/layers/mamba/mamba_utils.py`` (shapes of states). Tests compare with all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.layout import KVLayout, round_up

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SIMILAR: Final = 1.5  # kinds whose numbers of layers differ by a smaller factor form one group each


@dataclass(frozen=True)
class Geometry:
    """Geometry of the KV of layers that are alike.

    Attributes:
        layers: attention layers.
        kv_heads: heads of keys and values; 1 with latent attention (MLA).
        head_elements: elements per token and head: keys and values together, or the latent vector.
        dtype: type of the elements.
    """

    layers: int
    kv_heads: int
    head_elements: int
    dtype: str

    def layer_bytes_per_token(self, tp_size: int = 1) -> int:
        """Return the bytes of a token in one layer of one worker.

        Heads are divided among tensor-parallel workers, or repeated if there are fewer heads than workers.

        Raises:
            ConfigError: the heads cannot be divided among ``tp_size`` workers.
        """
        if tp_size < 1 or (self.kv_heads % tp_size and tp_size % self.kv_heads):
            raise ConfigError(f"{self.kv_heads} KV heads cannot be divided among {tp_size} workers")
        return max(1, self.kv_heads // tp_size) * self.head_elements * DTYPE_BYTES[self.dtype]

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """Return the bytes of a token in all these layers of one worker."""
        return self.layers * self.layer_bytes_per_token(tp_size)


@dataclass(frozen=True)
class Attention:
    """Attention layers that are alike, which keep the KV of all tokens or of the last ones.

    Attributes:
        geometry: geometry of their KV.
        kind: kind of attention.
        span_tokens: as ``Group.span_tokens``.
    """

    geometry: Geometry
    kind: GroupKind = GroupKind.FULL
    span_tokens: int = 0


@dataclass(frozen=True)
class State:
    """State of a layer of Mamba, linear attention or a short convolution: convolution inputs, and a matrix per head.

    Attributes:
        channels: channels of the convolution; tensor-parallel workers divide them, as they divide the heads.
        kept_inputs: inputs of the convolution that are kept, per channel.
        heads: heads with a matrix.
        head_elements: elements of a matrix.
        groups: groups of heads that share further channels. Workers hold whole groups, or repeat them.
        group_channels: channels of each group.
        dtype: type of the convolution's inputs.
        matrix_dtype: type of the matrices.
    """

    channels: int
    kept_inputs: int
    heads: int = 0
    head_elements: int = 0
    groups: int = 0
    group_channels: int = 0
    dtype: str = "bfloat16"
    matrix_dtype: str = "bfloat16"

    def state_bytes(self, tp_size: int = 1) -> int:
        """Return the bytes of one state of one worker.

        Raises:
            ConfigError: the state cannot be divided among ``tp_size`` workers.
        """
        groups = self.groups if self.groups % tp_size == 0 else tp_size
        channels = self.channels + groups * self.group_channels
        if channels % tp_size or self.heads % tp_size:
            raise ConfigError(
                f"a state of {self.heads} heads and {channels} channels cannot be divided among {tp_size} workers"
            )
        inputs = channels // tp_size * self.kept_inputs
        matrices = self.heads // tp_size * self.head_elements
        return inputs * DTYPE_BYTES[self.dtype] + matrices * DTYPE_BYTES[self.matrix_dtype]


class Alike(NamedTuple):
    """Layers of one kind on one worker; ``page_bytes`` is the size of a block in one of them."""

    kind: GroupKind
    layers: int
    block_tokens: int
    page_bytes: int
    span_tokens: int


@dataclass(frozen=True)
class KVModel:
    """KV cache of a model.

    Attributes:
        attention: attention layers; those that keep all tokens come first.
        states: number of layers that keep a state.
        state: state of these layers; None if there are none.
    """

    attention: tuple[Attention, ...]
    states: int = 0
    state: State | None = None

    @property
    def has_one_kind(self) -> bool:
        """True if all layers are attention of one kind; chunks then hold their KV, even if the layers have windows."""
        return self.state is None and len(self.attention) == 1

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """Return the bytes of a token in a chunk of one worker."""
        in_chunks = (one for one in self.attention if one.kind is GroupKind.FULL or self.has_one_kind)
        return sum(one.geometry.bytes_per_token(tp_size) for one in in_chunks)

    def promoted_bytes_per_token(self, tp_size: int = 1) -> int | None:
        """Return the bytes of a token if vLLM lets every layer keep all tokens, as without its hybrid manager.

        None if vLLM does not: it cannot if there are states, and does not if no layer keeps all tokens.
        """
        if self.state is not None or self.has_one_kind or not self.bytes_per_token(tp_size):
            return None
        return sum(one.geometry.bytes_per_token(tp_size) for one in self.attention)

    def block_tokens(self, wanted_tokens: int, tp_size: int = 1) -> int:
        """Return the tokens of an attention block: as wanted, or as many as make a block as large as a state."""
        if self.state is None:
            return wanted_tokens
        token_bytes = max(one.geometry.layer_bytes_per_token(tp_size) for one in self.attention)
        return round_up(max(wanted_tokens, -(-self.state.state_bytes(tp_size) // token_bytes)), wanted_tokens)

    def alike(self, wanted_tokens: int, tp_size: int = 1) -> list[Alike]:
        """Return the layers of each kind; a block has more tokens if they are smaller by a whole factor."""
        block_tokens = self.block_tokens(wanted_tokens, tp_size)
        sizes = [one.geometry.layer_bytes_per_token(tp_size) for one in self.attention]
        found = []
        for one, size in zip(self.attention, sizes, strict=True):
            tokens = block_tokens * (max(sizes) // size if max(sizes) % size == 0 else 1)
            found.append(Alike(one.kind, one.geometry.layers, tokens, tokens * size, one.span_tokens))
        if self.state is not None:
            found.append(Alike(GroupKind.STATE, self.states, block_tokens, self.state.state_bytes(tp_size), 0))
        return found

    def groups(self, wanted_tokens: int, tp_size: int = 1) -> Groups:
        """Return the groups that vLLM forms with a block size on one worker; a single kind counts as full attention."""
        found = self.alike(wanted_tokens, tp_size)
        if self.has_one_kind:
            (one,) = found
            return Groups((Group(GroupKind.FULL, one.block_tokens, one.layers * one.page_bytes),))
        return Groups(
            tuple(
                Group(one.kind, one.block_tokens, layers * one.page_bytes, one.span_tokens)
                for one, layers in _shares(found)
            )
        )

    def chunk_layout(self, wanted_tokens: int, chunk_tokens: int, tp_size: int = 1) -> KVLayout:
        """Return the layout of a chunk, which holds the layers that keep all tokens.

        Without such layers, it is the layout of the first attention layers, as the size of checkpoint parts.

        Raises:
            LayoutError: ``chunk_tokens`` is not a whole number of blocks.
        """
        first = self.alike(wanted_tokens, tp_size)[0]
        return KVLayout((first.page_bytes,) * first.layers, 1, first.block_tokens, chunk_tokens)


def _shares(found: list[Alike]) -> Iterator[tuple[Alike, int]]:
    """Yield the kind and layers of each group: as many as the rarest kind has, or the most frequent if similar."""
    fewest, most = min(one.layers for one in found), max(one.layers for one in found)
    size = most if most < fewest * _SIMILAR else fewest
    for one in found:
        num_groups = -(-one.layers // size)
        for number in range(num_groups):
            yield one, len(range(number, one.layers, num_groups))
