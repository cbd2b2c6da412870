"""Sources of values: a file, the environment, and vLLM's ``kv_connector_extra_config``.

Each function returns layers of entries, the weakest first, and adds unreadable ones to the findings. Keys and values
are checked later, for all sources alike.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kvstore.config.lmcache import EXTRA_CONFIG, EXTRA_CONFIG_KEYS, NOT_IMPLEMENTED, UNPREFIXED
from kvstore.config.nearest import misspelt_key
from kvstore.config.problems import Entry, Findings, one_line
from kvstore.config.reference import KEYS
from kvstore.config.yamltext import YamlTextError, parse_yaml

Layer = list[Entry]

FILE_VARIABLES: Final = ("KVSTORE_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
"""Variables that name the file; the first one that is set counts."""

OTHER_VARIABLES: Final = frozenset({*FILE_VARIABLES, "KVSTORE_LOG_LEVEL", "LMCACHE_LOG_LEVEL"})
"""Variables that look like keys but are read elsewhere."""

_MAX_FILE_BYTES: Final = 2**20
_PREFIXES: Final = ("lmcache", "kvstore")

# Kubernetes sets such variables for each service of a namespace, which may be called "kvstore".
_SERVICE_VARIABLE: Final = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def named_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file named by the environment, if any."""
    names = (environ.get(variable) for variable in FILE_VARIABLES)
    return next((Path(name) for name in names if name), None)


def file_layers(path: Path, findings: Findings) -> list[Layer]:
    """Return the keys of a YAML file."""
    where = f"file {path}"
    try:
        text = parse_yaml(_read(path))
    except OSError as error:
        findings.problems.append(f"{where}: cannot be read: {error.strerror}")
        return []
    except ValueError as error:
        findings.problems.append(f"{where}: {error}")
        return []
    if text.value is None:
        return []
    if not isinstance(text.value, dict):
        findings.problems.append(f"{where}: must hold `key: value` lines")
        return []
    findings.problems += [
        f"{where}, line {line}: {one_line(key)}: given more than once: keep one" for key, line in text.duplicates
    ]
    lines = {key: f", line {line}" for key, line in text.lines.items()}
    return [[Entry(str(key), value, where + lines.get(str(key), "")) for key, value in text.value.items()]]


def environment_layers(environ: Mapping[str, str], findings: Findings) -> list[Layer]:
    """Return ``LMCACHE_<KEY>`` and ``KVSTORE_<KEY>``. An empty variable counts as unset."""
    layers = []
    for prefix in _PREFIXES:
        names = [name for name in environ if name.startswith(f"{prefix.upper()}_") and environ[name]]
        found = (_variable(name, environ[name], findings) for name in sorted(names))
        layers.append([entry for entry in found if entry is not None])
    return layers


def extra_layers(extra: Mapping[str, object], findings: Findings) -> list[Layer]:
    """Return ``lmcache.<key>``, ``kvstore.<key>`` and two keys without a prefix. Others belong to other users of it."""
    layers = [[Entry(name, extra[name], f"kv_connector_extra_config {name}") for name in extra if name in UNPREFIXED]]
    for prefix in _PREFIXES:
        if prefix in extra:
            # vLLM nests a dotted flag: --kv-transfer-config.kv_connector_extra_config.kvstore.chunk_size
            findings.problems.append(
                f'kv_connector_extra_config {prefix}: must be written flat, as JSON: {{"{prefix}.chunk_size": 256}}'
            )
        names = [name for name in extra if name.startswith(f"{prefix}.")]
        layers.append(
            [Entry(name.partition(".")[2], extra[name], f"kv_connector_extra_config {name}") for name in names]
        )
    return layers


def with_nested(layer: Iterable[Entry], findings: Findings) -> Layer:
    """Return the layer with the keys inside ``extra_config`` as separate entries, weaker than the keys next to it."""
    nested: Layer = []
    direct: Layer = []
    for entry in layer:
        if entry.key != EXTRA_CONFIG:
            direct.append(entry)
        elif isinstance(entry.value, Mapping):
            nested += _nested(entry.value, entry.where, findings)
        elif entry.value is not None:
            findings.no_mapping(entry)
    return nested + direct


def _nested(values: Mapping[object, object], where: str, findings: Findings) -> Layer:
    inside = [Entry(str(key), value, f"{where}, in {EXTRA_CONFIG}") for key, value in values.items()]
    for entry in inside:
        if entry.key not in EXTRA_CONFIG_KEYS and entry.value:
            findings.warnings.append(f"{entry.where}: {one_line(entry.key)}: ignored: kvstore has no such setting")
    return [entry for entry in inside if entry.key in EXTRA_CONFIG_KEYS]


def _read(path: Path) -> bytes:
    """Return all bytes of a small regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or too large to be a configuration.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise ValueError("larger than 1 MiB: this is not a configuration")
    return raw


def _variable(name: str, text: str, findings: Findings) -> Entry | None:
    """Return a variable as an entry, or None if it is not a key."""
    key = name.partition("_")[2].lower()
    where = f"environment {name}"
    if key not in KEYS and key not in NOT_IMPLEMENTED and key != EXTRA_CONFIG:
        if not _is_foreign(name, text):
            _report_unknown(Entry(key, text, where), findings)
        return None
    if key in KEYS and KEYS[key].kind == "text":
        # Paths and names are taken literally: YAML would read "/data # 1" and "0123" as something else.
        return Entry(key, None if text == "null" else text, where)
    try:
        return Entry(key, parse_yaml(text).value, where)
    except YamlTextError as error:
        if key in NOT_IMPLEMENTED:
            return Entry(key, text, where)
        findings.problems.append(f"{where}: {key}: {error}")
        return None


def _is_foreign(name: str, text: str) -> bool:
    """Tell if a variable only looks like a key of ours."""
    is_service = _SERVICE_VARIABLE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in text)
    return name in OTHER_VARIABLES or is_service


def _report_unknown(entry: Entry, findings: Findings) -> None:
    """Refuse an unknown variable of ours. LMCache has switches that are not keys, so warn only if a key is near."""
    variable = entry.where.removeprefix("environment ")
    if variable.startswith("KVSTORE_"):
        findings.unknown_key(entry)
    elif nearest := misspelt_key(entry.key):
        findings.warnings.append(f"{entry.where}: ignored: unknown key; did you mean {nearest}?")
