"""All chunks in a store of objects, of every namespace, for tools: read-only, except for ``remove``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from kvstore.format.images import MAX_HEADER_BYTES, Facts, check_image, infer_layout, read_facts
from kvstore.model.errors import ConfigError, LayoutError
from kvstore.model.keys import ChunkKey, Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.folder import LAYOUT_FILE, NAMESPACE_FILE
from kvstore.tiers.object.names import Home, Place, note_name, parse_place
from kvstore.tiers.object.store import is_current
from kvstore.tiers.object.tier import open_store
from kvstore.tiers.object.url import parse_target

_MAX_NOTE_BYTES = 1 << 20
_ASKED = 256  # chunks to infer the geometry of a namespace from


class ObjectInventory:
    """Chunks of all namespaces in a store. For one thread.

    Args:
        url: as in ``remote_url``.
        options: see ``docs/object.md``.

    Raises:
        ConfigError: the URL or an option is wrong.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.store = open_store(parse_target(url, options))
        self.sizes: dict[Place, int] = {}
        self._layouts: dict[bytes, KVLayout | None] = {}  # by namespace

    def places(self) -> list[Place]:
        """Return every chunk of the current epochs.

        Raises:
            TierError: the store failed.
        """
        self.sizes = {place: listed.size_bytes for listed in self.store.list("") if (place := parse_place(listed.name))}
        homes = {place.home for place in self.sizes}
        current = {home for home in homes if is_current(self.store, home)}
        return sorted(place for place in self.sizes if place.home in current)

    def check(self, place: Place) -> str | None:
        """Describe the damage of a chunk in words; None if it is sound or removed.

        Raises:
            TierError: the store failed.
        """
        with self.store.open(place.name) as reading:
            if reading is None:
                return None
            image = np.empty(reading.found.size_bytes, np.uint8)
            reading.fill(image.data)
        layout = self.layout(place.home)
        key = ChunkKey(place.home.namespace_id, place.ref.prefix_key)
        damage = check_image(layout, key, place.ref.num_blocks, image) if layout is not None else "not a chunk file"
        return str(damage) if damage is not None else None

    def facts(self, place: Place) -> Facts | None:
        """Return the header fields of a chunk; None if there are none."""
        begin = self.store.read(place.name, min(MAX_HEADER_BYTES, max(1, self.sizes.get(place, MAX_HEADER_BYTES))))
        return read_facts(begin) if begin is not None else None

    def layout(self, home: Home) -> KVLayout | None:
        """Return the geometry in a namespace's note, or else that of most of its chunks; None if there is neither."""
        if home.namespace_id not in self._layouts:
            self._layouts[home.namespace_id] = self._noted(home) or self._inferred(home)
        return self._layouts[home.namespace_id]

    def fields(self, home: Home) -> dict[str, str | int] | None:
        """Return the fields of a namespace, as they were noted; None if the note does not fit its name."""
        found = self.store.read(note_name(home.namespace_id, NAMESPACE_FILE), _MAX_NOTE_BYTES)
        with suppress(ValueError, TypeError, AttributeError):
            fields = dict(json.loads(found or b""))
            return fields if Namespace(fields).id == home.namespace_id else None
        return None

    def remove(self, places: Iterable[Place]) -> None:
        """Delete chunks; engines that ask for them have a miss.

        Raises:
            TierError: the store failed.
        """
        self.store.delete([place.name for place in places])

    def close(self) -> None:
        """End all connections."""
        self.store.close()

    def _noted(self, home: Home) -> KVLayout | None:
        found = self.store.read(note_name(home.namespace_id, LAYOUT_FILE), _MAX_NOTE_BYTES)
        with suppress(LayoutError, ConfigError):
            return KVLayout.from_json(found) if found is not None else None
        return None

    def _inferred(self, home: Home) -> KVLayout | None:
        mine = [place for place in self.sizes if place.home == home][:_ASKED]
        return infer_layout(facts for place in mine if (facts := self.facts(place)))
