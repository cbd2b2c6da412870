"""Run of the bench, which measures the requested sections one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from kvstore.memory.limits import require_memory
from kvstore.model.errors import ConfigError
from kvstore.tools.bench.calls import CALLS, start
from kvstore.tools.bench.decisions import longest_decisions
from kvstore.tools.bench.disk import measure_disk
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.lines import Line, Race, Target
from kvstore.tools.bench.load import Mark
from kvstore.tools.bench.mooncake import measure_mooncake
from kvstore.tools.bench.moves import measure_cpu, measure_gpu
from kvstore.tools.bench.proxy import measure_proxy
from kvstore.tools.bench.remote import measure_objects, measure_redis, measure_seaweed, measure_server
from kvstore.tools.bench.report import BenchReport
from kvstore.tools.bench.samples import MIN_ROUNDS, WARM_UP_ROUNDS, Tick
from kvstore.tools.bench.scheduling import SCHEDULING
from kvstore.tools.bench.vllm import measure_vllm
from kvstore.tools.bench.workbench import Workbench, one_torch_thread
from kvstore.tools.interrupts import Interruption

MAX_BATCH_CHUNKS = 64  # the disk tier keeps this many files for reuse
MIB = 1 << 20
_Measure = Callable[[Workbench, int, Tick], list[Line]]


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
        mooncake: also measure a private Mooncake Store.
        objects: also measure a store of objects, on a server of the bench.
        weed: SeaweedFS's program, to measure a store of objects that is real; None skips it.
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
    mooncake: bool = False
    objects: bool = False
    weed: Path | None = None
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
        return sum(section.ticks for section in _sections(self) if section.is_wanted)


class _Section(NamedTuple):
    """Lines that are measured, or not measured, together; ``ticks`` is how often that calls its ``Tick``."""

    name: str
    is_wanted: bool
    ticks: int
    measure: _Measure


def run_bench(options: BenchOptions, tick: Callable[[str], object] = lambda _: None) -> BenchReport:
    """Measure all requested lines; an interrupted run returns the lines measured until then.

    Args:
        options: options of the run.
        tick: called before each round, with the name of the section.
    """
    # In the order of use: caches of two batches, data, copy, random base, pool of two batches, raw disk buffers.
    require_memory(8 * options.batch_chunks * options.geometry.chunk_bytes, "the bench", key="--batch-mib")
    lines: list[Line] = []
    skipped = []
    interrupted = False
    begin = Mark.now()
    with one_torch_thread():
        workbench = Workbench(options.geometry, options.batch_chunks)
        for section in _sections(options):
            if not section.is_wanted or interrupted:
                skipped.append(f"{section.name}: {'interrupted' if section.is_wanted else 'not asked for'}")
                continue
            try:
                lines += section.measure(workbench, options.rounds, partial(tick, section.name))
            except ConfigError as error:
                skipped.append(f"{section.name}: {error}")
            except Interruption:
                skipped.append(f"{section.name}: interrupted")
                interrupted = True
    batch_bytes, load = options.batch_chunks * options.geometry.chunk_bytes, begin.until(Mark.now())
    return BenchReport(options.geometry, batch_bytes, options.rounds, lines, load, skipped, interrupted)


def _sections(options: BenchOptions) -> list[_Section]:
    ticks, started = WARM_UP_ROUNDS + options.rounds, start(options.rounds)
    return [
        _Section("CPU", True, ticks, measure_cpu),
        _Section("disk", options.folder is not None, 2 * ticks, _in_folder(options.folder, measure_disk)),
        _Section("lookup", True, len(CALLS) + len(SCHEDULING), partial(_targets, rows=(*CALLS, *SCHEDULING))),
        _Section("start", options.start, len(started), partial(_targets, rows=started)),
        _Section(
            "redis", options.redis_server is not None, ticks, partial(measure_redis, program=options.redis_server)
        ),
        _Section("mooncake", options.mooncake, ticks, measure_mooncake),
        _Section("objects", options.objects, ticks, measure_objects),
        _Section("SeaweedFS", options.weed is not None, ticks, _in_folder(options.folder, _seaweed(options.weed))),
        _Section("server", options.cache_server, ticks, _server),
        _Section("hand-over", options.handover, ticks, partial(_handover, channel=None)),
        _Section("NIXL", options.handover, ticks, partial(_handover, channel="nixl")),
        _Section("proxy", options.proxy, ticks, measure_proxy),
        _Section("GPU", options.gpu, ticks, _gpu),
        _Section("vLLM", options.vllm, 1, _in_folder(options.folder, measure_vllm)),
    ]


def _in_folder(parent: Path | None, measure: Callable[[Workbench, int, Tick, Path], list[Line]]) -> _Measure:
    def run(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
        with TemporaryDirectory(prefix="kvstore-bench-", dir=parent) as made:
            return measure(workbench, rounds, tick, Path(made))

    return run


def _seaweed(program: Path | None) -> Callable[[Workbench, int, Tick, Path], list[Line]]:
    return partial(measure_seaweed, program=program or Path())


def _targets(_: Workbench, _rounds: int, tick: Tick, *, rows: Iterable[Target | Race]) -> list[Line]:
    lines = []
    for row in rows:
        tick()
        lines.append(row.line())
    return lines


def _server(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    return [*measure_server(workbench, rounds, tick), longest_decisions.line()]


def _handover(workbench: Workbench, rounds: int, tick: Tick, *, channel: str | None) -> list[Line]:
    try:
        from kvstore.tools.bench.handover import measure_handover  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return measure_handover(workbench, rounds, tick, channel)


def _gpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    if not torch.cuda.is_available():
        raise ConfigError("there is none that torch can use")
    on_device = Workbench(workbench.geometry, workbench.num_chunks, device=torch.device("cuda", 0))
    return measure_gpu(on_device, rounds, tick)
