"""Compiled kernels: the same bytes as numpy's in both directions, and numpy's where numba is of no use."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.schedules import schedules

from kvstore.format.codecs import Codec, kernels, open_codec
from kvstore.model.compiling import compiled
from kvstore.model.errors import CodecError
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")

WORDS = {"bf16": "<u2", "f16": "<u2", "f32": "<u4"}
AXES = [(1, 16, 64), (3, 8, 17), (2, 16, 1), (1, 4, 128)]
by_element = pytest.mark.parametrize("element", WORDS)

SUMS = """
import hashlib, numpy as np
from kvstore.format.codecs import open_codec
from kvstore.model.layout import KVLayout
codec = open_codec("int8", KVLayout((4096,), 1, 16, 256, element="bf16", page_axes=(1, 16, 128)))
layer = np.random.default_rng(0).integers(0, 0x4000, 16 * 2048, dtype=np.uint16).view(np.uint8)
out = np.empty_like(layer)
size = codec.encode(layer, out)
assert size < len(layer)
print(hashlib.sha256(out[:size]).hexdigest(), type(codec._kernels.quantise).__name__)
"""


def pair_of(name: str, element: str, axes: tuple[int, int, int] = (1, 16, 64), planes: int = 1) -> tuple[Codec, Codec]:
    """Return a codec with compiled kernels, and the same with numpy's."""
    page_bytes = int(np.prod(axes)) * np.dtype(WORDS[element]).itemsize
    layout = KVLayout((page_bytes,) * 2, planes, 16, 256, element=element, page_axes=axes)
    with mock.patch.object(kernels, "compiled", return_value=None):
        fallback = open_codec(name, layout)
    fallback._huffman = None  # type: ignore[attr-defined]
    fast = open_codec(name, layout)
    assert type(fast._kernels[0]) is not type(fallback._kernels[0])  # type: ignore[attr-defined]
    return fast, fallback


def packed_by(codec: Codec, layer: ByteArray) -> ByteArray:
    """Encode from a read-only layer at an odd address."""
    room = np.empty(len(layer) + 1, np.uint8)
    room[1:] = layer
    room.flags.writeable = False
    out = np.empty(len(layer) + 3, np.uint8)[3:]
    return out[: codec.encode(room[1:], out)]


def unpacked_by(codec: Codec, data: ByteArray, size: int) -> ByteArray:
    """Decode read-only bytes at an odd address to another odd address."""
    out = np.empty(size + 5, np.uint8)[5:]
    codec.decode(np.frombuffer(b"-" + data.tobytes(), np.uint8)[1:], out)
    return out


def assert_alike(fast: Codec, fallback: Codec, layer: ByteArray) -> ByteArray:
    """Encode and decode by both, and each what the other has encoded; returns the encoded bytes."""
    fast._huffman = None  # type: ignore[attr-defined]
    packed = packed_by(fast, layer)
    assert np.array_equal(packed, packed_by(fallback, layer))
    assert np.array_equal(unpacked_by(fast, packed, len(layer)), unpacked_by(fallback, packed, len(layer)))
    return packed


def bits_of(element: str) -> st.SearchStrategy[int]:
    """Return words: any, small ones (denormal numbers), those around the largest finite one, or zeros."""
    infinity = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}[element]
    sign = 1 << (8 * np.dtype(WORDS[element]).itemsize - 1)
    near = st.integers(-3, 1).map(lambda step: infinity + step)
    sized = st.one_of(st.integers(0, infinity - 1), st.integers(0, 300), near, st.just(0))
    return st.builds(lambda size, negative: size | sign * negative, sized, st.booleans())


@by_element
@schedules(60)
@given(data=st.data())
def test_int8_is_that_of_numpy_bit_for_bit(element: str, data: st.DataObject) -> None:
    axes, planes = data.draw(st.sampled_from(AXES)), data.draw(st.integers(1, 2))
    codecs = pair_of("int8", element, axes, planes)
    shape = (planes, data.draw(st.integers(1, 4)), *axes)
    few = data.draw(st.lists(bits_of(element), min_size=1, max_size=40))
    chosen = np.random.default_rng(data.draw(st.integers(0, 99))).choice(np.array(few, WORDS[element]), shape)
    assert_alike(*codecs, chosen.view(np.uint8).reshape(-1))


