"""Identity of models: replaced weights never share KV with the old ones."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import pytest

from kvstore.adapters.vllm import identity
from kvstore.adapters.vllm.identity import fingerprint_adapter, fingerprint_folder
from kvstore.model.errors import ConfigError


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


def test_a_copy_on_another_machine_is_the_same(folder: Path, tmp_path: Path) -> None:
    """Replicas share KV, no matter how their files were copied."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    for path in copy.iterdir():
        set_time(path, 10**12)
    assert fingerprint_folder(copy) == fingerprint_folder(folder)
    assert fingerprint_adapter(copy) == fingerprint_adapter(folder)


@pytest.mark.parametrize("fingerprint", [fingerprint_folder, fingerprint_adapter])
def test_a_single_byte_tells(folder: Path, fingerprint: Callable[[Path], str]) -> None:
    weights = folder / "model.safetensors"
    before, content = fingerprint(folder), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fingerprint(folder) != before


class TestLargeModels:
    """Models so large that only a part of each is read."""

    ROWS: Final = {
        "embed_tokens.weight": 192,
        "layers.0.mlp.weight": 640,
        "layers.0.norm": 1,
        "lm_head.weight": 192,
    }
    ROW_BYTES = 4096

    @pytest.fixture
    def model(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
        self.write(folder)
        return folder

    def write(self, folder: Path, changes: dict[int, int] | None = None) -> None:
        """Write the weights, with some bytes at other values."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, rows in self.ROWS.items():
            begin, end = end, end + rows * self.ROW_BYTES
            header[name] = {"dtype": "BF16", "shape": [rows, self.ROW_BYTES // 2], "data_offsets": [begin, end]}
        payload = bytearray(Random(1).randbytes(end))
        for position, value in (changes or {}).items():
            payload[position] ^= value
        (folder / "model.safetensors").write_bytes(safetensors(header, bytes(payload)))

    def position(self, name: str, row: int) -> int:
        names = list(self.ROWS)
        return (sum(self.ROWS[before] for before in names[: names.index(name)]) + row) * self.ROW_BYTES

    def test_a_copy_is_the_same(self, model: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(model, copy, copy_function=shutil.copyfile)
        set_time(copy / "model.safetensors", 10**12)
        assert fingerprint_folder(copy) == fingerprint_folder(model)

    @pytest.mark.parametrize("name", ROWS)
    def test_a_fine_tune_of_any_one_tensor_tells(self, model: Path, name: str) -> None:
        """It may change only few of its numbers, here one in a hundred rows."""
        before = fingerprint_folder(model)
        rows = range(0, self.ROWS[name], 1)
        changes = {self.position(name, row) + Random(row).randrange(self.ROW_BYTES): 1 for row in rows}
        self.write(model, changes)
        assert fingerprint_folder(model) != before

    @pytest.mark.parametrize("row", [0, 17, 191])
    @pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
    def test_a_single_token_that_was_trained_tells(self, model: Path, name: str, row: int) -> None:
        before = fingerprint_folder(model)
        self.write(model, {self.position(name, row) + 1234: 1})
        assert fingerprint_folder(model) != before

    def test_both_ends_of_a_tensor_tell(self, model: Path) -> None:
        found = {fingerprint_folder(model)}
        begin, end = self.position("layers.0.mlp.weight", 0), self.position("layers.0.norm", 0)
        for position in (begin, end - 1):
            self.write(model, {position: 1})
            found.add(fingerprint_folder(model))
        assert len(found) == 3

    def test_only_a_part_is_read(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []

        def pread(descriptor: int, length: int, offset: int) -> bytes:
            read.append(length)
            return os_pread(descriptor, length, offset)

        os_pread = os.pread
        monkeypatch.setattr(os, "pread", pread)
        fingerprint_folder(model)
        whole = 385 * self.ROW_BYTES
        assert whole < sum(read) < whole + 640 * self.ROW_BYTES // 8

    @pytest.mark.parametrize("suffix", [".bin", ".gguf", ".pt"])
    def test_where_nothing_tells_what_lies_where_time_counts(self, model: Path, suffix: str) -> None:
        path = model / f"more{suffix}"
        path.write_bytes(bytes(2000))
        before = fingerprint_folder(model)
        set_time(path, 1)
        assert fingerprint_folder(model) != before

    @pytest.mark.parametrize(
        "entry", [{}, {"data_offsets": [0]}, {"data_offsets": [0, 1 << 40], "shape": [1]}, 3, {"shape": "x"}]
    )
    def test_a_header_that_makes_no_sense_is_no_problem(self, model: Path, entry: object) -> None:
        path = model / "model.safetensors"
        path.write_bytes(safetensors({"w": entry}, bytes(4000)))
        before = fingerprint_folder(model)
        set_time(path, 1)
        assert fingerprint_folder(model) != before


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
