"""The tier over other engines' chunks: questions, reads, and the cost of an engine that fails or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.gate import HANG_GUARD_S, Gate
from support.redis_server import wait_for
from support.rig import FakeTier

from kvstore.index.remote_view import RemoteView
from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, ConfigError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, OTHER, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.guards import CircuitBreaker, GuardOptions, find, guarded
from kvstore.tiers.peers import PeersTier
from kvstore.tiers.ranks import at_rank

ONE, TWO = "kvs://one:1", "kvs://two:1"


class Storage(FakeTier):
    """Storage that counts its calls."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.asked: list[ChunkRef] = []
        self.read: list[ChunkRef] = []
        self.before_contains: Callable[[], object] = lambda: None

    def hold(self, *numbers: int) -> None:
        self.put([make_transfer(EVEN, make_ref(number)) for number in numbers])

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        self.asked += refs
        self.before_contains()
        return super().contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.read += [transfer.ref for transfer in transfers]
        return super().get(transfers)


class World:
    """Other engines by their addresses, and the tiers opened to them."""

    def __init__(self) -> None:
        self.engines = {ONE: Storage(), TWO: Storage()}
        self.opened: list[tuple[str, Namespace]] = []
        self.guard: GuardOptions | None = None

    def open_peer(self, url: str, namespace: Namespace) -> Tier:
        self.opened.append((url, namespace))
        engine = self.engines.setdefault(url, Storage())
        return guarded(engine, self.guard) if self.guard else engine

    def tier(self, own: Tier | None, *peers: str) -> PeersTier:
        return PeersTier(own, peers, self.open_peer, MINE, EVEN)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def own() -> Storage:
    return Storage()


@pytest.fixture
def tier(world: World, own: Storage) -> Iterator[PeersTier]:
    made = world.tier(own, ONE, TWO)
    yield made
    made.close()


def failing(_: object) -> object:
    raise TierError("it is away")


def get(tier: Tier, *numbers: int) -> list[Outcome]:
    """Read chunks in one batch, and compare the bytes of the hits."""
    transfers = [Transfer(make_ref(number), make_buffer(EVEN.slot_bytes)) for number in numbers]
    outcomes = tier.get(transfers)
    for outcome, (ref, buffer, *_) in zip(outcomes, transfers, strict=True):
        if outcome is Outcome.HIT:
            payload = make_payload(EVEN, ref)
            assert buffer[: len(payload)].tobytes() == payload
    return outcomes


def refs(*numbers: int) -> list[ChunkRef]:
    return [make_ref(number) for number in numbers]


def test_what_anybody_holds_is_found(tier: PeersTier, world: World, own: Storage) -> None:
    own.hold(1)
    world.engines[ONE].hold(2)
    world.engines[TWO].hold(3)
    assert tier.contains(refs(1, 2, 3, 4)) == [True, True, True, False]
    assert tier.contains([]) == []


def test_the_own_tier_is_read_first_and_only_what_it_lacks_is_pulled(
    tier: PeersTier, world: World, own: Storage
) -> None:
    own.hold(1, 2)
    world.engines[ONE].hold(2, 3)
    world.engines[TWO].hold(2, 4)
    assert get(tier, 1, 2, 3, 4, 5) == [Outcome.HIT] * 4 + [Outcome.MISS]
    assert world.engines[ONE].read == refs(3)
    assert world.engines[TWO].read == refs(4)
    assert get(tier, 1, 2) == [Outcome.HIT] * 2
    assert make_ref(1) not in world.engines[ONE].asked, "nobody is asked about what is here"
    assert tier.counters.hits == 6
    assert tier.counters.misses == 1
    assert tier.counters.bytes_read == 6 * EVEN.payload_bytes(4)


def test_nothing_is_ever_sent_to_a_peer_or_removed_there(tier: PeersTier, world: World, own: Storage) -> None:
    world.engines[ONE].hold(1)
    assert tier.put([make_transfer(EVEN, make_ref(2))]) == [Outcome.STORED]
    assert own.chunks.keys() == {make_ref(2)}
    tier.remove(refs(1, 2))
    tier.clear()
    tier.reset(OTHER)
    assert not own.chunks
    assert own.namespaces == [OTHER]
    assert world.engines[ONE].chunks.keys() == {make_ref(1)}
    assert world.engines[ONE].namespaces == []


def test_without_an_own_tier_it_is_read_only(world: World) -> None:
    tier = world.tier(None, ONE)
    world.engines[ONE].hold(1)
    assert get(tier, 1, 2) == [Outcome.HIT, Outcome.MISS]
    assert tier.put([make_transfer(EVEN, make_ref(2))]) == [Outcome.FAILED]
    tier.check()
    tier.clear()
    tier.close()


