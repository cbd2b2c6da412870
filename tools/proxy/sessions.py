"""Sessions and retention, as clients of OpenAI and Anthropic ask for them, in the terms of vLLM and kvstore. No I/O.

vLLM drops these fields. OpenAI's ``prompt_cache_key`` names a session, ``prompt_cache_retention`` and
``prompt_cache_options`` a time, and so does Anthropic's ``cache_control``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2s
from itertools import islice
from typing import Final

import msgspec
from msgspec import Raw

from kvstore.tools.proxy.objects import small

SESSION_HEADER: Final = "x-session-id"
SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,256}")  # sent to engines unchanged

_CACHED: Final = ("system", "messages", "tools")  # members in which Anthropic's clients mark the ends of prefixes
_CONTROL: Final = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]{0,256}\})')  # not in text, whose quotes are escaped
_TIME: Final = re.compile(r"(\d{1,5})([smhd])")
_IN_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_CONTROLS: Final = 64  # of a request; Anthropic allows 4
_ANTHROPIC_S: Final = 300  # without a ttl
_MOST_S: Final = 365 * 86_400  # which engines accept


class _Control(msgspec.Struct):
    """Value of ``cache_control`` or ``prompt_cache_options``."""

    type: str = ""
    ttl: str | None = None


_CONTROLS: Final = msgspec.json.Decoder(_Control)
_TEXT: Final = msgspec.json.Decoder(str)


def session_of(body: Mapping[str, Raw], header: str) -> str:
    """Return the name of a request's session, which may be a header's value; empty without one.

    Names that no header can hold are replaced by a hash.
    """
    name = _text(body.get("session_id")) or header or _text(body.get("prompt_cache_key"))
    if not name or SESSION_ID.fullmatch(name):
        return name
    return blake2s(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def retention_s(body: Mapping[str, Raw]) -> int:
    """Return the longest time for which a request asks to keep its prompt; 0 if it asks for none.

    Anthropic's clients mark prefixes of a prompt; here all of it is kept.
    """
    times_s = [_seconds(_text(body.get("prompt_cache_retention")))]
    options = _control(body.get("prompt_cache_options"))
    if options is not None:
        times_s.append(_seconds(options.ttl or ""))
    controls = [_control(body.get("cache_control"))]
    parts = (part for name in _CACHED if (part := body.get(name)) is not None)
    marks = (found for part in parts for found in _CONTROL.finditer(part))
    controls += [_control(Raw(found[1])) for found in islice(marks, _MAX_CONTROLS)]
    times_s += [
        _seconds(control.ttl) if control.ttl else _ANTHROPIC_S
        for control in controls
        if control is not None and control.type == "ephemeral"
    ]
    return max(times_s)


def _text(member: Raw | None) -> str:
    """Return a member that is a short text; empty for any other one."""
    return small(_TEXT, member) or ""


def _control(member: Raw | None) -> _Control | None:
    return small(_CONTROLS, member)


def _seconds(time: str) -> int:
    """Return the seconds of a time such as ``5m``; 0 for other words, such as ``in_memory``."""
    found = _TIME.fullmatch(time)
    return min(int(found[1]) * _IN_SECONDS[found[2]], _MOST_S) if found else 0
