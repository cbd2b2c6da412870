"""Replaced weights never share with the old ones."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from kvstore.adapters.vllm.identity import AdapterFiles, fingerprint_folder
from kvstore.errors import ConfigError


def safetensors(header: dict[str, object], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden": 8}')
    (folder / "model.safetensors").write_bytes(safetensors({"w": {"shape": [4]}}, b"abcd"))
    return folder


def set_time(path: Path, offset_ns: int) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + offset_ns))


def test_the_same_files_have_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    first = fingerprint_folder(folder)
    assert first == fingerprint_folder(folder)
    assert len(first) == 32
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)  # keeps times
    assert fingerprint_folder(copy) == first


def test_weights_replaced_in_the_same_folder_are_others(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before, status = fingerprint_folder(folder), weights.stat()
    weights.write_bytes(safetensors({"w": {"shape": [9]}}, b"wxyz"))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    assert fingerprint_folder(folder) != before, "the header tells, size and time do not"


def test_time_alone_tells(folder: Path) -> None:
    before = fingerprint_folder(folder)
    set_time(folder / "model.safetensors", 1)
    assert fingerprint_folder(folder) != before


def test_of_the_configuration_only_content_counts(folder: Path) -> None:
    before = fingerprint_folder(folder)
    set_time(folder / "config.json", 10**9)
    assert fingerprint_folder(folder) == before
    (folder / "config.json").write_text('{"hidden": 9}')
    assert fingerprint_folder(folder) != before


def test_other_files_do_not_count(folder: Path) -> None:
    before = fingerprint_folder(folder)
    (folder / "README.md").write_text("hello")
    (folder / "tokenizer.json").write_text("{}")
    assert fingerprint_folder(folder) == before


@pytest.mark.parametrize("name", ["more.safetensors", "more.bin", "more.pt", "more.pth", "more.gguf"])
def test_another_weight_file_counts(folder: Path, name: str) -> None:
    before = fingerprint_folder(folder)
    (folder / name).write_bytes(b"x" * 20)
    assert fingerprint_folder(folder) != before


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 62) + b"{}"], ids=["empty", "cut", "too long"])
def test_a_header_that_lies_is_no_problem(folder: Path, content: bytes) -> None:
    before = fingerprint_folder(folder)
    (folder / "model.safetensors").write_bytes(content)
    assert fingerprint_folder(folder) != before


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the files of .*nowhere"):
        fingerprint_folder(tmp_path / "nowhere")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"kvstore\.model_id"):
        fingerprint_folder(folder)


def test_adapters_are_told_by_their_files(folder: Path, tmp_path: Path) -> None:
    adapters = AdapterFiles()
    found = adapters.fingerprint(1, str(folder), in_place=False)
    assert found is not None
    assert adapters.fingerprint(1, str(folder), in_place=False) == found
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text("{}")
    assert adapters.fingerprint(2, str(other), in_place=False) not in {None, found}


def test_an_adapter_whose_files_changed_is_never_trusted_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = AdapterFiles()
    adapters.fingerprint(1, str(folder), in_place=False)
    weights = folder / "model.safetensors"
    set_time(weights, 10**9)
    assert adapters.fingerprint(1, str(folder), in_place=False) is None
    assert "changed" in caplog.text
    set_time(weights, -(10**9))
    assert adapters.fingerprint(1, str(folder), in_place=False) is None
    assert adapters.fingerprint(2, str(folder), in_place=False) is not None, "another id is loaded anew"


@pytest.mark.parametrize(("path", "in_place"), [("nowhere", False), ("model", True)])
def test_an_adapter_that_cannot_be_told_is_not_cached(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, *, in_place: bool
) -> None:
    adapters = AdapterFiles()
    assert folder.is_dir()
    assert adapters.fingerprint(1, str(tmp_path / path), in_place=in_place) is None
    assert "not cached" in caplog.text
    assert adapters.fingerprint(1, str(folder), in_place=False) is None
