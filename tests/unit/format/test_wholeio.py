"""Calls that the system cuts short are continued, and only an empty answer is the end of a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, make_transfer

from kvstore.format.pack import PackWriter, Shard, open_pack
from kvstore.format.wholeio import read_front, read_whole, write_whole
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.inventory import Inventory
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.pack import PackTier
from kvstore.tools.inspection import inspect_target
from kvstore.tools.pack import Source, export

REFS = [make_ref(number, 1 + number % 8) for number in range(6)]
BF16 = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256, element="bf16")


def cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call do half of the requested work."""
    preadv, pread, pwritev = os.preadv, os.pread, os.pwritev

    def half(views: Sequence[Any]) -> list[memoryview]:
        first = memoryview(views[0]).cast("B")
        return [first[: (len(first) + 1) // 2]]

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, half(views), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, half(views), at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, (size + 1) // 2, at))


@pytest.fixture
def filled(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a folder with a few chunks."""

    def fill(codec: str) -> Path:
        layout = BF16 if codec != "none" else EVEN
        tier = DiskTier(tmp_path / codec, MINE, layout, 1 << 23, codec=codec)
        assert tier.put([make_transfer(ref, layout) for ref in REFS]) == [Outcome.STORED] * len(REFS)
        tier.close()
        return tmp_path / codec

    return fill


def test_pieces_make_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(monkeypatch)
    path = tmp_path / "file"
    content = os.urandom(30_000)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    write_whole(fd, [memoryview(content[:7]), memoryview(content[7:])], 3)
    assert path.read_bytes() == bytes(3) + content
    one, two = bytearray(11), bytearray(29_989)
    assert read_whole(fd, [memoryview(one), memoryview(two)], 3)
    assert one + two == content
    assert read_front(fd, 12_345, 3) == content[:12_345]
    assert read_front(fd, 99_999, 3) == content
    assert not read_whole(fd, [memoryview(bytearray(30_001))], 3)
    os.close(fd)


def test_a_write_that_does_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_whole(0, [memoryview(b"x")], 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_no_chunk_of_a_pack_is_hidden(
    filled: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    folder = filled(codec)
    layout = BF16 if codec != "none" else EVEN
    export(Source(folder), tmp_path / "a.kvpack")
    cut_short(monkeypatch)
    tier = PackTier(open_pack(tmp_path / "a.kvpack"), MINE, layout)
    assert [get(tier, ref, layout) for ref in REFS] == [Outcome.HIT] * len(REFS)
    tier.close()


def test_an_export_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read of existing data must not look like its end, because the rest would be cut off."""
    folder = tmp_path / "cache"
    tier = DiskTier(folder, MINE, EVEN, 1 << 23)
    assert tier.put([make_transfer(ref) for ref in REFS]) == [Outcome.STORED] * len(REFS)
    tier.close()
    inventory = Inventory(folder / MINE.id.hex())
    shards = [Shard(Namespace(MINE.fields), EVEN)]
    with PackWriter(tmp_path / "a.kvpack", shards) as writer:
        for ref in REFS:
            image = inventory.read(ref)
            assert image is not None
            assert not isinstance(image, str)
            writer.add(0, ref, image)
        size_bytes = writer._end
    cut_short(monkeypatch)
    with PackWriter(tmp_path / "a.kvpack", shards) as writer:
        assert [ref for _, ref in writer.held] == REFS
        assert writer._end == size_bytes
        writer.finish()
    with open_pack(tmp_path / "a.kvpack") as pack:
        assert [pack.check(0, ref) for ref in REFS] == [None] * len(REFS)


def test_no_chunk_of_a_folder_looks_damaged(filled: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled("lz4")
    home = folder / MINE.id.hex()
    (home / "layout.json").unlink()
    cut_short(monkeypatch)
    inventory = Inventory(home)
    assert not any(isinstance(inventory.read(ref), str) or inventory.read(ref) is None for ref in REFS)
    assert inspect_target(str(inventory.path(ChunkRef(*REFS[3]))))["sound"] is True
