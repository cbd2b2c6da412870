"""Storage of named objects: what the tier needs of an object store, and of a folder that many hosts share.

An object is whole or absent, also while it is replaced. Names are relative to the URL's prefix, and consist of ASCII
letters, digits, ``.``, ``-`` and ``/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from kvstore.model.errors import TierError
from kvstore.tiers.object.names import EPOCH_CHARS, Home, epoch_name, parse_epoch

MAX_DELETED: Final = 1000  # in one request of S3


class FullError(TierError):
    """The storage has no room; nothing was written. A tier answers FULL."""


class Found(NamedTuple):
    """Object that is being read.

    Attributes:
        size_bytes: of all of it.
        version: of its content, for reads of further parts.
    """

    size_bytes: int
    version: str


class Listed(NamedTuple):
    """Object in a listing, and when it was written, in seconds since 1970 by the storage's clock."""

    name: str
    size_bytes: int
    written_s: float


class Reading(ABC):
    """Object that is open, read from its begin or from an offset on. For one thread.

    Attributes:
        found: the object.
    """

    found: Found

    @abstractmethod
    def fill(self, view: memoryview) -> bool:
        """Fill a view with the next bytes; False if there are not so many.

        Raises:
            TierError: the storage failed.
        """


class Body(NamedTuple):
    """Content of an object to write.

    Attributes:
        size_bytes: of all parts.
        parts: makes them, while the storage already prepares for the object. It may be called again, and must not fail.
    """

    size_bytes: int
    parts: Callable[[], Sequence[memoryview]]

    @classmethod
    def of(cls, data: bytes | memoryview) -> Body:
        """Return the body with this content."""
        return cls(len(data), lambda: [memoryview(data)])


class Store(ABC):
    """Storage of objects. Thread-safe; each call waits at most for the time-outs it was opened with.

    All calls raise ``TierError`` if the storage fails, ``TierSetupError`` if it refuses this configuration.
    """

    place: str
    """The URL, for messages."""

    @abstractmethod
    def put(self, name: str, body: Body) -> None:
        """Write an object from the parts of its body, without a copy of them.

        Raises:
            FullError: there is no room.
        """

    @abstractmethod
    def open(
        self, name: str, offset: int = 0, num_bytes: int | None = None, version: str = ""
    ) -> AbstractContextManager[Reading | None]:
        """Open an object for reading; None if there is none, or only another ``version``.

        Args:
            name: of the object.
            offset: of the first byte that is read.
            num_bytes: the most that are read; None for all.
            version: of the object, as in ``Found``; empty for any.
        """

    @abstractmethod
    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return a small object; None if there is none. One that is longer is cut to ``most_bytes``."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small object, in the place of an older one.

        Raises:
            FullError: there is no room.
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one; False if there is."""

    @abstractmethod
    def replace(self, name: str, old: bytes, data: bytes) -> bool:
        """Write a small object in the place of one with the content ``old``; False if there is none."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; unknown ones are ignored."""

    @abstractmethod
    def list(self, prefix: str, start_after: str = "") -> Iterator[Listed]:
        """Yield the objects whose names begin with a prefix that ends with a slash, or with none.

        With ``start_after``, a whole name, only those that are greater. In an object store they are in order.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections. Idempotent."""


def is_current(store: Store, home: Home) -> bool:
    """Tell if a home is of its namespace's current epoch.

    Raises:
        TierError: the storage failed.
    """
    return parse_epoch(store.read(epoch_name(home.namespace_id), EPOCH_CHARS + 1)) == home.epoch


def batches(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield names in lists of at most ``MAX_DELETED``."""
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if len(batch) == MAX_DELETED:
            yield batch
            batch = []
    if batch:
        yield batch
