"""Counts of the scheduler side with real workers: hits add up by tier, and each miss has its reason."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fake_parts import BLOCK, CHUNK, CHUNK_FILE_BYTES, Setup
from support.fake_vllm import FakeVllm
from support.remote import FakeServer
from support.situations import PROMPT, Build

from kvstore.adapters.vllm.telemetry import stats
from kvstore.adapters.vllm.telemetry.stats import RequestStats, SchedulerStats
from kvstore.index.plans import MissReason
from kvstore.model.errors import TierError
from kvstore.ops import metrics
from kvstore.ops.metrics import Tally


def count(vllm: FakeVllm, metric: metrics.Metric, *labels: str) -> int:
    vllm.scheduler.take_tally()
    return int(vllm.scheduler.totals[metric.key(*labels)])


def reasons(vllm: FakeVllm) -> dict[str, int]:
    counted = {reason.value: count(vllm, metrics.MISSES, reason.value) for reason in MissReason}
    return {reason: number for reason, number in counted.items() if number}


def again(vllm: FakeVllm, prompt: list[int] = PROMPT) -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask("again", prompt)
    return vllm.loaded_tokens["again"]


def other(number: int) -> list[int]:
    return [49 - number, *PROMPT[1:]]


def untimed(record: logging.LogRecord) -> str:
    return re.sub(r"in \d+\.\d ms", "in N ms", record.getMessage())


class TestSums:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_hits_by_tier_add_up_to_what_was_loaded(self, build: Build, tmp_path: Path, ranks: int) -> None:
        server = FakeServer()
        first = build(Setup(folder=tmp_path / "first", server=server, ranks=ranks))
        first.ask("warm", PROMPT[: CHUNK + 1])
        first.settle()
        vllm = build(Setup(folder=tmp_path / "second", server=server, ranks=ranks))
        loaded = asked = 0
        for prompt in (PROMPT, PROMPT, other(1), [*PROMPT, 1, 2, 3]):
            asked += len(prompt)
            loaded += again(vllm, prompt)
            vllm.settle()
        tiers = [count(vllm, metrics.HIT_TOKENS, tier) for tier in ("memory", "disk", "remote")]
        assert sum(tiers) == loaded > 0
        assert tiers[0] > 0
        assert tiers[2] == CHUNK
        assert count(vllm, metrics.ASKED_TOKENS) == asked
        assert count(vllm, metrics.LOOKUPS) == 4

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_workers_add_up(self, build: Build, tmp_path: Path, ranks: int) -> None:
        setup = Setup(folder=tmp_path, local_cpu=False, ranks=ranks)
        vllm = build(setup)
        vllm.ask("first", PROMPT)
        vllm.settle()
        again(vllm)
        vllm.settle()
        chunks = count(vllm, metrics.STORED_CHUNKS)
        assert chunks == 4 == count(vllm, metrics.WRITES, "disk", "done")
        assert count(vllm, metrics.LOADED_CHUNKS, "disk") == chunks * ranks
        gathered = sum(worker._mover.counters.bytes_gathered for worker in vllm.workers)
        assert count(vllm, metrics.MOVED_BYTES, "memory", "store") == gathered > 0
        for direction in ("load", "store"):
            assert count(vllm, metrics.MOVED_BYTES, "disk", direction) == chunks * CHUNK_FILE_BYTES * ranks
        tree = vllm.scheduler.totals.as_tree()
        calls = tree["tier_call_seconds"]
        assert isinstance(calls, dict)
        assert {name: timed["count"] for name, timed in calls["disk"].items()} == {
            "load": chunks * ranks,
            "store": chunks * ranks,
        }
        levels = vllm.scheduler.totals.levels()
        disks = [worker._tiers.disk for worker in vllm.workers]
        assert levels["disk_used_bytes"] == sum(disk.used_bytes for disk in disks if disk is not None) > 0
        assert levels["breaker_state|disk"] == 0

    def test_a_preempted_request_counts_once(self, build: Build) -> None:
        vllm = build()
        request = vllm.add("twice", PROMPT, max_tokens=4)
        vllm.step()
        vllm.preempt(request)
        vllm.run()
        assert count(vllm, metrics.LOOKUPS) == 1
        assert count(vllm, metrics.ASKED_TOKENS) == len(PROMPT)
        assert reasons(vllm) == {"never_stored": 1}

    def test_each_event_is_handed_over_once(self, build: Build) -> None:
        vllm = build()
        vllm.ask("first", PROMPT)
        first, second = vllm.scheduler.take_tally(), vllm.scheduler.take_tally()
        assert first.counters[metrics.STORED_CHUNKS.key()] == 4
        assert not second


class TestReasons:
    def test_never_stored_and_whole(self, build: Build) -> None:
        vllm = build()
        vllm.ask("first", PROMPT)
        assert reasons(vllm) == {"never_stored": 1}
        assert again(vllm) == len(PROMPT) - 1
        vllm.ask("tiny", [1] * (BLOCK - 1))
        assert reasons(vllm) == {"never_stored": 1}, "nothing of a prompt that short can be stored"

    def test_evicted(self, build: Build) -> None:
        vllm = build(slots=4)
        for number in range(6):
            vllm.ask(f"{number}", other(number))
        before = reasons(vllm)
        assert vllm.index.counters.evicted_memory
        gone = [number for number in range(6) if again(vllm, other(number)) < len(PROMPT) - 1]
        fresh = {reason: number - before.get(reason, 0) for reason, number in reasons(vllm).items()}
        assert fresh["evicted"] >= 1
        assert sum(fresh.values()) == len(gone)

    def test_evicted_from_memory_only_is_no_miss(self, build: Build, tmp_path: Path) -> None:
        vllm = build(slots=4, folder=tmp_path, max_write_queue=8)
        for number in range(4):
            vllm.ask(f"{number}", other(number))
            vllm.settle()
        assert again(vllm, other(0)) == len(PROMPT) - 1
        assert reasons(vllm) == {"never_stored": 4}

    def test_lost(self, build: Build, tmp_path: Path) -> None:
        setup = Setup(folder=tmp_path, local_cpu=False)
        build(setup).ask("first", PROMPT)
        vllm = build(setup, saves=False)  # else lost chunks would be stored again at once
        for path in vllm.chunk_files():
            path.write_bytes(b"")
        assert again(vllm) == len(PROMPT) - 1, "promised, and computed after all"
        assert count(vllm, metrics.LOST_CHUNKS) == count(vllm, metrics.FAILED_LOADS) == 4
        assert again(vllm) == 0
        assert reasons(vllm) == {"lost": 1}

    def test_removed(self, build: Build, tmp_path: Path) -> None:
        vllm = build(folder=tmp_path)
        vllm.ask("first", PROMPT)
        vllm.settle()
        assert vllm.scheduler.clear() == 4
        vllm.settle()
        assert not vllm.chunk_files(), "also those of an index that is empty now"
        assert again(vllm) == 0
        assert reasons(vllm) == {"never_stored": 1, "removed": 1}

    def test_too_short(self, build: Build) -> None:
        vllm = build(min_retrieve_tokens=len(PROMPT))
        vllm.ask("first", PROMPT)
        again(vllm)
        assert reasons(vllm) == {"never_stored": 1, "too_short": 1}

    def test_not_taken(self, build: Build) -> None:
        vllm = build()
        vllm.ask("first", PROMPT)
        vllm.take = lambda offered: 0
        again(vllm)
        assert reasons(vllm) == {"never_stored": 1, "not_taken": 1}

    def test_a_role_that_does_not_load(self, build: Build) -> None:
        vllm = build(loads=False)
        vllm.ask("first", PROMPT)
        assert reasons(vllm) == {"switched_off": 1}

    def test_remote_tier_down(self, build: Build) -> None:
        server = FakeServer()

        def fail() -> None:
            raise TierError("broken on purpose")

        vllm = build(server=server)
        vllm.ask("first", PROMPT)
        vllm.settle()
        server.before_put = server.before_contains = fail
        for number in range(4):
            vllm.ask(f"{number}", other(number))
            vllm.settle()
        remote = vllm.workers[0]._tiers.remote
        assert remote is not None
        assert not remote.answers
        before = reasons(vllm).get("tier_down", 0)
        vllm.ask("last", other(5))
        assert reasons(vllm)["tier_down"] == before + 1
        assert vllm.scheduler.totals.levels()["breaker_state|remote"] == 2


class TestSwitch:
    def test_off_neither_loads_nor_stores_and_on_does_again(self, build: Build, tmp_path: Path) -> None:
        vllm = build(folder=tmp_path, save_decode=True)
        vllm.ask("first", PROMPT)
        vllm.settle()
        vllm.scheduler.enabled = False
        assert again(vllm) == 0
        vllm.ask("other", other(1), max_tokens=20)
        assert count(vllm, metrics.STORED_CHUNKS) == 4
        assert reasons(vllm) == {"never_stored": 1, "switched_off": 2}
        assert vllm.scheduler.totals.levels()["enabled"] == 0
        vllm.scheduler.enabled = True
        assert again(vllm) == len(PROMPT) - 1
        vllm.settle()
        vllm.assert_nothing_leaked()

    def test_what_was_computed_meanwhile_is_stored_afterwards(self, build: Build) -> None:
        vllm = build(budget=CHUNK)
        vllm.scheduler.enabled = False
        vllm.add("long", PROMPT)
        vllm.step()
        vllm.step()
        vllm.scheduler.enabled = True
        vllm.run()
        assert again(vllm) == len(PROMPT) - 1

    @pytest.mark.parametrize("seed", range(4))
    def test_switching_and_clearing_at_any_time_is_safe(self, build: Build, tmp_path: Path, seed: int) -> None:
        vllm = build(folder=tmp_path, slots=6, run_ahead=1, save_decode=True, seed=seed, budget=20)
        for number in range(12):
            vllm.add(f"{number}", other(vllm.random.randrange(4)), max_tokens=vllm.random.randint(1, 9))
        while vllm.waiting or vllm.running:
            vllm.step()
            chance = vllm.random.random()
            if chance < 0.2:
                vllm.scheduler.enabled = vllm.random.random() < 0.6
            elif chance < 0.3:
                vllm.scheduler.call_soon(vllm.scheduler.clear)
            elif chance < 0.5:
                vllm.forget_local()
        vllm.settle()
        vllm.assert_nothing_leaked()


class TestLog:
    def test_a_line_for_each_request_without_keys_or_tokens(
        self, build: Build, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "kvstore")
        vllm = build()
        vllm.ask("first", PROMPT)
        again(vllm)
        first, second = [untimed(record) for record in caplog.records if record.levelno == logging.DEBUG]
        asked = "57 tokens, 0 of them in vLLM's own cache"
        nothing, hit = "hit 0 (memory 0, disk 0, remote 0)", "hit 56 (memory 56, disk 0, remote 0)"
        assert first == f"request first: {asked}; {nothing} in N ms; 4 chunks stored; miss: never_stored"
        assert second == f"request again: {asked}; {hit} in N ms; 0 chunks stored; miss: none"

    @pytest.mark.parametrize(("every", "said"), [(0, []), (1, ["0", "1", "2", "3"]), (2, ["1", "3"]), (9, [])])
    def test_some_requests_are_told_of_at_info(
        self, caplog: pytest.LogCaptureFixture, every: int, said: list[str]
    ) -> None:
        caplog.set_level(logging.INFO, "kvstore")
        engine_stats = SchedulerStats(BLOCK, BLOCK, sample_every=every)
        engine_stats.log_request("never scheduled", RequestStats())
        for number in range(4):
            engine_stats.log_request(str(number), RequestStats(is_admitted=True))
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"request {n}" for n in said]

    @pytest.mark.parametrize("async_load", [True, False])
    def test_a_wait_ends_with_the_load(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, async_load: bool
    ) -> None:
        """An asynchronous load is waited for; one within a step is part of it."""
        caplog.set_level(logging.DEBUG, "kvstore")
        vllm = build(async_load=async_load)
        vllm.ask("first", PROMPT)
        vllm.settle()
        vllm.forget_local()
        now_s = [0.0]
        monkeypatch.setattr(stats, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        request = vllm.add("again", PROMPT, max_tokens=3)
        while request.state != "finished":
            now_s[0] += 1.0
            vllm.step()
        (line,) = [record.getMessage() for record in caplog.records if "request again" in record.getMessage()]
        waited_ms = float(line.partition(") in ")[2].partition(" ms")[0])
        assert waited_ms % 1000 == 0
        assert (waited_ms > 0) is async_load
        assert waited_ms < now_s[0] * 1000, "what is computed afterwards does not count"

    def test_a_summary_once_a_minute_and_only_if_something_happened(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kvstore")
        engine_stats, tally = SchedulerStats(BLOCK, BLOCK), Tally()
        tally.count(metrics.LOOKUPS.key(), 2)
        tally.count(metrics.ASKED_TOKENS.key(), 100)
        tally.count(metrics.HIT_TOKENS.key("disk"), 64)
        tally.count(metrics.MOVED_BYTES.key("disk", "load"), 3e9)
        tally.count(metrics.WRITES.key("disk", "failed"), 1)
        tally.count(metrics.WRITES.key("disk", "dropped"), 2)
        tally.count(metrics.REFUSED_CHUNKS.key(), 3)
        engine_stats.summarize(0.0)
        engine_stats.add(tally)
        engine_stats.take(None)
        for now_s in (59.0, 61.0, 200.0):
            engine_stats.summarize(now_s)
        (record,) = caplog.records
        assert record.getMessage() == (
            "last 61 s: 2 requests asked for 100 tokens, hit 64 (memory 0, disk 64, remote 0); "
            "0 chunks stored, 0 evicted, 5 dropped, 3.00 GB moved; 1 failures"
        )


def test_loads_and_stores_have_names_in_a_profile(build: Build) -> None:
    vllm = build()
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        vllm.ask("first", PROMPT)
        again(vllm)
    assert {"kvstore::load", "kvstore::store"} <= {event.name for event in profile.function_events or ()}
