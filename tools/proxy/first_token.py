"""First token of a stream from the prefill engine, after which decode continues, without I/O.

This applies only if the whole stream is then the same as from the decode engine alone: completions without options that
depend on more than the last tokens, such as a seed, a penalty, stop strings or a grammar. All other streams begin at
the decode engine. Limits of the engine itself are not visible here: ``max_new_tokens`` or penalties of its generation
config, and ``max_model_len``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from kvstore.model.errors import InvalidCallError
from kvstore.tools.proxy.objects import Spliced, members_of, says
from kvstore.tools.proxy.reply import event_of

_HARMLESS: Final = frozenset(
    {
        *("model", "prompt", "max_tokens", "stream", "stream_options", "n", "user", "cache_salt", "priority"),
        *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
    }
)
_TWO_OR_MORE: Final = re.compile(rb"[2-9]|[1-9][0-9]{1,8}")
_TOKENS: Final = re.compile(rb"\[\s*[0-9]")
_UNKNOWN_CHARACTER: Final = "\ufffd"  # an incomplete character, whose rest is in the next token


class First(NamedTuple):
    """First token of a stream.

    Attributes:
        event: event for the client.
        prompt: prompt for the decode engine: the prompt's tokens and the first token.
        max_tokens: maximum tokens that remain to compute.
    """

    event: bytes
    prompt: Spliced
    max_tokens: int


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = Raw(b"null")


class _Params(msgspec.Struct):
    first_tok: int


class _Answer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    kv_transfer_params: _Params


_ANSWER: Final = msgspec.json.Decoder(_Answer)


def may_begin(path: str, body: Mapping[str, Raw]) -> bool:
    """Tell if the requested stream may begin with a prefill engine's token."""
    if path != "/v1/completions" or not says(body.get("stream"), b"true"):
        return False
    if any(name not in _HARMLESS and not says(value, b"null") for name, value in body.items()):
        return False
    is_one = says(body.get("n"), b"null") or says(body.get("n"), b"1")
    max_tokens = bytes(memoryview(body.get("max_tokens", b""))[:16])
    knows_prompt = is_text(body) or _TOKENS.match(body.get("prompt", b"")) is not None
    return is_one and knows_prompt and _TWO_OR_MORE.fullmatch(max_tokens) is not None and _counts_at_the_end(body)


def is_text(body: Mapping[str, Raw]) -> bool:
    """Tell if the prompt is a text, whose tokens the prefill engine must return."""
    return bytes(memoryview(body.get("prompt", b""))[:1]) == b'"'


def first_of(answer: bytes, body: Mapping[str, Raw]) -> First | None:
    """Return the first token in a prefill engine's answer; None if the stream must begin at the decode engine."""
    try:
        found = _ANSWER.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return None
    if len(found.choices) != 1:
        return None
    (choice,) = found.choices
    token = found.kv_transfer_params.first_tok
    is_whole = choice.text and _UNKNOWN_CHARACTER not in choice.text and choice.finish_reason == "length"
    tokens = choice.prompt_token_ids if is_text(body) else body["prompt"]
    if not is_whole or choice.token_ids not in (None, [token]) or _TOKENS.match(tokens) is None:
        return None
    shown = {"index": 0, "text": choice.text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    names = {"id": found.id, "object": "text_completion", "created": found.created, "model": found.model}
    prompt = Spliced((memoryview(tokens)[: _end_of_list(tokens)], b",%d]" % token))
    return First(event_of({**names, "choices": [shown]}), prompt, int(bytes(body["max_tokens"])) - 1)


def recounted(event: bytes) -> bytes:
    """Return a stream's event; in its usage, the first token is moved from the prompt to the completion."""
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return event
    try:
        tree: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data:"), type=dict[str, Any])
        usage = tree["usage"]
        usage["prompt_tokens"] -= 1
        usage["completion_tokens"] += 1
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return event
    return event_of(tree)


def _counts_at_the_end(body: Mapping[str, Raw]) -> bool:
    options = body.get("stream_options")
    if says(options, b"null") or options is None:
        return True
    try:
        return members_of(options).keys() <= {"include_usage"}
    except InvalidCallError:  # the engine will refuse the request
        return False


def _end_of_list(tokens: Raw) -> int:
    """Return the offset of the end of a list's last token."""
    view = memoryview(tokens)
    end = len(view) - 1
    while bytes(view[end - 1 : end]).isspace():
        end -= 1
    return end
