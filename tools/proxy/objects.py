"""JSON objects of which a proxy needs a few members: the others stay the bytes they are.

Bodies have megabytes, and one event loop passes all streams on. So what need not be understood is checked and skipped,
and neither made into objects nor written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import DecodeError, Raw

from kvstore.errors import InvalidCallError

Members = Mapping[str, Any]
"""What becomes an object; a ``Raw`` in it is written as it is."""
Parts = Sequence[bytes | bytearray | Raw]
"""What is sent one behind the other."""
MAX_MEMBERS: Final = 1024  # of an object that is looked into; no request has so many

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OF_TEXTS_OR_LISTS: Final = re.compile(rb"\[\s*[\"\[]")


class _FirstTwo(msgspec.Struct, array_like=True):
    """Of a list; what follows is skipped."""

    first: Raw
    second: Raw = Raw(b"")


_FIRST_TWO: Final = msgspec.json.Decoder(_FirstTwo)


def members_of(content: bytes | bytearray | Raw) -> dict[str, Raw]:
    """The members of an object, in order; of several with one name the last.

    Raises:
        InvalidCallError: it is no object. The message shows nothing of it.
    """
    try:
        members = _OBJECT.decode(content)
    except (DecodeError, RecursionError) as error:
        raise InvalidCallError("the body must be a JSON object") from error
    if len(members) > MAX_MEMBERS:
        raise InvalidCallError(f"the body has an object of more than {MAX_MEMBERS} members")
    return members


def written(members: Members) -> Parts:
    """The object with these members, in parts: the large ones are not copied."""
    parts: list[bytes | Raw] = []
    for name, value in members.items():
        parts += [b"," if parts else b"{", msgspec.json.encode(name), b":"]
        parts.append(value if isinstance(value, Raw) else msgspec.json.encode(value))
    return [*parts, b"}"] if parts else [b"{}"]


def says(value: Raw | None, literal: bytes) -> bool:
    """Whether a member is this number or word; one that is not there is ``null``."""
    if value is None:
        return literal == b"null"
    return len(value) == len(literal) and bytes(value) == literal


def is_list_of_several(value: Raw | None) -> bool:
    """Whether a member is a list of two or more texts, or lists; numbers are not looked at."""
    if value is None or _OF_TEXTS_OR_LISTS.match(value) is None:
        return False
    return len(_FIRST_TWO.decode(value).second) > 0
