"""Flags and configuration of each vLLM of a proof, made from the user's own, and both without their secrets."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.adapters.vllm.flag import TRANSFER_FLAG, connector_config
from kvstore.config import StoreConfig, load_config
from kvstore.config.schema import hide_login
from kvstore.model.errors import ConfigError
from kvstore.tiers import READ_ONLY, tier_behind
from kvstore.tools.doctor.flags import extra_config, our_part
from kvstore.tools.prove.situations import Situation
from kvstore.tools.vllmflags import ServeFlags, is_flag, parse_serve, spelled

_EXTRA: Final = "kv_connector_extra_config"
_REPLACED: Final = frozenset(
    {
        *("--api-key", "--host", "--port", "--root-path", "--uds"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
        *("--disable-log-stats", "--enable-log-requests", "--no-enable-prompt-tokens-details"),
        *("--kv-events-config", TRANSFER_FLAG),  # routers must not hear of a proof
    }
)
_SECRET: Final = re.compile(r"(^|[-_.])(keys?|token|passwords?|secrets?|credentials?)$", re.IGNORECASE)
_HIDDEN: Final = "***"
_MODEL_ID: Final = "kvstore-prove-"  # a namespace that no engine of the user's has


@dataclass(frozen=True)
class Settings:
    """Flags of the user's vLLM and the configuration of its kvstore.

    Attributes:
        words: arguments of ``vllm serve`` without a connector, an address and a log of requests.
        flags: the same, parsed.
        transfer: value of the connector's flag.
        config: kvstore's configuration.
        file: its YAML file; None for the environment's.
        run_id: random name of this proof.
    """

    words: tuple[str, ...]
    flags: ServeFlags
    transfer: Mapping[str, Any]
    config: StoreConfig
    file: Path | None
    run_id: str

    @property
    def remote(self) -> str | None:
        """Name of the remote tier that stores; None without one."""
        url = self.config.shared_url
        name = tier_behind(url) if url is not None else None
        return None if name in READ_ONLY else name

    @property
    def situations(self) -> tuple[Situation, ...]:
        """Situations that this configuration can come into."""
        has = {
            Situation.MEMORY: self.config.local_cpu,
            Situation.DISK: self.config.local_disk is not None,
            Situation.DAMAGED: self.config.local_disk is not None,
            Situation.REMOTE: self.remote is not None,
            Situation.KILLED: self.remote is not None,
        }
        return tuple(one for one in Situation if has.get(one, True))

    def left_out(self) -> Iterator[str]:
        """Yield what is configured and not part of the proof."""
        config = self.config
        if config.enable_pd:
            yield "hand-overs between engines (enable_pd)"
        if config.peers:
            yield "peers"
        if config.max_local_gpu_size:
            yield "the GPU tier (max_local_gpu_size)"
        if config.shared_url is not None and self.remote is None:
            yield f"{hide_login(config.shared_url)}, which is only read"

    def transfer_with(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Return the value of the connector's flag, with changed keys of kvstore."""
        extra = {**extra_config(self.transfer), **{f"kvstore.{key}": value for key, value in changes.items()}}
        return {**self.transfer, "kv_role": "kv_both", _EXTRA: extra}

    def common(self) -> dict[str, object]:
        """Return changes for every engine: nothing of the user's is found, opened or written."""
        changes: dict[str, object] = {
            "model_id": f"{_MODEL_ID}{self.run_id}",
            "load_only_if_faster": False,
            "verify_fraction": 0.0,
            "enable_pd": False,
            "peers": [],
            "reshard_from": [],
            "record_trace": None,
            "internal_api_server_enabled": False,
            "max_local_gpu_size": 0.0,
        }
        if self.remote == "redis":
            changes["remote_ttl_secs"] = _LIFETIME_S
        return changes

    def only(self, *, memory: bool = False, folders: Sequence[Path] = (), url: str | None = None) -> dict[str, object]:
        """Return changes with which no other tier can answer; without memory, chunks only pass through it."""
        changes: dict[str, object] = self.common()
        if not memory:
            changes |= {"local_cpu": False, "local_cpu_quotas": None}
        changes["local_disk"] = list(map(str, folders)) or None
        if not folders:
            changes |= {"max_local_disk_size": 0.0, "local_disk_quotas": None}
        if url is None:
            changes |= {"remote_url": None, "remote_host_url": None, "remote_ttl_secs": None}
        elif url != self.config.remote_url:
            own = ("remote_username", "remote_password", "remote_key_file", "remote_server_key_file", "remote_host_url")
            changes |= {"remote_url": url, "remote_ttl_secs": None, **dict.fromkeys(own)}
        return changes


_LIFETIME_S: Final = 3600


def read_settings(arguments: Sequence[str], config: Path | None, run_id: str) -> Settings:
    """Read the arguments of ``vllm serve`` and the configuration.

    Raises:
        ConfigError: no model is named, a flag or the configuration cannot be used, or another connector is named.
    """
    flags = parse_serve(arguments)
    if flags.problems:
        raise ConfigError("; ".join(flags.problems))
    if flags.model is None:
        raise ConfigError("name the model, and vLLM's flags, behind --: kvstore prove -- MODEL --dtype bfloat16")
    if flags.transfer is not None and our_part(flags.transfer) is None:
        raise ConfigError(f"{TRANSFER_FLAG} names another connector than kvstore's: leave it out, or correct it")
    words = tuple(_without(arguments, _REPLACED))
    if parse_serve(words).transfer is not None:
        raise ConfigError(
            f"the file of --config has {TRANSFER_FLAG[2:]}: give it as a flag, so that it can be left out"
        )
    transfer = {**connector_config(), **(our_part(flags.transfer or {}) or {})}
    loaded = load_config(extra_config(transfer), path=config, log_warnings=False)
    return Settings(words, flags, transfer, loaded.config, config, run_id)


def shown_words(words: Sequence[str]) -> list[str]:
    """Return arguments without secrets: values of keys and tokens, also inside JSON, and logins in URLs."""
    shown, is_secret = [], False
    for word in words:
        name, mark, value = word.partition("=")
        if is_flag(word):
            is_secret = _SECRET.search(name) is not None
            shown.append(f"{name}={_HIDDEN if is_secret else _shown(value)}" if mark else name)
        else:
            shown.append(_HIDDEN if is_secret else _shown(word))
    return shown


def scratch_folder(folder: Path, out: Path, run_id: str) -> Path:
    """Make an empty folder beside one of the user's, or in ``out`` where that cannot be written.

    Raises:
        OSError: neither can be written.
    """
    place = folder.parent if os.access(folder.parent, os.W_OK | os.X_OK) else out
    return Path(tempfile.mkdtemp(prefix=f"{_MODEL_ID}{run_id[:8]}-", dir=place))


def _without(arguments: Sequence[str], names: frozenset[str]) -> Iterator[str]:
    """Yield arguments without some flags and their values."""
    is_left_out = False
    words = list(arguments)
    if words[:2] == ["vllm", "serve"]:
        del words[:2]
    for word in words:
        if is_flag(word):
            is_left_out = spelled(word.partition("=")[0]).partition(".")[0] in names
        if not is_left_out:
            yield word


def _shown(text: str) -> str:
    if text.startswith(("{", "[")):
        try:
            return json.dumps(_hidden(json.loads(text)))
        except (ValueError, RecursionError):
            return _HIDDEN
    return hide_login(text) if "://" in text else text


def _hidden(tree: object) -> object:
    if isinstance(tree, dict):
        return {name: _HIDDEN if _SECRET.search(name) else _hidden(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_hidden(item) for item in tree]
    return _shown(tree) if isinstance(tree, str) else tree
