"""The cache engine for use without a serving engine: index and mover in one process, with LMCache-like calls.

    with CacheEngine.open(kv_caches, model="llama-8b", num_blocks=4096, block_tokens=16, cpu_bytes=4 << 30) as engine:
        engine.store(tokens, slot_mapping=slots)
        known_tokens = engine.lookup(tokens)
        loaded = engine.retrieve(tokens, slot_mapping=slots)  # bool [num_tokens]

Every call takes the whole token sequence, from position 0. A ``mask`` is F...FT...T: tokens marked False are neither
stored nor loaded. ``slot_mapping`` gives each token's slot in the paged cache, ``block_id * block_tokens + offset``;
the tokens to be moved must fill whole, aligned blocks.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Self

import numpy as np
import torch

from kvstore.engine.opening import log_device_bytes, open_tiers, slow_timeout_s
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.engine.planner import Planner
from kvstore.engine.requests import Request, Slots, Tokens, check_request, hash_tokens
from kvstore.index.plans import IndexCounters, Match, Place, pin_name
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS, KeyExtras, Namespace, PrefixKey, new_epoch
from kvstore.model.lifetime import Lifetime
from kvstore.paged.base import BlockIds, PagedKV, copy_threads
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.planes import LayerCache
from kvstore.tiers.base import TierCounters
from kvstore.transfer.counters import MoverCounters
from kvstore.transfer.lane import Flushed
from kvstore.transfer.layerwise import LayerLoad, LayerStore, LayerWork, by_layer
from kvstore.transfer.mover import LoadJob, LoadResult, Mover

__all__ = ["CacheEngine", "EngineStats"]

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
DEFAULT_CPU_BYTES = 5 << 30  # as ``max_local_cpu_size``


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's contents and counters."""

    slots: int
    slots_in_use: int
    disk_used_bytes: int
    index: IndexCounters
    mover: MoverCounters
    disk: TierCounters | None
    remote: TierCounters | None


