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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import ClosedError, InvalidCallError
from kvstore.index import QUESTION_ROUNDS, ChunkIndex
from kvstore.keys import NO_EXTRAS, KeyExtras, Namespace, PrefixHasher, PrefixKey
from kvstore.movers import LoadJob, LoadResult, Mover, MoverCounters, StoreJob
from kvstore.opening import EngineOptions, open_directory, open_tiers
from kvstore.pages import BlockIds, PagedKV
from kvstore.plans import IndexCounters, Place
from kvstore.remote import RemoteView
from kvstore.tiers.base import ChunkRef, TierCounters

__all__ = ["CacheEngine", "EngineOptions", "EngineStats", "all_refs", "chunk_refs", "new_epoch", "superseded_tails"]

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)

Tokens = Sequence[int] | npt.NDArray[Any] | torch.Tensor
Slots = Sequence[int] | npt.NDArray[Any] | torch.Tensor


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
        """Open the tiers and take in what the disk still holds.

        Raises:
            ConfigError, FolderOwnedError, TierError: see ``open_tiers``.
        """
        self.layout = paged.layout
        self._num_blocks = paged.num_blocks
        self._namespace = namespace
        self._options = options
        self._tiers = open_tiers(paged, namespace, options)
        remote, disk = options.remote, self._tiers.disk
        self._view = RemoteView(remote.hold_s) if remote else None
        self._directory = open_directory([namespace], self.layout, remote) if remote else None
        self._index = ChunkIndex(
            self._tiers.cpu.num_slots,
            keep_in_memory=options.local_cpu,
            disk_capacity_bytes=disk.usable_bytes if disk else 0,
            stored_bytes=disk.stored_bytes if disk else None,
            max_writes=options.max_write_queue,
            remote=self._view,
            max_sends=remote.max_queue if remote else None,
            cache_policy=options.cache_policy,
            disk_policy=options.disk_policy,
        )
        self._index.adopt(self._tiers.survivors)
        lanes = self._tiers.open_lanes(options, self._on_written)
        self._mover = Mover(paged, self._tiers.cpu, lanes, self._tiers.hot)
        self._index_lock = threading.Lock()  # decisions: short, never held during I/O
        self._move_lock = threading.Lock()  # moves: the paged cache belongs to one call at a time
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
        hasher = self._hash(tokens, extras)
        self._ask_remote(hasher)
        with self._index_lock:
            self._begin_decision()
            match = self._index.lookup(hasher)
            if lease_id is not None:
                self._index.lease(lease_id, match.refs, self._options.lease_timeout_s)
            return match.num_tokens

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        with self._index_lock:
            self._begin_decision()
            self._index.release(lease_id)

    def pin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Keep the known prefix of a sequence in the tiers where it is until ``unpin``. Returns the tokens held.

        Pins count as leases: together they hold at most half of the pool.
        """
        hasher = self._hash(tokens, extras)
        with self._index_lock:
            self._begin_decision()
            match = self._index.lookup(hasher)
            held = self._index.lease(pin_name(hasher), match.refs, math.inf)
            return sum(ref.num_blocks for ref in match.refs[:held]) * self.layout.block_tokens

    def unpin(self, tokens: Tokens, *, extras: KeyExtras = NO_EXTRAS) -> None:
        """End the pin of exactly this sequence; one that was never pinned is ignored."""
        hasher = self._hash(tokens, extras)
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
        hasher = self._hash(tokens, extras)
        self._ask_remote(hasher)
        with self._move_lock:
            with self._index_lock:
                self._begin_decision()
                refs = self._index.lookup(hasher).refs if self._options.local_cpu else ()
                steps = self._index.prepare_load(refs)
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
        if ttl_s is not None and not ttl_s > 0:
            raise InvalidCallError(f"a chunk cannot be kept for {ttl_s} s")
        hasher = self._hash(tokens, extras)
        skip_tokens = self._skipped(mask, hasher.num_tokens)
        refs = chunk_refs(hasher, self.layout.blocks_per_chunk, with_tail=self._options.save_unfull_chunk)
        first = -(-skip_tokens // self.layout.chunk_tokens)
        blocks = self._blocks(slot_mapping, first * self.layout.chunk_tokens, hasher)
        with self._move_lock:
            with self._index_lock:
                self._begin_decision()
                steps = self._index.prepare_store(refs[first:], hasher.chunk_keys()[:first], ttl_s=ttl_s)
                removals = self._index.take_removals()
            where = {ref.prefix_key: number * self.layout.blocks_per_chunk for number, ref in enumerate(refs)}
            offset = first * self.layout.blocks_per_chunk
            jobs = []
            for step in steps:
                begin = where[step.ref.prefix_key] - offset
                jobs.append(StoreJob(step, blocks[begin : begin + step.ref.num_blocks]))
            self._mover.remove(Place.DISK, removals)
            failed = {step.ref.prefix_key for step in steps}  # should gathering raise
            try:
                failed = self._mover.store(jobs)
            finally:
                self._complete_store(hasher, jobs, failed)
        stored = [step.ref.num_blocks for step in steps if step.gather and step.ref.prefix_key not in failed]
        return sum(stored) * self.layout.block_tokens

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
        hasher = self._hash(tokens, extras)
        skip_tokens = self._skipped(mask, hasher.num_tokens)
        loaded = torch.zeros(hasher.num_tokens, dtype=torch.bool)
        blocks = self._blocks(slot_mapping, skip_tokens, hasher)
        self._ask_remote(hasher, skip_tokens)
        with self._move_lock:
            with self._index_lock:
                self._begin_decision()
                match = self._index.lookup(hasher, skip_tokens)
                steps = self._index.prepare_load(match.refs)
            jobs = []
            begin = match.first_chunk * self.layout.blocks_per_chunk
            skip_blocks = skip_tokens // self.layout.block_tokens
            for step in steps:
                first_block = max(0, skip_blocks - begin)
                start = begin + first_block - skip_blocks
                jobs.append(LoadJob(step, blocks[start : start + step.ref.num_blocks - first_block], first_block))
                begin += step.ref.num_blocks
            failed = self._load(jobs).failed
        end = match.first_chunk * self.layout.chunk_tokens
        for step in steps:
            if step.ref.prefix_key in failed:
                break
            end += step.ref.num_blocks * self.layout.block_tokens
        loaded[skip_tokens:end] = True
        return loaded

    def clear(self, tokens: Tokens | None = None, *, extras: KeyExtras = NO_EXTRAS) -> int:
        """Forget the chunks of a token sequence, or all of them, in every tier. Returns how many were here."""
        with self._move_lock:
            if tokens is None:
                with self._index_lock:
                    self._begin_decision()
                    count = self._index.clear()
                self._mover.clear()
                return count
            refs = all_refs(self._hash(tokens, extras))
            with self._index_lock:
                self._begin_decision()
                count = self._index.remove(ref.prefix_key for ref in refs)
                removals = self._index.take_removals()
                if self._view is not None:
                    self._view.forget(refs)
            self._mover.remove(Place.DISK, removals)
            self._mover.remove(Place.REMOTE, refs)
            return count

    def reset_cache(self) -> None:
        """Forget everything, because the model's weights were changed in place: a new epoch of the namespace.

        Nothing stored before is found again, here or after a restart. What is stored from now on is found until
        ``close``: no later process can know that it has these weights.
        """
        with self._move_lock:
            with self._index_lock:
                self._begin_decision()
                self._index.clear()
            namespace = self._namespace.at_epoch(new_epoch())
            self._mover.reset(namespace)
            if self._directory is not None:
                self._directory.reset([namespace])

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was stored so far is in the slower tiers; False if time ran out first."""
        self._check_open()
        return self._mover.flush(self._options.io_timeout_s if timeout_s is None else timeout_s)

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

    def _ask_remote(self, hasher: PrefixHasher, skip_tokens: int = 0) -> None:
        """Find out what the remote tier holds of a sequence; the index then knows for a while."""
        if self._directory is None or self._view is None:
            return
        for _ in range(QUESTION_ROUNDS):
            with self._index_lock:
                self._begin_decision()
                questions = self._index.questions(hasher, self._index.lookup(hasher, skip_tokens), skip_tokens)
            if not questions:
                return
            answers = self._directory.ask(questions).result()  # each tier's deadline bounds it
            with self._index_lock:
                self._view.note(questions, answers, time.monotonic())

    def _load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Carry out planned loads and complete them, also if scattering raises."""
        unfinished = {job.step.ref.prefix_key for job in jobs if job.step.source is not Place.MEMORY}
        result = LoadResult(unfinished, set())
        try:
            result = self._mover.load(jobs)
        finally:
            with self._index_lock:
                self._index.complete_load([job.step for job in jobs], result.failed, result.lost)
                removals = self._index.take_removals()
            self._mover.remove(Place.DISK, removals)
        return result

    def _on_written(self, target: Place, ref: ChunkRef, stored: bool) -> None:
        size_bytes = self._tiers.size_on_disk(ref) if stored and target is Place.DISK else None
        with self._index_lock:
            self._index.complete_write(ref.prefix_key, target, stored=stored, size_bytes=size_bytes)
            removals = self._index.take_removals()
        self._mover.remove(Place.DISK, removals)

    def _complete_store(self, hasher: PrefixHasher, jobs: Sequence[StoreJob], failed: set[PrefixKey]) -> None:
        steps = [job.step for job in jobs]
        stored = {step.ref.prefix_key for step in steps} - failed
        with self._index_lock:
            self._index.complete_store(steps, failed)
            for key, tails in superseded_tails(hasher, stored).items():
                self._index.supersede(key, tails)
            removals = self._index.take_removals()
        self._mover.remove(Place.DISK, removals)

    def _hash(self, tokens: Tokens, extras: KeyExtras) -> PrefixHasher:
        hasher = PrefixHasher(self.layout.chunk_tokens, self.layout.block_tokens, extras)
        hasher.update(tokens.tolist() if isinstance(tokens, torch.Tensor | np.ndarray) else tokens)
        return hasher

    def _skipped(self, mask: Tokens | None, num_tokens: int) -> int:
        """The number of leading False in a mask."""
        if mask is None:
            return 0
        flags = _on_host(mask, np.bool_)
        if flags.shape != (num_tokens,):
            raise InvalidCallError(f"the mask has shape {flags.shape}, but there are {num_tokens} tokens")
        skip_tokens = int(flags.argmax()) if flags.any() else num_tokens
        if not flags[skip_tokens:].all():
            again = skip_tokens + int(flags[skip_tokens:].argmin())
            raise InvalidCallError(f"the mask must be F...FT...T, but token {again} is False again")
        if skip_tokens % self.layout.block_tokens and skip_tokens != num_tokens:
            raise InvalidCallError(
                f"the mask skips {skip_tokens} tokens, not a multiple of the block size {self.layout.block_tokens}"
            )
        return skip_tokens

    def _blocks(self, slot_mapping: Slots, begin: int, hasher: PrefixHasher) -> BlockIds:
        """The block ids of all whole blocks from token ``begin`` on."""
        slots = _on_host(slot_mapping, np.int64)
        if slots.shape != (hasher.num_tokens,):
            raise InvalidCallError(f"slot_mapping has shape {slots.shape}, but there are {hasher.num_tokens} tokens")
        size = self.layout.block_tokens
        end = max(begin, hasher.num_tokens - hasher.num_tokens % size)
        rows = slots[begin:end].reshape(-1, size)
        block_ids: BlockIds = rows[:, 0] // size if len(rows) else np.empty(0, np.int64)
        bad = rows != block_ids[:, None] * size + np.arange(size)
        if bad.any():
            position = begin + int(bad.reshape(-1).argmax())
            raise InvalidCallError(
                f"slot_mapping[{position}] = {int(slots[position])} does not continue a whole block of {size} slots "
                "that starts at a multiple of it"
            )
        outside = (block_ids < 0) | (block_ids >= self._num_blocks)
        if outside.any():
            position = begin + int(outside.argmax()) * size
            raise InvalidCallError(
                f"slot_mapping[{position}] = {int(slots[position])} is not in 0..{self._num_blocks * size - 1}"
            )
        return np.ascontiguousarray(block_ids)


def _on_host(values: Tokens, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=dtype)


def chunk_refs(hasher: PrefixHasher, blocks_per_chunk: int, *, with_tail: bool) -> list[ChunkRef]:
    """The chunks of a sequence, in order: the whole ones, and the tail's whole blocks if wanted."""
    refs = [ChunkRef(key, blocks_per_chunk) for key in hasher.chunk_keys()]
    if with_tail and (tail := hasher.block_keys(len(refs))):
        refs.append(ChunkRef(tail[-1], len(tail)))
    return refs


