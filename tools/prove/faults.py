"""Faults of a proof: damage to its own files on disk, and a remote server of its own that is killed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Final

from kvstore.tools.bench.servers import private_redis, private_server

_POOL_BYTES: Final = 1 << 30
_STARTABLE: Final = {"redis": "redis", "server": "server", "members": "server"}


def damage(folders: Sequence[Path]) -> int:
    """Cut one of three chunk files below the folders, and flip a bit in another; return the number of damaged files."""
    files = sorted(path for folder in folders for path in folder.rglob("*.safetensors") if path.is_file())
    faults = cycle((_cut, _flip, None))
    damaged = 0
    for path, fault in zip(files, faults, strict=False):
        if fault is not None:
            with suppress(FileNotFoundError):  # it was just evicted
                fault(path)
                damaged += 1
    return damaged


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def can_start(tier: str) -> str:
    """Return the reason why there can be no private server of a remote tier; empty if there can be one."""
    kind = _STARTABLE.get(tier)
    if kind is None:
        return f"no private server of the tier {tier!r} can be started"
    if kind == "redis" and shutil.which("redis-server") is None:
        return "redis-server is not on the PATH"
    return ""


@contextmanager
def private_remote(tier: str) -> Iterator[str]:
    """Run a server of this kind of remote tier, in a folder of its own, and yield its URL; the end kills it.

    Raises:
        ConfigError: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:  # a short path, for a socket
        if _STARTABLE[tier] == "redis":
            with private_redis(shutil.which("redis-server"), Path(folder)) as port:
                yield f"redis://127.0.0.1:{port}"
        else:
            with private_server(Path(folder), _POOL_BYTES) as (url, _):
                yield url
