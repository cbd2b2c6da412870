"""The bench's own logic: that it notices lost bytes and slow paths, and what it prints. Times are not tested."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.redis_server import require_server
from typer.testing import CliRunner

from kvstore.engine import CacheEngine, EngineOptions
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.tiers import _folder
from kvstore.tools import bench, bench_work
from kvstore.tools.bench import BenchOptions, BenchReport, Bound, Line, run_bench
from kvstore.tools.bench_codecs import codec_table, measure_codecs
from kvstore.tools.bench_work import GEOMETRIES, BenchError, Geometry, Pair, Workbench, paired
from kvstore.tools.cli import app

TOY = Geometry("toy", layers=2, kv_heads=2, head_size=16, chunk_tokens=64)
BATCH_BYTES = 3 * TOY.chunk_bytes
TOY_COMMAND = [
    "bench",
    "--geometry",
    "toy",
    "--batch-mib",
    "1",
    "--rounds",
    "7",
    "--no-disk",
    "--no-redis",
    "--no-server",
    "--no-vllm",
]


def make_line(fraction: float) -> Line:
    return Line("toy path", "memcpy", Bound(goal=0.8, floor=0.5), [Pair(fraction, 1.0)], size_bytes=1000)


def make_report(*lines: Line) -> BenchReport:
    return BenchReport(BenchOptions(TOY, BATCH_BYTES), list(lines))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """A geometry that is measured at once and never too slow."""
    monkeypatch.setitem(GEOMETRIES, "toy", TOY)
    monkeypatch.setitem(bench.BOUNDS, "toy", dict.fromkeys(bench.BOUNDS["llama-8b"], Bound(0.0, 0.0)))
    monkeypatch.setattr(bench, "LOOKUP_BOUND", Bound(0.0, 0.0))
    monkeypatch.setattr(bench, "SERVER_BOUNDS", dict.fromkeys(bench.SERVER_BOUNDS, Bound(0.0, 0.0)))
    monkeypatch.setattr(bench, "REDIS_BOUNDS", dict.fromkeys(bench.REDIS_BOUNDS, Bound(0.0, 0.0)))
    monkeypatch.setattr(bench, "LOOKUP_ROUNDS", 3)
    monkeypatch.setattr(bench, "POLICY_CHUNKS", 160)
    monkeypatch.setattr(bench, "POLICY_REQUESTS", 5)
    return TOY


def test_geometries_have_the_sizes_their_models_have() -> None:
    assert GEOMETRIES["llama-8b"].chunk_bytes == 32 << 20
    assert GEOMETRIES["qwen-0.5b"].chunk_bytes == 3 << 20
    assert set(bench.BOUNDS) == set(GEOMETRIES)


def test_floors_are_not_above_goals() -> None:
    bounds = [bound for lines in bench.BOUNDS.values() for bound in lines.values()]
    bounds += [*bench.REDIS_BOUNDS.values(), *bench.SERVER_BOUNDS.values(), bench.LOOKUP_BOUND]
    assert all(0 < bound.floor <= bound.goal for bound in bounds)


def test_fraction_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    # Noise that hits path and limit alike leaves each pair's fraction, but not the ratio of the medians.
    pairs = [Pair(1.0, 2.0), Pair(10.0, 20.0), Pair(100.0, 100.0)]
    assert Line("path", "limit", Bound(0.8, 0.4), pairs).fraction == 0.5


def test_p99_of_few_samples_is_the_slowest() -> None:
    line = Line("path", "limit", Bound(0.8, 0.5), [Pair(1.0, float(seconds)) for seconds in range(1, 8)])
    assert line.p99_s == 7.0
    assert line.path_s == 4.0


@pytest.mark.parametrize(
    ("fraction", "verdict", "failed"),
    [(0.49, "BELOW FLOOR", True), (0.5, "below goal", False), (0.79, "below goal", False), (0.8, "ok", False)],
)
def test_verdict(fraction: float, verdict: str, failed: bool) -> None:
    line = make_line(fraction)
    assert (line.verdict, line.failed) == (verdict, failed)
    assert make_report(line, make_line(1.0)).failed == ([line] if failed else [])


def test_paired_runs_path_and_limit_in_the_order_asked_for() -> None:
    calls: list[str] = []

    def path() -> int:
        calls.append("path")
        return 7

    for limit_first in (True, False):
        assert paired(lambda: calls.append("limit"), path, limit_first=limit_first)[1] == 7
    assert calls == ["limit", "path", "path", "limit"]


def test_batches_are_fresh() -> None:
    workbench = Workbench(TOY, 2)
    slots = workbench.new_batch()
    first, tokens = workbench._data.copy(), workbench.tokens
    assert sorted(slots.tolist()) == sorted(set(slots.tolist()))
    assert len(tokens) == workbench.num_tokens == len(slots)
    workbench.new_batch()
    assert (workbench._data != first).mean() > 0.9
    assert workbench.tokens != tokens


def retrieved(workbench: Workbench) -> torch.Tensor:
    """Move a batch through an engine; the blocks it came back to."""
    slots = workbench.new_batch()
    with CacheEngine(workbench.paged, Namespace({"model": "toy"}), EngineOptions(1 << 20)) as engine:
        engine.store(workbench.tokens, slot_mapping=slots)
        block_ids, slots = workbench.destination()
        assert engine.retrieve(workbench.tokens, slot_mapping=slots).all()
    return block_ids


def test_check_passes_what_came_back_whole() -> None:
    workbench = Workbench(TOY, 2)
    workbench.check(retrieved(workbench))


@pytest.mark.parametrize("layer", [0, 1])
def test_check_finds_one_flipped_bit(layer: int) -> None:
    workbench = Workbench(TOY, 2)
    block_ids = retrieved(workbench)
    workbench._caches[layer][block_ids[-1], -1, -1, -1] ^= 1
    with pytest.raises(BenchError, match=f"layer {layer}: the bytes retrieved"):
        workbench.check(block_ids)


def test_check_finds_a_write_beside_the_destination() -> None:
    workbench = Workbench(TOY, 2)
    block_ids = retrieved(workbench)
    outside = next(block for block in range(workbench.paged.num_blocks) if block not in block_ids.tolist())
    workbench._caches[1][outside, 0, 0, 0] ^= 1
    with pytest.raises(BenchError, match="layer 1: blocks were overwritten"):
        workbench.check(block_ids)


def test_run_measures_every_line(toy: Geometry, tmp_path: Path) -> None:
    if not _folder.probe_direct(_made(tmp_path)):
        pytest.skip("no direct I/O here")
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, folder=tmp_path)
    ticks: list[str] = []
    report = run_bench(options, ticks.append)
    assert [line.name for line in report.lines] == [
        *bench.BOUNDS["toy"],
        *bench.LOOKUP_TARGETS_S,
        *bench.POLICY_TARGET_S,
    ]
    assert [len(line.pairs) for line in report.lines] == [7, 7, 7, 7, 7, 3, 3, 5]
    assert len(ticks) == options.total_rounds
    assert report.skipped == ["redis: not asked for, or no redis-server on the PATH", "server: not asked for"]
    assert [path.name for path in tmp_path.iterdir()] == [_folder.FREE_NAME]  # the test's own; the bench left nothing


def test_run_measures_redis(toy: Geometry) -> None:
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, redis_server=Path(require_server()))
    ticks: list[str] = []
    report = run_bench(options, ticks.append)
    lines = [line for line in report.lines if line.name in bench.REDIS_BOUNDS]
    assert [line.name for line in lines] == list(bench.REDIS_BOUNDS)
    assert [len(line.pairs) for line in lines] == [7, 7, 3]
    assert len(ticks) == options.total_rounds
    assert report.skipped == ["disk: not asked for", "server: not asked for"]


def test_run_measures_the_cache_server(toy: Geometry) -> None:
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, cache_server=True))
    assert not report.failed
    assert set(bench.SERVER_BOUNDS) < {line.name for line in report.lines}


def test_a_redis_server_that_does_not_start_is_told(toy: Geometry) -> None:
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, redis_server=Path("/bin/false")))
    assert report.skipped == ["disk: not asked for", "redis: redis-server does not start", "server: not asked for"]


def _made(folder: Path) -> Path:
    _folder.make_folder(folder)
    return folder


def test_run_without_direct_io_says_so(toy: Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder, "probe_direct", lambda _: False)
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, folder=tmp_path))
    assert len(report.lines) == 5
    assert report.skipped[0].startswith("disk: direct I/O does not work in the disk folder")


def test_run_fails_if_a_path_changes_bytes(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    retrieve = CacheEngine.retrieve

    def flip(engine: CacheEngine, *args: object, **kwargs: object) -> torch.Tensor:
        loaded = retrieve(engine, *args, **kwargs)  # type: ignore[arg-type]
        engine._mover.paged._runs[0].rows[0][:, 0] ^= 1  # type: ignore[attr-defined]
        return loaded

    monkeypatch.setattr(CacheEngine, "retrieve", flip)
    with pytest.raises(BenchError, match="layer 0"):
        run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7))


def test_run_leaves_torch_threads_alone(toy: Geometry) -> None:
    threads = torch.get_num_threads()
    run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("batch_bytes", "rounds", "message"),
    [
        (BATCH_BYTES, 6, "6 rounds say little: take at least 7"),
        (TOY.chunk_bytes - 1, 7, "does not hold one chunk"),
    ],
)
def test_options_that_make_no_sense(batch_bytes: int, rounds: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchOptions(TOY, batch_bytes, rounds)


def test_json_holds_every_sample(toy: Geometry) -> None:
    result = CliRunner().invoke(app, [*TOY_COMMAND, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["geometry"]["name"] == "toy"
    assert found["failed"] == []
    assert found["skipped"] == [
        "disk: not asked for",
        "redis: not asked for, or no redis-server on the PATH",
        "server: not asked for",
    ]
    assert [len(line["samples_s"]) for line in found["lines"]] == [7, 7, 3, 3, 5]


def test_below_the_floor_is_exit_code_1(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.BOUNDS["toy"], "CPU store", Bound(1e9, 1e9))
    result = CliRunner().invoke(app, TOY_COMMAND)
    assert result.exit_code == 1
    assert "BELOW FLOOR" in result.stdout
    assert re.search(r"CPU store: \d+\.\d\d of memcpy is below the floor", result.stderr)


def test_an_unknown_geometry_is_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["bench", "--geometry", "gpt-9"])
    assert result.exit_code == 2
    assert "llama-8b, qwen-0.5b" in result.stderr


def test_a_raw_transfer_cut_short_is_noticed(tmp_path: Path) -> None:
    workbench = Workbench(TOY, 1)
    if not _folder.probe_direct(_made(tmp_path)):
        pytest.skip("no direct I/O here")
    with bench_work.RawDisk(tmp_path / "raw", workbench.paged.layout, 1, 1) as raw:
        raw.write()
        (tmp_path / "raw" / "0").write_bytes(bytes(4096))
        with pytest.raises(BenchError, match="moved only 4096 bytes"):
            raw.read()


def test_codecs_are_measured_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = measure_codecs(TOY, 2)
    assert [(line.codec, line.data) for line in lines] == [
        (codec, data) for codec in ("lz4", "split", "int8") for data in ("normal", "KV-like")
    ]
    assert all(line.ratio >= 1 and line.encode_gbps > 0 and line.decode_fraction > 0 for line in lines)
    assert codec_table(lines).caption is None
    monkeypatch.setitem(sys.modules, "zstandard", None)
    rest = measure_codecs(TOY, 2)
    assert "split" not in {line.codec for line in rest}
    assert "not measured: split" in str(codec_table(rest).caption)
