"""Lookups in an engine's trace: what they found, and what was special about their requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.situations import PROMPT, Build, again

from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.model.chunks import Outcome
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.policies.traces import LookedUp, Request, Tiers, Timed, read_records


def records(vllm: FakeVllm, trace: Path) -> list[object]:
    vllm.settle()
    vllm.scheduler.close()
    return [record.what if isinstance(record, Timed) else record for record in read_records(trace)]


def lookups(vllm: FakeVllm, trace: Path) -> list[LookedUp]:
    return [record for record in records(vllm, trace) if isinstance(record, LookedUp)]


def test_a_lookup_has_what_it_found_and_the_keys_that_were_missing(build: Build, tmp_path: Path) -> None:
    vllm = build(trace=tmp_path / "trace")
    vllm.ask("first", PROMPT[: CHUNK + 2 * BLOCK])
    again(vllm)
    told = records(vllm, tmp_path / "trace")
    first, second = (record for record in told if isinstance(record, LookedUp))
    assert (first.num_tokens, first.found_tokens, first.reason) == (CHUNK + 2 * BLOCK, 0, "never_stored")
    assert len(first.missing) == CHUNK // BLOCK
    assert second.hit_tokens == {"memory": CHUNK + 2 * BLOCK}
    assert len(second.missing) == 2, "the rest of the second chunk"
    (mine,) = (record for record in told if isinstance(record, Request) and record.request_id == "again")
    assert second.missing[-1] == mine.keys[1], "it ends with the chunk's own key"
    (tiers,) = (record for record in told if isinstance(record, Tiers))
    assert (tiers.slots, tiers.has_remote) == (16, False)
    stored = {record.key for record in told if isinstance(record, ChunkEvent) and record.fate is Fate.STORED}
    assert stored >= set(mine.keys)


def test_a_request_is_recorded_once(build: Build, tmp_path: Path) -> None:
    """vLLM schedules a preempted one again."""
    vllm = build(trace=tmp_path / "trace")
    request = vllm.add("twice", PROMPT, max_tokens=4)
    vllm.step()
    vllm.preempt(request)
    vllm.run()
    assert [lookup.request_id for lookup in lookups(vllm, tmp_path / "trace")] == ["twice"]


@pytest.mark.parametrize(
    ("setup", "params", "notes"),
    [
        (Setup(), NO_PARAMS, []),
        (Setup(), RequestParams(skip_load=True, skip_save=True), ["skip_load", "skip_save"]),
        (Setup(), WITHOUT_CACHE, ["without_cache"]),
        (Setup(), RequestParams(max_save_tokens=CHUNK), ["max_save_tokens"]),
        (Setup(loads=False), NO_PARAMS, ["engine_loads_nothing"]),
        (Setup(saves=False), NO_PARAMS, ["engine_saves_nothing"]),
        (Setup(priority_limit=-1), NO_PARAMS, ["priority_limit"]),
    ],
    ids=["nothing", "asks for nothing", "a wrong field", "its front", "loads not", "saves not", "low priority"],
)
def test_what_was_special(build: Build, tmp_path: Path, setup: Setup, params: RequestParams, notes: list[str]) -> None:
    vllm = build(setup, trace=tmp_path / "trace")
    vllm.ask("one", PROMPT, params=params)
    (lookup,) = lookups(vllm, tmp_path / "trace")
    assert list(lookup.notes) == notes


def test_a_cache_that_was_switched_off(build: Build, tmp_path: Path) -> None:
    vllm = build(trace=tmp_path / "trace")
    vllm.scheduler.enabled = False
    vllm.ask("one", PROMPT)
    (lookup,) = lookups(vllm, tmp_path / "trace")
    assert (lookup.reason, list(lookup.notes)) == ("switched_off", ["disabled"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_without_room_and_one_that_fails_differ(build: Build, tmp_path: Path, ranks: int) -> None:
    """It is enough that one rank's disk has no room."""
    vllm = build(trace=tmp_path / "trace", folder=tmp_path / "disk", ranks=ranks)
    disk = vllm.workers[-1]._tiers.disk
    assert disk is not None
    disk.put = lambda transfers: [Outcome.FULL] * len(transfers)  # type: ignore[method-assign]
    vllm.ask("full", PROMPT[: CHUNK + 1])
    vllm.settle()
    disk.put = lambda transfers: [Outcome.FAILED] * len(transfers)  # type: ignore[method-assign]
    vllm.ask("fails", [*reversed(PROMPT[: CHUNK + 1])])
    told = [record for record in records(vllm, tmp_path / "trace") if isinstance(record, ChunkEvent)]
    disk_events = [(event.fate, event.cause) for event in told if event.place == "disk"]
    assert disk_events == [(Fate.REFUSED, Cause.FULL), (Fate.FAILED, Cause.NONE)]
