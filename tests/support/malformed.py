"""Malformed messages to a cache server, and a client among their senders that must be served all the while."""

from __future__ import annotations

import random

from kvstore.model.chunks import Outcome
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.payload import Geometry
from kvstore.testing.harness import EVEN, MINE, make_transfer
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server
from support.cache_server import ServerThread
from support.redis_server import wait_for
from support.served import A, B, check_quiet, check_read, open_tier


def fuzz(server: ServerThread, count: int, seed: int | None = None) -> None:
    """Send cut, changed and random messages, with and without a hello; a well-behaved client is unharmed."""
    dice = random.Random(count if seed is None else seed)
    num_before = server.hub.reception.num_malformed
    tier = open_tier(server.url)
    tier.put([make_transfer(EVEN, A)])
    context = open_context()
    connection = None
    for number in range(count):
        if connection is None:
            connection = ServerConnection(context, parse_server(server.url, {}))
            if dice.random() < 0.7:
                connection.hello(MINE, Geometry.of(EVEN))
        connection._socket.send_multipart(malformed(dice))
        if number % 2:  # all messages after the first malformed one are ignored
            connection._socket.linger = 5000
            connection.close()
            connection = None
        if number % 500 == 0:
            check_served(tier)
    if connection is not None:
        connection.close()
    close_context(context)
    check_quiet(server)
    assert server.hub.reception.num_malformed - num_before >= count // 4
    wait_for("the good client is served", lambda: check_read(tier, A) in {Outcome.HIT, Outcome.MISS})
    tier.close()


def check_served(tier: ServerTier) -> None:
    """Check that a client finds its chunk, or can store it again: a changed message may be one that removes it."""
    outcome = check_read(tier, A)
    if outcome is Outcome.MISS:
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        outcome = check_read(tier, A)
    assert outcome is Outcome.HIT, f"a good client's chunk: {outcome}"


def malformed(dice: random.Random) -> list[bytes]:
    """Return a message that is slightly or completely wrong."""
    good: list[messages.Request] = [
        messages.Lookup(1, messages.pack_refs([A, B])),
        messages.Ask(1, messages.pack_refs([A, B])),
        messages.Reserve(1, messages.pack_refs([B])),
        messages.Acquire(1, messages.pack_refs([A])),
        messages.Commit(1, [dice.randrange(100)], dice.random() < 0.5),
        messages.Fetch(1, dice.randrange(100), dice.randrange(1 << 20), 1 + dice.randrange(1 << 20)),
        messages.Front(
            1, dice.randrange(100), 1 + dice.randrange(8), dice.randrange(1 << 20), 1 + dice.randrange(1 << 20)
        ),
        messages.Piece(1, dice.randrange(100), dice.randrange(1 << 20), bytes(8)),
        messages.Scan(1, dice.randrange(1 << 40)),
        messages.Hello(1, 1, {"model": "fuzz"}, Geometry.of(EVEN), dice.randrange(1 << 40), dice.randbytes(16)),
        messages.Explain(1, bytes(8), b""),
        messages.ReserveFor(1, messages.pack_refs([B]), dice.randbytes(16)),
        messages.Release(1, [dice.randrange(100)]),
        messages.Attach(1, "fuzz", dice.randbytes(dice.randrange(40))),
        messages.Offer(1, dice.randrange(100), dice.randrange(1 << 20), 1 + dice.randrange(1 << 20), 0, bytes(8)),
        messages.Sending(1, "fuzz", dice.randrange(9), [(dice.randrange(9), dice.randrange(99))]),
        messages.Describe(1, dice.randrange(100), dice.randbytes(32)),
        messages.Nearest(1, [dice.randbytes(32)]),
        messages.Expire(1, dice.randrange(100), 1 + dice.randrange(1 << 20)),
        messages.Prolong(1, messages.pack_refs([B]), [1 + dice.randrange(1 << 20)]),
        messages.Pin(1, bytes(8), messages.pack_refs([B]), dice.random() < 0.5),
        messages.Stats(1),
        messages.Pins(1),
    ]
    data = bytearray(messages.encode(dice.choice(good)))
    kind = dice.randrange(5)
    if kind == 0:
        del data[dice.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(1 + dice.randrange(4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif kind == 2:
        data = bytearray(dice.randbytes(dice.randrange(200)))
    elif kind == 3:
        data += dice.randbytes(1 + dice.randrange(20))
    frames = [bytes(data)]
    return frames + [dice.randbytes(dice.randrange(5000)) for _ in range(dice.choice([0, 0, 0, 1, 2, 5]))]