@by_element
@schedules(20)
@given(seed=st.integers(0, 1 << 30), exponent=st.integers(-45, 38), spread=st.sampled_from([0, 1, 9]))
@example(seed=1, exponent=-39, spread=0).via("denormal float32 numbers")
@example(seed=1, exponent=-6, spread=1).via("denormal float16 numbers")
@example(seed=1, exponent=4, spread=0).via("the largest float16 numbers")
def test_int8_of_numbers_of_any_size(element: str, seed: int, exponent: int, spread: int) -> None:
    dice = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        sizes = (dice.standard_normal((8 * 16, 64)) * 10.0 ** (exponent + spread * dice.standard_normal(64))).astype(
            "f4"
        )
        words = sizes.astype("<f2").view("<u2") if element == "f16" else sizes.view("<u4")
    words = (words >> 16).astype("<u2") if element == "bf16" else words
    fast, fallback = pair_of("int8", element)
    assert_alike(fast, fallback, words.view(np.uint8).reshape(-1))


@by_element
def test_every_number_times_every_kind_of_scale_is_that_of_numpy(element: str) -> None:
    """Scales that no encoder writes: products that are too large, or denormal as elements, and halves to be rounded."""
    fast, fallback = pair_of("int8", element, (1, 16, 256))
    numbers = np.tile(np.arange(-128, 128, dtype=np.int8)[:, None], 256)
    assert numbers.shape == (256, 256)
    dice = np.random.default_rng(3)
    for exponents in ((-150, 128), (-26, -12), (-2, 12)):
        scales = np.ldexp(dice.integers(1 << 23, 1 << 24, 256), dice.integers(*exponents, 256) - 24).astype(np.float32)
        scales[::4] = np.ldexp(1.0, dice.integers(*exponents, 64)).astype(np.float32)
        scales[:2] = 0, np.finfo(np.float32).max
        data = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8).reshape(-1)])
        size = numbers.size * np.dtype(WORDS[element]).itemsize
        assert np.array_equal(unpacked_by(fast, data, size), unpacked_by(fallback, data, size))


@by_element
@schedules(30)
@given(
    head=npst.arrays(np.uint8, st.integers(1, 300)),
    count=st.sampled_from([0, 3, 20_000, 131_072, 300_001]),
    seed=st.integers(0, 99),
)
def test_split_is_that_of_numpy_bit_for_bit(element: str, head: ByteArray, count: int, seed: int) -> None:
    fast, fallback = pair_of("split", element)
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32).view(np.uint32)
    words = values if element == "f32" else (values >> 16).astype("<u2")
    layer = np.concatenate([head, words.view(np.uint8), head])
    packed = assert_alike(fast, fallback, layer)
    assert np.array_equal(unpacked_by(fast, packed, len(layer)), layer)
    assert np.array_equal(unpacked_by(fallback, packed, len(layer)), layer)


@pytest.mark.parametrize(("name", "element"), [("split", "bf16"), ("split", "f32"), ("int8", "bf16"), ("int8", "f16")])
@schedules(60)
@given(data=st.data())
def test_both_refuse_the_same_input(name: str, element: str, data: st.DataObject) -> None:
    fast, fallback = pair_of(name, element)
    layer = np.random.default_rng(0).integers(0, 0x4000, 8 * 1024, dtype=np.uint16).view(np.uint8)
    changed = bytearray(packed_by(fast, layer).tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, min(len(changed), data.draw(st.sampled_from([40, 30_000]))) - 1))
        changed[offset] ^= data.draw(st.integers(1, 255))
    del changed[len(changed) - data.draw(st.sampled_from([0, 0, 1, 9])) :]
    ends = []
    for codec in (fast, fallback):
        out = np.full(len(layer) + 32, 0xA5, np.uint8)
        try:
            codec.decode(np.frombuffer(bytes(changed), np.uint8), out[16:-16])
            ends.append(out.tobytes())
        except CodecError as error:
            ends.append(str(error).encode())
        assert (out[:16] == 0xA5).all()
        assert (out[-16:] == 0xA5).all()
    assert ends[0] == ends[1]


