"""Server-sent events that are passed unchanged from an engine to a client, without I/O."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.reply import AnswerError, Reason, event_of

_MAX_EVENT_BYTES: Final = 64 << 20
_END: Final = re.compile(rb"\r?\n\r?\n")
_LAST: Final = b"data: [DONE]"
_ENDS: Final = (b"event: message_stop", b"event: error")  # of Anthropic's streams


class EventCutter:
    """Cutter of a stream into whole events, so that the proxy never inserts data inside one."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add data, and return the events that are complete now, with the empty lines that end them.

        Raises:
            AnswerError: an event is too long.
        """
        seen = max(0, len(self._rest) - 3)  # an end may span two pieces
        self._rest += data
        events, begin = [], 0
        for end in _END.finditer(self._rest, seen):
            events.append(bytes(self._rest[begin : end.end()]))
            begin = end.end()
        del self._rest[:begin]
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise AnswerError(Reason.BROKEN, f"an event of more than {_MAX_EVENT_BYTES} bytes")
        return events


class Handover:
    """Filter that inserts an event with the address of a stream's KV before the last event.

    vLLM sends ``kv_transfer_params`` only in whole answers. The length of the sequence is read from the stream's usage,
    which is removed if the client did not ask for it.
    """

    def __init__(self, receiver: Receiver, *, shows_usage: bool) -> None:
        self._receiver = receiver
        self._shows_usage = shows_usage
        self._usage: _UsageChunk | None = None

    def pass_on(self, event: bytes) -> bytes:
        """Return the bytes to send to the client for this event."""
        if is_last(event):
            return self._said() + event
        chunk = _usage_chunk(event)
        if chunk is None:
            return event
        self._usage = chunk
        return event if self._shows_usage else b""

    def _said(self) -> bytes:
        if self._usage is None:
            return b""
        params = {
            "remote_host": self._receiver.host.partition(",")[0],
            "remote_port": self._receiver.port,
            "num_tokens": self._usage.usage.total_tokens - 1,  # the last token has no KV
        }
        return event_of({**self._usage.names(), "choices": [], "kv_transfer_params": params})


def is_last(event: bytes) -> bool:
    """Tell if this event ends a stream."""
    event = event.strip()
    return event == _LAST or event.startswith(_ENDS)


class _Usage(msgspec.Struct):
    total_tokens: int


class _UsageChunk(msgspec.Struct):
    choices: list[Raw]
    usage: _Usage
    id: str | UnsetType = UNSET
    object: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    model: str | UnsetType = UNSET

    def names(self) -> dict[str, Any]:
        """Return the members that every chunk of a stream has."""
        said = {name: getattr(self, name) for name in ("id", "object", "created", "model")}
        return {name: value for name, value in said.items() if value is not UNSET}


_USAGE_CHUNK: Final = msgspec.json.Decoder(_UsageChunk)


def _usage_chunk(event: bytes) -> _UsageChunk | None:
    """Return the chunk in an event if it has a usage and no choices; otherwise None."""
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return None
    try:
        chunk = _USAGE_CHUNK.decode(event.removeprefix(b"data:"))
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if chunk.choices else chunk