def test_removed_chunks_are_not_read_from_peers_any_more(tier: PeersTier, world: World) -> None:
    """Their bytes may be wrong there, too."""
    world.engines[ONE].hold(1, 2)
    tier.remove(refs(1))
    assert tier.contains(refs(1, 2)) == [False, True]
    assert get(tier, 1, 2) == [Outcome.MISS, Outcome.HIT]
    tier.put([make_transfer(EVEN, make_ref(1))])
    assert get(tier, 1) == [Outcome.HIT]


def test_after_a_reset_everybody_is_asked_about_the_new_namespace(tier: PeersTier, world: World) -> None:
    world.opened.clear()
    tier.reset(OTHER)
    assert world.opened == [(ONE, OTHER), (TWO, OTHER)]


class TestFailures:
    def test_one_that_fails_holds_nothing_and_the_others_go_on(
        self, tier: PeersTier, world: World, own: Storage
    ) -> None:
        def fail() -> None:
            raise TierError("broken")

        for broken in (own, world.engines[ONE]):
            broken.before_contains = fail
            broken.before_get = fail
            broken.hold(1)
        world.engines[TWO].hold(1, 2)
        assert tier.contains(refs(1, 2, 3)) == [True, True, False]
        assert get(tier, 1, 2) == [Outcome.HIT] * 2

    def test_what_one_has_lost_meanwhile_another_may_have(self, tier: PeersTier, world: World) -> None:
        world.engines[ONE].hold(1)
        world.engines[TWO].hold(1)
        for engine in world.engines.values():
            lose = engine.chunks.clear
            engine.before_get = lose  # of the peer that is asked first
        assert get(tier, 1) == [Outcome.MISS]
        assert world.engines[ONE].read == world.engines[TWO].read == refs(1)

    def test_one_that_hangs_is_not_waited_for_when_another_has_it(self, world: World) -> None:
        world.guard = GuardOptions(timeout_s=HANG_GUARD_S, failures=1, asks_storage=True)
        hangs = Gate()
        world.engines[ONE].before_contains = hangs
        world.engines[TWO].hold(1)
        tier = world.tier(None, ONE, TWO)
        assert tier.contains(refs(1)) == [True]
        assert get(tier, 1) == [Outcome.HIT]
        assert hangs.reached.wait(HANG_GUARD_S)
        hangs.open()
        tier.close()

    def test_one_that_hangs_costs_a_single_deadline(self, world: World) -> None:
        world.guard = GuardOptions(timeout_s=0.05, failures=1, probe_interval_s=1000.0, asks_storage=True)
        hangs = Gate()
        world.engines[ONE].before_contains = hangs
        world.engines[TWO].hold(1)
        tier = world.tier(None, ONE, TWO)
        for _ in range(5):
            assert tier.contains(refs(1, 2)) == [True, False]
            assert get(tier, 1, 2) == [Outcome.HIT, Outcome.MISS]
        assert len(world.engines[ONE].asked) == 2, "of one question"
        breaker = find(tier.parts[0], CircuitBreaker)
        assert breaker is not None
        assert not breaker.answers
        assert tier.answers, "or nobody would find out that it is back"
        hangs.open()
        tier.close()

    def test_a_read_that_hangs_keeps_its_buffer(self, world: World) -> None:
        world.guard = GuardOptions(timeout_s=0.05, failures=1, asks_storage=True)
        hangs = Gate()
        world.engines[ONE].before_get = hangs
        world.engines[ONE].hold(1)
        world.engines[TWO].hold(2)
        tier = world.tier(None, ONE, TWO)
        with pytest.raises(TierTimeoutError) as caught:
            get(tier, 1)
        assert not caught.value.pending.done()
        assert get(tier, 2) == [Outcome.HIT]
        hangs.open()
        assert caught.value.pending.result(HANG_GUARD_S) == [Outcome.HIT]
        assert tier.counters.failed == 1
        tier.close()


SOURCES = ("kvs://three:1", "kvs://four:1")


