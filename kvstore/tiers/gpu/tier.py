"""The GPU tier: chunks in a bounded pool of device memory, for those that are loaded most often.

As a ``Tier`` like any other it copies between host buffers and its slots, on streams of its own, and returns when a
copy is done. What makes it worth its memory is the way past the host: ``gather`` takes a chunk from the paged KV cache
straight into a slot, and ``scatter`` brings it back, both on the caller's current stream, so that they fall in line
with the model's kernels and the host waits for nothing.

Slots are addressed by chunk, never by number: a load finds exactly the chunk it asks for, or a miss. The tier chooses
the slots and forgets nothing by itself; when it is full, the index says what goes.

With a CPU device the same code runs in host memory: good for tests, and of no other use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, InvalidCallError, TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.tiers.base import BoundedTier, TierCounters, TierSetup, Transfer, payload_view
from kvstore.tiers.gpu.slots import SlotLedger
from kvstore.tiers.gpu.streams import find_streams

_GIB = 2**30


class GpuTier(BoundedTier):
    """``num_slots`` slots on one device, all allocated at once.

    Thread-safe. ``gather`` and ``scatter`` belong on the thread, and the stream, that runs the model.

    Raises:
        ConfigError: the device has no room for the slots.
    """

    name = "gpu"

    def __init__(
        self, layout: KVLayout, num_slots: int, device: torch.device, namespace_id: bytes | None = None
    ) -> None:
        self.capacity_bytes = num_slots * layout.slot_bytes
        self.counters = TierCounters()
        self.device = device
        self._layout = layout
        self._namespace_id = namespace_id
        self._pool: torch.Tensor | None = _allocate(num_slots, layout.slot_bytes, device)  # None: closed
        self._streams = find_streams(device, num_slots)
        self._lock = threading.Lock()
        self._ledger = SlotLedger(num_slots)

    @classmethod
    def open(cls, setup: TierSetup) -> GpuTier:
        """Make a pool in device memory; the registry's factory.

        The option ``device`` is one that torch knows, ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default CUDA's current
        one.

        Raises:
            ConfigError: there is no such device, it has no room, or the capacity does not hold one chunk.
        """
        setup.require_known_options("device")
        num_slots = setup.capacity_bytes // setup.layout.slot_bytes
        if num_slots < 1:
            raise ConfigError(
                f"{setup.capacity_bytes} bytes of device memory do not hold one chunk of {setup.layout.slot_bytes}: "
                "raise max_local_gpu_size, or set it to 0"
            )
        device = find_device(str(setup.options.get("device", "cuda")))
        return cls(setup.layout, num_slots, device, setup.namespace.id)

    def gather(self, ref: ChunkRef, paged: PagedKV, block_ids: BlockIds) -> Outcome:
        """Store a chunk from its blocks, without a detour over the host: STORED, FULL or FAILED.

        In the order of the current stream, and not waited for: the blocks may be written again by kernels launched
        later, and the chunk may be read from any stream and thread as soon as this returns.

        Raises:
            InvalidCallError: the chunk does not consist of these blocks, or the cache is not one of this tier.
            TierError: the device failed.
        """
        self._check_paged(paged)
        if not 0 < ref.num_blocks == len(block_ids) <= self._layout.blocks_per_chunk:
            raise InvalidCallError(f"a chunk of {ref.num_blocks} blocks cannot be gathered from {len(block_ids)}")
        with _translated(f"gather a chunk on {self.device}"):
            return self._fill(ref, lambda payload: paged.gather_on_device(block_ids, payload))

    def scatter(self, ref: ChunkRef, paged: PagedKV, block_ids: BlockIds, first_block: int) -> Outcome:
        """Load blocks ``first_block ... first_block + len(block_ids)`` of a chunk: HIT or MISS.

        In the order of the current stream, and not waited for: kernels launched later on it see the blocks, and the
        chunk may be removed or replaced as soon as this returns.

        Raises:
            InvalidCallError: the chunk does not have these blocks, or the cache is not one of this tier.
            TierError: the device failed.
        """
        self._check_paged(paged)
        last_block = first_block + len(block_ids)
        if not 0 <= first_block <= last_block <= ref.num_blocks:
            raise InvalidCallError(f"a chunk of {ref.num_blocks} blocks has no blocks {first_block} to {last_block}")
        with _translated(f"scatter a chunk on {self.device}"):
            return self._read(
                ref, lambda payload: paged.scatter_on_device(block_ids, payload, ref.num_blocks, first_block)
            )

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, with the bytes of its slot, the longest untouched first."""
        with self._lock:
            self._require_pool()
            return [(ref, self._layout.slot_bytes) for ref in self._ledger.refs()]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether a slot holds it."""
        with self._lock:
            self._require_pool()
            return [ref in self._ledger for ref in refs]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy chunks into their buffers in host memory: HIT or MISS each."""
        batch = self._payloads(transfers)
        with _translated(f"copy chunks from {self.device}"), self._streams.aside(inward=False):
            return [self._read(ref, partial(self._streams.copy, host)) for ref, host in batch]

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy chunks from their buffers in host memory: STORED or FULL each, or FAILED if ``clear`` came between."""
        batch = self._payloads(transfers)
        with _translated(f"copy chunks to {self.device}"), self._streams.aside(inward=True):
            return [
                self._fill(ref, partial(self._streams.copy, source=host), transfer.belongs_to)
                for transfer, (ref, host) in zip(transfers, batch, strict=True)
            ]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks, and free their slots as soon as nobody reads them."""
        with self._lock:
            self._require_pool()
            for ref in refs:
                self._ledger.drop(ref)

    def clear(self) -> None:
        """Forget every chunk, and those on their way."""
        with self._lock:
            self._require_pool()
            self._ledger.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk, and those on their way."""
        with self._lock:
            self._namespace_id = namespace.id
        self.clear()

    def stored_bytes(self, num_blocks: int) -> int:  # noqa: ARG002 - a tail takes a slot as well
        """The size of a slot, whatever the chunk's length."""
        return self._layout.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a chunk, are being filled with one, or are still being read."""
        with self._lock:
            return self._ledger.slots_in_use * self._layout.slot_bytes

    def close(self) -> None:
        """Give the memory back to torch's allocator, which lends it again when the last work on it is done."""
        with self._lock:
            self._pool = None
            self._ledger.clear()

    def _fill(
        self,
        ref: ChunkRef,
        move: Callable[[torch.Tensor], None],
        belongs_to: Callable[[bytes | None], bool] = lambda _: True,
    ) -> Outcome:
        """Let ``move`` write a chunk's payload into a slot, outside the lock."""
        with self._lock:
            pool = self._require_pool()
            if not belongs_to(self._namespace_id):
                self.counters.count(Outcome.FAILED, 0)
                return Outcome.FAILED
            fill = self._ledger.begin_fill(ref)
            if fill is None:
                self.counters.count(Outcome.FULL, 0)
                return Outcome.FULL
        payload = self._payload(pool, fill.slot, ref)
        is_whole = False
        try:
            with self._streams.using(fill.slot, payload):
                move(payload)
            is_whole = True
        finally:
            with self._lock:
                outcome = Outcome.STORED if self._ledger.end_fill(fill, is_whole=is_whole) else Outcome.FAILED
                if is_whole:
                    self.counters.count(outcome, len(payload))
        return outcome

    def _read(self, ref: ChunkRef, move: Callable[[torch.Tensor], None]) -> Outcome:
        """Let ``move`` read a chunk's payload from its slot, outside the lock."""
        with self._lock:
            pool = self._require_pool()
            slot = self._ledger.begin_read(ref)
            if slot is None:
                self.counters.count(Outcome.MISS, 0)
                return Outcome.MISS
        payload = self._payload(pool, slot, ref)
        is_whole = False
        try:
            with self._streams.using(slot, payload):
                move(payload)
            is_whole = True
        finally:
            with self._lock:
                self._ledger.end_read(ref, slot)
                if is_whole:
                    self.counters.count(Outcome.HIT, len(payload))
        return Outcome.HIT

    def _payload(self, pool: torch.Tensor, slot: int, ref: ChunkRef) -> torch.Tensor:
        return pool[slot, : self._layout.payload_bytes(ref.num_blocks)]

    def _payloads(self, transfers: Sequence[Transfer]) -> list[tuple[ChunkRef, torch.Tensor]]:
        """All transfers, checked, with their payloads in host memory as tensors."""
        return [(transfer.ref, torch.from_numpy(payload_view(self._layout, transfer))) for transfer in transfers]

    def _check_paged(self, paged: PagedKV) -> None:
        if paged.device != self.device or paged.layout != self._layout:
            raise InvalidCallError(
                f"a paged KV cache on {paged.device} with blocks of {paged.layout.block_bytes} bytes does not fit a "
                f"GPU tier on {self.device} with blocks of {self._layout.block_bytes}: use one device and one layout"
            )

    def _require_pool(self) -> torch.Tensor:
        if self._pool is None:
            raise ClosedError("the GPU tier was closed")
        return self._pool


