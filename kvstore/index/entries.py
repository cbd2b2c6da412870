"""The index's entries: the state of each chunk's bytes in memory, on disk and at the remote tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from kvstore.index.deadlines import Deadlines
from kvstore.index.owners import Owner
from kvstore.index.plans import IndexCounters, MissReason, Place
from kvstore.index.trails import Trails
from kvstore.model.chunks import ChunkRef, is_trail_of
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixHasher, PrefixKey
from kvstore.model.lifetime import lasts

MAX_HOLDERS: Final = 8  # chunks examined, of each kind, that may hold one tail
MAX_DEPARTED = 65_536  # about 8 MB; beyond that the older half is dropped, as if never stored
_MAX_PROBES: Final = 64  # chunks examined with a slot, and without, while better ones do not fit
_MEMORY, _DISK = Place.MEMORY, Place.DISK  # module names for speed, as for the states of an entry


class InMemory(Enum):
    """State of a chunk in the pool."""

    NO_SLOT = auto()
    GATHERING = auto()  # its slot's bytes are being gathered
    LOADING = auto()  # being read from a slower tier; a load planned now runs after that read
    READY = auto()


class OnDisk(Enum):
    """State of a chunk on disk."""

    NO_FILE = auto()
    WRITING = auto()
    STORED = auto()
    UNREAD = auto()  # stored, but the last read failed


class AtRemote(Enum):
    """State of a chunk at the remote tier, as far as this engine sent it; other engines may store it there as well."""

    UNSENT = auto()
    SENDING = auto()
    SENT = auto()  # with its trail
    THERE = auto()  # found by its key only: stored by another engine, loaded from there, or sent without its trail


# Module names, since Python 3.11 takes 50 times as long to access an enum member, and lookups do so for every key.
NO_SLOT, GATHERING, LOADING, READY = InMemory
NO_FILE, WRITING, STORED, UNREAD = OnDisk
UNSENT, SENDING, SENT, THERE = AtRemote


@dataclass(slots=True)
class Entry:
    """One chunk, with the parts of its ``ref``, whose own object would take half as much as this."""

    prefix_key: PrefixKey
    num_blocks: int
    slot: int = -1  # valid unless ``memory`` is NO_SLOT
    memory: InMemory = NO_SLOT
    disk: OnDisk = NO_FILE
    remote: AtRemote = UNSENT
    uses: int = 0  # plans and writes in flight, and leases
    forgotten: bool = False  # dropped while in use: removed when the last use ends
    expires_s: float | None = None  # the end of its time to live
    front_of: ChunkRef | None = None  # the longer chunk at the remote tier from which it was read
    trail: bytes = b""  # the keys at the ends of its blocks; empty if unknown
    owner: Owner | None = None  # whose quotas it counts against; None without quotas

    @property
    def ref(self) -> ChunkRef:
        """The chunk's key and length."""
        return ChunkRef(self.prefix_key, self.num_blocks)

    def lasts_until(self, until_s: float | None) -> bool:
        """Tell if the chunk is kept at least until ``until_s``; None means without end."""
        return lasts(self.expires_s, until_s)

    @property
    def in_memory(self) -> bool:
        """True if its slot holds its bytes."""
        return self.memory is READY

    @property
    def on_disk(self) -> bool:
        """True if its file is complete."""
        return self.disk is STORED or self.disk is UNREAD


class Departed:
    """The chunks removed last, and why. The policies' ghosts give no reasons, and some policies keep none."""

    def __init__(self, max_keys: int = MAX_DEPARTED) -> None:
        self._max_keys = max_keys
        self._young: dict[PrefixKey, MissReason] = {}  # two halves, because resizing one large dictionary stalls
        self._old: dict[PrefixKey, MissReason] = {}

    def note(self, key: PrefixKey, reason: MissReason) -> None:
        """Note that a chunk was removed, and why."""
        if len(self._young) >= self._max_keys // 2 and key not in self._young:
            self._young, self._old = {}, self._young
        self._young[key] = reason

    def reason(self, key: PrefixKey) -> MissReason | None:
        """Return the reason of a chunk's last removal; None if unknown."""
        return self._young.get(key) or self._old.get(key)


