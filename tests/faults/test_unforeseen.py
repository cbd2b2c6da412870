"""Tests of unexpected errors of a tier: they count as its failures, are logged with a traceback, and end no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_parts import CHUNK, Setup
from support.fake_vllm import one_after_the_other
from support.rig import FakeTier
from support.wrapped import HANG_GUARD_S, HIT, ref_of, transfer

from kvstore.model.errors import ClosedError, InvalidCallError, KVStoreError, TierError
from kvstore.testing.harness import MINE
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import BreakerState, Guard, GuardOptions, Statistics, find, guarded

PROMPT = [number % 50 for number in range(6 * CHUNK + 3)]
CALLS: dict[str, Callable[[Guard], Any]] = {
    "contains": lambda tier: tier.contains([ref_of(1)]),
    "nearest": lambda tier: tier.nearest([b"trail"]),
    "get": lambda tier: tier.get([transfer(1)]),
    "get_layers": lambda tier: tier.get_layers([transfer(1)], range(1)),
    "borrow": lambda tier: tier.borrow([ref_of(1)]),
    "put": lambda tier: tier.put([transfer(1)]),
    "remove": lambda tier: tier.remove([ref_of(1)]),
    "clear": lambda tier: tier.clear(),
    "reset": lambda tier: tier.reset(MINE),
    "scan": lambda tier: tier.scan(),
    "trails": lambda tier: tier.trails(),
    "drop_spares": lambda tier: tier.drop_spares(1),
}
LISTS = ("contains", "nearest", "get", "get_layers", "put")  # answers about each chunk


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def guard(tier: FakeTier) -> Iterator[Guard]:
    guard = Guard(tier, HANG_GUARD_S, threads=1)
    yield guard
    guard.close()


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), TimeoutError(), RecursionError()], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_call_raises_is_an_error_of_the_tier(
    guard: Guard, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeTier, name, raising(error))
    for _ in range(2):
        with pytest.raises(TierError, match=f"{name} of the fake tier raised {type(error).__name__}") as caught:
            CALLS[name](guard)
        assert caught.value.__cause__ is error
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize("error", [TierError("broken"), ClosedError("closed"), InvalidCallError("a bad buffer")])
def test_errors_that_the_contract_knows_pass(
    tier: FakeTier, guard: Guard, error: KVStoreError, caplog: pytest.LogCaptureFixture
) -> None:
    tier.before_get = raising(error)
    with pytest.raises(type(error)) as caught:
        guard.get([transfer(1)])
    assert caught.value is error
    assert not caplog.records


@pytest.mark.parametrize("name", LISTS)
def test_an_answer_about_too_few_chunks_is_an_error_of_the_tier(
    guard: Guard, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTier, name, lambda *_: [])
    with pytest.raises(TierError, match="answered for 0 chunks, not for 1"):
        CALLS[name](guard)


def test_they_count_for_the_breaker() -> None:
    tier = FakeTier()
    tier.put([transfer(1)])
    tier.before_get = raising(ValueError("odd"))
    disk = guarded(tier, GuardOptions(failures=2, probe_interval_s=0.0))
    for _ in range(2):
        with pytest.raises(TierError):
            disk.get([transfer(1)])
    assert not disk.answers
    statistics = find(disk, Statistics)
    assert statistics is not None
    assert statistics.errors == 2
    tier.before_get = lambda: None
    assert disk.get([transfer(1)]) == [HIT]
    assert disk.state is BreakerState.CLOSED
    disk.close()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("error", [ValueError("odd"), InvalidCallError("a bad buffer")], ids=["defect", "ours"])
def test_an_engine_goes_on(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    with one_after_the_other(Setup(folder=tmp_path, async_load=is_async, async_save=True)) as build:
        vllm = build()
        vllm.ask("first", PROMPT)
        vllm.settle()
        vllm = build()
        monkeypatch.setattr(DiskTier, "get", raising(error))
        assert vllm.ask("again", PROMPT).state == "finished"
        monkeypatch.setattr(DiskTier, "put", raising(error))
        monkeypatch.setattr(DiskTier, "remove", raising(error))
        assert vllm.ask("other", PROMPT[1:]).state == "finished"
        vllm.settle()
