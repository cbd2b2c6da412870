"""What the layers of a model keep, and the KV cache groups that vLLM makes of them: arithmetic, without vLLM.

What vLLM does is in its ``v1/core/kv_cache_utils.py`` (groups), ``platforms/interface.py`` (blocks that hold a state)
and ``model_executor/layers/mamba/mamba_utils.py`` (shapes of states). Tests compare with all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.checkpoints.groups import Group, Groups, Kind
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout, round_up

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SIMILAR: Final = 1.5  # kinds whose numbers of layers differ by less are one group each


@dataclass(frozen=True)
class Geometry:
    """What decides the size of the KV of layers that are alike.

    Attributes:
        layers: attention layers.
        kv_heads: heads of keys and values; 1 with latent attention (MLA).
        head_elements: numbers per token and head: keys and values together, or the latent vector.
        dtype: type of these numbers.
    """

    layers: int
    kv_heads: int
    head_elements: int
    dtype: str

    def layer_bytes_per_token(self, tp_size: int = 1) -> int:
        """One layer of one worker: heads are divided among tensor-parallel workers, or repeated if there are too few.

        Raises:
            ConfigError: the heads cannot be divided like this.
        """
        if tp_size < 1 or (self.kv_heads % tp_size and tp_size % self.kv_heads):
            raise ConfigError(f"{self.kv_heads} KV heads cannot be divided among {tp_size} workers")
        return max(1, self.kv_heads // tp_size) * self.head_elements * DTYPE_BYTES[self.dtype]

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """KV of one worker, in all these layers."""
        return self.layers * self.layer_bytes_per_token(tp_size)


@dataclass(frozen=True)
class Attention:
    """Attention layers that are alike, and whose KV they keep: that of all tokens, or of the last.

    Attributes:
        span_tokens: as of a ``Group``.
    """

    geometry: Geometry
    kind: Kind = Kind.FULL
    span_tokens: int = 0


@dataclass(frozen=True)
class State:
    """What a layer of Mamba, linear attention or a short convolution keeps: inputs of a convolution, a matrix a head.

    Attributes:
        channels: of the convolution; tensor-parallel workers divide them, as the heads.
        kept_inputs: of the convolution, for each channel.
        heads: that have a matrix.
        head_elements: of a matrix.
        groups: of heads that share further channels. Workers hold whole groups, or repeat them.
        group_channels: channels of each.
        dtype: of the convolution's inputs.
        matrix_dtype: of the matrices.
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
        """One state of one worker.

        Raises:
            ConfigError: it cannot be divided among so many.
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
    """Layers of one kind on one worker; ``page_bytes`` is a block in one of them."""

    kind: Kind
    layers: int
    block_tokens: int
    page_bytes: int
    span_tokens: int


@dataclass(frozen=True)
class KVModel:
    """A model, as far as its KV cache goes.

    Attributes:
        attention: its attention layers; those that keep all tokens come first.
        states: number of layers that keep a state.
        state: which one; None if no layer does.
    """

    attention: tuple[Attention, ...]
    states: int = 0
    state: State | None = None

    @property
    def has_one_kind(self) -> bool:
        """Whether all layers are attention of one kind: chunks hold their KV then, also if they have windows."""
        return self.state is None and len(self.attention) == 1

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """KV of a token in a chunk of one worker."""
        in_chunks = (one for one in self.attention if one.kind is Kind.FULL or self.has_one_kind)
        return sum(one.geometry.bytes_per_token(tp_size) for one in in_chunks)

    def promoted_bytes_per_token(self, tp_size: int = 1) -> int | None:
        """The same if vLLM lets every layer keep all tokens, as it does without its hybrid manager; None if it cannot.

        It cannot if there are states, and it does not if no layer keeps all tokens.
        """
        if self.state is not None or self.has_one_kind or not self.bytes_per_token(tp_size):
            return None
        return sum(one.geometry.bytes_per_token(tp_size) for one in self.attention)

    def block_tokens(self, wanted_tokens: int, tp_size: int = 1) -> int:
        """Tokens of a block of attention: as wanted, or as many as make a block as large as a state."""
        if self.state is None:
            return wanted_tokens
        token_bytes = max(one.geometry.layer_bytes_per_token(tp_size) for one in self.attention)
        return round_up(max(wanted_tokens, -(-self.state.state_bytes(tp_size) // token_bytes)), wanted_tokens)

    def alike(self, wanted_tokens: int, tp_size: int = 1) -> list[Alike]:
        """Layers of each kind. Of those whose tokens are smaller, more fit in a block, if it is a whole multiple."""
        block_tokens = self.block_tokens(wanted_tokens, tp_size)
        sizes = [one.geometry.layer_bytes_per_token(tp_size) for one in self.attention]
        found = []
        for one, size in zip(self.attention, sizes, strict=True):
            tokens = block_tokens * (max(sizes) // size if max(sizes) % size == 0 else 1)
            found.append(Alike(one.kind, one.geometry.layers, tokens, tokens * size, one.span_tokens))
        if self.state is not None:
            found.append(Alike(Kind.STATE, self.states, block_tokens, self.state.state_bytes(tp_size), 0))
        return found

    def groups(self, wanted_tokens: int, tp_size: int = 1) -> Groups:
        """The groups that vLLM makes of them with a block size, on one worker. One alone counts as if it kept all."""
        found = self.alike(wanted_tokens, tp_size)
        if self.has_one_kind:
            (one,) = found
            return Groups((Group(Kind.FULL, one.block_tokens, one.layers * one.page_bytes),))
        return Groups(
            tuple(
                Group(one.kind, one.block_tokens, layers * one.page_bytes, one.span_tokens)
                for one, layers in _shares(found)
            )
        )

    def chunk_layout(self, wanted_tokens: int, chunk_tokens: int, tp_size: int = 1) -> KVLayout:
        """A chunk, of the layers that keep all tokens. Without any, parts of checkpoints are as large as if one did.

        Raises:
            LayoutError: a chunk of so many tokens is not a whole number of blocks.
        """
        first = self.alike(wanted_tokens, tp_size)[0]
        return KVLayout((first.page_bytes,) * first.layers, 1, first.block_tokens, chunk_tokens)


def _shares(found: list[Alike]) -> Iterator[tuple[Alike, int]]:
    """The layers of each group: as many as the rarest kind has, or the most frequent if that is little more."""
    fewest, most = min(one.layers for one in found), max(one.layers for one in found)
    size = most if most < fewest * _SIMILAR else fewest
    for one in found:
        num_groups = -(-one.layers // size)
        for number in range(num_groups):
            yield one, len(range(number, one.layers, num_groups))
