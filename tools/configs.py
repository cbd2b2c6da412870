"""Conversion of configurations to kvstore's keys, for ``kvstore config from-lmcache`` and ``kvstore flags``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from kvstore.config import LoadedConfig, load_config
from kvstore.config.problems import Findings
from kvstore.config.sources import file_layers
from kvstore.policies import choose_policy
from kvstore.tools.recipes import adapt


@dataclass(frozen=True)
class Converted:
    """Configuration with kvstore's keys.

    Attributes:
        text: YAML that ``load_config`` reads without a warning.
        without_equivalent: keys that were left out or replaced, with the effect, one line each.
        recipes: manual steps, one line each.
        keeps_nothing: whether nothing would be cached.
    """

    text: str
    without_equivalent: tuple[str, ...]
    recipes: tuple[str, ...]
    keeps_nothing: bool


def from_lmcache(file: Path) -> Converted:
    """Convert a file of LMCache's; the environment is ignored.

    Raises:
        ConfigError: the file cannot be read, has a key that neither system knows, or a value that cannot be used.
    """
    entries = [entry for layer in file_layers(file, Findings()) for entry in layer]  # load_config reports what is wrong
    adapted = adapt({entry.key: entry.value for entry in entries})
    extra = {f"kvstore.{key}": value for key, value in adapted.settings.items()}
    loaded = load_config(extra, path=file, environ={}, log_warnings=False)
    values = own_values(loaded)
    lost = tuple(_short(line, file) for line in loaded.warnings if not _is_about(line, adapted.answered))
    head = [f"# Made from {file.name}, a configuration of LMCache's. Sizes are in GiB, for each worker."]
    for title, lines in (("Without an equivalent here:", lost), ("Recipes:", adapted.recipes)):
        if lines:
            head += ["#", f"# {title}", *(f"# - {line}" for line in lines)]
    body = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000) if values else ""
    config = loaded.config
    keeps_nothing = not (config.local_cpu or config.local_disk or config.has_remote)
    return Converted("\n".join(head) + "\n\n" + body, lost, tuple(adapted.recipes), keeps_nothing)


def own_values(loaded: LoadedConfig) -> dict[str, object]:
    """Return the settings that kvstore supports, by kvstore's key names, as lists and plain values."""
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


def _is_about(line: str, keys: set[str]) -> bool:
    return any(f": {key}: " in line for key in keys)


def _short(line: str, file: Path) -> str:
    return line.removeprefix(f"file {file}, ").removeprefix(f"file {file}: ")
