"""Tests of calls of Mooncake that hang, and of a process of Mooncake that ends, with a stand-in for the store."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE, OTHER, get, make_ref, make_slot, make_transfer, put
from support.stand_in_mooncake import BOUND_S, Fake, a_fake, give_up, held, wait_for

from kvstore.format import chunkfile
from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError, ConfigError, TierError
from kvstore.model.keys import ChunkKey
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.mooncake import child, image, session
from kvstore.tiers.mooncake.slots import Slots

A, B, C, D, E = (make_ref(number) for number in range(1, 6))
FAILED, HIT, MISS, STORED = Outcome.FAILED, Outcome.HIT, Outcome.MISS, Outcome.STORED


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with a_fake(tmp_path, monkeypatch) as one:
        yield one


def test_a_slot_is_not_given_away_while_a_read_runs_on_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read writes late, when its caller has gone and others have used all the slots that were free."""
    tier = fake.open()
    assert put(tier, A) == [STORED]
    fake.tell("hang-get")
    assert give_up(tier, lambda: get(tier, A), monkeypatch) is FAILED
    fake.tell("hang-put")
    putting = threading.Thread(target=lambda: put(tier, B, C, D))
    putting.start()
    wait_for(lambda: len(tier._calls._session._calls) == 2)  # type: ignore[attr-defined]
    num_held = held(tier)
    fake.untell("hang-get")
    wait_for(lambda: len(tier._calls._session._calls) == 1)  # type: ignore[attr-defined]
    fake.untell("hang-put")
    putting.join(BOUND_S)
    assert [get(tier, ref) for ref in (A, B, C, D)] == [HIT] * 4
    assert num_held == 1


@pytest.mark.parametrize("failure", ["fail-get", "raise-get"])
def test_a_read_that_fails_and_writes_late_reaches_no_other_chunk(fake: Fake, failure: str) -> None:
    """Its slot is lost, and the next call has another process with other memory."""
    tier = fake.open()
    assert put(tier, A) == [STORED]
    before = _slots(tier)
    fake.tell("late-get")
    fake.tell(failure)
    if failure == "fail-get":
        assert get(tier, A) is FAILED
    else:
        with pytest.raises(TierError, match="in the middle of a transfer"):
            get(tier, A)
    fake.untell(failure)
    free = before.take(4, 0.0)
    assert before.held == 1
    taken = [before.view(slot).copy() for slot in free]
    fake.untell("late-get")
    wait_for((fake.folder / "written").exists)
    assert [(before.view(slot) == old).all() for slot, old in zip(free, taken, strict=True)] == [True] * 3
    tier.check()  # as the stand-in's store ended with its process
    assert put(tier, B) == [STORED]
    assert get(tier, B) is HIT
    assert _slots(tier) is not before
    assert held(tier) == 0


@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        ([4, 8], 12),
        ([4, -704], -704),
        ([-600, -600], -600),
        ([-600, -500], -800),
        ([4, 0], -800),
        ([3, 8], -800),
        ([-704, 3], -800),
    ],
)
def test_a_failed_range_hides_no_other(lengths: list[int], code: int) -> None:
    assert child._code_of(lengths, [4, 8]) == code


