"""``kvstore bench``: how near the library comes to the limit of this machine, measured in the same run.

Figures in GB/s differ from machine to machine and from minute to minute; fractions of a limit measured right beside
them carry over. So every sample is a pair, path and limit one after the other, in alternating order, and a line's
fraction is the median over its pairs. Data is fresh, blocks are shuffled, and every byte is compared outside the timed
part. ``docs/benchmarks.md`` says what each line includes.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstore import chunkfile
from kvstore.engine import CacheEngine, EngineOptions
from kvstore.errors import ConfigError
from kvstore.hostlimits import require_memory
from kvstore.index import ChunkIndex
from kvstore.keys import Namespace, PrefixHasher
from kvstore.policies import Adaptive
from kvstore.tiers.base import ChunkRef
from kvstore.tools.bench_codecs import codec_table, measure_codecs
from kvstore.tools.bench_layers import LOADS_PER_PAIR, retrieve_by_layer
from kvstore.tools.bench_policy import measure_policy
from kvstore.tools.bench_redis import measure_redis
from kvstore.tools.bench_server import measure_server
from kvstore.tools.bench_vllm import measure_vllm
from kvstore.tools.bench_work import GEOMETRIES, BenchError, Geometry, Pair, RawDisk, Workbench, paired, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.layout import KVLayout

MIN_ROUNDS = 7
WARM_UP_ROUNDS = 3  # the second batch fills the pool, the third is the first to recycle
MAX_BATCH_CHUNKS = 64  # as many files as the disk tier keeps for reuse
LOOKUP_CHUNKS = 128
LOOKUP_ROUNDS = 300
DISK_TIMEOUT_S = 120.0
_MIB = 1 << 20
_NAMESPACE = Namespace({"model": "bench"})
_TINY = Geometry("tiny", layers=1, kv_heads=1, head_size=8)  # looking up does not depend on how large chunks are

Tick = Callable[[str], None]
"""Called with a line's name before each of its rounds."""


class Bound(NamedTuple):
    """Fractions of the limit: what the project aims at, and below what the bench fails."""

    goal: float
    floor: float


