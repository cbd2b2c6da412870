"""CURVE keys in files: one line of 40 characters in Z85. Only their owner may read secret ones."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final, NamedTuple

try:
    import zmq
except ImportError as error:
    raise ImportError("the cache server and its clients need pyzmq: pip install 'vllm-kvstore[server]'") from error

from kvstore.errors import ConfigError

PUBLIC_SUFFIX: Final = ".pub"
_OWN_SUFFIX: Final = ".key"
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES: Final = 4096


class KeyPair(NamedTuple):
    """A public key and its secret key, in Z85."""

    public: bytes
    secret: bytes


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a new pair in ``<name>.pub`` and ``<name>.key``, and return these files.

    Raises:
        ConfigError: one of the files exists already, or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    files = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{_OWN_SUFFIX}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, key, mode in zip(files, (public, secret), (0o644, 0o600), strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(key + b"\n")
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is there already: choose another name, or delete it") from error
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}") from error
    return files


def read_pair(path: Path) -> KeyPair:
    """The secret key in a file, and the public one that belongs to it.

    Raises:
        ConfigError: there is none, or others may read it.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 it")
    secret = read_public(path)
    return KeyPair(zmq.curve_public(secret), secret)


def read_list(folder: Path) -> dict[bytes, str]:
    """The public keys in the ``.pub`` files of a folder, with the names of the files.

    Raises:
        ConfigError: there is no such folder, or a file holds no key.
    """
    if not folder.is_dir():
        raise ConfigError(f"the folder of the clients' keys, {folder}, is not there")
    return {read_public(path): path.stem for path in sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))}


def read_public(path: Path) -> bytes:
    """The key in a file; for a file of one's own secret key see ``read_pair``.

    Raises:
        ConfigError: there is none.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"the file {path} holds no key of 40 characters: make one with kvstore keygen")
    return key
