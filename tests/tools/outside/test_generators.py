"""Load generators of others: results as they write them, converted traces, and reasons to leave one out."""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.outside import aiperf, cache_pressure, installing, lmbenchmark, traces, vllm_bench
from kvstore.tools.outside.generator import Generator, Numbers, Place, SkippedError, UnreadableError, percentile
from kvstore.tools.outside.run import GENERATORS

SAMPLES = Path(__file__).parent / "samples"  # written by the generators, shortened
BENCH, PRESSURE, AIPERF = vllm_bench.PrefixRepetition(), cache_pressure.CachePressure(), aiperf.AIPerf()
LMBENCHMARK = lmbenchmark.LMBenchmark()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path, tmp_path / "model", tmp_path / "traces", tmp_path / "checkout")
    assert made.traces
    made.traces.mkdir()
    made.runs.mkdir()
    return made


def test_results_of_vllm_bench() -> None:
    found = BENCH.read(SAMPLES)
    assert (found.requests, found.failed) == (40, 0)
    assert found.requests_per_s == pytest.approx(2.1706, abs=1e-4)
    assert found.ttft_p50_s == pytest.approx(0.12021, abs=1e-5)
    assert found.ttft_p99_s == pytest.approx(1.6719, abs=1e-4)


def test_results_of_cache_pressure() -> None:
    found = PRESSURE.read(SAMPLES)
    assert (found.requests, found.failed, found.own["retained"]) == (10, 0, 1.0)
    assert found.ttft_p50_s == pytest.approx(0.0353, abs=1e-4)
    assert found.ttft_p99_s == pytest.approx(0.0363, abs=1e-4)
    assert found.own["TTFT p50 cold"] == pytest.approx(0.6887, abs=1e-4)


def test_contexts_that_cache_pressure_lost_and_requests_that_failed(tmp_path: Path) -> None:
    result = json.loads((SAMPLES / "pressure.json").read_text())
    result["verify"] = result["verify"][:2]
    result["retained"] = 1
    result["hydrate"][0]["error"] = "reset by peer"
    (tmp_path / cache_pressure.RESULT).write_text(json.dumps(result))
    found = PRESSURE.read(tmp_path)
    assert (found.requests, found.failed, found.own["retained"]) == (6, 1, 0.2)


def test_results_of_aiperf(tmp_path: Path) -> None:
    found = AIPERF.read(SAMPLES)
    assert (found.requests, found.failed) == (16, 0)
    assert found.ttft_p50_s == pytest.approx(0.47856, abs=1e-5)
    assert found.ttft_p99_s == pytest.approx(2.29744, abs=1e-5)
    assert found.own["hits with endless room"] == pytest.approx(0.8632, abs=1e-4)
    result = json.loads((SAMPLES / aiperf.RESULT).read_text())
    result["error_request_count"] = {"unit": "requests", "avg": 3.0}
    (tmp_path / aiperf.RESULT).write_text(json.dumps(result))
    assert AIPERF.read(tmp_path).failed == 3


def test_results_of_lmbenchmark(tmp_path: Path) -> None:
    """The columns are those that its ``summary`` writes."""
    lines = [
        "prompt_tokens,generation_tokens,ttft,generation_time,user_id,question_id,launch_time,finish_time",
        "1900,8,0.9,0.2,1,1,100.0,101.1",
        "1950,8,0.1,0.2,1,2,102.0,102.3",
        "1900,8,0.3,0.2,2,1,103.5,104.0",
    ]
    (tmp_path / lmbenchmark.RESULT).write_text("\n".join(lines) + "\n")
    assert LMBENCHMARK.read(tmp_path) == Numbers(0.3, 0.9, 0.75, 3, 0)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda one: one.name)
