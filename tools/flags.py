"""The flag that makes vLLM use kvstore, which ``kvstore flags`` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.adapters.vllm.flag import TRANSFER_FLAG, connector_config
from kvstore.config import LoadedConfig, StoreConfig, load_config
from kvstore.config.reference import KEYS
from kvstore.config.schema import PD_ROLES
from kvstore.config.sources import FILE_VARIABLES
from kvstore.config.yamltext import YamlTextError, parse_yaml
from kvstore.model.errors import ConfigError
from kvstore.tools.configs import own_values

SHUTDOWN_FLAG: Final = "--shutdown-timeout 30"
ROLES: Final = {"both": "kv_both", "producer": "kv_producer", "consumer": "kv_consumer"}
_PD_PORT: Final = 7300
_PASSWORD: Final = re.compile(r"://[^/?]*:[^@]+@|[?&]password=")


@dataclass(frozen=True)
class Flags:
    """Flag to start vLLM with.

    Attributes:
        transfer: value of ``--kv-transfer-config``.
        notes: warnings and advice, one line each.
    """

    transfer: dict[str, Any]
    notes: tuple[str, ...]


def make_flags(
    path: Path | None, settings: Mapping[str, object], role: str | None, environ: Mapping[str, str]
) -> Flags:
    """Make the flag for a file, for settings, or for both; settings override the file.

    Args:
        path: the YAML file; None for none, because the environment is ignored.
        settings: values of keys.
        role: one of ``ROLES``; None for the file's role, or ``both``.
        environ: the environment, used only to warn about variables that would add to the flag.

    Raises:
        ConfigError: the configuration cannot be used, or there is no such role.
    """
    if role is not None and role not in ROLES:
        raise ConfigError(f"--role is {role!r}: it must be one of {', '.join(ROLES)}")
    loaded = _load(path, settings)
    kv_role = ROLES[role] if role else PD_ROLES.get(loaded.config.pd_role or "", "kv_both")
    if role is not None:
        loaded = _load(path, {**_of_role(loaded, kv_role), **settings})
    values = own_values(loaded)
    transfer = connector_config(kv_role)
    if values:
        transfer["kv_connector_extra_config"] = {f"kvstore.{key}": value for key, value in values.items()}
    return Flags(transfer, (*_notes(loaded, environ), *_advice(loaded.config)))


def parse_settings(given: Sequence[str]) -> dict[str, object]:
    """Parse ``KEY=VALUE`` settings, with values as in a file; paths, names and other text are not parsed as YAML.

    Raises:
        ConfigError: a setting has no equals sign, or a value is not YAML.
    """
    settings: dict[str, object] = {}
    for item in given:
        key, mark, text = item.partition("=")
        if not mark:
            raise ConfigError(f"--set is {item!r}: it must be KEY=VALUE")
        is_text = key in KEYS and KEYS[key].kind == "text" and not text.startswith("[")
        try:
            settings[key] = text if is_text else parse_yaml(text).value
        except YamlTextError as error:
            raise ConfigError(f"--set {key}: {error}") from error
    return settings


def _load(path: Path | None, settings: Mapping[str, object]) -> LoadedConfig:
    extra = {f"kvstore.{key}": value for key, value in settings.items()}
    return load_config(extra, path=path, environ={}, log_warnings=False)


def _of_role(loaded: LoadedConfig, kv_role: str) -> dict[str, object]:
    """Return settings that a producer or consumer needs and the configuration lacks."""
    config, settings = loaded.config, dict[str, object]()
    if config.pd_role is not None:
        settings["pd_role"] = next(name for name, role in PD_ROLES.items() if role == kv_role)
    if kv_role == "kv_both":
        return settings
    if loaded.origins["enable_pd"] == "default":
        settings["enable_pd"] = True
    if kv_role == "kv_consumer" and config.pd_peer_init_port is None and config.shared_url is None:
        settings["pd_peer_init_port"] = _PD_PORT
    return settings


def _notes(loaded: LoadedConfig, environ: Mapping[str, str]) -> list[str]:
    notes = [f"warning: {warning}" for warning in loaded.warnings]
    if (place := _password_in(loaded.config)) is not None:
        notes.append(
            f"warning: {place}: a password in a flag can be read by all users of the machine, and in vLLM's log: leave "
            "it out here, and set KVSTORE_REMOTE_PASSWORD where vLLM runs"
        )
    notes += [
        f"warning: {name} is set: where vLLM has it, too, its file counts beside this flag"
        for name in FILE_VARIABLES
        if environ.get(name)
    ]
    return notes


def _password_in(config: StoreConfig) -> str | None:
    """Return the key whose value holds a password; None if there is none."""
    if config.remote_password is not None:
        return "remote_password"
    urls = {"remote_url": config.shared_url, "remote_host_url": config.remote_host_url}
    return next((key for key, url in urls.items() if _PASSWORD.search(url or "")), None)


def _advice(config: StoreConfig) -> list[str]:
    if not (config.local_disk or config.has_remote):
        return []
    return [
        f"add {SHUTDOWN_FLAG}: with vLLM's default of 0, what is on its way to disk or elsewhere is lost at its end"
    ]


def as_shell(transfer: Mapping[str, object]) -> str:
    """Return the flag and its value, quoted for a shell."""
    value = json.dumps(transfer, separators=(",", ":"))
    return f"{TRANSFER_FLAG} {_quoted(value)}"


def _quoted(text: str) -> str:
    """Put any text in single quotes, because a shell would expand braces."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
