"""Other versions of this project: earlier ones from its history, and a later one that is made up."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def unpack(revision: str, folder: Path) -> Path:
    """Unpack an earlier version into a folder; skips the test where the history is not at hand."""
    words = ["git", "-C", str(ROOT), "archive", revision, "kvstore", "tools", "adapters", "config", "tests/support"]
    archive = subprocess.run(words, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"{revision} is not in the history here: {archive.stderr.decode().strip()[:100]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def make_later(folder: Path) -> Path:
    """Make a later version, whose estates have more than this one knows."""
    shutil.copytree(ROOT / "kvstore", folder / "kvstore", ignore=shutil.ignore_patterns("__pycache__"))
    version = folder / "kvstore/model/version.py"
    version.write_text(version.read_text() + '\n__version__ = "99.1.0"\n')
    estate = folder / "kvstore/server/succession/estate.py"
    text = estate.read_text()
    for last in ('    owner: bytes = b""\n', "    counters: dict[str, int]\n", "    paused_s: float\n"):
        assert text.count(last) == 1
        text = text.replace(last, f'{last}    news: str = "of a later version"\n')
    estate.write_text(text)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of programs of a version."""
    return {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'tests'}"}
