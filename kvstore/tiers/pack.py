"""The pack tier: a read-only pack as the tier behind memory and disk. ``remote_url: pack:///data/system.kvpack``.

It implements the reading half of the contract. ``put`` answers ``FULL``; ``remove``, ``clear`` and damage hide chunks
until the pack is opened again. The file is never written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.codecs import STORED_NAMES
from kvstore.format.coding import ChunkCoder, open_coder
from kvstore.format.pack import Extent, Pack, open_pack
from kvstore.format.sealing import open_ring
from kvstore.index.trails import Trails
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, chunk_of, is_trail_of
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import ChunkKey, Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import GIVEN_BY_URL, MAX_NEAREST, TierSetup, Transfer, payload_view
from kvstore.tiers.foreign import ForeignTier

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

logger = logging.getLogger(__name__)

SCHEME = "pack"


class PackTier(ForeignTier):
    """Tier of the chunks of one namespace in a pack.

    Args:
        pack: closed with the tier.
        namespace: of the wanted chunks.
        layout: of the chunks.
        keys: of its encrypted chunks; without them those are misses. Chunks without encryption are read in any case.

    Raises:
        ConfigError: the pack has no chunks of this namespace; names the fields that differ.
    """

    name = "pack"
    refusal = Outcome.FULL

    def __init__(self, pack: Pack, namespace: Namespace, layout: KVLayout, keys: KeyRing | None = None) -> None:
        super().__init__(layout)
        self._keys = keys
        self._pack = pack
        self._namespace_id = namespace.id
        self._chunks = dict(pack.extents[find_shard(pack, namespace, layout)])
        self._trails = _trails_of(pack, self._chunks)
        self._in_order = Trails()
        self._in_order.add_all(self._trails.values())
        self._coders: dict[str, ChunkCoder] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, setup: TierSetup) -> PackTier:
        """Open the pack that the option ``url`` names, ``pack:///path``; the registry's factory.

        Raises:
            ConfigError: see the class; or the file is not a complete pack.
        """
        setup.require_known_options(*GIVEN_BY_URL, "encryption_keys")
        keys = open_ring(setup.options.get("encryption_keys"))
        pack = open_pack(path_of(setup.options.get("url")))
        try:
            return cls(pack, setup.namespace, setup.layout, keys)
        except ConfigError:
            pack.close()
            raise

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Tell for each chunk if it is in the pack. Answers from memory."""
        self._check_open()
        return [ref in self._chunks for ref in refs]

    @property
    def keeps_trails(self) -> bool:
        """Always True."""
        return True

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return the trails of chunks that share leading blocks with each. Answers from memory."""
        self._check_open()
        return [self._in_order.closest(trail, MAX_NEAREST) for trail in trails]

    def trail_of(self, ref: ChunkRef) -> bytes:
        """Return the trail of a chunk; empty if the pack does not have it."""
        trail = self._trails.get(ref.prefix_key, b"")
        return trail if is_trail_of(trail, ref) else b""

    def tenant_of(self, ref: ChunkRef) -> bytes:
        """Return the tenant whose key sealed a chunk; empty if it is not encrypted, or the key is unknown.

        Raises:
            TierError: the pack cannot be read.
        """
        extent = self._chunks.get(ref)
        if extent is None or self._keys is None:
            return b""
        begin = np.empty(min(chunkfile.header_bytes(self._layout, chunkfile.ANY_CODEC), extent.size_bytes), np.uint8)
        try:
            sealed_by = chunkfile.seal_of(begin) if self._pack.read_into(extent, [begin.data]) else ""
        except OSError as error:
            raise TierError(f"the pack {self._pack.path} cannot be read: {error.strerror}") from error
        key = self._keys.get(sealed_by.partition(" ")[0])
        return key.tenant if key else b""

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; callers on several threads overlap."""
        payloads = [payload_view(self._layout, transfer) for transfer in transfers]
        self._check_open()
        pairs = zip(transfers, payloads, strict=True)
        return [self.counters.count(*self._get(transfer.ref, payload)) for transfer, payload in pairs]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Hide chunks until the pack is opened again."""
        self._check_open()
        with self._lock:
            for ref in refs:
                self._hide(ref)

    def clear(self) -> None:
        """Hide every chunk until the pack is opened again."""
        self._check_open()
        with self._lock:
            self._chunks.clear()
            self._trails.clear()
            self._in_order = Trails()

    def reset(self, namespace: Namespace) -> None:
        """Hide every chunk, because a pack has none of weights that changed while the engine was running."""
        self.clear()
        self._namespace_id = namespace.id

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._pack.close()

    def _get(self, ref: ChunkRef, payload: ByteArray) -> tuple[Outcome, int]:
        extent = self._chunks.get(ref)
        if extent is None:
            return Outcome.MISS, 0
        try:
            damage = self._read(ref, extent, payload)
        except OSError:
            self._check_open()
            return Outcome.FAILED, 0
        if damage is None:
            return Outcome.HIT, extent.size_bytes
        with self._lock:
            self._hide(ref)
        return (Outcome.MISS if damage is Damage.SEAL else Outcome.CORRUPT), 0

    def _hide(self, ref: ChunkRef) -> None:
        self._chunks.pop(ref, None)
        if trail := self.trail_of(ref):
            del self._trails[ref.prefix_key]
            self._in_order.discard(trail)

    def _read(self, ref: ChunkRef, extent: Extent, payload: ByteArray) -> Damage | None:
        """Fill the payload from a chunk in the pack.

        Raises:
            OSError: the system refused.
        """
        layout, key = self._layout, ChunkKey(self._namespace_id, ref.prefix_key)
        begin = np.empty(min(chunkfile.header_bytes(layout, chunkfile.ANY_CODEC), extent.size_bytes), np.uint8)
        if not self._pack.read_into(extent, [begin.data]):
            return Damage.SIZE
        codec = chunkfile.codec_in(layout, begin)
        if codec == "none" or codec not in STORED_NAMES:
            header = begin[: chunkfile.header_bytes(layout)]
            if extent.size_bytes != chunkfile.file_bytes(layout, ref.num_blocks):
                return Damage.SIZE
            if not self._pack.read_into(extent, [header.data, payload.data]):
                return Damage.SIZE
            return chunkfile.verify(layout, key, ref.num_blocks, header, payload)
        coder = self._coder(codec)
        if coder is None:
            return Damage.SEAL
        image = self._pack.read(extent)
        return Damage.SIZE if image is None else coder.decode(key, ref.num_blocks, image, payload)

    def _coder(self, codec: str) -> ChunkCoder | None:
        """Return the coder of the chunks with this codec in their header; None if they need keys that it lacks."""
        if chunkfile.is_sealed(codec) and self._keys is None:
            return None
        if codec not in self._coders:
            name, keys = chunkfile.plain_name(codec), self._keys if chunkfile.is_sealed(codec) else None
            coder = open_coder(self._layout, name, keys)
            assert coder is not None
            self._coders[codec] = coder
        return self._coders[codec]


def _trails_of(pack: Pack, chunks: Container[ChunkRef]) -> dict[PrefixKey, bytes]:
    """Return the trails of chunks; lost ones only cost hits."""
    found, lost = pack.read_trails()
    if lost:
        logger.warning(
            "%d trails in the pack %s are damaged or cannot be read: their chunks are found as a whole only. Copy it "
            "again, or export it again",
            lost,
            pack.path,
        )
    return {key: trail for key, trail in found.items() if chunk_of(trail) in chunks}


def path_of(url: object) -> Path:
    """Return the path that ``pack:///path`` names.

    Raises:
        ConfigError: it does not name an absolute path.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme != SCHEME or parts.netloc or not parts.path.startswith("/"):
        raise ConfigError("a pack is named by its absolute path, such as pack:///data/system.kvpack")
    return Path(unquote(parts.path))


def find_shard(pack: Pack, namespace: Namespace, layout: KVLayout) -> int:
    """Return the number of the shard that holds the chunks of a namespace.

    Raises:
        ConfigError: none does; names the fields in which the closest one differs.
    """
    differing = [namespace.differing_fields(shard.namespace) for shard in pack.shards]
    for number, (shard, fields) in enumerate(zip(pack.shards, differing, strict=True)):
        if not fields and shard.layout.fingerprint == layout.fingerprint:
            return number
        if not fields:
            fields.append("layout")
    nearest = min(differing, key=len, default=["everything: it is empty"])
    raise ConfigError(
        f"the pack {os.fspath(pack.path)} was made for something else: it differs in {', '.join(nearest)}; "
        "export it with the same model, dtype and layout, or do not use it"
    )
