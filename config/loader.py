"""Loading of the configuration: vLLM's extra config precedes the environment, the file and the defaults."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvstore.config import sources
from kvstore.config.lmcache import NOT_IMPLEMENTED, OTHER_CODECS, loses_nothing
from kvstore.config.problems import Entry, Findings
from kvstore.config.schema import StoreConfig
from kvstore.model.errors import ConfigError
from kvstore.policies import choose_policy
from kvstore.tiers import leads_to

_log = logging.getLogger("kvstore.config")

_MOST_GIB = {"max_local_cpu_size": 4096, "max_local_gpu_size": 1024, "max_local_disk_size": 65_536}
"""GiB from which a size is probably meant in MB, since hardly any worker has so much."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the origin of each value.

    Attributes:
        config: the values in effect.
        origins: for each key of ``config``, "default", or its file and line, its variable or its extra-config key.
        warnings: ignored settings and the consequences, one line each.
    """

    config: StoreConfig
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load_config(
    extra: Mapping[str, object] | None = None,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    log_warnings: bool = True,
) -> LoadedConfig:
    """Read and check the configuration.

    Args:
        extra: vLLM's ``kv_connector_extra_config``. Only ``kvstore.<key>`` and ``lmcache.<key>`` count, and two keys
            that LMCache reads without a prefix.
        path: the YAML file, instead of the one that ``KVSTORE_CONFIG_FILE`` or ``LMCACHE_CONFIG_FILE`` names.
        environ: the environment.
        log_warnings: False in all but one of several processes that load the same configuration.

    Raises:
        ConfigError: something is wrong. The message has one line for each problem.
    """
    findings = Findings()
    chosen = _choose(extra or {}, path or sources.named_file(environ), environ, findings)
    _give_pool(chosen, findings)
    config = _validate(chosen, findings)
    if findings.problems or config is None:
        raise ConfigError("\n- ".join(["the configuration cannot be used:", *findings.sorted_problems()]))
    origins = {key: chosen[key].where if key in chosen else "default" for key in StoreConfig.model_fields}
    warnings = (*findings.warnings, *_ignored(chosen), *_useless(config, origins))
    if log_warnings:
        for warning in warnings:
            _log.warning("%s", warning)
    return LoadedConfig(config, origins, warnings)


def _choose(
    extra: Mapping[str, object], path: Path | None, environ: Mapping[str, str], findings: Findings
) -> dict[str, Entry]:
    """Return, for each known key, the entry of its strongest source."""
    layers = [
        *(sources.file_layers(path, findings) if path else []),
        *sources.environment_layers(environ, findings),
        *sources.extra_layers(extra, findings),
    ]
    chosen = {}
    for layer in layers:
        for entry in sources.with_nested(layer, findings):
            if entry.key in StoreConfig.model_fields or entry.key in NOT_IMPLEMENTED:
                chosen[entry.key] = entry
            else:
                findings.unknown_key(entry)
    return chosen


def _give_pool(chosen: dict[str, Entry], findings: Findings) -> None:
    """Replace a pool of size 0 in LMCache's files for prefill and decode engines; here KV passes through the pool."""
    pool, enabled = chosen.get("max_local_cpu_size"), chosen.get("enable_pd")
    if pool is None or type(pool.value) not in {int, float} or pool.value or enabled is None or not enabled.value:
        return
    del chosen[pool.key]
    size_gib = StoreConfig.model_fields[pool.key].default
    findings.warnings.append(f"{pool.where}: {pool.key}: {size_gib} GiB instead of 0: hand-overs need it")


def _validate(chosen: Mapping[str, Entry], findings: Findings) -> StoreConfig | None:
    """Return the configuration, or None with the problems added to the findings."""
    values = {key: entry.value for key, entry in chosen.items() if key in StoreConfig.model_fields}
    try:
        return StoreConfig.model_validate(values)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            findings.invalid(_culprit(details, chosen), details)
        return None


def _culprit(details: ErrorDetails, chosen: Mapping[str, Entry]) -> Entry:
    """Return the entry to blame. A default is wrong only because of another key, which then gives the place."""
    key = str(details["loc"][0])
    if key in chosen:
        return chosen[key]
    return Entry(key, details["input"], chosen[details["ctx"]["because_of"]].where)


def _ignored(chosen: Mapping[str, Entry]) -> list[str]:
    """Return a line for each of LMCache's keys whose absence makes a difference."""
    return [
        f"{entry.where}: {key}: ignored: {NOT_IMPLEMENTED[key]}"
        for key, entry in chosen.items()
        if key in NOT_IMPLEMENTED and not loses_nothing(key, entry.value)
    ]


def _useless(config: StoreConfig, origins: Mapping[str, str]) -> list[str]:
    """Return warnings about combinations that are valid but surely unintended."""
    lines = []

    def warn(key: str, text: str) -> None:
        lines.append(f"{origins[key]}: {key}: {text}")

    for key, most_gib in _MOST_GIB.items():
        if (size := getattr(config, key)) >= most_gib:
            warn(key, f"{size:g} GiB for each worker: looks like MB; GiB are expected, such as {size / 1024:g}")
    if config.local_disk is None and config.max_local_disk_size > 0:
        warn("max_local_disk_size", "ignored: local_disk is not set, so nothing is kept on disk")
    for key in ("cache_policy", "disk_cache_policy"):
        _, warning = choose_policy(getattr(config, key) or config.cache_policy)
        if warning and getattr(config, key):
            lines.append(f"{origins[key]}: {warning}")
    if config.remote_url != config.shared_url:
        warn("remote_url", "ignored: kvstore has no tier for it, so nothing is shared: see kvstore config from-lmcache")
    if config.remote_serde in OTHER_CODECS:
        codec = config.remote_serde
        warn("remote_serde", f"kvstore has no codec {codec!r}: 'none' is used, so chunks are stored as they are")
    if config.encryption_keys and config.shared_url is not None and not config.encrypts_remote:
        warn("encryption_keys", "the tier of remote_url keeps chunks as they are: only disk and objects are encrypted")
    if leads_to(config.remote_host_url, "server") and not config.remote_key_file:
        warn("remote_host_url", "without remote_key_file the servers of other hosts refuse, so nothing is found there")
    if config.pd_peer_init_port is not None and not config.enable_pd and origins["enable_pd"] == "default":
        warn("pd_peer_init_port", "ignored: enable_pd is not set, so this engine does not listen")
    if config.reshard_from and not config.has_remote:
        warn("reshard_from", "ignored: without local_disk, remote_url and peers there is nothing to read from")
    if config.local_disk is None and not config.has_remote and not config.local_cpu:
        warn("local_cpu", "false, and neither local_disk nor remote_url is set: nothing will be kept")
    return lines
