"""Requests to a cache server about many chunks, sent in parts whose answers are checked.

All raise ``TierError`` if the server fails, or does not answer about every chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstore.model.chunks import ChunkRef, Outcome, Presence, is_trail_of
from kvstore.model.errors import TierError
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.lifetime import Lifetime, rest_ms
from kvstore.model.quotas import OWNER_BYTES
from kvstore.protocol import messages
from kvstore.protocol.outcomes import outcome_of
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.server.connection import ServerConnection

Item = TypeVar("Item")


def lookup(
    connection: ServerConnection, refs: Sequence[ChunkRef], kind: type[messages.Lookup | messages.Ask] = messages.Lookup
) -> list[Presence]:
    """Tell for each chunk if the server has it, in one round trip for thousands.

    For an older server than ``Ask``, that is a lookup as well.
    """
    kind = kind if connection.knows(kind) else messages.Lookup
    found: list[Presence] = []
    for part in _parts(refs, messages.MAX_REFS):
        question, now_s = kind(connection.new_serial(), messages.pack_refs(part)), time.time()
        answer = connection.ask(question, messages.Held)
        there = [byte == 1 for byte in _complete(answer.found, part)]
        if isinstance(answer, messages.Lasting):  # counted from the earliest moment of the answer
            rests = zip(there, _complete(answer.rests_ms, part), strict=True)
            found += [is_there and (rest == 0 or now_s + rest / 1000) for is_there, rest in rests]
        else:
            found += there
    return found


def prolong(connection: ServerConnection, lifetimes: Sequence[Lifetime]) -> None:
    """Let chunks stay for longer, or without end, at a server that keeps times to live."""
    for part in _parts(lifetimes if connection.knows(messages.Prolong) else (), messages.MAX_REFS):
        refs = messages.pack_refs(one.ref for one in part)
        rests_ms = [0 if one.until_s is None else rest_ms(one.until_s) for one in part]
        connection.ask(messages.Prolong(connection.new_serial(), refs, rests_ms), messages.Done)


def expire(connection: ServerConnection, lease: int, until_s: float | None) -> bool:
    """Send the end of a chunk that is being written; returns False if the server would keep it without end."""
    if until_s is not None and connection.knows(messages.Expire):
        connection.send(messages.Expire(connection.new_serial(), lease, rest_ms(until_s)))
    return until_s is None or connection.knows(messages.Expire)


def nearest(connection: ServerConnection, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Return, for each trail, those of chunks that share blocks with it, if the server supports trails.

    A trail that is too long for a message gets none.
    """
    named: dict[bytes, tuple[bytes, ...]] = dict.fromkeys(trails, ())
    asked = [trail for trail in named if _fits(trail)] if connection.knows(messages.Nearest) else []
    at_most = max(1, messages.MAX_TRAIL_BYTES // (MAX_NEAREST * max(map(len, asked), default=1)))
    for part in _parts(asked, min(at_most, messages.MAX_TRAILS)):
        answer = connection.ask(messages.Nearest(connection.new_serial(), list(part)), messages.Named)
        named.update(zip(part, map(tuple, _complete(answer.trails, part)), strict=True))
    return [named[trail] for trail in trails]


def describe(connection: ServerConnection, lease: int, ref: ChunkRef, trail: bytes) -> None:
    """Send the trail of a chunk that is being written, if it is known, to a server that supports trails."""
    if connection.knows(messages.Describe) and is_trail_of(trail, ref) and _fits(trail):
        connection.send(messages.Describe(connection.new_serial(), lease, trail))


def grants(
    connection: ServerConnection,
    kind: type[messages.Reserve | messages.Acquire],
    refs: Sequence[ChunkRef],
    owner: bytes = b"",
) -> list[messages.Grant]:
    """Request, for each chunk, a grant of pages to write or read it, or the reason why there are none.

    ``owner`` is the id of the owner of chunks to write, for a server that has quotas of owners.
    """
    granted: list[messages.Grant] = []
    for part in _parts(refs, messages.MAX_MOVES):
        number, packed = connection.new_serial(), messages.pack_refs(part)
        is_owned = len(owner) == OWNER_BYTES and connection.knows(messages.ReserveFor)
        question = messages.ReserveFor(number, packed, owner) if is_owned else kind(number, packed)
        answer = connection.ask(question, messages.Granted)
        granted += _complete(answer.grants, part)
    return granted


def commit(connection: ServerConnection, leases: Sequence[int], *, is_whole: bool) -> list[Outcome]:
    """End writes, which are complete if ``is_whole`` and dropped otherwise. Returns the outcome of each chunk."""
    outcomes: list[Outcome] = []
    for part in _parts(leases, messages.MAX_MOVES):
        answer = connection.ask(messages.Commit(connection.new_serial(), list(part), is_whole), messages.Done)
        outcomes += map(outcome_of, _complete(answer.outcomes, part))
    return outcomes


def remove(connection: ServerConnection, refs: Sequence[ChunkRef]) -> None:
    """Remove chunks."""
    for part in _parts(refs, messages.MAX_REFS):
        connection.ask(messages.Remove(connection.new_serial(), messages.pack_refs(part)), messages.Done)


def clear(connection: ServerConnection) -> None:
    """Remove every chunk of the connection's namespace."""
    connection.ask(messages.Clear(connection.new_serial()), messages.Done)


def _parts(items: Sequence[Item], at_most: int) -> Iterator[Sequence[Item]]:
    return (items[begin : begin + at_most] for begin in range(0, len(items), at_most))


def _fits(trail: bytes) -> bool:
    return PREFIX_KEY_BYTES <= len(trail) <= messages.MAX_TRAIL_BYTES


def _complete(answers: Sequence[Item], asked: Sequence[object]) -> Sequence[Item]:
    if len(answers) != len(asked):
        raise TierError(f"the cache server answered about {len(answers)} chunks instead of {len(asked)}")
    return answers
