"""The checkout that is released: its files, the time and the tags of its last commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError

_MODE: Final = 0o644  # modes of files get into a wheel


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints.

    Raises:
        ConfigError: this is no checkout, or it has no commit.
    """
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    except FileNotFoundError as error:
        raise ConfigError("a release needs git, which is not installed") from error
    if result.returncode:
        raise ConfigError(f"{root} is not a checkout with a commit, which git clone makes: {result.stderr.strip()}")
    return result.stdout


def commit_time_s(root: Path) -> int:
    """Return the time of the last commit in seconds since 1970, for SOURCE_DATE_EPOCH.

    Raises:
        ConfigError: there is none.
    """
    return int(_git(root, "log", "-1", "--format=%ct"))


def tags(root: Path) -> set[str]:
    """Return the names of the last commit's tags.

    Raises:
        ConfigError: this is no checkout.
    """
    return set(_git(root, "tag", "--points-at", "HEAD").split())


def files(root: Path) -> list[str]:
    """Return the files that git knows or would add, but for those that are gone.

    Raises:
        ConfigError: this is no checkout.
    """
    listing = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return sorted({name for name in listing.split("\0") if name and os.path.lexists(root / name)})


def copy_sources(root: Path, target: Path) -> None:
    """Copy these files: what lies in build folders gets into no wheel.

    Raises:
        ConfigError: this is no checkout.
    """
    for name in files(root):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(_MODE)