# Goals are the project's. Floors leave room for noise: on two cores whose load stayed below 2, an unchanged tree went
# from 0.62 to 0.76 in write-behind (at a load of 6.7 it was 0.34). Its limit hardly needs a core or memory bandwidth,
# while the path copies and hashes: memcpy and raw writes of as much, side by side on two threads, reach 0.76 of the
# raw writes alone. On a quiet machine, a line below its goal is worth a look even where its floor holds.
BOUNDS: dict[str, dict[str, Bound]] = {
    "llama-8b": {
        "CPU store": Bound(0.75, 0.70),
        "CPU retrieve": Bound(0.80, 0.70),
        "disk write-behind": Bound(0.70, 0.45),
        "disk cold retrieve": Bound(0.80, 0.60),
        "disk layerwise retrieve": Bound(0.77, 0.60),
    },
    "qwen-0.5b": {
        "CPU store": Bound(0.50, 0.40),
        "CPU retrieve": Bound(0.60, 0.45),
        "disk write-behind": Bound(0.70, 0.20),
        "disk cold retrieve": Bound(0.80, 0.30),
        "disk layerwise retrieve": Bound(0.77, 0.40),
    },
}
LOOKUP_TARGETS_S = {"lookup, 128 known keys": 60e-6, "lookup, list of 32,768 tokens": 1e-3}
# Of a plain socket client; the lookup's limit is three round trips and half a millisecond. Both sides share two cores
# with the server, so that other work hits them unevenly.
REDIS_BOUNDS = {
    "redis store": Bound(0.65, 0.40),
    "redis retrieve": Bound(0.65, 0.50),
    "redis lookup, 128 known keys": Bound(1.0, 0.50),
}
# Of a hit in vLLM's own prefix cache, of 1.3 such and a block computed, of a hundredth of the steps, and of vLLM
# without the connector. How such a vLLM compares with itself shows the noise.
VLLM_BOUNDS = {
    "one_token_left": ("vLLM: hit in memory, one token left", "vLLM's prefix cache", Bound(1 / 1.3, 0.55)),
    "any_length": ("vLLM: hit in memory, any length", "1.3 of it, a block", Bound(1.0, 0.70)),
    "hooks": ("vLLM: all hooks, no hit", "1% of the steps", Bound(1.0, 0.50)),
    "throughput": ("vLLM: throughput, no hit", "no connector", Bound(0.97, 0.75)),
    "control": ("vLLM: no connector, again", "no connector", Bound(0.97, 0.0)),
}
# On one host of memcpy, over TCP of plain pyzmq, whose bytes stay where they arrive. The lookup's limit is three round
# trips. Server and client share two cores, so the floors leave much to other work.
SERVER_BOUNDS = {
    "server store": Bound(0.75, 0.40),
    "server retrieve": Bound(0.75, 0.40),
    "server store over TCP": Bound(0.80, 0.40),
    "server retrieve over TCP": Bound(0.80, 0.40),
    "server lookup, 128 known keys": Bound(1.0, 0.50),
}
POLICY_CHUNKS = 100_000
POLICY_REQUESTS = 2_000
POLICY_TARGET_S = {"adaptive policy, a chunk touched": 20e-6}
LOOKUP_BOUND = Bound(1.0, 0.50)  # times, not ratios: one call took 1.5 to 4.9 ms as the load changed


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        geometry: whose KV.
        batch_bytes: moved by one call, rounded down to whole chunks. The bench takes about eight times as much memory.
        rounds: samples of each line, warm-up excluded.
        folder: where to make a folder for the disk lines; None leaves them out.
        redis_server: the program to start for the redis lines; None leaves them out.
        vllm: measure real vLLM too, if it is installed.
        cache_server: whether to measure our own server.
    """

    geometry: Geometry
    batch_bytes: int = 256 * _MIB
    rounds: int = 15
    folder: Path | None = None
    redis_server: Path | None = None
    vllm: bool = False
    cache_server: bool = False

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(f"{self.rounds} rounds say little: take at least {MIN_ROUNDS}")
        if self.batch_bytes < self.geometry.chunk_bytes:
            raise ConfigError(
                f"a batch of {self.batch_bytes / _MIB:.0f} MiB does not hold one chunk of "
                f"{self.geometry.chunk_bytes / _MIB:.0f} MiB: raise it"
            )

    @property
    def batch_chunks(self) -> int:
        """Chunks moved by one call."""
        return min(self.batch_bytes // self.geometry.chunk_bytes, MAX_BATCH_CHUNKS)

    @property
    def total_rounds(self) -> int:
        """How often ``run_bench`` calls ``tick``."""
        kinds = 1 + bool(self.folder) + bool(self.redis_server) + self.cache_server
        return (self.rounds + WARM_UP_ROUNDS) * kinds + 1 + self.vllm


@dataclass(frozen=True)
class Line:
    """One path against its limit.

    Attributes:
        name: the path.
        limit_name: what it is held against.
        bound: goal and floor of the fraction.
        pairs: the samples.
        size_bytes: moved by one call; 0 where calls are counted, not bytes.
    """

    name: str
    limit_name: str
    bound: Bound
    pairs: Sequence[Pair]
    size_bytes: int = 0

    @property
    def path_s(self) -> float:
        """The median time of a call."""
        return statistics.median(pair.path_s for pair in self.pairs)

    @property
    def limit_s(self) -> float:
        """The median time of the limit."""
        return statistics.median(pair.limit_s for pair in self.pairs)

    @property
    def p99_s(self) -> float:
        """The time that 99 of 100 calls stayed within; the slowest of fewer than 100."""
        return float(np.percentile([pair.path_s for pair in self.pairs], 99, method="higher"))

    @property
    def fraction(self) -> float:
        """How much of the limit's speed the path reaches: the median over pairs, which noise hits on both sides."""
        return statistics.median(pair.limit_s / pair.path_s for pair in self.pairs)

    @property
    def failed(self) -> bool:
        """Whether the fraction is below its floor."""
        return self.fraction < self.bound.floor

    @property
    def verdict(self) -> str:
        """The fraction against its bounds, in words."""
        if self.failed:
            return "BELOW FLOOR"
        return "below goal" if self.fraction < self.bound.goal else "ok"

    def to_json(self) -> dict[str, object]:
        """Everything known about the line, samples included."""
        return {
            "name": self.name,
            "limit_name": self.limit_name,
            "size_bytes": self.size_bytes,
            "median_s": self.path_s,
            "limit_median_s": self.limit_s,
            "p99_s": self.p99_s,
            "fraction": self.fraction,
            "goal": self.bound.goal,
            "floor": self.bound.floor,
            "verdict": self.verdict,
            "samples_s": [pair.path_s for pair in self.pairs],
            "limit_samples_s": [pair.limit_s for pair in self.pairs],
        }


