"""How many bytes of a device a worker takes: one set of numbers for what is allocated, logged and calculated before.

All of it is taken at start, after the serving engine has measured how much of the device it may use itself, so it has
to fit into what that leaves. Nothing is taken later.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import KVLayout

BUFFERS = 2  # of each thread: one is copied while the other is gathered or scattered
WORKER_THREADS = 3  # the model's, and those that load and save beside it
_ID_BYTES = 8
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class DeviceBytes:
    """What is taken, by purpose."""

    staging: int
    ids: int
    tables: int
    tier: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.staging + self.ids + self.tables + self.tier

    def __str__(self) -> str:
        return (
            f"staging {self.staging / _MIB:.1f} MiB, ids and tables {(self.ids + self.tables) / _KIB:.1f} KiB, "
            f"GPU tier {self.tier / _MIB:.1f} MiB"
        )


def buffer_bytes(layout: KVLayout) -> int:
    """One staging buffer."""
    return layout.slot_bytes


def ids_bytes(layout: KVLayout) -> int:
    """The ids of the blocks that one thread moves at once: as many as fill a staging buffer with one plane."""
    return _ID_BYTES * (buffer_bytes(layout) // min(layout.page_bytes))


def table_bytes(layout: KVLayout) -> int:  # noqa: ARG001 - no kernel reads a table so far
    """Where the planes are, for the kernels of one thread."""
    return 0


def device_bytes(layout: KVLayout, *, threads: int = WORKER_THREADS, tier_bytes: int = 0) -> DeviceBytes:
    """What a worker takes.

    Args:
        layout: of the chunks.
        threads: how many move chunks at once, each with buffers of its own.
        tier_bytes: bound of the copies that stay on the device; whole slots of it are taken.
    """
    return DeviceBytes(
        staging=threads * BUFFERS * buffer_bytes(layout),
        ids=threads * ids_bytes(layout),
        tables=threads * table_bytes(layout),
        tier=tier_bytes // layout.slot_bytes * layout.slot_bytes,
    )
