"""``kvstore why`` over traces of simulated engines: each kind of miss is explained by what had happened."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_groups import FakeGroups, GroupSetup
from support.fake_parts import CHUNK, Setup
from support.fake_scheduler import FakeScheduler
from support.fake_vllm import FakeVllm, one_after_the_other
from support.gate import HANG_GUARD_S
from support.remote import FakeServer
from support.situations import PLAIN, PROMPT

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.model.errors import TierError
from kvstore.model.history import ChunkEvent, Fate
from kvstore.policies.recorder import TraceRecorder
from kvstore.policies.traces import LookedUp

Build = Callable[..., FakeVllm]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def build(trace: Path) -> Iterator[Build]:
    """Return a function that makes an engine that records a trace."""
    with one_after_the_other(PLAIN) as build_:
        yield lambda setup=PLAIN, **how: build_(replace(setup, trace=trace, **how))


@pytest.fixture
def explain(trace: Path, run_json: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that closes an engine and returns the explanation of one of its requests."""

    def explain_(vllm: FakeVllm, request: str = "again") -> dict[str, Any]:
        vllm.scheduler.close()
        code, tree = run_json("why", request, trace)
        assert code == 0, tree
        found: dict[str, Any] = tree
        return found

    return explain_


def ask(vllm: FakeScheduler, name: str, prompt: list[int] = PROMPT, **how: Any) -> None:
    vllm.forget_local()
    vllm.ask(name, prompt, **how)
    vllm.settle()


def other(number: int) -> list[int]:
    return [40 - number, *PROMPT[1:]]


def test_a_hit(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "first")
    ask(vllm, "again")
    told = explain(vllm)
    assert (told["reason"], told["hit_tokens"], told["advice"]) == ("", {"memory": len(PROMPT) - 1}, "")
    assert "nothing was missed" in told["because"]


def test_the_eviction_and_its_reason(build: Build, explain: Any) -> None:
    """The size that would have been enough is named, too."""
    vllm = build(slots=4)
    ask(vllm, "first")
    ask(vllm, "greedy", other(1))
    ask(vllm, "again")
    told = explain(vllm)
    assert told["reason"] == "evicted"
    assert "evicted from memory in favour of a chunk of request greedy" in told["because"]
    assert "max_local_cpu_size from 0.0000153 to 0.0000306 GiB" in told["advice"], "eight chunks, and four fit"
    assert "local_disk" in told["advice"]
    stored, evicted = told["history"][:2]
    assert "stored in memory" in stored
    assert "evicted from memory" in evicted


def test_the_disk_did_not_take_it(build: Build, explain: Any, tmp_path: Path) -> None:
    vllm = build(slots=4, folder=tmp_path / "disk", disk_chunks=64, max_write_queue=1)
    ask(vllm, "first")
    ask(vllm, "greedy", other(1))
    ask(vllm, "again", PROMPT)
    told = explain(vllm)
    assert told["reason"] == "evicted"
    assert "waiting to be written to the disk" in told["because"]
    assert "max_write_queue" in told["advice"]


def test_the_tier_failed(build: Build, explain: Any) -> None:
    server = FakeServer()

    def fail() -> None:
        raise TierError("broken on purpose")

    server.before_put = fail
    vllm = build(slots=4, server=server)
    ask(vllm, "first", PROMPT[: CHUNK + 1])
    server.before_put = lambda: None
    for number in range(3):
        ask(vllm, f"greedy {number}", other(number))
    ask(vllm, "again", PROMPT[: CHUNK + 1])
    told = explain(vllm)
    assert told["reason"] == "evicted"
    assert "could not be written to the remote tier" in told["because"]
    assert "look at vLLM's log" in told["advice"]


def test_the_remote_tier_evicted_it(build: Build, explain: Any) -> None:
    server = FakeServer()
    vllm = build(slots=4, server=server, hold_s=0.0)
    ask(vllm, "first", PROMPT[: CHUNK + 1])
    for number in range(3):
        ask(vllm, f"greedy {number}", other(number))
    server.lose(server.all_chunks())
    ask(vllm, "again", PROMPT[: CHUNK + 1])
    told = explain(vllm)
    assert told["reason"] == "evicted"
    assert "the remote tier had it once" in told["because"]
    assert "make the remote tier larger" in told["advice"]


def test_memory_refused_it(build: Build, explain: Any) -> None:
    """A prompt never drives out its own front."""
    vllm = build(slots=2)
    ask(vllm, "first")
    ask(vllm, "again")
    told = explain(vllm)
    assert (told["reason"], told["found_tokens"]) == ("refused", 2 * CHUNK)
    assert "the front of its own prompt" in told["because"]
    assert "max_local_cpu_size" in told["advice"]


