"""The state of the server: which chunks are where, and which are evicted. Pure: no I/O, no lock, one thread.

As with ``ChunkIndex``, every move is prepared, carried out and completed. A chunk that is being written cannot be found
until it is complete. A chunk that is being read may be removed or replaced meanwhile: its pages are freed with its last
use.

Memory and disk have a policy each, over the chunks of all namespaces. Namespaces at their common quota evict chunks of
their own, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from kvstore.catalog.departed import Departed
from kvstore.catalog.plans import MissReason
from kvstore.catalog.trails import TRAIL_SHARE
from kvstore.chunks import ChunkRef, Outcome, chunk_of, is_trail_of
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.policies import Policy, open_policy
from kvstore.protocol.runs import PAGE_BYTES, Run
from kvstore.server.holds import Holds
from kvstore.server.pins import Pins
from kvstore.server.pool import FreePages
from kvstore.server.quotas import Quotas
from kvstore.server.spaces import Chunk, Quota, Space
from kvstore.tiers.base import MAX_NEAREST

MAX_SPACES = 4096
MAX_TENANT_SPACES = MAX_SPACES // 4  # of one tenant
MAX_FAR_SPACES = MAX_SPACES * 3 // 4  # beyond which clients from the network bring no more


class Stock:
    """All chunks of the server.

    Args:
        pool_bytes: of the memory.
        free: the pages of the pool.
        disk_bytes: of the disk; 0 for none.
        policy: of the memory.
        disk_policy: of the disk.
        quotas: bytes by tenant, model or id; see ``Quotas``.
        first_stamp: where ``stamp`` begins; later than any that clients know of an earlier server.
    """

    def __init__(
        self,
        pool_bytes: int,
        free: FreePages,
        *,
        disk_bytes: int = 0,
        policy: str = "ADAPTIVE",
        disk_policy: str = "ADAPTIVE",
        quotas: Mapping[str, int] | None = None,
        first_stamp: int = 0,
    ) -> None:
        self.spaces: dict[bytes, Space] = {}
        self.departed = Departed()
        self.stamp = first_stamp  # counts the changes of the sizes that clients are told
        self.num_displaced = 0  # chunks evicted so far, which is the work that this has cost
        self.pins = Pins()
        self.holds = Holds()
        self._max_pinned_bytes = pool_bytes // 2
        self._disk_bytes = disk_bytes
        self.quotas = Quotas(quotas or {})
        self._free = free
        self._memory = open_policy(policy, pool_bytes)
        self._disk = open_policy(disk_policy, disk_bytes)
        self._chunks: dict[bytes, Chunk] = {}  # all that can be found, by key
        self._removals: list[tuple[Space, ChunkRef]] = []
        self._forgotten: list[Space] = []

    @property
    def num_in_memory(self) -> int:
        """Chunks in memory."""
        return len(self._memory)

    @property
    def num_on_disk(self) -> int:
        """Chunks on disk."""
        return len(self._disk)

    # -- namespaces --------------------------------------------------------------------------------------------------

    def enter(self, namespace: Namespace, layout: KVLayout, tenant: str = "", most: int = MAX_SPACES) -> Space | None:
        """A tenant's chunks of a namespace; None if it would be one more than ``most``, or the tenant may have."""
        fresh = Space(namespace, layout, tenant)
        space = self.spaces.get(fresh.id)
        if space is not None:
            return space
        if self._is_crowded(tenant, most):
            self.forget_empty()
        if self._is_crowded(tenant, most):
            return None
        fresh.quota = self.quotas.find(tenant, namespace, fresh.id)
        self.spaces[fresh.id] = fresh
        return fresh

    def _is_crowded(self, tenant: str, most: int) -> bool:
        if tenant and sum(space.tenant == tenant for space in self.spaces.values()) >= MAX_TENANT_SPACES:
            return True
        return len(self.spaces) >= most

    def forget_empty(self) -> None:
        """Forget namespaces without chunks or clients."""
        for space in list(self.spaces.values()):
            if not (space.num_sessions or space.chunks or space.used_bytes):
                del self.spaces[space.id]
                self._forgotten.append(space)

    def take_forgotten(self) -> list[Space]:
        """Namespaces that were forgotten, whose folders can be deleted. Their removals come first."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    # -- looking -----------------------------------------------------------------------------------------------------

    def lookup(self, space: Space, refs: Sequence[ChunkRef]) -> bytes:
        """One byte a chunk: 1 if it can be read."""
        chunks = space.chunks
        found = bytes([ref in chunks for ref in refs])
        counters = space.counters
        counters.lookups += 1
        num_found = sum(found)
        counters.found_chunks += num_found
        counters.missing_chunks += len(found) - num_found
        return found

    @staticmethod
    def nearest(space: Space, trail: bytes) -> list[bytes]:
        """The trails of chunks that share blocks with a trail, the one that shares most first."""
        return list(space.trails.closest(trail, MAX_NEAREST))

    @staticmethod
    def holder_of(space: Space, ends: Sequence[ChunkRef]) -> tuple[ChunkRef, int] | None:
        """The chunk that holds most of a chunk's first blocks, given as the tails that end with each, and how many."""
        if [ref.num_blocks for ref in ends] != list(range(1, len(ends) + 1)):
            return None
        trail, shared = next(space.trails.neighbours(b"".join(ref.prefix_key for ref in ends)), (b"", 0))
        return (chunk_of(trail), shared) if shared else None

    def describe(self, chunk: Chunk, trail: bytes) -> None:
        """Take in the trail of a chunk that is being written, unless it would take much of the room of its bytes."""
        if is_trail_of(trail, chunk.ref) and len(trail) <= chunk.num_bytes // TRAIL_SHARE:
            chunk.trail = trail

    def touch(self, space: Space, refs: Sequence[ChunkRef]) -> None:
        """Tell the policies that chunks were looked up, in the order of a prompt."""
        keys = [space.key_of(ref) for ref in refs]
        self._memory.touch_chain(keys)
        if self._disk_bytes:
            self._disk.touch_chain(keys)

    def why(self, space: Space, ref: ChunkRef) -> str:
        """Where a chunk is, or why it is nowhere; for people."""
        chunk = space.chunks.get(ref)
        if chunk is None:
            reason = self.departed.reason(space.key_of(ref))
            return (reason or MissReason.NEVER_STORED).value
        places = [name for name, there in (("memory", chunk.is_whole), ("disk", chunk.disk_bytes)) if there]
        return "+".join(places) + (" pinned" if chunk.is_pinned else "")

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, space: Space, ref: ChunkRef) -> Chunk | None:
        """Pages for a chunk that is to be written; None: no room.

        Args:
            space: whose it is.
            ref: its name. If there is such a chunk, it stays until the new one is complete, if there is room for both.
        """
        chunk = Chunk(space, ref)
        old = space.chunks.get(ref)
        if old is not None and space.quota.used_bytes + chunk.size_bytes > space.quota.limit_bytes:
            self._drop(old, MissReason.REMOVED)
        fits = self._shrink(space.quota, space.quota.limit_bytes - chunk.size_bytes)
        runs = self._take(chunk.size_bytes, chunk.key) if fits else None
        if runs is None:
            space.counters.full += 1
            return None
        chunk.runs = runs
        chunk.uses = 1
        space.used_bytes += chunk.size_bytes
        self.stamp += 1
        return chunk

    def complete(self, chunk: Chunk, *, is_whole: bool) -> Outcome:
        """A chunk that was reserved has been written, or never will be."""
        space = chunk.space
        chunk.uses -= 1
        self.stamp += 1
        if not is_whole or chunk.epoch != space.epoch:
            space.used_bytes -= chunk.size_bytes
            self._free.give(chunk.runs)
            chunk.runs, chunk.is_gone = (), True
            space.counters.failed += 1
            return Outcome.FAILED
        old = space.chunks.get(chunk.ref)
        if old is not None:
            chunk.trail = chunk.trail or old.trail  # of the same key: an older client tells none
            self._drop(old, MissReason.REMOVED)
        chunk.is_whole = True
        self._admit(chunk)
        space.counters.stored_chunks += 1
        space.counters.stored_bytes += chunk.num_bytes
        return Outcome.STORED

    def _admit(self, chunk: Chunk) -> None:
        chunk.space.chunks[chunk.ref] = chunk
        if chunk.trail:
            chunk.space.trails.add(chunk.trail)
        self._chunks[chunk.key] = chunk
        chunk.space.quota.touch(chunk)
        if chunk.runs:
            self._memory.add(chunk.key, chunk.size_bytes)
        if chunk.disk_bytes:
            self._disk.add(chunk.key, chunk.disk_bytes)

    # -- reading -----------------------------------------------------------------------------------------------------

    def acquire(self, space: Space, ref: ChunkRef) -> Chunk | Outcome:
        """A chunk, in use from now on, which must be read from disk if it is not whole; or why there is none."""
        chunk = space.chunks.get(ref)
        if chunk is None:
            return Outcome.MISS
        if not chunk.runs:
            runs = self._take(chunk.size_bytes, None, chunk)
            if runs is None:
                return Outcome.FAILED
            chunk.runs = runs
            self._memory.add(chunk.key, chunk.size_bytes)
            space.counters.loaded_chunks += 1
        chunk.uses += 1
        space.chunks.move_to_end(ref)
        space.quota.touch(chunk)
        self._memory.refresh_chain([chunk.key])
        return chunk

    def note_read(self, chunk: Chunk) -> None:
        """Count a chunk that a client was granted."""
        chunk.space.counters.read_chunks += 1
        chunk.space.counters.read_bytes += chunk.num_bytes

    def release(self, chunk: Chunk) -> None:
        """A use has ended."""
        chunk.uses -= 1
        if not chunk.uses and (chunk.is_gone or not chunk.is_whole):
            self._unmap(chunk)

    def loaded(self, chunk: Chunk, outcome: Outcome) -> None:
        """A read from disk has ended. Its uses are released separately."""
        if outcome is Outcome.HIT:
            chunk.is_whole = True
        elif outcome in {Outcome.MISS, Outcome.CORRUPT} and not chunk.is_gone:
            self._drop(chunk, MissReason.LOST)

    # -- the disk ----------------------------------------------------------------------------------------------------

    def found_on_disk(self, space: Space, ref: ChunkRef, size_bytes: int, trail: bytes = b"") -> None:
        """Take in a chunk that an earlier server has left."""
        chunk = Chunk(space, ref)
        if trail:
            self.describe(chunk, trail)
        chunk.disk_bytes = size_bytes
        space.used_bytes += chunk.size_bytes
        self._admit(chunk)

    def prepare_write(self, chunk: Chunk, size_bytes: int) -> bool:
        """Make room on disk for a chunk in memory. True: it is in use until ``written``; False: do not write it."""
        if chunk.disk_bytes or chunk.is_gone or not chunk.is_whole:
            return False
        missing = self._disk.used_bytes + size_bytes - self._disk_bytes
        if missing > 0:
            victims = self._disk.make_room(missing, self._may_leave_disk, chunk.key)
            if victims is None:
                return False
            for key in victims:
                self._leave_disk(self._chunks[key])
        chunk.disk_bytes = size_bytes
        self._disk.add(chunk.key, size_bytes)
        chunk.uses += 1
        return True

    def written(self, chunk: Chunk, size_bytes: int | None) -> None:
        """A write to disk has ended with a file of that size, or (None) has failed."""
        if not chunk.is_gone:  # otherwise its removal follows
            if size_bytes is None:
                self._disk.remove(chunk.key)
            else:
                self._disk.resize(chunk.key, size_bytes)
            chunk.disk_bytes = size_bytes or 0
        self.release(chunk)

    def take_removals(self) -> list[tuple[Space, ChunkRef]]:
        """Chunks whose files must be deleted, before any that is written from now on under the same name."""
        removals, self._removals = self._removals, []
        return removals

    def _leave_disk(self, chunk: Chunk) -> None:
        self._disk.evict(chunk.key)
        if chunk.is_whole:
            self._removals.append((chunk.space, chunk.ref))
            chunk.disk_bytes = 0
        else:
            self._drop(chunk, MissReason.EVICTED)

    def _may_leave_disk(self, key: bytes) -> bool:
        chunk = self._chunks[key]
        return not chunk.uses and not (chunk.is_pinned and not chunk.is_whole)

    # -- what goes ---------------------------------------------------------------------------------------------------

    def remove(self, space: Space, refs: Iterable[ChunkRef]) -> int:
        """Forget chunks; how many were there."""
        found = [chunk for ref in dict.fromkeys(refs) if (chunk := space.chunks.get(ref)) is not None]
        for chunk in found:
            if chunk.is_pinned:
                self._move_pin(chunk)
            self._drop(chunk, MissReason.REMOVED)
        return len(found)

    def _move_pin(self, tail: Chunk) -> None:
        """A pinned chunk goes. If a longer one holds its blocks, pin that, as far as the bound for pins allows."""
        space, num_blocks = tail.space, tail.ref.num_blocks
        near = takewhile(lambda found: found[1] == num_blocks, space.trails.neighbours(tail.trail))
        refs = (chunk_of(trail) for trail, _ in near)
        longer = next((space.chunks[ref] for ref in refs if ref != tail.ref), None)
        if longer is None or longer.pin_end_s >= tail.pin_end_s:
            return
        pinned_bytes = self.pins.used_bytes - tail.size_bytes + (0 if longer.is_pinned else longer.size_bytes)
        if pinned_bytes <= self._max_pinned_bytes:
            self.pins.set(longer, tail.pin_end_s)

    def clear(self, space: Space) -> int:
        """Forget all chunks of a namespace, and those just being written; how many there were."""
        space.epoch += 1
        return self.remove(space, list(space.chunks))

    def pin(self, space: Space, refs: Iterable[ChunkRef], end_s: float) -> int:
        """Pin chunks until then; how many. At most half of the memory is pinned."""
        count = 0
        for ref in refs:
            chunk = space.chunks.get(ref)
            if chunk is None:
                continue
            if not chunk.is_pinned and self.pins.used_bytes + chunk.size_bytes > self._max_pinned_bytes:
                break
            self.pins.set(chunk, end_s)
            count += 1
        return count

    def unpin(self, chunks: Iterable[Chunk]) -> int:
        """Unpin chunks; how many were pinned."""
        pinned = [chunk for chunk in chunks if chunk.is_pinned]
        for chunk in pinned:
            self.pins.drop(chunk)
        return len(pinned)

    def _drop(self, chunk: Chunk, reason: MissReason) -> None:
        """Make a chunk unreachable, and free what nobody uses."""
        space = chunk.space
        del space.chunks[chunk.ref]
        if chunk.trail:
            space.trails.discard(chunk.trail)
        del self._chunks[chunk.key]
        space.quota.drop(chunk)
        space.used_bytes -= chunk.size_bytes
        self.stamp += 1
        self.departed.note(chunk.key, reason)
        if reason is MissReason.EVICTED:
            space.counters.evicted_chunks += 1
        self._forget_in(self._memory, chunk, reason)
        if chunk.disk_bytes:
            self._forget_in(self._disk, chunk, reason)
            self._removals.append((space, chunk.ref))
            chunk.disk_bytes = 0
        self.pins.drop(chunk)
        self.holds.drop(chunk)
        chunk.is_gone = True
        if not chunk.uses:
            self._unmap(chunk)

    @staticmethod
    def _forget_in(policy: Policy, chunk: Chunk, reason: MissReason) -> None:
        if reason is MissReason.EVICTED:
            policy.evict(chunk.key)
        else:
            policy.remove(chunk.key)

    def _unmap(self, chunk: Chunk) -> None:
        """Free the pages of a chunk that is gone, or only on disk."""
        self._free.give(chunk.runs)
        chunk.runs = ()
        chunk.is_whole = False
        if not chunk.is_gone:
            self._memory.evict(chunk.key)

    def _take(self, size_bytes: int, newcomer: bytes | None, keep: Chunk | None = None) -> tuple[Run, ...] | None:
        """Pages, after evictions if need be; None if too little may be evicted."""

        def may_go(key: bytes) -> bool:
            chunk = self._chunks[key]
            return self._may_go(chunk) and chunk is not keep

        victims = self._memory.make_room(size_bytes - self._free.num_free * PAGE_BYTES, may_go, newcomer)
        if victims is None:
            return None
        for key in victims:
            self._leave_memory(self._chunks[key])
        return self._free.take(size_bytes // PAGE_BYTES)

    def _may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may be evicted from memory."""
        return not (chunk.uses or chunk.is_pinned or chunk in self.holds)

    def _leave_memory(self, chunk: Chunk) -> None:
        self.num_displaced += 1
        if chunk.disk_bytes:
            self._unmap(chunk)
        else:
            self._drop(chunk, MissReason.EVICTED)

    def _shrink(self, quota: Quota, limit_bytes: int) -> bool:
        """Evict the least recently used chunks of a quota until they are within a limit; none if that cannot be."""
        missing_bytes = quota.used_bytes - limit_bytes
        victims: list[Chunk] = []
        for chunk in quota.by_age() if missing_bytes > 0 else ():
            if self._may_go(chunk):
                victims.append(chunk)
                missing_bytes -= chunk.size_bytes
                if missing_bytes <= 0:
                    break
        if missing_bytes > 0:
            return False
        self.num_displaced += len(victims)
        for chunk in victims:
            self._drop(chunk, MissReason.EVICTED)
        return True
