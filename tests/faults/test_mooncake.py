"""Tests of a real Mooncake Store whose owners of memory and master are stopped, killed and started again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, make_slot, make_transfer, put
from support.mooncake_store import Store, a_store, wait_for

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.guards import GuardOptions, guarded

FAILED, HIT, MISS, STORED = Outcome.FAILED, Outcome.HIT, Outcome.MISS, Outcome.STORED
REFS = [make_ref(number) for number in range(24)]
TIMEOUT_S = 3.0
SLACK_S = 2.0  # beyond the deadline, on a machine with two busy cores
BACK_S = 15.0


@pytest.fixture
def store() -> Iterator[Store]:
    with a_store(64 << 20) as one:
        yield one


@pytest.fixture
def tier(store: Store) -> Iterator[Tier]:
    with closing(open_mooncake(store)) as one:
        one.check()
        yield one


def open_mooncake(store: Store) -> Tier:
    given = {"url": store.master.url, "timeout_s": TIMEOUT_S, "staging_mib": 4}
    return open_tier("mooncake", TierSetup(MINE, EVEN, UNBOUNDED_BYTES, given))


def in_time(call: Callable[[], object]) -> object:
    """Return the result of a call, or its error; no call ends after its deadline."""
    begin_s = time.monotonic()
    try:
        return call()
    except TierError as error:
        return error
    finally:
        assert time.monotonic() - begin_s < TIMEOUT_S + SLACK_S


def held(tier: Tier) -> int:
    return int(getattr(tier, "held_slots"))  # noqa: B009 - of this tier only


def read_all(tier: Tier) -> dict[object, int]:
    """Read each chunk alone; the hits have the right bytes."""
    found: dict[object, int] = {}
    for ref in REFS:
        outcome = in_time(lambda ref=ref: get(tier, ref))  # type: ignore[misc]
        found[outcome if isinstance(outcome, Outcome) else TierError] = found.get(outcome, 0) + 1
    return found


def works(tier: Tier) -> bool:
    return in_time(lambda: put(tier, *REFS)) == [STORED] * len(REFS) and read_all(tier) == {HIT: len(REFS)}


@pytest.mark.sweep
def test_an_owner_is_stopped_and_goes_on(store: Store, tier: Tier) -> None:
    """Calls end at their deadline, slots stay taken until the owner goes on, and what comes late harms nothing."""
    assert set(put(tier, *REFS)) == {STORED}
    for owner in store.owners:
        owner.freeze()
    outcomes = in_time(lambda: tier.get([Transfer(ref, make_slot()) for ref in REFS[:4]]))
    assert outcomes == [FAILED] * 4
    assert held(tier) == 4
    assert in_time(lambda: put(tier, *REFS[4:8])) in ([FAILED] * 4, [STORED] * 4)
    for owner in store.owners:
        owner.thaw()
    wait_for("the calls end", lambda: not held(tier), BACK_S)
    wait_for("the store works again", lambda: works(tier), BACK_S)


@pytest.mark.sweep
def test_the_breaker_leaves_owners_out_that_hang(store: Store) -> None:
    with closing(guarded(open_mooncake(store), GuardOptions(TIMEOUT_S + 1, failures=2, probe_interval_s=1.0))) as tier:
        assert set(put(tier, *REFS)) == {STORED}
        for owner in store.owners:
            owner.freeze()
        for _ in range(2):
            assert get(tier, REFS[0]) is FAILED
        assert not tier.answers
        for owner in store.owners:
            owner.thaw()
        wait_for("it is used again", lambda: get(tier, REFS[0]) is HIT and tier.answers, BACK_S)


def test_an_owner_is_killed_and_another_comes(store: Store, tier: Tier) -> None:
    """Its chunks are lost, the others are found, and new ones are stored; if it had the epoch, a new one begins."""
    assert set(put(tier, *REFS)) == {STORED}
    store.owners[0].kill()
    found = read_all(tier)
    assert set(found) <= {HIT, FAILED, MISS, TierError}
    store.owners[0].start()
    wait_for("the store works again", lambda: works(tier), BACK_S)


def test_the_master_is_killed_and_starts_again(store: Store, tier: Tier) -> None:
    """All is lost with it, and no call takes longer than its deadline."""
    assert set(put(tier, *REFS)) == {STORED}
    store.master.kill()
    for call in (lambda: get(tier, REFS[0]), lambda: put(tier, REFS[1]), lambda: tier.contains(REFS)):
        found = in_time(call)
        assert isinstance(found, TierError) or found in (FAILED, HIT, [FAILED])
    store.master.start()
    wait_for("the store works again", lambda: works(tier), 2 * BACK_S)


@pytest.mark.sweep
def test_the_master_is_stopped_and_goes_on(store: Store, tier: Tier) -> None:
    assert set(put(tier, *REFS)) == {STORED}
    store.master.freeze()
    for call in (lambda: put(tier, REFS[1]), lambda: get(tier, REFS[0]), lambda: tier.contains(REFS)):
        in_time(call)
    store.master.thaw()
    wait_for("the store works again", lambda: works(tier), BACK_S)


def test_mooncakes_process_is_killed(tier: Tier) -> None:
    assert set(put(tier, *REFS)) == {STORED}
    tier._calls._session._process.kill()  # type: ignore[attr-defined]
    assert isinstance(in_time(lambda: [get(tier, REFS[0]) for _ in range(50)]), TierError)
    wait_for("another one has started", lambda: in_time(lambda: get(tier, REFS[0])) is HIT, BACK_S)
    assert read_all(tier) == {HIT: len(REFS)}


@pytest.mark.sweep
def test_ten_thousand_reads_beside_overwrites(store: Store, tier: Tier) -> None:
    """Two engines replace, remove and clear while four threads read; a read is whole and of its chunk, or a miss."""
    versions = {ref: [make_transfer(ref, salt=salt) for salt in range(3)] for ref in REFS[:6]}
    put(tier, *versions)
    size_bytes, is_over = EVEN.payload_bytes(8), threading.Event()
    found: dict[Outcome, int] = {}
    lock = threading.Lock()

    def write(seed: int) -> None:
        dice = random.Random(seed)
        with closing(open_mooncake(store)) as other:
            while not is_over.is_set():
                ref = dice.choice(REFS[:6])
                if dice.randrange(40):
                    other.put([dice.choice(versions[ref])])
                elif dice.randrange(20):
                    other.remove([ref])
                else:
                    other.clear()

    def read(seed: int) -> None:
        dice = random.Random(seed)
        slots = [make_slot() for _ in range(5)]
        for _ in range(500):
            refs = [dice.choice(REFS[:6]) for _ in slots]
            outcomes = tier.get([Transfer(*one) for one in zip(refs, slots, strict=True)])
            for ref, slot, outcome in zip(refs, slots, outcomes, strict=True):
                whole = any((slot[:size_bytes] == one.buffer[:size_bytes]).all() for one in versions[ref])
                assert outcome is not HIT or whole, "wrong bytes"
                with lock:
                    found[outcome] = found.get(outcome, 0) + 1

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    failures: list[BaseException] = []

    def guarded_read(seed: int) -> None:
        try:
            read(seed)
        except BaseException as error:  # noqa: BLE001 - of a thread, for the test to raise
            failures.append(error)

    readers = [threading.Thread(target=guarded_read, args=(seed,)) for seed in range(4)]
    for thread in (*writers, *readers):
        thread.start()
    for reader in readers:
        reader.join()
    is_over.set()
    for writer in writers:
        writer.join()
    assert not failures
    assert sum(found.values()) == 10_000
    assert found.get(HIT, 0) > 1000
    assert not found.get(Outcome.CORRUPT)
