"""State of the server: the places of all chunks, and the choice of those to evict. No I/O, no lock, one thread.

As with ``ChunkIndex``, every move is prepared, carried out and completed. A chunk that is being written cannot be found
until it is complete. A chunk may be removed or replaced while it is read; its pages are freed with its last use. A
namespace is cleared at once, and its former chunks are dropped one by one.

The entries of ``ChunkIndex`` do not serve here. They have one namespace and slots of one size, and a name in use cannot
be stored again, which a client that hangs would deny to all others.

Some calls return an iterator whose *steps* do the work; other requests are served between the steps.

Memory and disk each have a policy for the chunks of all namespaces. A quota that is used up evicts its own chunks, the
least recently used first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from kvstore.index.entries import Departed
from kvstore.index.plans import MissReason
from kvstore.index.trails import Trails
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.policies import Policy, open_policy
from kvstore.protocol.payload import PAGE_BYTES, Run
from kvstore.server.lifetimes import NO_END_MS, Lifetimes
from kvstore.server.pins import Holds, Pins
from kvstore.server.pool import FreePages
from kvstore.server.quotas import Quotas
from kvstore.server.registry import Spaces
from kvstore.server.spaces import Chunk, Quota, Space


class Stock:
    """All chunks of the server.

    Args:
        pool_bytes: size of the memory.
        free: the free pages of the pool.
        disk_bytes: size of the disk; 0 for none.
        policy: eviction policy of the memory.
        disk_policy: eviction policy of the disk.
        quotas: bytes by name; see ``Quotas``.
        first_stamp: first value of ``stamp``; later than any that clients know from an earlier server.
        now: the monotonic time in seconds.
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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spaces = Spaces(Quotas(quotas or {}))
        self.departed = Departed()
        self.stamp = first_stamp  # counts the changes of the sizes that are reported to clients
        self.num_in_memory = 0
        self.holds = Holds()
        self.lifetimes = Lifetimes(now)
        self._disk_bytes = disk_bytes
        self._free = free
        self._memory = open_policy(policy, pool_bytes)
        self.pins = Pins(self._memory, pool_bytes // 2)
        self._disk = open_policy(disk_policy, disk_bytes)
        self._chunks: dict[bytes, Chunk] = {}  # all that are not dropped, by key
        self._cleared: deque[tuple[dict[ChunkRef, Chunk], Trails]] = deque()  # yet to be dropped
        self._removals: list[tuple[Space, ChunkRef]] = []
        self._is_changing_quotas = False

    @property
    def num_on_disk(self) -> int:
        """Number of chunks on disk."""
        return len(self._disk)

    def by_value(self) -> Iterator[Chunk]:
        """Iterate over all chunks that can be found: those only on disk, then those in memory, the best last."""
        yield from (chunk for key in self._disk.by_value() if not (chunk := self._chunks[key]).runs)
        yield from map(self._chunks.__getitem__, self._memory.by_value())
        yield from (chunk for chunk in self.pins if chunk.runs)

    # -- looking -----------------------------------------------------------------------------------------------------

    def lookup(self, space: Space, refs: Sequence[ChunkRef], *, hears_ends: bool = True) -> tuple[bytes, list[int]]:
        """Return one byte for each chunk, 1 if it can be read, and the rest of each one's time to live in ms.

        The rest is 0 for chunks without an end, and there are no rests if no chunk found has one. Clients that do not
        hear of ends would keep such chunks for longer, so they find none.
        """
        chunks, rests_ms = space.chunks, list[int]()
        if space.num_ending:
            rests_ms = self.lifetimes.rests_ms(map(chunks.get, refs))
            found = bytes([rest == NO_END_MS or (hears_ends and rest > 0) for rest in rests_ms])
        else:
            found = bytes([ref in chunks for ref in refs])
        has_ends = hears_ends and any(rest > 0 for rest in rests_ms)
        return found, [max(rest, NO_END_MS) for rest in rests_ms] if has_ends else []

    def touch(self, space: Space, refs: Sequence[ChunkRef]) -> None:
        """Report a lookup of chunks, in the order of a prompt, to the policies."""
        keys = [space.key_of(ref) for ref in refs]
        self._memory.touch_chain(keys)
        if self._disk_bytes:
            self._disk.touch_chain(keys)

    def why(self, space: Space, ref: ChunkRef) -> str:
        """Return the places of a chunk, or the reason why it is in none, for people to read."""
        chunk = space.chunks.get(ref)
        if chunk is None or self.lifetimes.hides(chunk):
            key = space.key_of(ref)
            reason = MissReason.REMOVED if key in self._chunks else self.departed.reason(key)
            return (reason or MissReason.NEVER_STORED).value
        places = [name for name, there in (("memory", chunk.is_whole), ("disk", chunk.disk_bytes)) if there]
        return "+".join(places) + (" pinned" if chunk.is_pinned else "")

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, space: Space, ref: ChunkRef, owner: bytes = b"") -> Generator[None, None, Chunk | None]:
        """Find pages for a chunk that is to be written, in steps; return None without room.

        Args:
            space: its namespace.
            ref: its name. An old chunk of this name stays until the new one is complete, if there is room for both.
            owner: id of its owner; see ``Quotas``.
        """
        chunk = Chunk(space, ref, owner=owner)
        old = space.chunks.get(ref)
        if old is not None and old.quota is chunk.quota and chunk.quota.lacks(chunk.size_bytes):
            self._drop(old, MissReason.REMOVED)
        while chunk.quota.lacks(chunk.size_bytes) and self.drop_cleared():
            yield  # or the search would visit all cleared chunks
            chunk.account = space.account_of(owner)  # quotas may have changed
        account = chunk.account
        fits = self._shrink(account.quota, account.quota.limit_bytes - chunk.size_bytes)
        account.charge(chunk.size_bytes)  # before others may take what the quota has left
        runs = (yield from self._take(chunk, chunk.key)) if fits else None
        if runs is None:
            account.charge(-chunk.size_bytes)
            space.counters.full += 1
            return None
        chunk.runs = runs
        chunk.uses = 1
        self.stamp += 1
        return chunk

    def complete(self, chunk: Chunk, *, is_whole: bool) -> Outcome:
        """Complete a reserved chunk, which was written or never will be."""
        space = chunk.space
        chunk.uses -= 1
        self.stamp += 1
        if not is_whole or chunk.is_cleared:
            chunk.account.charge(-chunk.size_bytes)
            self._free.give(chunk.runs)
            chunk.runs, chunk.is_dropped = (), True
            space.counters.failed += 1
            return Outcome.FAILED
        old = self._chunks.get(chunk.key)  # perhaps one that was cleared
        if old is not None:
            chunk.trail = chunk.trail or old.trail  # the same key has the same trail, and older clients send none
            chunk.owner = chunk.owner or old.owner
            self._drop(old, MissReason.REMOVED)
        space.move(chunk)  # if quotas have changed since
        chunk.is_whole = True
        self._admit(chunk)
        space.counters.stored_chunks += 1
        space.counters.stored_bytes += chunk.num_bytes
        return Outcome.STORED

    def adopt(self, chunk: Chunk) -> None:
        """Add a chunk that an earlier server stored."""
        chunk.account.charge(chunk.size_bytes)
        self._admit(chunk)

    def _admit(self, chunk: Chunk) -> None:
        chunk.space.chunks[chunk.ref] = chunk
        chunk.account.stored_bytes += chunk.size_bytes
        if chunk.trail:
            chunk.space.trails.add(chunk.trail)
        self._chunks[chunk.key] = chunk
        self.lifetimes.enter(chunk)
        chunk.quota.touch(chunk)
        if chunk.runs:
            self._enter_memory(chunk)
        if chunk.disk_bytes:
            self._disk.add(chunk.key, chunk.disk_bytes)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _enter_memory(self, chunk: Chunk) -> None:
        self.num_in_memory += 1
        if not chunk.is_pinned:
            self._memory.add(chunk.key, chunk.size_bytes)

    def acquire(
        self, space: Space, ref: ChunkRef, *, hears_ends: bool = True
    ) -> Generator[None, None, Chunk | Outcome]:
        """Take a chunk into use, in steps; it must be read from disk if it is not whole. Else return the outcome."""
        chunk = space.chunks.get(ref)
        if chunk is None or self.lifetimes.hides(chunk, hears_ends=hears_ends):
            return Outcome.MISS
        chunk.uses += 1
        if not chunk.runs:
            runs = yield from self._take(chunk, None)
            if chunk.is_gone or chunk.runs:  # removed, or another request was faster
                self._free.give(runs or ())
            elif runs is not None:
                chunk.runs = runs
                self._enter_memory(chunk)
                space.counters.loaded_chunks += 1
        if chunk.is_gone or not chunk.runs:
            self.release(chunk)
            return Outcome.MISS if chunk.is_gone else Outcome.FAILED
        space.chunks[ref] = space.chunks.pop(ref)  # the most recently used last
        chunk.quota.touch(chunk)
        self._memory.refresh_chain([chunk.key])
        return chunk

    def release(self, chunk: Chunk) -> None:
        """End a use of a chunk."""
        chunk.uses -= 1
        if not chunk.uses and (chunk.is_dropped or not chunk.is_whole):
            self._unmap(chunk)

    def loaded(self, chunk: Chunk, outcome: Outcome) -> None:
        """Complete a read from disk. Its uses are released separately."""
        if outcome is Outcome.HIT:
            chunk.is_whole = True
        elif outcome in {Outcome.MISS, Outcome.CORRUPT} and not chunk.is_gone:
            self._drop(chunk, MissReason.LOST)

    # -- the disk ----------------------------------------------------------------------------------------------------

    def prepare_write(self, chunk: Chunk, size_bytes: int) -> bool:
        """Make room on disk for a chunk in memory; return False without room.

        If True, the chunk is in use until ``written``.
        """
        if chunk.disk_bytes or chunk.is_gone or not chunk.is_whole:
            return False
        while (missing := self._disk.used_bytes + size_bytes - self._disk_bytes) > 0 and self.drop_cleared():
            pass  # rare, because the server writes nothing while there are any
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
        """Complete a write to disk, which left a file of that size, or failed if that is None."""
        if not chunk.is_dropped:  # otherwise its removal follows
            if size_bytes is None:
                self._disk.remove(chunk.key)
            else:
                self._disk.resize(chunk.key, size_bytes)
            chunk.disk_bytes = size_bytes or 0
        self.release(chunk)

    def take_removals(self) -> list[tuple[Space, ChunkRef]]:
        """Take the chunks whose files must be deleted before any later write under the same name."""
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

    # -- removals ----------------------------------------------------------------------------------------------------

    def remove(self, space: Space, refs: Iterable[ChunkRef]) -> int:
        """Forget chunks; return the number that existed."""
        found = [chunk for ref in dict.fromkeys(refs) if (chunk := space.chunks.get(ref)) is not None]
        for chunk in found:
            if chunk.is_pinned:
                self.pins.move(chunk)
            self._drop(chunk, MissReason.REMOVED)
        return len(found)

    def expire(self) -> Iterator[None]:
        """Forget the chunks whose time to live is over, one in each step."""
        for key in self.lifetimes.each_due():
            if key is not None:
                chunk = self._chunks[key]
                chunk.space.counters.expired_chunks += 1
                self._drop(chunk, MissReason.REMOVED)
            yield

    def change_quotas(self, given: Mapping[str, int]) -> Iterator[None]:
        """Apply other quotas, and evict what exceeds them, in steps. Meanwhile no quota gives room by evictions."""
        self._is_changing_quotas = True
        yield from self.spaces.quotas.change(given, self.spaces)
        for quota in list(self.spaces.quotas):
            for chunk in list(quota.by_age()) if quota.used_bytes > quota.limit_bytes else ():
                if quota.used_bytes <= quota.limit_bytes:
                    break
                if not chunk.is_gone and self._may_go(chunk):
                    self._drop(chunk, MissReason.EVICTED)
                yield
        self._is_changing_quotas = False

    def clear(self, space: Space) -> int:
        """Forget all chunks of a namespace, and those just being written; return their number.

        Takes constant time, because the chunks are dropped later by ``drop_cleared``. The caller must have their
        files deleted.
        """
        count = len(space.chunks)
        if count:
            self._cleared.append((space.chunks, space.trails))
        space.chunks, space.trails = {}, Trails()
        for account in space.all_accounts():
            account.drop(account.stored_bytes)
        space.epoch += 1
        self.stamp += 1
        self.pins.forget(space)
        return count

    @property
    def has_cleared(self) -> bool:
        """True if cleared chunks are yet to be dropped."""
        return bool(self._cleared)

    def drop_cleared(self) -> bool:
        """Drop one of the cleared chunks, whose room is taken before any eviction; return False if there is none."""
        if not self._cleared:
            return False
        chunks, trails = self._cleared[0]
        _, chunk = chunks.popitem()  # the latest first: these have pages
        if not chunks:
            self._cleared.popleft()
        if chunk.trail:
            trails.discard(chunk.trail)
        if not chunk.is_dropped:
            self._drop(chunk, MissReason.REMOVED)
        return True

    def _drop(self, chunk: Chunk, reason: MissReason) -> None:
        """Make a chunk unreachable, and free its pages if it is not in use."""
        space = chunk.space
        if not chunk.is_cleared:
            del space.chunks[chunk.ref]
            if chunk.trail:
                space.trails.discard(chunk.trail)
            chunk.account.drop(chunk.size_bytes)
            self.stamp += 1
        del self._chunks[chunk.key]
        chunk.quota.drop(chunk)
        self.num_in_memory -= bool(chunk.runs)
        self.departed.note(chunk.key, reason)
        if reason is MissReason.EVICTED:
            space.counters.evicted_chunks += 1
        self._forget_in(self._memory, chunk, reason)
        if chunk.disk_bytes:
            self._forget_in(self._disk, chunk, reason)
            if not chunk.is_cleared:
                self._removals.append((space, chunk.ref))
            chunk.disk_bytes = 0
        self.pins.drop(chunk)
        self.holds.drop(chunk)
        self.lifetimes.drop(chunk)
        chunk.is_dropped = True
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
        if chunk.runs and not chunk.is_dropped:
            self.num_in_memory -= 1
            self._memory.evict(chunk.key)
        self._free.give(chunk.runs)
        chunk.runs = ()
        chunk.is_whole = False
        chunk.sums = {}  # a codec may bring other bytes back

    def _take(self, chunk: Chunk, newcomer: bytes | None) -> Generator[None, None, tuple[Run, ...] | None]:
        """Take pages, in steps, from cleared chunks first, then by evictions; None if too little can be evicted."""
        while (missing_bytes := chunk.size_bytes - self._free.num_free * PAGE_BYTES) > 0:
            if self.drop_cleared():
                yield
                continue
            keys = self._memory.make_room(missing_bytes, lambda key: self._may_go(self._chunks[key]), newcomer)
            if keys is None:
                return None
            for victim in [self._chunks[key] for key in keys]:
                if victim.runs and not victim.is_gone and self._may_go(victim):
                    self._leave_memory(victim)
                    yield
        return self._free.take(chunk.size_bytes // PAGE_BYTES)

    def _may_go(self, chunk: Chunk) -> bool:
        """Tell if a chunk may be evicted from memory."""
        return not (chunk.uses or chunk.is_pinned or chunk in self.holds)

    def _leave_memory(self, chunk: Chunk) -> None:
        if chunk.disk_bytes:
            self._unmap(chunk)
        else:
            self._drop(chunk, MissReason.EVICTED)

    def _shrink(self, quota: Quota, limit_bytes: int) -> bool:
        """Evict the least recently used chunks of a quota down to a limit; if that cannot be reached, evict none."""
        missing_bytes = quota.used_bytes - limit_bytes
        if missing_bytes > 0 and self._is_changing_quotas:  # far more than one chunk may have to go
            return False
        victims: list[Chunk] = []
        for chunk in quota.by_age() if missing_bytes > 0 else ():
            if self._may_go(chunk):
                victims.append(chunk)
                missing_bytes -= chunk.size_bytes
                if missing_bytes <= 0:
                    break
        if missing_bytes > 0:
            return False
        for chunk in victims:
            self._drop(chunk, MissReason.EVICTED)
        return True