def test_a_payload_is_what_was_verified(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late transfer that writes to the slot in the middle of a layer's read cannot make it a hit."""
    tier = fake.open()
    assert put(tier, A) == [STORED]
    compare = chunkfile.compare

    def overwrite(*args: object, **named: object) -> object:
        _slots(tier)._memory[:] = 0xEE
        return compare(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(chunkfile, "compare", overwrite)
    slot = make_slot()
    assert tier.get_layers([Transfer(A, slot)], range(EVEN.num_layers)) == [HIT]
    assert (slot == make_transfer(A).buffer).all()


def test_a_start_that_never_ends_is_replaced(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open(timeout_s=0.2)
    fake.tell("hang-setup")
    with pytest.raises(TierError, match="still starting"):
        tier.contains([A])
    before = tier._calls._session  # type: ignore[attr-defined]
    monkeypatch.setattr(session, "_HOPELESS_S", 0.0)
    with pytest.raises(TierError, match="still starting"):
        tier.contains([A])
    assert tier._calls._session is not before  # type: ignore[attr-defined]
    fake.untell("hang-setup")


def test_what_a_late_write_stores_is_what_it_was_given_and_is_removed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = fake.open()
    tier.check()
    fake.tell("hang-put")
    assert give_up(tier, lambda: put(tier, A, B), monkeypatch) == [FAILED] * 2
    assert held(tier) == 2
    taken = [_slots(tier).view(slot).copy() for slot in (0, 1)]
    fake.untell("hang-put")
    wait_for(lambda: not held(tier))
    assert [(_slots(tier).view(slot) == old).all() for slot, old in zip((0, 1), taken, strict=True)] == [True, True]
    wait_for(lambda: tier.contains([A, B]) == [False, False])
    assert put(tier, A) == [STORED]
    assert get(tier, A) is HIT


def test_calls_that_hang_take_at_most_half_of_the_slots(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all calls are refused at once, and pass again when those have ended."""
    tier = fake.open()
    put(tier, A, B)
    fake.tell("hang-get")
    buffers = [Transfer(ref, make_slot()) for ref in (A, B)]
    assert give_up(tier, lambda: tier.get(buffers), monkeypatch) == [FAILED] * 2
    assert held(tier) == 2
    assert put(tier, C) == [FAILED]
    assert get(tier, A) is FAILED
    with pytest.raises(TierError, match="hangs in earlier calls"):
        tier.contains([A])
    fake.untell("hang-get")
    wait_for(lambda: not held(tier))
    assert [get(tier, ref) for ref in (A, B)] == [HIT, HIT]
    assert put(tier, C) == [STORED]


def test_lookups_that_hang_are_bounded(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open(connections=2)
    tier.check()
    fake.tell("hang-exist")
    for _ in range(2):
        with pytest.raises(TierError, match="did not answer within"):
            give_up(tier, lambda: tier.contains([A]), monkeypatch)
    with pytest.raises(TierError, match="hangs in earlier calls"):
        tier.contains([A])
    fake.untell("hang-exist")
    wait_for(lambda: not tier._calls._session._given_up)  # type: ignore[attr-defined]
    assert tier.contains([A]) == [False]


def test_a_process_with_a_call_that_never_ends_is_replaced(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open()
    put(tier, A)
    fake.tell("hang-get")
    assert give_up(tier, lambda: get(tier, A), monkeypatch) is FAILED
    before = _slots(tier)
    monkeypatch.setattr(session, "_HOPELESS_S", 0.05)
    time.sleep(0.1)
    assert tier.contains([A]) == [False], "the stand-in's store ended with its process"
    assert _slots(tier) is not before


def test_a_process_that_ends_is_started_again(fake: Fake) -> None:
    tier = fake.open()
    assert put(tier, A) == [STORED]
    fake.tell("die")
    with pytest.raises(TierError, match="has ended"):
        get(tier, A)
    with pytest.raises(TierError):
        put(tier, A)
    fake.untell("die")
    assert get(tier, A) is MISS
    tier.check()  # as the stand-in's store ended with its process
    assert put(tier, A) == [STORED]
    assert get(tier, A) is HIT


def test_a_master_that_is_away(fake: Fake) -> None:
    tier = fake.open()
    fake.tell("down")
    with pytest.raises(TierError, match=r"is the master at 127\.0\.0\.1:1 running"):
        tier.check()
    fake.untell("down")
    tier.check()
    assert put(tier, A) == [STORED]


def test_a_start_that_hangs(fake: Fake) -> None:
    tier = fake.open(timeout_s=0.2)
    fake.tell("hang-setup")
    with pytest.raises(TierError, match="still starting"):
        tier.contains([A])
    fake.untell("hang-setup")
    wait_for(tier._calls._session.ready.done)  # type: ignore[attr-defined]


def test_close_does_not_wait_for_a_call_that_hangs(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open()
    put(tier, A)
    fake.tell("hang-get")
    assert give_up(tier, lambda: get(tier, A), monkeypatch) is FAILED
    process = tier._calls._session._process  # type: ignore[attr-defined]
    tier.close()
    assert process.poll() is not None
    with pytest.raises(ClosedError):
        get(tier, A)


def test_a_full_store(fake: Fake) -> None:
    tier = fake.open()
    put(tier, A)
    fake.tell("full")
    assert put(tier, B) == [Outcome.FULL]
    assert get(tier, A) is HIT
    with pytest.raises(TierError, match="has it free segments"):
        tier.clear()


def test_a_reset_during_a_write_wins(fake: Fake) -> None:
    tier = fake.open()
    tier.check()
    fake.tell("hang-put")
    found: list[Outcome] = []
    putting = threading.Thread(target=lambda: found.extend(put(tier, A)))
    putting.start()
    wait_for(lambda: len(_slots(tier)._free) < _slots(tier)._number)
    tier.reset(OTHER)
    fake.untell("hang-put")
    putting.join(BOUND_S)
    assert found == [FAILED]
    tier.reset(MINE)
    assert tier.contains([A]) == [False]


def test_the_extra_is_named(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvstore.tiers.mooncake")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-kvstore\[mooncake\]'"):
        fake.open()


def test_a_library_that_is_missing_is_named(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt-get install libibverbs1.*libibverbs.so.1: cannot open"):
        fake.open().check()


def _slots(tier: Tier) -> Slots:
    found = tier._calls._session.slots  # type: ignore[attr-defined]
    assert isinstance(found, Slots)
    return found


def test_transfers_of_dirty_slots_store_clean_padding(fake: Fake) -> None:
    tier = fake.open()
    for number in (1, 2):
        assert tier.put([make_transfer(make_ref(number))]) == [STORED]
    view = _slots(tier).view(0)
    size_bytes = EVEN.payload_bytes(8)
    assert not view[4096 + size_bytes :].any()


@pytest.mark.parametrize("large_bytes", [1, 1 << 30], ids=["two threads", "one"])
def test_halves_of_a_chunk_that_are_copied_at_once(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    """They make the same object, which another reader verifies."""
    monkeypatch.setattr(image, "_LARGE_BYTES", large_bytes)
    tier = fake.open()
    assert put(tier, A, B) == [STORED] * 2
    header = _slots(tier).view(0)[:4096]
    key = ChunkKey(MINE.id, A.prefix_key)
    assert chunkfile.verify(EVEN, key, 8, header, make_transfer(A).buffer) is None
    monkeypatch.setattr(image, "_LARGE_BYTES", (1 << 30) - large_bytes)
    assert [get(tier, ref) for ref in (A, B)] == [HIT] * 2
