"""Logic of the bench: it detects lost bytes and slow paths, and prints its results. Times are not tested."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from redis import Redis
from support.mooncake_store import require_mooncake
from support.redis_server import require_server
from support.s3_server import require_server as require_weed
from typer.testing import CliRunner

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.index.index import ChunkIndex
from kvstore.index.stores import StorePlanner
from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace
from kvstore.paged import binding
from kvstore.paged.device import DevicePagedKV
from kvstore.policies import Adaptive
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.redis.chunk import PART_BYTES
from kvstore.tools.bench import (
    calls,
    decisions,
    disk,
    floors,
    handover,
    mooncake,
    moves,
    proxy,
    remote,
    scheduling,
)
from kvstore.tools.bench.bare_http import ANSWER
from kvstore.tools.bench.codecs import codec_lines, codec_table, measure_codecs
from kvstore.tools.bench.floors import Bound
from kvstore.tools.bench.geometry import GEOMETRIES, Geometry
from kvstore.tools.bench.limits import RawDisk
from kvstore.tools.bench.lines import Line
from kvstore.tools.bench.load import Load, Mark
from kvstore.tools.bench.raw_peers import RawRedis
from kvstore.tools.bench.run import BenchOptions, run_bench
from kvstore.tools.bench.samples import BenchError, Tick
from kvstore.tools.bench.servers import private_redis
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.cli import app

Measure = Callable[[Workbench, int, Tick], list[Line]]
TOY = Geometry("toy", layers=2, kv_heads=2, head_size=16, chunk_tokens=64)
BATCH_BYTES = 3 * TOY.chunk_bytes
SKIPPED = ("start", "redis", "mooncake", "objects", "SeaweedFS", "server", "hand-over", "NIXL", "proxy", "GPU", "vLLM")
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
    "--no-mooncake",
    "--no-objects",
    "--no-server",
    "--no-handover",
    "--no-proxy",
    "--no-vllm",
    "--no-gpu",
    "--no-start",
]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """Return a geometry that is measured at once and never too slow."""
    monkeypatch.setitem(GEOMETRIES, "toy", TOY)
    monkeypatch.setattr(floors, "COMMON", dict.fromkeys(floors.COMMON, Bound(0.0, 0.0)))
    for module in (calls, remote):
        monkeypatch.setattr(module, "LOOKUP_ROUNDS", 3)
    monkeypatch.setattr(calls, "INDEX_CHUNKS", 160)
    monkeypatch.setattr(calls, "POLICY_CHUNKS", 160)
    monkeypatch.setattr(calls, "POLICY_REQUESTS", 5)
    for name, value in {"EVENT_CHUNKS": 50, "EVENT_ROUNDS": 4, "LOOKUP_REQUESTS": 8, "ROUNDS": 2}.items():
        monkeypatch.setattr(scheduling, name, value)
    return TOY


def retrieved(workbench: Workbench) -> torch.Tensor:
    """Move a batch through an engine, and return the blocks of the result."""
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


def names(lines: Sequence[Line]) -> list[str]:
    return [line.subject.name for line in lines]


CALLS = [target.subject.name for target in (*calls.CALLS, *scheduling.SCHEDULING)]


def test_the_lines_of_the_proxy_have_floors() -> None:
    """The goal is 2,000 requests a second on one core."""
    assert floors.bound_of("llama-8b", proxy.TIME.name).goal == 1.0
    for subject in (proxy.ADDED, proxy.TIME, proxy.SHARE):
        assert floors.bound_of("llama-8b", subject.name).floor > 0


def test_the_lines_of_the_scheduler_have_floors() -> None:
    """The goals are an event within 50 us and a burst of lookups within 10 ms a pass."""
    assert len(scheduling.SCHEDULING) == 5
    for target in scheduling.SCHEDULING:
        assert floors.bound_of("llama-8b", target.subject.name).goal == 1.0
        assert floors.bound_of("llama-8b", target.subject.name).floor > 0


def test_a_chunk_takes_at_most_a_kibibyte_of_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of a count is its goal. Tables of 8,000 chunks have less slack than those of 100,000."""
    monkeypatch.setattr(calls, "INDEX_CHUNKS", 8_000)
    line = calls.index_bytes.line()
    assert line.bound == Bound(1.0, 1.0)
    assert (line.limit_s, line.subject.unit) == (1024, "bytes")
    assert 512 < line.path_s < 930


