"""All chunks in a Redis, of every namespace, for tools: read-only, except for ``remove``, and without an engine.

Engines may write meanwhile, so chunks that look damaged are checked twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore.format.chunkfile import Damage
from kvstore.format.images import MAX_HEADER_BYTES, Facts, check_image, infer_layout, read_facts
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import NAMESPACE_ID_BYTES, PREFIX_KEY_BYTES, ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.tiers.redis.calls import Calls
from kvstore.tiers.redis.chunk import WRITE_ID_BYTES, num_parts
from kvstore.tiers.redis.connection import RedisConnection, pack
from kvstore.tiers.redis.names import PREFIX, Home
from kvstore.tiers.redis.nodes import open_nodes
from kvstore.tiers.redis.url import parse_target

_ASKED = 256  # commits to infer the geometry of a namespace from
_PARTS_AT_ONCE = 8
_MOST_PARTS = 1 << 16
MISSING_PART = "a part is missing: the server evicted it, or it expired"


class RedisPlace(NamedTuple):
    """Home and chunk of a commit."""

    home: Home
    ref: ChunkRef

    def __str__(self) -> str:
        return f"{self.home.namespace_id.hex()}/{self.ref.prefix_key.hex()}-{self.ref.num_blocks}"


class RedisInventory:
    """Chunks of all namespaces in a Redis. Thread-safe, except for ``layout``.

    Args:
        url: as in ``remote_url``.
        options: see ``docs/redis.md``.

    Raises:
        ConfigError: the URL or an option is wrong.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.target = parse_target(url, options)
        self._calls = Calls(self.target, open_nodes(self.target))
        self._layouts: dict[bytes, KVLayout | None] = {}  # by namespace

    def places(self) -> list[RedisPlace]:
        """Return every chunk with a commit, of the current epochs.

        Raises:
            TierError: a server failed.
        """
        found = {place for key in self._keys(PREFIX + b"*}:c") if (place := _parse(key)) is not None}
        epochs: dict[bytes, bytes | None] = {}
        for place in found:
            home = place.home
            if home.namespace_id not in epochs:
                epochs[home.namespace_id] = self._get(home.epoch_tag, home.epoch_key)
        return sorted((place for place in found if epochs[place.home.namespace_id] == place.home.epoch), key=str)

    def check(self, place: RedisPlace) -> str | None:
        """Describe the damage of a chunk in words; None if it is sound or removed.

        Raises:
            TierError: a server failed.
        """
        for _ in range(2):
            damage = self._check(place)
            if damage is None:
                return None
        return damage

    def facts(self, place: RedisPlace) -> Facts | None:
        """Return the header fields in a chunk's commit; None if there are none."""
        commit = self._get(place.home.tag(place.ref), place.home.keys(place.ref, 0)[0])
        return read_facts(_header(commit)) if commit is not None else None

    def layout(self, home: Home, places: list[RedisPlace]) -> KVLayout | None:
        """Return the geometry of most chunks of a namespace; None if no chunk has a readable header."""
        if home.namespace_id not in self._layouts:
            mine = [place for place in places if place.home == home][:_ASKED]
            self._layouts[home.namespace_id] = infer_layout(facts for place in mine if (facts := self.facts(place)))
        return self._layouts[home.namespace_id]

    def remove(self, places: Iterable[RedisPlace]) -> None:
        """Delete chunks with all their parts, in one walk over all keys.

        Raises:
            TierError: a server failed.
        """
        tags = {PREFIX + place.home.tag(place.ref): place.home.tag(place.ref) for place in places}
        for key in list(self._keys(PREFIX + b"*")) if tags else ():
            tag = tags.get(key.partition(b"}")[0])
            if tag is not None:
                self._calls.at(tag, lambda connection, key=key: connection.call("UNLINK", key))  # type: ignore[misc]

    def close(self) -> None:
        """End all connections."""
        self._calls.nodes.close()

    def _check(self, place: RedisPlace) -> str | None:
        home, ref = place
        tag, commit_key = home.tag(ref), home.keys(ref, 0)[0]
        commit = self._get(tag, commit_key)
        if commit is None:
            return None
        header = _header(commit)
        facts, layout = read_facts(header), self._layouts.get(home.namespace_id)
        if facts is None or layout is None or num_parts(facts.payload_bytes) > _MOST_PARTS:
            return str(Damage.NOT_A_CHUNK)
        data = self._data(place, facts.payload_bytes, commit[:WRITE_ID_BYTES])
        if isinstance(data, str):
            return data
        image = header + data.ljust(round_up(len(data), ALIGNMENT_BYTES), b"\0")
        key = ChunkKey(home.namespace_id, ref.prefix_key)
        damage = check_image(layout, key, ref.num_blocks, np.frombuffer(image, np.uint8))
        return str(damage) if damage is not None else None

    def _data(self, place: RedisPlace, data_bytes: int, write_id: bytes) -> bytes | str:
        """Return the data in the parts of a chunk, or a description of their damage."""
        keys = place.home.keys(place.ref, num_parts(data_bytes))[1:]
        data = bytearray()
        for begin in range(0, len(keys), _PARTS_AT_ONCE):
            commands = [pack("GET", key) for key in keys[begin : begin + _PARTS_AT_ONCE]]
            parts = self._calls.at(place.home.tag(place.ref), partial(RedisConnection.ask, commands=commands))
            for part in parts:
                if part is None:
                    return MISSING_PART
                if not isinstance(part, bytes):
                    return str(Damage.NOT_A_CHUNK)
                if part[:WRITE_ID_BYTES] != write_id:
                    return "a part is of another write"
                data += part[WRITE_ID_BYTES:]
        return bytes(data) if len(data) == data_bytes else str(Damage.SIZE)

    def _get(self, tag: bytes, key: bytes) -> bytes | None:
        """Return the value of a key, empty if it has another type; None if there is none."""
        (reply,) = self._calls.at(tag, lambda connection: connection.ask([pack("GET", key)]))
        if reply is None or isinstance(reply, bytes):
            return reply
        if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
            raise TierError(f"Redis at {self.target} refuses to show its values: {reply}")
        return b""

    def _keys(self, pattern: bytes) -> Iterator[bytes]:
        for _, keys in self._calls.pages(pattern):
            yield from keys

    def ask_servers(self, *command: str) -> dict[str, object]:
        """Send one command to every master. Returns the replies by server address, errors as values.

        Raises:
            TierError: a server cannot be reached.
        """
        replies: dict[str, object] = {}
        for node in self._calls.nodes.masters():
            with node.connection() as connection:
                replies[node.place] = connection.ask([pack(*command)])[0]
        return replies


def _header(commit: bytes) -> bytes:
    """Return the header of a commit in its form in a file, with trailing spaces."""
    text = commit[WRITE_ID_BYTES:]
    header_bytes = 8 + int.from_bytes(text[:8], "little")
    return text.ljust(header_bytes) if len(text) <= header_bytes <= MAX_HEADER_BYTES else text


def _parse(key: bytes) -> RedisPlace | None:
    """Return the chunk that a commit key belongs to; None for other keys."""
    namespace, _, rest = key.removeprefix(PREFIX).partition(b":")
    epoch, _, _ = rest.partition(b":")
    try:
        home = Home(bytes.fromhex(namespace.decode()), epoch)
    except ValueError:
        return None
    found = home.parse(key)
    if found is None or len(home.namespace_id) != NAMESPACE_ID_BYTES:
        return None
    ref, _ = found
    is_chunk = len(ref.prefix_key) == PREFIX_KEY_BYTES and ref.num_blocks > 0
    return RedisPlace(home, ref) if is_chunk else None
