"""``kvstore simulate --fleet``: its routes, times, counts, output and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.model.errors import ConfigError
from kvstore.policies import Adaptive, open_policy
from kvstore.policies.simulation import SimulatedStore, SimulatedTier
from kvstore.policies.traces import read_trace
from kvstore.tools.cli import app
from kvstore.tools.proxy.choice import MOST_BYTES
from kvstore.tools.simulate import fleet as simulated
from kvstore.tools.simulate.cells import Scale, load, replay
from kvstore.tools.simulate.fleet import FleetCell, Times, simulate_fleet
from kvstore.tools.simulate.fleetfile import GIB, FleetPlan, read_fleet
from kvstore.tools.simulate.replica import Replica
from kvstore.tools.simulate.routes import Routes, text_of

RUNNER = CliRunner()
PER_TOKEN = 1 << 20
ROOMY = {"size": 1000, "gb_per_s": 1e9}
PLAN = {"bytes_per_token": PER_TOKEN, "prefill_tokens_per_s": 1024, "replicas": 1, "router": "load", "memory": ROOMY}

Line = tuple[float, Sequence[int]] | tuple[float, Sequence[int], dict[str, Any]]


def write(path: Path, lines: Sequence[Line]) -> Path:
    """Write requests of whole blocks of 512 tokens: seconds, blocks, and other fields."""
    records = (
        {"timestamp": 1000 * time_s, "input_length": 512 * len(ids), "hash_ids": [*ids], **dict(*more)}
        for time_s, ids, *more in lines
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(path: Path, lines: Sequence[Line], policy: str = "LRU", **changes: Any) -> dict[str, Any]:
    """Return the figures of one fleet."""
    plan = FleetPlan.model_validate(PLAN | changes)
    cell = FleetCell(policy, plan.replicas[0], plan.router[0])
    return simulate_fleet(write(path, lines), plan, cell, answers=True, tick=lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def turns(sessions: int, count: int) -> list[Line]:
    """Return conversations that take turns, each of which grows by a block."""
    return [
        (number * sessions + session, range(100 * session, 100 * session + 3 + number), {"session": f"s{session}"})
        for number in range(count)
        for session in range(sessions)
    ]


def test_one_replica_finds_what_a_tier_alone_finds(path: Path) -> None:
    lines = turns(5, 6)
    row = run(path, lines, memory={"size": 18 * 512 * PER_TOKEN / GIB, "gb_per_s": 1e9})
    cell = replay(load(path, Scale()), "LRU", 18, disk=None, scale=Scale(), tick=lambda _: None)
    assert 0 < cell.hit_rate < 0.8
    assert row["hit_rate"] == pytest.approx(cell.hit_rate)
    assert row["tiers"]["memory"]["evicted_chunks"] == cell.tiers[0]["evicted_chunks"]
    assert row["tiers"]["memory"]["written_bytes"] == cell.tiers[0]["written_chunks"] * 512 * PER_TOKEN
    assert row["requests"] == len(lines)
    assert row["asked_tokens"] == 512 * sum(len(ids) for _, ids, *_ in lines)


def test_times_of_computing_waiting_and_loading(path: Path) -> None:
    row = run(
        path,
        [(0, [1, 2]), (0, [3, 4]), (100, [1, 2])],
        first_token_s=0.5,
        memory={"size": 100, "gb_per_s": PER_TOKEN * 4096 / 1e9},
    )
    loaded_s = 1024 / 4096 + 0.5 + 1 / 1024
    assert row["ttft_s"]["mean"] == pytest.approx((1.5 + 3.0 + loaded_s) / 3)
    assert row["ttft_s"]["p50"] == pytest.approx(1.5, rel=0.01)
    assert row["wait_s"]["mean"] == pytest.approx((0 + 1.5 + 1024 / 4096) / 3)
    assert row["gpu_s"] == {"computing": pytest.approx(1.5 + 1.5 + 0.5 + 1 / 1024), "saved": pytest.approx(1.0)}
    assert row["computed_tokens"] == 2049, "the last token of a prompt is always computed"


def test_loads_overlap_the_computing_of_others(path: Path) -> None:
    lines: list[Line] = [(0, [1, 2]), (100, [5, 6]), (100, [1, 2])]
    row = run(path, lines, memory={"size": 100, "gb_per_s": PER_TOKEN * 2048 / 1e9})
    assert row["ttft_s"]["mean"] == pytest.approx((1.0 + 1.0 + 1.0 + 1 / 1024) / 3), "it was loaded meanwhile"


def test_all_replicas_share_the_bandwidth_of_a_shared_tier(path: Path) -> None:
    lines: list[Line] = [(100 * (number // 2), [2 * number, 2 * number + 1]) for number in range(4)]
    again: list[Line] = [(1000, ids) for _, ids, *_ in lines[:2]]
    small = {"size": 2 * 512 * PER_TOKEN / GIB, "gb_per_s": 1e9}
    tiers: dict[str, Any] = {"replicas": 2, "memory": small, "load_only_if_faster": False}
    rows = [
        run(path, [*lines, *again], **tiers, shared=ROOMY | {"gb_per_s": speed} | total)
        for speed in [PER_TOKEN * 1024 / 1e9]
        for total in ({}, {"total_gb_per_s": speed})
    ]
    assert [row["tiers"]["shared"]["read_bytes"] for row in rows] == [2048 * PER_TOKEN] * 2
    assert rows[0]["ttft_s"]["mean"] == pytest.approx((4 * 1 + 2 * (1 + 1 / 1024)) / 6)
    assert rows[1]["ttft_s"]["mean"] == pytest.approx((4 * 1 + 2 * (1 + 1 / 1024) + 1) / 6), "one waits for the other"


def test_what_is_being_computed_is_not_found_yet(path: Path) -> None:
    lines: list[Line] = [(0, [1, 2]), (0.5, [1, 2])]
    both: dict[str, Any] = {"replicas": 2, "shared": ROOMY}
    assert run(path, lines, **both)["hit_rate"] == 0, "the other replica computes it from 0 s to 1 s"
    assert run(path, [lines[0], (1.5, [1, 2])], **both)["hit_rate"] == 0.5
    assert run(path, lines)["hit_rate"] == 0.5, "the same replica begins with it once the first is complete"


def test_what_a_shared_tier_refused_is_sent_again_when_it_is_used_again() -> None:
    memory, shared = open_policy("LRU", 100), SimulatedTier(open_policy("LRU", 2))
    store = SimulatedStore([memory], shared)
    shared.policy.add(b"x")
    shared.policy.add(b"y")
    shared.policy.hold(b"x")
    shared.policy.hold(b"y")
    store.request([b"a"], [1])
    assert (b"a" in shared.policy, [*store._refused]) == (False, [b"a"])
    shared.policy.free(b"x")
    assert store.request([b"a"], [1]) == 1
    assert (b"a" in shared.policy, [*store._refused]) == (True, [])
    assert shared.counts.offered_chunks == 2


def test_a_question_before_a_write_is_a_use() -> None:
    shared = SimulatedTier(Adaptive(10))
    store = SimulatedStore([open_policy("LRU", 100)], shared)
    store.request([b"a", b"b"], [1, 1])
    assert isinstance(shared.policy, Adaptive)
    assert {unit.uses for unit in shared.policy._units.values()} == {1}


def test_few_refused_chunks_are_remembered() -> None:
    store = SimulatedStore([open_policy("LRU", 2)], SimulatedTier(open_policy("LRU", 0)))
    for number in range(100):
        store.request([b"%d" % number], [1])
    assert len(store._refused) <= 5


def test_what_is_in_the_gpu_is_not_loaded(path: Path) -> None:
    lines: list[Line] = [(0, [1, 2]), (100, [1, 2]), (200, [3, 4, 5]), (300, [1, 2])]
    row = run(path, lines, gpu={"size": 3 * 512 * PER_TOKEN / GIB})
    assert row["tiers"]["gpu"]["read_bytes"] == row["tiers"]["memory"]["read_bytes"] == 1024 * PER_TOKEN
    assert row["gpu_s"]["saved"] == pytest.approx(1.0), "without what vLLM finds itself"


def test_a_chunk_from_the_disk_returns_to_memory(path: Path) -> None:
    small = {"size": 2 * 512 * PER_TOKEN / GIB, "gb_per_s": 1e9}
    lines: list[Line] = [(0, [1, 2]), (100, [3, 4]), (200, [1, 2]), (300, [1, 2])]
    row = run(path, lines, memory=small, disk=ROOMY)
    assert row["tiers"]["disk"]["read_bytes"] == row["tiers"]["memory"]["read_bytes"] == 1024 * PER_TOKEN


def test_a_load_that_is_slower_than_computing_is_left_out(path: Path) -> None:
    slow = {"size": 1000, "gb_per_s": PER_TOKEN * 100 / 1e9}
    lines: list[Line] = [(1000 * number, [number % 4, 10 + number % 4]) for number in range(40)]
    row = run(path, lines, memory=slow)
    eager = run(path, lines, memory=slow, load_only_if_faster=False)
    assert row["declined_tokens"] > 20 * 1024, "all but the first, and one in sixteen, which measure"
    assert row["hit_rate"] < 0.5 < eager["hit_rate"]
    assert eager["declined_tokens"] == 0


@pytest.mark.parametrize("router", ["prefix", "session"])
def test_a_conversation_returns_to_its_replica(path: Path, router: str) -> None:
    lines = turns(7, 12)
    row = run(path, lines, replicas=4, router=router)
    spread = run(path, lines, replicas=4, router="random")
    assert row["hit_rate"] == run(path, lines)["hit_rate"]
    assert spread["hit_rate"] < row["hit_rate"] - 0.1
    assert run(path, lines, replicas=4, router="random", shared=ROOMY)["hit_rate"] == row["hit_rate"]


def test_answers_under_way_are_load(path: Path) -> None:
    lines: list[Line] = [(0, [1], {"output_length": 5000}), *((10 * n, [n]) for n in range(2, 9))]
    row = run(path, lines, replicas=2, prefill_tokens_per_s=1e6, decode_tokens_per_s=50)
    assert row["busiest"] / row["busy"] == pytest.approx(2 * 7 / 8, rel=0.1), "the first replica decodes for 100 s"


def test_the_text_for_routers_has_equal_beginnings_for_equal_prefixes(path: Path) -> None:
    one, other, longest = read_trace(write(path, [(0, [1, 2, 3]), (0, [1, 2, 4, 5]), (0, range(100))]))
    assert len(text_of(one)) == 4 * 3 * 512
    assert text_of(one)[: 4 * 1024] == text_of(other)[: 4 * 1024]
    assert text_of(one)[4 * 1024 :] != text_of(other)[4 * 1024 : 4 * 1536]
    assert len(text_of(longest)) == MOST_BYTES
    replicas = [Replica(FleetPlan.model_validate(PLAN), "LRU", None) for _ in range(3)]
    routes = Routes("prefix", replicas)
    first = routes.choose(one)
    routes.choose(longest)
    assert routes.choose(other) is first


def test_percentiles() -> None:
    times = Times()
    assert times.to_json() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    for number in range(1, 1001):
        times.add(number / 100)
    found = times.to_json()
    assert found["mean"] == pytest.approx(5.005)
    for name, expected in (("p50", 5.0), ("p90", 9.0), ("p99", 9.9)):
        assert found[name] == pytest.approx(expected, rel=0.011)
    times.add(0.0)


def test_a_fleet_that_is_far_too_small_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_MAX_WAITING", 20)
    with pytest.raises(ConfigError, match=r"1 replica\(s\) with load routing fall behind: 20 requests wait after 0 s"):
        run(path, [(0, [number]) for number in range(30)])


FILE = """
bytes_per_token: 1048576
prefill_tokens_per_s: 1024
replicas: [1, 3]
router: [random, prefix]
memory: {size: 10, gb_per_s: 20}
shared: {size: 100, gb_per_s: 5, total_gb_per_s: 10}
gpu_price_per_hour: 3600
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE, encoding="utf-8")
    return file