def find_device(name: str) -> torch.device:
    """The device of that name, with its number.

    Raises:
        ConfigError: it is neither a CUDA device that is here, nor the CPU.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"there is no device {name!r}: cuda, cuda:<number> and cpu are known") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"a GPU tier cannot live on {name!r}: cuda, cuda:<number> and cpu are known")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"a GPU tier needs CUDA, and torch {torch.__version__} finds none: set max_local_gpu_size to 0"
        )
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name!r}: this process sees {torch.cuda.device_count()}, from cuda:0 on")
    return device


def _allocate(num_slots: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory as uint8 ``[num_slots, slot_bytes]``.

    Outside inference mode, in which engines like to start: its tensors could not be written to by other threads.

    Raises:
        ConfigError: it says how much is free.
    """
    try:
        with torch.inference_mode(mode=False):
            return torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError) as error:  # a TypeError if the size is no 64-bit number
        free = f", of which {torch.cuda.mem_get_info(device)[0] / _GIB:.1f} are free" if device.type == "cuda" else ""
        raise ConfigError(
            f"cannot take {num_slots * slot_bytes / _GIB:.1f} GiB of the memory of {device}{free}: lower "
            "max_local_gpu_size, or what the engine takes (vLLM: --gpu-memory-utilization)"
        ) from error


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Torch's errors as ours.

    Raises:
        TierError: says what could not be done.
    """
    try:
        yield
    except RuntimeError as error:
        raise TierError(f"cannot {what}: {error}") from error
