"""Names of all objects below the prefix of a URL. ``docs/FORMAT.md`` describes them.

<namespace id>/epoch                                          16 hex digits
<namespace id>/namespace.json, layout.json                    for tools
<namespace id>/<epoch>/<2 of key>/<key>-<blocks>.safetensors  a chunk
<namespace id>/<epoch>/log/<milliseconds>-<writer>            a manifest
<namespace id>/<epoch>/base/<milliseconds>-<writer>           the manifests before it in one
sweep.lock                                                    held by the sweeper
probe/<16 hex>                                                kvstore doctor's
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from typing import Final, NamedTuple

from kvstore.format.chunkfile import chunk_name, parse_chunk_name
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import NAMESPACE_ID_BYTES, ChunkKey

LOCK_NAME: Final = "sweep.lock"
PROBES: Final = "probe/"
_EPOCH_BYTES: Final = 8
EPOCH_CHARS: Final = 2 * _EPOCH_BYTES
_MS_DIGITS: Final = 12
_WRITER_DIGITS: Final = 8
STAMP_CHARS: Final = _MS_DIGITS + 1 + _WRITER_DIGITS
_NAMESPACE: Final = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}")
_PROBE: Final = re.compile(rf"{PROBES}[0-9a-f]{{16}}")
_EPOCH: Final = re.compile(rf"[0-9a-f]{{{EPOCH_CHARS}}}")
_STAMP: Final = re.compile(rf"[0-9a-f]{{{_MS_DIGITS}}}-[0-9a-f]{{{_WRITER_DIGITS}}}")


class Home(NamedTuple):
    """Namespace and epoch of chunks. A new epoch is a new home, and the chunks of the old one are unreachable."""

    namespace_id: bytes
    epoch: str

    @property
    def folder(self) -> str:
        """Prefix of all objects of the home."""
        return f"{self.namespace_id.hex()}/{self.epoch}/"

    @property
    def log(self) -> str:
        """Prefix of its manifests."""
        return self.folder + "log/"

    @property
    def base(self) -> str:
        """Prefix of its compacted manifests."""
        return self.folder + "base/"


def epoch_name(namespace_id: bytes) -> str:
    """Return the name of the object that holds a namespace's epoch."""
    return f"{namespace_id.hex()}/epoch"


def note_name(namespace_id: bytes, note: str) -> str:
    """Return the name of a namespace's note for tools."""
    return f"{namespace_id.hex()}/{note}"


def new_epoch() -> str:
    """Return an epoch that was never used before."""
    return secrets.token_hex(_EPOCH_BYTES)


def parse_epoch(value: bytes | None) -> str | None:
    """Return the epoch in an object; None if there is no object, or it holds something else."""
    text = (value or b"").decode("ascii", "replace")
    return text if _EPOCH.fullmatch(text) else None


class Place(NamedTuple):
    """Home and chunk of an object."""

    home: Home
    ref: ChunkRef

    @property
    def name(self) -> str:
        """Name of the chunk's object."""
        return self.home.folder + chunk_name(self.ref)

    @property
    def key(self) -> ChunkKey:
        """Key of the chunk among those of all namespaces."""
        return ChunkKey(self.home.namespace_id, self.ref.prefix_key)

    def __str__(self) -> str:
        return self.name


def probe_name() -> str:
    """Return the name of an object that tries a storage, never used before."""
    return PROBES + secrets.token_hex(8)


def is_probe(name: str) -> bool:
    """Tell if a name is that of an object that tries a storage."""
    return _PROBE.fullmatch(name) is not None


def parse_place(name: str) -> Place | None:
    """Return the chunk that an object's name stands for; None for all other objects."""
    match name.split("/"):
        case [namespace, epoch, shard, last] if _NAMESPACE.fullmatch(namespace) and _EPOCH.fullmatch(epoch):
            chunk = parse_chunk_name(shard, last) if len(shard) == len("ab") else None
            if chunk is not None and chunk.until_s is None:
                return Place(Home(bytes.fromhex(namespace), epoch), chunk.ref)
    return None


def parse_home(name: str) -> Home | None:
    """Return the home that an object's name lies in; None for those outside of any."""
    namespace, _, rest = name.partition("/")
    epoch, mark, _ = rest.partition("/")
    if not mark or not _NAMESPACE.fullmatch(namespace) or not _EPOCH.fullmatch(epoch):
        return None
    return Home(bytes.fromhex(namespace), epoch)


class Stamps:
    """Maker of the names of one writer's manifests, in the order of the calls. Thread-safe.

    The time comes first, so that a listing that starts after a name shows what is new, of all writers.

    Attributes:
        writer: random digits that no other writer has.
    """

    def __init__(self) -> None:
        self.writer = secrets.token_hex(_WRITER_DIGITS // 2)
        self._lock = threading.Lock()
        self._last_ms = 0

    def next(self) -> str:
        """Return a name that was never used before."""
        with self._lock:
            self._last_ms = max(self._last_ms + 1, time.time_ns() // 1_000_000)
            return f"{stamp_at(self._last_ms / 1e3)}-{self.writer}"


def stamp_at(time_s: float) -> str:
    """Return the beginning of the names that are given at a time, in seconds since 1970."""
    return f"{max(0, int(time_s * 1e3)):0{_MS_DIGITS}x}"


def parse_stamp(name: str) -> tuple[float, str] | None:
    """Return the time in seconds and the writer in a manifest's name, the part after the last slash."""
    stamp = name.rpartition("/")[2]
    if _STAMP.fullmatch(stamp) is None:
        return None
    return int(stamp[:_MS_DIGITS], 16) / 1e3, stamp[_MS_DIGITS + 1 :]
