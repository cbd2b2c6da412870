"""Read-only access to chunks in folders of the disk tier that another engine owns, or that have no owner.

An owner may be using a folder meanwhile: files appear, vanish and are recycled while they are read, so a file that
looks damaged is read again before it counts as such.
"""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.format.chunkfile import Damage, chunk_name
from kvstore.format.coding import open_coder
from kvstore.format.trailrecords import TrailNote
from kvstore.index.trails import Trails
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import MAX_NEAREST, Transfer
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.codedio import CodedIO
from kvstore.tiers.disk.survey import names
from kvstore.tiers.foreign import ForeignTier

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

logger = logging.getLogger(__name__)

_LOOKS: Final = 2  # at a file that looks damaged


class FolderReader(ForeignTier):
    """Reader of the chunks of one namespace in one or several folders, each chunk in any of them. Thread-safe.

    It takes no lock, and changes only the time of a chunk's last use. The folders need not exist. The notes of trails
    are read at the first call of ``nearest``.

    Args:
        folders: of disk tiers.
        namespace: of the chunks.
        layout: of the chunks.
        codec: that the chunks may be encoded with; those without one are read in any case.
        keys: that the chunks are encrypted with; None for no encryption.

    Raises:
        ConfigError: the codec cannot be used on this layout.
    """

    name = "folder"

    def __init__(
        self,
        folders: Sequence[Path],
        namespace: Namespace,
        layout: KVLayout,
        *,
        codec: str = "none",
        keys: KeyRing | None = None,
    ) -> None:
        super().__init__(layout)
        self._homes = [folder.absolute() / namespace.id.hex() for folder in folders]
        coder = open_coder(layout, codec, keys)
        self._io = CodedIO(layout, coder) if coder else ChunkIO(layout)
        self._io.namespace_id = namespace.id
        self._throttle = Throttle(logger)
        self._lock = threading.Lock()  # of the trails
        self._trails: Trails | None = None

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Tell for each chunk if its file exists.

        Raises:
            TierError: a folder cannot be read.
        """
        self._check_open()
        return [any(_is_file(home / chunk_name(ref)) for home in self._homes) for ref in refs]

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """See ``Tier``; only trails noted before the first call are known."""
        self._check_open()
        with self._lock:
            if self._trails is None:
                self._trails = self._read_trails()
            return [self._trails.closest(trail, MAX_NEAREST) for trail in trails]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; callers on several threads overlap."""
        bodies = [self._io.check(transfer) for transfer in transfers]
        self._check_open()
        return [self.counters.count(self._get(body), self._io.file_bytes[body.ref.num_blocks]) for body in bodies]

    def close(self) -> None:
        """Refuse further calls."""
        super().close()
        self._io.close()

    def _get(self, body: Body) -> Outcome:
        outcome = Outcome.MISS
        for home in self._homes:
            for _ in range(_LOOKS):
                found = self._read(home / chunk_name(body.ref), body)
                if found is not Outcome.CORRUPT:
                    break
            if found is Outcome.HIT:
                return found
            outcome = outcome if found is Outcome.MISS else found
        return outcome

    def _read(self, path: Path, body: Body) -> Outcome:
        try:
            damage = self._io.read(path, body, time.time_ns())
        except (FileNotFoundError, NotADirectoryError):
            return Outcome.MISS
        except OSError as error:
            self._warn("read", f"a chunk cannot be read: {_folder.reason(error)}")
            return Outcome.FAILED
        if damage is None:
            return Outcome.HIT
        self._warn(damage.name, f"a chunk cannot be read: {damage.value}")
        return Outcome.MISS if damage is Damage.SEAL else Outcome.CORRUPT

    def _read_trails(self) -> Trails:
        found: set[bytes] = set()
        for home in self._homes:
            try:
                held = {chunk.ref.prefix_key for _, chunk in names(home) if chunk and chunk.until_s is None}
                found.update(TrailNote(self._layout).read(home, held).values())
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn("trails", f"the note of trails cannot be read: {_folder.reason(error)}")
        trails = Trails()
        trails.add_all(found)
        return trails

    def _warn(self, cause: str, what: str) -> None:
        self._throttle.log(cause, "in the disk folder of another number of workers %s", what)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        folder = path.parents[2]  # above those of the namespace and of the key's first digits
        raise TierError(f"the disk folder {folder} cannot be looked into: {_folder.reason(error)}") from error
