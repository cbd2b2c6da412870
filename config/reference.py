"""Descriptions of all keys, for messages and for the documentation."""

from __future__ import annotations

import json
from typing import Final, NamedTuple, get_args

from kvstore.config.keys.base import Unit
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
        unit: empty if the value is not a quantity.
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
