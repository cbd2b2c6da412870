"""kvstore and LMCache 0.5.6 in one interleaved run: the same KV, the same tokens, the same checks.

    python -m kvstore.tools.bench.lmcache memory|disk|redis|server [--rounds 7] [--mib 1024] [--chunk-tokens 256] ...

Run it with an interpreter that has both; ``lmcache-requirements.txt`` makes one without CUDA. The KV is Llama-8B's on
the CPU, as ``[2, blocks, tokens, heads, head size]`` tensors, which both systems read in place. LMCache's connectors
are for GPUs, so ``CpuConnector`` stands in for one: a loop over chunks around LMCache's own copy operation.

A store ends when every chunk is in its tier: in memory, in files, in Redis. Every round has new KV, new tokens and
other blocks, and starts with both systems empty; they take turns to go first. Every byte is compared after each
retrieve.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.model.errors import KVStoreError
from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.load import Mark
from kvstore.tools.bench.report import BenchReport, bench_table
from kvstore.tools.bench.samples import NAMESPACE, Pair, Pairing, alternating, columns, require, timed
from kvstore.tools.bench.servers import private_redis, private_server
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import free_port, is_listening, running, wait_until

GEOMETRY = GEOMETRIES["llama-8b"]
GIB = 1 << 30
LOOKUPS = 20
HOLD_S = 0.05  # kvstore may reuse an earlier lookup's result for this time
SETTLE_S = 60.0  # for everything written behind to reach its tier
_WARM_UP_ROUNDS = 1
SUBJECTS = (
    Subject("store", "LMCache", "until every chunk is in its tier"),
    Subject("lookup", "LMCache", f"median of {LOOKUPS} lookups, which find everything"),
    Subject("retrieve", "LMCache", "every byte is compared afterwards"),
    Subject("memcpy", "LMCache's store", "as many bytes, on as many threads"),
)


class System:
    """One of the two systems, over the caches of a workbench, with private storage.

    Both libraries' engines in this process take the same calls; LMCache's server does not, so its class has its own.
    """

    name: str
    _engine: Any

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """Store all tokens, and wait until every chunk is in its tier."""
        self._engine.store(tokens=tokens, slot_mapping=slots)
        self._settle(tokens)

    def lookup(self, tokens: list[int]) -> int:
        """Return the leading tokens that can be loaded."""
        return int(self._engine.lookup(tokens))

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """Load all tokens, and return the number of loaded tokens."""
        return int(self._engine.retrieve(tokens=tokens, slot_mapping=slots).sum())

    def clear(self, tokens: list[int]) -> None:
        """Forget everything."""
        self._engine.clear(tokens=tokens)

    def _settle(self, tokens: list[int]) -> None:
        """Wait until every chunk is in its tier."""


class Kvstore(System):
    """kvstore, used through ``CacheEngine``."""

    name = "kvstore"

    def __init__(self, workbench: Workbench, options: EngineOptions) -> None:
        self._engine = CacheEngine(workbench.paged, NAMESPACE, options)
        self.close = self._engine.close

    def _settle(self, _tokens: list[int]) -> None:
        flushed = self._engine.flush(SETTLE_S)
        require(bool(flushed), f"kvstore: not everything was written: {flushed}")


class CpuConnector:
    """GPU connector for LMCache's engine on CPU tensors, with LMCache's own copy operation."""

    def __init__(self, workbench: Workbench) -> None:
        from lmcache import device_ops  # noqa: PLC0415
        from lmcache.lmcache_native import EngineKVFormat, TransferDirection  # noqa: PLC0415

        self._transfer = device_ops.multi_layer_kv_transfer
        self._format = EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        self.batched_from_gpu = partial(self._move, TransferDirection.D2H)  # gathers chunks
        self.batched_to_gpu = partial(self._move, TransferDirection.H2D)  # scatters them
        self._geometry = workbench.geometry
        self._slots_total = workbench.paged.num_blocks * self._geometry.block_tokens
        self._row = self._geometry.kv_heads * self._geometry.head_size
        self._layers = [cache.view(2, self._slots_total, self._row) for cache in workbench.caches]

    def initialize_kvcaches_ptr(self, **_: object) -> None:
        """Do nothing, because the caches are known."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a chunk: K and V, layers, tokens, elements."""
        return torch.Size([2, self._geometry.layers, num_tokens, self._row])

    def _move(
        self,
        direction: object,
        memory_objs: list[Any],
        starts: list[int],
        ends: list[int],
        *,
        slot_mapping: torch.Tensor,
        **_: object,
    ) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self._transfer(
                chunk.tensor,
                self._layers,
                slot_mapping[start:end],
                torch.device("cpu"),
                self._slots_total,
                direction,
                self._format,
                block_size=self._geometry.block_tokens,
                head_size=self._geometry.head_size,
            )


