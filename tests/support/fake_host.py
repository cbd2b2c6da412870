"""The two sides of the adapter below a simulated vLLM: a real `StoreScheduler`, real `StoreWorker`s, their device.

A step computes the KV of a token only if all that the token attends to is right, and garbage otherwise; so a wrong byte
in any block, once used, is an error that names the request.
"""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvstore.adapters.vllm.plan import StepPlan, WorkerFacts
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.connected import Connected
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.config import StoreConfig
from kvstore.engine import opening
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.index.entries import NO_SLOT
from kvstore.index.index import ChunkIndex
from kvstore.paged.base import PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.planes import find_planes
from kvstore.paged.staging import COPY_BYTES
from support.fake_parts import GARBAGE, CommonSetup, FakeRequest, Scheduled, Step, sample
from support.fake_tables import FakeGroup, FakeTables
from support.late_device import LateDevice, LateStreams
from support.uses import are_loads_idle, are_saves_idle, uses_of

Message = TypeVar("Message")
Cache = npt.NDArray[np.int64]


def scheduler_options(
    setup: CommonSetup, rules: SaveRules, load_rules: LoadRules, remote: RemoteOptions | None
) -> SchedulerOptions:
    """Return a setup's options for the scheduler side, for any model."""
    config = StoreConfig(
        local_cpu=setup.local_cpu,
        min_retrieve_tokens=setup.min_retrieve_tokens,
        min_remote_tokens=setup.min_remote_tokens,
        max_tokens_per_load=setup.max_tokens_per_load,
        max_write_queue=setup.max_write_queue,
        verify_fraction=setup.verify_fraction,
        record_trace=str(setup.trace) if setup.trace is not None else None,
    )
    return SchedulerOptions(rules, config, remote=remote, load_rules=load_rules, async_save=setup.async_save)


def over_a_wire(message: Message) -> Message:
    """Return a copy, as the other process has it."""
    return copy.deepcopy(message)


