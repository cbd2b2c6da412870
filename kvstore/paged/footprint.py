"""Device memory of a worker: one set of numbers for allocation, for the log and for the estimate before the start.

All of it is allocated at start, after the serving engine has measured how much of the device it may use itself, so it
has to fit into the rest. Nothing is allocated later.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.model.layout import KVLayout

BUFFERS = 3  # of each thread: one is copied while another is gathered or scattered, and a third waits for either
STAGING_BYTES = 32 << 20  # of each; a copy of that size reaches 99% of PCIe's bandwidth
MAX_BLOCKS = 4096  # of one launch, and of launches whose places are sent together; at least a chunk's
LAUNCHES = 8  # the minimum that the ring of places has room for
NUMBERS = 4  # of each place, and of each plane
WORD_BYTES = 8
WORKER_THREADS = 3  # the model's, and those that load and save while it runs
_MIB = 2**20


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of device memory, by purpose."""

    staging: int
    tables: int
    tier: int

    @property
    def total(self) -> int:
        """Sum over all purposes."""
        return self.staging + self.tables + self.tier

    def __str__(self) -> str:
        return (
            f"staging {self.staging / _MIB:.1f} MiB, tables {self.tables / _MIB:.1f} MiB, "
            f"GPU tier {self.tier / _MIB:.1f} MiB"
        )


def buffer_bytes(layout: KVLayout) -> int:
    """Return the bytes of one staging buffer, which holds at least a chunk."""
    return max(STAGING_BYTES, layout.slot_bytes)


def ring_bytes(layout: KVLayout) -> int:
    """Return the bytes for the places of the blocks that one thread moves."""
    return LAUNCHES * NUMBERS * WORD_BYTES * max(MAX_BLOCKS, layout.blocks_per_chunk)


def table_bytes(layout: KVLayout) -> int:
    """Return the bytes of the kernels' table of planes, shared by all threads, with an empty plane and an end."""
    return (layout.num_layers * layout.planes + 2) * NUMBERS * WORD_BYTES


def device_bytes(layout: KVLayout, *, threads: int = WORKER_THREADS, tier_bytes: int = 0) -> DeviceBytes:
    """Return the device memory of a worker.

    Args:
        layout: of the chunks.
        threads: number of threads that move chunks at once, each with separate buffers.
        tier_bytes: bound of the copies that stay on the device, rounded down to whole slots.
    """
    return DeviceBytes(
        staging=threads * BUFFERS * buffer_bytes(layout),
        tables=threads * ring_bytes(layout) + table_bytes(layout),
        tier=tier_bytes // layout.slot_bytes * layout.slot_bytes,
    )
