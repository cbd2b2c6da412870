"""The cache engine for use without a serving engine: index and mover in one process, behind LMCache-like calls.

    paged = bind_paged_kv(kv_caches, num_blocks=..., block_tokens=16, chunk_tokens=256)
    with CacheEngine(paged, Namespace({"model": "llama-8b"}), EngineOptions(max_local_cpu_bytes=4 << 30)) as engine:
        engine.store(tokens, slot_mapping=slots)
        known_tokens = engine.lookup(tokens)
        loaded = engine.retrieve(tokens, slot_mapping=slots)  # bool [num_tokens]

Every call takes the whole token sequence from position 0. A ``mask`` is F...FT...T: the tokens marked False are already
where they should be, and are neither stored nor loaded. ``slot_mapping`` gives each token's slot in the paged cache,
``block_id * block_tokens + offset``; where KV is moved it must cover whole, aligned blocks.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch

from kvstore.assembly import EngineOptions, Shard, open_directory, open_tiers, slow_timeout_s
from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.lookup import QUESTION_ROUNDS
from kvstore.catalog.plans import IndexCounters, Match, Place
from kvstore.catalog.remote_view import RemoteView, Told
from kvstore.catalog.sequence import all_refs, chunk_refs, pin_name
from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, InvalidCallError
from kvstore.keys import NO_EXTRAS, KeyExtras, Namespace, PrefixHasher, PrefixKey
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.paged.copiers import copy_threads
from kvstore.requests import Request, Slots, Tokens, check_request, hash_tokens
from kvstore.tiers.base import TierCounters
from kvstore.transfer.flushed import Flushed
from kvstore.transfer.layerwise import LayerLoad, LayerStore, LayerWork, by_layer
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, MoverCounters, StoreJob

__all__ = ["CacheEngine", "EngineOptions", "EngineStats", "new_epoch"]

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of what the engine holds and did."""

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
        """Open the tiers and take in what the disk still holds. A failure leaves nothing open or locked.

        Raises:
            ConfigError, FolderOwnedError, TierError: see ``open_tiers``.
        """
        with ExitStack() as opened:
            self._open(paged, namespace, options, opened)
            opened.pop_all()

    def _open(self, paged: PagedKV, namespace: Namespace, options: EngineOptions, opened: ExitStack) -> None:
        self.layout = paged.layout
        self._num_blocks = paged.num_blocks
        self._namespace = namespace
        self._options = options
        self._tiers = open_tiers(paged, namespace, options)
        opened.callback(self._tiers.close)
        remote, disk = options.remote, self._tiers.disk
        self._view = RemoteView(remote.hold_s) if remote else None
        self._directory = open_directory([Shard(namespace, self.layout, remote)]) if remote else None
        if self._directory is not None:
            opened.callback(self._directory.close)
        self._index = ChunkIndex(
            self._tiers.cpu.num_slots,
            keep_in_memory=options.local_cpu,
            disk_capacity_bytes=disk.usable_bytes if disk else 0,
            stored_bytes=disk.stored_bytes if disk else None,
            max_writes=options.max_write_queue,
            remote=self._view,
            max_sends=remote.max_queue if remote and remote.url else 0,
            cache_policy=options.cache_policy,
            disk_policy=options.disk_policy,
        )
        self._index.adopt(self._tiers.survivors)
        lanes = self._tiers.open_lanes(options, self._on_written)
        self._mover = Mover(
            paged,
            self._tiers.cpu,
            lanes,
            self._tiers.hot,
            is_passage=not options.local_cpu,
            copy_threads=copy_threads(),
        )
        self._index_lock = threading.Lock()  # decisions: short, never held during I/O
        self._move_lock = threading.Lock()  # moves: the paged cache belongs to one call at a time
        self._abandoned: deque[Callable[[], object]] = deque()  # ends of generators that were given up
        self._clears = 0  # and resets
        self._told_drops = 0  # writes that were not queued, up to the last flush
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS, lease_id: str | None = None) -> int:
        """How many leading tokens ``retrieve`` would find, in whole blocks; a remote tier is asked.

        With ``lease_id`` they are kept from eviction until ``release``, or for ``lease_timeout_s``; asking again under
        the same name renews the lease. All leases together hold at most half of the pool: what goes beyond, or is
        only at the remote tier, is answered all the same, without a lease.
        """

        def answer(match: Match) -> int:
            if lease_id is not None:
                self._index.lease(lease_id, match.refs, self._options.lease_timeout_s)
            return match.num_tokens

        return self._match(hash_tokens(self.layout, tokens, extras), answer)

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        with self._index_lock:
            self._begin_decision()
            self._index.release(lease_id)

    def pin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Keep the known prefix of a sequence in the tiers where it is until ``unpin``. Returns the tokens held.

        Pins count as leases: together they hold at most half of the pool.
        """
        hasher = hash_tokens(self.layout, tokens, extras)
        with self._index_lock:
            self._begin_decision()
            match = self._index.lookup(hasher)
            held = self._index.lease(pin_name(hasher), match.refs, math.inf)
            return sum(ref.num_blocks for ref in match.refs[:held]) * self.layout.block_tokens

    def unpin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> None:
        """End the pin of exactly this sequence; one that was never pinned is ignored."""
        hasher = hash_tokens(self.layout, tokens, extras)
        with self._index_lock:
            self._begin_decision()
            self._index.release(pin_name(hasher))

    def prefetch(self, tokens: Tokens, tier: str = "cpu", *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Bring the known prefix of a sequence into a faster tier; ``cpu`` is the only one.

        Returns how many leading tokens are in memory when it is done: what lies behind a chunk that could not be loaded
        does not count, though it may be there. Without ``local_cpu`` nothing stays in memory: the answer is 0, and
        nothing is read.

        Raises:
            InvalidCallError: another tier.
            ClosedError: after ``close``.
        """
        if tier != "cpu":
            raise InvalidCallError(f'cannot prefetch into {tier!r}: the only tier that can be filled so is "cpu"')
        hasher = hash_tokens(self.layout, tokens, extras)
        told = self._ask_remote(hasher)
        with self._turn():
            with self._index_lock:
                self._begin_decision()
                refs = self._index.lookup(hasher, told=told).refs if self._options.local_cpu else ()
                steps = self._index.prepare_load(refs, told)
            self._load([LoadJob(step, _NO_BLOCKS, 0) for step in steps])
            with self._index_lock:
                here = list(takewhile(lambda step: self._index.in_memory(step.ref.prefix_key), steps))
        return sum(step.ref.num_blocks for step in here) * self.layout.block_tokens

    def store(
        self,
        tokens: Tokens,
        mask: Tokens | None = None,
        *,
        slot_mapping: Slots,
        extras: KeyExtras = NO_EXTRAS,
        ttl_s: float | None = None,
    ) -> int:
        """Store the KV of the tokens not masked out, in whole chunks and, if the options say so, the tail.

        A chunk that begins before the first True of ``mask`` is left out. Returns the tokens newly stored; those
        already known, or without room, do not count. The copy is done when this returns; the disk is written behind.
        With ``ttl_s`` chunks stay in memory, and go after that time.

        Raises:
            InvalidCallError: mask or slots break the rules above, where the message names the first bad one, or
                ``ttl_s`` is not positive.
            ClosedError: after ``close``.
        """
        request = self._store_request(tokens, mask, slot_mapping, extras, ttl_s)
        with self._turn():
            jobs = self._plan_store(request, ttl_s)
            failed = {job.step.ref.prefix_key for job in jobs}  # should gathering raise
            try:
                failed = self._mover.store(jobs)
            finally:
                self._complete_store(jobs, failed)
        return self._stored_tokens(jobs, failed)

    def store_layer(
        self,
        tokens: Tokens,
        mask: Tokens | None = None,
        *,
        slot_mapping: Slots,
        extras: KeyExtras = NO_EXTRAS,
        ttl_s: float | None = None,
    ) -> Generator[int | None, None, None]:
        """``store``, one layer per ``next()``: for a model that has just computed it.

        Yields None after each layer, and then, once more, the tokens newly stored. They can be found from then on, and
        the slower tiers are written behind. Nothing happens before the first ``next()``. If the generator is closed
        before the last layer, or ``clear`` or ``reset_cache`` was called since the first one, nothing is stored.
        ``next()`` may be called from any thread, and other calls may come in between.

        Raises:
            InvalidCallError: as ``store``, at once.
            ClosedError: in ``next()``, after ``close``.
        """
        request = self._store_request(tokens, mask, slot_mapping, extras, ttl_s)

        def begin() -> LayerWork[int]:
            jobs, clears = self._plan_store(request, ttl_s), self._clears
            store = LayerStore(self._mover, jobs)

            def end() -> int:
                failed = {job.step.ref.prefix_key for job in jobs}
                try:
                    failed = store.finish(trusted=clears == self._clears)
                finally:
                    self._complete_store(jobs, failed)
                return self._stored_tokens(jobs, failed)

            return LayerWork(store.move, end)

        return by_layer(begin, self.layout.num_layers, self._turn, self._abandoned)

    def retrieve(
        self, tokens: Tokens, mask: Tokens | None = None, *, slot_mapping: Slots, extras: KeyExtras = NO_EXTRAS
    ) -> torch.Tensor:
        """Load the KV of the longest known prefix, except what is masked out, into its slots.

        Returns a bool tensor ``[num_tokens]`` on the CPU: True where KV was loaded. It ends at the first chunk that
        could not be loaded: what lies behind is False, even where blocks were written.

        Raises:
            InvalidCallError: mask or slots break the rules above; the message names the first bad one.
            ClosedError: after ``close``.
        """
        request = self._load_request(tokens, mask, slot_mapping, extras)
        with self._turn():
            jobs = self._plan_load(request)
            failed = self._load(jobs).failed
        return self._loaded(request, jobs, failed)

    def retrieve_layer(
        self, tokens: Tokens, mask: Tokens | None = None, *, slot_mapping: Slots, extras: KeyExtras = NO_EXTRAS
    ) -> Generator[torch.Tensor | None, None, None]:
        """``retrieve``, one layer per ``next()``: for a model that computes it while the next ones are on their way.

        Yields None after each layer, when that layer of all chunks is in its slots, and then, once more, what
        ``retrieve`` returns. The slots belong to it until then: the next layer is written while this one is used. Reads
        begin with the first ``next()``; a remote tier is asked before.

        A chunk that turns out damaged or missing at some layer ends the mask before it, although its layers up to that
        one were right and are in their slots; those behind are as they were. So what was computed from it must be
        computed again. A chunk that another generator is still bringing from a slower tier counts as missing. If
        ``clear`` or ``reset_cache`` was called since the first ``next()``, no further layer is begun, and nothing
        counts as loaded. ``next()`` may be called from any thread, and other calls may come in between. A generator
        that is closed before its last yield gives its chunks free with the next call that moves KV, or ``close``.

        Raises:
            InvalidCallError: as ``retrieve``, at once.
            ClosedError: in ``next()``, after ``close``.
        """
        request = self._load_request(tokens, mask, slot_mapping, extras)

        def begin() -> LayerWork[torch.Tensor]:
            jobs, clears = self._plan_load(request), self._clears
            load = LayerLoad(self._mover, jobs)

            def move(layer: int) -> None:
                if clears == self._clears:
                    load.move(layer)

            def end() -> torch.Tensor:
                failed = self._complete_load(jobs, load.finish).failed
                return self._loaded(request, jobs if clears == self._clears else [], failed)

            return LayerWork(move, end, load.halt)

        return by_layer(begin, self.layout.num_layers, self._turn, self._abandoned)

    def clear(self, tokens: Tokens | None = None, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Forget the chunks of a token sequence, or all of them, in every tier. Returns how many were here.

        They are not found any more. Waits until the slower tiers have let go of them, for as long as those may take.
        """
        refs = [] if tokens is None else all_refs(hash_tokens(self.layout, tokens, extras))
        with self._turn():
            self._clears += 1
            with self._index_lock:
                self._begin_decision()
                if tokens is None:
                    count = self._index.clear()
                    self._mover.clear()
                else:
                    count = self._index.remove(ref.prefix_key for ref in refs)
                    self._remove_from_disk()
                    self._mover.remove(Place.REMOTE, refs)
                    if self._view is not None:
                        self._view.forget(refs)
        self._settle()
        return count

    def reset_cache(self) -> None:
        """Forget everything, because the model's weights were changed in place: a new epoch of the namespace.

        Nothing stored before is found again, here or after a restart. What is stored from now on is found until
        ``close``: no later process can know that it has these weights. Waits until the slower tiers have let go of what
        they hold, for as long as they may take; if they hang, what is stored next waits for that.
        """
        with self._turn():
            self._clears += 1
            with self._index_lock:
                self._begin_decision()
                self._index.clear()
            namespace = self._namespace.at_epoch(new_epoch())
            self._mover.reset(namespace)
            if self._directory is not None and self._view is not None:
                self._directory.reset([namespace])
                with self._index_lock:
                    self._view.clear()  # once more: a lookup meanwhile was told of what is gone
        self._settle()

    def flush(self, timeout_s: float | None = None) -> Flushed:
        """Wait until all that was stored so far is in the slower tiers.

        The answer tells how many writes since the last ``flush`` were not carried out: because a tier failed, or there
        was no room in it or in the queue to it, or time ran out. It is False if there are any, and True if everything
        that was stored has been written. Chunks with a time to live stay in memory, and are not counted.
        """
        self._check_open()
        flushed = self._mover.flush(self._options.io_timeout_s if timeout_s is None else timeout_s)
        with self._index_lock:
            dropped = self._index.counters.writes_dropped + self._index.counters.sends_dropped
            untold, self._told_drops = dropped - self._told_drops, dropped
        return flushed.plus(Flushed(full=untold))

    def stats(self) -> EngineStats:
        """What the engine holds and did; the counters are live."""
        with self._index_lock:
            return EngineStats(
                self._tiers.cpu.num_slots,
                self._index.slots_in_use,
                self._index.disk_used_bytes,
                self._index.counters,
                self._mover.counters,
                self._tiers.disk.counters if self._tiers.disk else None,
                self._tiers.remote.counters if self._tiers.remote else None,
            )

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush within the bound, end all threads, release the folder. Idempotent. False if writes were given up.

        A call under way ends first. With a disk that hangs this returns after the bound, and then as long again or 5
        seconds, whichever is more; the folder stays locked until the disk lets go of it, or the process ends.
        """
        with self._move_lock:
            if self._closed:
                return True
            self._end_abandoned()
            self._closed = True
            if self._directory is not None:
                self._directory.close()
            return self._mover.close(self._options.io_timeout_s if timeout_s is None else timeout_s)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this engine was closed: make a new one")

    def _begin_decision(self) -> None:
        self._check_open()
        self._index.advance(time.monotonic())
        self._index.set_disk_answers(answers=self._tiers.disk_answers)
        self._index.set_remote_answers(answers=self._tiers.remote_answers)

    def _ask_remote(self, hasher: PrefixHasher, skip_tokens: int = 0) -> Told:
        """Find out what the remote tier holds of a sequence, if there is one."""
        told = Told()
        if self._directory is not None:
            self._match(hasher, lambda _: None, skip_tokens, told)
        return told

    def _match(
        self, hasher: PrefixHasher, then: Callable[[Match], Result], skip_tokens: int = 0, told: Told | None = None
    ) -> Result:
        """Decide on the longest prefix that is known, under the lock, after the remote tier was asked for what is not.

        The index knows its answers for a while, and the call that is ``told`` them in any case.
        """
        told = told or Told()
        for _ in range(QUESTION_ROUNDS):
            with self._index_lock:
                self._begin_decision()
                since = self._view.serial if self._view is not None else 0  # what is gone by then is not told
                match = self._index.lookup(hasher, skip_tokens, told)
                questions = self._index.questions(hasher, match, skip_tokens, told)
                if self._directory is None or self._view is None or not questions:
                    return then(match)
            answers = self._directory.answer(questions)
            with self._index_lock:
                now_s = time.monotonic()
                self._view.note(questions, answers, now_s, since)
                self._view.tell(told, dict(zip(questions, answers, strict=True)), now_s, since)
        with self._index_lock:
            self._begin_decision()
            return then(self._index.lookup(hasher, skip_tokens, told))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The turn of a call that moves KV, after what was given up before it has been ended."""
        with self._move_lock:
            self._check_open()
            self._end_abandoned()
            yield

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    def _settle(self) -> None:
        """Wait until slower tiers have forgotten what they are to forget, if they do so in time."""
        self._mover.settle(slow_timeout_s(self._options.io_timeout_s) + self._options.io_timeout_s)

    def _remove_from_disk(self) -> None:
        """Let what the index has decided on leave the disk. Needs the index's lock, so that its order holds there."""
        self._mover.remove(Place.DISK, self._index.take_removals())

    def _load_request(self, tokens: Tokens, mask: Tokens | None, slot_mapping: Slots, extras: KeyExtras) -> Request:
        request = check_request(self.layout, self._num_blocks, tokens, mask, slot_mapping, extras=extras)
        return request._replace(told=self._ask_remote(request.hasher, request.begin))

    def _plan_load(self, request: Request) -> list[LoadJob]:
        blocks_per_chunk, skip_blocks = self.layout.blocks_per_chunk, request.begin // self.layout.block_tokens
        with self._index_lock:
            self._begin_decision()
            match = self._index.lookup(request.hasher, request.begin, request.told)
            steps = self._index.prepare_load(match.refs, request.told)
        jobs = []
        begin = match.first_chunk * blocks_per_chunk
        for step in steps:
            first_block = max(0, skip_blocks - begin)
            start = begin + first_block - skip_blocks
            end = start + step.ref.num_blocks - first_block
            jobs.append(LoadJob(step, request.blocks[start:end], first_block))
            begin += step.ref.num_blocks
        return jobs

    def _loaded(self, request: Request, jobs: Sequence[LoadJob], failed: set[PrefixKey]) -> torch.Tensor:
        """The mask of the tokens that were loaded: up to the first chunk that failed."""
        here = takewhile(lambda job: job.step.ref.prefix_key not in failed, jobs)
        end = request.begin + sum(len(job.block_ids) for job in here) * self.layout.block_tokens
        loaded = torch.zeros(request.hasher.num_tokens, dtype=torch.bool)
        loaded[request.begin : end] = True
        return loaded

    def _load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Carry out planned loads and complete them, also if scattering raises."""
        return self._complete_load(jobs, lambda: self._mover.load(jobs))

    def _complete_load(self, jobs: Sequence[LoadJob], move: Callable[[], LoadResult]) -> LoadResult:
        unfinished = {job.step.ref.prefix_key for job in jobs if job.step.source is not Place.MEMORY}
        result = LoadResult(unfinished, set())
        try:
            result = move()
        finally:
            with self._index_lock:
                self._index.complete_load([job.step for job in jobs], result.failed, result.lost)
                self._remove_from_disk()
        return result

    def _store_request(
        self, tokens: Tokens, mask: Tokens | None, slot_mapping: Slots, extras: KeyExtras, ttl_s: float | None
    ) -> Request:
        if ttl_s is not None and not ttl_s > 0:
            raise InvalidCallError(f"a chunk cannot be kept for {ttl_s} s")
        return check_request(
            self.layout, self._num_blocks, tokens, mask, slot_mapping, extras=extras, whole_chunks=True
        )

    def _plan_store(self, request: Request, ttl_s: float | None) -> list[StoreJob]:
        hasher, blocks_per_chunk = request.hasher, self.layout.blocks_per_chunk
        refs = chunk_refs(hasher, with_tail=self._options.save_unfull_chunk)
        first = request.begin // self.layout.chunk_tokens
        with self._index_lock:
            self._begin_decision()
            steps = self._index.prepare_store(refs[first:], hasher.chunk_keys()[:first], hasher=hasher, ttl_s=ttl_s)
            self._remove_from_disk()
        where = {ref.prefix_key: number * blocks_per_chunk for number, ref in enumerate(refs[first:])}
        begins = [where[step.ref.prefix_key] for step in steps]
        return [
            StoreJob(step, request.blocks[begin : begin + step.ref.num_blocks])
            for begin, step in zip(begins, steps, strict=True)
        ]

    def _stored_tokens(self, jobs: Sequence[StoreJob], failed: set[PrefixKey]) -> int:
        steps = [job.step for job in jobs]
        stored = [step.ref.num_blocks for step in steps if step.gather and step.ref.prefix_key not in failed]
        return sum(stored) * self.layout.block_tokens

    def _on_written(self, target: Place, ref: ChunkRef, stored: bool) -> None:
        size_bytes = self._tiers.size_on_disk(ref) if stored and target is Place.DISK else None
        with self._index_lock:
            self._index.complete_write(ref.prefix_key, target, stored=stored, size_bytes=size_bytes)
            self._remove_from_disk()

    def _complete_store(self, jobs: Sequence[StoreJob], failed: set[PrefixKey]) -> None:
        with self._index_lock:
            self._index.complete_store([job.step for job in jobs], failed)
            self._remove_from_disk()


def new_epoch() -> str:
    """A name for an epoch, never used before."""
    return secrets.token_hex(8)
