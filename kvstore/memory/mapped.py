"""Mapped memory, in huge pages where possible, near the GPU that copies it, and populated before it is needed.

On a host with several sockets, copies are faster from memory of the GPU's own socket.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from kvstore.model.chunks import ByteArray
from kvstore.paged.runtime import find_runtime

logger = logging.getLogger(__name__)

SystemCall = Callable[..., int]  # a call's number and arguments; returns -1 and sets errno if the kernel refuses

_ROOT: Final = Path("/")
_PREFERRED: Final = 1  # MPOL_PREFERRED: elsewhere if the node is full
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_MMAP_THRESHOLD_BYTES: Final = 32 << 20  # the maximum that glibc accepts
_STEP_BYTES = 8 << 20  # populated between two calls of ``stops``
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a foreign call releases the GIL
_libc.syscall.restype = ctypes.c_long
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_bytes(num_bytes: int, fd: int = -1) -> ByteArray:
    """Map ``num_bytes``: shared for a file, private for anonymous memory. Dropping the last view unmaps them.

    Raises:
        OSError, OverflowError, ValueError: the system refused.
    """
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(fd, num_bytes, flags), dtype=np.uint8)
    _libc.madvise(memory.ctypes.data, memory.nbytes, _MADV_HUGEPAGE)  # a hint: failure changes nothing
    return memory


def keep_from_children(memory: ByteArray) -> None:
    """Leave a mapping out of processes that this one forks.

    Otherwise a fork copies pinned pages, and copies other pages at the next write, which doubles the memory in use.
    """
    _libc.madvise(memory.ctypes.data, memory.nbytes, _MADV_DONTFORK)


def populate(memory: ByteArray, begin: int, end: int, stops: Callable[[], bool]) -> bool:
    """Allocate every page of a range without changing its content; False if ``stops`` ended it early."""
    address = memory.ctypes.data
    for offset in range(begin, end, _STEP_BYTES):
        if stops():
            return False
        # Fails on Linux before 5.14, where pages are allocated on first use.
        _libc.madvise(address + offset, min(_STEP_BYTES, end - offset), _MADV_POPULATE_WRITE)
    return True


def populate_read(memory: ByteArray, begin: int, end: int) -> None:
    """Fill this process's page tables for a range of a file whose pages are already allocated."""
    # Fails on Linux before 5.14, where each page is mapped on first use.
    _libc.madvise(memory.ctypes.data + begin, end - begin, _MADV_POPULATE_READ)


def node_near(device: torch.device, root: Path = _ROOT) -> int | None:
    """Return the NUMA node nearest to a GPU; None if there is only one, or if the system does not report it.

    Args:
        device: of a tensor. For a CPU, all memory is near.
        root: the folder that holds ``sys``.
    """
    if device.type != "cuda":
        return None
    runtime = find_runtime()
    address = runtime.pci_address(device.index) if runtime is not None else None
    return None if address is None else node_of(address, root)


def node_of(pci_address: str, root: Path = _ROOT) -> int | None:
    """Return the NUMA node of a PCI device; None if there is only one, or if the system does not report it."""
    try:
        if len(list(root.glob("sys/devices/system/node/node[0-9]*"))) < 2:
            return None
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(memory: ByteArray, node: int, call: SystemCall | None = None) -> bool:
    """Prefer one NUMA node for the pages of a mapping, which must be untouched; a full node falls back to others.

    Args:
        memory: page-aligned.
        node: number of the node.
        call: the system call; None for the real one.

    Returns:
        False if the kernel refuses, as in containers; the reason is logged.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    words = [ctypes.c_ulong(memory.ctypes.data), ctypes.c_ulong(memory.nbytes), ctypes.c_ulong(_PREFERRED), mask]
    bits = len(mask) * _WORD_BITS + 1  # the kernel takes one less
    if (call or _libc.syscall)(ctypes.c_long(number), *words, ctypes.c_ulong(bits), ctypes.c_ulong(0)) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    logger.info(
        "cannot keep the CPU pool on NUMA node %d, which is the GPU's (%s): copies may be slower; "
        "in a container, --cap-add SYS_NICE allows it",
        node,
        reason,
    )
    return False


def keep_freed(num_bytes: int) -> None:
    """Let glibc keep up to ``num_bytes`` of freed memory, for the whole process; does nothing with other C libraries.

    Messages are then received into memory that earlier ones have freed: fresh pages cost as much as the copy itself.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
