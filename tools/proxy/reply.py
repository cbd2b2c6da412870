"""An answer to a client: whole, or a stream; and however it ends, the client can tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from starlette.types import Message, Send


class AnswerError(KVStoreError):
    """A request that the proxy itself ends with an error. The message is for clients: it names no address.

    Attributes:
        status: for the client.
        reason: for metrics.
        headers: for the client.
    """

    status: ClassVar[int] = HTTPStatus.BAD_REQUEST
    reason: ClassVar[str] = "malformed"
    headers: ClassVar[Mapping[str, str]] = {}


class ClientGoneError(Exception):
    """The client hung up, or does not read what it asked for."""


def error_tree(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's API tells it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def event_of(tree: dict[str, Any]) -> bytes:
    """A server-sent event that says this."""
    return b"data: " + json.dumps(tree).encode() + b"\n\n"


class Reply:
    """One answer. Its pieces are sent in order, by one task at a time.

    Args:
        send: ASGI's.
        request_id: told in the header ``X-Request-Id``.
        patience_s: how long a client may leave a piece unread.
    """

    def __init__(self, send: Send, request_id: str, patience_s: float) -> None:
        self.status: int | None = None
        self.failure: str | None = None
        self._send_now = send
        self.request_id = request_id
        self._patience_s = patience_s
        self.has_ended = False

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """All of the answer at once."""
        await self._begin(status, {**headers, "content-length": str(len(content))})
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": content})

    async def begin_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of a stream of events."""
        await self._begin(status, headers)

    async def piece(self, data: bytes) -> None:
        """Whole events."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """Nothing follows."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: AnswerError) -> None:
        """End with an error: with its status, or, in a stream that has begun, as the last event."""
        if self.has_ended:
            return
        self.failure = error.reason
        tree = error_tree(error.status, str(error))
        if self.status is None:
            headers = {"content-type": "application/json", **error.headers}
            await self.whole(error.status, json.dumps(tree).encode(), headers)
        else:
            await self.piece(event_of(tree))
            await self.end_stream()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        named = {**headers, "x-request-id": self.request_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send_now(message)
        except OSError as error:  # a TimeoutError is one, too
            raise ClientGoneError("the client does not read its answer") from error
