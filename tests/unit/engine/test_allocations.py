"""The data path allocates no memory for payload, which moves only between existing buffers.

A layer of a chunk is 512 KiB here, so any copy of one would show. Python and numpy report to tracemalloc what they
allocate; torch does not, and no tier but the GPU's uses it for payload.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.gate import HANG_GUARD_S
from support.redis_server import RedisServer, running

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.tools.bench import moves
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.samples import NAMESPACE, Pairing
from kvstore.tools.bench.servers import private_server
from kvstore.tools.bench.workbench import Workbench

MOST_BYTES = 1 << 18
GEOMETRY = Geometry("wide", layers=2, kv_heads=8, head_size=128, chunk_tokens=128)
CHUNKS = 3
POOL_BYTES = 2 * CHUNKS * GEOMETRY.chunk_bytes
Opened = Callable[[Path], AbstractContextManager[EngineOptions]]
CALLS = (moves.store_and_flush, moves.retrieve, moves.store_by_layer, moves.retrieve_by_layer)


@contextmanager
def memory(_: Path) -> Iterator[EngineOptions]:
    yield EngineOptions(POOL_BYTES)


@contextmanager
def disk(folder: Path, *, use_odirect: bool | None = None) -> Iterator[EngineOptions]:
    yield EngineOptions(
        POOL_BYTES,
        local_cpu=False,
        io_timeout_s=HANG_GUARD_S,
        local_disk=folder / "disk",
        max_local_disk_bytes=8 * POOL_BYTES,
        use_odirect=use_odirect,
    )


@contextmanager
def cached_disk(folder: Path) -> Iterator[EngineOptions]:
    with disk(folder, use_odirect=False) as options:
        yield options


def shared(url: str) -> EngineOptions:
    remote = RemoteOptions(url, lookup_timeout_s=10.0, max_queue=CHUNKS)
    return EngineOptions(POOL_BYTES, local_cpu=False, io_timeout_s=HANG_GUARD_S, remote=remote)


@contextmanager
def redis(folder: Path) -> Iterator[EngineOptions]:
    server = RedisServer(folder / "redis")
    with running(server):
        yield shared(f"redis://127.0.0.1:{server.port}")


@contextmanager
def cache_server(folder: Path) -> Iterator[EngineOptions]:
    with private_server(folder, 8 * POOL_BYTES) as (url, _):
        yield shared(url)


@pytest.mark.parametrize(
    "tier",
    [memory, disk, cached_disk, *(pytest.param(tier, marks=pytest.mark.slow) for tier in (redis, cache_server))],
    ids=["memory", "disk", "cached_disk", "redis", "cache_server"],
)
def test_moving_payload_takes_no_memory(tier: Opened, tmp_path: Path) -> None:
    workbench = Workbench(GEOMETRY, CHUNKS)
    peaks: dict[str, int] = {}

    def nothing() -> None:
        tracemalloc.start()
        tracemalloc.reset_peak()

    with tier(tmp_path) as options, CacheEngine(workbench.paged, NAMESPACE, options) as engine:
        for _ in range(2):  # buffers are made the first time
            for call in CALLS:
                call(engine, workbench, nothing, Pairing(limit_first=True))
                peaks[call.__name__] = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert engine.flush(), "what waits to be written would leave no room for the next"
    assert {name: peak for name, peak in peaks.items() if peak > MOST_BYTES} == {}
