"""Answer to a client, whole or as a stream, with an end that the client can always recognize."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Message, Send

from kvstore.model.errors import KVStoreError

MESSAGES: Final = "/v1/messages"
"""Path of Anthropic's API, whose clients know errors by another form, and events by their names."""


class Reason(Enum):
    """Reason why the proxy ends a request with an error.

    Attributes:
        label: label in metrics.
        status: HTTP status for the client.
    """

    MALFORMED = "malformed", HTTPStatus.BAD_REQUEST
    WRONG_KEY = "key", HTTPStatus.UNAUTHORIZED
    FROM_A_BROWSER = "browser", HTTPStatus.FORBIDDEN
    SLOW_BODY = "slow_body", HTTPStatus.REQUEST_TIMEOUT
    TOO_LARGE = "too_large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    BROKEN = "broken", HTTPStatus.BAD_GATEWAY
    BUSY = "busy", HTTPStatus.SERVICE_UNAVAILABLE
    ENDING = "ending", HTTPStatus.SERVICE_UNAVAILABLE
    NO_DECODE_ENGINE = "no_decode_engine", HTTPStatus.SERVICE_UNAVAILABLE
    UNREACHABLE = "unreachable", HTTPStatus.SERVICE_UNAVAILABLE
    TIMEOUT = "timeout", HTTPStatus.GATEWAY_TIMEOUT

    def __init__(self, label: str, status: HTTPStatus) -> None:
        self.label = label
        self.status = status


class AnswerError(KVStoreError):
    """The proxy ends a request with an error.

    Args:
        reason: reason of the error.
        message: message for the client; it names no address.
        headers: headers for the client.
    """

    def __init__(self, reason: Reason, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.headers = headers or {}


class ClientGoneError(Exception):
    """The client hung up, or does not read its answer."""


def error_tree(status: int, message: str, path: str = "") -> dict[str, Any]:
    """Return an error in the format of OpenAI's API, or of Anthropic's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return {"type": "error", "error": error} if path == MESSAGES else {"error": error}


def event_of(tree: dict[str, Any]) -> bytes:
    """Return a server-sent event with this content."""
    return b"data: " + json.dumps(tree).encode() + b"\n\n"


class Reply:
    """Answer to one request, whose pieces are sent in order, by one task at a time.

    Args:
        send: ASGI's ``send``.
        request_id: id for the header ``X-Request-Id``.
        path: of the request.
    """

    def __init__(self, send: Send, request_id: str, path: str) -> None:
        self._path = path
        self.status: int | None = None
        self.failure: str | None = None
        self._send = send
        self.request_id = request_id
        self.has_ended = False

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """Send the whole answer."""
        head = self._head(status, {**headers, "content-length": str(len(content))})
        self.has_ended = True
        await self._send(head)
        await self._send({"type": "http.response.body", "body": content})

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer."""
        await self._send(self._head(status, headers))

    async def piece(self, data: bytes) -> None:
        """Send whole events of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """End a stream."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: AnswerError) -> None:
        """End the answer with an error: by its status or, in a stream that has begun, as the last event."""
        if self.has_ended:
            return
        self.failure = error.reason.label
        tree = error_tree(error.reason.status, str(error), self._path)
        if self.status is None:
            headers = {"content-type": "application/json", **error.headers}
            await self.whole(error.reason.status, json.dumps(tree).encode(), headers)
        else:
            name = b"event: error\n" if self._path == MESSAGES else b""  # an event without a name would be skipped
            await self.piece(name + event_of(tree))
            await self.end_stream()

    def _head(self, status: int, headers: Mapping[str, str]) -> Message:
        self.status = status
        named = {**headers, "x-request-id": self.request_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        return {"type": "http.response.start", "status": status, "headers": raw}