def all_refs(hasher: PrefixHasher) -> list[ChunkRef]:
    """Every chunk that may be stored of a sequence: the whole ones, and the tails inside each."""
    blocks_per_chunk = hasher.chunk_tokens // hasher.block_tokens
    refs = [ChunkRef(key, blocks_per_chunk) for key in hasher.chunk_keys()]
    for chunk in range(len(refs) + 1):
        tails = hasher.block_keys(chunk)[: blocks_per_chunk - 1]
        refs += [ChunkRef(key, number) for number, key in enumerate(tails, 1)]
    return refs


def superseded_tails(hasher: PrefixHasher, stored: set[PrefixKey]) -> dict[PrefixKey, list[PrefixKey]]:
    """For each full chunk just stored, the keys under which tails of it may be known."""
    return {
        chunk_key: hasher.block_keys(number)[:-1]
        for number, chunk_key in enumerate(hasher.chunk_keys())
        if chunk_key in stored
    }


def new_epoch() -> str:
    """A name for an epoch, never used before."""
    return secrets.token_hex(8)


def pin_name(hasher: PrefixHasher) -> str:
    """The lease that pins the whole blocks of exactly this sequence."""
    whole = len(hasher.chunk_keys())
    last = (hasher.block_keys(whole) or hasher.chunk_keys()[-1:] or [b""])[-1]
    return f"pin {last.hex()}"
