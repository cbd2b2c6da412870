"""What each key is, in words: for messages, and for the tables in ``docs/configuration.md``."""

from __future__ import annotations

import json
from typing import Final, NamedTuple, get_args

from kvstore.config.keys.base import Unit
from kvstore.config.lmcache import FAMILIES
from kvstore.config.schema import StoreConfig

_KINDS: Final = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple[str, ...]: "text",
}


class KeyReference(NamedTuple):
    """One key of ``StoreConfig``.

    Attributes:
        kind: "true or false", "whole number", "number" or "text".
        default: as YAML writes it.
        unit: empty where the value is no quantity.
        meaning: the text below the key in its class.
    """

    key: str
    kind: str
    default: str
    unit: str
    meaning: str


def _describe(key: str) -> KeyReference:
    field = StoreConfig.model_fields[key]
    types = get_args(field.annotation) or (field.annotation,)
    return KeyReference(
        key=key,
        kind=_KINDS[types[0]],
        default=json.dumps(field.default),
        unit=next((item.name for item in field.metadata if isinstance(item, Unit)), ""),
        meaning=" ".join((field.description or "").split()),
    )


KEYS: Final = {key: _describe(key) for key in StoreConfig.model_fields}


def key_table() -> str:
    """All keys as a Markdown table."""
    rows = [f"| `{k.key}` | {k.kind} | {k.default} | {k.unit} | {k.meaning} |" for k in KEYS.values()]
    return "\n".join(["| key | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |", *rows])


def lmcache_table() -> str:
    """LMCache's keys that have no effect here, as a Markdown table."""
    rows = [f"| {', '.join(f'`{key}`' for key in keys.split())} | {meaning} |" for keys, meaning in FAMILIES.items()]
    return "\n".join(["| keys of LMCache | what their absence means |", "| --- | --- |", *rows])
