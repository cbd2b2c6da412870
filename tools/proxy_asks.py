"""A client's request, and what of it each of the two engines is told. Pure: bytes and mappings in, mappings out.

What ``kv_transfer_params`` hold on the way is described in docs/disaggregation.md. Addresses that one engine is to send
KV to come from the operator, never from a client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvstore.errors import InvalidCallError
from kvstore.tools.proxy_options import Receiver

Body = dict[str, Any]

_PARAMS: Final = "kv_transfer_params"
_SPEC: Final = "disagg_spec"
_SENT: Final = "num_transferred_tokens"
_OURS: Final = frozenset({_SPEC, "ret_first_tok"})  # what the proxy alone says
_WISHES: Final = ("kvstore.", "lmcache.")
_PROMPT: Final = "prompt_token_ids"  # vLLM's own: a prompt that stands in kv_transfer_params
_ONE_TOKEN: Final = frozenset({"stream_options", "min_tokens"})  # without meaning, or refused, with one token


@dataclass(frozen=True)
class Ask:
    """A request for a completion or a chat.

    Attributes:
        body: as the client sent it, without ``kv_transfer_params``.
        params: these.
    """

    body: Mapping[str, Any]
    params: Mapping[str, Any]

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Understand a body.

        Raises:
            InvalidCallError: it cannot be understood. The message shows nothing of it.
        """
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidCallError("the body must be JSON") from error
        if not isinstance(body, dict):
            raise InvalidCallError("the body must be a JSON object")
        params = body.pop(_PARAMS, None)
        if not isinstance(params, dict | None):
            raise InvalidCallError(f"{_PARAMS} must be an object")
        return cls(body, {name: value for name, value in (params or {}).items() if name not in _OURS})

    def for_prefill(self, receiver: Receiver | None, transfer_id: str) -> Body:
        """The same prompt for one token, whose KV goes to ``receiver``, if there is one, under ``transfer_id``."""
        body = {name: value for name, value in self.body.items() if name not in _ONE_TOKEN}
        body |= {"max_tokens": 1, "stream": False}
        for name in ("max_completion_tokens", "n"):
            if body.get(name) is not None:
                body[name] = 1
        params = dict(self.params)
        if receiver is not None:
            params[_SPEC] = {
                "req_id": transfer_id,
                "receiver_host": receiver.host,
                "receiver_init_port": receiver.port,
                "receiver_alloc_port": receiver.port,
                "is_last_prefill": True,
            }
            params["ret_first_tok"] = False
        return _with_params(body, params)

    def for_decode(self, spec: Mapping[str, Any] | None, *, counted: bool) -> Body:
        """The client's request, with what prefill said of the KV it sent.

        Args:
            spec: what ``sent_kv`` returned; None if the decode engine must find or compute the KV itself.
            counted: ask for the usage of a stream too.
        """
        body = dict(self.body)
        if counted and not self.shows_usage:
            options = body.get("stream_options")
            known = options if isinstance(options, dict) else {}
            body["stream_options"] = {**known, "include_usage": True, "continuous_usage_stats": False}
        params = {name: value for name, value in self.params.items() if name.startswith(_WISHES) or name == _PROMPT}
        if spec is not None:
            # Of a batch vLLM says how much of its first prompt was sent.
            params[_SPEC] = {name: value for name, value in spec.items() if not self.is_batch or name != _SENT}
        return _with_params(body, params)

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts."""
        prompt = self.body.get("prompt")
        return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)

    @property
    def is_one_stream(self) -> bool:
        """Whether the answer is a stream of one sequence, whose usage says how long it is."""
        return self.body.get("stream") is True and not self.is_batch and self.body.get("n") in (None, 1)

    @property
    def shows_usage(self) -> bool:
        """Whether the client wants a stream's usage."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def sent_kv(answer: bytes) -> Mapping[str, Any] | None:
    """What a prefill engine says of the KV it sent; None if it sent none."""
    try:
        params = json.loads(answer)[_PARAMS]
        spec = params[_SPEC]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return spec if isinstance(spec, dict) else None


def _with_params(body: Body, params: Body) -> Body:
    return {**body, _PARAMS: params} if params else body