class TestSources:
    """Engines that a request may name: they are read for that request, and for no other."""

    @pytest.fixture
    def tier(self, world: World, own: Storage) -> Iterator[PeersTier]:
        made = PeersTier(own, [ONE, TWO], world.open_peer, MINE, EVEN, sources=[*SOURCES, ONE])
        yield made
        made.close()

    def test_it_is_read_for_the_chunks_it_was_named_for_and_once(self, tier: PeersTier, world: World) -> None:
        three = world.engines.setdefault(SOURCES[0], Storage())
        three.hold(1, 2)
        assert tier.contains(refs(1)) == [False]
        assert get(tier, 1) == [Outcome.MISS]
        assert not three.asked, "nor was it opened"
        tier.read_from(SOURCES[0], refs(1))
        assert tier.contains(refs(1)) == [False], "for others it is as before"
        assert get(tier, 1, 2) == [Outcome.HIT, Outcome.MISS]
        assert get(tier, 1) == [Outcome.MISS]
        assert three.asked == three.read == refs(1)

    def test_what_is_nearer_is_not_read_there(self, tier: PeersTier, world: World, own: Storage) -> None:
        own.hold(1)
        tier.read_from(SOURCES[0], refs(1))
        assert get(tier, 1) == [Outcome.HIT]
        assert [url for url, _ in world.opened] == [ONE, TWO]

    def test_each_chunk_from_the_one_named_for_it(self, tier: PeersTier, world: World) -> None:
        for url, number in zip(SOURCES, (1, 2), strict=True):
            world.engines.setdefault(url, Storage()).hold(number)
            tier.read_from(url, refs(number))
        world.engines[TWO].hold(3)
        assert get(tier, 1, 2, 3, 4) == [Outcome.HIT] * 3 + [Outcome.MISS]

    def test_it_is_looked_at_by_itself(self, tier: PeersTier, world: World) -> None:
        world.engines.setdefault(SOURCES[0], Storage()).hold(1)
        world.engines[ONE].hold(2)
        assert tier.look_at(SOURCES[0], refs(1, 2)) == [True, False]
        assert world.engines[ONE].asked == []

    @pytest.mark.parametrize("url", ["kvs://evil:1", "kvs://three:2", ""])
    def test_one_that_is_not_listed_is_never_opened(self, tier: PeersTier, world: World, url: str) -> None:
        world.engines[url] = Storage()
        world.engines[url].hold(1)
        tier.read_from(url, refs(1))
        assert not tier._routes
        assert get(tier, 1) == [Outcome.MISS]
        assert tier.look_at(url, refs(1)) == [None]
        assert [opened for opened, _ in world.opened] == [ONE, TWO]

    def test_a_peer_is_no_source_it_is_read_anyway(self, tier: PeersTier, world: World) -> None:
        world.engines[ONE].hold(1)
        tier.read_from(ONE, refs(1))
        assert get(tier, 1) == [Outcome.HIT]
        assert [opened for opened, _ in world.opened] == [ONE, TWO]

    def test_removed_chunks_are_not_read_there(self, tier: PeersTier, world: World) -> None:
        world.engines.setdefault(SOURCES[0], Storage()).hold(1)
        tier.remove(refs(1))
        tier.read_from(SOURCES[0], refs(1))
        assert get(tier, 1) == [Outcome.MISS]
        assert tier.look_at(SOURCES[0], refs(1)) == [False]

    def test_a_reset_forgets_what_was_to_be_read(self, tier: PeersTier, world: World) -> None:
        three = world.engines.setdefault(SOURCES[0], Storage())
        three.hold(1)
        tier.look_at(SOURCES[0], refs(1))
        tier.read_from(SOURCES[0], refs(1))
        tier.reset(OTHER)
        assert get(tier, 1) == [Outcome.MISS]
        tier.look_at(SOURCES[0], refs(1))
        assert world.opened[-1] == (SOURCES[0], OTHER)

    def test_what_is_never_read_is_forgotten_in_the_end(
        self, tier: PeersTier, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.tiers.peers._MAX_ROUTES", 3)
        world.engines.setdefault(SOURCES[0], Storage()).hold(*range(5))
        for number in range(5):
            tier.read_from(SOURCES[0], refs(number))
        assert get(tier, *range(5)) == [Outcome.MISS] * 2 + [Outcome.HIT] * 3

    def test_one_that_fails_or_hangs_costs_only_chunks_it_was_named_for(self, tier: PeersTier, world: World) -> None:
        hangs = Gate()
        three = world.engines.setdefault(SOURCES[0], Storage())
        three.before_contains = hangs
        world.engines[ONE].hold(2)
        tier.read_from(SOURCES[0], refs(1))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(get, tier, 1)
            assert hangs.reached.wait(HANG_GUARD_S)
            assert tier.contains(refs(1, 2)) == [False, True]
            assert get(tier, 2, 3) == [Outcome.HIT, Outcome.MISS]
            hangs.open()
            assert reading.result(HANG_GUARD_S) == [Outcome.MISS]

    def test_nothing_is_lent_where_sources_may_be_named(
        self, world: World, own: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Storage, "lends", True)
        assert world.tier(own).lends
        tier = PeersTier(own, (), world.open_peer, MINE, EVEN, sources=SOURCES)
        assert not tier.lends
        tier.close()

    def test_named_and_read_by_many_threads_at_once(self, tier: PeersTier, world: World) -> None:
        world.engines.setdefault(SOURCES[0], Storage()).hold(*range(100))

        def work(number: int) -> list[Outcome]:
            tier.read_from(SOURCES[0], refs(number))
            return get(tier, number)

        with ThreadPoolExecutor(8) as pool:
            assert set(map(tuple, pool.map(work, range(100)))) == {(Outcome.HIT,)}
        assert [opened for opened, _ in world.opened] == [ONE, TWO, SOURCES[0]]
        assert not tier._routes


def test_nobody_can_say_what_one_that_fails_holds(tier: PeersTier, world: World, own: Storage) -> None:
    """Only another peer's yes counts then: a "no" is remembered, and must be certain."""

    def fail() -> None:
        raise TierError("broken")

    world.engines[ONE].before_contains = fail
    world.engines[TWO].hold(2)
    own.hold(1)
    assert tier.look(refs(1, 2, 3)) == [True, True, None]
    own.before_contains = fail
    assert tier.look(refs(1, 2)) == [None, True]
    world.engines[ONE].before_contains = own.before_contains = lambda: None
    assert tier.look(refs(1, 3)) == [True, False]
    assert tier.look([]) == []


def test_close_ends_its_threads_and_closes_everybody(world: World, own: Storage) -> None:
    before = {thread.name for thread in threading.enumerate()}
    tier = world.tier(own, ONE)
    tier.contains(refs(1))
    tier.close()
    tier.close()
    assert own.is_closed
    assert world.engines[ONE].is_closed
    for call in (tier.contains, tier.remove):
        with pytest.raises(ClosedError):
            call(refs(1))
    with pytest.raises(ClosedError):
        get(tier, 1)
    wait_for("its threads end", lambda: not {thread.name for thread in threading.enumerate()} - before)


def test_a_question_about_trails_that_never_began_ends_with_the_tier(
    tier: PeersTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: Future[object] = Future()
    assert never.cancel(), "as close does with what waits for a thread"
    monkeypatch.setattr(tier, "_submit", lambda *_: never)
    with pytest.raises(ClosedError):
        tier.nearest([bytes(16)])


def test_what_a_peer_that_failed_might_have_named_is_asked_again(
    tier: PeersTier, world: World, own: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may recover at once, so the question does not wait until an answer expires."""
    trail, named = bytes(16), bytes(32)
    monkeypatch.setattr(world.engines[ONE], "nearest", failing)
    assert (tier.look_near([trail]), tier.nearest([trail])) == ([None], [()])
    directory, view = RemoteDirectory([tier]), RemoteView(60.0)
    view.note([trail], directory.answer([trail]), 0.0)
    assert view.unknown([trail], 0.0) == [trail]
    monkeypatch.setattr(own, "nearest", lambda _: [(named,)])
    assert directory.answer([trail]) == [(named,)]
    monkeypatch.undo()
    view.note([trail], directory.answer([trail]), 0.0)
    assert view.unknown([trail], 0.0) == []
    directory.close()


def test_a_source_that_fails_says_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = PeersTier(None, [], world.open_peer, MINE, EVEN, sources=[ONE])
    assert tier.nearest_at(ONE, [bytes(16)]) == [()]
    monkeypatch.setattr(world.engines[ONE], "nearest", failing)
    assert tier.nearest_at(ONE, [bytes(16)]) == tier.nearest_at(TWO, [bytes(16)]) == [None]
    tier.close()


@pytest.mark.parametrize(
    ("url", "rank", "expected"),
    [
        ("kvs://host:7300", 0, "kvs://host:7300"),
        ("kvs://host:7300", 3, "kvs://host:7303"),
        ("kvs://[::1]:7300?timeout_s=2", 1, "kvs://[::1]:7301?timeout_s=2"),
    ],
)
def test_the_address_of_a_rank(url: str, rank: int, expected: str) -> None:
    assert at_rank(url, rank) == expected


@pytest.mark.parametrize(
    "url", ["kvs://host", "kvs://:1", "kvs://host:x", "redis://host:1", "kvs+ipc:///run", "host:1", "kvs://h:1/path"]
)
def test_addresses_that_name_no_engine(url: str) -> None:
    with pytest.raises(ConfigError, match="kvs://host:port"):
        at_rank(url, 0)


def test_a_rank_beyond_the_last_port() -> None:
    with pytest.raises(ConfigError, match="worker 1:"):
        at_rank("kvs://host:65535", 1)