def test_the_command_compares_fleets(path: Path, fleet: Path) -> None:
    write(path, turns(4, 5))
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet), "--policy", "LRU", "--json"])
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert [(row["replicas"], row["router"]) for row in tree["cells"]] == [
        (replicas, router) for replicas in (1, 3) for router in ("random", "prefix")
    ]
    assert tree["fleet"]["shared"]["total_gb_per_s"] == 10
    for row in tree["cells"]:
        assert (row["policy"], row["cost"]) == ("LRU", pytest.approx(row["gpu_s"]))
        assert row["hit_rate"] == pytest.approx(sum(tier["hit_rate"] for tier in row["tiers"].values()))
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet)], env={"COLUMNS": "100"})
    assert re.search(r"3 prefix ADAPTIVE +│ +0\.\d{4} │", result.stdout)
    assert "3 random ADAPTIVE: GB in " in result.stdout
    assert re.search(r"prefill \d+\.\d GPU h \(\d+\.\d\d\), saved ", result.stdout)


def test_it_says_how_much_is_computed_as_loads_are_slow(path: Path, fleet: Path) -> None:
    write(path, [(1000 * number, [number % 4, 10 + number % 4]) for number in range(40)])
    fleet.write_text(FILE.replace("gb_per_s: 20", "gb_per_s: 0.1"), encoding="utf-8")
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet)])
    assert re.search(r"1 prefix ADAPTIVE: \d\d\.\d% of the tokens were found, but computed", result.stdout)


