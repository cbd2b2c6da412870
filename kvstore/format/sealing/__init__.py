"""Encryption at rest: chunks that are sealed with keys before they leave memory. ``docs/encryption.md`` is its guide.

Borrowed: one key for each write of a chunk, derived from a random value and the chunk's name, and numbered segments, as
in the STREAM construction (Hoang, Reyhanitabar, Rogaway and Vizár, 2015). So no nonce is ever used twice, and a layer
is valid only in its place, in its chunk, of one write.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing


def open_ring(path: object) -> KeyRing | None:
    """Return the keys in the file that the option ``encryption_keys`` names; None if it names none.

    Raises:
        ConfigError: see ``KeyRing``; or the package is missing.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"the option 'encryption_keys' is the path of a file, not {path!r}")
    try:
        import cryptography  # noqa: F401, PLC0415 - an extra, used by seal.py
    except ImportError as error:
        raise ConfigError("encryption_keys needs cryptography: pip install 'vllm-kvstore[encryption]'") from error
    from kvstore.format.sealing.keyring import KeyRing  # noqa: PLC0415 - pydantic is slow to import

    return KeyRing(Path(path).expanduser())
