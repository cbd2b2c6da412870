"""Tests of object stores that are slow, hang, refuse, lie, and of folders that vanish: no wrong byte, bounded time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from support.redis_server import wait_for
from support.redis_tiers import BOUND_S, LARGE, PAYLOADS, WHOLE, ends, get_large, put_large
from support.s3_relay import Mood, S3Relay
from support.s3_server import S3Server, write_credentials

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError, TierSetupError
from kvstore.testing.harness import MINE
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup
from kvstore.tiers.guards import GuardOptions, guarded, layers
from kvstore.tiers.object import sweep
from kvstore.tiers.object.folder import FolderStore
from kvstore.tiers.object.names import Place

TIMEOUT_S = 1.0
BUCKET = "faults"
REFUSING = [Mood.BROKEN, Mood.BUSY, Mood.EXPIRED, Mood.SKEWED, Mood.HUNG, Mood.GONE]
_prefixes = count()
_opened: list[Tier] = []


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    server.make_bucket(BUCKET)
    yield server
    server.kill()


@pytest.fixture
def relay(s3: S3Server) -> Iterator[S3Relay]:
    with S3Relay(s3.port) as relay:
        yield relay


@pytest.fixture
def url(s3: S3Server, relay: S3Relay) -> str:
    return s3.url(BUCKET, prefix=f"p{next(_prefixes)}", endpoint=f"http://127.0.0.1:{relay.port}")


def open_object(url: str, **options: object) -> Tier:
    given = {"url": url, "timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S, **options}
    _opened.append(open_tier("object", TierSetup(MINE, LARGE, UNBOUNDED_BYTES, given)))
    return _opened[-1]


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-object")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()  # of a test that has failed
    wait_for("the threads end", lambda: not our_threads())


def works_again(tier: Tier) -> bool:
    try:
        return put_large(tier, WHOLE[1]) == [Outcome.STORED] and get_large(tier, WHOLE[1]) is Outcome.HIT
    except TierError:
        return False


@pytest.mark.parametrize(
    "mood",
    [pytest.param(mood, marks=pytest.mark.sweep if mood is Mood.HUNG else (), id=mood.value) for mood in Mood],
)
def test_every_call_ends_and_no_byte_is_wrong(url: str, relay: S3Relay, mood: Mood) -> None:
    """``get_large`` compares the bytes of a hit. After the fault the tier works again by itself."""
    tier = open_object(url)
    assert put_large(tier, *WHOLE[:2]) == [Outcome.STORED] * 2
    relay.mood = mood
    found = [ends(lambda: get_large(tier, WHOLE[0])), ends(lambda: put_large(tier, WHOLE[2]))]
    found += [ends(lambda: tier.get_layers([PAYLOADS[WHOLE[1]]], range(1, 3))), ends(lambda: tier.contains(WHOLE))]
    if mood in REFUSING:
        assert all(isinstance(outcome, TierError) for outcome in found[:2])
    elif mood in (Mood.RESET, Mood.CUT):
        assert isinstance(found[0], TierError)
    elif mood is Mood.FLIPPED:
        assert found[0] is Outcome.CORRUPT
    elif mood is Mood.LOST:
        assert found[0] is Outcome.HIT
        assert isinstance(found[1], TierError)
    elif mood is Mood.FULL:
        assert found[:2] == [Outcome.HIT, [Outcome.FULL]]
    else:
        assert found[:2] == [Outcome.HIT, [Outcome.STORED]]
    for ref in PAYLOADS:
        assert get_large_or_error(tier, ref) is not Outcome.CORRUPT or mood is Mood.FLIPPED
    relay.mood = Mood.FAST
    wait_for("the tier works again", lambda: works_again(tier), BOUND_S)
    tier.close()


def get_large_or_error(tier: Tier, ref: object) -> object:
    return ends(lambda: get_large(tier, ref))


@pytest.mark.parametrize("mood", REFUSING, ids=lambda mood: mood.value)
def test_the_log_cannot_be_read(url: str, relay: S3Relay, mood: Mood) -> None:
    """A start during the fault knows nothing, says so in bounded time, and learns all afterwards."""
    with_chunks = open_object(url)
    put_large(with_chunks, *WHOLE[:2])
    with_chunks.close()
    relay.mood = mood
    tier = open_object(url)
    assert isinstance(ends(tier.check), TierError)
    assert isinstance(ends(lambda: tier.contains(WHOLE[:3])), TierError)
    relay.mood = Mood.FAST
    tier.check()
    assert tier.contains(WHOLE[:3]) == [True, True, False]
    assert get_large(tier, WHOLE[0]) is Outcome.HIT
    tier.close()


@pytest.mark.parametrize("mood", [Mood.HUNG, Mood.BROKEN, Mood.BUSY], ids=lambda mood: mood.value)
def test_close_during_a_fault(url: str, relay: S3Relay, mood: Mood) -> None:
    """``close`` ends in bounded time, also while calls hang."""
    tier = open_object(url)
    put_large(tier, WHOLE[0])
    relay.mood = mood
    calls = [threading.Thread(target=ends, args=(lambda: get_large(tier, WHOLE[0]),)) for _ in range(4)]
    for call in calls:
        call.start()
    ends(tier.close)
    for call in calls:
        call.join(BOUND_S)
        assert not call.is_alive()


def test_a_guarded_tier_recovers(url: str, relay: S3Relay) -> None:
    """The breaker bypasses a store that is down, and uses it again within ten seconds and one look at the log."""
    tier = guarded(open_object(url), GuardOptions(timeout_s=2.0, failures=3, probe_interval_s=3.0, asks_storage=True))
    assert put_large(tier, WHOLE[0]) == [Outcome.STORED]
    relay.mood = Mood.BROKEN
    wait_for(
        "the breaker opens", lambda: isinstance(ends(lambda: get_large(tier, WHOLE[0])), TierError) and not tier.answers
    )
    relay.mood = Mood.FAST
    wait_for("the tier is used again", lambda: ends(lambda: get_large(tier, WHOLE[0])) is Outcome.HIT, 10.0)
    tier.close()


def test_a_store_that_asks_for_a_pause_gets_it(url: str, relay: S3Relay) -> None:
    tier = open_object(url)
    put_large(tier, WHOLE[0])
    relay.mood = Mood.BUSY
    assert isinstance(ends(lambda: get_large(tier, WHOLE[0])), TierError)
    relay.mood = Mood.FAST
    relay.requests.clear()
    error = ends(lambda: get_large(tier, WHOLE[0]))
    assert isinstance(error, TierError)
    assert "pause" in str(error)
    assert not [path for method, path in relay.requests if "safetensors" in path]
    wait_for("the pause is over", lambda: ends(lambda: get_large(tier, WHOLE[0])) is Outcome.HIT)
    tier.close()


def test_damaged_manifests_are_skipped(url: str, s3: S3Server) -> None:
    """The chunks that they name are missing until they are stored again."""
    import obstore

    tier = open_object(url)
    put_large(tier, *WHOLE[:3])
    tier.close()
    client = s3.client(BUCKET)
    names = [found["path"] for page in obstore.list(client, f"p{next(_prefixes) - 1}/") for found in page]
    (manifest,) = [name for name in names if "/log/" in name]
    damaged = bytearray(obstore.get(client, manifest).bytes())
    damaged[-1] ^= 1
    obstore.put(client, manifest, bytes(damaged))
    tier = open_object(url)
    assert tier.contains(WHOLE[:3]) == [False] * 3
    assert put_large(tier, *WHOLE[:3]) == [Outcome.STORED] * 3
    assert get_large(tier, WHOLE[0]) is Outcome.HIT
    tier.close()


def test_an_epoch_that_is_none(url: str, s3: S3Server) -> None:
    """Anything else in its place begins a new epoch."""
    import obstore

    prefix = f"p{next(_prefixes) - 1}"
    obstore.put(s3.client(BUCKET), f"{prefix}/{MINE.id.hex()}/epoch", b"\xff" * 1000)
    tier = open_object(url)
    assert put_large(tier, WHOLE[0]) == [Outcome.STORED]
    assert get_large(tier, WHOLE[0]) is Outcome.HIT
    tier.close()


def test_wrong_keys_are_refused(s3: S3Server, tmp_path: Path) -> None:
    """Keys are not shown, neither in the error nor anywhere else."""
    wrong = tmp_path / "wrong"
    write_credentials(wrong, aws_secret_access_key="mistyped")
    tier = open_object(s3.url(BUCKET, credentials_file=wrong))
    with pytest.raises(TierSetupError, match="refuses these credentials") as caught:
        tier.check()
    assert "mistyped" not in str(caught.value)
    tier.close()
    (tmp_path / "empty").write_text("[other]\n")
    with pytest.raises(ConfigError, match="section"):
        open_object(s3.url(BUCKET, credentials_file=tmp_path / "empty"))


def test_a_certificate_that_nobody_knows(s3: S3Server, tmp_path: Path) -> None:
    import trustme

    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    tier = open_object(s3.url(BUCKET, tls=True, tls_ca=other))
    assert isinstance(ends(tier.check), TierError)
    tier.close()


def test_credentials_that_are_renewed(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read again, so a process need not start again."""
    from kvstore.tiers.object import cloud

    monkeypatch.setattr(cloud, "_REREAD_AFTER", timedelta(seconds=0))
    path = tmp_path / "credentials"
    write_credentials(path, aws_secret_access_key="old")
    tier = open_object(s3.url(BUCKET, prefix=f"p{next(_prefixes)}", credentials_file=path))
    assert isinstance(ends(tier.check), TierError)
    write_credentials(path)
    wait_for("the new ones are used", lambda: not isinstance(ends(tier.check), TierError))
    assert put_large(tier, WHOLE[0]) == [Outcome.STORED]
    tier.close()


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """An unmounted share: no call hangs or lies, nothing is written beneath it, and it is used again later."""
    mount = tmp_path / "mount"
    (mount / "kv").mkdir(parents=True)
    tier = open_object(f"file://{mount}/kv", connect_timeout_s=None)
    put_large(tier, *WHOLE[:2])
    mount.rename(tmp_path / "away")
    found = get_large_or_error(tier, WHOLE[0])
    assert found is Outcome.MISS or isinstance(found, TierError)
    assert isinstance(ends(lambda: put_large(tier, WHOLE[2])), TierError)
    assert not mount.exists()
    (tmp_path / "away").rename(mount)
    wait_for("it works again", lambda: works_again(tier))
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_a_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full share answers FULL, leaves nothing behind, and takes chunks again once there is room."""
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(mount)], check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        tier = open_object(f"file://{mount}/kv", connect_timeout_s=None)
        outcomes = put_large(tier, *WHOLE[:5])
        assert set(outcomes) == {Outcome.STORED, Outcome.FULL}
        held = [ref for ref, outcome in zip(WHOLE, outcomes, strict=False) if outcome is Outcome.STORED]
        assert all(get_large(tier, ref) is Outcome.HIT for ref in held)
        assert not list((mount / "kv/.part").iterdir())
        monkeypatch.setattr(sweep, "GRACE_S", 0.0)
        (mount / "filler").write_bytes(b"")
        with suppress(OSError), (mount / "filler").open("ab", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        report = sweep.sweep(FolderStore(mount / "kv"), sweep.Limits(max_bytes=0))
        assert report.removed_chunks == len(held), "a sweep that cannot write its lock still makes room"
        assert not list((mount / "kv").rglob("*.safetensors"))
        assert put_large(tier, WHOLE[7]) == [Outcome.STORED]
        tier.close()
    finally:
        time.sleep(0.1)
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_half_an_answer_is_read_by_nobody_else(url: str) -> None:
    """A chunk that turns out to be too long leaves bytes on its connection, which is not used again."""
    tier = open_object(url, connections=1)
    assert put_large(tier, *WHOLE[:2]) == [Outcome.STORED] * 2
    store = next(layer for layer in layers(tier))._store  # type: ignore[attr-defined]
    place = Place(tier._log.view().home, WHOLE[0])  # type: ignore[attr-defined]
    with store.open(place.name) as reading:
        assert reading is not None
        assert reading.fill(memoryview(bytearray(100)))
    assert not store._wire._idle
    assert get_large(tier, WHOLE[1]) is Outcome.HIT
    tier.close()
