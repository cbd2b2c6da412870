"""Packages that a GPU run needs, checked before any import, because the machine may have no network."""

from __future__ import annotations

import sys
from importlib.util import find_spec

PACKAGES = ("numpy", "psutil", "pydantic", "pytest", "pytest_timeout", "rich", "torch", "xxhash", "hypothesis", "yaml")
_BROUGHT = {"yaml": "pyyaml", "pytest_timeout": "pytest-timeout"}  # modules whose distribution has another name


def missing_packages() -> list[str]:
    """Return the missing packages, by their names for pip."""
    return [_BROUGHT.get(name, name) for name in PACKAGES if find_spec(name) is None]


def explain(missing: list[str]) -> str:
    """Return a message that names the missing packages, and how to install them without a network."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(missing)
    return (
        f"error: {sys.executable} lacks {', '.join(missing)}. Without a network, bring them: on a machine with one,\n"
        f"  pip install --target packages --python-version {version} --only-binary :all: {names}\n"
        "and copy the folder here, except torch and numpy if they are here already. Then set PYTHONPATH to it"
    )
