"""Forged packs: fields of the wrong kind, fronts that nest, files with holes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash
from support.diskwork import EVEN, make_ref

from kvstore.format.pack import END_MAGIC, open_pack
from kvstore.model.errors import ConfigError
from kvstore.tools.pack import Source, export

REFS = [make_ref(number, 8 if number % 4 else 3) for number in range(20)]


@pytest.fixture
def packed(fill: Any, tmp_path: Path) -> Path:
    folder = fill(REFS, layout=replace(EVEN, element="bf16"))
    export(Source(folder), tmp_path / "a.kvpack")
    return tmp_path / "a.kvpack"


_FIELDS: list[tuple[str, ...]] = [
    ("shards",),
    ("namespace",),
    ("namespace", "model"),
    ("layout",),
    ("folders",),
    *(("layout", name) for name in ("page_bytes", "planes", "block_tokens", "chunk_tokens", "physical", "element")),
]


@pytest.mark.parametrize("field", _FIELDS, ids=".".join)
@pytest.mark.parametrize("value", [None, 1.5, -1, "x", [], {}, [1.5], ["\0"]], ids=json.dumps)
def test_a_malformed_field_is_an_error_that_names_the_file(packed: Path, field: tuple[str, ...], value: Any) -> None:
    """The digest is right, as an attacker can compute it. A well-formed front is opened and read."""
    tree = _front_of(packed)
    owner = tree if field == ("shards",) else tree["shards"][0]
    for name in field[:-1]:
        owner = owner[name]
    owner[field[-1]] = value
    _with_front(packed, json.dumps(tree).encode())
    with suppress_naming(packed), open_pack(packed) as pack:
        pack.describe()
        for shard, extents in enumerate(pack.extents):
            for ref in extents:
                pack.check(shard, ref)


@contextmanager
def suppress_naming(path: Path) -> Iterator[None]:
    """Let a ``ConfigError`` pass that names a file."""
    try:
        yield
    except ConfigError as error:
        if str(path) not in str(error):
            raise


def test_a_front_that_nests_without_end(packed: Path) -> None:
    _with_front(packed, b'{"shards":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    with pytest.raises(ConfigError, match=str(packed)):
        open_pack(packed)


def test_holes_take_no_memory(packed: Path) -> None:
    """Holes in the index or in a chunk cost nothing to send, so they must take no memory."""
    hole_bytes = 40 * (7 << 20)
    raw = packed.read_bytes()
    _, index_at, _, _ = struct.unpack_from("<8sQQ16s", raw, len(raw) - 40)
    front = raw[: _first_extent(packed)[0]]
    with packed.open("r+b") as file:
        file.truncate(index_at)
        file.seek(index_at + hole_bytes)
        file.write(struct.pack("<8sQQ16s", END_MAGIC, index_at, hole_bytes // 40, bytes(16)))
    before = psutil.Process().memory_info().rss
    tracemalloc.start()
    with pytest.raises(ConfigError, match="damaged"):
        open_pack(packed)
    assert tracemalloc.get_traced_memory()[1] < hole_bytes // 10
    tracemalloc.stop()
    record = struct.pack("<II16sQQ", 0, 1, bytes(16), len(front), hole_bytes)
    with packed.open("r+b") as file:
        file.truncate(len(front))
        file.seek(len(front) + hole_bytes)
        digest = xxhash.xxh3_128_digest(front + record)
        file.write(record + struct.pack("<8sQQ16s", END_MAGIC, len(front) + hole_bytes, 1, digest))
    with open_pack(packed) as pack:
        image = pack.read(next(iter(pack.extents[0].values())))
        assert image is not None
        assert len(image) == hole_bytes
        assert psutil.Process().memory_info().rss - before < hole_bytes // 4


def _front_of(path: Path) -> Any:
    raw = path.read_bytes()
    (json_bytes,) = struct.unpack_from("<Q", raw, 8)
    return json.loads(raw[16 : 16 + json_bytes])


def _first_extent(path: Path) -> tuple[int, int]:
    with open_pack(path) as pack:
        return next(iter(pack.extents[0].values()))


def _with_front(path: Path, text: bytes) -> None:
    """Give a pack another front, with an index and a digest that fit it."""
    raw = path.read_bytes()
    _, index_at, count, _ = struct.unpack_from("<8sQQ16s", raw, len(raw) - 40)
    old_bytes = _first_extent(path)[0]
    front = struct.pack("<8sQ", b"KVSPACK1", len(text)) + text
    front = front.ljust(-(-len(front) // 4096) * 4096)
    moved = len(front) - old_bytes
    records = struct.iter_unpack("<II16sQQ", raw[index_at : index_at + 40 * count])
    index = b"".join(struct.pack("<II16sQQ", *head, offset + moved, size) for *head, offset, size in records)
    end = struct.pack("<8sQQ16s", END_MAGIC, index_at + moved, count, xxhash.xxh3_128_digest(front + index))
    path.write_bytes(front + raw[old_bytes:index_at] + index + end)
