"""``kvstore config from-lmcache``: converts a configuration of LMCache's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from kvstore.config import LoadedConfig, load_config
from kvstore.policies import choose_policy


@dataclass(frozen=True)
class Converted:
    """A configuration with kvstore's own keys.

    Attributes:
        text: YAML that ``load_config`` reads without a warning.
        without_equivalent: what was left out or replaced and what that means, one line each.
    """

    text: str
    without_equivalent: tuple[str, ...]


def from_lmcache(file: Path) -> Converted:
    """Convert a file. The environment is ignored.

    Raises:
        ConfigError: the file cannot be read, or has a key that neither system knows or a value that cannot be used.
    """
    loaded = load_config(path=file, environ={}, log_warnings=False)
    values = _values(loaded)
    head = [f"# Made from {file.name}, a configuration of LMCache's. Sizes are in GiB, for each worker."]
    if loaded.warnings:
        head += ["#", "# Without an equivalent here:", *(f"# - {_short(line, file)}" for line in loaded.warnings)]
    body = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000) if values else ""
    return Converted("\n".join(head) + "\n\n" + body, tuple(_short(line, file) for line in loaded.warnings))


def _values(loaded: LoadedConfig) -> dict[str, object]:
    """What the file sets and kvstore has, under kvstore's names."""
    config = loaded.config
    given = {key: getattr(config, key) for key, origin in loaded.origins.items() if origin != "default"}
    if given.pop("discard_partial_chunks", False):
        given["save_unfull_chunk"] = False
    for key in ("cache_policy", "disk_cache_policy"):
        if given.get(key):
            given[key] = choose_policy(given[key])[0]
    if "remote_url" in given and config.shared_url is None:
        del given["remote_url"]
    if "remote_serde" in given:
        given["remote_serde"] = config.remote_codec
    if config.local_disk is None:
        given.pop("max_local_disk_size", None)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


def _short(line: str, file: Path) -> str:
    return line.removeprefix(f"file {file}, ").removeprefix(f"file {file}: ")
