"""Rights of a client at a cache server, and those that each kind of request needs.

A client's rights are in the file of its key at the server. Nothing that it sends changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from typing import Final

from kvstore.protocol import messages


class Right(Flag):
    """Permissions, to be combined with ``|``."""

    READ = auto()
    WRITE = auto()
    CLEAR = auto()
    OPERATE = auto()


NO_RIGHT: Final = Right(0)
USUAL_RIGHTS: Final = Right.READ | Right.WRITE  # of a client whose key file names none
EVERY_RIGHT: Final = USUAL_RIGHTS | Right.CLEAR | Right.OPERATE

NEEDED: Final[Mapping[type[messages.Request], Right]] = {  # one of these is enough
    messages.Hello: Right.READ | Right.WRITE | Right.CLEAR,
    messages.Lookup: Right.READ | Right.WRITE,  # senders look up the chunks that they need not send
    messages.Nearest: Right.READ,
    messages.Scan: Right.READ,
    messages.Acquire: Right.READ,
    messages.Fetch: Right.READ,
    messages.Front: Right.READ,
    messages.Release: Right.READ,
    messages.Reserve: Right.WRITE,
    messages.Piece: Right.WRITE,
    messages.Attach: Right.WRITE,
    messages.Offer: Right.WRITE,
    messages.Describe: Right.WRITE,
    messages.Commit: Right.WRITE,
    messages.Remove: Right.WRITE,  # a client that may replace a chunk may as well remove it
    messages.Sending: Right.WRITE,
    messages.Clear: Right.CLEAR | Right.OPERATE,
    messages.ClearSpaces: Right.OPERATE,
    messages.Pin: Right.OPERATE,
    messages.Pins: Right.OPERATE,
    messages.UnpinSpaces: Right.OPERATE,
    messages.Explain: Right.OPERATE,
    messages.Ping: NO_RIGHT,
    messages.Stats: NO_RIGHT,  # the contents of the answer depend on the rights
}


def names_of(rights: Right) -> str:
    """Return the names of rights, with commas between them."""
    return ", ".join(str(right.name).lower() for right in Right if right & rights) or "none"


def is_allowed(kind: type[messages.Request], rights: Right) -> bool:
    """Tell if these rights are enough for a kind of request."""
    needed = NEEDED[kind]
    return not needed or bool(needed & rights)
