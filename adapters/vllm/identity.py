"""Fingerprints of model and adapter files: equal content has equal fingerprints, on every machine.

Small files and adapters are read whole. The weights of a large model, which would take minutes at every start, are
sampled: ``docs/warming.md`` says how.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from kvstore.model.errors import ConfigError

WHOLE_BYTES: Final = 256 << 20  # a file up to this size is read whole
_SAMPLE_BYTES: Final = 4096
_STRIDE_BYTES: Final = 256 << 10  # of a tensor, one sample each
_MOST_ROWS: Final = 60_000  # of a matrix that is no vocabulary
_VOCABULARY: Final = ("embed", "lm_head", "wte")  # in names of tensors with a row for each token
_READ_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 64 << 20
_THREADS: Final = 8
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


def fingerprint_folder(folder: Path) -> str:
    """Return 32 hex digits over the configuration and the weights of a model.

    Raises:
        ConfigError: there is no file that identifies the model, or one cannot be read.
    """
    with ThreadPoolExecutor(_THREADS, "kvstore-identity") as readers:
        return _fingerprint(folder, lambda files: readers.map(_model_facts, files))


def fingerprint_file(path: Path) -> str:
    """Return 32 hex digits over a model that is one file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        facts = _model_facts(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path} to identify the model: {error}") from error
    return hashlib.sha256(b"kvstore/model-file/1\0" + json.dumps(facts).encode()).hexdigest()[:32]


def fingerprint_adapter(folder: Path, digest: Callable[[Path], str] | None = None) -> str:
    """Return 32 hex digits over the files of an adapter, of which every byte counts.

    Args:
        folder: the adapter's folder.
        digest: returns the digest of a file's content, for callers that cache digests.

    Raises:
        ConfigError: as ``fingerprint_folder``.
    """
    of_content = digest or digest_of
    return _fingerprint(folder, lambda files: ([path.name, of_content(path)] for path in files))


def digest_of(path: Path) -> str:
    """Return the sha256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(folder: Path, facts_of: Callable[[list[Path]], Iterable[list[object]]]) -> str:
    digest = hashlib.sha256(b"kvstore/model/2\0")
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        relevant = [path for path in files if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith("config.json")]
        for facts in facts_of(relevant):
            digest.update(json.dumps(facts).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the files of {folder} to identify the model: {error}") from error
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in relevant):
        raise ConfigError(f"no weight files in {folder}: set kvstore.model_id to name the model yourself")
    return digest.hexdigest()[:32]


def _model_facts(path: Path) -> list[object]:
    """Return the facts that identify a file of a model."""
    status = path.stat()
    if path.suffix == ".json" or status.st_size <= WHOLE_BYTES:
        return [path.name, digest_of(path)]
    header = _header(path)
    tensors = _tensors(header, status.st_size) if header is not None else None
    if header is None or tensors is None:  # if tensors cannot be located, the file's time counts
        return [path.name, status.st_size, status.st_mtime_ns, hashlib.sha256(header or b"").hexdigest()]
    return [path.name, status.st_size, hashlib.sha256(header).hexdigest(), _digest_of_ranges(path, _ranges(tensors))]


class _Tensor(NamedTuple):
    """Position of a tensor in its file."""

    begin: int
    end: int
    is_whole: bool  # read whole, as a fine-tune may change single rows


def _header(path: Path) -> bytes | None:
    """Return the header of a safetensors file with its length; None for other formats, or if it is cut off."""
    if path.suffix != ".safetensors":
        return None
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        header = prefix + file.read(min(length, _MAX_HEADER_BYTES))
        return header if len(header) == 8 + length else None


def _tensors(header: bytes, size_bytes: int) -> list[_Tensor] | None:
    """Return the tensors that a header names, in the order of the file; None if it cannot be parsed."""
    try:
        fields = json.loads(header[8:])
        tensors = []
        for name, entry in fields.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = [int(length) for length in entry["shape"]]
            is_vocabulary = any(word in name for word in _VOCABULARY) or (len(shape) > 1 and shape[0] > _MOST_ROWS)
            tensors.append(_Tensor(len(header) + int(begin), len(header) + int(end), is_vocabulary))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    is_sound = all(len(header) <= tensor.begin <= tensor.end <= size_bytes for tensor in tensors)
    return sorted(tensors) if is_sound else None


def _ranges(tensors: list[_Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the tensors to read, as offsets and lengths in order."""
    for begin, end, is_whole in tensors:
        if is_whole or end - begin <= _STRIDE_BYTES:
            for offset in range(begin, end, _READ_BYTES):
                yield offset, min(_READ_BYTES, end - offset)
            continue
        places = math.ceil((end - begin) / _STRIDE_BYTES)
        for place in range(places):  # spread evenly, including the first and the last bytes
            yield begin + place * (end - begin - _SAMPLE_BYTES) // (places - 1), _SAMPLE_BYTES


def _digest_of_ranges(path: Path, ranges: Iterator[tuple[int, int]]) -> str:
    """Return a checksum over parts of a file. It is not cryptographic, as operators choose their own weights."""
    checksum = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # otherwise each sample would read ahead
        for offset, length in ranges:
            part = os.pread(descriptor, length, offset)
            if len(part) < length:
                raise OSError(f"{path.name} is cut off")
            checksum.update(part)
    finally:
        os.close(descriptor)
    return checksum.hexdigest()