def test_chunks_that_are_not_stored_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "INDEX_CHUNKS", 32)
    monkeypatch.setattr(StorePlanner, "complete", lambda *_: None)
    monkeypatch.setattr(ChunkIndex, "__len__", lambda _: 16)
    with pytest.raises(BenchError, match="16 of 32 were stored"):
        calls.index_bytes.line()


def test_a_lookup_that_times_out_ends_the_bench(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_TIMEOUT_S", 0.0)
    with pytest.raises(BenchError, match="were not answered in time"):
        scheduling.longest_passes.line()


def test_run_measures_every_line(toy: Geometry, tmp_path: Path) -> None:
    if not _folder.probe_direct(_made(tmp_path)):
        pytest.skip("no direct I/O here")
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, folder=tmp_path)
    ticks: list[str] = []
    report = run_bench(options, ticks.append)
    assert names(report.lines) == [
        *(subject.name for subject in moves.CPU),
        *(subject.name for subject in (disk.WRITE, disk.COLD, disk.LAYERS, disk.QUARTER, disk.WARM)),
        *CALLS,
    ]
    assert [len(line.pairs) for line in report.lines] == [7] * 9 + [3, 3, 3, 1, 5] + [4, 2, 2, 2, 2]
    assert len(ticks) == options.total_ticks
    assert report.skipped == [f"{name}: not asked for" for name in SKIPPED]
    assert [path.name for path in tmp_path.iterdir()] == [_folder.FREE_NAME]  # the test's own; the bench left nothing


def test_run_measures_the_proxy(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "REQUESTS_A_ROUND", 2)
    monkeypatch.setattr(proxy, "CLOSED_LOOP_S", 0.05)
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, proxy=True)
    ticks: list[str] = []
    report = run_bench(options, ticks.append)
    found = [line for line in report.lines if line.subject.name.startswith("proxy:")]
    assert names(found) == [subject.name for subject in (proxy.ADDED, proxy.TIME, proxy.SHARE)]
    assert [len(line.pairs) for line in found] == [14, 7, 7]
    assert len(ticks) == options.total_ticks


def test_an_answer_that_is_not_the_engines_ends_the_bench() -> None:
    proxy._check(b"HTTP/1.1 200 OK\r\nother: head\r\n\r\n" + ANSWER.partition(b"\r\n\r\n")[2])
    with pytest.raises(BenchError, match="is not the engine's"):
        proxy._check(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}")


def test_run_measures_redis(toy: Geometry) -> None:
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, redis_server=Path(require_server()))
    ticks: list[str] = []
    lines = run_bench(options, ticks.append).lines[-4:]
    assert [line.subject for line in lines] == [*remote.REDIS, remote.REDIS_LOOKUP]
    assert [len(line.pairs) for line in lines] == [7, 7, 7, 3]
    assert len(ticks) == options.total_ticks


def test_run_measures_mooncake(toy: Geometry) -> None:
    require_mooncake()
    lines = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, mooncake=True)).lines[-2:]
    assert [line.subject for line in lines] == [*mooncake.MOONCAKE]
    assert [len(line.pairs) for line in lines] == [7, 7]


def test_run_measures_seaweed(toy: Geometry, tmp_path: Path) -> None:
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, weed=Path(require_weed()), folder=tmp_path)
    lines = run_bench(options).lines[-2:]
    assert [line.subject for line in lines] == [*remote.SEAWEED]
    assert [len(line.pairs) for line in lines] == [7, 7]


