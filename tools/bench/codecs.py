"""Ratios and speeds of codecs for ``kvstore bench``, the speeds as fractions of memcpy in the same run.

There are two kinds of bfloat16 data, one chunk each: *normal* data is independent, with mean 0 and deviation 1;
*KV-like* data has a separate mean (normal) and deviation (log-normal, sigma 1) in each channel, as keys have. Chunks
are compared after a round trip through a lossless codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.table import Table

from kvstore.format.codecs import CODEC_NAMES, Codec, open_codec
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError
from kvstore.model.layout import KVLayout
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Subject
from kvstore.tools.bench.samples import require, sampled
from kvstore.tools.console import numbers

MEASURED = [name for name in CODEC_NAMES if name != "none"]


@dataclass(frozen=True)
class CodecLine:
    """One codec on one kind of data: medians of speeds in GB/s of unencoded data, and as fractions of memcpy."""

    codec: str
    data: str
    ratio: float
    encode_gbps: float
    encode_fraction: float
    decode_gbps: float
    decode_fraction: float


def measure_codecs(geometry: Geometry, rounds: int) -> list[CodecLine]:
    """Measure every codec but ``none``, on one thread each; codecs that cannot be opened are left out."""
    layout = KVLayout(
        (geometry.block_bytes // geometry.layers,) * geometry.layers,
        planes=1,
        block_tokens=geometry.block_tokens,
        chunk_tokens=geometry.chunk_tokens,
        element="bf16",
        page_axes=None if geometry.latent else (1, geometry.block_tokens, geometry.token_elements),
    )
    kinds = {"normal": _normal(layout), "KV-like": _kv_like(layout)}
    lines = []
    for name in MEASURED:
        with suppress(ConfigError):
            codec = open_codec(name, layout)
            lines += [_measure(codec, kind, data, layout, rounds) for kind, data in kinds.items()]
    return lines


def codec_table(lines: Sequence[CodecLine]) -> Table:
    """Return the lines as a table."""
    figures = numbers("ratio", "encode", "fraction", "decode", "fraction")
    table = Table("codec", "bfloat16 data", *figures, title="codecs, one thread; fractions of memcpy")
    for line in lines:
        table.add_row(
            *(line.codec, line.data, f"{line.ratio:.2f}"),
            *(f"{line.encode_gbps:.2f} GB/s", f"{line.encode_fraction:.2f}"),
            *(f"{line.decode_gbps:.2f} GB/s", f"{line.decode_fraction:.2f}"),
        )
    missing = ", ".join(sorted({*MEASURED} - {line.codec for line in lines}))
    if missing:
        table.caption = f"not measured: {missing} (lz4, split: pip install 'vllm-kvstore\\[codecs]'; int8: no channels)"
    return table


def _measure(codec: Codec, kind: str, data: ByteArray, layout: KVLayout, rounds: int) -> CodecLine:
    ranges = layout.layer_ranges(layout.blocks_per_chunk)
    encoded, back, copy = (prefaulted(len(data)) for _ in range(3))
    sizes = [0] * len(ranges)

    def encode() -> None:
        for layer, (begin, end) in enumerate(ranges):
            sizes[layer] = codec.encode(data[begin:end], encoded[begin:end])

    def decode() -> None:
        for (begin, end), size in zip(ranges, sizes, strict=True):
            codec.decode(encoded[begin : begin + size], back[begin:end])

    memcpy = partial(np.copyto, copy, data)
    subject = Subject(codec.name, "memcpy", kind)
    lines = [subject.line(sampled(memcpy, path, rounds)) for path in (encode, decode)]
    require(not codec.is_lossless or np.array_equal(back, data), f"the codec {codec.name} changed {kind} data")
    speeds = [figure for line in lines for figure in (len(data) / line.path_s / 1e9, line.fraction)]
    return CodecLine(codec.name, kind, len(data) / sum(sizes), *speeds)


def _normal(layout: KVLayout) -> ByteArray:
    count = layout.payload_bytes(layout.blocks_per_chunk) // 2
    return _bfloat16(np.random.default_rng(0).standard_normal(count, dtype=np.float32))


def _kv_like(layout: KVLayout) -> ByteArray:
    dice = np.random.default_rng(0)
    channels = layout.page_bytes[0] // 2 // layout.block_tokens
    values = dice.standard_normal((layout.num_layers, layout.chunk_tokens, channels), dtype=np.float32)
    values *= dice.lognormal(0, 1, (layout.num_layers, 1, channels)).astype(np.float32)
    values += dice.standard_normal((layout.num_layers, 1, channels), dtype=np.float32)
    return _bfloat16(values)


def _bfloat16(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> ByteArray:
    """Return the upper halves of float32 values, in prefaulted memory."""
    data = prefaulted(values.size * 2)
    np.right_shift(values.reshape(-1).view(np.uint32), 16, out=data.view(np.uint16), casting="unsafe")
    return data
