"""Files with keys: read up to a bound, and secret ones only if nobody but their owner may."""

from __future__ import annotations

import stat
from pathlib import Path

from kvstore.model.errors import ConfigError


def require_private(path: Path) -> None:
    """Refuse a file that others than its owner may read.

    Raises:
        ConfigError: they may, or there is no such file.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 it")


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: it cannot be read, or is longer than ``most_bytes``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise ConfigError(f"the key file {path} is longer than {most_bytes} bytes: is it a key file?")
    return data
