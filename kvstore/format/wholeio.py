"""Files by descriptor: opening, and reads and writes that repeat system calls until all bytes are moved.

A signal, a network filesystem, or a request over 2 GiB cuts a system call short before the end of the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FILE_MODE = 0o600  # KV reveals the prompts


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yield the descriptor of a file, and close it at the end.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def read_whole(fd: int, views: Sequence[memoryview], offset_bytes: int) -> bool:
    """Fill ``views`` from a file; False if the file ends too early.

    Raises:
        OSError: the system refused.
    """
    return _move(os.preadv, fd, views, offset_bytes)


def read_front(fd: int, most_bytes: int, offset_bytes: int = 0) -> bytes:
    """Return the content of a file from an offset on, at most ``most_bytes``.

    Raises:
        OSError: the system refused.
    """
    found = b""
    while len(found) < most_bytes:
        piece = os.pread(fd, most_bytes - len(found), offset_bytes + len(found))
        if not piece:
            break
        found += piece
    return found


def write_whole(fd: int, views: Sequence[memoryview], offset_bytes: int) -> None:
    """Write all of ``views`` into a file.

    Raises:
        OSError: the system refused.
    """
    if not _move(os.pwritev, fd, views, offset_bytes):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _move(
    call: Callable[[int, list[memoryview], int], int], fd: int, views: Sequence[memoryview], offset_bytes: int
) -> bool:
    """Repeat a system call until it has moved all of ``views``; False once it moves nothing."""
    total = sum(view.nbytes for view in views)
    done = 0
    while done < total:
        count = call(fd, _rest(views, done), offset_bytes + done)
        if not count:
            return False
        done += count
    return True


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the rest of ``views`` after ``done`` bytes."""
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(done - view.nbytes, 0)
    return rest