@pytest.mark.parametrize(
    ("params", "note"),
    [(RequestParams(skip_save=True), "skip_save"), (RequestParams(max_save_tokens=CHUNK), "max_save_tokens")],
    ids=["not at all", "its front"],
)
def test_the_request_before_did_not_want_to_be_stored(
    build: Build, explain: Any, params: RequestParams, note: str
) -> None:
    vllm = build()
    ask(vllm, "shy", params=params)
    ask(vllm, "again")
    told = explain(vllm)
    assert told["reason"] == "not_stored"
    assert "request shy had the same tokens" in told["because"]
    assert note in told["because"]


def test_a_request_that_does_not_load(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "first")
    ask(vllm, "again", params=RequestParams(skip_load=True))
    told = explain(vllm)
    assert (told["reason"], told["notes"]) == ("switched_off", ["skip_load"])
    assert "skip_load" in told["because"]


def test_a_prompt_that_departs_from_an_earlier_one(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "near")
    ask(vllm, "again", [*PROMPT[: 2 * CHUNK + 6], *range(100, 140)])
    told = explain(vllm)
    assert (told["reason"], told["found_tokens"]) == ("never_stored", 2 * CHUNK + 4)
    assert "near" in told["because"]
    assert f"has the first {2 * CHUNK + 4}, and differs or ends before token {3 * CHUNK}" in told["because"]


def test_the_first_of_its_kind(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "first")
    ask(vllm, "again", other(1))
    told = explain(vllm)
    assert (told["reason"], told["history"]) == ("never_stored", [])
    assert "no request of this trace began with these tokens" in told["because"]


def test_an_operator_removed_it(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "first")
    vllm.scheduler.clear()
    ask(vllm, "again")
    told = explain(vllm)
    assert told["reason"] == "removed"
    assert "POST /clear" in told["because"]


def test_a_clear_when_it_was_gone_explains_nothing(build: Build, explain: Any) -> None:
    vllm = build(slots=4)
    ask(vllm, "before", other(2))
    vllm.scheduler.clear()
    ask(vllm, "first")
    ask(vllm, "greedy", other(1))
    vllm.scheduler.clear()
    ask(vllm, "again")
    told = explain(vllm)
    assert told["reason"] == "evicted"
    assert not any("removed" in line for line in told["history"])


def test_its_time_was_over(build: Build, explain: Any) -> None:
    vllm = build()
    ask(vllm, "first", params=RequestParams(ttl_s=10.0))
    vllm.index.advance(vllm.index._chunks.now_s + 11.0)
    ask(vllm, "again")
    told = explain(vllm)
    assert told["reason"] == "expired"
    assert "time to live" in told["because"]


def test_its_bytes_were_lost(build: Build, explain: Any, tmp_path: Path, trace: Path) -> None:
    build(Setup(folder=tmp_path / "disk", local_cpu=False)).ask("first", PROMPT)
    trace.unlink()
    vllm = build(Setup(folder=tmp_path / "disk", local_cpu=False, saves=False))
    for path in vllm.chunk_files():
        path.write_bytes(b"")
    ask(vllm, "finds out")
    ask(vllm, "again")
    told = explain(vllm, "finds out")
    assert (told["reason"], told["hit_tokens"]) == ("load_failed", {"disk": len(PROMPT) - 1})
    assert "4 chunk(s) of its hit were computed after all: its bytes were missing or damaged" in told["because"]
    told = explain(vllm)
    assert told["reason"] == "lost"
    assert "found missing or damaged in the disk" in told["history"][-1]


def test_the_remote_tier_was_late(build: Build, explain: Any) -> None:
    server, gate = FakeServer(), threading.Event()
    vllm = build(slots=4, server=server, hold_s=0.0, lookup_timeout_s=0.05)
    ask(vllm, "first", PROMPT[: CHUNK + 1])
    for number in range(3):
        ask(vllm, f"greedy {number}", other(number))
    server.before_contains = lambda: gate.wait(HANG_GUARD_S)
    vllm.forget_local()
    vllm.ask("again", PROMPT[: CHUNK + 1])
    gate.set()
    vllm.settle()
    told = explain(vllm)
    assert told["reason"] == "remote_late"
    assert "lookup_timeout_ms" in told["advice"]


def test_a_model_with_windows(trace: Path, run_json: Any) -> None:
    """Checkpoints are missing where hits need them."""
    with closing(FakeGroups(GroupSetup(trace=trace, slots=12))) as vllm:
        for number in range(6):
            ask(vllm, f"first {number}", other(number))
        ask(vllm, "again", other(0))
    code, told = run_json("why", "again", trace)
    assert (code, told["reason"]) == (0, "evicted"), told


def test_the_table_of_misses(build: Build, trace: Path, run: Any, run_json: Any) -> None:
    vllm = build()
    for number in range(3):
        ask(vllm, f"first {number}", other(number))
    ask(vllm, "again", other(1))
    vllm.scheduler.close()
    code, tree = run_json("why", trace, "--last", 2)
    assert (code, tree["requests"]) == (0, 4)
    assert [(miss["request"], miss["reason"]) for miss in tree["misses"]] == [
        ("first 1", "never_stored"),
        ("first 2", "never_stored"),
    ]
    lines = run("why", trace).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["request", "0", "1", "2"]


