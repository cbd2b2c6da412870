"""Early check that folders are free, because minutes of work would otherwise end with "in use"."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvstore.tiers.disk.folder import LOCK_FILE, FolderLock


def require_free(folders: Iterable[Path]) -> None:
    """Refuse folders that another process uses; creates no files, because a folder without a lock file was never used.

    Raises:
        FolderOwnedError: names the folder and the process.
        ConfigError: a lock file cannot be written.
    """
    for folder in folders:
        if (folder / LOCK_FILE).exists():
            FolderLock(folder).release()
