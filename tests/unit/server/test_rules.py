"""Rules of the cache server, one by one and without sockets: stock, leases, requests, pieces, keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shop import CHUNK_BYTES, LATER_S, LAYOUT, ONE, THREE, TWO, Desk, Shop
from zmq.utils import z85

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError, ProtocolError
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.keyfiles import ListedKey
from kvstore.protocol.messages import Refusal
from kvstore.protocol.outcomes import outcome_of
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.clients import OURSELVES, ClientKeys
from kvstore.server.owner import Owner
from kvstore.server.pool import FreePages, Pool
from kvstore.server.sessions import FORGET_S, MAX_PIECES, SILENCE_S, Peer
from kvstore.server.spaces import Chunk
from kvstore.server.unix_socket import UnixSocket, make_private
from kvstore.testing.harness import make_ref

# Stock


def test_a_write_that_clear_overtook_is_not_found() -> None:
    shop = Shop()
    chunk = shop.reserve(ONE)
    assert chunk is not None
    shop.stock.clear(shop.space)
    assert shop.stock.complete(chunk, is_whole=True) is Outcome.FAILED
    assert (list(shop.space.chunks), shop.space.used_bytes, shop.free.num_free) == ([], 0, 4)


@pytest.mark.parametrize("how", ["it is read", "it is pinned"])
def test_what_stays_while_others_want_its_pages(how: str) -> None:
    shop = Shop(chunks=1)
    chunk = shop.store(ONE)
    if how == "it is read":
        assert shop.acquire(ONE) is chunk
    else:
        shop.stock.pins.set(chunk, LATER_S)  # any share of the memory may be pinned
    assert shop.reserve(TWO) is None
    assert ONE in shop.space.chunks
    if how == "it is read":
        shop.stock.release(chunk)
    else:
        shop.stock.remove(shop.space, [ONE])
    assert shop.reserve(TWO) is not None


@pytest.mark.parametrize("kept", [ONE, TWO])
def test_what_was_looked_up_last_goes_last(kept: ChunkRef) -> None:
    shop = Shop(disk_chunks=0)
    shop.store(ONE)
    shop.store(TWO)
    shop.stock.touch(shop.space, [kept])
    shop.store(THREE)
    assert [ref in shop.space.chunks for ref in (ONE, TWO)] == [kept == ONE, kept == TWO]


def test_pages_for_a_read_that_failed_are_given_back() -> None:
    shop = Shop()
    shop.stock.adopt(Chunk(shop.space, ONE, disk_bytes=CHUNK_BYTES))
    chunk = shop.acquire(ONE)
    assert isinstance(chunk, Chunk)
    assert shop.free.num_free == 2
    shop.stock.loaded(chunk, Outcome.FAILED)
    shop.stock.release(chunk)
    assert shop.free.num_free == 4
    assert shop.acquire(ONE) is chunk, "it may be tried again"


def test_a_quota_is_kept() -> None:
    shop = Shop(quota_bytes=CHUNK_BYTES)
    shop.store(ONE)
    shop.store(TWO)
    assert (list(shop.space.chunks), shop.space.used_bytes) == ([TWO], CHUNK_BYTES)


def test_what_is_pinned_stays_in_a_full_namespace() -> None:
    shop = Shop(quota_bytes=CHUNK_BYTES)
    shop.store(ONE)
    assert shop.stock.pins.pin(shop.space, [ONE], LATER_S) == 1
    assert shop.reserve(TWO) is None
    assert list(shop.space.chunks) == [ONE]


def test_a_replaced_chunk_is_counted_once() -> None:
    shop = Shop()
    shop.store(ONE)
    shop.store(ONE)
    assert (shop.space.used_bytes, shop.free.num_free) == (CHUNK_BYTES, 2)


def test_what_was_removed_is_not_written_to_disk() -> None:
    shop = Shop()
    chunk = shop.store(ONE)
    assert shop.acquire(ONE) is chunk  # so that its pages stay
    shop.stock.remove(shop.space, [ONE])
    assert not shop.stock.prepare_write(chunk, CHUNK_BYTES)
    assert shop.stock.num_on_disk == 0


def test_a_pin_ends_with_its_chunk() -> None:
    shop = Shop()
    shop.store(ONE)
    assert shop.stock.pins.pin(shop.space, [ONE], LATER_S) == 1
    assert shop.stock.pins.used_bytes == CHUNK_BYTES
    shop.stock.remove(shop.space, [ONE])
    assert shop.stock.pins.used_bytes == 0


def test_what_leaves_the_disk_for_others_loses_its_file() -> None:
    shop = Shop()
    first, second = shop.store(ONE), shop.store(TWO)
    for chunk in (first, second):
        assert shop.stock.prepare_write(chunk, CHUNK_BYTES)
        shop.stock.written(chunk, CHUNK_BYTES)
    assert shop.stock.take_removals() == [(shop.space, ONE)]
    assert (first.disk_bytes, second.disk_bytes) == (0, CHUNK_BYTES)


def test_what_is_being_written_does_not_leave_the_disk() -> None:
    shop = Shop()
    first, second = shop.store(ONE), shop.store(TWO)
    assert shop.stock.prepare_write(first, CHUNK_BYTES)
    assert not shop.stock.prepare_write(second, CHUNK_BYTES)
    shop.stock.written(first, CHUNK_BYTES)
    assert shop.stock.prepare_write(second, CHUNK_BYTES)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_free_pages_that_lie_together_are_one_run(order: tuple[int, ...]) -> None:
    free = FreePages(9)
    taken = [free.take(3) for _ in range(3)]
    for number in order:
        runs = taken[number]
        assert runs is not None
        free.give(runs)
    assert free.take(9) == ((0, 9),)


# Leases


def test_pages_are_kept_while_pieces_are_on_their_way_to_them() -> None:
    shop = Shop()
    client, chunk = shop.client(), shop.reserve(ONE)
    assert chunk is not None
    lease = shop.sessions.lease(client, chunk, is_write=True)
    lease.copies = 1
    list(shop.sessions.end(client))
    assert shop.free.num_free == 2
    shop.sessions.copied(lease, is_sound=True)
    assert (shop.free.num_free, list(shop.space.chunks)) == (4, [])


@pytest.mark.parametrize("sound", [(True, True), (False, True), (True, False)])
def test_a_chunk_is_whole_only_if_every_piece_was(sound: tuple[bool, ...]) -> None:
    shop = Shop()
    client, chunk = shop.client(), shop.reserve(ONE)
    assert chunk is not None
    lease = shop.sessions.lease(client, chunk, is_write=True)
    lease.copies = len(sound)
    for is_sound in sound:
        shop.sessions.copied(lease, is_sound=is_sound)
    outcome = shop.sessions.give_back(client, lease, is_whole=True)
    assert outcome is (Outcome.STORED if all(sound) else Outcome.FAILED)


def test_only_the_end_of_its_connection_takes_the_pool_from_a_client_that_maps_it() -> None:
    shop = Shop()
    mapping = shop.client(b"token")
    chunk = shop.reserve(ONE)
    assert chunk is not None
    shop.sessions.lease(mapping, chunk, is_write=True)
    assert shop.sessions.expire(100 * FORGET_S) == []
    elsewhere = shop.sessions.begin(Peer(0, b"two"), OURSELVES, shop.space, b"", 0.0)
    assert shop.sessions.expire(SILENCE_S + 1) == []
    other = shop.reserve(TWO)
    assert other is not None
    shop.sessions.lease(elsewhere, other, is_write=True)
    assert shop.sessions.expire(SILENCE_S + 1) == [elsewhere]


def test_a_client_has_a_quarter_of_the_pool_at_most() -> None:
    shop = Shop(chunks=8)
    client = shop.client()
    granted = 0
    for number in range(8):
        if not shop.sessions.may_lease(client, CHUNK_BYTES):
            break
        chunk = shop.reserve(make_ref(number, 4))
        assert chunk is not None
        shop.sessions.lease(client, chunk, is_write=True)
        granted += 1
    assert granted == 2


# Requests and pieces


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_chunk_of_which_a_part_never_came_is_not_stored(desk: Desk, parts: int) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    for number in range(parts):
        desk.send(lease, bytes(PAGE_BYTES), number * PAGE_BYTES)
    desk.settle(parts)
    assert desk.commit(lease) is (Outcome.STORED if parts == 2 else Outcome.FAILED)


def test_a_release_ends_no_write(desk: Desk) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    desk.ask(messages.Release(5, [lease]))
    assert desk.sessions.num_leases == 1
    assert not desk.stock.spaces[next(iter(desk.stock.spaces))].chunks


def test_a_commit_ends_no_read(desk: Desk) -> None:
    desk.store(ONE)
    lease = desk.lease(messages.Acquire, ONE)
    assert desk.commit(lease) is Outcome.FAILED
    assert desk.sessions.num_leases == 1


def test_a_token_is_good_while_its_connection_is_there() -> None:
    desk = Desk()
    token = b"t" * messages.TOKEN_BYTES
    refused = desk.hello(token)
    assert (type(refused), refused.reason) == (messages.Refused, Refusal.TOKEN)
    desk.open_tokens.add(token)
    assert isinstance(desk.hello(token), messages.Welcome)
    desk.service.close()
    desk.pool.close()


def test_with_new_weights_the_chunks_of_the_old_ones_go_and_who_sent_them() -> None:
    old = Namespace({"model": "mine"})
    desk = Desk(Owner(old, LAYOUT))
    assert isinstance(desk.hello(), messages.Welcome)
    desk.store(ONE)
    desk.service.enter(old.at_epoch("1"))
    assert desk.pool.used_bytes == 0
    assert not desk.sessions.by_peer
    assert isinstance(desk.hello(), messages.Refused)
    desk.service.close()
    desk.pool.close()


@pytest.mark.parametrize("blocks", [0, 5, 1 << 30])
def test_chunks_have_the_size_of_their_namespace(desk: Desk, blocks: int) -> None:
    with pytest.raises(ProtocolError, match="1 to 4 blocks"):
        desk.ask(messages.Reserve(2, messages.pack_refs([ChunkRef(bytes(16), blocks)])))


def test_nothing_behind_the_end_of_a_chunk_is_read_or_written(desk: Desk) -> None:
    """The bytes there belong to other chunks, or did before."""
    short = make_ref(7, 1)  # a quarter of a chunk: half a page
    lease = desk.lease(messages.Reserve, short)
    with pytest.raises(ProtocolError, match="exceeds the chunk"):
        desk.send(lease, bytes(PAGE_BYTES))
    desk.send(lease, bytes(PAGE_BYTES // 2))
    desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED
    reading = desk.lease(messages.Acquire, short)
    with pytest.raises(ProtocolError, match="exceeds the chunk"):
        desk.ask(messages.Fetch(6, reading, 0, PAGE_BYTES))


@pytest.mark.parametrize(
    ("front_blocks", "offset", "num_bytes"),
    [(4, 0, 1), (5, 0, 1), (1, 0, CHUNK_BYTES // 4 + 1), (2, CHUNK_BYTES // 2, 1), (1, 1 << 60, 1)],
)
def test_nothing_behind_the_leading_blocks_of_a_chunk_is_read(
    desk: Desk, front_blocks: int, offset: int, num_bytes: int
) -> None:
    """Not all of its blocks are its leading ones, so a request for all of them is a mistake."""
    desk.store(ONE)
    reading = desk.lease(messages.Acquire, ONE)
    with pytest.raises(ProtocolError, match="leading blocks"):
        desk.ask(messages.Front(6, reading, front_blocks, offset, num_bytes))


def test_leading_blocks_that_are_asked_for_many_times_are_bounded(desk: Desk) -> None:
    """Each is joined in separate memory, and no checksum of them is kept."""
    desk.store(ONE)
    reading = desk.lease(messages.Acquire, ONE)
    sums = dict(next(iter(desk.stock.spaces.values())).chunks[ONE].sums)
    for _ in range(MAX_PIECES):
        desk.ask(messages.Front(6, reading, 1, 0, 8))
    with pytest.raises(ProtocolError, match="pieces at once"):
        desk.ask(messages.Front(6, reading, 1, 0, 8))
    while sum(isinstance(answer, messages.Data) for answer in desk.sent) < MAX_PIECES:
        desk.settle(1)  # a copy that was sent is reported too, in between
    assert sum(isinstance(answer, messages.Data) for answer in desk.sent) == MAX_PIECES
    assert next(iter(desk.stock.spaces.values())).chunks[ONE].sums == sums


def test_a_place_to_write_to_is_not_read(desk: Desk) -> None:
    """Its pages still hold another client's chunk."""
    lease = desk.lease(messages.Reserve, ONE)
    for request in (messages.Fetch(6, lease, 0, PAGE_BYTES), messages.Front(6, lease, 1, 0, 8)):
        answer = desk.ask(request)
        assert isinstance(answer, messages.Done)
        assert outcome_of(answer.outcomes[0]) is Outcome.FAILED


