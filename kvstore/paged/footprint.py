"""How many bytes of a device a worker takes: one set of numbers for what is allocated, logged and calculated before.

All of it is taken at start, after the serving engine has measured how much of the device it may use itself, so it has
to fit into what that leaves. Nothing is taken later.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import KVLayout

BUFFERS = 3  # of each thread: one is copied while another is gathered or scattered, and a third waits for either
STAGING_BYTES = 32 << 20  # of each; a copy of that size comes within 1% of PCIe's bandwidth
MAX_BLOCKS = 4096  # of one launch, and whose places are sent together; at least a chunk's
LAUNCHES = 8  # at the least, whose places there is room for
NUMBERS = 4  # to a place, and to a plane
WORD_BYTES = 8
WORKER_THREADS = 3  # the model's, and those that load and save beside it
_MIB = 2**20


@dataclass(frozen=True)
class DeviceBytes:
    """What is taken, by purpose."""

    staging: int
    tables: int
    tier: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.staging + self.tables + self.tier

    def __str__(self) -> str:
        return (
            f"staging {self.staging / _MIB:.1f} MiB, tables {self.tables / _MIB:.1f} MiB, "
            f"GPU tier {self.tier / _MIB:.1f} MiB"
        )


def buffer_bytes(layout: KVLayout) -> int:
    """One staging buffer, which holds at least a chunk."""
    return max(STAGING_BYTES, layout.slot_bytes)


def ring_bytes(layout: KVLayout) -> int:
    """The places of the blocks that one thread moves."""
    return LAUNCHES * NUMBERS * WORD_BYTES * max(MAX_BLOCKS, layout.blocks_per_chunk)


def table_bytes(layout: KVLayout) -> int:
    """Where the planes are, for the kernels of all threads; with one that is empty, and an end."""
    return (layout.num_layers * layout.planes + 2) * NUMBERS * WORD_BYTES


def device_bytes(layout: KVLayout, *, threads: int = WORKER_THREADS, tier_bytes: int = 0) -> DeviceBytes:
    """What a worker takes.

    Args:
        layout: of the chunks.
        threads: how many move chunks at once, each with buffers of its own.
        tier_bytes: bound of the copies that stay on the device; whole slots of it are taken.
    """
    return DeviceBytes(
        staging=threads * BUFFERS * buffer_bytes(layout),
        tables=threads * ring_bytes(layout) + table_bytes(layout),
        tier=tier_bytes // layout.slot_bytes * layout.slot_bytes,
    )
