"""A wheel of the same bytes from the same sources, in any folder and at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.tools.dev.release.checkout import commit_time_s, copy_sources

_UMASK: Final = 0o022  # the modes of files are in the wheel
_LINES: Final = 25


def build_wheel(root: Path, dist: Path) -> Path:
    """Build the wheel into a folder, in place of earlier ones, and return it.

    Its bytes follow from the sources, the time of the last commit and the version of setuptools.

    Raises:
        ConfigError: the folder is no checkout, or the build failed.
    """
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_time_s(root))}
    dist.mkdir(parents=True, exist_ok=True)
    for earlier in dist.glob("vllm_kvstore-*.whl"):
        earlier.unlink()
    with TemporaryDirectory(prefix="kvstore-wheel-") as folder:
        copy_sources(root, Path(folder))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist.resolve()), folder]
        result = _run(command, environment)
    if result.returncode:
        last = "\n".join((result.stdout + result.stderr).splitlines()[-_LINES:])
        raise ConfigError(f"the wheel cannot be built:\n{last}")
    (wheel,) = dist.glob("vllm_kvstore-*.whl")
    return wheel


def check_wheel(wheel: Path) -> None:
    """Check metadata and README as an index would, with ``twine check --strict``.

    Raises:
        ConfigError: they are wrong.
    """
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    result = _run(command, None)
    if result.returncode:
        raise ConfigError(f"an index would refuse {wheel.name}:\n{(result.stdout + result.stderr).strip()}")


def _run(command: list[str], environment: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own command lines
        command, capture_output=True, text=True, check=False, env=environment, umask=_UMASK
    )
