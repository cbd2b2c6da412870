"""Reads and writes of files that go on until all is done: the system may do less than it was asked for.

A signal, a network filesystem, or more than 2 GiB at once cuts a call short, which says nothing about the file's end.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def read_whole(fd: int, views: Sequence[memoryview], offset_bytes: int) -> bool:
    """Fill ``views`` from a file; False if it ends before.

    Raises:
        OSError: the system refused.
    """
    total = sum(view.nbytes for view in views)
    done = 0
    while done < total:
        count = os.preadv(fd, _rest(views, done), offset_bytes + done)
        if not count:
            return False
        done += count
    return True


def read_front(fd: int, most_bytes: int, offset_bytes: int = 0) -> bytes:
    """What a file has from an offset on, but no more than ``most_bytes``.

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
    total = sum(view.nbytes for view in views)
    done = 0
    while done < total:
        count = os.pwritev(fd, _rest(views, done), offset_bytes + done)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after ``done`` bytes."""
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(done - view.nbytes, 0)
    return rest
