"""The object tier: chunks in an object store or a shared folder, for all engines of a namespace.

It is kept correct as follows:

- A chunk is one object, which its store replaces as a whole, and every byte is checked when it is read (``chunk.py``).
- The names of all objects contain the namespace's *epoch*. ``clear`` begins a new one: earlier chunks are unreachable
  at once for this engine, for others as soon as they look at the log, and are deleted afterwards.
- The *log* says what is there (``log.py``). It only gives hints: a chunk that is gone is a miss, and one that nobody
  names is stored again.
- Two calls never write or delete the same chunk at once: of two puts one fails, and a put during a removal stores
  nothing.

The tier has no bound. ``kvstore sweep`` keeps one, or a lifecycle rule of the bucket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.format.chunkfile import Damage
from kvstore.format.coding import open_coder
from kvstore.format.sealing import open_ring
from kvstore.index.trails import is_trail
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence, end_of, is_trail_of
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer, check_layers, check_ref, payload_view
from kvstore.tiers.disk.folder import LAYOUT_FILE, NAMESPACE_FILE
from kvstore.tiers.object.chunk import ChunkIO, CodedIO
from kvstore.tiers.object.log import Log, View
from kvstore.tiers.object.manifest import end_s_of
from kvstore.tiers.object.names import Home, Place, note_name
from kvstore.tiers.object.store import FullError, Store, batches
from kvstore.tiers.object.url import Kind, ObjectTarget, parse_target
from kvstore.tiers.running import RunningCalls

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

logger = logging.getLogger(__name__)

_CUT_WAIT_S: Final = 2.0
_DELETE_S: Final = 10.0
_LOOKS: Final = 3  # at a chunk that is missing while others are stored
Moved = tuple[Outcome, int]  # the outcome of a chunk, and the bytes that moved


class _Busy(Enum):
    """State of a chunk that a call is changing."""

    PUT = "being stored"
    GOING = "being stored, and to be removed afterwards"
    REMOVED = "being removed"


class ObjectTier(Tier):
    """Tier of chunks in a store of objects, for one namespace. Thread-safe.

    Args:
        store: of the objects, which the tier closes.
        namespace: that of the chunks.
        layout: the geometry of the chunks.
        timeout_s: longest wait for the log.
        codec: name of the codec of the chunks, see ``kvstore.format.codecs``. Chunks of another codec are misses, and
            are removed; chunks without a codec are always readable.
        keys: encrypt the chunks, and those that they did not encrypt count as of another codec; None for no encryption.

    Raises:
        ConfigError: the codec cannot be used on this layout.
    """

    name = "object"

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        layout: KVLayout,
        timeout_s: float,
        *,
        codec: str = "none",
        keys: KeyRing | None = None,
    ) -> None:
        self.counters = TierCounters()
        self._store = store
        self._layout = layout
        self._timeout_s = timeout_s
        coder = open_coder(layout, codec, keys)
        self._io = CodedIO(layout, store, coder, timeout_s) if coder else ChunkIO(layout, store)
        self._throttle = Throttle(logger)
        self._namespace = namespace
        self._is_noted = False
        self._changed = threading.Condition()
        self._busy: dict[Place, _Busy] = {}
        self._num_puts = 0  # that have stored a chunk
        self._running = RunningCalls(self.name)
        self._log = Log(store, namespace.id, timeout_s)

    @classmethod
    def open(cls, setup: TierSetup) -> ObjectTier:
        """Open the storage that the option ``url`` names, without waiting for it; the registry's factory.

        The option ``codec`` is a name in ``CODEC_NAMES``, and ``encryption_keys`` the path of a key file;
        ``docs/object.md`` lists the others.

        Raises:
            ConfigError: see the class; or the URL or another option is wrong, or there is a capacity.
        """
        setup.require_unbounded("bound the storage by kvstore sweep, or by a lifecycle rule of the bucket")
        options = dict(setup.options)
        url, codec = options.pop("url", None), options.pop("codec", "none")
        if not isinstance(codec, str):
            raise ConfigError(f"the option 'codec' of the object tier is a name, not {codec!r}")
        keys = open_ring(options.pop("encryption_keys", None))
        target = parse_target(url, options)
        return cls(open_store(target), setup.namespace, setup.layout, target.timeout_s, codec=codec, keys=keys)

    def check(self) -> None:
        """Check at start that the storage can be used.

        Raises:
            TierSetupError: it refuses the credentials or the certificate, or there is no such bucket.
            TierError: it cannot be reached, or the log cannot be read in time.
        """
        with self._running.call():
            self._log.view()

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if the log names it; sends no request.

        Raises:
            TierError: the log was not read yet, or cannot be read now.
        """
        with self._running.call():
            return self._log.view().catalog.presence(refs, time.time())

    @property
    def keeps_lifetimes(self) -> bool:
        """See ``Tier``; always True."""
        return True

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Let chunks held stay for longer, or without end; sends no request."""
        with self._running.call():
            view = self._log.view()
            for ref, until_s in lifetimes:
                if end_of(view.catalog.presence([ref], time.time())[0]) is not None:
                    view.limit(ref, end_s_of(until_s))

    @property
    def keeps_trails(self) -> bool:
        """See ``Tier``; always True."""
        return True

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """See ``Tier``; sends no request. Only the trails of the chunks stored last are known."""
        with self._running.call():
            catalog = self._log.view().catalog
            now_s = time.time()
            return [catalog.nearest(trail, now_s) if self._is_trail(trail) else () for trail in trails]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them."""
        return self._each(transfers, self._get)

    @property
    def reads_layers(self) -> bool:
        """See ``Tier``; False with a codec."""
        return self._io.reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """See ``Tier``: one request for the layers, and one for the header if they do not follow it."""
        check_layers(self._layout, layers)
        if not self.reads_layers:
            return self.get(transfers)
        return self._each(transfers, partial(self._get, layers=layers), is_last=layers.stop == self._layout.num_layers)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; call from several threads to overlap them.

        A chunk that another call is storing or removing is FAILED.
        """
        return self._each(transfers, self._put)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks. One that is being stored is removed by that call, which answers FAILED."""
        wanted = list(dict.fromkeys(refs))
        for ref in wanted:
            check_ref(self._layout, ref)
        with self._running.call():
            if wanted:
                self._remove(self._log.view(), wanted)

    def clear(self) -> None:
        """Remove every chunk of the namespace; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the storage failed. The chunks may be unreachable while their bytes still exist: a sweep deletes
                them.
        """
        with self._running.call():
            view = self._log.view()
            self._log.renew(view)
            self._delete_all(view.home)

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the namespace, and keep later ones under another namespace.

        If the storage fails meanwhile, the old chunks stay until a sweep deletes them.
        """
        with self._running.call():
            with self._changed:
                left = self._log.enter(namespace.id)
                self._namespace, self._is_noted = namespace, False
            try:
                if left is not None:
                    self._log.renew(left)
                    self._delete_all(left.home)
            except TierError as error:
                logger.warning("chunks of the old namespace stay in %s until a sweep: %s", self._store.place, error)

    def close(self) -> None:
        """Write what other engines should know, wait for calls under way as long as the storage may be silent."""
        if not self._running.close():
            return
        self._running.wait(self._timeout_s)
        self._log.close()
        self._store.close()
        self._running.wait(_CUT_WAIT_S)
        self._io.close()

    def _each(
        self,
        transfers: Sequence[Transfer],
        move: Callable[[View, Transfer, ByteArray], Moved],
        *,
        is_last: bool = True,
    ) -> list[Outcome]:
        payloads = [payload_view(self._layout, transfer) for transfer in transfers]
        outcomes = []
        with self._running.call():
            for transfer, payload in zip(transfers, payloads, strict=True):
                outcome, num_bytes = move(self._log.view(), transfer, payload)
                outcomes.append(self.counters.count(outcome, num_bytes, is_last=is_last))
        return outcomes

    def _get(self, view: View, transfer: Transfer, payload: ByteArray, layers: range | None = None) -> Moved:
        ref = transfer.ref
        if not view.catalog.presence([ref], time.time())[0]:
            return Outcome.MISS, 0
        place = Place(view.home, ref)
        for _ in range(_LOOKS):
            num_puts = self._num_puts
            found = self._io.read(place, payload) if layers is None else self._io.read_layers(place, payload, layers)
            if not found.is_absent or self._forget(view, ref, num_puts):
                break
        if not self._log.is_current(view) or found.is_absent:
            return Outcome.MISS, 0
        if found.damage is not None:
            if found.damage is Damage.SEAL:
                self._throttle.log("seal", "removed a chunk in %s: it is %s", self._store.place, found.damage.value)
            self._remove(view, [ref])
            return (Outcome.MISS if found.is_foreign else Outcome.CORRUPT), 0
        ends = view.catalog.ends(ref)
        if found.end_s != ends.written_s:  # of another write than the log says, so it may have to end earlier
            self._correct(view, ref, found.end_s, num_puts)
            return Outcome.MISS, 0
        if 0 < ends.end_s <= time.time():
            return Outcome.MISS, 0
        view.touch(ref)
        return Outcome.HIT, found.size_bytes

    def _forget(self, view: View, ref: ChunkRef, num_puts: int) -> bool:
        """Note that a chunk is gone. False if one may have been stored since there were ``num_puts``."""
        with self._changed:
            if self._num_puts != num_puts or Place(view.home, ref) in self._busy:
                return False
            self._log.remove(view, [ref])
            return True

    def _correct(self, view: View, ref: ChunkRef, end_s: int, num_puts: int) -> None:
        """Note the end in a chunk's header, unless it is gone, or one may have been stored since ``num_puts``."""
        with self._changed:
            is_same = self._num_puts == num_puts and Place(view.home, ref) not in self._busy
            if is_same and view.catalog.holds([ref])[0]:
                view.store(ref, b"", end_s)

    def _put(self, view: View, transfer: Transfer, payload: ByteArray) -> Moved:
        ref = transfer.ref
        place = Place(view.home, ref)
        with self._changed:
            if not transfer.belongs_to(view.home.namespace_id) or place in self._busy or not self._log.is_current(view):
                return Outcome.FAILED, 0
            self._busy[place] = _Busy.PUT
        is_stored = False
        try:
            self._note(view)
            end_s = end_s_of(transfer.until_s)
            size_bytes = self._io.write(place, payload, transfer.tenant, end_s)
            with self._changed:
                is_stored = self._busy[place] is _Busy.PUT and self._log.is_current(view)
                if is_stored:
                    self._num_puts += 1
                    view.store(ref, transfer.trail if self._is_trail_of(transfer.trail, ref) else b"", end_s)
            if not is_stored:
                self._store.delete([place.name])
        except FullError:
            return Outcome.FULL, 0
        finally:
            with self._changed:
                del self._busy[place]
        return (Outcome.STORED, size_bytes) if is_stored else (Outcome.FAILED, 0)

    def _remove(self, view: View, refs: Sequence[ChunkRef]) -> None:
        """Delete chunks that no call is changing; those that are being stored are deleted at the end of that call."""
        with self._changed:
            self._log.remove(view, refs)
            places = [Place(view.home, ref) for ref in refs]
            mine = [place for place in places if place not in self._busy]
            for place in places:
                is_put = self._busy.get(place) in (_Busy.PUT, _Busy.GOING)
                self._busy[place] = _Busy.GOING if is_put else _Busy.REMOVED
        try:
            self._store.delete([place.name for place in mine])
        finally:
            with self._changed:
                for place in mine:
                    del self._busy[place]

    def _delete_all(self, home: Home) -> None:
        """Delete the objects of a home that nobody finds any more; what takes too long is left to a sweep."""
        end_s = time.monotonic() + _DELETE_S
        for batch in batches(listed.name for listed in self._store.list(home.folder)):
            self._store.delete(batch)
            if time.monotonic() > end_s:
                logger.warning("cleared chunks stay in %s until a sweep deletes them", self._store.place)
                return

    def _note(self, view: View) -> None:
        """Store the notes for tools, once in a namespace."""
        with self._changed:
            namespace = self._namespace
            if self._is_noted or view.home.namespace_id != namespace.id:
                return
        for note, text in ((NAMESPACE_FILE, namespace.to_json()), (LAYOUT_FILE, self._layout.to_json())):
            self._store.create(note_name(namespace.id, note), text.encode())
        with self._changed:
            self._is_noted = namespace is self._namespace

    def _is_trail(self, trail: bytes) -> bool:
        return is_trail(trail, self._layout.blocks_per_chunk)

    def _is_trail_of(self, trail: bytes, ref: ChunkRef) -> bool:
        return self._is_trail(trail) and is_trail_of(trail, ref)


def open_store(target: ObjectTarget) -> Store:
    """Return the store of a target, without connecting.

    Raises:
        ConfigError: a setting is wrong, or a package is missing.
    """
    if target.kind is Kind.FOLDER:
        from kvstore.tiers.object.folder import FolderStore  # noqa: PLC0415 - only one of the two is needed

        return FolderStore(Path(target.bucket))
    try:
        from kvstore.tiers.object.cloud import CloudStore  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return CloudStore(target)