class CacheEngine:
    """Stores and retrieves the KV of token sequences. Thread-safe; calls that move KV run one at a time."""

    def __init__(self, paged: PagedKV, namespace: Namespace, options: EngineOptions) -> None:
        """Open the tiers, and adopt the chunks that the disk still holds. A failure leaves nothing open or locked.

        Raises:
            ConfigError, FolderOwnedError, TierError: see ``open_tiers``.
        """
        with ExitStack() as opened:
            self._open(paged, namespace, options, opened)
            opened.pop_all()

    @classmethod
    def open(
        cls,
        kv_caches: Mapping[str, LayerCache],
        *,
        model: str | Mapping[str, str | int],
        num_blocks: int,
        block_tokens: int,
        chunk_tokens: int = 256,
        cpu_bytes: int = DEFAULT_CPU_BYTES,
        disk: str | Path | Sequence[str | Path] = (),
        disk_bytes: int = 0,
        remote: RemoteOptions | None = None,
    ) -> Self:
        """Open an engine over a model's KV tensors. For all other settings, see ``EngineOptions``.

        Args:
            kv_caches: the tensor of each layer by name, in the order of the layers, all on one device: blocks in front,
                ``[num_blocks, ...]``, or K and V, ``[2, num_blocks, ...]``; or a pair (K, V) of tensors.
            model: identity of the KV: a name, or fields like ``{"model": ..., "revision": ...}``. KV is found again
                only under equal fields, so name everything that changes it: weights, revision, quantization. The size
                of a chunk and the layout of the tensors are added.
            num_blocks: blocks in each tensor.
            block_tokens: tokens in a block.
            chunk_tokens: tokens stored and found as one piece; a multiple of ``block_tokens``.
            cpu_bytes: size of the pool in host memory, reserved at once.
            disk: folder of the disk tier, or one on each of several disks; empty for none.
            disk_bytes: bound of all folders together.
            remote: a tier shared with other engines.

        Raises:
            LayoutError: the tensors cannot be stored block by block.
            ConfigError, FolderOwnedError, TierError: a size is too small, or a tier cannot be opened.
        """
        paged = bind_paged_kv(kv_caches, num_blocks=num_blocks, block_tokens=block_tokens, chunk_tokens=chunk_tokens)
        named = {"model": model} if isinstance(model, str) else model
        namespace = Namespace({**named, "chunk_tokens": chunk_tokens, "layout": paged.layout.fingerprint})
        folders = tuple(disk or ()) if not isinstance(disk, str | Path) else (disk,) if disk != "" else ()
        options = EngineOptions(
            max_local_cpu_bytes=cpu_bytes, local_disk=folders, max_local_disk_bytes=disk_bytes, remote=remote
        )
        return cls(paged, namespace, options)

    def _open(self, paged: PagedKV, namespace: Namespace, options: EngineOptions, opened: ExitStack) -> None:
        self.layout = paged.layout
        self._num_blocks = paged.num_blocks
        self._namespace = namespace
        self._options = options
        self._tiers = open_tiers(paged, namespace, options)
        opened.callback(self._tiers.close)
        self._planner = Planner(namespace, self.layout, options, self._tiers, self._remove, limit=self._limit)
        opened.callback(self._planner.close)
        lanes = self._tiers.open_lanes(options, self._planner.complete_write)
        self._mover = Mover(
            paged,
            self._tiers.cpu,
            lanes,
            self._tiers.hot,
            staging_only=not options.local_cpu,
            copy_threads=copy_threads(),
        )
        log_device_bytes(paged, self._tiers, threads=1)
        self._move_lock = threading.Lock()  # the paged cache belongs to one call at a time
        self._abandoned: deque[Callable[[], object]] = deque()  # ends of abandoned generators
        self._clears = 0  # counts clears and resets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def lookup(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS, lease_id: str | None = None) -> int:
        """Return the number of leading tokens that ``retrieve`` would find, in whole blocks; a remote tier is asked.

        With ``lease_id`` they are kept from eviction until ``release``, or for ``lease_timeout_s``; another lookup with
        the same id renews the lease. All leases together hold at most half of the pool: tokens beyond that, or only in
        the remote tier, are counted but not held.
        """

        def answer(match: Match) -> int:
            if lease_id is not None:
                self._planner.index.lease(lease_id, match.refs, self._options.lease_timeout_s)
            return match.num_tokens

        return self._planner.match(hash_tokens(self.layout, tokens, extras), answer)

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        with self._planner.deciding() as index:
            index.release(lease_id)

    def pin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Keep the known prefix of a sequence in its tiers until ``unpin``. Returns the tokens held.

        Pins count as leases: together they hold at most half of the pool.
        """
        hasher = hash_tokens(self.layout, tokens, extras)
        with self._planner.deciding() as index:
            match = index.lookup(hasher)
            held = index.lease(pin_name(hasher), match.refs, math.inf)
            return self._up_to(match.refs[:held], match.num_tokens)

    def unpin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> None:
        """End the pin of exactly this sequence, if there is one."""
        self.release(pin_name(hash_tokens(self.layout, tokens, extras)))

    def prefetch(self, tokens: Tokens, tier: str = "cpu", *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Load the known prefix of a sequence into a faster tier; ``cpu`` is the only one.

        Returns how many leading tokens are in memory then; they end at the first chunk that could not be loaded.
        Without ``local_cpu`` no chunk stays in memory, so nothing is read and the result is 0.

        Raises:
            InvalidCallError: another tier.
            ClosedError: after ``close``.
        """
        if tier != "cpu":
            raise InvalidCallError(f'cannot prefetch into {tier!r}: use "cpu", the only tier to prefetch into')
        hasher = hash_tokens(self.layout, tokens, extras)
        told = self._planner.ask_remote(hasher)
        with self._turn():
            steps, num_tokens = self._planner.plan_prefetch(hasher, told)
            self._load([LoadJob(step, _NO_BLOCKS, 0) for step in steps])
            with self._planner.lock:
                here = takewhile(lambda step: self._planner.index.in_memory(step.ref.prefix_key), steps)
                return self._up_to((step.ref for step in here), num_tokens)

    def store(
        self,
        tokens: Tokens,
        mask: Tokens | None = None,
        *,
        slot_mapping: Slots,
        extras: KeyExtras = NO_EXTRAS,
        ttl_s: float | None = None,
    ) -> int:
        """Store the KV of the unmasked tokens: in full chunks, and with ``save_unfull_chunk`` the tail too.

        A chunk that begins before the first True of ``mask`` is left out. Returns the tokens newly stored, without
        those already known or without room. The copy is done when this returns; slower tiers are written in the
        background. With ``ttl_s`` chunks expire after that time, in all tiers; those that cannot keep it get none.

        Raises:
            InvalidCallError: mask or slots break the rules above (the message names the first bad one), or ``ttl_s`` is
                not positive.
            ClosedError: after ``close``.
        """
        request = self._store_request(tokens, mask, slot_mapping, extras, ttl_s)
        with self._turn():
            jobs = self._planner.plan_store(request, ttl_s)
            return self._planner.complete_store(jobs, lambda: self._mover.store(jobs))

    def store_layer(
        self,
        tokens: Tokens,
        mask: Tokens | None = None,
        *,
        slot_mapping: Slots,
        extras: KeyExtras = NO_EXTRAS,
        ttl_s: float | None = None,
    ) -> Generator[int | None, None, None]:
        """``store``, one layer per ``next()``, right after the model has computed it.

        Yields None after each layer, and finally the tokens newly stored, which can be found from then on. Nothing
        happens before the first ``next()``. If the generator is closed before the last layer, or ``clear`` or
        ``reset_cache`` is called after the first one, nothing is stored. ``next()`` may be called from any thread, and
        other calls may run in between.

        Raises:
            InvalidCallError: as ``store``, at once.
            ClosedError: in ``next()``, after ``close``.
        """
        request = self._store_request(tokens, mask, slot_mapping, extras, ttl_s)

        def begin() -> LayerWork[int]:
            jobs, clears = self._planner.plan_store(request, ttl_s), self._clears
            store = LayerStore(self._mover, jobs)

            def end() -> int:
                return self._planner.complete_store(jobs, lambda: store.finish(trusted=clears == self._clears))

            return LayerWork(store.move, end)

        return by_layer(begin, self.layout.num_layers, self._turn, self._abandoned)

    def retrieve(
        self, tokens: Tokens, mask: Tokens | None = None, *, slot_mapping: Slots, extras: KeyExtras = NO_EXTRAS
    ) -> torch.Tensor:
        """Load the KV of the longest known prefix, except masked tokens, into its slots.

        Returns a bool tensor ``[num_tokens]`` on the CPU: True where KV was loaded. From the first chunk that could not
        be loaded on it is False, even where blocks were written.

        Raises:
            InvalidCallError: mask or slots break the rules above; the message names the first bad one.
            ClosedError: after ``close``.
        """
        request = self._load_request(tokens, mask, slot_mapping, extras)
        with self._turn():
            jobs = self._planner.plan_load(request)
            failed = self._load(jobs).failed
        return self._loaded(request, jobs, failed)

    def retrieve_layer(
        self, tokens: Tokens, mask: Tokens | None = None, *, slot_mapping: Slots, extras: KeyExtras = NO_EXTRAS
    ) -> Generator[torch.Tensor | None, None, None]:
        """``retrieve``, one layer per ``next()``: the model computes a layer while the next ones are loaded.

        Yields None as soon as a layer of all chunks is in its slots, and finally the result of ``retrieve``. The slots
        belong to the generator until then: it writes the next layer while this one is used. A remote tier is asked at
        once; reads begin with the first ``next()``.

        If a chunk turns out damaged or missing at some layer, the mask ends before it, though its layers up to that one
        are in their slots. Results computed from them must be computed again. A chunk that another generator is still
        loading from a slower tier counts as missing. If ``clear`` or ``reset_cache`` is called after the first
        ``next()``, no further layer begins, and nothing counts as loaded. ``next()`` may be called from any thread, and
        other calls may run in between. A generator closed before its last yield releases its chunks with the next call
        that moves KV, or ``close``.

        Raises:
            InvalidCallError: as ``retrieve``, at once.
            ClosedError: in ``next()``, after ``close``.
        """
        request = self._load_request(tokens, mask, slot_mapping, extras)

        def begin() -> LayerWork[torch.Tensor]:
            jobs, clears = self._planner.plan_load(request), self._clears
            load = LayerLoad(self._mover, jobs)

            def move(layer: int) -> None:
                if clears == self._clears:
                    load.move(layer)

            def end() -> torch.Tensor:
                failed = self._planner.complete_load(jobs, load.finish).failed
                return self._loaded(request, jobs if clears == self._clears else [], failed)

            return LayerWork(move, end, load.halt)

        return by_layer(begin, self.layout.num_layers, self._turn, self._abandoned)

    def clear(self, tokens: Tokens | None = None, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Forget the chunks of a token sequence, or all chunks, in every tier. Returns how many there were.

        Afterwards none of them is found, except whole blocks shared with other sequences. Waits, within the tiers'
        deadlines, until the slower tiers have removed them.
        """
        hasher = None if tokens is None else hash_tokens(self.layout, tokens, extras)
        with self._turn():
            self._clears += 1
            if hasher is not None:
                count = self._planner.forget(hasher)
            else:
                with self._planner.deciding() as index:
                    count = index.clear()
                    self._mover.clear(index.take_removals())
        self._settle()
        if hasher is not None:
            self._planner.forget_longer(hasher, self._settle)
        return count

    def reset_cache(self) -> None:
        """Forget everything because the model's weights were changed in place: begin a new epoch of the namespace.

        Nothing stored before is found again, here or after a restart. Chunks stored from now on are found until
        ``close``, because no later process can know that it has these weights. Waits, within the tiers' deadlines,
        until the slower tiers have removed their chunks; if they hang, later writes wait for that.
        """
        with self._turn():
            self._clears += 1
            with self._planner.deciding() as index:
                index.clear()
                index.take_removals()  # removed with their epoch
            namespace = self._namespace.at_epoch(new_epoch())
            self._mover.reset(namespace)
            self._planner.reset_directory(namespace)
        self._settle()

    def flush(self, timeout_s: float | None = None) -> Flushed:
        """Wait until everything stored so far is in the slower tiers, by default for ``io_timeout_s``.

        Returns how many writes since the last ``flush`` stored nothing, because a tier failed, had no room, its queue
        was full, or time ran out. The result is True if there are none. Chunks with a time to live do not count in
        tiers that cannot keep it.
        """
        self._planner.check_open()
        flushed = self._mover.flush(self._options.io_timeout_s if timeout_s is None else timeout_s)
        return flushed.plus(Flushed(full=self._planner.take_drops()))

    def stats(self) -> EngineStats:
        """Return the engine's contents and counters; the counters are live."""
        index = self._planner.index
        with self._planner.lock:
            return EngineStats(
                self._tiers.cpu.num_slots,
                index.slots_in_use,
                index.disk_used_bytes,
                index.counters,
                self._mover.counters,
                self._tiers.disk.counters if self._tiers.disk else None,
                self._tiers.remote.counters if self._tiers.remote else None,
            )

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush within ``timeout_s``, end all threads, release the folder. Idempotent. False if writes were dropped.

        Running calls end first. If a disk hangs, this returns after the time-out and the same time again, or 5 seconds
        if that is more; the folder stays locked until the disk answers or the process ends.
        """
        with self._move_lock:
            if self._planner.is_closed:
                return True
            self._end_abandoned()
            self._planner.close()
            return self._mover.close(self._options.io_timeout_s if timeout_s is None else timeout_s)

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the turn of a call that moves KV. First ends abandoned generators."""
        with self._move_lock:
            self._planner.check_open()
            self._end_abandoned()
            yield

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    def _settle(self) -> None:
        """Wait until the slower tiers have carried out their removals, or their deadlines have passed."""
        self._mover.settle(slow_timeout_s(self._options.io_timeout_s) + self._options.io_timeout_s)

    def _remove(self, place: Place, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks from a slower tier. Given to the planner, which is created before the mover."""
        self._mover.remove(place, refs)

    def _limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Change times to live of chunks on disk. Given to the planner, too."""
        self._mover.note_times((), lifetimes)

    def _up_to(self, refs: Iterable[ChunkRef], num_tokens: int) -> int:
        """Return the tokens of a match that its first chunks hold; the last chunk may hold more than is matched."""
        return min(sum(ref.num_blocks for ref in refs) * self.layout.block_tokens, num_tokens)

    def _load_request(self, tokens: Tokens, mask: Tokens | None, slot_mapping: Slots, extras: KeyExtras) -> Request:
        request = check_request(self.layout, self._num_blocks, tokens, mask, slot_mapping, extras=extras)
        return request._replace(told=self._planner.ask_remote(request.hasher, request.begin))

    def _loaded(self, request: Request, jobs: Sequence[LoadJob], failed: set[PrefixKey]) -> torch.Tensor:
        """Return the mask of the tokens loaded, up to the first chunk that failed."""
        here = takewhile(lambda job: job.step.ref.prefix_key not in failed, jobs)
        end = request.begin + sum(len(job.block_ids) for job in here) * self.layout.block_tokens
        loaded = torch.zeros(request.hasher.num_tokens, dtype=torch.bool)
        loaded[request.begin : end] = True
        return loaded

    def _load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Carry out planned loads."""
        return self._planner.complete_load(jobs, lambda: self._mover.load(jobs))

    def _store_request(
        self, tokens: Tokens, mask: Tokens | None, slot_mapping: Slots, extras: KeyExtras, ttl_s: float | None
    ) -> Request:
        if ttl_s is not None and not ttl_s > 0:
            raise InvalidCallError(f"ttl_s must be positive, not {ttl_s}")
        return check_request(
            self.layout, self._num_blocks, tokens, mask, slot_mapping, extras=extras, whole_chunks=True
        )
