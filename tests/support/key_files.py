"""Key files of encryption at rest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def secret_of(name: str) -> str:
    """Return a key that follows from a name, in base64."""
    return base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()


def write_keys(path: Path, *ids: str, secrets: Mapping[str, str] | None = None, **salts: str) -> Path:
    """Write a key for each of ``ids``, then one for each ``id=salt``; ``secrets`` names those that others have."""
    listed: list[dict[str, Any]] = [{"id": name} for name in ids]
    listed += [{"id": name, "cache_salt": salt} for name, salt in salts.items()]
    for item in listed:
        item["key"] = secret_of((secrets or {}).get(item["id"], item["id"]))
    path.write_text(yaml.safe_dump(listed))
    path.chmod(0o600)
    return path
