"""Drivers of LMCache 0.5.6 on the CPU: in process, with a stand-in for its GPU connectors, and in server mode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.tools.bench.samples import require
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.dev.beside.systems import SETTLE_S
from kvstore.tools.processes import free_port, is_listening, running, wait_until

GIB = 1 << 30


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


class Lmcache:
    """LMCache in process, through ``LMCacheEngine``."""

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
        self._engine: Any = LMCacheEngineBuilder.get_or_create(
            "side-by-side", config, metadata, CpuConnector(workbench), *one_rank
        )
        self._engine.post_init()

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """See ``System``."""
        self._engine.store(tokens=tokens, slot_mapping=slots)
        if self._writes_behind:  # it has no flush
            is_written = wait_until(lambda: self.lookup(tokens) >= len(tokens), SETTLE_S, every_s=0.001)
            require(is_written, f"LMCache: {self.lookup(tokens)} of {len(tokens)} tokens after {SETTLE_S:.0f} s")

    def lookup(self, tokens: list[int]) -> int:
        """See ``System``."""
        return int(self._engine.lookup(tokens))

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """See ``System``."""
        return int(self._engine.retrieve(tokens=tokens, slot_mapping=slots).sum())

    def clear(self, tokens: list[int]) -> None:
        """See ``System``."""
        if self._redis is None:
            self._engine.clear(tokens=tokens)
        elif names := self._redis.keys("*side-by-side*"):  # its clear is not implemented there
            self._redis.delete(*names)


class LmcacheServer:
    """LMCache's server mode, through the adapters that vLLM's connector uses."""

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