def test_text_for_people(build: Build, trace: Path, run: Any) -> None:
    vllm = build(slots=4)
    ask(vllm, "first")
    ask(vllm, "greedy", other(1))
    ask(vllm, "again", PROMPT)
    vllm.scheduler.close()
    lines = run("why", "aga", trace).stdout.splitlines()
    assert lines[0] == "request: again"
    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert heads == [
        "request", "time", "tokens", "hit", "missing", "reason", "history of that chunk", "because", "advice"
    ]  # fmt: skip


def test_a_running_engine_can_be_asked(
    build: Build, trace: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace is read as far as it is written, also of a request that has not ended."""
    vllm = build()
    ask(vllm, "first")
    vllm.add("again", other(1), max_tokens=50)
    vllm.step()
    vllm.scheduler.close()
    assert run_json("why", "again", trace)[1]["reason"] == "never_stored"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "no request in"),
        (["first"], "is part of several ids in .*: cmpl-first-0, cmpl-first-1"),
        (["first-0", "too", "many"], "4 arguments are given"),
    ],
    ids=["unknown", "several", "too many"],
)
def test_a_request_that_is_not_one(trace: Path, run: Any, words: list[str], message: str) -> None:
    recorder = TraceRecorder(trace, 256)
    for number in range(2):
        recorder.note(LookedUp(f"cmpl-first-{number}", 512, 0, 0, {}, "never_stored"))
    recorder.close()
    result = run("why", *words, trace)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


def test_an_id_that_is_a_part_of_another_one(trace: Path, run_json: Any) -> None:
    """The same id may also come again: the last one counts."""
    recorder = TraceRecorder(trace, 256)
    for name, num_tokens in (("a-1", 1), ("a-10", 2), ("a-1", 3)):
        recorder.note(LookedUp(name, num_tokens, 0, 0, {}, "never_stored"))
    recorder.close()
    assert run_json("why", "a-1", trace)[1]["tokens"] == 3


def test_a_hostile_id_is_printed_as_text(trace: Path, run: Any) -> None:
    recorder = TraceRecorder(trace, 256)
    recorder.note(LookedUp("evil\x1b[2J\u202e\ud800", 512, 0, 0, {}, "never_stored"))
    recorder.close()
    for words in (["evil", trace], [trace]):
        result = run("why", *words)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "evil\\x1b[2J\\x202e\\xd800" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format":"kvstore-trace","version":1,"chunk_tokens":256}\n', "has no reasons of misses"),
        ('{"timestamp":1,"input_length":5,"hash_ids":[1]}\n', "has no reasons of misses"),
        ("", "is empty"),
        ("text\n", "is not a request of a trace"),
        (
            '{"format":"kvstore-trace","version":2,"chunk_tokens":256}\n{"time_s":1,"lookup":"a","missing":["xy"]}\n',
            "line 2",
        ),
    ],
    ids=["an earlier release", "Mooncake", "empty", "text", "a key that is none"],
)
def test_what_is_no_trace(trace: Path, run: Any, text: str, message: str) -> None:
    trace.write_text(text)
    for words in (["a", trace], [trace]):
        result = run("why", *words)
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_trace_of_the_configuration(tmp_path: Path, run: Any, run_json: Any) -> None:
    """The latest one, as each start begins another."""
    for name in ("first", "second"):
        recorder = TraceRecorder.open_next(tmp_path / "trace", 256)
        recorder.note(LookedUp(name, 512, 0, 0, {}, "never_stored"))
        recorder.close()
    config = tmp_path / "kvstore.yaml"
    config.write_text(f"record_trace: {tmp_path / 'trace'}\n")
    assert run_json("why", "second", "--config", config)[1]["request"] == "second"
    assert run("why", "first", "--config", config).exit_code == 2
    assert [miss["request"] for miss in run_json("why", "--config", config)[1]["misses"]] == ["second"]
    config.write_text("chunk_size: 256\n")
    result = run("why", "second", "--config", config)
    assert (result.exit_code, "record_trace is not set here" in result.stderr) == (2, True)


def test_the_eviction_counts_and_not_what_came_after(trace: Path, run_json: Any) -> None:
    """Events after the lookup explain nothing."""
    key = b"k" * 16
    recorder = TraceRecorder(trace, 256)
    recorder.note(ChunkEvent(Fate.STORED, key, b"", "memory"))
    recorder.note(ChunkEvent(Fate.EVICTED, key, b"", "memory"))
    recorder.note(LookedUp("a", 512, 0, 0, {}, "never_stored", [key]))
    recorder.note(ChunkEvent(Fate.LOST, key, b"", "disk"))
    recorder.close()
    tree = run_json("why", "a", trace)[1]
    assert (tree["reason"], len(tree["history"])) == ("evicted", 2)
