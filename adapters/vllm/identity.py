"""Whose KV it is: fingerprints of model and adapter files, so that replaced weights never share with the old ones."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from pathlib import Path

from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_MAX_HEADER_BYTES = 64 << 20


def fingerprint_folder(folder: Path) -> str:
    """32 hex digits over the configuration and every weight file's name, size, modification time and header.

    Weights themselves are not read. A copy of a model gets the same fingerprint only if it keeps the times (``cp -p``,
    ``rsync -t``); a ``model_id`` in the configuration makes copies equal.

    Raises:
        ConfigError: there is no file to tell the model by, or one cannot be read.
    """
    digest = hashlib.sha256(b"kvstore/model/1\0")
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        relevant = [path for path in files if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith("config.json")]
        for path in relevant:
            status = path.stat()
            content = path.read_bytes() if path.suffix == ".json" else _header(path)
            facts = [path.name, status.st_size, status.st_mtime_ns, hashlib.sha256(content).hexdigest()]
            if path.suffix == ".json":
                facts[1:3] = []  # its content says it all
            digest.update(json.dumps(facts).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the files of {folder} to identify the model: {error}") from error
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in relevant):
        raise ConfigError(f"there are no weight files in {folder}: set kvstore.model_id to name the model yourself")
    return digest.hexdigest()[:32]


def _header(path: Path) -> bytes:
    """The header of a safetensors file; nothing for other formats."""
    if path.suffix != ".safetensors":
        return b""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return prefix
        (length,) = struct.unpack("<Q", prefix)
        return prefix + file.read(min(length, _MAX_HEADER_BYTES))


class AdapterFiles:
    """Fingerprints of LoRA adapters, by the id under which vLLM holds them.

    vLLM keeps an adapter in memory under its id, and may load its files again at any time. Once the files behind an id
    have been seen to change nobody can say which of them a request will use, so such an id is never trusted again.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._distrusted: set[int] = set()

    def fingerprint(self, adapter_id: int, folder: str, *, in_place: bool) -> str | None:
        """A fingerprint for the key, or None if KV made with this adapter must not be shared."""
        if adapter_id in self._distrusted:
            return None
        try:
            found = None if in_place else fingerprint_folder(Path(folder))
        except ConfigError as error:
            found = None
            logger.warning("LoRA adapter %d is not cached: %s", adapter_id, error)
        if found is None or self._known.setdefault(adapter_id, found) != found:
            logger.warning("LoRA adapter %d: its files changed or cannot be told; it is not cached", adapter_id)
            self._distrusted.add(adapter_id)
            return None
        return found
