"""Quotas of owners within a namespace: by salt or tag, of the tenant of a client's key, whatever a client sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.shop import CHUNK_BYTES, LAYOUT, ONE, THREE, TWO, Desk, whole

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import KeyExtras, Namespace
from kvstore.model.quotas import QuotaRules, owner_id
from kvstore.protocol import messages
from kvstore.server.pool import FreePages
from kvstore.server.quotas import Quotas
from kvstore.server.spaces import NO_QUOTA, Chunk, Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

SALT = KeyExtras(cache_salt="a secret")
RED, BLUE = (QuotaRules("team").owner_of(name) for name in ("red", "blue"))
SALTED = QuotaRules().owner_of(SALT.salt_name)
QUOTAS = {
    "a": 8 * CHUNK_BYTES,
    "a/tag:team/red": 2 * CHUNK_BYTES,
    f"a/salt:{SALT.salt_name}": CHUNK_BYTES,
    "tag:team/blue": CHUNK_BYTES,
    "*": 4 * CHUNK_BYTES,
}


@pytest.fixture
def stock() -> Stock:
    return Stock(64 * CHUNK_BYTES, FreePages(128), policy="LRU", quotas=QUOTAS)


def enter(stock: Stock, tenant: str = "", model: str = "model") -> Space:
    space = stock.spaces.enter(Namespace({"model": model}), LAYOUT, tenant)
    assert space is not None
    return space


def store(stock: Stock, space: Space, ref: ChunkRef, owner: bytes = b"") -> None:
    chunk = whole(stock.reserve(space, ref, owner))
    assert chunk is not None
    stock.complete(chunk, is_whole=True)


def refs(first: int, count: int) -> list[ChunkRef]:
    return [make_ref(number, 4) for number in range(first, first + count)]


def used(stock: Stock) -> dict[tuple[str, str], int]:
    """Return the chunks that count against each quota that has any."""
    return {
        (quota.tenant, quota.name): quota.used_bytes // CHUNK_BYTES for quota in stock.spaces.quotas if quota.used_bytes
    }


def change(stock: Stock, **quotas: int) -> None:
    for _ in stock.change_quotas({name: count * CHUNK_BYTES for name, count in quotas.items()}):
        pass


def test_an_owner_evicts_its_own_and_counts_once(stock: Stock) -> None:
    spaces = [enter(stock, "a"), enter(stock, "a", "another model")]
    for ref in refs(0, 3):
        store(stock, spaces[0], ref)
    for number, ref in enumerate(refs(10, 5)):
        store(stock, spaces[number % 2], ref, RED)
    store(stock, spaces[0], make_ref(20, 4), SALTED)
    store(stock, spaces[1], make_ref(21, 4), SALTED)
    assert list(spaces[0].chunks) == [*refs(0, 3), make_ref(14, 4)]
    assert list(spaces[1].chunks) == [make_ref(13, 4), make_ref(21, 4)]
    assert used(stock) == {("a", "a"): 3, ("a", "tag:team/red"): 2, ("a", f"salt:{SALT.salt_name}"): 1}


def test_ids_reach_only_the_quotas_of_the_tenant_of_the_key(stock: Stock) -> None:
    ours, theirs, nobodys = enter(stock, "a"), enter(stock, "b"), enter(stock)
    for ref in (ONE, TWO):
        store(stock, ours, ref, RED)
    for space in (theirs, nobodys):
        for ref in refs(0, 4):
            store(stock, space, ref, RED)
    assert list(ours.chunks) == [ONE, TWO]
    assert used(stock) == {("a", "tag:team/red"): 2, ("b", "*"): 4, ("", "*"): 4}
    store(stock, nobodys, THREE, BLUE)
    store(stock, theirs, THREE, BLUE)
    assert used(stock)["", "tag:team/blue"] == 1
    assert used(stock)["b", "*"] == 4


def test_who_invents_names_gains_nothing(stock: Stock) -> None:
    space = enter(stock)
    for number, ref in enumerate(refs(0, 100)):
        store(stock, space, ref, owner_id("tag:team", f"made up {number}"))
    assert used(stock) == {("", "*"): 4}
    assert not space.accounts
    store(stock, enter(stock, "", "tag:team/blue"), ONE)
    store(stock, enter(stock, "", "a/tag:team/red"), ONE)
    assert used(stock) == {("", "*"): 4}, "a model of an owner's name has not its quota"
    assert len({(quota.tenant, quota.name) for quota in stock.spaces.quotas}) == len(list(stock.spaces.quotas))


def test_a_clear_ends_what_was_counted_at_once(stock: Stock) -> None:
    space, other = enter(stock, "a"), enter(stock, "a", "another model")
    writing = whole(stock.reserve(space, THREE, RED))
    assert writing is not None
    store(stock, space, ONE, RED)
    store(stock, space, TWO)
    store(stock, other, ONE, SALTED)
    stock.clear(space)
    assert used(stock) == {("a", "tag:team/red"): 1, ("a", f"salt:{SALT.salt_name}"): 1}
    stock.complete(writing, is_whole=True)
    assert used(stock) == {("a", f"salt:{SALT.salt_name}"): 1}
    while stock.drop_cleared():
        pass
    for ref in refs(0, 3):
        store(stock, space, ref, RED)
    assert used(stock) == {("a", "tag:team/red"): 2, ("a", f"salt:{SALT.salt_name}"): 1}


def test_a_chunk_stored_again_without_a_name_stays_its_owners(stock: Stock) -> None:
    space = enter(stock, "a")
    store(stock, space, ONE, RED)
    store(stock, space, ONE)
    assert space.chunks[ONE].owner == RED
    assert used(stock) == {("a", "tag:team/red"): 1}
    store(stock, space, ONE, SALTED)
    assert used(stock) == {("a", f"salt:{SALT.salt_name}"): 1}


def test_a_chunk_in_a_full_quota_leaves_only_for_one_of_that(stock: Stock) -> None:
    """One that another owner stores again stays until the new one is complete, because its room would not help."""
    space = enter(stock, "a")
    store(stock, space, ONE, SALTED)
    for ref in (TWO, THREE):
        store(stock, space, ref, RED)
    held = whole(stock.acquire(space, TWO)), whole(stock.acquire(space, THREE))
    assert all(isinstance(chunk, Chunk) for chunk in held)
    assert whole(stock.reserve(space, ONE, RED)) is None
    assert ONE in space.chunks
    assert whole(stock.reserve(space, TWO, RED)) is not None


def test_what_was_stored_before_counts_against_a_quota_that_comes(stock: Stock) -> None:
    space = enter(stock, "b")
    for ref in refs(0, 4):
        store(stock, space, ref, RED if ref.prefix_key[0] % 2 else BLUE)
    chunk = whole(stock.acquire(space, make_ref(1, 4)))
    assert isinstance(chunk, Chunk)
    stock.release(chunk)
    change(stock, **{"*": 4, "b/tag:team/red": 1, "b/tag:team/blue": 2})
    assert used(stock) == {("b", "tag:team/red"): 1, ("b", "tag:team/blue"): 2}
    assert make_ref(1, 4) in space.chunks, "that was used last"
    change(stock, **{"*": 4, "b/tag:team/blue": 2})
    assert used(stock) == {("b", "*"): 1, ("b", "tag:team/blue"): 2}
    last = make_ref(9, 4)
    store(stock, space, last, RED)
    assert used(stock)["b", "*"] == 2
    change(stock, **{"*": 4, "b/tag:team/red": 1})
    assert used(stock) == {("b", "*"): 2, ("b", "tag:team/red"): 1}
    assert list(space.chunks)[-1] == last


def test_a_chunk_that_is_being_written_meets_the_quotas_of_its_end(stock: Stock) -> None:
    space = enter(stock, "b")
    first, second = whole(stock.reserve(space, ONE, RED)), whole(stock.reserve(space, TWO, BLUE))
    assert first is not None
    assert second is not None
    change(stock, **{"*": 4, "b/tag:team/red": 2})
    stock.complete(first, is_whole=True)
    assert used(stock) == {("b", "*"): 1, ("b", "tag:team/red"): 1}
    third = whole(stock.reserve(space, THREE, RED))
    assert third is not None
    change(stock, **{"*": 4})
    assert used(stock) == {("b", "*"): 3}
    stock.complete(second, is_whole=False)
    stock.complete(third, is_whole=True)
    assert used(stock) == {("b", "*"): 2}
    assert all(chunk.account in space.all_accounts() for chunk in space.chunks.values())


def test_quotas_that_change_while_a_chunk_waits_for_room_count_it(stock: Stock) -> None:
    space, cleared = enter(stock, "b"), enter(stock, "b", "another model")
    change(stock, **{"*": 9, "b/tag:team/red": 1})
    store(stock, cleared, ONE)
    store(stock, space, ONE, RED)
    stock.clear(cleared)
    waiting = stock.reserve(space, TWO, RED)
    next(waiting)
    stock.remove(space, [ONE])
    change(stock, **{"*": 9})
    assert not space.accounts
    chunk = whole(waiting)
    assert chunk is not None
    assert chunk.account is space.common
    change(stock, **{"*": 9, "b": 4})
    assert used(stock) == {("b", "b"): 1}
    stock.complete(chunk, is_whole=True)
    assert used(stock) == {("b", "b"): 1}


def test_accounts_are_as_many_as_quotas(stock: Stock) -> None:
    space = enter(stock, "b")
    for number in range(20):
        change(stock, **{f"b/tag:team/{number}": 1})
        store(stock, space, ONE, owner_id("tag:team", str(number)))
        stock.remove(space, [ONE])
    assert len(space.accounts) <= 2
    change(stock)
    assert not space.accounts
    assert [quota.name for quota in stock.spaces.quotas] == [""]


def test_without_a_limit_no_order_is_kept() -> None:
    quotas = Quotas({})
    space = Space(Namespace({"model": "m"}), LAYOUT)
    quotas.enter(space)
    chunk = Chunk(space, ONE, owner=RED)
    chunk.quota.touch(chunk)
    assert (chunk.quota.limit_bytes, list(chunk.quota.by_age())) == (NO_QUOTA, [])


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    with closing(made.service), closing(made.pool):
        yield made


def test_the_name_of_a_request_counts(desk: Desk) -> None:
    for _ in desk.stock.change_quotas({"tag:team/red": CHUNK_BYTES}):
        pass
    desk.hello(b"")
    asked = messages.ReserveFor(2, messages.pack_refs([ONE, TWO]), RED)
    first, second = desk.ask(asked).grants
    assert first.lease
    assert not second.lease, "the quota is full of what is being written"
    assert used(desk.stock) == {("", "tag:team/red"): 1}
    (other,) = desk.ask(messages.Reserve(3, messages.pack_refs([THREE]))).grants
    assert other.lease


@pytest.mark.parametrize("owner", [b"", bytes(15), bytes(17), bytes(1 << 16)], ids=["none", "short", "long", "huge"])
def test_a_name_of_another_length_is_malformed(desk: Desk, owner: bytes) -> None:
    desk.hello(b"")
    with pytest.raises(ProtocolError, match="cannot be read"):
        desk.ask(messages.ReserveFor(2, messages.pack_refs([ONE]), owner))
