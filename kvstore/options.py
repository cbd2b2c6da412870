"""What a caller may decide about an engine: how much of what it may use, and which storage it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.policies import Adaptive


@dataclass(frozen=True)
class RemoteOptions:
    """A tier that several engines share.

    Attributes:
        url: where it is; its scheme says what it is. None for none: chunks come from peers only.
        settings: what only this kind of tier has.
        required: refuse to start without it, instead of a warning and another try later.
        io_threads: reads in flight at once.
        lookup_timeout_s: how long an answer about what it holds may take; then it holds nothing.
        hold_s: how long such an answer counts.
        max_queue: chunks that may wait to be sent; None means a quarter of the pool, 0 a tier that is only read.
        sends: False where another worker holds the same KV and sends it.
        peers: servers of other engines' first workers, which are only read; None for none, nor any ``sources``.
        sources: the same, but each is only read for requests that name it.
        peer_settings: what a tier at a peer has.
        rank: of this worker, whose peers are at ports that much higher.
    """

    url: str | None
    settings: Mapping[str, object] = field(default_factory=dict)
    required: bool = False
    io_threads: int = 4
    lookup_timeout_s: float = 1.0
    hold_s: float = 3.0
    max_queue: int | None = None
    sends: bool = True
    peers: tuple[str, ...] | None = None
    sources: tuple[str, ...] = ()
    peer_settings: Mapping[str, object] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True)
class EngineOptions:
    """What one worker may use.

    Attributes:
        max_local_cpu_bytes: bound of the pool in host memory.
        local_cpu: False makes that pool a mere passage to the disk.
        local_disk: folder of the disk tier, or one on each of several disks; None or () for none.
        max_local_disk_bytes: bound of all folders together, everything in them included.
        save_unfull_chunk: store the last, shorter chunk of a sequence too.
        use_odirect: None probes the folder.
        disk_io_threads: reads in flight at once.
        io_timeout_s: deadline of each call to a slower tier, and the default bound of ``flush`` and ``close``.
        lease_timeout_s: how long a lease holds its chunks if nobody releases it.
        max_write_queue: chunks that may wait for the disk; None means half of the pool.
        remote: a tier that several engines share; None for none.
        cache_policy: which chunks go first from memory, a name in ``POLICIES``.
        disk_policy: the same for the disk; None for the same as memory's.
        disk_codec: what chunks on disk are encoded with, a name in ``CODEC_NAMES``.
        max_local_gpu_bytes: bound of the device memory for the chunks loaded most often; 0 for none.
    """

    max_local_cpu_bytes: int
    local_cpu: bool = True
    local_disk: str | Path | tuple[str | Path, ...] | None = None
    max_local_disk_bytes: int = 0
    save_unfull_chunk: bool = True
    use_odirect: bool | None = None
    disk_io_threads: int = 4
    io_timeout_s: float = 10.0
    lease_timeout_s: float = 300.0
    max_write_queue: int | None = None
    remote: RemoteOptions | None = None
    cache_policy: str = Adaptive.name
    disk_policy: str | None = None
    disk_codec: str = "none"
    max_local_gpu_bytes: int = 0


class Shard(NamedTuple):
    """A part of every chunk that one worker holds, or several that hold the same, and where others have it."""

    namespace: Namespace
    layout: KVLayout
    remote: RemoteOptions
