"""Holds of handed-over chunks, which last until the chunks are read and which a repeated request does not extend."""

from __future__ import annotations

from kvstore.model.keys import Namespace
from kvstore.server.pins import Holds
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


def test_what_several_workers_need_is_held_until_all_have_read_it() -> None:
    """One worker reads it here, the others over the network. Only the owner releases a chunk for its worker alone."""
    holds, shared, own = Holds(), Chunk(SPACE, make_ref(1)), Chunk(SPACE, make_ref(2))
    for now_s in (0.0, 20.0):
        holds.hold(shared, now_s + 10.0, num_readers=3)
        holds.hold(own, now_s + 10.0)
        for by_owner in (True, False, False):
            assert shared in holds
            holds.note_read(shared, by_owner=by_owner)
        assert shared not in holds
        holds.note_read(own, by_owner=False)
        assert own in holds
        holds.note_read(own, by_owner=True)
        assert own not in holds
    holds.hold(shared, 50.0, num_readers=2)
    holds.expire(50.0)
    assert not holds._readers, "it may be gone"
