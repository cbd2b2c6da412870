"""What a client asks of the cache for one request, read from what the request carries. No vLLM types.

Fields are called ``kvstore.<name>``, or ``lmcache.<name>`` as clients of LMCache write them; docs/per-request.md lists
them. Nobody has checked them before, so anything may be in them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.config.schema import REQUEST_FIELDS
from kvstore.errors import InvalidCallError

MAX_TAGS: Final = 16
MAX_TAG_CHARACTERS: Final = 256
MAX_TTL_S: Final = 365 * 86_400

_OURS: Final = "kvstore."
_LMCACHES: Final = "lmcache."
_TAG: Final = "tag."  # before a tag's own name
_TAGS: Final = "tag"
_NAMES: Final = tuple(name for name in REQUEST_FIELDS if name != _TAGS)


@dataclass(frozen=True)
class RequestParams:
    """A client's wishes for one request.

    Attributes:
        skip_save: store nothing of it.
        skip_load: compute it, whatever is stored.
        ttl_s: how long what it stores may be found; None for as long as there is room.
        pin: True keeps its prompt's chunks from eviction, False ends that, None does neither.
        tags: (name, value) pairs, sorted, that another request must have too to share its KV.
        ignored: names of fields that it has, and that do not count here.
    """

    skip_save: bool = False
    skip_load: bool = False
    ttl_s: float | None = None
    pin: bool | None = None
    tags: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


NO_PARAMS: Final = RequestParams()
WITHOUT_CACHE: Final = RequestParams(skip_save=True, skip_load=True)


def parse_params(*sources: object, counted: Collection[str] = REQUEST_FIELDS) -> RequestParams:
    """Read mappings of field names to values, the weakest first; None is no source, and no value.

    Args:
        sources: as the request carries them.
        counted: which of ``REQUEST_FIELDS`` count; what the others say is not looked at.

    Raises:
        InvalidCallError: a field is unknown or has a wrong value. The message names the field, and shows nothing of
            what the client wrote.
    """
    fields = _fields(sources)
    ignored = {name: _kind(name) for name in fields if _kind(name) not in counted}
    for name in ignored:
        del fields[name]
    tags = {name.removeprefix(_TAG): fields.pop(name) for name in list(fields) if name.startswith(_TAG)}
    pin = fields.get("pin")
    ttl = fields.get("ttl")
    return RequestParams(
        skip_save=_flag("skip_save", fields.get("skip_save", False)),
        skip_load=_flag("skip_load", fields.get("skip_load", False)),
        ttl_s=None if ttl is None else _seconds("ttl", ttl),
        pin=None if pin is None else _flag("pin", pin),
        tags=_tags(tags),
        ignored=tuple(sorted(set(ignored.values()))),
    )


def _kind(name: str) -> str:
    """What of ``REQUEST_FIELDS`` a field is."""
    return _TAGS if name.startswith(_TAG) else name


def _fields(sources: tuple[object, ...]) -> dict[str, object]:
    """Our fields by their name without prefix; where both prefixes give one, ours counts."""
    fields: dict[str, object] = {}
    for prefix in (_LMCACHES, _OURS):
        for source in sources:
            if source is None:
                continue
            if not isinstance(source, Mapping):
                raise InvalidCallError("kv_transfer_params must be a mapping of names to values")
            for name, value in source.items():
                if isinstance(name, str) and name.startswith(prefix) and value is not None:
                    _take(fields, prefix, name.removeprefix(prefix), value)
    return fields


def _take(fields: dict[str, object], prefix: str, name: str, value: object) -> None:
    """Note one field. LMCache's further ones mean nothing here; in our own namespace a typing error must not pass."""
    if name in _NAMES or name.startswith(_TAG):
        fields[name] = value
    elif prefix == _OURS:
        nearest = difflib.get_close_matches(name[:MAX_TAG_CHARACTERS], _NAMES, n=1)
        known = nearest or [*_NAMES, f"{_TAG}<name>"]
        raise InvalidCallError(f"a field {_OURS}... is unknown: valid is {', '.join(_OURS + name for name in known)}")


def _flag(name: str, value: object) -> bool:
    """True or false; vLLM turns those of ``vllm_xargs`` into 1 and 0."""
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise InvalidCallError(f"{_OURS}{name} must be true or false")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TTL_S:
        return float(value)
    raise InvalidCallError(f"{_OURS}{name} must be a number of seconds above 0 and up to {MAX_TTL_S}")


def _tags(given: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    if len(given) > MAX_TAGS:
        raise InvalidCallError(f"{_OURS}{_TAG}<name>: at most {MAX_TAGS} tags are allowed")
    tags = []
    for name, value in given.items():
        if not 0 < len(name) <= MAX_TAG_CHARACTERS:
            raise InvalidCallError(f"{_OURS}{_TAG}<name>: a name must have 1 to {MAX_TAG_CHARACTERS} characters")
        if not isinstance(value, str) or len(value) > MAX_TAG_CHARACTERS:
            raise InvalidCallError(f"{_OURS}{_TAG}<name> must be text of up to {MAX_TAG_CHARACTERS} characters")
        tags.append((name, value))
    return tuple(sorted(tags))
