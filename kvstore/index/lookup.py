"""Read-only queries: what can be loaded, from which tier, and why the match ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvstore.index.entries import LOADING, NO_SLOT, READY, Entries, Entry
from kvstore.index.owners import Owner, Owners
from kvstore.index.plans import NO_MATCH, Match, MissReason, Place, all_refs, ends, tail_refs
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.index.slots import Slots
from kvstore.index.writes import RemoteSends
from kvstore.model.checkpoints import Checkpoints, End
from kvstore.model.chunks import Asked, ChunkRef, refs_of
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixHasher, PrefixKey

_ROUNDS, _CHECKPOINT_ROUNDS = 3, 4  # rounds of ``questions``
_MAX_NAMED = 8  # chunks named by a remote tier that a lookup asks about
_MEMORY, _DISK = Place.MEMORY, Place.DISK  # module names for speed, as for the states of an entry


@dataclass(slots=True)
class StagingRoom:
    """Slots, free or idle, that a load could still take. Idle ones of the load's own chunks are taken by it, too.

    Attributes:
        slots: within the quota of the owner.
        owner: of the sequence; None if it is not known.
        strange_slots: of these, for chunks that count against others because a restart did not know whose they are.
            None before the first one.
    """

    slots: int
    owner: Owner | None = None
    strange_slots: int | None = None

    def has_place(self, chunk: Entry) -> bool:
        """Tell if the load has a slot for a chunk."""
        is_here = chunk.uses > 0 and chunk.memory is not NO_SLOT
        if is_here or self.owner is None:
            return is_here or self.slots > 0
        return self.slots > 0 and (not self._is_strange(chunk) or self._spare_of(chunk) > 0)

    def takes(self, chunk: Entry | None) -> bool:
        """Count a chunk, or None for one that is not here; return False if the load would run out of slots."""
        if chunk is None or not chunk.uses or chunk.memory is NO_SLOT:
            if not self.slots:
                return False
            if self.owner is not None and chunk is not None and self._is_strange(chunk):
                if not (spare := self._spare_of(chunk)):
                    return False
                self.strange_slots = spare - 1
            self.slots -= 1
        return True

    def takes_first(self, chunks: Sequence[Entry | None]) -> int:
        """Count chunks in order, None for each that is not here; return how many the load has slots for."""
        if self.owner is not None or len(chunks) > self.slots:
            return sum(1 for _ in takewhile(self.takes, chunks))
        idle = [chunk for chunk in chunks if chunk is None or not chunk.uses or chunk.memory is NO_SLOT]
        self.slots -= len(idle)
        return len(chunks)

    def _is_strange(self, chunk: Entry) -> bool:
        return self.owner is not None and chunk.owner is not self.owner

    def _spare_of(self, chunk: Entry) -> int:
        if self.strange_slots is not None or chunk.owner is None:
            return self.strange_slots or 0
        return chunk.owner.memory.spare_slots


class Lookup:
    """The queries of the index.

    Args:
        chunks, slots, remote, owners: the parts of the index.
        checkpoints: the checkpoints that the model needs with its chunks; None if it needs none.
        reads_fronts: True if the remote tier can read only the leading blocks of a chunk.
    """

    def __init__(
        self,
        chunks: Entries,
        slots: Slots,
        remote: RemoteSends,
        owners: Owners,
        checkpoints: Checkpoints | None = None,
        *,
        reads_fronts: bool = False,
    ) -> None:
        self.rounds = _ROUNDS if checkpoints is None else _CHECKPOINT_ROUNDS
        self._chunks = chunks
        self._slots = slots
        self._remote = remote
        self._owners = owners
        self._checkpoints = checkpoints
        self._reads_fronts = reads_fronts

    def lookup(
        self,
        hasher: PrefixHasher,
        skip_tokens: int = 0,
        told: RemoteAnswers = NO_ANSWERS,
        limit_tokens: int | None = None,
        *,
        reads_parts: bool = True,
    ) -> Match:
        """Return the longest prefix that could be loaded now, for a caller that already holds ``skip_tokens``.

        Walks whole chunks from the one in which the caller's tokens end, then takes the chunk that shares most blocks
        with the first missing one. Loading a chunk from disk needs a slot, so the match ends where slots would run out.
        A chunk at a remote tier counts if the view knows it is there, or the caller was ``told``. Without
        ``reads_parts``, a chunk on disk counts only if the sequence has all of its blocks.

        A model that needs checkpoints continues from the last one within the chunks, and not beyond ``limit_tokens``.
        """
        if self._checkpoints is not None:
            return self._resumable(self._checkpoints, hasher, skip_tokens, told, limit_tokens)
        first_chunk, room = skip_tokens // hasher.chunk_tokens, self._room(hasher)
        found = self._whole(hasher, first_chunk, room, told)
        num_tokens = (first_chunk + len(found)) * hasher.chunk_tokens
        last, num_blocks = self._last(hasher, first_chunk + len(found), room, told, reads_parts=reads_parts)
        if last is not None:
            found.append(last)
            num_tokens += num_blocks * hasher.block_tokens
        return Match(tuple(found), num_tokens, first_chunk) if num_tokens > skip_tokens else NO_MATCH

    def _last(
        self, hasher: PrefixHasher, chunk: int, room: StagingRoom, told: RemoteAnswers, *, reads_parts: bool
    ) -> tuple[ChunkRef | None, int]:
        """Return the chunk with most blocks of chunk number ``chunk``, and how many; one in memory is preferred."""
        keys = hasher.block_keys(chunk)
        if not keys:
            return None, 0
        trail = b"".join(keys)
        holder, most_blocks = self._holder_of_most(trail, room, reads_parts=reads_parts)
        nearest = holder.ref if holder is not None else None
        if not self._remote.exists and self._chunks.keys().isdisjoint(keys[most_blocks:]):
            return nearest, most_blocks  # the usual case
        others = self._named(trail, hasher.blocks_per_chunk, most_blocks, told)
        for num_blocks in range(len(keys), most_blocks, -1):  # known by key only, arriving, or at a remote tier
            tail = self._find(keys[num_blocks - 1], num_blocks, room, told)
            if tail is not None:
                return tail, num_blocks
            for ref, shared_blocks in others if reads_parts else ():
                if shared_blocks == num_blocks and self._find(ref.prefix_key, ref.num_blocks, room, told):
                    return ref, num_blocks
        return nearest, most_blocks

    def _named(
        self, trail: bytes, blocks_per_chunk: int, known_blocks: int, told: RemoteAnswers
    ) -> list[tuple[ChunkRef, int]]:
        """Return the chunks named by a remote tier that share more than the known blocks with a trail.

        Chunks known to be missing are left out and, as in ``_holder_of_most``, those that another request is loading.
        """
        view = self._remote.view
        found = (
            (ref, num_blocks)
            for ref, num_blocks in takewhile(lambda found: found[1] > known_blocks, view.heard.nearest(trail))
            if num_blocks < ref.num_blocks <= blocks_per_chunk
            and not self._chunks.is_loading(ref.prefix_key)
            and (self._chunks.is_here(ref) or view.holds(ref, self._chunks.now_s, told) is not False)
        )
        return list(islice(found, _MAX_NAMED))

    def _holder_of_most(self, trail: bytes, room: StagingRoom, *, reads_parts: bool = True) -> tuple[Entry | None, int]:
        """Do the search of ``_last`` among chunks with known trails, including longer ones.

        A chunk that another request is loading is left out, because a user of a part would wait for all of it. Without
        ``reads_parts``, so are all chunks on disk, since those read as a whole are found by their keys.
        """
        chunks = self._chunks

        def fits(chunk: Entry) -> bool:
            return chunk.memory is not LOADING and chunks.is_readable(chunk) and room.has_place(chunk)

        return chunks.closest(trail, fits, has_slot=not reads_parts)

    def longest(self, trail: bytes) -> tuple[Place, int] | None:
        """Return the place of a chunk that shares most blocks with a trail, and how many. Thread-safe."""
        chunk, num_blocks = self._holder_of_most(trail, self._room())
        return None if chunk is None else (_DISK if chunk.memory is NO_SLOT else _MEMORY, num_blocks)

    def nearest(self, trail: bytes, place: Place) -> tuple[PrefixKey, int]:
        """Return the chunk in a place that shares most blocks with a trail, and how many; 0 if none does."""
        chunks = self._chunks
        chunk, num_blocks = chunks.closest(
            trail, lambda chunk: chunks.holds(chunk.prefix_key, place), has_slot=place is _MEMORY
        )
        return chunk.prefix_key if chunk is not None else b"", num_blocks

    def longer(self, trail: bytes) -> list[ChunkRef]:
        """Return the chunks in any state that hold all blocks of a trail and more. Thread-safe."""
        return list(dict.fromkeys(chunk.ref for chunk in self._chunks.longer(trail)))

    def _whole(self, hasher: PrefixHasher, first_chunk: int, room: StagingRoom, told: RemoteAnswers) -> list[ChunkRef]:
        """Return the whole chunks that could be loaded, in order, starting at ``first_chunk``."""
        keys, blocks_per_chunk = hasher.chunk_keys()[first_chunk:], hasher.blocks_per_chunk
        is_readable = self._chunks.is_readable
        found: list[Entry | None] = []
        for chunk in map(self._chunks.get, keys):
            # What is ready is readable: a call would take as long as all else.
            if chunk is not None and ((chunk.memory is READY and not chunk.forgotten) or is_readable(chunk)):
                if chunk.num_blocks != blocks_per_chunk:
                    break
            elif not self._remote.answers or not self._is_remote(ChunkRef(keys[len(found)], blocks_per_chunk), told):
                break
            else:
                chunk = None  # noqa: PLW2901 - an entry of what is not here takes a slot as none does
            found.append(chunk)
        return refs_of(keys[: room.takes_first(found)], blocks_per_chunk) if found else []

    def _resumable(
        self,
        checkpoints: Checkpoints,
        hasher: PrefixHasher,
        skip_tokens: int,
        told: RemoteAnswers,
        limit_tokens: int | None,
    ) -> Match:
        """Return the longest prefix at whose end a checkpoint can be loaded, too."""
        first_chunk = skip_tokens // hasher.chunk_tokens
        limit_tokens = hasher.num_tokens if limit_tokens is None else min(limit_tokens, hasher.num_tokens)
        found: list[ChunkRef] = []
        if checkpoints.groups.full:
            found = self._whole(hasher, first_chunk, self._room(hasher), told)
            last = first_chunk + len(found)
            tails = [tail for tail in tail_refs(hasher, last) if self.source(tail, told) is not None]
            tail_blocks = tails[-1].num_blocks if tails else 0
            reach_tokens = last * hasher.chunk_tokens + tail_blocks * hasher.block_tokens
            if limit_tokens < last * hasher.chunk_tokens:  # the limit lies inside a whole chunk
                last = limit_tokens // hasher.chunk_tokens
                tails = tail_refs(hasher, last)
        else:
            found, last, reach_tokens = [], limit_tokens // hasher.chunk_tokens, limit_tokens
            tails = tail_refs(hasher, last)
        possible = ends(hasher, skip_tokens, min(reach_tokens, limit_tokens), {last: tails})
        for (num_tokens, prefix_key), first in zip(possible, checkpoints.first_refs(possible), strict=True):
            if first is not None and self.source(first, told) is None:
                continue  # the usual case
            parts = tuple(checkpoints.refs(prefix_key, num_tokens))
            if any(self.source(ref, told) is None for ref in parts):
                continue
            num_chunks, tail_tokens = divmod(num_tokens, hasher.chunk_tokens)
            refs = found[: num_chunks + (tail_tokens > 0) - first_chunk]
            if tail_tokens and len(refs) == num_chunks - first_chunk and checkpoints.groups.full:
                refs.append(ChunkRef(prefix_key, tail_tokens // hasher.block_tokens))
            if self._fits((*refs, *parts), hasher):
                return Match(tuple(refs), num_tokens, first_chunk, parts, reach_tokens)
        return NO_MATCH._replace(chunk_tokens=reach_tokens)

    def _room(self, hasher: PrefixHasher | None = None) -> StagingRoom:
        """Return the room for a load of a sequence, within the quota of its owner; for None, of all owners."""
        owner = self._owners.of(hasher) if hasher is not None else None
        return StagingRoom(self._slots.room_of(owner), owner)

    def _fits(self, refs: Iterable[ChunkRef], hasher: PrefixHasher) -> bool:
        """Tell if one load has slots for all of these chunks, which can be found."""
        room, chunks = self._room(hasher), self._chunks
        return all(room.takes(chunks[ref.prefix_key] if chunks.is_here(ref) else None) for ref in refs)

    def why_missing(self, hasher: PrefixHasher, known_tokens: int, end_tokens: int) -> MissReason | None:
        """Return the reason why a match ended before ``end_tokens``; None if no whole block lies between.

        Examines the first chunk after the match, and the tails that it may have been stored as.
        """
        first_chunk, inside_tokens = divmod(known_tokens, hasher.chunk_tokens)
        inside, inside_blocks = hasher.block_keys(first_chunk), inside_tokens // hasher.block_tokens
        if not self._inside(hasher, known_tokens, end_tokens):
            return None
        keys = self.missing_keys(hasher, known_tokens, end_tokens)
        here = (chunk for key in reversed(keys) if (chunk := self._chunks.get(key)) is not None and not chunk.forgotten)
        if chunk := next(here, None) or self._hidden(inside, inside_blocks):
            if self._chunks.is_readable(chunk):
                return MissReason.NO_ROOM if self._checkpoints is None else MissReason.NO_CHECKPOINT
            is_down = chunk.on_disk and chunk.memory is NO_SLOT
            return MissReason.TIER_DOWN if is_down else MissReason.NOT_YET
        gone = (self._chunks.departed.reason(key) for key in reversed(keys))
        reason = next((reason for reason in gone if reason is not None), MissReason.NEVER_STORED)
        return MissReason.TIER_DOWN if self._remote.exists and not self._remote.answers else reason

    def missing_keys(self, hasher: PrefixHasher, known_tokens: int, end_tokens: int) -> list[PrefixKey]:
        """Return the keys that ``why_missing`` examines: of the first missing chunk's blocks, or of checkpoints."""
        if self._checkpoints is None or self._checkpoints.groups.full:
            return self._inside(hasher, known_tokens, end_tokens)
        last = len(hasher.chunk_keys())
        behind = ends(hasher, known_tokens, end_tokens, {last: tail_refs(hasher, last)})
        return [first.prefix_key for first in self._checkpoints.first_refs(reversed(behind)) if first is not None]

    @staticmethod
    def _inside(hasher: PrefixHasher, known_tokens: int, end_tokens: int) -> list[PrefixKey]:
        """Return the keys at the ends of the blocks after the match, as far as they lie in its chunk."""
        first_chunk, inside_tokens = divmod(known_tokens, hasher.chunk_tokens)
        end_block = (end_tokens - first_chunk * hasher.chunk_tokens) // hasher.block_tokens
        return hasher.block_keys(first_chunk)[inside_tokens // hasher.block_tokens : max(0, end_block)]

    def _hidden(self, keys: Iterable[PrefixKey], known_blocks: int) -> Entry | None:
        """Return a chunk that holds more than the known blocks, which cannot be loaded or it would have matched."""
        chunk, num_blocks = self._chunks.closest(b"".join(keys), lambda _: True)
        return chunk if chunk is not None and num_blocks > known_blocks and not chunk.forgotten else None

    def questions(
        self, hasher: PrefixHasher, match: Match, skip_tokens: int = 0, told: RemoteAnswers = NO_ANSWERS
    ) -> list[Asked]:
        """Return the questions to the remote tier that remain before the match is known to be the longest.

        The first round asks for the whole chunks after the match, the tails inside the first of them and at the end of
        the sequence, and the trails of both. A second round, if necessary, asks for the tails and the trail of the
        first missing chunk. The last round asks if the chunks named for a trail are there. The answers go to the
        ``RemoteView``, or to what the caller was ``told``.
        """
        if not self._remote.answers:
            return []
        known_tokens = max(match.num_tokens, match.chunk_tokens, skip_tokens)
        first_chunk, last = known_tokens // hasher.chunk_tokens, len(hasher.chunk_keys())
        asked: list[ChunkRef] = []
        near: list[bytes] = []
        if self._checkpoints is None or self._checkpoints.groups.full:
            asked += refs_of(hasher.chunk_keys()[first_chunk:], hasher.blocks_per_chunk)
            for chunk in dict.fromkeys((first_chunk, last)):
                known_blocks = max(0, known_tokens - chunk * hasher.chunk_tokens) // hasher.block_tokens
                tails, keys = tail_refs(hasher, chunk)[known_blocks:], hasher.block_keys(chunk)
                asked += tails
                if self._checkpoints is None and known_blocks < len(keys):
                    near.append(trail := b"".join(keys))
                    asked += (ref for ref, _ in self._named(trail, hasher.blocks_per_chunk, known_blocks, told))
        unknown = [ref for ref in asked if not self._chunks.is_here(ref)]
        questions: list[Asked] = [*self._remote.view.unknown(unknown, self._chunks.now_s, told)]
        questions += self._remote.view.unknown(near, self._chunks.now_s, told)
        if self._checkpoints is not None:
            known = match._replace(num_tokens=max(match.num_tokens, skip_tokens), chunk_tokens=known_tokens)
            questions += self._about_checkpoints(self._checkpoints, hasher, known, told)
        return questions

    def _about_checkpoints(
        self, checkpoints: Checkpoints, hasher: PrefixHasher, match: Match, told: RemoteAnswers
    ) -> list[ChunkRef]:
        """Return the questions about checkpoints after a match: the first part of each, then its other parts.

        The other parts are asked for only if the tier has the first one and the known chunks reach the checkpoint.
        """
        view, possible = self._remote.view, _asked_ends(hasher, match)
        asked: list[ChunkRef] = []
        for (num_tokens, prefix_key), first in zip(possible, checkpoints.first_refs(possible), strict=True):
            if first is None:
                continue
            is_there = self._chunks.is_here(first) or view.holds(first, self._chunks.now_s, told)
            if is_there is None:
                asked.append(first)
            elif is_there and num_tokens <= match.chunk_tokens:
                rest = [ref for ref in checkpoints.refs(prefix_key, num_tokens) if not self._chunks.is_here(ref)]
                asked += view.unknown(rest, self._chunks.now_s, told)
        return asked

    def asked_again(self, hasher: PrefixHasher, match: Match) -> list[ChunkRef]:
        """Return the chunks and checkpoint parts that a lookup after a match may have been told are missing."""
        refs = all_refs(hasher)
        view = self._remote.view
        if self._checkpoints is None or not self._remote.exists:
            return refs
        possible = _asked_ends(hasher, match)
        for (num_tokens, prefix_key), first in zip(possible, self._checkpoints.first_refs(possible), strict=True):
            if first is None:
                continue
            if self._chunks.is_here(first) or view.holds(first, self._chunks.now_s):
                refs += self._checkpoints.refs(prefix_key, num_tokens)
            else:
                refs.append(first)
        return refs

    def source(self, ref: ChunkRef, told: RemoteAnswers = NO_ANSWERS) -> Place | None:
        """Return the place from which a chunk would be loaded now; None if none has it."""
        chunk = self._chunks.get(ref.prefix_key)
        if chunk is not None and self._chunks.is_readable(chunk):
            if chunk.num_blocks != ref.num_blocks:
                return None
            return _DISK if chunk.memory is NO_SLOT else _MEMORY
        return Place.REMOTE if self._is_remote(ref, told) else None

    def front(self, ref: ChunkRef, num_blocks: int) -> bytes:
        """Return the trail of a chunk's leading blocks, if a load from the remote tier reads only these.

        Empty if it reads the whole chunk, as it does for more than half of the blocks, where a partial read saves too
        little.
        """
        if not self._reads_fronts or 2 * num_blocks > ref.num_blocks:
            return b""
        chunk = self._chunks.get(ref.prefix_key)
        trail = (chunk.trail if chunk is not None else b"") or self._remote.view.heard.trail_of(ref)
        front = trail[: num_blocks * PREFIX_KEY_BYTES]
        return b"" if front[-PREFIX_KEY_BYTES:] in self._chunks else front

    def _find(self, key: PrefixKey, num_blocks: int, room: StagingRoom, told: RemoteAnswers) -> ChunkRef | None:
        """Return a chunk that could be loaded, counted in ``room``."""
        chunks = self._chunks
        chunk = chunks.get(key)
        if chunk is not None and chunks.is_readable(chunk):
            return ChunkRef(key, num_blocks) if chunk.num_blocks == num_blocks and room.takes(chunk) else None
        ref = ChunkRef(key, num_blocks)
        return ref if self._is_remote(ref, told) and room.takes(None) else None

    def _is_remote(self, ref: ChunkRef, told: RemoteAnswers) -> bool:
        """Tell if a chunk that is not here could be loaded from the remote tier."""
        remote = self._remote
        if not remote.answers or not remote.view.holds(ref, self._chunks.now_s, told):
            return False
        chunk = self._chunks.get(ref.prefix_key)
        return chunk is None or (chunk.num_blocks == ref.num_blocks and not chunk.forgotten and chunk.memory is NO_SLOT)


def _asked_ends(hasher: PrefixHasher, match: Match) -> list[End]:
    """Return the ends after a match at which checkpoints are asked about: of chunks, and of two chunks' tails."""
    last = max(0, hasher.num_tokens - 1) // hasher.chunk_tokens  # may be whole, but no hit includes the last token
    tails = {chunk: tail_refs(hasher, chunk) for chunk in (match.chunk_tokens // hasher.chunk_tokens, last)}
    return ends(hasher, match.num_tokens, hasher.num_tokens, tails)
