"""``kvstore calc``: the size of a token's and a chunk's KV, how many tokens fit in memory, and what a GPU gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.format import chunkfile
from kvstore.layout import KVLayout
from kvstore.paged.footprint import DeviceBytes, device_bytes

GIB = 1 << 30
PIN_S_PER_GIB = 0.11  # what drivers take, by other people's figures
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Geometry:
    """What decides the size of a model's KV.

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

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """KV of one worker: heads are divided among tensor-parallel workers, or repeated if there are too few."""
        heads = max(1, self.kv_heads // tp_size)
        return self.layers * heads * self.head_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Sizes:
    """The answer, for one worker.

    Attributes:
        chunk_bytes: payload of a full chunk.
        file_bytes: size of its file on disk, without a codec.
        holds_tokens: for each memory size asked for, in GiB, how many tokens fit, in whole chunks.
        pin_s: for each of these, about how long it takes to pin it.
        device: bytes of a GPU that are taken.
    """

    geometry: Geometry
    tp_size: int
    chunk_tokens: int
    bytes_per_token: int
    chunk_bytes: int
    file_bytes: int
    holds_tokens: dict[str, int]
    pin_s: dict[str, float]
    device: DeviceBytes


def calculate(
    geometry: Geometry,
    *,
    chunk_tokens: int,
    block_tokens: int,
    tp_size: int,
    memory_gib: Sequence[float],
    gpu_tier_gib: float = 0.0,
) -> Sizes:
    """Work out all sizes.

    Raises:
        ConfigError: the chunk size is not a multiple of the block size, or the heads cannot be divided like this.
    """
    if tp_size < 1 or (geometry.kv_heads % tp_size and tp_size % geometry.kv_heads):
        raise ConfigError(f"{geometry.kv_heads} KV heads cannot be divided among {tp_size} workers")
    page_bytes = geometry.bytes_per_token(tp_size) * block_tokens // geometry.layers
    layout = KVLayout((page_bytes,) * geometry.layers, 1, block_tokens, chunk_tokens)
    blocks = layout.blocks_per_chunk
    holds = {f"{gib:g}": int(gib * GIB) // layout.slot_bytes * chunk_tokens for gib in memory_gib}
    return Sizes(
        geometry,
        tp_size,
        chunk_tokens,
        geometry.bytes_per_token(tp_size),
        layout.payload_bytes(blocks),
        chunkfile.file_bytes(layout, blocks),
        holds,
        {f"{gib:g}": gib * PIN_S_PER_GIB for gib in memory_gib},
        device_bytes(layout, tier_bytes=int(gpu_tier_gib * GIB)),
    )


def geometry_of(model: Path, kv_dtype: str | None = None) -> Geometry:
    """Read a model's ``config.json``.

    Args:
        model: the model's folder, or the file.
        kv_dtype: as vLLM's ``--kv-cache-dtype``; None or ``auto`` for the model's own.

    Raises:
        ConfigError: there is no such file, or it does not say enough.
    """
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; name the folder of a model, or give --layers"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a model's configuration")
    text = {**config, **config.get("text_config", {})}  # of a model that also reads images
    dtype = kv_dtype if kv_dtype not in (None, "auto") else str(text.get("dtype") or text.get("torch_dtype") or "")
    return _geometry(text, dtype.removeprefix("torch.") or "bfloat16", file)


def _geometry(config: Mapping[str, Any], dtype: str, file: Path) -> Geometry:
    check_dtype(dtype)
    try:
        layers = int(config["num_hidden_layers"])
        if "kv_lora_rank" in config:
            return Geometry(layers, 1, int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), dtype)
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return Geometry(layers, int(config.get("num_key_value_heads") or heads), 2 * head_dim, dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} does not say {error}: give --layers, --kv-heads and --head-size") from error


def check_dtype(dtype: str) -> None:
    """Refuse a type of unknown size.

    Raises:
        ConfigError: the type is unknown; the message lists the known ones.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"the KV dtype {dtype!r} is not known: use one of {', '.join(DTYPE_BYTES)}")