class FakeHost(FakeTables):
    """One engine without vLLM's scheduler and runner.

    Args:
        setup: of the engine.
        groups: of the model.
        caches: for each rank, the model's cache of each layer, which are filled with garbage.
        options: of the scheduler side.
    """

    def __init__(
        self,
        setup: CommonSetup,
        groups: Sequence[FakeGroup],
        caches: list[list[Cache]],
        options: SchedulerOptions,
    ) -> None:
        super().__init__(groups, setup.gpu_blocks)
        self.setup = setup
        self.caches = caches
        self.random = random.Random(setup.seed)
        self.late = None
        if setup.eagerness is not None:
            self.late = LateDevice(setup.seed, eagerness=setup.eagerness, is_uneven=True)
        self.wrong: list[AssertionError] = []  # found by what was launched
        self.weights = 0
        self.epochs = {0: ""}  # of the weights so far
        self.in_flight: deque[Step] = deque()
        self.kept: dict[str, tuple[FakeRequest, int]] = {}  # ended, blocks kept until so many ranks have reported
        self.loading: dict[str, tuple[FakeRequest, int]] = {}  # wait for a fetch, until so many ranks have reported
        self.scheduler = StoreScheduler(options)
        self.workers: list[StoreWorker] = []
        with patch.object(opening, "open_tier", setup.server.open) if setup.server else nullcontext():
            try:
                self.workers.extend(self._worker(rank) for rank in range(len(caches)))
                self.scheduler.connect([self._facts(rank) for rank in range(len(caches))])
            except BaseException:
                self.close()
                raise

    def _worker(self, rank: int) -> StoreWorker:
        raise NotImplementedError

    def _facts(self, rank: int) -> WorkerFacts:
        return self.workers[rank].facts()

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int) -> None:
        """Compute the KV of the tokens from ``start`` on, from the KV before it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the workers."""
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    @property
    def index(self) -> ChunkIndex:
        """Catalog of the scheduler."""
        return self.connected.index

    @property
    def connected(self) -> Connected:
        """Connected state with which the scheduler plans."""
        assert self.scheduler._connected is not None
        return self.scheduler._connected

    # -- workers ----------------------------------------------------------------------------------------------------

    def _engine_options(
        self, rank: int, slot_bytes: int, disk_bytes: int, remote: RemoteOptions | None
    ) -> EngineOptions:
        setup = self.setup
        return EngineOptions(
            max_local_cpu_bytes=setup.slots * slot_bytes,
            local_cpu=setup.local_cpu,
            local_disk=setup.folder / f"rank-{rank}" if setup.folder else None,
            max_local_disk_bytes=disk_bytes,
            use_odirect=False,
            disk_io_threads=2,
            remote=remote,
        )

    def _bind(
        self,
        caches: dict[str, Cache],
        block_tokens: int,
        chunk_tokens: int,
        *,
        staging_bytes: int,
        copy_bytes: int = COPY_BYTES,
        beside: PagedKV | None = None,
    ) -> PagedKV:
        """Bind a rank's layers of one group, on a late device with the streams and staging of ``beside``, if given."""
        layers = {name: torch.from_numpy(cache) for name, cache in caches.items()}
        blocks = self.num_blocks
        paged = bind_paged_kv(
            layers, num_blocks=blocks, block_tokens=block_tokens, chunk_tokens=chunk_tokens, reserved_blocks=1
        )
        if self.late is None:
            return paged
        planes = [find_planes(name, cache, blocks) for name, cache in layers.items()]
        assert beside is None or isinstance(beside, DevicePagedKV)
        streams = LateStreams(self.late) if beside is None else None
        return DevicePagedKV(
            planes,
            paged.layout,
            blocks,
            1,
            streams=streams,
            staging_bytes=staging_bytes,
            copy_bytes=copy_bytes,
            group_bytes=copy_bytes,
            beside=beside,
        )

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _launch(self, work: Callable[[], None]) -> None:
        """Have the model do some work, at once or on its stream."""
        if self.late is None:
            work()
            return

        def noting_errors() -> None:  # on any thread that waits for the device
            try:
                work()
            except AssertionError as error:
                self.wrong.append(error)

        self.late.current.launch(noting_errors)

    def _let_time_pass(self) -> None:
        if self.late is None:
            return
        if self.random.random() < 0.05:
            self.late.run_all()  # or a slow stream never ends next to a fast one
        for _ in range(20):
            self.late.run_at_random()

    def _prepare(self, step: Step) -> list[StepPlan]:
        """Give each rank its own plan, as over a wire. Blocks that were taken are overwritten before or after that."""
        plans = [over_a_wire(step.plan) for _ in self.workers]
        if self.setup.overwrites_early:
            self._overwrite_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.prepare(plan)
        if not self.setup.overwrites_early:
            self._overwrite_taken()
        return plans

    def _overwrite_taken(self) -> None:
        """Overwrite the blocks that the schedule has given away, and copy to some, as the step may do."""
        blocks, self.taken = self.taken, []
        copies, self.copies = self.copies, []

        def overwrite() -> None:
            for layers in self.caches:
                for layer in layers:
                    layer[blocks] = GARBAGE
                    for source, target in copies:
                        layer[target] = layer[source]

        if blocks:
            self._launch(overwrite)

    def _compute(self, step: Step, part: Scheduled) -> None:
        request, tokens = part.request, list(part.request.all_token_ids)
        start = request.on_gpu
        end = start + part.count - part.drafts
        while len(tokens) < end:  # sampled by a step whose output is not known yet
            tokens.append(sample(tokens))
        accepted = 0
        if part.samples:
            accepted = self.random.randint(0, part.drafts)
            for _ in range(accepted + 1):
                tokens.append(sample(tokens))
            step.outputs[request.request_id] = tokens[end : end + accepted + 1]
            step.rejected[request.request_id] = part.drafts - accepted
        self._write(step, part, tokens[: end + accepted], start)
        request.on_gpu = end + accepted

    # -- reports of the ranks to vLLM -------------------------------------------------------------------------------

    def _take_fetched(self, step: Step, worker: StoreWorker) -> None:
        step.fetched |= _said_by_all(self.loading, worker.take_fetched_requests())

    def _take_report(self, step: Step, worker: StoreWorker) -> None:
        report = over_a_wire(worker.take_report())
        step.ended |= _said_by_all(self.kept, worker.take_ended_requests())
        if step.report is None:
            step.report = report
        elif report is not None:
            step.report.merge(report)

    # -- checks -----------------------------------------------------------------------------------------------------

    def chunk_files(self, rank: int = 0) -> list[Path]:
        """Return the files of the chunks on one rank's disk."""
        assert self.setup.folder is not None
        home = self.setup.folder / f"rank-{rank}"
        mover = self.workers[rank]._mover
        assert mover.settle(10) or mover.cpu._pool._preparation._closing.is_set()
        folders = os.walk(home)  # unlike a glob, it passes over a dead folder that goes while it looks
        files = [Path(folder) / name for folder, _, names in folders for name in names if not folder.endswith(".free")]
        return sorted(path for path in files if path.suffix == ".safetensors")

    def assert_nothing_leaked(self) -> None:
        """Assert after `settle` that no lease, plan, write, slot or block is left."""
        assert uses_of(self.index) == 0
        assert not self.scheduler._steps.in_flight
        assert are_saves_idle(self.connected.saves)
        assert are_loads_idle(self.connected.loads)
        assert not +self.connected.loads._fetched_keys
        assert not self.scheduler._trackers
        slots = [chunk.slot for chunk in self.index._chunks.values() if chunk.memory is not NO_SLOT]
        assert len(slots) == len(set(slots)) == self.index.slots_in_use
        assert not self.deferred_frees
        assert not any(self.uses.values())
        assert sorted(self.free) == list(range(1, self.num_blocks))


def _said_by_all(waiting: dict[str, tuple[FakeRequest, int]], req_ids: Iterable[str]) -> set[str]:
    """Return the requests that the last rank has reported as ended, as vLLM counts the reports of the ranks."""
    said = set()
    for req_id in req_ids:
        request, ranks = waiting[req_id]
        waiting[req_id] = (request, ranks - 1)
        if ranks == 1:
            said.add(req_id)
    return said
