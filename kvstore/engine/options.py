"""Options of an engine: limits on each resource, and the storage it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.model.heads import Division
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.quotas import NO_QUOTAS, QuotaRules
from kvstore.policies import Adaptive


@dataclass(frozen=True)
class RemoteOptions:
    """A tier that several engines share.

    Attributes:
        url: its address; the scheme names the kind of tier. None to only read from others.
        settings: options of this kind of tier.
        shared: a second shared tier, which is only read; None for none. Needs ``peers``, which may be empty.
        shared_settings: options of that second tier.
        required: refuse to start if it cannot be used. Otherwise warn, and try again later.
        io_threads: maximum of concurrent reads.
        lookup_timeout_s: deadline of a lookup, after which the tier counts as empty for it.
        hold_s: validity of the answer to a lookup.
        max_queue: chunks that may wait to be sent; None means a quarter of the pool, 0 a tier that is only read.
        sends: False if another worker holds the same KV and sends it.
        peers: servers of other engines' first workers, which are only read; None for no peers and no ``sources``.
        watched_peers: URLs by which DNS or a file names further peers, which come and go.
        own_place: host and port of this engine's first server, to leave it out of those; None without one.
        sources: further such servers, each of which is read only for requests that name it.
        peer_settings: options of a tier at a peer.
        rank: rank of this worker, which is added to the ports of peers.
        divisions: divisions of this worker's KV by engines of other tensor-parallel sizes, whose chunks are read from
            the tier, from peers and from folders.
        is_own: True if the tier is a server opened by this worker for handovers from others.
        servers: if ``is_own``, the servers of all of this engine's workers, by rank.
    """

    url: str | None
    settings: Mapping[str, object] = field(default_factory=dict)
    shared: str | None = None
    shared_settings: Mapping[str, object] = field(default_factory=dict)
    required: bool = False
    io_threads: int = 4
    lookup_timeout_s: float = 1.0
    hold_s: float = 3.0
    max_queue: int | None = None
    sends: bool = True
    peers: tuple[str, ...] | None = None
    watched_peers: tuple[str, ...] = ()
    own_place: tuple[str, int] | None = None
    sources: tuple[str, ...] = ()
    peer_settings: Mapping[str, object] = field(default_factory=dict)
    rank: int = 0
    divisions: tuple[Division, ...] = ()
    is_own: bool = False
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineOptions:
    """Limits and settings of one worker.

    Attributes:
        max_local_cpu_bytes: size of the pool in host memory.
        local_cpu: False makes that pool a staging area, in which no chunks are kept.
        local_disk: folder of the disk tier, or one on each of several disks; None or () for none.
        max_local_disk_bytes: bound of all folders together, everything in them included.
        save_unfull_chunk: store the last, shorter chunk of a sequence too.
        use_odirect: True if the disk tier uses O_DIRECT; None probes the folder.
        disk_io_threads: maximum of concurrent reads.
        io_timeout_s: deadline of each call to a slower tier, and the default bound of ``flush`` and ``close``.
        lease_timeout_s: duration of a lease that is not released.
        max_write_queue: chunks that may wait for the disk; None means half of the pool.
        remote: a tier that several engines share; None for none.
        cache_policy: eviction policy of memory, a name in ``POLICIES``.
        disk_policy: the same for the disk; None for the same as in memory.
        disk_codec: codec of chunks on disk, a name in ``CODEC_NAMES``.
        encryption_keys: file with the keys that encrypt chunks on disk; None for no encryption.
        max_local_gpu_bytes: device memory for copies of the chunks loaded most often; 0 for none.
        quotas: bounds of the owners of chunks in memory and on disk.
        pin_in_background: on a GPU, pin the pool after the start, when that cannot disturb the capture of graphs.
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
    encryption_keys: str | Path | None = None
    max_local_gpu_bytes: int = 0
    quotas: QuotaRules = NO_QUOTAS
    pin_in_background: bool = False


class Shard(NamedTuple):
    """The part of every chunk held by one worker, or by several with the same KV, and the remote tier for it."""

    namespace: Namespace
    layout: KVLayout
    remote: RemoteOptions
