"""Router of a proxy, which answers a request by prefill on one engine and decode on another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from msgspec import Raw

from kvstore.model.errors import InvalidCallError
from kvstore.tools.proxy.admission import Call
from kvstore.tools.proxy.choice import Beginning
from kvstore.tools.proxy.engines import (
    MAX_ANSWER_BYTES,
    Engine,
    EngineError,
    EngineSilentError,
    EngineUnreachableError,
)
from kvstore.tools.proxy.events import EventCutter, Handover, is_last
from kvstore.tools.proxy.first_token import First, first_of, recounted
from kvstore.tools.proxy.fleet import Fleet
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.meters import ProxyMeters
from kvstore.tools.proxy.objects import Parts
from kvstore.tools.proxy.options import Choice, ProxyOptions
from kvstore.tools.proxy.reply import MESSAGES, AnswerError, Reason, Reply
from kvstore.tools.proxy.requests import Ask, sent_kv
from kvstore.tools.proxy.sessions import SESSION_HEADER, session_of
from kvstore.tools.proxy.upstream import UpstreamAnswer, UpstreamError

_EVENTS: Final = "text/event-stream"


Filter = Callable[[bytes], bytes]
"""Filter of a stream's events: it returns the bytes to send to the client for an event."""


class Whole(NamedTuple):
    """Answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Prefilled(NamedTuple):
    """Result of a prefill.

    Attributes:
        spec: the engine's description of the KV that it sent.
        first: first token, if the stream may begin with it.
        refusal: the engine's answer, if it refused the request.
    """

    spec: Mapping[str, Raw] | None = None
    first: First | None = None
    refusal: Whole | None = None


class Router:
    """Router that answers requests through engines, for use on one event loop."""

    def __init__(self, options: ProxyOptions, fleet: Fleet, meters: ProxyMeters) -> None:
        self._bidirectional = options.bidirectional
        self._first_token = options.first_token
        self._prefill_timeout_s = options.prefill_timeout_s
        self._retains = options.retain
        self._by_prefix = options.choice is Choice.PREFIX
        self._fleet = fleet
        self._meters = meters

    async def generate(self, call: Call, reply: Reply) -> None:
        """Answer a request for a completion, a chat or a message.

        Raises:
            AnswerError: error for the client, even if its answer has begun.
            ClientGoneError: the client hung up.
        """
        try:
            ask = Ask.parse(call.content)
        except InvalidCallError as error:
            raise AnswerError(Reason.MALFORMED, str(error)) from error
        session = session_of(ask.body, call.headers.get(SESSION_HEADER, ""))
        if session:
            call = call._replace(headers={**call.headers, SESSION_HEADER: session})
        if self._retains:
            ask = ask.retaining()
        beginnings = ask.beginnings(session) if self._by_prefix else ()
        decoders = self._fleet.decode.candidates(beginnings)
        if not decoders:
            raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine answers: try again later")
        with decoders[0].taken():
            prefilled = await self._prefill(ask, beginnings, call, decoders[0].receiver)
        if prefilled.refusal is not None:
            await _pass_on(prefilled.refusal, reply)
        else:
            await self._decode(ask, call, decoders, prefilled, reply)

    async def forward(self, call: Call, reply: Reply) -> None:
        """Answer a request with the answer of any decode engine.

        Raises:
            AnswerError: see ``generate``.
            ClientGoneError: see ``generate``.
        """
        for engine in self._fleet.decode.candidates():
            try:
                answer = await _whole(engine, call, [call.content])
            except EngineUnreachableError:
                continue
            await _pass_on(answer, reply)
            return
        raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine answers: try again later")

    async def _prefill(
        self, ask: Ask, beginnings: Sequence[Beginning], call: Call, receiver: Receiver | None
    ) -> Prefilled:
        # A unique id, because two clients may use the same request id, and their KV must not be mixed up.
        transfer_id = f"{call.request_id}-{secrets.token_hex(8)}"
        wants_first = self._first_token and receiver is not None and ask.may_begin(call.path)
        content = ask.for_prefill(receiver, transfer_id, wants_first=wants_first)
        reason = "no_prefill_engine"
        for engine in self._fleet.prefill.candidates(beginnings):
            begin_s = time.monotonic()
            try:
                with engine.taken():
                    async with asyncio.timeout(self._prefill_timeout_s):
                        answer = await _whole(engine, call, content)
            except EngineUnreachableError:
                reason = "prefill_unreachable"
                continue
            except (EngineSilentError, TimeoutError):
                reason = "prefill_timeout"
                break
            except EngineError:
                reason = "prefill_broken"
                break
            if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
                self._meters.prefill_seconds.observe(time.monotonic() - begin_s)
                return Prefilled(
                    spec=None if receiver is None else sent_kv(answer.content),
                    first=first_of(answer.content, ask.body) if wants_first else None,
                )
            is_refusal = HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR
            if is_refusal and call.path != MESSAGES:  # its checks depend on the number of tokens, so decode decides
                return Prefilled(refusal=answer)
            reason = "prefill_error"
            break
        self._meters.fallbacks.labels(reason).inc()
        return Prefilled()

    async def _decode(
        self, ask: Ask, call: Call, engines: Sequence[Engine], prefilled: Prefilled, reply: Reply
    ) -> None:
        spec, first = prefilled.spec, prefilled.first
        if first is not None:
            self._meters.first_tokens.inc()
            await reply.begin(HTTPStatus.OK, {"content-type": f"{_EVENTS}; charset=utf-8"})
            await reply.piece(first.event)
        for engine in engines:
            filters: list[Filter] = [] if first is None else [recounted]
            tells = self._bidirectional and call.path != MESSAGES and engine.receiver is not None and ask.is_one_stream
            if tells and engine.receiver is not None:
                filters.append(Handover(engine.receiver, shows_usage=ask.shows_usage).pass_on)
            content = ask.for_decode(spec, counted=tells, first=first)
            try:
                with engine.taken():
                    async with engine.asked(call.method, call.path, call.headers, content) as answer:
                        await _relay(engine, answer, filters, reply)
            except EngineUnreachableError:
                self._meters.fallbacks.labels("decode_unreachable").inc()
                spec = None  # that engine has the KV; the next one computes it
                continue
            return
        raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine can be reached: try again later")


async def _whole(engine: Engine, call: Call, content: Parts) -> Whole:
    async with engine.asked(call.method, call.path, call.headers, content) as answer:
        return Whole(answer.status, answer.headers, await answer.read(MAX_ANSWER_BYTES))


async def _relay(engine: Engine, answer: UpstreamAnswer, filters: Sequence[Filter], reply: Reply) -> None:
    """Forward an answer as it arrives; a stream in whole events.

    Raises:
        EngineError: the answer stopped before its end.
        UpstreamError: the same.
    """
    is_stream = answer.status == HTTPStatus.OK and answer.headers.get("content-type", "").startswith(_EVENTS)
    if not is_stream:
        if reply.status is not None:
            message = f"the {engine.role} engine answered {answer.status} after the first token"
            raise EngineError(Reason.BROKEN, message)
        await _pass_on(Whole(answer.status, answer.headers, await answer.read(MAX_ANSWER_BYTES)), reply)
        return
    if reply.status is None:
        await reply.begin(answer.status, answer.headers)
    cutter = EventCutter()
    is_complete = False
    try:
        async for data in answer.pieces():
            events = cutter.feed(data)
            shown = b"".join(_filtered(event, filters) for event in events) if filters else b"".join(events)
            if shown:
                await reply.piece(shown)
            is_complete = is_complete or any(map(is_last, events))
    except UpstreamError:
        if not is_complete:
            raise
    if not is_complete:
        raise EngineError(Reason.BROKEN, f"the {engine.role} engine ended in the middle of its answer")
    await reply.end_stream()


def _filtered(event: bytes, filters: Sequence[Filter]) -> bytes:
    for one in filters:
        event = one(event)
    return event


async def _pass_on(answer: Whole, reply: Reply) -> None:
    await reply.whole(answer.status, answer.content, answer.headers)
