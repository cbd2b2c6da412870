"""What can be set for an engine: how much of each resource it may use, and which storage it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.heads import Division
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.policies import Adaptive


@dataclass(frozen=True)
class RemoteOptions:
    """A tier that several engines share.

    Attributes:
        url: its address; the scheme names the kind of tier. None for chunks from others only.
        settings: options of this kind of tier.
        shared: another one, which is only read, as a peer is; None for none. Needs ``peers``, which may be empty.
        shared_settings: options of that one.
        required: refuse to start if it cannot be used. Otherwise warn, and try again later.
        io_threads: reads in flight at once.
        lookup_timeout_s: deadline of a lookup, after which it counts as holding nothing.
        hold_s: how long the answer to a lookup counts.
        max_queue: chunks that may wait to be sent; None means a quarter of the pool, 0 a tier that is only read.
        sends: False where another worker holds the same KV and sends it.
        peers: servers of other engines' first workers, which are only read; None for no peers and no ``sources``.
        sources: the same, but each is read only for requests that name it.
        peer_settings: options of a tier at a peer.
        rank: of this worker, which is added to the ports of peers.
        divisions: how engines of other tensor-parallel sizes divide what this worker holds; what they have stored, in
            the tier, at peers or in folders, is read.
        is_own: whether the tier is a server of this worker's own, for what others send.
        servers: then those of all of this engine's workers, by rank.
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
    sources: tuple[str, ...] = ()
    peer_settings: Mapping[str, object] = field(default_factory=dict)
    rank: int = 0
    divisions: tuple[Division, ...] = ()
    is_own: bool = False
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineOptions:
    """What one worker may use.

    Attributes:
        max_local_cpu_bytes: size of the pool in host memory.
        local_cpu: False keeps nothing in that pool: chunks only pass through it.
        local_disk: folder of the disk tier, or one on each of several disks; None or () for none.
        max_local_disk_bytes: bound of all folders together, everything in them included.
        save_unfull_chunk: store the last, shorter chunk of a sequence too.
        use_odirect: whether the disk tier uses O_DIRECT; None probes the folder.
        disk_io_threads: reads in flight at once.
        io_timeout_s: deadline of each call to a slower tier, and the default bound of ``flush`` and ``close``.
        lease_timeout_s: how long a lease holds its chunks if nobody releases it.
        max_write_queue: chunks that may wait for the disk; None means half of the pool.
        remote: a tier that several engines share; None for none.
        cache_policy: which chunks memory evicts first, a name in ``POLICIES``.
        disk_policy: the same for the disk; None for the same as in memory.
        disk_codec: how chunks on disk are encoded, a name in ``CODEC_NAMES``.
        max_local_gpu_bytes: device memory for copies of the chunks loaded most often; 0 for none.
        pin_in_background: on a GPU, pin the pool after the start, where that cannot disturb the capture of graphs.
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
    pin_in_background: bool = False


class Shard(NamedTuple):
    """The part of every chunk that one worker holds, or several that hold the same, and the remote tier for it."""

    namespace: Namespace
    layout: KVLayout
    remote: RemoteOptions