def test_it_says_if_a_fleet_falls_behind(path: Path, fleet: Path) -> None:
    write(path, [(0, [number, number + 50]) for number in range(40)])
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet)])
    assert "1 prefix ADAPTIVE: falls behind: up to 39 requests wait, so add replicas" in result.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("replicas: [1, 3]", "replicas: 0"), "replicas.0: Input should be greater than or equal to 1"),
        (("replicas: [1, 3]", "replicas: []"), "replicas: Value should have at least 1 item"),
        (("replicas: [1, 3]", ""), "replicas: Field required"),
        (("[random, prefix]", "nearest"), "router.0: Input should be 'random', 'load', 'prefix' or 'session'"),
        (("size: 10,", "size: .nan,"), "memory.size: Input should be a finite number"),
        (("1048576", "1" + "0" * 400), "bytes_per_token: "),
        (("prefill_tokens_per_s: 1024", "prefill_tokens_per_s: 1.0e-300"), "prefill_tokens_per_s: "),
        (("size: 10,", ""), "memory.size: Field required"),
        (("memory:", "ram:"), "memory: Field required"),
        (("shared:", "tier:"), "tier: Extra inputs are not permitted"),
        (("memory:", "memory: ["), "is no YAML: write it as docs/scale.md shows"),
        (("[random, prefix]", f"[{', '.join(['load'] * 51)}]"), "compares 102 fleets, and 100 are the most"),
        (("[random, prefix]", "session"), "names no sessions: use another router than session"),
        (("replicas: [1, 3]", "replicas: 1\npolicy: clock"), "cache_policy is 'clock': use one of LRU"),
    ],
)
def test_wrong_files(path: Path, fleet: Path, change: tuple[str, str], message: str) -> None:
    write(path, [(0, [1, 2])])
    fleet.write_text(FILE.replace(*change), encoding="utf-8")
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet)])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "option", [["--chunks", "5"], ["--bytes-per-token", "5"], ["--block-tokens", "512"], ["--plot", "a.svg"]]
)
def test_options_that_the_file_replaces(path: Path, fleet: Path, option: list[str]) -> None:
    write(path, [(0, [1, 2])])
    result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet), *option])
    assert result.exit_code == 2
    assert f"{option[0]} and --fleet exclude each other" in result.stderr


def test_traces_that_cannot_be_used(path: Path, fleet: Path) -> None:
    line = '{"timestamp": NaN, "input_length": 5, "output_length": 1e308, "hash_ids": [1]}\n'
    cases = (("hello\n", "line 1 is not a request"), ("", "is empty"), (line, "request 1 came at nan s"))
    for text, message in cases:
        path.write_text(text, encoding="utf-8")
        result = RUNNER.invoke(app, ["simulate", str(path), "--fleet", str(fleet)])
        assert (result.exit_code, message in result.stderr) == (2, True)


def test_an_answer_without_end(path: Path) -> None:
    assert run(path, [(0, [1], {"output_length": 1e308}), (0, [1])])["requests"] == 2


def test_a_file_too_large(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("#" * ((1 << 20) + 1), encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_fleet(file)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_fleet(tmp_path)
