"""Runs a module's ``main`` on another host: a network namespace where paths lead elsewhere, with its own ``/dev/shm``.

Arguments: a list of the namespace's name and the folders that take the place of others, then the module and its words.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from typing import Final

_NEW_NETWORK: Final = 0x40000000
_NEW_MOUNTS: Final = 0x00020000
_BIND: Final = 0x1000
_PRIVATE: Final = 0x4000 | 0x40000  # and all below


def main() -> None:
    """Enter the host, and run the module."""
    name, places = json.loads(sys.argv[1])
    _enter(name)
    _mount("none", "/", None, _PRIVATE)
    _mount("shm", "/dev/shm", "tmpfs", 0)
    for near, far in places.items():
        _mount(far, near, None, _BIND)
    del sys.argv[:2]
    module = sys.argv[0]
    if module.startswith("vllm."):
        sys.argv[0] = "vllm"
    importlib.import_module(module).main()


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(space, _NEW_NETWORK) or libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.close(space)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    if libc.mount(*texts, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"cannot mount {source} at {target}")
