"""Plans of an engine's calls: which chunks are loaded or stored, and the state afterwards. Moves no data.

One lock covers the index and the remote tier's answers. It is held for decisions only, never during I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from kvstore.engine.opening import OpenTiers, open_directory
from kvstore.engine.options import EngineOptions, Shard
from kvstore.engine.requests import Request
from kvstore.index.index import ChunkIndex
from kvstore.index.owners import Owners
from kvstore.index.plans import NO_MATCH, LoadStep, Match, Place, TierState, all_refs, chunk_refs
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers, RemoteView
from kvstore.model.chunks import ChunkRef, Outcome, chunk_of
from kvstore.model.errors import ClosedError
from kvstore.model.keys import Namespace, PrefixHasher, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime, clock_ahead_s
from kvstore.tiers.base import Tier
from kvstore.transfer.mover import LoadJob, LoadResult, StoreJob

Result = TypeVar("Result")

_MAX_LONGER: Final = 1024  # others' chunks that one ``clear`` removes
_MAX_IN_VAIN: Final = 8  # consecutive questions that name only removed chunks
_MAX_ASKED: Final = 64  # latest removed chunks included in a question


class Planner:
    """Plans the calls of one engine, and takes their results. Thread-safe.

    Args:
        namespace: the namespace of the engine's chunks.
        layout: the geometry of the chunks.
        options: options of the engine.
        tiers: the tiers in which chunks may be.
        remove: removes chunks from a slower tier, without waiting.
        limit: changes times to live of chunks in slower tiers, without waiting.

    Attributes:
        index: of chunks; under ``lock``.
        view: the remote tier's recent answers; under ``lock``. None without one.
        directory: asks the remote tier. None without one.
        is_closed: ``close`` was called.
    """

    def __init__(
        self,
        namespace: Namespace,
        layout: KVLayout,
        options: EngineOptions,
        tiers: OpenTiers,
        remove: Callable[[Place, Iterable[ChunkRef]], None],
        *,
        limit: Callable[[Sequence[Lifetime]], None],
    ) -> None:
        remote, disk = options.remote, tiers.disk
        self.lock = threading.Lock()
        self.index = ChunkIndex(
            tiers.cpu.num_slots,
            keep_in_memory=options.local_cpu,
            disk_capacity_bytes=disk.usable_bytes if disk else 0,
            stored_bytes=disk.stored_bytes if disk else None,
            max_writes=options.max_write_queue,
            remote=(view := RemoteView(remote.hold_s) if remote else None),
            max_sends=remote.max_queue if remote and remote.url else 0,
            cache_policy=options.cache_policy,
            disk_policy=options.disk_policy,
            slots_take_turns=tiers.slots_take_turns,
            reads_fronts=tiers.reads_fronts,
            disk_keeps_lifetimes=tiers.keeps_lifetimes,
            owners=Owners(
                options.quotas,
                slot_bytes=layout.slot_bytes,
                chunk_bytes=disk.stored_bytes(layout.blocks_per_chunk) if disk else 1,
            ),
        )
        self.index.adopt(tiers.survivors, tiers.trails, tiers.owners)
        self.index.limit(one.later(-clock_ahead_s()) for one in tiers.limited)
        self.index.advance(time.monotonic())
        self.index.settle()
        self.view = view
        self.directory = open_directory([Shard(namespace, layout, remote)]) if remote else None
        self._layout = layout
        self._options = options
        self._tiers = tiers
        self._remove = remove
        self._limit = limit
        self._told_drops = 0  # writes dropped before the last ``take_drops``
        self.is_closed = False

    def check_open(self) -> None:
        """Raise after ``close``.

        Raises:
            ClosedError: it was closed.
        """
        if self.is_closed:
            raise ClosedError("this engine is closed: open a new one")

    def close(self) -> None:
        """Refuse further calls, and close the directory."""
        self.is_closed = True
        if self.directory is not None:
            self.directory.close()

    @contextmanager
    def deciding(self) -> Iterator[ChunkIndex]:
        """Yield the index, brought up to date, under the lock."""
        with self.lock:
            self._begin()
            yield self.index

    def match(
        self,
        hasher: PrefixHasher,
        then: Callable[[Match], Result],
        skip_tokens: int = 0,
        told: RemoteAnswers | None = None,
    ) -> Result:
        """Find the longest known prefix, and call ``then`` with it under the lock.

        The remote tier is asked about chunks unknown to the index. Its answers count for all calls for a while, and for
        the call that is ``told`` them in any case.
        """
        told = told or self._new_answers()
        for _ in range(self.index.question_rounds):
            with self.lock:
                self._begin()
                since = self.view.serial if self.view is not None else 0  # chunks removed later are not told
                match = self.index.lookup(hasher, skip_tokens, told)
                questions = self.index.questions(hasher, match, skip_tokens, told)
                if self.directory is None or self.view is None or not questions:
                    return then(match)
            answers = self.directory.answer(questions)
            with self.lock:
                now_s = time.monotonic()
                self.view.note(questions, answers, now_s, since)
                self.view.tell(told, dict(zip(questions, answers, strict=True)), now_s, since)
        with self.lock:
            self._begin()
            return then(self.index.lookup(hasher, skip_tokens, told))

    def ask_remote(self, hasher: PrefixHasher, skip_tokens: int = 0) -> RemoteAnswers:
        """Ask the remote tier, if there is one, which chunks of a sequence it holds, and return its answers."""
        told = self._new_answers()
        if self.directory is not None:
            self.match(hasher, lambda _: None, skip_tokens, told)
        return told

    def _new_answers(self) -> RemoteAnswers:
        return RemoteAnswers() if self.directory is not None else NO_ANSWERS

    def plan_prefetch(self, hasher: PrefixHasher, told: RemoteAnswers) -> tuple[list[LoadStep], int]:
        """Plan to load the known prefix of a sequence into memory, and return its tokens too.

        Plans nothing if memory keeps no chunks.
        """
        with self.lock:
            self._begin()
            match = self.index.lookup(hasher, told=told) if self._options.local_cpu else NO_MATCH
            return self.index.prepare_load(match.refs, told, hasher=hasher, is_use=False), match.num_tokens

    def plan_load(self, request: Request) -> list[LoadJob]:
        """Plan to load the known prefix of a sequence, from ``request.begin`` on."""
        blocks_per_chunk, skip_blocks = self._layout.blocks_per_chunk, request.begin // self._layout.block_tokens
        with self.lock:
            self._begin()
            match = self.index.lookup(request.hasher, request.begin, request.told)
            front_blocks = match.front_blocks(self._layout.block_tokens, blocks_per_chunk)
            steps = self.index.prepare_load(match.refs, request.told, hasher=request.hasher, front_blocks=front_blocks)
        jobs, end_block = [], match.num_tokens // self._layout.block_tokens - skip_blocks
        begin = match.first_chunk * blocks_per_chunk
        for step in steps:
            first_block = max(0, skip_blocks - begin)
            start = begin + first_block - skip_blocks
            end = min(start + step.ref.num_blocks - first_block, end_block)
            jobs.append(LoadJob(step, request.blocks[start:end], first_block))
            begin += step.ref.num_blocks
        return jobs

    def complete_load(self, jobs: Sequence[LoadJob], move: Callable[[], LoadResult]) -> LoadResult:
        """Call ``move`` for planned loads and take its results.

        If it raises, all chunks from slower tiers count as failed.
        """
        unfinished = {job.step.ref.prefix_key for job in jobs if job.step.source is not Place.MEMORY}
        result = LoadResult(unfinished, set())
        try:
            result = move()
        finally:
            with self.lock:
                self.index.complete_load([job.step for job in jobs], result.failed, result.lost)
                self._tell_disk()
        return result

    def plan_store(self, request: Request, ttl_s: float | None) -> list[StoreJob]:
        """Plan to store the chunks of a sequence that begin at ``request.begin`` or later and are not known."""
        hasher, blocks_per_chunk = request.hasher, self._layout.blocks_per_chunk
        refs = chunk_refs(hasher, with_tail=self._options.save_unfull_chunk)
        first = request.begin // self._layout.chunk_tokens
        prefix = hasher.chunk_keys()[:first]
        with self.lock:
            self._begin()
            steps = self.index.prepare_store(refs[first:], prefix, hasher=hasher, ttl_s=ttl_s)
            self._tell_disk()
            ahead_s = clock_ahead_s()
        where = {ref: number * blocks_per_chunk for number, ref in enumerate(refs[first:])}
        jobs = []
        for step in steps:
            begin = where.get(step.ref)  # None for a chunk written from memory in a tail's place
            blocks = request.blocks[begin : begin + step.ref.num_blocks] if begin is not None else request.blocks[:0]
            jobs.append(StoreJob(step.later(ahead_s), blocks))
        return jobs

    def complete_store(self, jobs: Sequence[StoreJob], move: Callable[[], set[PrefixKey]]) -> int:
        """Call ``move`` for planned stores and take the failed ones, which are all of them if it raises.

        Returns the tokens newly stored.
        """
        steps = [job.step for job in jobs]
        failed = {step.ref.prefix_key for step in steps}
        try:
            failed = move()
        finally:
            with self.lock:
                self.index.complete_store(steps, failed)
                self._tell_disk()
        stored = (step.ref.num_blocks for step in steps if step.gather and step.ref.prefix_key not in failed)
        return sum(stored) * self._layout.block_tokens

    def complete_write(self, target: Place, ref: ChunkRef, outcome: Outcome) -> None:
        """Take the result of a write to a slower tier. Thread-safe."""
        disk = self._tiers.disk if target is Place.DISK else None
        stored, is_full = outcome is Outcome.STORED, outcome is Outcome.FULL
        size_bytes = disk.size_of(ref) if stored and disk is not None else None
        with self.lock:
            self.index.set_tiers(tier_state(self._tiers.disk, self._tiers.remote))
            self.index.complete_write(ref.prefix_key, target, stored=stored, size_bytes=size_bytes, is_full=is_full)
            self._tell_disk()
            if recalls := self.index.take_recalls():
                self._remove(Place.REMOTE, recalls)

    def forget(self, hasher: PrefixHasher) -> int:
        """Forget the chunks of a sequence and those that hold its end, in every tier. Returns how many were here."""
        with self.lock:
            self._begin()
            refs = [*all_refs(hasher), *self.index.longer(hasher.trail(len(hasher.chunk_keys())))]
            count = self.index.remove(ref.prefix_key for ref in refs)
            self._tell_disk()
            self._remove(Place.REMOTE, refs)
            if self.view is not None:
                self.view.forget(refs)
        return count

    def forget_longer(self, hasher: PrefixHasher, settle: Callable[[], None]) -> None:
        """Forget other chunks at the remote tier that hold a sequence's end, of which the tier names a few at a time.

        ``settle`` waits until the chunks named so far are removed.
        """
        trail = hasher.trail(len(hasher.chunk_keys()))
        seen: dict[ChunkRef, None] = {}
        num_in_vain = 0
        while self.directory is not None and trail and num_in_vain < _MAX_IN_VAIN and len(seen) < _MAX_LONGER:
            # Removed chunks are asked about as well, because a tier may keep naming them otherwise.
            named = self.directory.answer([trail, *list(seen)[-_MAX_ASKED:]])[0]
            longer = [chunk_of(other) for other in named if other.startswith(trail)] if isinstance(named, tuple) else []
            if not longer:
                return  # the sequence's own last chunk, if still named, was removed before
            fresh = [ref for ref in longer if ref not in seen]
            num_in_vain = 0 if fresh else num_in_vain + 1
            seen |= dict.fromkeys(fresh)
            if fresh:
                with self.lock:
                    self.index.remove(ref.prefix_key for ref in fresh)
                    self._tell_disk()
                    self._remove(Place.REMOTE, fresh)
                    if self.view is not None:
                        self.view.forget(fresh)
                settle()

    def reset_directory(self, namespace: Namespace) -> None:
        """Ask the remote tier about another namespace from now on."""
        if self.directory is not None and self.view is not None:
            self.directory.reset([namespace])
            with self.lock:
                self.view.clear()  # once more: a lookup meanwhile was told of what is gone

    def take_drops(self) -> int:
        """Return the number of writes not queued since the last call for lack of room."""
        with self.lock:
            dropped = self.index.counters.writes_dropped + self.index.counters.sends_dropped
            untold, self._told_drops = dropped - self._told_drops, dropped
        return untold

    def _begin(self) -> None:
        """Bring the index up to date. Needs the lock."""
        self.check_open()
        self.index.advance(time.monotonic(), tier_state(self._tiers.disk, self._tiers.remote))
        self._tell_disk()

    def _tell_disk(self) -> None:
        """Remove evicted chunks from the disk, and change times to live. Needs the lock, to keep the index's order."""
        if removals := self.index.take_removals():
            self._remove(Place.DISK, removals)
        if lifetimes := self.index.take_lifetimes():
            self._limit([one.later(clock_ahead_s()) for one in lifetimes])


def tier_state(disk: Tier | None, remote: Tier | None) -> TierState:
    """Return the state of a worker's slower tiers; None stands for a tier that does not exist."""
    return TierState(
        disk is None or disk.answers,
        remote is None or remote.answers,
        remote is not None and remote.keeps_trails,
        remote is not None and remote.keeps_lifetimes,
    )
