"""Conversation between a server and its successor: packets of msgpack with descriptors, through a unix socket.

The socket lies in the server's folder, which only its user can enter, and each side also checks the other's user.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvstore.model.errors import KVStoreError
from kvstore.protocol.credentials import credentials_of
from kvstore.server.succession.estate import Estate

SUCCESSOR_SOCKET: Final = "heir"  # not longer than those of the other sockets
MAX_WAIT_S: Final = 30.0  # for the other side
_PACKET_BYTES: Final = 64 << 10
MAX_FDS: Final = 200  # in one packet; Linux passes 253

Part = TypeVar("Part", bound="Packet")


class SuccessionError(KVStoreError):
    """A server could not be replaced; the message says why, and which of both serves now."""


class Packet(msgspec.Struct):
    """A packet. Fields that a reader does not know are ignored."""


class Claim(Packet):
    """First packet of the successor.

    Attributes:
        formats: the oldest and the newest format of an estate that it can read.
        version: its version, for people.
        pool_bytes: size of its memory.
        disk: folder of its disk; empty without one.
    """

    formats: tuple[int, int]
    version: str
    pool_bytes: int
    disk: str


class Reply(Packet):
    """Answer to a claim, and later the last word of the predecessor.

    Attributes:
        is_yes: it agrees.
        why: the reason if it does not.
        version: its version, for people.
    """

    is_yes: bool
    why: str = ""
    version: str = ""


class Bequest(Packet):
    """Announces descriptors: memory, listener, estate, and the lock of a disk; then one for each token.

    Attributes:
        estate_bytes: size of the estate in its memfd.
        num_connections: number of descriptors in the packets that follow.
    """

    estate_bytes: int
    num_connections: int


class More(Packet):
    """Packet of further descriptors."""


class Settled(Packet):
    """The successor has settled the estate, and would serve now."""


class Link:
    """One end of a conversation. Belongs to one thread.

    Args:
        connection: a connected socket, which the link owns.
        deadline_s: longest wait for the other end.
    """

    def __init__(self, connection: socket.socket, deadline_s: float = MAX_WAIT_S) -> None:
        self._socket = connection
        self._socket.settimeout(deadline_s)
        other = credentials_of(connection)
        self.process, self.is_trusted = other.process, other.are_trusted

    def wait_for(self, deadline_s: float) -> None:
        """Change the longest wait for the other end."""
        self._socket.settimeout(deadline_s)

    def send(self, packet: Packet, fds: Sequence[int] = ()) -> None:
        """Send a packet with descriptors, of which the other end gets its own.

        Raises:
            SuccessionError: the other end has gone, or does not read.
        """
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(packet)], fds)
        except OSError as error:
            raise SuccessionError(f"the other server cannot be reached any more: {error}") from error

    def receive(self, kind: type[Part], num_fds: int = 0) -> tuple[Part, list[int]]:
        """Return the next packet, and exactly ``num_fds`` descriptors, which the caller owns.

        Raises:
            SuccessionError: it does not come in time, or is another one.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, MAX_FDS)
        except OSError as error:
            raise SuccessionError(f"no answer of the other server: {error}") from error
        for fd in fds:
            os.set_inheritable(fd, False)
        failure = "it has ended" if not data else f"it sent {len(fds)} descriptors instead of {num_fds}"
        if data and len(fds) == num_fds:
            try:
                return msgspec.msgpack.decode(data, type=kind), fds
            except msgspec.DecodeError as error:
                failure = str(error)
        close_all(fds)
        raise SuccessionError(f"no {kind.__name__} from the other server: {failure}")

    def close(self) -> None:
        """End the conversation. Idempotent."""
        self._socket.close()


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def listen(folder: Path) -> socket.socket:
    """Return a socket on which successors are awaited, in place of a dead server's.

    Raises:
        OSError: the folder cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path = folder / SUCCESSOR_SOCKET
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def connect(folder: Path) -> Link | None:
    """Return a link to the server in a folder; None if none listens there.

    Raises:
        SuccessionError: it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(MAX_WAIT_S)
    try:
        connection.connect(str(folder / SUCCESSOR_SOCKET))
    except OSError:
        connection.close()
        return None
    link = Link(connection)
    if not link.is_trusted:
        link.close()
        raise SuccessionError(f"the server in {folder} belongs to another user: run both as one")
    return link


def write_estate(estate: Estate) -> tuple[int, int]:
    """Return a memfd that holds an estate, which the caller closes, and its size in bytes.

    Raises:
        OSError: the system cannot make one.
    """
    data = msgspec.msgpack.encode(estate)
    fd = os.memfd_create("kvstore-estate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
    except OSError:
        os.close(fd)
        raise
    return fd, len(data)


def read_estate(fd: int, num_bytes: int) -> Estate:
    """Read an estate from a memfd.

    Raises:
        SuccessionError: it cannot be understood.
    """
    try:
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as mapped:
            return msgspec.msgpack.decode(mapped, type=Estate)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise SuccessionError(f"the estate of {num_bytes} bytes cannot be read: {error}") from error
