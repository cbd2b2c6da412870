"""Malformed HTTP requests: heads and bodies that are slightly or completely wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

MAX_BODY_BYTES: Final = 4_000
_METHODS: Final = ("GET", "POST", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "G\0T", "")
_LENGTHS: Final = ("-1", "0", "x", "9" * 30, "1e3", "0x10", "1, 2", "", "18446744073709551616", "7")
_CHUNKS: Final = (
    b"zz\r\n",
    b"-1\r\n",
    b"ffffffffffffffffff\r\n",
    b"5\r\nab",
    b"0\r\n",
    b"3;x=\r\nabc\r\n",
    b"\r\n\r\n",
)
_ODD_HEADERS: Final = (
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Upgrade: websocket",
    "Connection: close",
    "Connection: upgrade",
    "Host: elsewhere.example",
    "Origin: https://elsewhere.example",
    "Authorization: Bearer ",
    "Authorization: \xff\xfe",
    "X-Session-Id: " + "x" * 9_000,
    ": no name",
    "no colon",
    " folded",
    "X\0: nul",
)
_VALUES: Final[tuple[Any, ...]] = (None, True, -1, 1.5, 1 << 70, "", "\0", "\ud800", [], [[]], {}, {"a": {}}, [1, "a"])


class Target(NamedTuple):
    """Server, the paths that it knows, and bodies that it accepts."""

    port: int
    paths: Sequence[str]
    bodies: Sequence[dict[str, Any]]


def malformed(target: Target, dice: random.Random) -> bytes:
    """Return the bytes of one request, in which one thing is wrong: the body, the head, the framing, or any byte."""
    wrong = dice.choice(["body", "body", "head", "framing", "bytes"])
    body = _body(target, dice) if wrong == "body" else json.dumps(dice.choice(target.bodies)).encode()
    first = f"{dice.choice(['GET', 'POST', 'POST'])} {dice.choice(target.paths)} HTTP/1.1"
    headers = [f"Host: 127.0.0.1:{target.port}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if wrong == "head":
        first, headers = _head(target, headers, dice)
    elif wrong == "framing":
        del headers[-1]
        if dice.random() < 0.5:
            headers.append(f"Content-Length: {dice.choice(_LENGTHS)}")
        else:
            headers.append("Transfer-Encoding: chunked")
            body = _chunked(body, dice)
    head = "\r\n".join([first, *headers, "", ""]).encode("utf-8", "surrogatepass")
    return _spoilt(head + body, dice) if wrong == "bytes" else head + body


def _head(target: Target, headers: list[str], dice: random.Random) -> tuple[str, list[str]]:
    """Return a first line and headers, with some of it wrong."""
    path = dice.choice(target.paths)
    if dice.random() < 0.3:
        path = dice.choice(["*", "", "//", path + "?" + "a" * dice.randrange(500), path + "/%ff/../", "http://[", "/ä"])
    version = dice.choice(["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", "HTP", ""])
    changed = headers + dice.sample(_ODD_HEADERS, dice.randrange(3))
    if dice.random() < 0.2:
        del changed[dice.randrange(len(changed))]
    dice.shuffle(changed)
    return f"{dice.choice(_METHODS)} {path} {version}", changed


def _body(target: Target, dice: random.Random) -> bytes:
    kind = dice.randrange(8)
    if kind == 0:
        return dice.randbytes(dice.randrange(300))
    if kind == 1:
        depth = dice.randrange(MAX_BODY_BYTES)
        return dice.choice([b"[" * depth, b'{"a":' * (depth // 5), b'{"prompt":' + b"[" * depth])
    tree = dict(dice.choice(target.bodies))
    for name in [*tree, "unknown"]:
        if dice.random() < 0.25:
            tree[name] = dice.choice(_VALUES)
    data = bytearray(json.dumps(tree).encode())
    if kind < 5:
        for _ in range(1 + dice.randrange(4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif kind == 5:
        del data[dice.randrange(len(data)) :]
    elif kind == 6:
        at = dice.randrange(len(data))
        data[at:at] = dice.choice(
            [b"\xff", b"\0", b"1e999999", b"NaN", b'"\\u', b"/*", b"{}", b'"a":1,', b"\xef\xbb\xbf"]
        )
    return bytes(data)


def _chunked(body: bytes, dice: random.Random) -> bytes:
    """Return a body in chunks, most often with something wrong."""
    pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
    whole = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    end = b"0\r\n\r\n"
    return whole + dice.choice([end, *_CHUNKS]) + dice.choice([b"", end])


def _spoilt(data: bytes, dice: random.Random) -> bytes:
    """Return the request cut, changed, followed by other bytes, or replaced by them."""
    kind = dice.randrange(4)
    spoilt = bytearray(data)
    if kind == 0:
        del spoilt[dice.randrange(len(spoilt)) :]
    elif kind == 1:
        for _ in range(1 + dice.randrange(4)):
            spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
    elif kind == 2:
        spoilt += dice.randbytes(dice.randrange(100))
    else:
        spoilt = bytearray(dice.randbytes(dice.randrange(400)))
    return bytes(spoilt)