@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"verify": [], "hydrate": []}', "ttft\nx\n"])
def test_a_result_that_cannot_be_read(generator: Generator, content: str | None, tmp_path: Path) -> None:
    if content is not None:
        for name in (vllm_bench.RESULT, cache_pressure.RESULT, aiperf.RESULT, lmbenchmark.RESULT):
            (tmp_path / name).write_text(content)
    with pytest.raises(UnreadableError, match=r"left no .* that can be read"):
        generator.read(tmp_path)


def test_a_percentile_is_a_value() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.51, 0.99)] == [1.0, 2.0, 3.0, 4.0]


def mooncake(chat: int, turn: int) -> dict[str, Any]:
    ids = [0, *(1000 * (chat + 1) + number for number in range(2 + turn))]
    at = 90_000 * turn + chat
    return {"timestamp": at, "input_length": 512 * len(ids) - 9, "output_length": 500, "hash_ids": ids}


def test_chats_of_mooncake_keep_blocks_and_order(place: Place) -> None:
    assert place.traces
    requests = [mooncake(chat, turn) for turn in range(9) for chat in range(12)]
    long = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": list(range(5000, 5050))}
    trace = place.traces / "conversation_trace.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in [long, *requests]))
    bench = vllm_bench.TimedTrace()
    bench.prepare(place)
    small = [json.loads(line) for line in (place.runs / "timed.jsonl").read_text().splitlines()]
    assert [one["hash_ids"] for one in small] == [
        mooncake(chat, turn)["hash_ids"] for turn in range(6) for chat in range(8)
    ]
    assert all(one["input_length"] == 64 * len(one["hash_ids"]) for one in small)
    times = [one["timestamp"] for one in small]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0, 24_479)
    command = list(bench.command(place, "http://x", place.runs))
    assert command[command.index("--num-prompts") + 1] == "48"


@pytest.mark.parametrize("lines", ["", "{}\n", "no json\n", '{"hash_ids": 7, "timestamp": 1}\n'])
def test_a_trace_that_is_none(lines: str, place: Place) -> None:
    assert place.traces
    (place.traces / "conversation_trace.jsonl").write_text(lines)
    with pytest.raises(SkippedError, match=r"has only 0 chats|is not in Mooncake's format"):
        vllm_bench.TimedTrace().prepare(place)
    (place.traces / "claude_code_weka.jsonl.xz").write_bytes(lzma.compress(lines.encode()) if lines else b"")
    with pytest.raises(SkippedError, match=r"has only 0 sessions|cannot be read"):
        AIPERF.prepare(place)


def weka(name: str, kinds: str = "n" * 9, blocks: int = 1000) -> dict[str, Any]:
    requests = [
        {
            "t": 9.0 * at,
            "type": {"n": "n", "a": "subagent"}[kind],
            "model": "claude",
            "in": 64 * blocks,
            "out": 90,
            "input_types": [],
            "output_types": [],
            "stop": "",
            "api_time": 7.0,
            "think_time": 3.0,
            "hash_runs": [[1, 500], [2000 + 500 * at, blocks - 500]],
        }
        for at, kind in enumerate(kinds)
    ]
    sizes = {"block_size": 64, "hash_id_scope": "local", "tool_tokens": 6400, "system_tokens": 3200}
    return {"id": name, "models": ["claude"], **sizes, "requests": requests}


def test_sessions_of_claude_code_keep_every_32nd_block(tmp_path: Path) -> None:
    sessions = [weka("short", "nn"), weka("agents", "nnannnnnn"), weka("large", blocks=2000), weka("../a"), weka("b")]
    source = tmp_path / "weka.jsonl.xz"
    source.write_bytes(lzma.compress("".join(json.dumps(one) + "\n" for one in sessions).encode()))
    target = tmp_path / "weka"
    target.mkdir()
    (target / "old.json").touch()
    traces.shrink_weka(source, target, sessions=2)
    assert sorted(path.name for path in target.iterdir()) == ["000.json", "001.json"]
    small = json.loads((target / "000.json").read_text())
    assert (small["tool_tokens"], small["system_tokens"], len(small["requests"])) == (200, 100, 8)
    first, second = (one["hash_ids"] for one in small["requests"][:2])
    assert first[:16] == second[:16] == list(range(1, 500, 32))
    assert not {*first[16:]} & {*second[16:]}
    assert {one["in"] for one in small["requests"]} == {64 * 32}
    with pytest.raises(SkippedError, match="only 2 sessions"):
        traces.shrink_weka(source, target, sessions=3)
    bomb = weka("bomb")
    bomb["requests"][0]["hash_runs"] = [[0, 1 << 60]]
    source.write_bytes(lzma.compress(json.dumps(bomb).encode()))
    with pytest.raises(SkippedError, match="only 0 sessions"):
        traces.shrink_weka(source, target, sessions=1)


