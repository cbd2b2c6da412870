"""Checks that chunks with a time to live end for every engine that has loaded them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.engine.engine import CacheEngine
from support.rig import Rig

LIFE_S = 3
WAIT_S = 30.0


def check_end_for_both(
    rig: Rig, first: CacheEngine, second: CacheEngine, tokens: Sequence[int], check_gone: Callable[[], object]
) -> None:
    """Check that the 40 tokens that one engine stores end for another one too; then ``check_gone`` is called."""
    end_s = time.time() + LIFE_S
    assert rig.store(first, tokens, ttl_s=LIFE_S) == 40
    assert first.flush(WAIT_S)
    assert rig.retrieve(second, tokens) == 40
    assert second.lookup(tokens) == 40
    time.sleep(max(0.0, end_s + 0.2 - time.time()))
    assert second.lookup(tokens) == 0, "its own copies must end, too"
    assert rig.retrieve(second, tokens) == 0
    assert first.lookup(tokens) == 0
    check_gone()
    assert rig.store(first, tokens) == 40
    assert first.flush(WAIT_S)