class Lmcache(System):
    """LMCache in process, through ``LMCacheEngine``."""

    name = "LMCache"

    def __init__(self, workbench: Workbench, settings: dict[str, Any]) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: PLC0415
        from lmcache.v1.config import LMCacheEngineConfig  # noqa: PLC0415
        from lmcache.v1.metadata import LMCacheMetadata  # noqa: PLC0415

        self._writes_behind = not settings["local_cpu"]
        self._redis: Any = None
        if "remote_url" in settings:
            from redis import Redis  # noqa: PLC0415

            self._redis = Redis.from_url(settings["remote_url"])
        geometry = workbench.geometry
        config = LMCacheEngineConfig.from_defaults(chunk_size=geometry.chunk_tokens, **settings)
        shape = (geometry.layers, 2, geometry.chunk_tokens, geometry.kv_heads, geometry.head_size)
        metadata = LMCacheMetadata("side-by-side", 1, 1, 0, 0, torch.bfloat16, shape, role="worker")
        one_rank: list[Callable[..., Any]] = [lambda tensor, _: tensor, lambda thing, _: thing]
        self._engine = LMCacheEngineBuilder.get_or_create(
            "side-by-side", config, metadata, CpuConnector(workbench), *one_rank
        )
        self._engine.post_init()

    def _settle(self, tokens: list[int]) -> None:
        if self._writes_behind:  # it has no flush
            is_written = wait_until(lambda: self.lookup(tokens) >= len(tokens), SETTLE_S, every_s=0.001)
            require(is_written, f"LMCache: {self.lookup(tokens)} of {len(tokens)} tokens after {SETTLE_S:.0f} s")

    def clear(self, tokens: list[int]) -> None:
        """See ``System``."""
        if self._redis is None:
            super().clear(tokens)
        elif names := self._redis.keys("*side-by-side*"):  # its clear is not implemented there
            self._redis.delete(*names)


