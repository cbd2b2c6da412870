"""A parser with a defect that random bytes do not find, but a fuzzer that is guided by branches does."""

from __future__ import annotations

from support.parsers import Parser

HARM = b"kvs!"


def _parse(data: bytes) -> bool:
    """Fail at four bytes, each of which is a branch of its own."""
    if data[:1] == HARM[:1]:
        if data[1:2] == HARM[1:2]:  # noqa: SIM102 - each is a branch
            if data[2:3] == HARM[2:3]:  # noqa: SIM102
                if data[3:4] == HARM[3:4]:
                    raise LookupError("the planted defect")
        return False
    return True


PARSERS = (Parser("planted", lambda: [b"????"], _parse, ()),)