@dataclass(frozen=True)
class BenchReport:
    """The result of one run."""

    options: BenchOptions
    lines: list[Line]
    skipped: list[str] = field(default_factory=list)  # what was not measured, and why

    @property
    def failed(self) -> list[Line]:
        """The lines below their floors."""
        return [line for line in self.lines if line.failed]

    def to_json(self) -> dict[str, object]:
        """The report as one JSON object; times in seconds."""
        return {
            "geometry": asdict(self.options.geometry),
            "batch_bytes": self.options.batch_chunks * self.options.geometry.chunk_bytes,
            "rounds": self.options.rounds,
            "machine": {
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
            },
            "lines": [line.to_json() for line in self.lines],
            "skipped": self.skipped,
            "failed": [line.name for line in self.failed],
        }


def run_bench(options: BenchOptions, tick: Tick = lambda _: None) -> BenchReport:
    """Measure all lines.

    Raises:
        BenchError: a path did not move what it should have.
        ConfigError: there is too little memory.
    """
    # In the order of use: caches of two batches, data, copy, random base, pool of two batches, raw disk buffers.
    require_memory(8 * options.batch_chunks * options.geometry.chunk_bytes, "the bench", key="--batch-mib")
    skipped = []
    with _one_torch_thread():
        workbench = Workbench(options.geometry, options.batch_chunks)
        lines = _cpu_lines(workbench, options, tick)
        if options.folder is None:
            skipped.append("disk: not asked for")
        else:
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
                try:
                    lines += _disk_lines(workbench, options, Path(folder), tick)
                except ConfigError as error:
                    skipped.append(f"disk: {error}")
        tick("lookup")
        lines += _lookup_lines()
        if options.redis_server is None:
            skipped.append("redis: not asked for, or no redis-server on the PATH")
        else:
            try:
                lines += _redis_lines(workbench, options, tick)
            except ConfigError as error:
                skipped.append(f"redis: {error}")
        if not options.cache_server:
            skipped.append("server: not asked for")
        else:
            try:
                lines += _server_lines(workbench, options, tick)
            except ConfigError as error:
                skipped.append(f"server: {error}")
        lines.append(_policy_line())
        if options.vllm:
            tick("vLLM")
            try:
                lines += _vllm_lines(options)
            except ConfigError as error:
                skipped.append(f"vLLM: {error}")
    return BenchReport(options, lines, skipped)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Filling and checking use torch, whose idle OpenMP threads would spin into the timed part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cpu_lines(workbench: Workbench, options: BenchOptions, tick: Tick) -> list[Line]:
    stores, retrieves = [], []
    with CacheEngine(workbench.paged, _NAMESPACE, EngineOptions(2 * _pool_bytes(workbench))) as engine:
        for number in range(WARM_UP_ROUNDS + options.rounds):
            tick("CPU")
            limit_first = number % 2 == 0
            stores.append(_store(engine, workbench, limit_first=limit_first))
            retrieves.append(_retrieve(engine, workbench, workbench.memcpy, limit_first=limit_first))
    bounds = BOUNDS[options.geometry.name]
    return [
        Line(name, "memcpy", bounds[name], pairs[WARM_UP_ROUNDS:], workbench.batch_bytes)
        for name, pairs in (("CPU store", stores), ("CPU retrieve", retrieves))
    ]


