"""JSON objects of which a proxy parses a few members, and keeps the others as bytes.

Bodies have megabytes, and one event loop relays all streams. So members that the proxy does not need are validated and
skipped; they are neither converted to Python objects nor encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import DecodeError, Raw

from kvstore.model.errors import InvalidCallError

Members = Mapping[str, Any]
"""Members of a JSON object to write; a ``Raw`` value is written unchanged."""
Part = bytes | bytearray | memoryview | Raw
Parts = Sequence[Part]
"""Pieces of bytes to send one after the other."""
Kind = TypeVar("Kind")
MAX_MEMBERS: Final = 1024  # of a parsed object; more than any request has

_LARGE_BYTES: Final = 16 << 10
_SMALL_BYTES: Final = 4096
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OF_TEXTS_OR_LISTS: Final = re.compile(rb"\[\s*[\"\[]")


class Spliced(tuple[Part, ...]):
    """Member in several pieces of JSON, which are not joined in memory."""

    __slots__ = ()


class _FirstTwo(msgspec.Struct, array_like=True):
    """First two items of a list; the rest is skipped."""

    first: Raw
    second: Raw = Raw(b"")


_FIRST_TWO: Final = msgspec.json.Decoder(_FirstTwo)


def members_of(content: bytes | bytearray | Raw) -> dict[str, Raw]:
    """Return the members of an object, in order; of several with the same name, the last one.

    Raises:
        InvalidCallError: the content is no object, or has too many members. The message quotes nothing of it.
    """
    try:
        members = _OBJECT.decode(content)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidCallError("the body must be a JSON object") from error
    if len(members) > MAX_MEMBERS:
        raise InvalidCallError(f"the body has an object of more than {MAX_MEMBERS} members")
    return members


def written(members: Members) -> Parts:
    """Return the JSON object of these members; large members become separate parts, so that they are not copied."""
    if not any(map(_is_large, members.values())):
        return [msgspec.json.encode(members)]
    parts: list[Part] = []
    for name, value in members.items():
        parts += [b"," if parts else b"{", msgspec.json.encode(name), b":"]
        if isinstance(value, Spliced):
            parts += value
        else:
            parts.append(value if isinstance(value, Raw) else msgspec.json.encode(value))
    return [*parts, b"}"] if parts else [b"{}"]


def _is_large(value: object) -> bool:
    """Tell if a member is large enough to be written without a copy."""
    return isinstance(value, Spliced) or (isinstance(value, Raw) and len(value) > _LARGE_BYTES)


def says(value: Raw | None, literal: bytes) -> bool:
    """Tell if a member is this number or word; a missing one counts as ``null``."""
    if value is None:
        return literal == b"null"
    return len(value) == len(literal) and bytes(value) == literal


class _Typed(msgspec.Struct):
    type: str = ""


_TYPED: Final = msgspec.json.Decoder(_Typed)


def small(decoder: msgspec.json.Decoder[Kind], value: Raw | None) -> Kind | None:
    """Decode a member of a few KiB; None if it is missing, larger, or something else."""
    try:
        return decoder.decode(value) if value is not None and len(value) <= _SMALL_BYTES else None
    except (DecodeError, RecursionError, UnicodeDecodeError):
        return None


def type_of(value: Raw | None) -> str:
    """Return the ``type`` of a member that is a small object; empty for any other one."""
    found = small(_TYPED, value)
    return "" if found is None else found.type


def is_list_of_several(value: Raw | None) -> bool:
    """Tell if a member is a list of two or more texts or lists; a list of numbers is not."""
    if value is None or _OF_TEXTS_OR_LISTS.match(value) is None:
        return False
    return len(_FIRST_TWO.decode(value).second) > 0