def test_threads_share_compiled_kernels() -> None:
    fast, fallback = pair_of("int8", "bf16")
    layers = [
        np.random.default_rng(n).integers(0, 0x4000, 64 * 1024, dtype=np.uint16).view(np.uint8) for n in range(16)
    ]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda layer: packed_by(fast, layer), layers))
    assert all(np.array_equal(packed, packed_by(fallback, layer)) for packed, layer in zip(found, layers, strict=True))


def test_a_kernel_compiles_nothing_in_a_call() -> None:
    made = kernels.split_kernels(2)
    assert made is not None
    with pytest.raises(TypeError, match="No matching definition"):
        made.take_high(np.zeros(8, np.uint64), np.zeros(8, np.uint8))


def test_vllm_can_start_afterwards() -> None:
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    assert kernels.split_kernels(2)
    dispatcher._rebind_kernels([])


# Without numba


class BrokenNumba(ModuleType):
    """A numba whose libraries do not go together."""

    config = SimpleNamespace(DISABLE_JIT=0)
    core = SimpleNamespace(errors=SimpleNamespace(NumbaError=ArithmeticError))

    @staticmethod
    def njit(_signature: str, **_: object) -> object:
        raise ArithmeticError("LLVM is of another version")


@pytest.mark.parametrize(
    ("module", "level", "message"),
    [
        (None, logging.INFO, r"pip install 'vllm-kvstore\[kernels\]'"),
        (BrokenNumba("numba"), logging.WARNING, "numba does not work here.*another version"),
        (SimpleNamespace(config=SimpleNamespace(DISABLE_JIT=1)), logging.INFO, "switched off"),
        (ModuleType("numba"), logging.WARNING, "does not work here.*config"),
    ],
    ids=["missing", "fails", "switched off", "incomplete"],
)
def test_numpy_replaces_a_numba_that_cannot_compile(
    module: object, level: int, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", module)
    try:
        with caplog.at_level(logging.INFO):
            assert kernels.int8_kernels(2) is None
            assert kernels.int8_kernels(2) is None
    finally:
        compiled.cache_clear()
    (record,) = caplog.records
    assert record.levelno == level
    assert re.search(message, record.getMessage())


def in_process(folder: Path, code: str = SUMS) -> list[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONWARNINGS": "error"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.slow
def test_compiled_code_leaves_no_file(tmp_path: Path) -> None:
    assert in_process(tmp_path)[1] == "CPUDispatcher"
    assert not [*tmp_path.iterdir()], "numba would keep it as pickle"


@pytest.mark.slow
def test_a_program_that_debugs_is_not_told_of_compilation(tmp_path: Path) -> None:
    code = "import logging, sys\nlogging.basicConfig(level=logging.DEBUG, stream=sys.stdout)" + SUMS
    lines = in_process(tmp_path, code)
    assert lines[-1] == "CPUDispatcher"
    assert not any("numba" in word for word in lines)


@pytest.mark.slow
def test_only_codecs_with_kernels_import_numba(tmp_path: Path) -> None:
    code = """
import sys
import kvstore.adapters.vllm.plugin, kvstore.engine, kvstore.format.coding
from kvstore.format.codecs import open_codec
from kvstore.model.layout import KVLayout
layout = KVLayout((4096,), 1, 16, 256, element="bf16")
open_codec("lz4", layout)
print("numba" in sys.modules)
open_codec("split", layout)
print("numba" in sys.modules)
"""
    assert in_process(tmp_path, code) == ["False", "True"]
