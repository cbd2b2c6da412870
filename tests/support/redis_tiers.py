"""Helpers of the tests of Redis: tiers, chunks of several parts, trails of chunks in a tree, contents of a server."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import PREFIX_KEY_BYTES, Namespace
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


Path = tuple[int, ...]


def key_of(path: Sequence[int]) -> bytes:
    return hashlib.sha256(bytes(path)).digest()[:PREFIX_KEY_BYTES]


def trail_of(path: Sequence[int]) -> bytes:
    return b"".join(key_of(path[:end]) for end in range(1, len(path) + 1))


def ref_of(path: Sequence[int]) -> ChunkRef:
    return ChunkRef(key_of(path), len(path))


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def most_shared(asked: Path, there: Collection[Path], at_most: int) -> list[int]:
    """Return the largest numbers of shared blocks, by looking at all paths."""
    return sorted(filter(None, (shared_blocks(asked, path) for path in there)), reverse=True)[:at_most]