def _disk_lines(workbench: Workbench, options: BenchOptions, folder: Path, tick: Tick) -> list[Line]:
    """Write-behind and cold retrieves, over recycled files, with a pool that keeps nothing.

    Raises:
        ConfigError: the folder has no room, or no direct I/O: then there is no limit to hold the paths against.
    """
    layout = workbench.paged.layout
    engine_options = EngineOptions(
        max_local_cpu_bytes=_pool_bytes(workbench),
        local_cpu=False,
        local_disk=folder / "tier",
        max_local_disk_bytes=_disk_bytes(layout, workbench.num_chunks),
        use_odirect=True,
        io_timeout_s=DISK_TIMEOUT_S,
        max_write_queue=workbench.num_chunks,
    )
    writes, reads, layers = [], [], []
    with (
        CacheEngine(workbench.paged, _NAMESPACE, engine_options) as engine,
        RawDisk(folder / "raw", layout, workbench.num_chunks, engine_options.disk_io_threads) as raw,
    ):
        for number in range(WARM_UP_ROUNDS + options.rounds):
            tick("disk")
            limit_first = number % 2 == 0
            writes.append(_write_behind(engine, workbench, raw, limit_first=limit_first))
            reads.append(_retrieve(engine, workbench, raw.read, limit_first=limit_first))
            layers.append(retrieve_by_layer(engine, workbench))
            engine.clear(workbench.tokens)  # by tokens: their files are recycled by the next round
        moved, chunks = engine.stats(), (WARM_UP_ROUNDS + options.rounds) * workbench.num_chunks
        _require(
            moved.index.writes_done == chunks, f"{moved.index.writes_done} of {chunks} chunks were written to disk"
        )
        from_disk = moved.mover.chunks_loaded_from_disk
        loads = (1 + LOADS_PER_PAIR) * chunks
        _require(from_disk == loads, f"{from_disk} of {loads} chunks were read from disk")
    bounds = BOUNDS[options.geometry.name]
    return [
        Line(name, limit, bounds[name], pairs[WARM_UP_ROUNDS:], workbench.batch_bytes)
        for name, limit, pairs in (
            ("disk write-behind", "O_DIRECT write", writes),
            ("disk cold retrieve", "O_DIRECT read", reads),
            ("disk layerwise retrieve", "load or compute", layers),
        )
    ]


def _store(engine: CacheEngine, workbench: Workbench, *, limit_first: bool) -> Pair:
    """Store a new batch in memory."""
    slots = workbench.new_batch()
    pair, stored = paired(
        workbench.memcpy, lambda: engine.store(workbench.tokens, slot_mapping=slots), limit_first=limit_first
    )
    _require(stored == workbench.num_tokens, f"{stored} of {workbench.num_tokens} tokens were stored")
    return pair


def _write_behind(engine: CacheEngine, workbench: Workbench, raw: RawDisk, *, limit_first: bool) -> Pair:
    """Store a new batch and wait until all of it is on disk."""
    slots = workbench.new_batch()

    def store_and_flush() -> int:
        stored = engine.store(workbench.tokens, slot_mapping=slots)
        return stored if engine.flush() else 0

    pair, written = paired(raw.write, store_and_flush, limit_first=limit_first)
    _require(written == workbench.num_tokens, f"{written} of {workbench.num_tokens} tokens were written in time")
    return pair


