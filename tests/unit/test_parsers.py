"""Parsers of what strangers write: valid samples are accepted, and changed ones do no harm."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.parsers import PARSERS, Parser, mutated
from support.schedules import seeds

# Inputs that once ended with an error of Python's own.
HARMFUL = [
    ("header", lambda sample: sample.replace(b'"tokens":"32"', b'"tokens":1e999')),
    ("header", lambda sample: sample.replace(b"[0,192]", b"[0,Infinity]")),
    ("url", lambda _: b"\x08kvs+srv://_kv._tcp.name?a=127.0\xae0.1:5"),
    ("url", lambda _: b"\x0bkvs://[::1:5566"),
    ("url", lambda _: b"\x00redis-cluster://a[,b]:7"),
    ("url", lambda _: b"\x00redis://a,[b,c]"),
]


@pytest.fixture(params=PARSERS, ids=lambda parser: parser.name)
def parser(request: pytest.FixtureRequest) -> Parser:
    found: Parser = request.param
    return found


def test_samples_are_accepted(parser: Parser) -> None:
    assert [sample[:60] for sample in parser.samples() if not parser.parse(sample)] == []


def test_changed_samples_do_no_harm(parser: Parser) -> None:
    samples = parser.samples()
    for seed in seeds(3):
        dice = random.Random(seed)
        for _ in range(60):
            data = mutated(samples, dice)
            try:
                parser.parse(data)
            except BaseException as error:
                error.add_note(f"of these bytes: {data!r}")
                raise


@pytest.mark.parametrize(("name", "change"), HARMFUL)
def test_what_once_did_harm(name: str, change: Callable[[bytes], bytes]) -> None:
    parser = next(parser for parser in PARSERS if parser.name == name)
    data = change(parser.samples()[0])
    assert data != parser.samples()[0]
    assert not parser.parse(data)
