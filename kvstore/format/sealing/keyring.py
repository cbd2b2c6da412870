"""Keys of encryption at rest, in a file."""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvstore.model.errors import ConfigError
from kvstore.model.keyfile import read_bounded, require_private
from kvstore.model.keys import KeyExtras

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
ID_PATTERN: Final = "[0-9A-Za-z._-]{1,32}"
_REREAD_AFTER_S: Final = 30.0
_MAX_FILE_BYTES: Final = 16 << 20


class RingKey(NamedTuple):
    """A key of 32 bytes, its name in the headers of chunks, and the tenant whose chunks it seals."""

    id: str
    secret: bytes
    tenant: bytes

    def __repr__(self) -> str:
        """Return the name only: a secret must not appear in a log."""
        return f"RingKey({self.id!r})"


class _Listed(BaseModel):
    """A key as the file lists it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=f"^{ID_PATTERN}$")]
    key: str
    cache_salt: str | None = None
    tags: dict[str, str] = {}


class _Keys(NamedTuple):
    """Content of a key file."""

    by_id: Mapping[str, RingKey]
    newest: Mapping[bytes, RingKey]  # by tenant


class KeyRing:
    """The keys in a file, which is read again when it has changed. Thread-safe.

    The last key of a tenant seals its chunks; chunks sealed with any key of the file can be read. Tenants without a key
    have the one without a cache salt and tags.

    Args:
        path: a YAML list of keys, readable only by its owner.

    Raises:
        ConfigError: the file is missing, can be read by others, or is wrong. The message never has its content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._state = _state(path)
        self._keys = _read(path)
        self._checked_s = time.monotonic()

    def newest(self, tenant: bytes) -> RingKey:
        """Return the key that seals the chunks of a tenant, see ``KeyExtras.tenant``."""
        newest = self._current().newest
        return newest.get(tenant) or newest[b""]

    def get(self, key_id: str) -> RingKey | None:
        """Return the key with this id; None if the file has none."""
        return self._current().by_id.get(key_id)

    def _current(self) -> _Keys:
        """Return the keys; one caller reads the file again if it is time, and the others do not wait for it."""
        if time.monotonic() - self._checked_s > _REREAD_AFTER_S and self._lock.acquire(blocking=False):
            try:
                self._checked_s = time.monotonic()
                self._reread()
            finally:
                self._lock.release()
        return self._keys

    def _reread(self) -> None:
        try:
            state = _state(self._path)
            if state != self._state:
                self._keys = _read(self._path)
                self._state = state
                logger.info("the key file %s was read again: %d keys", self._path, len(self._keys.by_id))
        except ConfigError as error:
            logger.warning("the former keys stay in use: %s", error)


def _state(path: Path) -> tuple[int, int, int]:
    """Return what changes whenever a file is replaced or written.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> _Keys:
    require_private(path)
    data = read_bounded(path, _MAX_FILE_BYTES)
    try:
        listed = TypeAdapter(list[_Listed]).validate_python(yaml.safe_load(data))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = _first_problem(error) if isinstance(error, ValidationError) else "it is not plain YAML"
        raise ConfigError(f"the key file {path} is no list of keys with id and key: {reason}") from None  # has secrets
    return _checked(path, listed)


def _first_problem(error: ValidationError) -> str:
    """Return place and kind of the first problem, without the value."""
    problem: Any = error.errors(include_input=False, include_context=False, include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


def _checked(path: Path, listed: Iterable[_Listed]) -> _Keys:
    by_id: dict[str, RingKey] = {}
    newest: dict[bytes, RingKey] = {}
    for item in listed:
        if item.id in by_id:
            raise ConfigError(f"the key file {path} has two keys with the id {item.id!r}: give each its own")
        try:
            secret = base64.b64decode(item.key, validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if len(secret) != KEY_BYTES:
            raise ConfigError(
                f"the key {item.id!r} in {path} is not {KEY_BYTES} bytes in base64: make one with openssl rand -base64 "
                f"{KEY_BYTES}"
            )
        tenant = KeyExtras(cache_salt=item.cache_salt, tags=tuple(item.tags.items())).tenant()
        by_id[item.id] = newest[tenant] = RingKey(item.id, secret, tenant)
    if b"" not in newest:
        raise ConfigError(
            f"the key file {path} has no key without cache_salt and tags, for the requests of all others: add one"
        )
    return _Keys(MappingProxyType(by_id), MappingProxyType(newest))