def test_a_client_sends_few_pieces_at_once(desk: Desk) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    for _ in range(MAX_PIECES):
        desk.send(lease, bytes(8))
    with pytest.raises(ProtocolError, match="pieces at once"):
        desk.send(lease, bytes(8))


def test_a_message_has_a_longest_length() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        messages.decode_request(bytes(messages.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o777])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "pool"
    make_private(folder)
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="closed to others"):
        make_private(folder)


def test_one_server_to_a_folder(tmp_path: Path) -> None:
    pool = Pool(CHUNK_BYTES, lambda _: None)
    unix_socket = UnixSocket(tmp_path / "pool", pool.fd, 9)
    with pytest.raises(ConfigError, match="another cache server runs"):
        UnixSocket(tmp_path / "pool", pool.fd, 9)
    unix_socket.close()
    UnixSocket(tmp_path / "pool", pool.fd, 9).close()
    pool.close()


@pytest.mark.parametrize(
    ("mechanism", "key", "status"),
    [(b"CURVE", b"k" * 32, b"200"), (b"CURVE", b"x" * 32, b"400"), (b"NULL", b"k" * 32, b"400")],
    ids=["listed", "not listed", "no key needed"],
)
def test_whose_key_is_listed_comes_in(mechanism: bytes, key: bytes, status: bytes) -> None:
    context = open_context()
    client_keys = ClientKeys(context, {z85.encode(b"k" * 32): ListedKey("engine 1")})
    question = [b"1.0", b"7", b"", b"10.0.0.1", b"", mechanism, key]
    assert client_keys._judge(question)[1:3] == [b"7", status]
    assert client_keys._judge(question[:5])[2] == b"400"
    client_keys.close()
    close_context(context)
