"""Memory near a device: on a host with several sockets, copies are faster from memory of the GPU's own socket."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from kvstore.memory.cudart import find_runtime
from kvstore.model.chunks import ByteArray

logger = logging.getLogger(__name__)

_ROOT: Final = Path("/")
_PREFERRED: Final = 1  # MPOL_PREFERRED: elsewhere if the node is full
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


SystemCall = Callable[..., int]  # a call's number and arguments; returns -1 and sets errno if the kernel refuses


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
    if (call or _system_call())(ctypes.c_long(number), *words, ctypes.c_ulong(bits), ctypes.c_ulong(0)) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    logger.info(
        "cannot keep the CPU pool on NUMA node %d, which is the GPU's (%s): copies may be slower; "
        "in a container, --cap-add SYS_NICE allows it",
        node,
        reason,
    )
    return False


def _system_call() -> SystemCall:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    found: SystemCall = call
    return found