def test_run_measures_the_cache_server(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NUM_CHUNKS", 8192)
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, cache_server=True))
    assert not report.failed
    subjects = {line.subject for line in report.lines}
    assert subjects >= {*remote.SERVER, remote.SERVER_LOOKUP, decisions.longest_decisions.subject}
    assert len(remote.SERVER) == 6


def test_run_measures_handovers(toy: Geometry) -> None:
    options = BenchOptions(toy, BATCH_BYTES, rounds=7, handover=True)
    ticks: list[str] = []
    report = run_bench(options, ticks.append)
    subjects = {line.subject for line in report.lines}
    assert handover.TCP in subjects
    if find_spec("nixl") is None:
        assert any(skipped.startswith("NIXL: it is not installed") for skipped in report.skipped)
    else:
        assert handover.NIXL in subjects
        assert len(ticks) == options.total_ticks


def test_run_measures_the_start(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "POOL_BYTES", 8 << 20)
    lines = [target.line() for target in calls.start(1)]
    assert names(lines) == ["import kvstore", "engine start, pool of 4 GiB"]
    assert all(line.path_s > 0 for line in lines)


def test_the_recommended_redis_takes_freed_memory_again(tmp_path: Path) -> None:
    """By default jemalloc never splits again what was freed in one go, and the server holds 1.7 times its data."""
    payloads = np.broadcast_to(np.ones(16 << 20, np.uint8), (32, 16 << 20))
    with private_redis(Path(require_server()), tmp_path) as port, Redis(port=port) as client:
        raw = RawRedis(port, payloads, PART_BYTES)
        for _ in range(3):
            raw.store()
            raw.remove()
        raw.store()
        time.sleep(1.0)  # Redis looks at its memory ten times a second
        held_bytes = client.info("memory")["used_memory_rss"]
        raw.close()
    assert held_bytes < 1.25 * payloads.nbytes


def test_a_redis_server_that_does_not_start_is_told(toy: Geometry) -> None:
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, redis_server=Path("/bin/false")))
    assert "redis: redis-server does not start" in report.skipped


def test_a_seaweed_that_does_not_start_is_told(toy: Geometry) -> None:
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, weed=Path("/bin/false")))
    assert "SeaweedFS: SeaweedFS does not start" in report.skipped


def test_without_a_gpu_its_lines_are_skipped(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, gpu=True))
    assert "GPU: there is none that torch can use" in report.skipped


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_gpu_lines_move_every_byte(toy: Geometry, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "HostPagedKV", DevicePagedKV)  # the same code as for a GPU
    workbench = Workbench(toy, 3, device=torch.device(device))
    assert isinstance(workbench.paged, DevicePagedKV)
    lines = moves.measure_gpu(workbench, 7, lambda: None)
    assert [line.subject for line in lines] == [*moves.GPU]


@pytest.mark.parametrize("measure", [moves.measure_cpu, moves.measure_gpu])
def test_many_batches_are_still_stored(toy: Geometry, measure: Measure) -> None:
    """Each is used once at most. The default policy must see these uses, or it would finally store none."""
    lines = measure(Workbench(toy, 64), 40, lambda: None)
    assert [len(line.pairs) for line in lines] == [40] * 4


@pytest.mark.parametrize("measure", [moves.measure_cpu, moves.measure_gpu])
def test_a_batch_that_is_not_stored_ends_the_bench(
    toy: Geometry, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adaptive, "make_room", lambda *_, **__: None)  # the answer of a policy that has seen no use
    with pytest.raises(BenchError, match=f"of {Workbench(toy, 64).num_tokens} tokens were stored"):
        measure(Workbench(toy, 64), 40, lambda: None)


def _made(folder: Path) -> Path:
    _folder.make_folder(folder)
    return folder


