"""Files with secrets, which only their owner may read."""

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
