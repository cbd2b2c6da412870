"""Conversion of a client's request to the requests for the two engines, without I/O.

docs/disaggregation.md describes the ``kv_transfer_params`` of each request. Addresses that an engine sends KV to are
set by the operator, never by a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import msgspec
from msgspec import Raw

from kvstore.model.errors import InvalidCallError
from kvstore.tools.proxy.choice import MOST_BYTES, Beginning, beginnings_of, session_beginning
from kvstore.tools.proxy.first_token import First, is_text, may_begin
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.objects import Parts, is_list_of_several, members_of, says, type_of, written
from kvstore.tools.proxy.sessions import retention_s

_PARAMS: Final = "kv_transfer_params"
_SPEC: Final = "disagg_spec"
_OF_ONE: Final = frozenset({"num_transferred_tokens", "num_coming_tokens", "sender", "handover"})
_OURS: Final = frozenset({_SPEC, "ret_first_tok"})  # only the proxy may set these
_WISHES: Final = ("kvstore.", "lmcache.")
_RETAIN: Final = "kvstore.retain"
_PROMPT: Final = "prompt_token_ids"  # vLLM's own: a prompt in kv_transfer_params
_KINDS: Final = ("model", "cache_salt")  # other members that KV depends on, and that differ between requests
_NOT_FOR_PREFILL: Final = frozenset({"stream_options", "min_tokens"})  # meaningless for one token, or refused


@dataclass(frozen=True)
class Ask:
    """Request for a completion or a chat.

    Attributes:
        body: members of the client's body, without ``kv_transfer_params``.
        params: members of ``kv_transfer_params``, without those that only the proxy may set.
    """

    body: Mapping[str, Raw]
    params: Mapping[str, Raw]

    @classmethod
    def parse(cls, content: bytes | bytearray) -> Self:
        """Parse a body.

        Raises:
            InvalidCallError: the body is malformed. The message quotes nothing of it.
        """
        body = members_of(content)
        given = body.pop(_PARAMS, None)
        try:
            params = {} if given is None or says(given, b"null") else members_of(given)
        except InvalidCallError as error:
            raise InvalidCallError(f"{_PARAMS} must be an object of few members") from error
        return cls(body, {name: value for name, value in params.items() if name not in _OURS})

    def beginnings(self, session: str = "") -> list[Beginning]:
        """Return the request's session and beginnings, by which to choose engines that have its KV."""
        prompt = self.params.get(_PROMPT) or self.body.get("prompt") or self.body.get("messages") or Raw(b"")
        kind = [self.body.get(name, Raw(b"")) for name in _KINDS]
        if (system := self.body.get("system")) is not None:  # Anthropic's, before the messages
            prompt = Raw(bytes(memoryview(system)[:MOST_BYTES]) + bytes(memoryview(prompt)[:MOST_BYTES]))
        return [*session_beginning(kind, session), *beginnings_of(kind, prompt)]

    def retaining(self) -> Self:
        """Return the request with the retention that its client asks for, unless it names ours."""
        ttl_s = 0 if _RETAIN in self.params else retention_s(self.body)
        return replace(self, params={**self.params, _RETAIN: Raw(b"%d" % ttl_s)}) if ttl_s else self

    def may_begin(self, path: str) -> bool:
        """Tell if the stream may begin with the prefill engine's token; see ``firsts``."""
        return _PROMPT not in self.params and may_begin(path, self.body)

    def for_prefill(self, receiver: Receiver | None, transfer_id: str, *, wants_first: bool = False) -> Parts:
        """Return the request for the prefill engine: the same prompt for one token.

        The engine sends the KV to ``receiver``, if there is one, under ``transfer_id``. With ``wants_first`` it is
        asked to return the token's id.
        """
        body: dict[str, Any] = {name: value for name, value in self.body.items() if name not in _NOT_FOR_PREFILL}
        for name in ("max_completion_tokens", "n"):
            if not says(self.body.get(name), b"null"):
                body[name] = 1
        body |= {"max_tokens": 1, "stream": False}
        if type_of(self.body.get("thinking")) == "enabled":  # its budget would exceed the one token
            del body["thinking"]
        if type_of(self.body.get("tool_choice")) == "tool":  # whose arguments one token cannot be
            body["tool_choice"] = {"type": "any"}
        params: dict[str, Any] = dict(self.params)
        if receiver is not None:
            ports = [receiver.port, *receiver.more_ports] if receiver.more_ports else receiver.port
            params[_SPEC] = {
                "req_id": transfer_id,
                "receiver_host": receiver.host,
                "receiver_init_port": ports,
                "receiver_alloc_port": ports,
                "is_last_prefill": True,
            }
            params["ret_first_tok"] = wants_first
            if wants_first and is_text(self.body):
                body["return_token_ids"] = True
        return _with_params(body, params)

    def for_decode(self, spec: Mapping[str, Raw] | None, *, counted: bool, first: First | None = None) -> Parts:
        """Return the client's request, with the prefill engine's description of the KV that it sent.

        Args:
            spec: result of ``sent_kv``; None if the decode engine must find or compute the KV itself.
            counted: also ask for the usage of a stream.
            first: first token, which the client already has; decode continues after it.
        """
        body: dict[str, Any] = dict(self.body)
        if first is not None:
            body |= {"prompt": first.prompt, "max_tokens": first.max_tokens}
        if counted and not self.shows_usage:
            more = {"include_usage": True, "continuous_usage_stats": False}
            body["stream_options"] = {**self._stream_options(), **more}
        params: dict[str, Any] = {
            name: value for name, value in self.params.items() if name.startswith(_WISHES) or name == _PROMPT
        }
        if spec is not None:
            # For a batch, vLLM describes only the KV of the first prompt.
            params[_SPEC] = {name: value for name, value in spec.items() if not self.is_batch or name not in _OF_ONE}
        return _with_params(body, params)

    @property
    def is_batch(self) -> bool:
        """True if there are several prompts."""
        return is_list_of_several(self.body.get("prompt"))

    @property
    def is_one_stream(self) -> bool:
        """True if the answer is a stream of one sequence, whose usage gives the sequence's length."""
        number = self.body.get("n")
        is_one = says(number, b"null") or says(number, b"1")
        return says(self.body.get("stream"), b"true") and is_one and not self.is_batch

    @property
    def shows_usage(self) -> bool:
        """True if the client wants a stream's usage."""
        return says(self._stream_options().get("include_usage"), b"true")

    def _stream_options(self) -> Mapping[str, Raw]:
        options = self.body.get("stream_options")
        try:
            return {} if options is None else members_of(options)
        except InvalidCallError:  # the engine will refuse the request
            return {}


class _Sent(msgspec.Struct):
    disagg_spec: dict[str, Raw]


class _Answer(msgspec.Struct):
    kv_transfer_params: _Sent


_ANSWER: Final = msgspec.json.Decoder(_Answer)


def sent_kv(answer: bytes) -> Mapping[str, Raw] | None:
    """Return a prefill engine's description of the KV that it sent; None if it sent none."""
    try:
        return _ANSWER.decode(answer).kv_transfer_params.disagg_spec
    except (msgspec.DecodeError, RecursionError):
        return None


def _with_params(body: dict[str, Any], params: dict[str, Any]) -> Parts:
    return written({**body, _PARAMS: params} if params else body)
