"""The mooncake tier: chunks in the memory of many hosts that Mooncake Store joins, for all engines of a namespace.

It is kept correct as follows:

- A chunk is one object in the form of a chunk file, and every byte is checked when it is read.
- Mooncake runs in a process of its own (``child.py``), on slots of its own (``slots.py``), and not on the caller's
  buffers. A call over its deadline is ``FAILED``, and its slots stay taken until it has ended. What a write that was
  given up stores after all is removed.
- The names of all objects contain the namespace's *epoch*, an object of its own, which is read every second.
  ``clear`` replaces it, and deletes the chunks of earlier ones, which this engine finds no more, and others after that
  second. A ``put`` in a former epoch stores nothing that is found.

The tier has no bound: the segments of the store have, and its master evicts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

if find_spec("mooncake") is None:
    raise ImportError("the mooncake tier needs Mooncake: pip install 'vllm-kvstore[mooncake]'")

from kvstore.format.chunkfile import Damage
from kvstore.format.coding import open_coder
from kvstore.format.sealing import open_ring
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import ChunkKey, Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer, check_layers, check_ref, payload_view
from kvstore.tiers.mooncake.calls import Calls
from kvstore.tiers.mooncake.codes import MISSING, NO_ROOM, TOO_SMALL, UNFINISHED
from kvstore.tiers.mooncake.image import Chunk, Images
from kvstore.tiers.mooncake.names import Home, parse_epoch
from kvstore.tiers.mooncake.session import Reply
from kvstore.tiers.mooncake.url import MooncakeTarget, parse_target
from kvstore.tiers.running import RunningCalls

logger = logging.getLogger(__name__)

_LOOKS: Final = 8  # attempts at a chunk that is replaced repeatedly while it is read
_FEW: Final = 2000  # keys of an order, which take about 160 KB
_FRESH_S: Final = 1.0  # after which a call reads the epoch again
_PAUSE_S: Final = 0.002  # between them
Moved = tuple[Outcome, int]  # the outcome of a chunk, and the bytes that moved
_FAILED: Final[Moved] = (Outcome.FAILED, 0)
_MISS: Final[Moved] = (Outcome.MISS, 0)


class MooncakeTier(Tier):
    """Tier of chunks in a Mooncake Store, for one namespace. Thread-safe.

    Args:
        target: the store.
        namespace: that of the chunks.
        layout: the geometry of the chunks.
        images: writes and reads them.
    """

    name = "mooncake"

    def __init__(self, target: MooncakeTarget, namespace: Namespace, layout: KVLayout, images: Images) -> None:
        self.counters = TierCounters()
        self._target = target
        self._layout = layout
        self._images = images
        self._calls = Calls(target, images.slot_bytes, self.counters)
        self._home = Home(namespace.id)
        self._read_s = -_FRESH_S  # when it was read last
        self._running = RunningCalls(self.name)
        self._lock = threading.Lock()  # guards _home

    @classmethod
    def open(cls, setup: TierSetup) -> MooncakeTier:
        """Open the store that the option ``url`` names, without connecting; the registry's factory.

        The option ``codec`` is a name in ``CODEC_NAMES``, and ``encryption_keys`` the path of a key file;
        ``docs/mooncake.md`` lists the others.

        Raises:
            ConfigError: the URL or another option is wrong, or there is a capacity.
        """
        setup.require_unbounded("give the store segments of the size that it may have")
        options = dict(setup.options)
        url, codec = options.pop("url", None), options.pop("codec", "none")
        if not isinstance(codec, str):
            raise ConfigError(f"the option 'codec' of the mooncake tier is a name, not {codec!r}")
        coder = open_coder(setup.layout, codec, open_ring(options.pop("encryption_keys", None)))
        return cls(parse_target(url, options), setup.namespace, setup.layout, Images(setup.layout, coder))

    @property
    def held_slots(self) -> int:
        """Number of slots that wait for the end of a call whose caller has given up."""
        return self._calls.held_slots

    def check(self) -> None:
        """Check at start that the store can be used.

        Raises:
            TierSetupError: Mooncake cannot be loaded.
            TierError: the master does not answer, or the store takes no objects.
        """
        with self._running.call():
            deadline_s = self._calls.deadline_s()
            self._calls.give(deadline_s)
            self._current_home(deadline_s)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Tell for each chunk if there is an object, in one call of Mooncake for many.

        Raises:
            TierError: the master does not answer.
        """
        with self._running.call():
            deadline_s = self._calls.deadline_s()
            while refs and time.monotonic() < deadline_s:
                found = self._look_up(self._known_home(deadline_s), refs, deadline_s)
                if found is not None:
                    return found
            if refs:
                raise self._unstable()
            return []

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, as many at once as there are slots.

        No buffer is written to after the call has ended.
        """
        return self._get(transfers, None)

    @property
    def reads_layers(self) -> bool:
        """See ``Tier``; False with a codec."""
        return self._images.have_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """See ``Tier``: one call for the headers and the layers of all chunks that have slots."""
        check_layers(self._layout, layers)
        return self._get(transfers, layers if self.reads_layers else None)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, as many at once as there are slots."""
        payloads = [payload_view(self._layout, transfer) for transfer in transfers]
        outcomes: list[Outcome] = []
        with self._running.call():
            deadline_s = self._calls.deadline_s()
            while len(outcomes) < len(transfers):
                begin = len(outcomes)
                home = self._known_home(deadline_s)
                moved = self._put_some(home, transfers[begin:], payloads[begin:], deadline_s)
                outcomes += [self.counters.count(*one) for one in moved]
        return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks, also those that are being read.

        Raises:
            TierError: the master does not answer.
        """
        wanted = list(dict.fromkeys(refs))
        for ref in wanted:
            check_ref(self._layout, ref)
        with self._running.call():
            if wanted:
                deadline_s = self._calls.deadline_s()
                self._remove(self._current_home(deadline_s), wanted, deadline_s)

    def clear(self) -> None:
        """Remove every chunk of the namespace, for all engines; a ``put`` of this one under way answers ``FAILED``.

        Raises:
            TierError: the master does not answer. The chunks may be unreachable and still exist; the next ``clear``
                deletes them.
        """
        with self._running.call():
            deadline_s = self._calls.deadline_s()
            self._sweep(self._renew(self._home, deadline_s), deadline_s)

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the namespace, and keep later ones under another namespace.

        If the store fails meanwhile, the old chunks stay until it evicts them.
        """
        with self._running.call():
            old = self._enter(Home(namespace.id))
            deadline_s = self._calls.deadline_s()
            try:
                self._sweep(self._renew(old, deadline_s), deadline_s)
            except TierError as error:
                logger.warning("chunks of the old namespace stay in Mooncake until it evicts them: %s", error)

    def close(self) -> None:
        """Wait for calls under way as long as one may take, then end Mooncake's process."""
        self._running.close()
        self._running.wait(self._target.timeout_s)
        self._calls.close()

    # Epochs.

    def _known_home(self, deadline_s: float) -> Home:
        return self._home if self._home.epoch else self._current_home(deadline_s)

    def _due(self, home: Home) -> str:
        """Return the key of the epoch if a call should read it, else an empty one."""
        is_due = time.monotonic() - self._read_s >= _FRESH_S
        return home.epoch_key if is_due else ""

    def _current_home(self, deadline_s: float) -> Home:
        """Return the home with the current epoch.

        Raises:
            TierError: it cannot be read.
        """
        while time.monotonic() < deadline_s:
            home = self._home
            if self._is_current(home, self._calls.ask(home.epoch_key, deadline_s, "epoch"), deadline_s):
                return home
        raise self._unstable()

    def _is_current(self, home: Home, reply: Reply, deadline_s: float) -> bool:
        """Tell if a reply names the epoch of a home; if not, the tier enters the one that it names, or begins one.

        Raises:
            TierError: the epoch cannot be read.
        """
        if "epoch" not in reply:
            return self._home == home
        code, epoch = reply["epoch_code"], parse_epoch(reply["epoch"])
        if epoch == home.epoch:
            self._read_s = time.monotonic()
            return self._home == home
        if epoch is not None:
            self._enter(Home(home.namespace_id, epoch), instead_of=home)
        elif code == UNFINISHED:
            time.sleep(_PAUSE_S)
        elif code == MISSING:
            self._write_epoch("begin", home.renewed(), deadline_s)
        elif code >= 0 or code == TOO_SMALL:  # somebody wrote something else there
            self._write_epoch("renew", home.renewed(), deadline_s)
        else:
            raise TierError(f"Mooncake at {self._target} does not return the epoch, code {code}")
        return False

    def _write_epoch(self, call: str, new: Home, deadline_s: float) -> None:
        """Write an epoch: in the place of another one to ``renew``, only if there is none to ``begin``."""
        (code,) = self._calls.ask("", deadline_s, call, key=new.epoch_key, epoch=new.epoch)["codes"]
        if code:
            raise TierError(f"Mooncake at {self._target} does not take the epoch, code {code}: has it free segments?")

    def _renew(self, home: Home, deadline_s: float) -> Home:
        """Begin a new epoch of a namespace, and enter it if this tier is in the old one."""
        new = home.renewed()
        self._write_epoch("renew", new, deadline_s)
        # Ask again, because the later epoch is valid if two threads clear.
        return self._current_home(deadline_s) if self._home.namespace_id == new.namespace_id else new

    def _sweep(self, home: Home, deadline_s: float) -> None:
        (code,) = self._calls.ask("", deadline_s, "sweep", pattern=home.dead_pattern)["codes"]
        if code < 0:
            raise TierError(f"Mooncake at {self._target} does not remove former chunks, code {code}")

    def _enter(self, home: Home, instead_of: Home | None = None) -> Home:
        """Move to a home, if the tier is still in ``instead_of``. Returns the home that it left."""
        with self._lock:
            left = self._home
            if instead_of is None or left == instead_of:
                self._home, self._read_s = home, -_FRESH_S
        return left

    def _unstable(self) -> TierError:
        return TierError(f"Mooncake at {self._target} returned another epoch in each read")

    # Chunks.

    def _look_up(self, home: Home, refs: Sequence[ChunkRef], deadline_s: float) -> list[bool] | None:
        """Return which chunks are there; None if the home was left meanwhile."""
        found: list[bool] = []
        for some in _few(refs):
            keys = [home.key(ref) for ref in some]
            reply = self._calls.ask(self._due(home), deadline_s, "exist", keys=keys)
            if not self._is_current(home, reply, deadline_s):
                return None
            found += [code == 1 for code in reply["codes"]]
        return found

    def _get(self, transfers: Sequence[Transfer], layers: range | None) -> list[Outcome]:
        wanted = [_Wanted(transfer.ref, payload_view(self._layout, transfer)) for transfer in transfers]
        with self._running.call():
            deadline_s = self._calls.deadline_s()
            while left := [one for one in wanted if one.moved is None]:
                self._get_some(left, layers, deadline_s)
        is_last = layers is None or layers.stop == self._layout.num_layers
        return [self.counters.count(*(one.moved or _FAILED), is_last=is_last) for one in wanted]

    def _get_some(self, wanted: list[_Wanted], layers: range | None, deadline_s: float) -> None:
        """Read as many chunks as there are slots; those that must be read again stay without an outcome."""
        if any(one.looks for one in wanted):
            time.sleep(_PAUSE_S)
        home = self._known_home(deadline_s)
        session, slots = self._calls.take(len(wanted), deadline_s)
        some = wanted[: len(slots)]
        order: dict[str, object] = {"sizes": [self._calls.slot_bytes] * len(some)}
        call = "get"
        parts = [self._parts(one, layers) for one in some]
        if all(parts):
            offsets, sizes = ([[pair[side] for pair in each] for each in parts] for side in (0, 1))
            call, order = "ranges", {"parts": [offsets, offsets, sizes], "is_all": layers is None}
        keys = [home.key(one.ref) for one in some]
        reply = self._calls.carry_out(session, slots, self._due(home), deadline_s, call, keys=keys, **order)
        if reply is None:
            for one in some or wanted:
                one.moved = _FAILED
            return
        try:
            is_current = self._is_current(home, reply, deadline_s)
            bad = []
            for one, slot, code in zip(some, slots, reply["codes"], strict=True):
                one.looks += 1
                if is_current and not self._take_in(home, one, session.slots.view(slot), code, layers):
                    bad.append(one.ref)
                elif not is_current and one.looks == _LOOKS:
                    one.moved = _MISS
        finally:
            session.slots.give_back(slots)
        if bad:
            try:
                self._remove(home, bad, deadline_s)
            except TierError as error:  # the other chunks are verified
                logger.warning("damaged chunks stay in Mooncake: %s", error)

    def _parts(self, one: _Wanted, layers: range | None) -> list[tuple[int, int]]:
        """Return the parts of an object to read, because Mooncake reads parts faster; none to read all that it has."""
        if layers is not None:
            return self._images.extents(one.ref.num_blocks, layers)
        return self._images.pieces(one.ref.num_blocks) if self._images.have_layers and not one.looks else []

    def _take_in(self, home: Home, one: _Wanted, slot: ByteArray, code: int, layers: range | None) -> bool:
        """Verify what a call has read of a chunk; False if it should be removed.

        One that is damaged is read again, as it may have been replaced.
        """
        if code == UNFINISHED and one.looks < _LOOKS:
            return True
        if code < 0 and code != TOO_SMALL:
            one.moved = _MISS if code in (MISSING, UNFINISHED) else _FAILED
            return True
        parts = self._images.extents(one.ref.num_blocks, layers) if layers is not None else []
        if parts and code not in (TOO_SMALL, sum(size for _, size in parts)):  # the slot holds less than was asked
            one.moved = _FAILED
            return True
        chunk = Chunk(ChunkKey(home.namespace_id, one.ref.prefix_key), one.ref.num_blocks, one.payload)
        damage: Damage | None = Damage.SIZE
        image = slot if layers is not None else slot[: max(code, 0)]
        if code != TOO_SMALL:
            damage = self._images.read(chunk, image, layers)
        if damage is None:
            one.moved = Outcome.HIT, code
            return True
        if damage is Damage.SEAL or (code != TOO_SMALL and self._images.is_foreign(slot)):
            one.moved = _MISS
            return False
        before, one.found = one.found, self._images.fingerprint(image, one.ref.num_blocks, layers)
        if one.looks == _LOOKS:
            one.moved = (Outcome.CORRUPT, 0) if one.found == before else _MISS  # it is replaced all the time
        return one.moved is None or one.moved == _MISS

    def _put_some(
        self, home: Home, transfers: Sequence[Transfer], payloads: Sequence[ByteArray], deadline_s: float
    ) -> list[Moved]:
        """Store as many of the first chunks as there are slots; returns their outcomes."""
        mine = [transfer.belongs_to(home.namespace_id) for transfer in transfers]
        if not mine[0]:
            return [_FAILED]
        session, slots = self._calls.take(mine.index(False) if False in mine else len(mine), deadline_s)
        if not slots:
            return [_FAILED] * len(transfers)
        keys, sizes = [], []
        try:
            for slot, transfer, payload in zip(slots, transfers, payloads, strict=False):
                key = ChunkKey(home.namespace_id, transfer.ref.prefix_key)
                chunk = Chunk(key, transfer.ref.num_blocks, payload, transfer.tenant)
                sizes.append(self._images.write(chunk, session.slots.view(slot)))
                keys.append(home.key(transfer.ref))
        except BaseException:
            session.slots.give_back(slots)
            raise
        reply = self._calls.carry_out(session, slots, self._due(home), deadline_s, "put", keys=keys, sizes=sizes)
        if reply is None:
            return [_FAILED] * len(slots)
        session.slots.give_back(slots)
        if not self._is_current(home, reply, deadline_s):
            self._remove(home, [transfer.ref for transfer in transfers[: len(slots)]], deadline_s)
            return [_FAILED] * len(slots)
        outcomes = {0: Outcome.STORED, NO_ROOM: Outcome.FULL}
        codes = [outcomes.get(code, Outcome.FAILED) for code in reply["codes"]]
        return [(outcome, size) for outcome, size in zip(codes, sizes, strict=True)]

    def _remove(self, home: Home, refs: Sequence[ChunkRef], deadline_s: float) -> None:
        """Remove chunks; those that are being written, once they are.

        Raises:
            TierError: the store did not remove some.
        """
        for some in _few(refs):
            self._remove_some([home.key(ref) for ref in some], deadline_s)

    def _remove_some(self, keys: Sequence[str], deadline_s: float) -> None:
        while keys:
            codes = self._calls.ask("", deadline_s, "remove", keys=keys)["codes"]
            keys = [key for key, code in zip(keys, codes, strict=True) if code not in (0, MISSING)]
            if keys and (set(codes) - {0, MISSING, UNFINISHED} or time.monotonic() > deadline_s):
                raise TierError(f"Mooncake at {self._target} does not remove {len(keys)} chunks, codes {set(codes)}")
            if keys:
                time.sleep(_PAUSE_S)


def _few(refs: Sequence[ChunkRef]) -> Iterator[Sequence[ChunkRef]]:
    """Return chunks in parts whose keys fit one order."""
    return (refs[begin : begin + _FEW] for begin in range(0, len(refs), _FEW))


@dataclass
class _Wanted:
    """Chunk to be read, how often it was tried, a fingerprint of what was found, and the outcome if it has one."""

    ref: ChunkRef
    payload: ByteArray
    looks: int = 0
    found: str = ""
    moved: Moved | None = None
