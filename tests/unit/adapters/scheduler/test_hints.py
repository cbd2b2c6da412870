"""Lifetimes of chunks: times to live, pins, and retention."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK
from support.fake_vllm import FakeVllm
from support.redis_server import wait_for
from support.remote import FakeServer
from support.situations import PROMPT, Build, again, in_memory

from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.config import StoreConfig
from kvstore.format.chunkfile import parse_chunk_name
from kvstore.model.keys import NO_EXTRAS
from kvstore.ops.metrics import HINTS


def with_ends(vllm: FakeVllm) -> int:
    """Count the chunks on disk that have a time to live."""
    names = [parse_chunk_name(path.parent.name, path.name) for path in vllm.chunk_files()]
    return sum(name is not None and name.until_s is not None for name in names)


def test_a_time_to_live(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.settle()
    assert len(vllm.chunk_files()) == 4
    now_s += 59
    vllm.forget_local()
    vllm.ask("in time", PROMPT, params=RequestParams(skip_save=True))
    assert vllm.loaded_tokens["in time"] == len(PROMPT) - 1
    now_s += 2
    vllm.forget_local()
    vllm.ask("late", PROMPT)
    assert vllm.loaded_tokens["late"] == 0
    vllm.settle()
    assert len(vllm.chunk_files()) == 4
    assert not with_ends(vllm), "what is computed anew has no time to live"
    vllm.assert_nothing_leaked()


def test_a_time_to_live_is_not_sent_to_others(build: Build, tmp_path: Path) -> None:
    server = FakeServer()
    vllm = build(folder=tmp_path, server=server)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.settle()
    assert len(vllm.chunk_files()) == 4
    assert not server.all_chunks()
    vllm.ask("without", PROMPT)
    vllm.settle()
    assert len(server.all_chunks()) == 4
    wait_for("the files have no end", lambda: not with_ends(vllm))


@pytest.mark.parametrize(("ttl_s", "expired"), [(10, True), (1000, False), (None, False)])
def test_who_stores_it_for_longer_keeps_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: float | None, *, expired: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.ask("second", PROMPT, params=RequestParams(ttl_s=ttl_s))
    vllm.settle()
    assert len(vllm.chunk_files()) == 4
    wait_for("the files have their ends", lambda: with_ends(vllm) == (4 if ttl_s else 0))
    now_s += 61
    assert again(vllm) == (0 if expired else len(PROMPT) - 1)
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("ttl_s", "left"), [(10, 0), (1000, len(PROMPT) - 1), (None, len(PROMPT) - 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_time_to_live_after_a_restart(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: float | None, left: int, ranks: int
) -> None:
    vllm = build(folder=tmp_path, ranks=ranks)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.settle()
    vllm.ask("second", PROMPT, params=RequestParams(ttl_s=ttl_s))
    vllm.settle()
    vllm.close()
    real = time.time
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.hints.time.time", lambda: real() + 61)
    vllm = build(folder=tmp_path, ranks=ranks)
    assert again(vllm) == left
    vllm.settle()
    for rank in range(ranks):
        assert len(vllm.chunk_files(rank)) == 4
    wait_for("what is asked for without a time to live has no end", lambda: not with_ends(vllm))
    vllm.assert_nothing_leaked()


def test_a_tail_that_stays_is_not_given_up_for_a_chunk_that_goes(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.ask("longer", [*PROMPT, *range(CHUNK)], params=RequestParams(ttl_s=60))
    now_s += 61
    assert again(vllm) == len(PROMPT) - 1


def test_a_time_to_live_counts_where_nobody_looks_anything_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(loads=False)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    now_s += 61
    vllm.ask("other", range(100, 100 + CHUNK))
    assert vllm.index.counters.expired == 4


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("pin", [True, None])
def test_a_pinned_prompt_is_not_evicted(build: Build, run_ahead: int, *, pin: bool | None) -> None:
    vllm = build(slots=8, run_ahead=run_ahead, gpu_blocks=200, budget=CHUNK)
    vllm.ask("first", PROMPT, params=RequestParams(pin=pin))
    vllm.run()
    for number in range(6):
        vllm.ask(f"other {number}", [100 + number, *range(3 * CHUNK - 1)])
    assert again(vllm) == (len(PROMPT) - 1 if pin else 0)
    vllm.ask("unpin", PROMPT, params=replace(WITHOUT_CACHE, pin=False))
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("first", ["longer", "shorter"])
def test_a_pin_of_a_prompt_that_ends_inside_a_chunk_holds_the_chunk(build: Build, tmp_path: Path, first: str) -> None:
    vllm = build(slots=12, gpu_blocks=200, folder=tmp_path)
    longer = [*PROMPT, *range(200, 200 + CHUNK)]
    if first == "longer":
        vllm.ask("longer", longer)
    vllm.ask("pins", PROMPT, params=RequestParams(pin=True))
    vllm.settle()
    if first == "shorter":
        vllm.ask("longer", longer)
        vllm.settle()
    ends = len(PROMPT) - 1
    assert ends % CHUNK, "it ends inside"
    assert len(vllm.chunk_files()) == len(longer) // CHUNK + 1, "and has no file of its own"
    for number in range(6):
        vllm.ask(f"other {number}", [100 + number, *range(3 * CHUNK - 1)])
    assert sum(vllm.scheduler.find(PROMPT, NO_EXTRAS).values()) == ends
    assert again(vllm) == ends
    vllm.ask("unpin", PROMPT, params=replace(WITHOUT_CACHE, pin=False))
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_pin_waits_for_whoever_stores_the_same(build: Build, *, save_decode: bool) -> None:
    vllm = build(budget=1000, save_decode=save_decode)
    vllm.add("stores", PROMPT)
    vllm.add("pins", PROMPT, params=RequestParams(pin=True))
    vllm.settle()
    assert sum(chunk.uses for chunk in vllm.index._chunks.values()) == 4
    vllm.ask("unpin", PROMPT, params=replace(WITHOUT_CACHE, pin=False))
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_pin_ends_with_its_time_unless_it_is_renewed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(slots=8, gpu_blocks=200)
    longest_s = StoreConfig().pin_max_secs
    vllm.ask("first", PROMPT, params=RequestParams(pin=True))
    now_s += longest_s - 1
    vllm.ask("renewed", PROMPT, params=RequestParams(pin=True))
    now_s += longest_s - 1
    vllm.ask("other", range(100, 100 + CHUNK))
    assert vllm.index.leases == 1
    now_s += 1
    vllm.ask("another", range(200, 200 + CHUNK))
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_pins_hold_half_of_the_pool_and_end_with_new_weights(build: Build) -> None:
    vllm = build(slots=8, gpu_blocks=200)
    for number in range(3):
        vllm.ask(f"{number}", [100 + number, *range(3 * CHUNK - 1)], params=RequestParams(pin=True))
    assert sum(chunk.uses for chunk in vllm.index._chunks.values()) == 4
    vllm.reset(preempt=True)
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("retain_s", [60.0, None])
def test_a_retained_prompt_stays_on_disk(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ahead: int, retain_s: float | None
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(slots=8, run_ahead=run_ahead, gpu_blocks=200, folder=tmp_path, disk_chunks=16)
    vllm.ask("first", PROMPT, params=RequestParams(retain_s=retain_s))
    crowd_out(vllm, 0)
    vllm.forget_local()
    vllm.ask("in time", PROMPT, params=RequestParams(skip_save=True))
    assert vllm.loaded_tokens["in time"] == (len(PROMPT) - 1 if retain_s else 0)
    now_s += 61
    vllm.ask("advances", range(100, 100 + CHUNK))
    assert vllm.index.retained == 0
    for number in (20, 40):
        crowd_out(vllm, number)
    assert again(vllm) == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


def crowd_out(vllm: FakeVllm, first: int) -> None:
    """Ask for prompts that fill the disk, each twice, or the policy would refuse the later ones."""
    for number in range(first, first + 12):
        for turn in range(2):
            vllm.ask(f"other {number} {turn}", [100 + number, *range(3 * CHUNK - 1)])
            vllm.settle()


def test_retention_that_a_client_ends(build: Build, tmp_path: Path) -> None:
    vllm = build(folder=tmp_path, disk_chunks=16)
    vllm.ask("first", PROMPT, params=RequestParams(retain_s=60.0))
    vllm.settle()
    assert vllm.index.retained == 4
    vllm.ask("done", PROMPT, params=RequestParams(retain_s=0.0))
    vllm.settle()
    assert vllm.index.retained == 0
    vllm.ask("again", PROMPT, params=RequestParams(retain_s=0.0))
    vllm.settle()
    vllm.scheduler.take_tally()
    results = [vllm.scheduler.totals[HINTS.key("retain", result)] for result in ("done", "partly", "refused")]
    assert results == [2, 0, 1]
    vllm.assert_nothing_leaked()
    vllm.close()
    assert build(folder=tmp_path, disk_chunks=16).index.retained == 0


def test_clients_that_retain_everything_stay_within_their_shares(build: Build, tmp_path: Path) -> None:
    vllm = build(slots=8, gpu_blocks=200, folder=tmp_path, disk_chunks=32)
    for number in range(30):
        prompt = [100 + number, *range(3 * CHUNK - 1)]
        vllm.ask(f"{number}", prompt, salt="greedy", params=RequestParams(retain_s=1e6))
        vllm.settle()
        assert vllm.index.retained <= 8
    for salt in "abc":
        vllm.ask(salt, PROMPT, salt=salt, params=RequestParams(retain_s=1e6))
        vllm.settle()
    assert vllm.index.retained == 16, "half of the disk, of all together"
    vllm.scheduler.take_tally()
    results = [vllm.scheduler.totals[HINTS.key("retain", result)] for result in ("done", "partly", "refused")]
    assert sum(results) == 33
    assert all(results)
    vllm.reset(preempt=True)
    assert vllm.index.retained == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("hint", ["drop", "demote", None])
def test_what_a_client_gives_up_goes_first(build: Build, tmp_path: Path, hint: str | None, run_ahead: int) -> None:
    """Demoted, it stays on disk."""
    vllm = build(slots=12, gpu_blocks=200, budget=1000, folder=tmp_path, disk_chunks=13, run_ahead=run_ahead)
    prompts = [[number, *PROMPT[1:]] for number in range(100, 104)]
    for number, prompt in enumerate(prompts):
        hints = {"drop": RequestParams(drop=True), "demote": RequestParams(demote=True)}
        vllm.ask(f"{number}", prompt, params=hints.get(hint or "", NO_PARAMS) if number == 1 else NO_PARAMS)
        vllm.settle()
    ends = len(PROMPT) - 1
    assert [in_memory(vllm, prompt) == ends for prompt in prompts] == [bool(hint), not hint, True, True]
    found = [sum(vllm.scheduler.find(prompt, NO_EXTRAS).values()) == ends for prompt in prompts]
    assert found == [bool(hint), hint != "drop", True, True]
    vllm.scheduler.take_tally()
    assert not hint or vllm.scheduler.totals[HINTS.key(hint, "done")] == 1
    assert again(vllm, prompts[1][: 2 * CHUNK + 1]) in (0, CHUNK, 2 * CHUNK)
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("hint", ["drop", "demote"])
def test_what_another_sequence_has_is_not_given_up(build: Build, tmp_path: Path, hint: str) -> None:
    """Its last chunk holds the end of the prompt, which has no chunk of its own."""
    vllm = build(slots=12, gpu_blocks=200, budget=1000, folder=tmp_path)
    vllm.ask("theirs", PROMPT[: 3 * CHUNK + 1])
    vllm.settle()
    hints = RequestParams(drop=True) if hint == "drop" else RequestParams(demote=True)
    vllm.ask("ours", [*PROMPT[: 2 * CHUNK + BLOCK], 99], params=hints)
    vllm.settle()
    assert not any(order._given_up for order in vllm.index._orders)


@pytest.mark.parametrize(("away_s", "is_there"), [(30.0, True), (61.0, False), (-1e6, True)])
def test_retention_outlives_a_restart(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_s: float, *, is_there: bool
) -> None:
    """It ends at its time on the wall, and a clock that is set back does not make it longer than what is allowed."""
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.hints.time.time", lambda: 1e9)
    vllm = build(slots=8, gpu_blocks=200, folder=tmp_path, disk_chunks=16)
    vllm.ask("first", PROMPT, params=RequestParams(retain_s=60.0))
    vllm.settle()
    vllm.ask("another", range(100, 100 + CHUNK))
    vllm.settle()
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.hints.time.time", lambda: 1e9 + away_s)
    vllm = build(slots=8, gpu_blocks=200, folder=tmp_path, disk_chunks=16)
    assert vllm.index.retained == (4 if is_there else 0)
    for number in (0, 20):
        crowd_out(vllm, number)
    assert again(vllm) == (len(PROMPT) - 1 if is_there else 0)
    longest_s = max((stay.until_s for stay in vllm.index._disk.retained._stays.values()), default=0.0)
    assert longest_s <= vllm.index._chunks.now_s + StoreConfig().retain_max_secs
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_nothing_has_to_follow_a_request_that_retains(build: Build, tmp_path: Path, run_ahead: int) -> None:
    """It stores nothing, and vLLM is idle after it, but the workers hear of the retention."""
    vllm = build(folder=tmp_path, disk_chunks=16, run_ahead=run_ahead)
    vllm.ask("stores", PROMPT)
    vllm.settle()
    vllm.ask("retains", PROMPT, params=RequestParams(retain_s=60.0))
    assert build(folder=tmp_path, disk_chunks=16).index.retained == 4
