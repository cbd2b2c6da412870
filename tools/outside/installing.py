"""Installation of generators, each in a virtual environment of its own, at pinned versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.outside.generator import SkippedError

_TIMEOUT_S: Final = 1200.0


def install(folder: Path, requirements: Sequence[str]) -> Path:
    """Install packages into a virtual environment in ``folder``, unless it has them, and return its ``bin``.

    Raises:
        SkippedError: they cannot be installed.
    """
    receipt, wanted = folder / "installed.txt", "\n".join([sys.version, *requirements])
    if receipt.is_file() and receipt.read_text(encoding="utf-8") == wanted:
        return folder / "bin"
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--quiet", *requirements])
    receipt.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - pip, with our own requirements
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SkippedError(f"it cannot be installed: {error}") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise SkippedError(f"it cannot be installed: {errors[-1] if errors else f'status {done.returncode}'}")
