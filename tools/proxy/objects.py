"""JSON objects of which a proxy needs a few members; the others stay the bytes that they are.

Bodies have megabytes, and one event loop passes on all streams. So members that the proxy does not need are checked and
skipped; they are neither turned into Python objects nor written anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import DecodeError, Raw

from kvstore.errors import InvalidCallError

Members = Mapping[str, Any]
"""What becomes a JSON object; a ``Raw`` in it is written as it is."""
Part = bytes | bytearray | memoryview | Raw
Parts = Sequence[Part]
"""Bytes to be sent one after the other."""
MAX_MEMBERS: Final = 1024  # of an object that is parsed; no request has as many

_LARGE_BYTES: Final = 16 << 10
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OF_TEXTS_OR_LISTS: Final = re.compile(rb"\[\s*[\"\[]")


class Spliced(tuple[Part, ...]):
    """A member made of several pieces of JSON, which are not copied together."""

    __slots__ = ()


class _FirstTwo(msgspec.Struct, array_like=True):
    """The first two of a list; the rest is skipped."""

    first: Raw
    second: Raw = Raw(b"")


_FIRST_TWO: Final = msgspec.json.Decoder(_FirstTwo)


def members_of(content: bytes | bytearray | Raw) -> dict[str, Raw]:
    """The members of an object, in order; of several with the same name, the last one.

    Raises:
        InvalidCallError: it is no object, or too large. The message shows nothing of it.
    """
    try:
        members = _OBJECT.decode(content)
    except (DecodeError, RecursionError) as error:
        raise InvalidCallError("the body must be a JSON object") from error
    if len(members) > MAX_MEMBERS:
        raise InvalidCallError(f"the body has an object of more than {MAX_MEMBERS} members")
    return members


def written(members: Members) -> Parts:
    """The object with these members; one with large members in parts, so that these are not copied."""
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
    """Whether it is written as it is, and not copied."""
    return isinstance(value, Spliced) or (isinstance(value, Raw) and len(value) > _LARGE_BYTES)


def says(value: Raw | None, literal: bytes) -> bool:
    """Whether a member is this number or word; a missing one counts as ``null``."""
    if value is None:
        return literal == b"null"
    return len(value) == len(literal) and bytes(value) == literal


def is_list_of_several(value: Raw | None) -> bool:
    """Whether a member is a list of two or more texts or lists; a list of numbers is not."""
    if value is None or _OF_TEXTS_OR_LISTS.match(value) is None:
        return False
    return len(_FIRST_TWO.decode(value).second) > 0