def test_sessions_come_from_a_checkout_as_well(place: Place) -> None:
    assert place.traces
    checkout = place.traces / "kv-cache-tester" / "traces"
    checkout.mkdir(parents=True)
    session = weka("a")
    for request in session["requests"]:
        request["hash_ids"] = [first + number for first, count in request.pop("hash_runs") for number in range(count)]
    (checkout / "trace_0001.json").write_text(json.dumps(session))
    traces.shrink_weka(place.trace("nowhere", "kv-cache-tester/traces"), place.runs / "weka", sessions=1)
    small = json.loads((place.runs / "weka" / "000.json").read_text())
    assert small["requests"][0]["hash_ids"][:16] == list(range(1, 500, 32))


def test_reasons_to_leave_a_generator_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, reason in ((AIPERF, "not in --traces"), (LMBENCHMARK, "does not exist")):
        with pytest.raises(SkippedError, match=reason):
            one.prepare(place)
    with pytest.raises(SkippedError, match="no registry has it"):
        LMBENCHMARK.prepare(Place(place.folder, place.model))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SkippedError, match=r"cannot be installed: ERROR: No matching distribution .*cache-pressure"):
        PRESSURE.prepare(place)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SkippedError, match=r"cannot be installed: .*/nonexistent/python"):
        PRESSURE.prepare(place)


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(installing, "_run", commands.append)
    (tmp_path / "a").mkdir()
    for requirements in (("one==1",), ("one==1",), ("one==2",)):
        assert installing.install(tmp_path / "a", requirements) == tmp_path / "a" / "bin"
    assert [command[-1] for command in commands] == [str(tmp_path / "a"), "one==1", str(tmp_path / "a"), "one==2"]


def test_a_tokenizer_is_laid_out_as_in_a_hubs_cache(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.traces
    monkeypatch.setattr(aiperf, "install", lambda *_: None)
    sessions = [weka(str(number)) for number in range(traces.SESSIONS)]
    archive = place.traces / "claude_code_weka.jsonl.xz"
    archive.write_bytes(lzma.compress("".join(json.dumps(one) + "\n" for one in sessions).encode()))
    place.model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (place.model / name).write_text(name)
    AIPERF.prepare(place)
    home = Path(AIPERF.variables(place)["HF_HOME"])
    cached = home / "hub" / "models--local--outside"
    revision = (cached / "refs" / "main").read_text()
    assert (cached / "snapshots" / revision / "tokenizer.json").read_text() == "tokenizer.json"
    assert len(list((place.runs / "weka").iterdir())) == traces.SESSIONS


def test_a_checkout_runs_unchanged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.lmbenchmark
    script = place.lmbenchmark / lmbenchmark.SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text("# of others\n")
    monkeypatch.setattr(lmbenchmark, "install", lambda *_: None)
    LMBENCHMARK.prepare(place)
    command = list(LMBENCHMARK.command(place, "http://127.0.0.1:1", place.runs))
    assert command[1] == str(script)
    assert command[command.index("--base-url") + 1] == "http://127.0.0.1:1/v1"
    assert script.read_text() == "# of others\n"
    assert [path.name for path in place.lmbenchmark.rglob("*") if path.is_file()] == ["multi-round-qa.py"]
    shutil.rmtree(place.lmbenchmark)