class Entries(dict[PrefixKey, Entry]):
    """All chunks by key, with the records kept when a chunk is added to a place or removed from it.

    Args:
        tracks_changes: True to collect ``changes``.
        note_event: takes what happens to each chunk; must not wait. None for nobody.

    Attributes:
        now_s: the time.
        disk_answers: True if the disk can be read now.
    """

    def __init__(self, *, tracks_changes: bool, note_event: Callable[[ChunkEvent], object] | None = None) -> None:
        super().__init__()
        self._note_event = note_event
        self.now_s = 0.0
        self.disk_answers = True
        self.counters = IndexCounters()
        self.departed = Departed()
        self.near, self.far = Trails(), Trails()  # of chunks with a slot, and of those without
        self.whole_blocks = 0  # blocks of a whole chunk, which supersedes tails; 0 before the first store
        self.expiries = Deadlines[PrefixKey]()  # of chunks with a time to live
        self.extended: dict[PrefixKey, None] = {}  # of those that last longer now than a slower tier knows
        self.changes: dict[PrefixKey, bytes] | None = {} if tracks_changes else None  # trails by key, in order
        self._siblings: dict[PrefixKey, tuple[PrefixKey, ...]] = {}  # all parts of a checkpoint, by each part's key
        self._broken: dict[PrefixKey, None] = {}  # parts of checkpoints that lack another part

    def enter(self, chunk: Entry, trail: bytes = b"") -> Entry:
        """Add the entry of a chunk that has none, with its trail if it is known."""
        self[chunk.prefix_key] = chunk
        self.learn(chunk, trail)
        if chunk.expires_s is not None:
            self.expiries.set(chunk.prefix_key, chunk.expires_s)
        return chunk

    def learn_all(self, trails: Mapping[PrefixKey, bytes]) -> None:
        """``learn`` the trails of many chunks at once. Invalid trails are skipped."""
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
        """Set a chunk's trail if it was unknown, so that block ends lead to the chunk."""
        if trail and not chunk.trail:
            chunk.trail = trail
            self._trails_of(chunk).add(trail)

    def move(self, chunk: Entry, memory: InMemory) -> None:
        """Set a chunk's memory state, and move its trail to ``near`` if it has a slot or to ``far`` if not."""
        before, chunk.memory = self._trails_of(chunk), memory
        after = self._trails_of(chunk)
        if chunk.trail and after is not before:
            after.add(chunk.trail)  # first, because other threads search meanwhile
            before.discard(chunk.trail)

    def _trails_of(self, chunk: Entry) -> Trails:
        return self.far if chunk.memory is NO_SLOT else self.near

    def new_trails(
        self, hasher: PrefixHasher | None, refs: Iterable[ChunkRef], prefix: Sequence[PrefixKey] = ()
    ) -> dict[PrefixKey, bytes]:
        """Return the trails of a sequence's chunks that are unknown, or known without a trail."""
        if hasher is None:
            return {}
        keys = [*prefix[-1:], *(ref.prefix_key for ref in refs)]
        unknown = [key for key in keys if not (chunk := self.get(key)) or not chunk.trail]
        return hasher.trails(unknown, keys[-2] if len(keys) > 1 else b"") if unknown else {}

    def closest(
        self, trail: bytes, fits: Callable[[Entry], bool], *, has_slot: bool = False
    ) -> tuple[Entry | None, int]:
        """Return the chunk that shares most blocks with a trail of those that fit, and how many; one in memory first.

        With ``has_slot`` only chunks in memory count. Thread-safe.
        """
        best, most_blocks = None, 0
        for known in (self.near,) if has_slot else (self.near, self.far):
            for other, num_blocks in islice(known.neighbours(trail), _MAX_PROBES):
                if num_blocks <= most_blocks:
                    break
                chunk = self.get(other[-PREFIX_KEY_BYTES:])
                if chunk is not None and fits(chunk):
                    best, most_blocks = chunk, num_blocks
                    break
        return best, most_blocks

    def longer(self, trail: bytes, at_most: int | None = None) -> Iterator[Entry]:
        """Yield chunks in any state that hold all blocks of a trail and more, those in memory first. Thread-safe."""
        for known in (self.near, self.far):
            for key in islice(known.within(trail), at_most):
                if (chunk := self.get(key)) is not None:
                    yield chunk

    def is_known(self, key: PrefixKey) -> bool:
        """Tell if a chunk is here or arriving, and not about to be removed."""
        chunk = self.get(key)
        return chunk is not None and not chunk.forgotten

    def is_here(self, ref: ChunkRef) -> bool:
        """Tell if a chunk is here or arriving, and a load can be planned now."""
        chunk = self.get(ref.prefix_key)
        return chunk is not None and self.is_readable(chunk)

    def is_readable(self, chunk: Entry) -> bool:
        """Tell if a load of a chunk can be planned now."""
        if chunk.forgotten:
            return False
        memory = chunk.memory
        if memory is NO_SLOT:
            return (chunk.disk is STORED or chunk.disk is UNREAD) and self.disk_answers
        return memory is not GATHERING

    def is_loading(self, key: PrefixKey) -> bool:
        """Tell if a running load brings the chunk to a slot; a chunk forgotten meanwhile does not count."""
        chunk = self.get(key)
        return chunk is not None and chunk.memory is LOADING and not chunk.forgotten

    def holds(self, key: PrefixKey, place: Place) -> bool:
        """Tell if the bytes of a chunk are in a slot, or on disk."""
        chunk = self.get(key)
        if chunk is None or chunk.forgotten:
            return False
        return chunk.memory is READY if place is _MEMORY else place is _DISK and chunk.on_disk

    def owner_of(self, key: PrefixKey) -> Owner | None:
        """Return the owner of a known chunk; None without quotas."""
        return self[key].owner

    def is_unused(self, key: PrefixKey) -> bool:
        """Tell if a chunk may be evicted."""
        return self[key].uses == 0

    def extend(self, chunk: Entry, expires_s: float | None) -> None:
        """Keep a chunk at least until ``expires_s``, or without end for None. The longest requested time wins."""
        if chunk.lasts_until(expires_s):
            return
        chunk.expires_s = expires_s
        if expires_s is None:
            self.expiries.withdraw(chunk.prefix_key)
        else:
            self.expiries.set(chunk.prefix_key, expires_s)
        if chunk.disk is not NO_FILE or chunk.remote is not UNSENT:
            self.extended[chunk.prefix_key] = None

    def note_change(self, chunk: Entry) -> None:
        """Note that a chunk was added to a place or removed from one."""
        if self.changes is not None:
            self.changes[chunk.prefix_key] = chunk.trail

    def tell(
        self, fate: Fate, chunk: Entry | None, place: Place | None, cause: Cause = Cause.NONE, newcomer: PrefixKey = b""
    ) -> None:
        """Tell what happens to a chunk, or to all chunks for None, in one place or all."""
        if self._note_event is not None:
            key, first_key = (chunk.prefix_key, chunk.trail[:PREFIX_KEY_BYTES]) if chunk is not None else (b"", b"")
            self._note_event(ChunkEvent(fate, key, first_key, place.value if place else "", cause, newcomer))

    def note_evicted(self, chunk: Entry, place: Place, newcomer: PrefixKey | None = None) -> None:
        """Count and note that a chunk was evicted from one place; it is gone unless another place holds it."""
        self.tell(Fate.EVICTED, chunk, place, newcomer=newcomer or b"")
        self.counters.evicted_memory += place is _MEMORY
        self.counters.evicted_disk += place is _DISK
        if chunk.owner is not None:
            chunk.owner.note_evicted(place)
        if chunk.prefix_key not in self:
            self.note_gone(chunk, MissReason.EVICTED)

    def note_gone(self, chunk: Entry, reason: MissReason) -> None:
        """Note that a chunk was removed, and why.

        The reason is also noted under its first block, for sequences that end or diverge inside the chunk.
        """
        self.departed.note(chunk.prefix_key, reason)
        if len(chunk.trail) > PREFIX_KEY_BYTES:
            self.departed.note(chunk.trail[:PREFIX_KEY_BYTES], reason)

    def vanish(self, chunk: Entry) -> None:
        """Drop the entry of a chunk that is in no place here.

        If it is part of a checkpoint, the other parts are discarded unless the remote tier holds this part.
        """
        if self.pop(chunk.prefix_key, None) is not None and chunk.trail:
            self._trails_of(chunk).discard(chunk.trail)
        self.expiries.withdraw(chunk.prefix_key)
        siblings = self._siblings.pop(chunk.prefix_key, ())
        is_over = chunk.expires_s is not None and chunk.expires_s <= self.now_s
        if chunk.remote not in {SENT, THERE} or is_over:
            self._broken.update(dict.fromkeys(siblings))

    def note_checkpoint(self, refs: Iterable[ChunkRef]) -> None:
        """Note the parts of a checkpoint about to be stored or loaded. If one is missing, the others are useless."""
        keys = tuple(ref.prefix_key for ref in refs)
        if not all(map(self.is_known, keys)):
            self._broken.update(dict.fromkeys(keys))
            return
        for key in keys:
            self._siblings[key] = keys
            self._broken.pop(key, None)

    def break_checkpoint(self, key: PrefixKey) -> None:
        """Mark the other parts of a chunk's checkpoint for removal, because the chunk is being removed."""
        self._broken.update(dict.fromkeys(self._siblings.get(key, ())))

    def take_broken(self) -> list[Entry]:
        """Return the remaining parts of checkpoints that became incomplete since the last call."""
        broken, self._broken = self._broken, {}
        return [self[key] for key in broken if key in self]
