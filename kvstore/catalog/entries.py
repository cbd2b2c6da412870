"""What the index knows of each chunk: the state of its bytes in every place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvstore.catalog.deadlines import Deadlines
from kvstore.catalog.departed import Departed
from kvstore.catalog.plans import IndexCounters, MissReason
from kvstore.catalog.trails import Trails
from kvstore.chunks import ChunkRef, is_trail_of
from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey


class InMemory(Enum):
    """What the pool holds of a chunk."""

    NO_SLOT = auto()
    GATHERING = auto()  # its slot's bytes are being gathered
    LOADING = auto()  # they are on their way from a slower tier: a load planned now runs after that
    READY = auto()


class OnDisk(Enum):
    """What the disk holds of a chunk."""

    NO_FILE = auto()
    WRITING = auto()
    STORED = auto()
    UNREAD = auto()  # stored, but the last read failed


class AtRemote(Enum):
    """What the remote tier got of a chunk from here; other engines may store it there as well."""

    UNSENT = auto()
    SENDING = auto()
    SENT = auto()  # with its trail
    THERE = auto()  # found by its key: another engine's, loaded from there, or sent without its trail


# By name, since Python 3.11 takes 50 times as long to find a member in its class, and lookups do so for every key.
NO_SLOT, GATHERING, LOADING, READY = InMemory
NO_FILE, WRITING, STORED, UNREAD = OnDisk
UNSENT, SENDING, SENT, THERE = AtRemote


@dataclass(slots=True)
class Entry:
    """One chunk."""

    ref: ChunkRef
    slot: int = -1  # valid unless ``memory`` is NO_SLOT
    memory: InMemory = NO_SLOT
    disk: OnDisk = NO_FILE
    remote: AtRemote = UNSENT
    uses: int = 0  # plans and writes in flight, and leases
    forgotten: bool = False  # dropped while in use: goes when the last use ends
    expires_s: float | None = None  # has a time to live, so it stays in memory
    front_of: ChunkRef | None = None  # the longer chunk that it was read from, at the remote tier
    trail: bytes = b""  # the keys at the ends of its blocks; empty if they are not known

    def lasts_until(self, expires_s: float | None) -> bool:
        """Whether it is to be kept until a moment at least, or None for good."""
        return self.expires_s is None or (expires_s is not None and expires_s <= self.expires_s)

    @property
    def in_memory(self) -> bool:
        """Whether its slot holds its bytes."""
        return self.memory is READY

    @property
    def on_disk(self) -> bool:
        """Whether its file is complete."""
        return self.disk is STORED or self.disk is UNREAD


class Entries(dict[PrefixKey, Entry]):
    """All chunks by key, and what is noted when one comes to a place or leaves it.

    Args:
        tracks_changes: whether to collect ``changes``.
    """

    def __init__(self, *, tracks_changes: bool) -> None:
        super().__init__()
        self.counters = IndexCounters()
        self.departed = Departed()
        self.near, self.far = Trails(), Trails()  # of the chunks that have a slot, and of those that have none
        self.whole_blocks = 0  # of a whole chunk, which supersedes tails; 0 before the first is offered
        self.expiries = Deadlines[PrefixKey]()  # of the chunks that have a time to live
        self.changes: dict[PrefixKey, bytes] | None = {} if tracks_changes else None  # the trails, in order
        self._siblings: dict[PrefixKey, tuple[PrefixKey, ...]] = {}  # the parts of a checkpoint, by each of them
        self._broken: dict[PrefixKey, None] = {}  # parts of checkpoints of which another part is gone

    def enter(self, chunk: Entry) -> Entry:
        """Make the entry of a chunk that has none. Its trail is to be learnt."""
        self[chunk.ref.prefix_key] = chunk
        return chunk

    def learn_all(self, trails: Mapping[PrefixKey, bytes]) -> None:
        """``learn`` of many chunks at once. What is no trail of the chunk is left out."""
        near: list[bytes] = []
        far: list[bytes] = []
        for key, trail in trails.items():
            chunk = self.get(key)
            if chunk is not None and not chunk.trail and is_trail_of(trail, chunk.ref):
                chunk.trail = trail
                (far if chunk.memory is NO_SLOT else near).append(trail)
        self.near.add_all(near)
        self.far.add_all(far)

    def learn(self, chunk: Entry, trail: bytes) -> None:
        """Let a chunk be found by its block ends, if its trail was not known."""
        if trail and not chunk.trail:
            chunk.trail = trail
            self._trails_of(chunk).add(trail)

    def move(self, chunk: Entry, memory: InMemory) -> None:
        """Give a chunk's slot to it, or take it away: it is found by its block ends before those that have none."""
        before, chunk.memory = self._trails_of(chunk), memory
        after = self._trails_of(chunk)
        if chunk.trail and after is not before:
            after.add(chunk.trail)  # first: other threads look for it meanwhile
            before.discard(chunk.trail)

    def _trails_of(self, chunk: Entry) -> Trails:
        return self.far if chunk.memory is NO_SLOT else self.near

    def is_known(self, key: PrefixKey) -> bool:
        """Whether a chunk is here, or comes, and is not about to go."""
        chunk = self.get(key)
        return chunk is not None and not chunk.forgotten

    def is_unused(self, key: PrefixKey) -> bool:
        """Whether a chunk may be evicted."""
        return self[key].uses == 0

    def extend(self, chunk: Entry, expires_s: float | None) -> None:
        """Keep a chunk until a moment at least, or for good: it stays as long as any that stored it wants."""
        if chunk.expires_s is None:
            return
        if expires_s is None:
            chunk.expires_s = None
            self.expiries.withdraw(chunk.ref.prefix_key)
        elif expires_s > chunk.expires_s:
            chunk.expires_s = expires_s
            self.expiries.set(chunk.ref.prefix_key, expires_s)

    def note_change(self, chunk: Entry) -> None:
        """A chunk came to a place, or left one."""
        if self.changes is not None:
            self.changes[chunk.ref.prefix_key] = chunk.trail

    def note_evicted(self, chunk: Entry) -> None:
        """A chunk was evicted from one place; unless it is in another one, it is gone."""
        if chunk.ref.prefix_key not in self:
            self.note_gone(chunk, MissReason.EVICTED)

    def note_gone(self, chunk: Entry, reason: MissReason) -> None:
        """A chunk went, and why. Its first block tells that to sequences that end, or part from it, inside."""
        self.departed.note(chunk.ref.prefix_key, reason)
        if len(chunk.trail) > PREFIX_KEY_BYTES:
            self.departed.note(chunk.trail[:PREFIX_KEY_BYTES], reason)

    def vanish(self, chunk: Entry) -> None:
        """Drop the entry of a chunk that is nowhere. A part of a checkpoint that the remote tier has is still there."""
        if self.pop(chunk.ref.prefix_key, None) is not None and chunk.trail:
            self._trails_of(chunk).discard(chunk.trail)
        self.expiries.withdraw(chunk.ref.prefix_key)
        siblings = self._siblings.pop(chunk.ref.prefix_key, ())
        if chunk.remote not in {SENT, THERE}:
            self._broken.update(dict.fromkeys(siblings))

    def note_checkpoint(self, refs: Iterable[ChunkRef]) -> None:
        """These are the parts of a checkpoint, to be stored or loaded: without one the others are worth nothing."""
        keys = tuple(ref.prefix_key for ref in refs)
        if not all(map(self.is_known, keys)):
            self._broken.update(dict.fromkeys(keys))
            return
        for key in keys:
            self._siblings[key] = keys
            self._broken.pop(key, None)

    def break_checkpoint(self, key: PrefixKey) -> None:
        """A chunk goes, wherever it is. If it is part of a checkpoint, the rest of that goes with it."""
        self._broken.update(dict.fromkeys(self._siblings.get(key, ())))

    def take_broken(self) -> list[Entry]:
        """The parts that are left of checkpoints that are not whole, since the last call."""
        broken, self._broken = self._broken, {}
        return [self[key] for key in broken if key in self]