def test_run_without_direct_io_says_so(toy: Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder, "probe_direct", lambda _: False)
    report = run_bench(BenchOptions(toy, BATCH_BYTES, rounds=7, folder=tmp_path))
    assert names(report.lines)[-len(CALLS) :] == CALLS
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
    assert found["skipped"] == [f"{name}: not asked for" for name in ("disk", *SKIPPED)]
    samples = [len(line[f"samples_{line['unit']}"]) for line in found["lines"]]
    assert samples == [7, 7, 7, 7, 3, 3, 3, 1, 5, 4, 2, 2, 2, 2, *4 * (1,)]
    assert [line["name"] for line in found["lines"] if line["unit"] == "bytes"] == [calls.index_bytes.subject.name]
    assert all(line["includes"] for line in found["lines"])


def test_an_older_run_is_shown_beside(toy: Geometry, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(CliRunner().invoke(app, [*TOY_COMMAND, "--json"]).stdout, encoding="utf-8")
    result = CliRunner().invoke(app, [*TOY_COMMAND, "--compare", str(old), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["geometry"]["name"] == "toy"
    assert re.search(r"CPU store by layer .* [+-]\d+%", result.stderr)


def test_without_matplotlib_the_extra_is_named(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, [*TOY_COMMAND, "--plot", "bench.svg"])
    assert result.exit_code == 2
    assert "pip install 'vllm-kvstore[plot]'" in result.stderr


def test_below_the_floor_is_exit_code_1(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floors.BOUNDS, "toy", {"CPU store": Bound(1e9, 1e9)})
    result = CliRunner().invoke(app, TOY_COMMAND)
    assert result.exit_code == 1
    assert "BELOW FLOOR" in result.stdout
    assert re.search(r"CPU store: \d+\.\d\d of memcpy is below the floor", result.stderr)


def test_a_busy_machine_is_named(toy: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that has not passed still fails."""
    monkeypatch.setattr(Mark, "until", lambda *_: Load(cores=2, begin=6.7, end=7.1, others_cores=1.5))
    result = CliRunner().invoke(app, TOY_COMMAND)
    assert (result.exit_code, "busy" in result.stderr) == (0, False)
    monkeypatch.setitem(floors.BOUNDS, "toy", {"CPU store": Bound(1e9, 1e9)})
    result = CliRunner().invoke(app, TOY_COMMAND)
    assert result.exit_code == 1
    assert "the machine was busy: load 6.7 at the beginning, 7.1 at the end, on 2 cores" in result.stderr
    assert "Run again on a quiet one" in result.stderr


def test_an_unknown_geometry_is_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["bench", "--geometry", "gpt-9"])
    assert result.exit_code == 2
    assert "llama-8b, llama-70b-tp8, qwen-0.5b" in result.stderr


def test_a_raw_transfer_cut_short_is_noticed(tmp_path: Path) -> None:
    workbench = Workbench(TOY, 1)
    if not _folder.probe_direct(_made(tmp_path)):
        pytest.skip("no direct I/O here")
    with closing(RawDisk(tmp_path / "raw", workbench.paged.layout, 1, 1)) as raw:
        raw.write()
        (tmp_path / "raw" / "0").write_bytes(bytes(4096))
        with pytest.raises(BenchError, match="moved only 4096 bytes"):
            raw.read()


def test_codecs_are_measured_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = measure_codecs(TOY, 2)
    assert [(line.codec, line.data) for line in lines] == [
        (codec, data) for codec in ("lz4", "split", "int8", "aes-gcm") for data in ("normal", "KV-like")
    ]
    assert all(line.ratio > 0.99 and line.encode_gbps > 0 and line.decode_fraction > 0 for line in lines)
    gated = {line.subject.name: (line.path_s, line.fraction) for line in codec_lines(lines)}
    assert gated["split encode, one core"] == pytest.approx((1 / lines[3].encode_gbps, lines[3].encode_fraction))
    assert gated["int8 decode, one core"] == pytest.approx((1 / lines[5].decode_gbps, lines[5].decode_fraction))
    assert len(gated) == 4
    assert codec_table(lines).caption is None
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "kvstore.format.sealing.seal", None)
    rest = measure_codecs(TOY, 2)
    assert {line.codec for line in rest} == {"lz4", "int8"}
    assert "not measured: aes-gcm, split" in str(codec_table(rest).caption)