def _retrieve(engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool) -> Pair:
    """Retrieve the batch to other blocks, and check every byte of the cache."""
    block_ids, slots = workbench.destination()
    pair, loaded = paired(limit, lambda: engine.retrieve(workbench.tokens, slot_mapping=slots), limit_first=limit_first)
    _require(bool(loaded.all()), f"{int(loaded.sum())} of {workbench.num_tokens} tokens were retrieved")
    workbench.check(block_ids)
    return pair


def _lookup_lines() -> list[Line]:
    workbench = Workbench(_TINY, LOOKUP_CHUNKS)
    slots = workbench.new_batch()
    hasher = PrefixHasher(_TINY.chunk_tokens, _TINY.block_tokens)
    hasher.update(workbench.tokens)
    index = ChunkIndex(LOOKUP_CHUNKS)
    steps = index.prepare_store([ChunkRef(key, _TINY.blocks_per_chunk) for key in hasher.chunk_keys()])
    index.complete_store(steps, set())
    with CacheEngine(workbench.paged, _NAMESPACE, EngineOptions(_pool_bytes(workbench))) as engine:
        engine.store(workbench.tokens, slot_mapping=slots)
        calls = (lambda: index.lookup(hasher).num_tokens, lambda: engine.lookup(workbench.tokens))
        return [
            _lookup_line(name, target_s, call, workbench.num_tokens)
            for (name, target_s), call in zip(LOOKUP_TARGETS_S.items(), calls, strict=True)
        ]


def _policy_line() -> Line:
    (name, target_s), *_ = POLICY_TARGET_S.items()
    cost = measure_policy(Adaptive.name, resident_chunks=POLICY_CHUNKS, requests=POLICY_REQUESTS)
    return Line(name, "target", LOOKUP_BOUND, [Pair(target_s, seconds) for seconds in cost.touch_s])


def _lookup_line(name: str, target_s: float, call: Callable[[], int], num_tokens: int) -> Line:
    pairs = []
    for _ in range(LOOKUP_ROUNDS):
        seconds, known_tokens = timed(call)
        _require(known_tokens == num_tokens, f"{name} found {known_tokens} of {num_tokens} tokens")
        pairs.append(Pair(target_s, seconds))
    return Line(name, "target", LOOKUP_BOUND, pairs)


def _redis_lines(workbench: Workbench, options: BenchOptions, tick: Tick) -> list[Line]:
    """The redis tier against a plain socket client, both with a server of the bench's own.

    Raises:
        ConfigError: there is no redis-py, or the server does not start.
    """
    assert options.redis_server is not None
    samples = measure_redis(
        options.redis_server,
        workbench.paged.layout,
        workbench.num_chunks,
        rounds=WARM_UP_ROUNDS + options.rounds,
        lookup_rounds=LOOKUP_ROUNDS,
        tick=lambda: tick("redis"),
    )
    named = zip(REDIS_BOUNDS.items(), samples, ("plain socket SET", "plain socket GET", "3 round trips"), strict=True)
    lines = [
        Line(name, limit, bound, pairs[WARM_UP_ROUNDS:], workbench.batch_bytes) for (name, bound), pairs, limit in named
    ]
    return [*lines[:2], replace(lines[2], pairs=samples.lookups, size_bytes=0)]


