"""Requests as each engine gets them: few members are parsed, and all others are passed on byte for byte."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.model.errors import ConfigError, InvalidCallError
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.objects import MAX_MEMBERS, Parts
from kvstore.tools.proxy.requests import Ask, sent_kv

TO = Receiver("10.0.0.1", 5001)
# No library would write it like this, so parsing and writing it again changes it.
ODD = b'[ 1,2 ,\n3, 1.0e0, -0, 18446744073709551616, 0.1000000000000000055511151231257827, "\\u00e4\xc3\xa4\\/" ]'


def read(parts: Parts) -> Any:
    return json.loads(b"".join(parts))


@pytest.mark.parametrize(("url", "ports"), [("kvs://h:7", 7), ("kvs://[::1]:7", 7), ("kvs://h:7,7,9", [7, 7, 9])])
def test_each_prefill_worker_is_told_its_port(url: str, ports: int | list[int]) -> None:
    receiver = Receiver.parse(url)
    assert str(receiver) == url
    told = read(Ask.parse(b"{}").for_prefill(receiver, "t"))["kv_transfer_params"]["disagg_spec"]
    assert (told["receiver_init_port"], told["receiver_alloc_port"]) == (ports, ports)


def test_prefill_workers_are_told_the_hosts_of_a_decode_engine() -> None:
    receiver = Receiver.parse("kvs://H-1,[fd00::2]:7,8,9,10")
    assert str(receiver) == "kvs://h-1,[fd00::2]:7,8,9,10"
    told = read(Ask.parse(b"{}").for_prefill(receiver, "t"))["kv_transfer_params"]["disagg_spec"]
    spec = DisaggSpec(told["req_id"], told["receiver_host"], tuple(told["receiver_init_port"]))
    assert [spec.receiver(rank) for rank in (0, 1, 2, 3)] == [("h-1", 7), ("h-1", 8), ("fd00::2", 9), ("fd00::2", 10)]
    for wrong in ("kvs://a,b:7", "kvs://a,b:7,8,9", "kvs://a,:7,8", "kvs://,a:7,8"):
        with pytest.raises(ConfigError, match="each has as many"):
            Receiver.parse(wrong)


@pytest.mark.parametrize("name", ["prompt", "messages", "tools", "unknown"])
def test_what_need_not_be_understood_is_passed_on_as_it_is(name: str) -> None:
    ask = Ask.parse(b'{"model": "m", "stream":true, "' + name.encode() + b'" : ' + ODD + b"}")
    for told in (ask.for_prefill(TO, "t"), ask.for_decode(None, counted=True), ask.for_decode(None, counted=False)):
        assert ODD in b"".join(told)


def test_a_prompt_in_the_transfers_parameters_is_passed_on_as_it_is() -> None:
    ask = Ask.parse(b'{"kv_transfer_params":{"prompt_token_ids":' + ODD + b"}}")
    assert ODD in b"".join(ask.for_prefill(TO, "t"))
    assert ODD in b"".join(ask.for_decode({}, counted=True))


NAMES = st.sampled_from(
    ["prompt", "stream", "n", "stream_options", "max_tokens", "min_tokens", "max_completion_tokens", "x", "ä"]
)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2, -1, 1.5, "", "a", 'b"\\[', "ä"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.just("include_usage"), inner, max_size=3),
    max_leaves=6,
)
PROMPTS: st.SearchStrategy[Any] = st.sampled_from(
    [[], [1], [1, 2], ["a"], ["a", "b"], ['"],', "b"], [[1], [2, 3]], [[1]], [[]], [[], []], "ab", None, {"a": 1}]
)
BODIES = st.fixed_dictionaries({}, optional={"prompt": PROMPTS}).flatmap(
    lambda prompt: st.dictionaries(NAMES, VALUES, max_size=6).map(lambda others: others | prompt)
)


@given(
    body=BODIES,
    params=st.none() | st.dictionaries(st.sampled_from(["kvstore.pin", "disagg_spec", "remote_host"]), VALUES),
    indent=st.sampled_from([None, 0, 3]),
    is_ascii=st.booleans(),
)
def test_the_engines_are_told_what_the_client_meant(
    body: dict[str, Any], params: dict[str, Any] | None, indent: int | None, is_ascii: bool
) -> None:
    """The requests are compared with the same rules on objects that were parsed as a whole."""
    given_ = body if params is None else {**body, "kv_transfer_params": params}
    ask = Ask.parse(json.dumps(given_, indent=indent, ensure_ascii=is_ascii).encode())
    kept = {name: value for name, value in (params or {}).items() if name != "disagg_spec"}

    prefill = {name: value for name, value in body.items() if name not in {"stream_options", "min_tokens"}}
    prefill |= {name: 1 for name in ("max_completion_tokens", "n") if body.get(name) is not None}
    prefill |= {"max_tokens": 1, "stream": False}
    assert read(ask.for_prefill(None, "t")) == (prefill | {"kv_transfer_params": kept} if kept else prefill)

    wishes = {name: value for name, value in kept.items() if name.startswith("kvstore.")}
    decode = body | {"kv_transfer_params": wishes} if wishes else body
    assert read(ask.for_decode(None, counted=False)) == decode

    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)
    assert ask.is_batch == is_batch
    number = body.get("n")
    assert ask.is_one_stream == (
        body.get("stream") is True and not is_batch and (number is None or repr(number) == "1")
    )
    options = body.get("stream_options")
    assert ask.shows_usage == (isinstance(options, dict) and options.get("include_usage") is True)
    counted = read(ask.for_decode(None, counted=True))
    more = {"include_usage": True, "continuous_usage_stats": False}
    known = options if isinstance(options, dict) else {}
    assert counted == (decode if ask.shows_usage else decode | {"stream_options": known | more})


@pytest.mark.parametrize(
    ("answer", "spec"),
    [
        ({"kv_transfer_params": {"disagg_spec": {"a": [1, 2]}}, "choices": [1]}, {"a": [1, 2]}),
        ({"kv_transfer_params": {"disagg_spec": {}}}, {}),
        ({"kv_transfer_params": {"disagg_spec": 1}}, None),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": [1]}, None),
        ({}, None),
        ([1], None),
    ],
)
def test_what_an_engine_says_of_the_kv_it_sent(answer: object, spec: dict[str, Any] | None) -> None:
    sent = sent_kv(json.dumps(answer).encode())
    assert (sent is None) == (spec is None)
    if sent is not None:
        ask = Ask.parse(b'{"prompt": "a"}')
        assert read(ask.for_decode(sent, counted=False))["kv_transfer_params"] == {"disagg_spec": spec}


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"\xff"])
def test_an_answer_that_is_none(content: bytes) -> None:
    assert sent_kv(content) is None
    with pytest.raises(InvalidCallError):
        Ask.parse(content)


def test_how_much_was_sent_is_dropped_wherever_spaces_are() -> None:
    """vLLM tells for a batch how much of its first prompt was sent; a large space must not hide that it is a batch."""
    ask = Ask.parse(b'{"prompt": [' + b" " * (1 << 20) + b'"a", "b"]}')
    assert ask.is_batch
    names = ("num_transferred_tokens", "num_coming_tokens", "sender", "handover")
    told = read(ask.for_decode({name: Raw(b"7") for name in names}, counted=False))
    assert told["kv_transfer_params"] == {"disagg_spec": {}}


def test_large_members_are_not_copied() -> None:
    """The memory that arrived is sent: a copy of megabytes would stop all streams, and take as much again."""
    content = json.dumps({"model": "m", "prompt": "x" * (1 << 20), "n": 1}).encode()
    ask = Ask.parse(content)
    for told in (ask.for_prefill(TO, "t"), ask.for_decode(None, counted=True)):
        (large,) = (part for part in told if len(part) > 1000)
        assert memoryview(large).obj is memoryview(ask.body["prompt"]).obj
        assert isinstance(large, Raw)


def test_megabytes_are_neither_copied_nor_taken_apart() -> None:
    """Any processing of 6 MiB of token ids would stop all streams for as long as it takes."""
    token_ids = b",".join([b"100000"] * 900_000)
    content = bytearray(b'{"model": "m", "stream": true, "n": 1, "prompt": [' + token_ids + b"]}")
    del token_ids
    tracemalloc.start()
    try:
        ask = Ask.parse(content)
        assert not ask.is_batch
        assert ask.is_one_stream
        told = [ask.for_prefill(TO, "t"), ask.for_decode(None, counted=True)]
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 64 << 10
    assert all(sum(map(len, parts)) > 6 << 20 for parts in told)


def test_an_object_of_very_many_members_is_refused() -> None:
    many = {f"x{number}": 1 for number in range(MAX_MEMBERS + 1)}
    for body in (many, {"kv_transfer_params": many}):
        with pytest.raises(InvalidCallError, match="members"):
            Ask.parse(json.dumps(body).encode())
    assert Ask.parse(json.dumps({"tools": many}).encode()).body.keys() == {"tools"}
