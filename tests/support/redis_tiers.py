"""Helpers of the tests of broken Redis servers: tiers, chunks of several parts, and the contents of a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.redis.tier import RedisTier
from support.diskwork import EVEN, MINE, make_ref, make_slot, make_transfer
from support.redis_server import RedisServer

TIMEOUT_S = 0.5
BOUND_S = 15.0  # for anything that must end; a time-out or two take 0.5 s each
LARGE = KVLayout(page_bytes=(1 << 16,) * 8, planes=1, block_tokens=16, chunk_tokens=128)  # 4 MiB: five parts
REFS = [make_ref(number) for number in range(16)]
WHOLE = [make_ref(number, LARGE.blocks_per_chunk) for number in range(12)]
PAYLOADS = {ref: make_transfer(ref, LARGE) for ref in WHOLE}


def open_redis(url: str, layout: KVLayout = EVEN, namespace: Namespace = MINE, **options: object) -> RedisTier:
    given = {"url": url, "timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S, **options}
    tier = open_tier("redis", TierSetup(namespace, layout, UNBOUNDED_BYTES, given))
    assert isinstance(tier, RedisTier)
    return tier


def put_large(tier: Tier, *refs: Any) -> list[Outcome]:
    return tier.put([PAYLOADS[ref] for ref in refs])


def get_large(tier: Tier, ref: Any) -> Outcome:
    """Read a chunk; a hit must have the right bytes."""
    slot = make_slot(LARGE)
    (outcome,) = tier.get([Transfer(ref, slot)])
    assert outcome is not Outcome.HIT or (slot == PAYLOADS[ref].buffer).all()
    return outcome


def values(server: RedisServer, pattern: str = "kvs:{*:*") -> dict[bytes, int]:
    """Return all values of chunks, by key, and their lengths; the epoch's key and the sets of trails are left out."""
    admin = server.admin()
    keys = [key for key in admin.scan_iter(pattern, 1000) if b"}:epoch" not in key and not key.endswith(b"}:t")]
    return {key: admin.strlen(key) for key in keys}


def ends(action: Callable[[], object]) -> object:
    """Return the result of an action, or the error that it raised, within a bound."""
    begin_s = time.monotonic()
    try:
        return action()
    except (TierError, ClosedError) as error:
        return error
    finally:
        assert time.monotonic() - begin_s < BOUND_S


def killed(*_: object) -> None:
    """Fail in the place of a call that a killed process does not reach."""
    raise TierError("killed")


def keys_of(server: RedisServer, ref: Any) -> list[bytes]:
    """Return all keys of a chunk, the commit first."""
    found = [key for key in values(server) if ref.prefix_key.hex().encode() in key]
    return sorted(found, key=lambda key: (not key.endswith(b"}:c"), key))
