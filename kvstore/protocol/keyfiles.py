"""CURVE keys in files, as 40 characters in Z85, and the rights of the clients that have them.

Only their owner may read secret keys. Below a client's public key, the server's operator may write the client's rights
and tenant::

    rights: read, write
    tenant: team-a

Nothing that a client sends changes its rights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from enum import Flag, auto
from pathlib import Path
from typing import Final, NamedTuple

try:
    import zmq
except ImportError as error:
    raise ImportError("the cache server and its clients need pyzmq: pip install 'vllm-kvstore[server]'") from error

from kvstore.model.errors import ConfigError
from kvstore.model.keyfile import read_bounded, require_private
from kvstore.model.quotas import TENANT_PATTERN
from kvstore.protocol import messages


class Right(Flag):
    """Permissions, to be combined with ``|``."""

    READ = auto()
    WRITE = auto()
    CLEAR = auto()
    OPERATE = auto()


NO_RIGHT: Final = Right(0)
USUAL_RIGHTS: Final = Right.READ | Right.WRITE  # of a client whose key file names none
EVERY_RIGHT: Final = USUAL_RIGHTS | Right.CLEAR | Right.OPERATE

NEEDED: Final[Mapping[type[messages.Request], Right]] = {  # one of these is enough
    messages.Hello: Right.READ | Right.WRITE | Right.CLEAR,
    messages.Lookup: Right.READ | Right.WRITE,  # older senders look up the chunks that they need not send
    messages.Ask: Right.READ | Right.WRITE,
    messages.Nearest: Right.READ,
    messages.Scan: Right.READ,
    messages.Acquire: Right.READ,
    messages.Fetch: Right.READ,
    messages.Front: Right.READ,
    messages.Release: Right.READ,
    messages.Reserve: Right.WRITE,
    messages.ReserveFor: Right.WRITE,
    messages.Piece: Right.WRITE,
    messages.Attach: Right.WRITE,
    messages.Offer: Right.WRITE,
    messages.Describe: Right.WRITE,
    messages.Expire: Right.WRITE,
    messages.Prolong: Right.WRITE,
    messages.Commit: Right.WRITE,
    messages.Remove: Right.WRITE,  # a client that may replace a chunk may as well remove it
    messages.Sending: Right.WRITE,
    messages.Clear: Right.CLEAR | Right.OPERATE,
    messages.ClearSpaces: Right.OPERATE,
    messages.Pin: Right.OPERATE,
    messages.Pins: Right.OPERATE,
    messages.UnpinSpaces: Right.OPERATE,
    messages.Explain: Right.OPERATE,
    messages.Ping: NO_RIGHT,
    messages.Stats: NO_RIGHT,  # the contents of the answer depend on the rights
}


def names_of(rights: Right) -> str:
    """Return the names of rights, with commas between them."""
    return ", ".join(str(right.name).lower() for right in Right if right & rights) or "none"


def is_allowed(kind: type[messages.Request], rights: Right) -> bool:
    """Tell if these rights are enough for a kind of request."""
    needed = NEEDED[kind]
    return not needed or bool(needed & rights)


PUBLIC_SUFFIX: Final = ".pub"
_OWN_SUFFIX: Final = ".key"
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES: Final = 4096
_RIGHTS: Final = {names_of(right): right for right in Right}
_TENANT = re.compile(TENANT_PATTERN)


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
        raise ConfigError(f"{error.filename} already exists: choose another name, or delete it") from error
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}") from error
    return files


def read_pair(path: Path) -> KeyPair:
    """Read the secret key in a file, and derive its public key.

    Raises:
        ConfigError: there is none, or others may read it.
    """
    require_private(path)
    secret = read_public(path)
    return KeyPair(zmq.curve_public(secret), secret)


class ListedKey(NamedTuple):
    """A client that may connect, as the file of its public key describes it.

    Attributes:
        name: name of the file, without its suffix.
        rights: the client's rights.
        tenant: its tenant, whose chunks it shares; empty for keys without one, which share theirs.
    """

    name: str
    rights: Right = USUAL_RIGHTS
    tenant: str = ""


def read_list(folder: Path) -> dict[bytes, ListedKey]:
    """Read the public keys in the ``.pub`` files of a folder, and the rights of their clients.

    Raises:
        ConfigError: there is no such folder, or a file holds no key, an unknown line, or the key of another file.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == PUBLIC_SUFFIX)
    except FileNotFoundError as error:
        raise ConfigError(f"the folder of the clients' keys, {folder}, does not exist") from error
    except OSError as error:
        raise ConfigError(f"the folder of the clients' keys, {folder}, cannot be read: {error.strerror}") from error
    listed: dict[bytes, ListedKey] = {}
    for path in paths:
        key, client = _read(path)
        if key in listed:
            raise ConfigError(f"{path} holds the same key as {listed[key].name}{PUBLIC_SUFFIX}: delete one of them")
        listed[key] = client
    return listed


def read_public(path: Path) -> bytes:
    """Read the public key in a file; for a secret key see ``read_pair``.

    Raises:
        ConfigError: there is none.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, ListedKey]:
    """Read the public key in a file, and the description of its client.

    Raises:
        ConfigError: names the file, and the line.
    """
    data = read_bounded(path, _MAX_FILE_BYTES)
    lines = [(number, line.strip()) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines or _KEY.fullmatch(lines[0][1]) is None:
        raise ConfigError(f"the file {path} does not begin with a key of 40 characters: create one with kvstore keygen")
    (_, key), *others = lines
    settings = dict(_settings(path, others))
    rights = _rights(path, *settings["rights"]) if "rights" in settings else USUAL_RIGHTS
    number, tenant = settings.get("tenant", (0, ""))
    if "tenant" in settings and _TENANT.fullmatch(tenant) is None:
        raise ConfigError(
            f"{path}:{number}: {tenant!r} is not a tenant's name: use 1 to 64 letters, digits, dots and dashes"
        )
    return key, ListedKey(path.stem, rights, tenant)


def _settings(path: Path, lines: list[tuple[int, bytes]]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the name of each line below a file's key, with the line's number and value."""
    seen = set()
    for number, line in lines:
        text = line.decode("utf-8", "backslashreplace")
        if text.startswith("#"):
            continue
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or name not in {"rights", "tenant"}:
            raise ConfigError(f"{path}:{number}: {text[:80]!r} is neither rights: nor tenant: nor a # comment")
        if name in seen:
            raise ConfigError(f"{path}:{number}: {name} appears twice: keep one")
        seen.add(name)
        yield name, (number, value)


def _rights(path: Path, number: int, text: str) -> Right:
    rights = NO_RIGHT
    for word in map(str.strip, text.split(",")):
        if word not in _RIGHTS:
            raise ConfigError(f"{path}:{number}: {word[:80]!r} is not a right: choose from {names_of(EVERY_RIGHT)}")
        rights |= _RIGHTS[word]
    return rights
