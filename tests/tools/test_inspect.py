"""``kvstore inspect`` lists the contents of a folder, and tells if a chunk is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import CHUNK_BYTES, EVEN, MINE, OTHER, flip_payload, make_ref, path_of

Fill = Callable[..., Path]


def test_a_folder(fill: Fill, run_json: Any) -> None:
    """Every namespace is listed with its fields and sums."""
    fill([make_ref(number) for number in range(3)])
    folder = fill([make_ref(9, 2)], namespace=OTHER)
    code, tree = run_json("inspect", folder)
    assert (code, tree["kind"]) == (0, "folder")
    found = {inventory["namespace"]: inventory for inventory in tree["namespaces"]}
    mine = found[MINE.id.hex()]
    assert (mine["fields"], mine["chunks"], mine["tokens"]) == (dict(MINE.fields), 3, 3 * 256)
    assert mine["file_bytes"] == 3 * CHUNK_BYTES
    assert mine["bytes_per_token"] == EVEN.block_bytes // 32
    assert found[OTHER.id.hex()]["tokens"] == 64


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_chunk(fill: Fill, run_json: Any, run: Any, tmp_path: Path, codec: str) -> None:
    """A chunk is found by its path or its key, and may be away from its folder, or damaged."""
    ref = make_ref(5, 3)
    folder = fill([ref, make_ref(6)], layout=replace(EVEN, element="bf16"), codec=codec)
    path = path_of(folder, ref)
    code, tree = run_json("inspect", path)
    assert (code, tree["kind"], tree["sound"], tree["codec"]) == (0, "chunk", True, codec)
    assert (tree["tokens"], tree["blocks"], tree["num_layers"]) == (96, 3, 4)
    assert tree["prefix_key"] == ref.prefix_key.hex()
    assert tree["namespace_fields"] == dict(MINE.fields)
    assert tree["file_bytes"] == path.stat().st_size
    if codec == "lz4":
        assert sum(tree["layer_bytes"]) == tree["payload_bytes"]
    assert run_json("inspect", ref.prefix_key.hex(), "--folder", folder) == (0, tree)
    elsewhere = tmp_path / "copy.safetensors"
    elsewhere.write_bytes(path.read_bytes())
    assert run_json("inspect", elsewhere)[1]["sound"] is None
    flip_payload(path_of(folder, make_ref(6)))
    code, tree = run_json("inspect", path_of(folder, make_ref(6)))
    assert (code, tree["sound"], tree["damage"]) == (1, False, "checksum does not match")
    assert "blocks: 3" in run("inspect", path).stdout


def test_what_is_nothing(fill: Fill, run: Any, tmp_path: Path) -> None:
    folder = fill([make_ref(1)])
    file = tmp_path / "x"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for target in (tmp_path / "none", file, empty, "ab" * 16):
        assert run("inspect", target).exit_code == 2, target
    assert run("inspect", "ab" * 16, "--folder", folder).exit_code == 2