class LmcacheServer(System):
    """LMCache's server mode, through the adapters that vLLM's connector uses."""

    name = "LMCache"

    def __init__(self, workbench: Workbench, url: str) -> None:
        import zmq  # noqa: PLC0415
        from lmcache.integration.vllm import vllm_multi_process_adapter as adapters  # noqa: PLC0415

        self._operation = adapters.LoadStoreOp
        alone = adapters.ParallelStrategy(False, 1, 0, 1, 1, 1)
        self._block_tokens = workbench.geometry.block_tokens
        given = ("side-by-side", self._block_tokens, alone)
        context = zmq.Context()
        self._scheduler = adapters.LMCacheMPSchedulerAdapter([url], context, *given)
        self._worker = adapters.LMCacheMPWorkerAdapter(url, context, *given)
        layers = {f"layers.{layer}": cache for layer, cache in enumerate(workbench.caches)}
        self._worker.register_kv_caches(layers, layout_hints={"kv_layout": "NHD"})
        self._requests = 0
        self._looked_up: list[str] = []  # looked up but not retrieved yet; each holds a lock

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """See ``System``."""
        name = self._name()
        self._worker.submit_store_request(name, self._of(tokens, slots), self._worker.create_recorded_event())
        self._await(lambda: name in (self._worker.get_finished({name})[0] or ()))

    def lookup(self, tokens: list[int]) -> int:
        """See ``System``."""
        name = self._name()
        self._scheduler.maybe_submit_lookup_request(name, tokens)
        found: list[int | None] = [None]

        def answered() -> bool:
            found[0] = self._scheduler.check_lookup_result(name)
            return found[0] is not None

        self._await(answered)
        self._looked_up.append(name)
        return found[0] or 0

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """See ``System``. It loads the chunks that the last lookup locked, as vLLM does."""
        name = self._looked_up.pop()
        self._worker.submit_retrieve_request(name, self._of(tokens, slots), self._worker.create_recorded_event())
        self._await(lambda: name in (self._worker.get_finished(set())[1] or ()))
        return 0 if self._worker.get_block_ids_with_load_errors() else len(tokens)

    def clear(self, tokens: list[int]) -> None:
        """See ``System``. Locks are released first, because LMCache keeps locked chunks."""
        while self._looked_up:
            self._scheduler.free_lookup_locks(tokens, 0, len(tokens), self._looked_up.pop())
        self._scheduler.reset_cache()

    def _of(self, tokens: list[int], slots: torch.Tensor) -> Any:  # noqa: ANN401 - LMCache's
        blocks = (slots[:: self._block_tokens] // self._block_tokens).tolist()
        return self._operation(tokens, [blocks], 0, len(tokens))

    def _name(self) -> str:
        self._requests += 1
        return f"request-{self._requests}"

    def _await(self, done: Callable[[], bool]) -> None:
        require(wait_until(done, SETTLE_S, every_s=0.0001), "LMCache's server does not answer")


@contextmanager
def lmcache_server(folder: Path, pool_bytes: int, chunk_tokens: int) -> Iterator[str]:
    """Run LMCache's server, with memory only, and yield its URL."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--port", str(port)]
    command += ["--http-port", str(free_port()), "--chunk-size", str(chunk_tokens), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", str(1.5 * pool_bytes / GIB)]
    command += ["--supported-transfer-mode", "auto", "--shm-name", f"side_{os.getpid()}"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # its threads and ours would compete for the same cores
    with (folder / "lmcache.log").open("wb") as log, running(command, stdout=log, stderr=log, env=alone):
        wait_until(lambda: is_listening(port), SETTLE_S, every_s=0.2)
        yield f"tcp://127.0.0.1:{port}"


@contextmanager
def opened(tier: str, workbench: Workbench, folder: Path) -> Iterator[tuple[System, System]]:
    """Yield kvstore and LMCache over one tier, with room in memory for a prompt and a quarter."""
    pool_bytes = int(1.25 * workbench.batch_bytes)
    theirs: dict[str, Any] = {"local_cpu": tier == "memory", "max_local_cpu_size": pool_bytes / GIB}
    with ExitStack() as stack:
        ours = EngineOptions(pool_bytes, local_cpu=tier == "memory", io_timeout_s=SETTLE_S)
        if tier == "disk":
            room_bytes = 3 * pool_bytes
            ours = replace(
                ours,
                local_disk=folder / "ours",
                max_local_disk_bytes=room_bytes,
                max_write_queue=workbench.num_chunks,
            )
            theirs |= {"local_disk": f"file://{folder}/theirs/", "extra_config": {"use_odirect": True}}
            theirs |= {"max_local_disk_size": 32 * room_bytes / GIB}  # its clear() frees no room
        elif tier == "redis":
            port = stack.enter_context(private_redis(shutil.which("redis-server"), folder))
            url = f"redis://127.0.0.1:{port}"
            ours = replace(ours, remote=_remote(url, workbench))
            theirs |= {"remote_url": url, "remote_serde": "naive"}
        elif tier == "server":
            url, _ = stack.enter_context(private_server(folder, 2 * pool_bytes))
            ours = replace(ours, remote=_remote(url, workbench))
            their_url = stack.enter_context(lmcache_server(folder, pool_bytes, workbench.geometry.chunk_tokens))
            yield Kvstore(workbench, ours), LmcacheServer(workbench, their_url)
            return
        yield Kvstore(workbench, ours), Lmcache(workbench, theirs)


def _remote(url: str, workbench: Workbench) -> RemoteOptions:
    """Return the options of a remote tier that every lookup here queries again."""
    return RemoteOptions(url, lookup_timeout_s=SETTLE_S, hold_s=HOLD_S, max_queue=workbench.num_chunks)


def measure(ours: System, theirs: System, workbench: Workbench, rounds: int) -> list[Line]:
    """Measure interleaved rounds after one of warm-up, with memcpy of as many bytes."""
    found = [_round(ours, theirs, workbench, pair) for pair in alternating(rounds, warm_up=_WARM_UP_ROUNDS)]
    return [
        subject.line(pairs, size_bytes=0 if subject.name == "lookup" else workbench.batch_bytes)
        for subject, pairs in zip(SUBJECTS, columns(found, _WARM_UP_ROUNDS), strict=True)
    ]


def _round(ours: System, theirs: System, workbench: Workbench, pairing: Pairing) -> tuple[Pair, ...]:
    slots = workbench.new_batch()

    def both(seconds: Callable[[System], float]) -> Pair:
        order = (theirs, ours) if pairing.limit_first else (ours, theirs)
        found_s = {system: seconds(system) for system in order}
        return Pair(found_s[theirs], found_s[ours])

    stored = both(lambda system: timed(partial(system.store, workbench.tokens, slots))[0])
    memcpy = Pair(stored.limit_s, timed(workbench.memcpy)[0])
    looked_up = both(partial(looked_up_s, workbench))
    retrieved = both(partial(retrieved_s, workbench))
    for system in (ours, theirs):
        system.clear(workbench.tokens)
    return stored, looked_up, retrieved, memcpy


def retrieved_s(workbench: Workbench, system: System) -> float:
    """Return the seconds of a retrieve, whose bytes are all compared afterwards."""
    blocks, slots = workbench.destination()
    seconds, loaded = timed(partial(system.retrieve, workbench.tokens, slots))
    require(loaded == workbench.num_tokens, f"{system.name} loaded {loaded} of {workbench.num_tokens} tokens")
    workbench.check(blocks)
    return seconds


def looked_up_s(workbench: Workbench, system: System) -> float:
    """Return the median seconds of some lookups, which must find everything."""
    seconds = []
    for _ in range(LOOKUPS):
        time.sleep(1.2 * HOLD_S)
        took_s, found = timed(partial(system.lookup, workbench.tokens))
        seconds.append(took_s)
        require(found == workbench.num_tokens, f"{system.name} found {found} of {workbench.num_tokens} tokens")
    return statistics.median(seconds)


def main() -> None:
    """Measure one tier, and print the table and the report as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=["memory", "disk", "redis", "server"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=GEOMETRY.chunk_tokens)
    parser.add_argument("--torch-threads", type=int, default=1, help="LMCache copies with them, kvstore with its own")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))  # noqa: S108
    given = parser.parse_args()
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_MP_TRANSFER_MODE", "engine_driven")  # through shared memory, as on a CPU
    geometry = replace(GEOMETRY, chunk_tokens=given.chunk_tokens)
    workbench = Workbench(geometry, (given.mib << 20) // geometry.chunk_bytes, split=True)
    torch.set_num_threads(given.torch_threads)
    begin = Mark.now()
    with TemporaryDirectory(prefix="side-", dir=given.folder) as folder:
        with opened(given.tier, workbench, Path(folder)) as (ours, theirs):
            lines = measure(ours, theirs, workbench, given.rounds)
        report = BenchReport(geometry, workbench.batch_bytes, given.rounds, lines, begin.until(Mark.now()))
        Console(width=120).print(bench_table(report))
        print(json.dumps({"tier": given.tier, **report.to_json()}))
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KVStoreError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # LMCache's threads may not end
    os._exit(0)
