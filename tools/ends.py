"""Ends of prompts inside longer chunks of a folder, cut out as separate chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.coding import open_coder
from kvstore.index.trails import Trails
from kvstore.model.chunks import ByteArray, ChunkRef, is_trail_of
from kvstore.model.keys import ChunkKey, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.inventory import Inventory


class Ends:
    """Reader of tails that have no file, from the files of longer chunks that hold them. Not thread-safe.

    Args:
        inventories: inventories of one worker.
        layout: layout of the worker's chunks.
        trails: trails of the tails that may be read.
    """

    def __init__(self, inventories: Sequence[Inventory], layout: KVLayout, trails: Mapping[ChunkRef, bytes]) -> None:
        self.inventories = inventories
        self._layout = layout
        self._wanted = trails
        self._where: dict[PrefixKey, tuple[Inventory, ChunkRef]] = {}

    def read(self, ref: ChunkRef) -> ByteArray | None:
        """Return the content of the file that a tail would have, without a codec; None if no sound chunk holds it.

        Raises:
            ConfigError: the package of a codec is missing.
        """
        for key in self._trails.within(self._wanted.get(ref, b"")):
            inventory, holder = self._where[key]
            image = inventory.read(holder)
            if image is None or isinstance(image, str):
                continue
            payload = self._payload(inventory, holder, image)
            if payload is not None:
                return self._image(inventory, ref, self._leading(payload, holder.num_blocks, ref.num_blocks))
        return None

    @cached_property
    def _trails(self) -> Trails:
        """Trails of all chunks with a noted trail; other chunks are found only as a whole."""
        found: dict[PrefixKey, bytes] = {}
        for inventory in self.inventories:
            places = (place for place in inventory.places() if place.until_s is None)
            held = {place.ref.prefix_key: place.ref for place in places if place.ref is not None}
            self._where.update((key, (inventory, ref)) for key, ref in held.items())
            noted = inventory.trails(held).items()
            found.update((key, trail) for key, trail in noted if is_trail_of(trail, held[key]))
        trails = Trails()
        trails.add_all(found.values())
        return trails

    def _payload(self, inventory: Inventory, ref: ChunkRef, image: ByteArray) -> ByteArray | None:
        """Return the decoded payload of a checked file; None if it cannot be decoded, or is encrypted."""
        layout, codec = self._layout, chunkfile.codec_in(self._layout, image)
        if codec == "none":
            return image[chunkfile.header_bytes(layout) :][: layout.payload_bytes(ref.num_blocks)]
        payload = np.empty(layout.payload_bytes(ref.num_blocks), np.uint8)
        coder = None if chunkfile.is_sealed(codec) else open_coder(layout, codec)
        if coder is None:
            return None
        damage = coder.decode(ChunkKey(inventory.namespace_id, ref.prefix_key), ref.num_blocks, image, payload)
        return payload if damage is None else None

    def _leading(self, payload: ByteArray, num_blocks: int, wanted_blocks: int) -> ByteArray:
        """Return the payload of a chunk's first blocks."""
        ranges = self._layout.front_ranges(num_blocks, wanted_blocks)
        return np.concatenate([payload[begin:end] for begin, end in ranges])

    def _image(self, inventory: Inventory, ref: ChunkRef, payload: ByteArray) -> ByteArray:
        """Return the content of a chunk's file, without a codec."""
        key = ChunkKey(inventory.namespace_id, ref.prefix_key)
        header = chunkfile.encode_header(self._layout, key, ref.num_blocks, payload)
        image = np.zeros(chunkfile.file_bytes(self._layout, ref.num_blocks), np.uint8)
        image[: len(header)] = np.frombuffer(header, np.uint8)
        image[len(header) : len(header) + len(payload)] = payload
        return image
