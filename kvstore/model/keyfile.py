"""Files with keys: read up to a bound, and secret ones only if no other user may."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.model.errors import ConfigError


def require_private(path: Path) -> None:
    """Refuse a file that others than its owner may read.

    The group may read a file of root, as in PostgreSQL: a Kubernetes secret is mounted so for a user other than root.

    Raises:
        ConfigError: they may, or there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    is_mounted_for_us = status.st_uid == 0 and os.geteuid() != 0
    if stat.S_IMODE(status.st_mode) & (0o037 if is_mounted_for_us else 0o077):
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
