"""Run of the bench, which measures the requested lines one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvstore.errors import ConfigError
from kvstore.memory.limits import require_memory
from kvstore.tools.bench.cpu import measure_cpu
from kvstore.tools.bench.decisions import measure_decisions
from kvstore.tools.bench.disk import measure_disk
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.calls import measure_gpu
from kvstore.tools.bench.lines import BenchReport, Line
from kvstore.tools.bench.load import Mark
from kvstore.tools.bench.lookup import measure_index, measure_lookups, measure_touches
from kvstore.tools.bench.proxy import measure_proxy
from kvstore.tools.bench.redis import measure_redis
from kvstore.tools.bench.samples import MIN_ROUNDS, WARM_UP_ROUNDS, Tick, one_torch_thread
from kvstore.tools.bench.scheduling import measure_scheduling
from kvstore.tools.bench.server import measure_server
from kvstore.tools.bench.start import measure_start
from kvstore.tools.bench.vllm import measure_vllm
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.interrupts import Interruption

MAX_BATCH_CHUNKS = 64  # the disk tier keeps this many files for reuse
MIB = 1 << 20


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run.

    Attributes:
        geometry: geometry of the KV.
        batch_bytes: bytes moved by one call, rounded down to whole chunks. The bench needs about eight times as much
            memory.
        rounds: samples of each line, warm-up excluded.
        folder: parent folder of the disk lines' folder; None skips them.
        redis_server: program to start for the Redis lines; None skips them.
        start: also measure importing the library and opening an engine.
        cache_server: also measure the cache server.
        handover: also measure hand-overs to another process.
        proxy: also measure the proxy.
        gpu: also measure a GPU, if there is one.
        vllm: also measure real vLLM, if it is installed.
    """

    geometry: Geometry
    batch_bytes: int = 256 * MIB
    rounds: int = 15
    folder: Path | None = None
    redis_server: Path | None = None
    start: bool = False
    cache_server: bool = False
    handover: bool = False
    proxy: bool = False
    gpu: bool = False
    vllm: bool = False

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(f"{self.rounds} rounds say little: take at least {MIN_ROUNDS}")
        if self.batch_bytes < self.geometry.chunk_bytes:
            raise ConfigError(
                f"a batch of {self.batch_bytes / MIB:.0f} MiB does not hold one chunk of "
                f"{self.geometry.chunk_bytes / MIB:.0f} MiB: raise it"
            )

    @property
    def batch_chunks(self) -> int:
        """Chunks moved by one call."""
        return min(self.batch_bytes // self.geometry.chunk_bytes, MAX_BATCH_CHUNKS)

    @property
    def total_ticks(self) -> int:
        """Number of calls of ``tick`` by ``run_bench`` if everything can be measured."""
        kinds = 1 + 2 * bool(self.folder) + bool(self.redis_server) + self.cache_server + self.proxy + self.gpu
        kinds += 2 * self.handover
        return (self.rounds + WARM_UP_ROUNDS) * kinds + 3 + self.rounds * self.start + self.vllm


def run_bench(options: BenchOptions, tick: Tick = lambda _: None) -> BenchReport:
    """Measure all requested lines; an interrupted run returns the lines measured until then.

    Raises:
        BenchError: a path did not move the expected bytes.
        ConfigError: there is too little memory.
    """
    # In the order of use: caches of two batches, data, copy, random base, pool of two batches, raw disk buffers.
    require_memory(8 * options.batch_chunks * options.geometry.chunk_bytes, "the bench", key="--batch-mib")
    lines: list[Line] = []
    skipped = []
    interrupted = False
    begin = Mark.now()
    with one_torch_thread():
        for name, measure in _sections(Workbench(options.geometry, options.batch_chunks), options, tick):
            if measure is None or interrupted:
                skipped.append(f"{name}: {'not asked for' if measure is None else 'interrupted'}")
                continue
            try:
                lines += measure()
            except ConfigError as error:
                skipped.append(f"{name}: {error}")
            except Interruption:
                skipped.append(f"{name}: interrupted")
                interrupted = True
    batch_bytes, load = options.batch_chunks * options.geometry.chunk_bytes, begin.until(Mark.now())
    return BenchReport(options.geometry, batch_bytes, options.rounds, lines, load, skipped, interrupted)


Section = tuple[str, Callable[[], list[Line]] | None]


def _sections(workbench: Workbench, options: BenchOptions, tick: Tick) -> Iterator[Section]:
    """Yield each section's name with its measurement, or None if it was not requested."""
    rounds = options.rounds
    yield "CPU", lambda: measure_cpu(workbench, rounds, tick)
    yield "disk", (lambda: _in_folder(workbench, options, tick)) if options.folder else None
    yield "lookup", lambda: _calls(tick)
    yield "start", (lambda: measure_start(rounds, tick)) if options.start else None
    redis_server = options.redis_server
    yield "redis", (lambda: measure_redis(workbench, redis_server, rounds, tick)) if redis_server else None
    yield "server", (lambda: _at_server(workbench, rounds, tick)) if options.cache_server else None
    for name, channel in (("hand-over", None), ("NIXL", "nixl")):
        yield name, partial(_handed_over, workbench, options, tick, channel) if options.handover else None
    yield "proxy", (lambda: measure_proxy(rounds, tick)) if options.proxy else None
    yield "GPU", (lambda: _on_gpu(options, tick)) if options.gpu else None
    yield "vLLM", (lambda: _with_vllm(options, tick)) if options.vllm else None


def _in_folder(workbench: Workbench, options: BenchOptions, tick: Tick) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
        return measure_disk(workbench, Path(folder), options.rounds, tick)


def _handed_over(workbench: Workbench, options: BenchOptions, tick: Tick, channel: str | None) -> list[Line]:
    try:
        from kvstore.tools.bench.handover import measure_handover  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return measure_handover(workbench, options.rounds, tick, channel)


def _at_server(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    return [*measure_server(workbench, rounds, tick), *measure_decisions(workbench.geometry)]


def _calls(tick: Tick) -> list[Line]:
    tick("lookup")
    lookups = [*measure_lookups(), measure_index()]
    tick("policy")
    touches = measure_touches()
    tick("scheduling")
    return [*lookups, touches, *measure_scheduling()]


def _on_gpu(options: BenchOptions, tick: Tick) -> list[Line]:
    if not torch.cuda.is_available():
        raise ConfigError("there is none that torch can use")
    workbench = Workbench(options.geometry, options.batch_chunks, device=torch.device("cuda", 0))
    return measure_gpu(workbench, options.rounds, tick)


def _with_vllm(options: BenchOptions, tick: Tick) -> list[Line]:
    tick("vLLM")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
        return measure_vllm(options.geometry, Path(folder), options.rounds)
