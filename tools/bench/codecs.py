"""Ratios and speeds of codecs and encryption for ``kvstore bench``, as fractions of memcpy in the same run.

There are two kinds of bfloat16 data, one chunk each: *normal* data is independent, with mean 0 and deviation 1;
*KV-like* data has a separate mean (normal) and deviation (log-normal, sigma 1) in each channel, as keys have. Chunks
are compared after a round trip through a lossless codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.table import Table

from kvstore.format.chunkfile import TAG_BYTES
from kvstore.format.codecs import CODEC_NAMES, Codec, open_codec
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import KVLayout
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import Pair, require, sampled
from kvstore.tools.console import numbers

ENCRYPTION = "aes-gcm"
COMPILED = ("int8", "split")  # our own loops; the others are their libraries'
MEASURED = [*(name for name in CODEC_NAMES if name != "none"), ENCRYPTION]


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
    """Measure every codec but ``none``, and encryption, on one thread each; left out is what cannot be opened."""
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
        with suppress(ConfigError, ImportError):
            ways = _encryption() if name == ENCRYPTION else _ways_of(open_codec(name, layout))
            lines += [_measure(ways, kind, data, layout, rounds) for kind, data in kinds.items()]
    return lines


def codec_lines(measured: Sequence[CodecLine]) -> list[Line]:
    """Return the lines of codecs of our own, on KV-like data: seconds for a GB, one sample each."""
    return [
        Subject(f"{one.codec} {way}, one core", "memcpy", "each layer of a chunk, KV-like data").line(
            [Pair(fraction / gbps, 1 / gbps)], size_bytes=10**9
        )
        for one in measured
        if one.data == "KV-like" and one.codec in COMPILED
        for way, gbps, fraction in (
            ("encode", one.encode_gbps, one.encode_fraction),
            ("decode", one.decode_gbps, one.decode_fraction),
        )
    ]


class _Ways(NamedTuple):
    """Ways of a layer by its number: into a longer buffer, which returns the bytes used, and back."""

    name: str
    is_lossless: bool
    pack: Callable[[int, ByteArray, ByteArray], int]
    unpack: Callable[[int, ByteArray, ByteArray], object]


def _ways_of(codec: Codec) -> _Ways:
    return _Ways(
        codec.name,
        codec.is_lossless,
        lambda _, raw, out: codec.encode(raw, out),
        lambda _, data, raw: codec.decode(data, raw),
    )


def _encryption() -> _Ways:
    from kvstore.format.sealing.keyring import RingKey  # noqa: PLC0415 - needs pydantic
    from kvstore.format.sealing.seal import Seal  # noqa: PLC0415 - an extra

    seal = Seal(RingKey("bench", bytes(32), b""), bytes(16), ChunkKey(bytes(8), bytes(16)), 1, ENCRYPTION)
    return _Ways(ENCRYPTION, True, seal.close, seal.open)


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
        extras = "lz4, split: pip install 'vllm-kvstore\\[codecs]'; aes-gcm: \\[encryption]; int8: no channels"
        table.caption = f"not measured: {missing} ({extras})"
    return table


def _measure(ways: _Ways, kind: str, data: ByteArray, layout: KVLayout, rounds: int) -> CodecLine:
    ranges = layout.layer_ranges(layout.blocks_per_chunk)
    back, copy = (prefaulted(len(data)) for _ in range(2))
    encoded = [prefaulted(end - begin + TAG_BYTES) for begin, end in ranges]
    sizes = [0] * len(ranges)

    def encode() -> None:
        for layer, (begin, end) in enumerate(ranges):
            sizes[layer] = ways.pack(layer, data[begin:end], encoded[layer])

    def decode() -> None:
        for layer, (begin, end) in enumerate(ranges):
            ways.unpack(layer, encoded[layer][: sizes[layer]], back[begin:end])

    memcpy = partial(np.copyto, copy, data)
    subject = Subject(ways.name, "memcpy", kind)
    lines = [subject.line(sampled(memcpy, path, rounds)) for path in (encode, decode)]
    require(not ways.is_lossless or np.array_equal(back, data), f"the codec {ways.name} changed {kind} data")
    speeds = [figure for line in lines for figure in (len(data) / line.path_s / 1e9, line.fraction)]
    return CodecLine(ways.name, kind, len(data) / sum(sizes), *speeds)


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
