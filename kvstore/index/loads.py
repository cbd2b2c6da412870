"""Loads: their plans and results. Chunks that arrived become readable; failed ones are forgotten or marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvstore.index.entries import LOADING, NO_FILE, NO_SLOT, READY, SENT, STORED, THERE, UNREAD, Entries, Entry
from kvstore.index.lookup import Lookup
from kvstore.index.owners import Owner, Owners
from kvstore.index.plans import LoadStep, MissReason, Place
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.index.slots import Slots, Uses
from kvstore.index.writes import RemoteSends
from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.model.history import Fate
from kvstore.model.keys import PrefixHasher, PrefixKey
from kvstore.model.lifetime import lasts

NO_TRAILS: Final[Mapping[PrefixKey, bytes]] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Loads:
    """Plans loads, and takes their results.

    Attributes:
        chunks, slots, remote, uses, lookup: the parts of the index.
        owners: of chunks.
    """

    chunks: Entries
    slots: Slots
    remote: RemoteSends
    uses: Uses
    lookup: Lookup
    owners: Owners

    def prepare(
        self,
        refs: Sequence[ChunkRef],
        told: RemoteAnswers = NO_ANSWERS,
        checkpoint: Sequence[ChunkRef] = (),
        hasher: PrefixHasher | None = None,
        front_blocks: int = 0,
        *,
        trails: Mapping[PrefixKey, bytes] = NO_TRAILS,
        is_use: bool = True,
        owner: Owner | None = None,
    ) -> list[LoadStep]:
        """Plan to load a prefix's chunks, in order; stops before the first one that is no longer available.

        Of the last chunk only ``front_blocks`` leading blocks are wanted, or all of them for 0. If the remote tier
        reads these alone, the step is of a tail that consists of them.

        A chunk that the caller was ``told`` a remote tier holds counts. Every step holds its chunk until ``complete``.
        ``checkpoint`` lists those of the refs that are parts of one, which are kept or dropped together. With the
        ``hasher`` of the sequence, or its ``trails``, chunks from a remote tier can be found by their block ends
        afterwards. Without ``is_use`` no request uses them yet, and the policies learn nothing from it. Without the
        ``hasher``, ``owner`` is the sequence's. Slots are taken within the quotas of the chunks' owners.
        """
        made = trails or self.chunks.new_trails(hasher, refs)
        owner = owner or self.owners.of(hasher)
        planned: list[tuple[Entry, Place, ChunkRef | None]] = []
        for position, ref in enumerate(refs, 1):
            source = self.lookup.source(ref, told)
            if source is None:
                break
            is_cut = source is Place.REMOTE and front_blocks and position == len(refs)
            front = self.lookup.front(ref, front_blocks) if is_cut else b""
            wanted = chunk_of(front) if front else ref
            holder = ref if front else None
            chunk = self.chunks.get(wanted.prefix_key)
            if chunk is None:
                until_s = self.remote.view.until_s(ref, self.chunks.now_s, told)
                chunk = self.chunks.enter(Entry(*wanted, expires_s=until_s, front_of=holder, owner=owner))
            trail = front or made.get(ref.prefix_key, b"")
            if hasher is not None and not trail and not chunk.trail:  # another sequence's that shares blocks with it
                trail = self.remote.view.heard.trail_of(ref)
            self.chunks.learn(chunk, trail)
            self.uses.begin(chunk)  # before slots are taken for others, so that this one is not evicted
            planned.append((chunk, source, holder))
        steps: list[LoadStep] = []
        for position, (chunk, source, holder) in enumerate(planned):
            if chunk.memory is NO_SLOT:
                slot = self.slots.take(owner=chunk.owner)
                if slot is None:
                    for unreachable, _, _ in planned[position:]:
                        self.uses.end(unreachable)
                    break
                self.slots.fill(chunk, slot, LOADING)
            steps.append(LoadStep(chunk.ref, chunk.slot, source, holder))
        keys, leaves = [step.ref.prefix_key for step in steps], {ref.prefix_key for ref in checkpoint}
        if is_use:
            self.uses.touch(keys, leaves=leaves)
        else:
            self.uses.refresh(keys, leaves)
        if checkpoint and steps and len(steps) == len(refs):
            self.chunks.note_checkpoint(checkpoint)
        return steps

    def complete(self, steps: Iterable[LoadStep], failed: AbstractSet[PrefixKey], lost: AbstractSet[PrefixKey]) -> None:
        """Take the results of loads.

        Chunks in ``failed`` did not arrive. Those also in ``lost`` were missing or damaged and are forgotten. So is a
        chunk that was to be loaded from its slot and is not there. The others may still be on a disk that is down.
        """
        for step in steps:
            chunk = self.chunks[step.ref.prefix_key]
            if step.ref.prefix_key in failed:
                self._fail(chunk, step, is_lost=step.ref.prefix_key in lost)
            else:
                self._take_in(chunk, step)
            self.uses.end(chunk)

    def note_arrival(self, step: LoadStep) -> None:
        """Let other requests load a chunk from its slot, once a load that is still running has read it.

        Its use continues, as the copy to the blocks may be pending.
        """
        chunk = self.chunks[step.ref.prefix_key]
        if chunk.memory is LOADING and chunk.slot == step.slot:
            self._take_in(chunk, step)

    def _take_in(self, chunk: Entry, step: LoadStep) -> None:
        if step.source is Place.MEMORY or chunk.forgotten or self._has_arrived(chunk, step):
            return
        chunk.memory = READY
        self.chunks.tell(Fate.READ, chunk, step.source)
        if chunk.disk is UNREAD:
            chunk.disk = STORED
        if step.source is Place.REMOTE and step.holder is None and chunk.remote is not SENT:
            chunk.remote = THERE
            if not lasts(self.remote.view.until_s(chunk.ref, self.chunks.now_s), chunk.expires_s):
                self.chunks.extended[chunk.prefix_key] = None  # it became longer while the chunk came
        self.chunks.note_change(chunk)
        self.uses.supersede(chunk)

    @staticmethod
    def _has_arrived(chunk: Entry, step: LoadStep) -> bool:
        return step.source is not Place.MEMORY and chunk.memory is READY and chunk.slot == step.slot

    def _fail(self, chunk: Entry, step: LoadStep, *, is_lost: bool) -> None:
        self.chunks.counters.failed_loads += 1
        if self._has_arrived(chunk, step):
            return  # only its way to the blocks failed
        # The slot lacks its chunk's bytes. If it has changed since, the load only waited for a read that failed.
        is_mislabelled = step.source is Place.MEMORY and chunk.in_memory and chunk.slot == step.slot
        is_lost |= is_mislabelled
        self.chunks.tell(Fate.LOST if is_lost else Fate.UNREAD, chunk, step.source)
        if step.source is Place.REMOTE:  # missing there, or not to be read there soon
            self.remote.view.deny([step.read], self.chunks.now_s)
            if not chunk.forgotten and chunk.disk is NO_FILE:
                self.uses.forget(chunk)
            elif not chunk.forgotten:  # the copy on disk stays
                self.slots.drop(chunk)
            return
        if is_lost:
            self.chunks.counters.lost_chunks += not chunk.forgotten
            self.chunks.note_gone(chunk, MissReason.LOST)
            self.uses.forget(chunk)
        elif step.source is Place.DISK:
            chunk.disk = UNREAD
            self.slots.drop(chunk)
