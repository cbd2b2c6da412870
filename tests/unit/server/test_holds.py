"""What was handed over is held until it is read, and never for longer than once."""

from __future__ import annotations

from kvstore.keys import Namespace
from kvstore.server.holds import Holds
from kvstore.server.spaces import Chunk, Space
from kvstore.testing.harness import EVEN, make_ref

SPACE = Space(Namespace({"model": "mine"}), EVEN)


def test_who_asks_again_holds_no_longer() -> None:
    """A sender that repeats its lookups would keep the buffer full."""
    holds, chunk = Holds(), Chunk(SPACE, make_ref(1))
    for now_s in range(20):
        holds.hold(chunk, now_s + 10.0)
        holds.expire(float(now_s))
        assert (chunk in holds) == (now_s < 10)


def test_what_was_read_is_held_when_it_is_handed_over_again() -> None:
    holds, chunk = Holds(), Chunk(SPACE, make_ref(1))
    holds.hold(chunk, 10.0)
    holds.expire(10.0)
    holds.drop(chunk)
    holds.hold(chunk, 30.0)
    assert chunk in holds
    holds.drop(chunk)
    assert chunk not in holds
    assert not holds._over, "it may be gone, and nothing else would forget it"
