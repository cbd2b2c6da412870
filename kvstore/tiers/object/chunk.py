"""A chunk as an object, which is a chunk file: its way between a slot and a store.

``ChunkIO`` moves payloads as they are, ``CodedIO`` through a codec. Checksums are computed piece by piece while a chunk
arrives, when its bytes are in the processor's cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Final, NamedTuple

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.coding import ChunkCoder, is_foreign
from kvstore.memory.scratch import Scratch
from kvstore.model.chunks import ByteArray
from kvstore.model.layout import KVLayout
from kvstore.model.threads import start
from kvstore.tiers.object.names import Place
from kvstore.tiers.object.store import Body, Reading, Store

_PIECE_BYTES: Final = 256 << 10
_LARGE_BYTES: Final = 8 << 20  # below, handing over to another thread costs more than it saves
_SUM_THREADS: Final = 2
_MAX_HEADS: Final = 256  # of chunks that are read layer by layer


class Fetched(NamedTuple):
    """Result of reading a chunk.

    Attributes:
        size_bytes: that were read.
        damage: of the chunk; None if it is sound.
        is_foreign: it was encoded with a codec that the reader does not have; or it is empty, as SeaweedFS leaves an
            object whose writer was killed before the first byte.
        is_absent: there is no such chunk.
        end_s: end of its time to live in the header, in seconds since 1970; 0 for none.
    """

    size_bytes: int
    damage: Damage | None = None
    is_foreign: bool = False
    is_absent: bool = False
    end_s: int = 0


ABSENT: Final = Fetched(0, is_absent=True)


class _Head(NamedTuple):
    """Header of a chunk, and the version of its object."""

    header: bytes
    version: str


class ChunkIO:
    """Reader and writer of the chunks of one layout, without a codec. Thread-safe.

    Args:
        layout: of the chunks.
        store: of the objects.
    """

    reads_layers = True
    codec_name = "none"

    def __init__(self, layout: KVLayout, store: Store) -> None:
        self._layout = layout
        self._store = store
        self._header_bytes = chunkfile.header_bytes(layout)
        self._aside = ThreadPoolExecutor(_SUM_THREADS, "kvstore-sum")
        self._lock = threading.Lock()
        self._heads: OrderedDict[Place, _Head] = OrderedDict()

    def write(self, place: Place, payload: ByteArray, tenant: bytes, end_s: int) -> int:  # noqa: ARG002 - to encrypt
        """Write a chunk of a tenant, in the place of an older one. Returns the object's size.

        ``end_s`` is the end of its time to live, in seconds since 1970; 0 for none.

        Raises:
            FullError: there is no room.
            TierError: the storage failed.
        """
        num_blocks = place.ref.num_blocks
        num_zeros = chunkfile.body_bytes(self._layout, num_blocks) - len(payload)

        def parts() -> list[memoryview]:
            sums = self._checksums(num_blocks, payload)
            header = chunkfile.build_header(self._layout, place.key, num_blocks, sums, end_s=end_s or None)
            return [memoryview(header), payload.data, memoryview(bytes(num_zeros))]

        size_bytes = chunkfile.file_bytes(self._layout, num_blocks)
        self._store.put(place.name, Body(size_bytes, parts))
        return size_bytes

    def _checksums(self, num_blocks: int, payload: ByteArray) -> str:
        """Return the checksums of a payload that is about to be sent; of a large one half on another thread."""
        num_layers = self._layout.num_layers
        if len(payload) < _LARGE_BYTES or num_layers < 2:
            return chunkfile.checksums(self._layout, num_blocks, payload)
        middle = num_layers // 2
        sum_up = partial(chunkfile.checksums, self._layout, num_blocks, payload, range(middle))
        first = start(self._aside, sum_up, sum_up)
        try:
            second = chunkfile.checksums(self._layout, num_blocks, payload, range(middle, num_layers))
        finally:
            wait([first])
        return first.result() + second

    def close(self) -> None:
        """End the threads."""
        self._aside.shutdown(wait=False)

    def read(self, place: Place, payload: ByteArray) -> Fetched:
        """Read a chunk; only if it is sound, the payload is its KV.

        Raises:
            TierError: the storage failed, or all buffers of a codec were in use for too long.
        """
        with self._store.open(place.name) as reading:
            return ABSENT if reading is None else self._read(reading, place, payload)

    def _read(self, reading: Reading, place: Place, payload: ByteArray) -> Fetched:
        size_bytes = reading.found.size_bytes
        header = bytearray(self._header_bytes)
        if not reading.fill(memoryview(header)):
            return Fetched(size_bytes, Damage.SIZE, is_foreign=not size_bytes)
        if size_bytes != chunkfile.file_bytes(self._layout, place.ref.num_blocks):
            return Fetched(size_bytes, Damage.SIZE, self._is_foreign(header))
        sums = chunkfile.RunningSums(self._layout, place.ref.num_blocks)
        if not _fill(reading, payload, sums):
            return Fetched(size_bytes, Damage.SIZE)
        damage = chunkfile.compare(self._layout, place.key, place.ref.num_blocks, bytes(header), sums.text())
        return self._fetched(place, size_bytes, damage, header)

    def read_layers(self, place: Place, payload: ByteArray, layers: range) -> Fetched:
        """Read some layers of a chunk; no other byte of the payload is written.

        The header is kept for the following layers. If the chunk was replaced since, it counts as absent: its layers
        are those of another write.

        Raises:
            TierError: the storage failed.
        """
        head = self._head_of(place)
        if head is not None:
            found = self._read_part(place, payload, layers, head)
            if not found.is_absent or layers.start:
                return found
        head, found = self._read_front(place, payload, layers)
        if head is None or not layers.start:
            return found
        return self._read_part(place, payload, layers, head)

    def _read_front(self, place: Place, payload: ByteArray, layers: range) -> tuple[_Head | None, Fetched]:
        """Read the header, and in the same request the layers if they follow it."""
        end = 0 if layers.start else self._layout.layer_ranges(place.ref.num_blocks, layers)[-1][1]
        with self._store.open(place.name, 0, self._header_bytes + end) as reading:
            if reading is None:
                return None, ABSENT
            header = bytearray(self._header_bytes)
            size_bytes = reading.found.size_bytes
            is_whole = reading.fill(memoryview(header))
            if not is_whole or size_bytes != chunkfile.file_bytes(self._layout, place.ref.num_blocks):
                is_foreign = self._is_foreign(header) if is_whole else not size_bytes
                return None, Fetched(size_bytes, Damage.SIZE, is_foreign)
            head = _Head(bytes(header), reading.found.version)
            self._keep(place, head, layers)
            return head, self._take(reading, place, payload, layers, head) if end else ABSENT

    def _read_part(self, place: Place, payload: ByteArray, layers: range, head: _Head) -> Fetched:
        begin, end = _extent(self._layout, place.ref.num_blocks, layers)
        offset = self._header_bytes + begin
        with self._store.open(place.name, offset, end - begin, head.version) as reading:
            if reading is None:
                self._keep(place, None, layers)
                return ABSENT
            self._keep(place, head, layers)
            return self._take(reading, place, payload, layers, head)

    def _take(self, reading: Reading, place: Place, payload: ByteArray, layers: range, head: _Head) -> Fetched:
        begin, end = _extent(self._layout, place.ref.num_blocks, layers)
        if not reading.fill(payload.data[begin:end]):
            return Fetched(end - begin, Damage.SIZE)
        sums = chunkfile.checksums(self._layout, place.ref.num_blocks, payload, layers)
        key = place.key
        damage = chunkfile.compare(self._layout, key, place.ref.num_blocks, head.header, sums, layers=layers)
        return self._fetched(place, end - begin, damage, head.header)

    def _head_of(self, place: Place) -> _Head | None:
        with self._lock:
            return self._heads.get(place)

    def _keep(self, place: Place, head: _Head | None, layers: range) -> None:
        """Keep a header until the last layer was read."""
        with self._lock:
            self._heads.pop(place, None)
            if head is not None and layers.stop < self._layout.num_layers:
                self._heads[place] = head
            if len(self._heads) > _MAX_HEADS:
                self._heads.popitem(last=False)

    def _fetched(
        self, place: Place, size_bytes: int, damage: Damage | None, header: bytes | bytearray | ByteArray
    ) -> Fetched:
        if damage is not None:
            return Fetched(size_bytes, damage, self._is_foreign(header))
        return Fetched(size_bytes, end_s=chunkfile.end_of(header, place.key) or 0)

    def _is_foreign(self, header: bytes | bytearray | ByteArray) -> bool:
        """Tell if a chunk was encoded with a codec that this reader does not have."""
        return is_foreign(bytes(header), self.codec_name)


class CodedIO(ChunkIO):
    """Reader and writer of chunks whose layers are encoded; also reads those that are not. Thread-safe.

    Args:
        layout: of the chunks.
        store: of the objects.
        coder: encodes them.
        timeout_s: longest wait for one of the buffers.
    """

    reads_layers = False

    def __init__(self, layout: KVLayout, store: Store, coder: ChunkCoder, timeout_s: float) -> None:
        super().__init__(layout, store)
        self.codec_name = coder.codec_name
        self._coder = coder
        self._scratch = Scratch(self._coder.image_bytes(layout.blocks_per_chunk), timeout_s)

    def write(self, place: Place, payload: ByteArray, tenant: bytes, end_s: int) -> int:
        """See ``ChunkIO``: encodes the chunk."""
        key, num_blocks = place.key, place.ref.num_blocks
        with self._scratch.borrowed() as scratch:
            size_bytes = self._coder.encode(key, num_blocks, payload, scratch, tenant=tenant, end_s=end_s or None)
            self._store.put(place.name, Body.of(scratch.data[:size_bytes]))
        return size_bytes

    def read(self, place: Place, payload: ByteArray) -> Fetched:
        """See ``ChunkIO``. It takes a buffer before a connection, so that a wait for one holds no other."""
        with self._scratch.borrowed() as scratch, self._store.open(place.name) as reading:
            if reading is None:
                return ABSENT
            size_bytes = reading.found.size_bytes
            if not self._coder.may_be(place.ref.num_blocks, size_bytes):
                header = bytearray(self._header_bytes)
                is_foreign = self._is_foreign(header) if reading.fill(memoryview(header)) else not size_bytes
                return Fetched(size_bytes, Damage.SIZE, is_foreign)
            image = scratch[:size_bytes]
            if not reading.fill(image.data):
                return Fetched(size_bytes, Damage.SIZE)
            damage = self._coder.decode(place.key, place.ref.num_blocks, image, payload)
            if damage is Damage.SEAL:
                return Fetched(size_bytes, damage, is_foreign=True)
            return self._fetched(place, size_bytes, damage, image[: self._header_bytes])


def _fill(reading: Reading, payload: ByteArray, sums: chunkfile.RunningSums) -> bool:
    """Fill a payload in pieces, and add each to the checksums. False if the object ends too early."""
    view = payload.data
    for begin in range(0, len(view), _PIECE_BYTES):
        piece = view[begin : begin + _PIECE_BYTES]
        if not reading.fill(piece):
            return False
        sums.add(piece)
    return True


def _extent(layout: KVLayout, num_blocks: int, layers: range) -> tuple[int, int]:
    """Return begin and end of adjacent layers in a payload."""
    ranges = layout.layer_ranges(num_blocks, layers)
    return ranges[0][0], ranges[-1][1]
