"""How a proxy answers a request: prefill on one engine, decode on another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import httpx
from msgspec import Raw

from kvstore.errors import InvalidCallError
from kvstore.tools.proxy.asks import Ask, sent_kv
from kvstore.tools.proxy.engines import (
    Engine,
    EngineClient,
    EngineError,
    EngineSilentError,
    EngineUnreachableError,
    Rota,
    translated,
)
from kvstore.tools.proxy.events import EventCutter, Handover, is_last
from kvstore.tools.proxy.gate import Call
from kvstore.tools.proxy.meters import ProxyMeters
from kvstore.tools.proxy.objects import Parts
from kvstore.tools.proxy.options import ProxyOptions, Receiver
from kvstore.tools.proxy.reply import AnswerError, Reason, Reply

_PASSED_HEADERS: Final = ("content-type", "retry-after", "www-authenticate")
_EVENTS: Final = "text/event-stream"


class Prefilled(NamedTuple):
    """The result of a prefill.

    Attributes:
        spec: what the engine says about the KV that it sent.
        refusal: its answer, if it refused the request.
    """

    spec: Mapping[str, Raw] | None = None
    refusal: httpx.Response | None = None


class Router:
    """Answers requests through engines. Belongs to one event loop."""

    def __init__(self, options: ProxyOptions, client: EngineClient, meters: ProxyMeters) -> None:
        self._bidirectional = options.bidirectional
        self._prefill_timeout_s = options.prefill_timeout_s
        self._client = client
        self._meters = meters
        receivers: Sequence[Receiver | None] = options.receivers or [None] * len(options.decode)
        pairs = zip(options.decode, receivers, strict=True)
        self.prefill = Rota([Engine("prefill", url.rstrip("/")) for url in options.prefill])
        self.decode = Rota([Engine("decode", url.rstrip("/"), receiver) for url, receiver in pairs])

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them."""
        return self.prefill.engines + self.decode.engines

    async def generate(self, call: Call, reply: Reply) -> None:
        """Answer a request for a completion or a chat.

        Raises:
            AnswerError: what to tell the client, even if its answer has begun.
            ClientGoneError: the client hung up.
        """
        try:
            ask = Ask.parse(call.content)
        except InvalidCallError as error:
            raise AnswerError(Reason.MALFORMED, str(error)) from error
        decoders = self.decode.candidates()
        if not decoders:
            raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine answers: try again later")
        prefilled = await self._prefill(ask, call, decoders[0].receiver)
        if prefilled.refusal is not None:
            await _pass_on(prefilled.refusal, reply)
        else:
            await self._decode(ask, call, decoders, prefilled.spec, reply)

    async def forward(self, call: Call, reply: Reply) -> None:
        """Answer a request with the answer of any decode engine.

        Raises:
            AnswerError: see ``generate``.
            ClientGoneError: the same.
        """
        for engine in self.decode.candidates():
            try:
                answer = await self._whole(engine, call, [call.content])
            except EngineUnreachableError:
                continue
            await _pass_on(answer, reply)
            return
        raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine answers: try again later")

    async def _prefill(self, ask: Ask, call: Call, receiver: Receiver | None) -> Prefilled:
        # A name of our own: two clients may use the same request id, and their KV must not get mixed up.
        transfer_id = f"{call.request_id}-{secrets.token_hex(8)}"
        content = ask.for_prefill(receiver, transfer_id)
        reason = "no_prefill_engine"
        for engine in self.prefill.candidates():
            begin_s = time.monotonic()
            try:
                async with asyncio.timeout(self._prefill_timeout_s):
                    answer = await self._whole(engine, call, content)
            except EngineUnreachableError:
                reason = "prefill_unreachable"
                continue
            except (EngineSilentError, TimeoutError):
                reason = "prefill_timeout"
                break
            except EngineError:
                reason = "prefill_broken"
                break
            if answer.is_success:
                self._meters.prefill_seconds.observe(time.monotonic() - begin_s)
                return Prefilled(spec=None if receiver is None else sent_kv(answer.content))
            if answer.is_client_error:
                return Prefilled(refusal=answer)
            reason = "prefill_error"
            break
        self._meters.fallbacks.labels(reason).inc()
        return Prefilled()

    async def _decode(
        self, ask: Ask, call: Call, engines: Sequence[Engine], spec: Mapping[str, Raw] | None, reply: Reply
    ) -> None:
        for engine in engines:
            handover = None
            if self._bidirectional and engine.receiver is not None and ask.is_one_stream:
                handover = Handover(engine.receiver, shows_usage=ask.shows_usage)
            content = ask.for_decode(spec, counted=handover is not None)
            try:
                async with self._client.asked(engine, call.method, call.path, call.headers, content) as answer:
                    await _relay(engine, answer, handover, reply)
            except EngineUnreachableError:
                self._meters.fallbacks.labels("decode_unreachable").inc()
                spec = None  # that engine has the KV; the next one computes
                continue
            return
        raise AnswerError(Reason.NO_DECODE_ENGINE, "no decode engine can be reached: try again later")

    async def _whole(self, engine: Engine, call: Call, content: Parts) -> httpx.Response:
        async with self._client.asked(engine, call.method, call.path, call.headers, content) as answer:
            with translated(engine):
                await answer.aread()
            return answer


async def _relay(engine: Engine, answer: httpx.Response, handover: Handover | None, reply: Reply) -> None:
    """Pass on an answer as it arrives; a stream in whole events.

    Raises:
        EngineError: the answer stopped before its end.
    """
    if not answer.headers.get("content-type", "").startswith(_EVENTS):
        with translated(engine):
            await answer.aread()
        await _pass_on(answer, reply)
        return
    await reply.begin(answer.status_code, _passed_headers(answer))
    cutter = EventCutter()
    is_complete = False
    try:
        with translated(engine):
            async for data in answer.aiter_raw():
                events = cutter.feed(data)
                shown = b"".join(events if handover is None else map(handover.pass_on, events))
                if shown:
                    await reply.piece(shown)
                is_complete = is_complete or any(map(is_last, events))
    except EngineError:
        if not is_complete:
            raise
    if not is_complete:
        raise EngineError(Reason.BROKEN, f"the {engine.role} engine ended in the middle of its answer")
    await reply.end_stream()


async def _pass_on(answer: httpx.Response, reply: Reply) -> None:
    await reply.whole(answer.status_code, answer.content, _passed_headers(answer))


def _passed_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
