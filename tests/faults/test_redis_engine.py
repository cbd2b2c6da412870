"""Tests of engines over a real Redis: shared chunks, a start without it, and its return."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import check_idle, check_return
from support.gate import HANG_GUARD_S, Gate
from support.parting import PROMPTS, check_ages, check_strangers
from support.redis_server import RedisServer, running
from support.redis_tiers import values
from support.rig import Rig, tokens_of
from support.schedules import schedules

from kvstore.adapters.vllm.plan import ReqMeta, StepPlan, StepResult
from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.engine import opening
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers.base import Tier
from kvstore.tiers.redis.calls import Calls
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.redis.trails import Exchange, TrailSets
from kvstore.transfer.mover import LoadJob, StoreJob, as_block_ids

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", ["user engine on >secret ~* &* +@all"])
    with running(server):
        yield server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), ["user engine on >secret ~* &* +@all"])
    with running(server):
        yield server


def options_of(server: RedisServer, **others: object) -> RemoteOptions:
    settings: dict[str, object] = {
        "username": "engine",
        "password": "secret",
        "timeout_s": 2.0,
        "connect_timeout_s": 1.0,
    }
    return RemoteOptions(f"redis://127.0.0.1:{server.port}", settings, hold_s=0.2, max_queue=64, **others)  # type: ignore[arg-type]


def test_engines_share_what_one_has_computed(rig: Rig, server: RedisServer) -> None:
    with rig.open(remote=options_of(server)) as engine:
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(WAIT_S)
        check_idle(engine)
    with rig.open(remote=options_of(server)) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.clear(TOKENS) == 3
    with rig.open(remote=options_of(server)) as engine:
        assert engine.lookup(TOKENS) == 0


@schedules(20)
@given(prompts=st.lists(PROMPTS, max_size=6))
def test_strangers_find_what_they_have_in_common(shared_server: RedisServer, prompts: list[list[int]]) -> None:
    rig = Rig()
    shared_server.admin().flushall()
    check_strangers(rig, lambda: rig.open(slots=64, remote=options_of(shared_server)), prompts)


def test_old_and_new_engines_share_a_redis(rig: Rig, server: RedisServer) -> None:
    """Old and new engines find each other's chunks by their keys."""

    def age(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(RedisTier, "nearest", Tier.nearest)
        patch.setattr(TrailSets, "tell", lambda *_: Exchange())

    check_ages(lambda: rig.open(remote=options_of(server)), rig, age)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("down", "refused"),
        ("password", "password"),
        ("database", "database|DB index"),
        ("replica", "replica|read only|writes"),
        ("plain", "TLS|SSL|certificate"),
    ],
)
def test_a_required_redis_that_cannot_be_used(rig: Rig, server: RedisServer, broken: str, says: str) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    settings: dict[str, object] = {"username": "engine", "password": "secret", "timeout_s": 2.0}
    if broken == "down":
        server.kill()
    elif broken == "password":
        settings["password"] = "wrong"
    elif broken == "database":
        url += "/99"
    elif broken == "replica":
        server.admin().replicaof("127.0.0.1", 1)
    elif broken == "plain":
        url = url.replace("redis://", "rediss://")
    with pytest.raises(TierError, match=f"(?i){says}") as caught:
        rig.open(remote=RemoteOptions(url, settings, required=True))
    assert "secret" not in str(caught.value)


def test_a_start_without_redis_and_its_return(
    rig: Rig, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine logs one warning, works without Redis, and then with it."""
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.2)
    server.kill()
    check_return(rig, caplog, options_of(server), server.start)


@pytest.fixture
def slow_scan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Make Redis act as with so many keys that a SCAN of all of them does not end before the gate is opened."""
    gate = Gate()
    monkeypatch.setattr(Calls, "pages", gate.before(Calls.pages))
    yield gate
    gate.open()


def test_a_slow_scan_holds_up_no_store(rig: Rig, server: RedisServer, slow_scan: Gate) -> None:
    with (
        rig.open(remote=options_of(server, lookup_timeout_s=0.05)) as engine,
        ThreadPoolExecutor(1) as beside,
    ):
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(WAIT_S)
        old = set(values(server))
        rig.version = 1
        resetting = beside.submit(engine.reset_cache)
        assert slow_scan.reached.wait(HANG_GUARD_S)
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40
        assert not resetting.done()
        assert set(values(server)) == old, "nothing has been deleted yet, and nothing stored before that"
        slow_scan.open()
        resetting.result(HANG_GUARD_S)
        assert engine.flush(WAIT_S)
        assert len(values(server)) == len(old)
        assert not old & set(values(server))


def test_a_slow_scan_holds_up_no_step(server: RedisServer, slow_scan: Gate) -> None:
    cache = torch.arange(16 * 8, dtype=torch.int64).reshape(16, 1, 4, 2)
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    worker = StoreWorker(paged, Namespace({"model": "one"}), EngineOptions(4 * 4096, remote=options_of(server)))
    ref = ChunkRef(b"k" * 16, 2)
    save = ReqMeta("store", stores=[StoreJob(StoreStep(ref, 0, (Place.REMOTE,)), as_block_ids([1, 2]))])
    load = ReqMeta("load", loads=[LoadJob(LoadStep(ref, 0, Place.MEMORY), as_block_ids([7, 5]), 0)])

    def carry_out(plan: StepPlan) -> StepResult | None:
        worker.begin_step(plan)
        worker.load()
        worker.store()
        report = worker.take_report()
        return None if report is None else report.steps.get(plan.number)

    carry_out(StepPlan(1, 0, [save]))
    assert worker._mover.flush(WAIT_S)
    old = set(values(server))
    assert old
    carry_out(StepPlan(2, 1, [], epoch="new"))
    assert slow_scan.reached.wait(HANG_GUARD_S)
    stored, loaded = carry_out(StepPlan(3, 2, [save])), carry_out(StepPlan(4, 3, [load]))
    assert stored is not None
    assert loaded is not None
    assert not stored.failed_stores | loaded.failed_loads
    assert set(values(server)) == old
    slow_scan.open()
    assert worker._mover.flush(WAIT_S)
    assert len(values(server)) == len(old)
    assert not old & set(values(server))
    worker.close()
