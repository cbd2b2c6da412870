"""A worker of a simulated engine in a process of its own, perhaps on another host, and the engine around it.

The model's cache is in files that both processes map. Calls and answers go over a pair of sockets.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.engine import opening
from kvstore.engine.options import EngineOptions
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from support.fake_host import Cache
from support.fake_parts import BLOCK, CHUNK, CHUNK_SLOT_BYTES, GARBAGE, Setup
from support.fake_vllm import FakeVllm
from support.forked import forker
from support.gate import HANG_GUARD_S

PROBE_INTERVAL_S = 0.05

Words = Callable[[int, Sequence[str]], list[str]]
"""The words that run a module for a rank, on its host."""


@dataclass(frozen=True)
class Task:
    """All that a worker's process needs.

    Attributes:
        cache: the files of the layers' caches.
        gpu_blocks: blocks of each.
        namespace: of the chunks.
        options: of the engine.
        remote_url: as in ``WorkerFacts``.
        server: its server for other engines; None for none.
    """

    cache: tuple[Path, ...]
    gpu_blocks: int
    namespace: Namespace
    options: EngineOptions
    remote_url: str | None
    server: EmbeddedOptions | None = None


@dataclass(frozen=True)
class ProcessSetup(Setup):
    """Setup of an engine whose workers are processes.

    Attributes:
        disk: of each worker, on its host; None for none.
        folder_of_caches: where the caches of the model are.
        words: see there.
        reached: the address of each worker's tier for other hosts.
        servers: those of the workers for other engines.
    """

    disk: Path | None = None
    folder_of_caches: Path = Path()
    words: Words = lambda _, command: list(command)
    reached: Sequence[str | None] = (None, None)
    servers: Sequence[EmbeddedOptions | None] = (None, None)


class WorkerProcess:
    """The near end of a worker's process. Has what a simulated engine calls of a worker."""

    def __init__(self, rank: int, task: Task, words: Words) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self.process = forker().start(words(rank, ["support.worker_process"]), stdin=theirs.fileno(), stderr=2)
        self._connection.send(task)
        self._background = SimpleNamespace(finish_saves=partial(self._call, "finish_saves"))
        self._mover = SimpleNamespace(flush=lambda s: SimpleNamespace(pending=self._call("pending", s)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def close(self) -> None:
        """Let it close the worker, and end it."""
        try:
            if self.process.poll() is None:
                self._call("close")
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self._connection.close()

    def _call(self, name: str, *arguments: object) -> Any:
        self._connection.send((name, arguments))
        assert self._connection.poll(2 * HANG_GUARD_S), f"{name} hangs"
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class ProcessVllm(FakeVllm):
    """An engine whose workers are processes."""

    setup: ProcessSetup

    def _worker(self, rank: int) -> Any:
        setup = self.setup
        setup.folder_of_caches.mkdir(exist_ok=True)
        files = tuple(setup.folder_of_caches / f"{rank}-{layer}" for layer in range(len(self.caches[rank])))
        self.caches[rank] = [_mapped(path, setup.gpu_blocks, "w+") for path in files]
        for cache in self.caches[rank]:
            cache[:] = GARBAGE
        options = EngineOptions(
            max_local_cpu_bytes=setup.slots * CHUNK_SLOT_BYTES,
            local_cpu=setup.local_cpu,
            local_disk=setup.disk,
            max_local_disk_bytes=1 << 20 if setup.disk else 0,
            use_odirect=False,
            io_timeout_s=2.0,
            remote=self._remote_at(rank),
        )
        task = Task(files, setup.gpu_blocks, self.namespace(rank), options, setup.reached[rank], setup.servers[rank])
        return WorkerProcess(rank, task, setup.words)


def _mapped(path: Path, num_blocks: int, mode: Any) -> Cache:
    return np.memmap(path, np.int64, mode, shape=(num_blocks, BLOCK))


def main() -> None:
    """Carry out the calls that come over a socket."""
    opening.PROBE_INTERVAL_S = PROBE_INTERVAL_S
    connection = Connection(os.dup(0))
    task: Task = connection.recv()
    caches = {
        f"layer.{number}": torch.from_numpy(_mapped(path, task.gpu_blocks, "r+"))
        for number, path in enumerate(task.cache)
    }
    paged = bind_paged_kv(caches, num_blocks=task.gpu_blocks, block_tokens=BLOCK, chunk_tokens=CHUNK, reserved_blocks=1)
    how = WorkerOptions(layer_names=tuple(caches), remote_url=task.remote_url)
    server = EmbeddedServer(task.namespace, paged.layout, task.server) if task.server is not None else None
    worker = StoreWorker(paged, task.namespace, task.options, how, server)
    calls: Mapping[str, Callable[..., object]] = {
        "finish_saves": worker._background.finish_saves,
        "pending": lambda timeout_s: worker._mover.flush(timeout_s).pending,
        "loaded": lambda: worker._counters().chunks_loaded_from_remote,
        "from_disk": lambda: worker._counters().chunks_loaded_from_disk,
    }
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # the test has ended
            break
        try:
            answer = calls.get(name, None) or getattr(worker, name)
            connection.send(answer(*arguments))
        except Exception as error:  # noqa: BLE001 - the test is told
            connection.send(error)
        if name == "close":
            break