def _vllm_lines(options: BenchOptions) -> list[Line]:
    """Real vLLM, with a model of its own.

    Raises:
        ConfigError: vLLM is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
        samples = measure_vllm(Path(folder), options.rounds)
    return [Line(name, limit, bound, samples[key]) for key, (name, limit, bound) in VLLM_BOUNDS.items()]


def _server_lines(workbench: Workbench, options: BenchOptions, tick: Tick) -> list[Line]:
    """The server tier against memcpy, plain pyzmq and bare round trips.

    Raises:
        ConfigError: its libraries are not there, or the server does not start.
    """
    samples = measure_server(
        workbench.paged.layout,
        workbench.num_chunks,
        rounds=WARM_UP_ROUNDS + options.rounds,
        lookup_rounds=LOOKUP_ROUNDS,
        tick=lambda: tick("server"),
    )
    limits = ("memcpy", "memcpy", "plain pyzmq", "plain pyzmq", "3 round trips")
    lines = [
        Line(name, limit, bound, pairs[WARM_UP_ROUNDS:], workbench.batch_bytes)
        for (name, bound), pairs, limit in zip(SERVER_BOUNDS.items(), samples, limits, strict=True)
    ]
    return [*lines[:4], replace(lines[4], pairs=samples.lookups, size_bytes=0)]


def _pool_bytes(workbench: Workbench) -> int:
    """Bytes of a pool that holds one batch."""
    return workbench.num_chunks * workbench.paged.layout.slot_bytes


def _disk_bytes(layout: KVLayout, num_chunks: int) -> int:
    """Room for one batch on disk and the files of the one before."""
    return 2 * num_chunks * chunkfile.file_bytes(layout, layout.blocks_per_chunk)


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise BenchError(broken)


def bench_table(report: BenchReport) -> Table:
    """The report for people."""
    options = report.options
    table = Table(
        title=f"kvstore bench, {options.geometry.name}: {options.batch_chunks} chunks of "
        f"{options.geometry.chunk_bytes / _MIB:.0f} MiB a call, medians of {options.rounds} rounds"
    )
    for title in ("path", "limit"):
        table.add_column(title)
    for title in ("path's speed", "limit's speed", "fraction", "goal", "floor", "p99 of a call"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for line in report.lines:
        style = "red" if line.failed else "yellow" if line.fraction < line.bound.goal else "green"
        table.add_row(
            line.name,
            line.limit_name,
            _speed(line.path_s, line.size_bytes),
            _speed(line.limit_s, line.size_bytes),
            f"{line.fraction:.2f}",
            f"{line.bound.goal:.2f}",
            f"{line.bound.floor:.2f}",
            _duration(line.p99_s),
            f"[{style}]{line.verdict}[/]",
        )
    if report.skipped:
        table.caption = "not measured: " + "; ".join(report.skipped)
    return table


def _speed(seconds: float, size_bytes: int) -> str:
    return f"{size_bytes / seconds / 1e9:.2f} GB/s" if size_bytes else _duration(seconds)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def measure_and_print(
    *,
    geometry: str,
    batch_mib: int,
    rounds: int,
    folder: Path | None,
    redis_server: Path | None = None,
    vllm: bool = False,
    cache_server: bool = False,
    as_json: bool = False,
) -> bool:
    """Run the bench and print its table, or one JSON object. False if a line is below its floor.

    Raises:
        ConfigError: an unknown geometry, or too little memory.
        BenchError: a path lost a byte.
    """
    console = Console(stderr=True)
    if geometry not in GEOMETRIES:
        raise ConfigError(f"geometry {geometry!r} is not one of {', '.join(GEOMETRIES)}")
    options = BenchOptions(
        GEOMETRIES[geometry], batch_mib * _MIB, rounds, folder, redis_server, vllm=vllm, cache_server=cache_server
    )
    report = _run_shown(options, console)
    codecs = measure_codecs(GEOMETRIES[geometry], rounds)
    if as_json:
        print(json.dumps(report.to_json() | {"codecs": [line.to_json() for line in codecs]}))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(bench_table(report), codec_table(codecs))
    for line in report.failed:
        console.print(
            f"{line.name}: {line.fraction:.2f} of {line.limit_name} is below the floor of {line.bound.floor:.2f}",
            style="red",
            highlight=False,
        )
    return not report.failed


def _run_shown(options: BenchOptions, console: Console) -> BenchReport:
    """Run the bench with a progress bar, if anybody looks."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("memory", total=options.total_rounds)

        def tick(what: str) -> None:
            progress.update(task, description=what)
            progress.advance(task)

        return run_bench(options, tick)
