"""Opening of the CPU pool, the slower tiers with their guards, and the lanes between them, for a worker or engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.engine.options import EngineOptions, RemoteOptions, Shard
from kvstore.engine.other_engines import OtherEngines, shared_setup
from kvstore.format.sealing import open_ring
from kvstore.index.plans import Place
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.paged.base import PagedKV
from kvstore.paged.footprint import device_bytes
from kvstore.tiers import open_tier, tier_behind
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Tier, TierSetup
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.disk.notes import owners_in, retained_in, trails_in
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.survey import describe_foreign
from kvstore.tiers.guards import GuardOptions, Statistics, find, guarded, guarded_parts
from kvstore.tiers.peers import PeersTier
from kvstore.tiers.ranks import at_rank
from kvstore.transfer.hot import HotChunks
from kvstore.transfer.lane import WRITE_THREADS, Lane

if TYPE_CHECKING:
    from kvstore.tiers.peer_watch import PeerWatch

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 10.0  # between two attempts to reach a tier that is down
_ASKING_THREADS = 3  # one thread asks; the others replace threads that hang
_SLOW_TIMEOUT_S = 30.0  # deadline of calls that touch every file, such as a scan


@dataclass(frozen=True)
class OpenTiers:
    """The tiers of one worker.

    Attributes:
        cpu: the pool.
        disk: the disk tier; None without one.
        remote: the remote tier; None without one.
        hot: copies on the device, or None.
        survivors: the chunks that the disk held, the longest untouched first.
        trails: their trails, as far as the disk knows them.
        owners: the ids of their owners, as far as the disk knows them.
        retained: those of them that stay until a time.
        limited: those of them that have a time to live.
        namespace_id: id of the namespace of all their chunks.
        slots_take_turns: see ``ChunkIndex``; True if a device copies to and from the pool.
    """

    cpu: LabelledPool
    disk: BoundedTier | None = None
    remote: Tier | None = None
    hot: HotChunks | None = None
    survivors: list[tuple[ChunkRef, int]] = field(default_factory=list)
    trails: dict[PrefixKey, bytes] = field(default_factory=dict)
    retained: list[Retention] = field(default_factory=list)
    limited: list[Lifetime] = field(default_factory=list)
    namespace_id: bytes | None = None
    slots_take_turns: bool = False
    owners: dict[PrefixKey, bytes] = field(default_factory=dict)

    def open_lanes(
        self, options: EngineOptions, on_written: Callable[[Place, ChunkRef, Outcome], None]
    ) -> dict[Place, Lane]:
        """Start the threads between the pool and each slower tier; see ``Lane`` for ``on_written``."""
        lanes = {}
        if self.disk is not None:
            report = partial(on_written, Place.DISK)
            lanes[Place.DISK] = Lane(
                self.cpu, self.disk, report, read_threads=options.disk_io_threads, namespace_id=self.namespace_id
            )
        if self.remote is not None and options.remote is not None:
            report = partial(on_written, Place.REMOTE)
            with_peers = find(self.remote, PeersTier)
            lanes[Place.REMOTE] = Lane(
                self.cpu,
                self.remote,
                report,
                read_threads=options.remote.io_threads,
                asks_before_write=with_peers.own if with_peers else self.remote,
                leaves_writes=not options.remote.sends,
                namespace_id=self.namespace_id,
            )
        return lanes

    def close(self) -> None:
        """Close all of them. Only for tiers not yet given to lanes and a mover, which close them otherwise."""
        with ExitStack() as closing:
            for part in (self.cpu, self.disk, self.remote, self.hot):
                if part is not None:
                    closing.callback(part.close)

    def read_from(self, source: str, refs: Iterable[ChunkRef]) -> None:
        """Allow reads of some chunks from the engine that a request names, if requests may name that engine."""
        with_peers = find(self.remote, PeersTier) if self.remote is not None else None
        if with_peers is not None:
            with_peers.read_from(source, refs)

    @property
    def keeps_lifetimes(self) -> bool:
        """True if chunks with a time to live may be written to the disk."""
        return self.disk is not None and self.disk.keeps_lifetimes

    @property
    def reads_fronts(self) -> bool:
        """See ``ChunkIndex``."""
        return self.remote is not None and self.remote.reads_fronts


def open_tiers(
    paged: PagedKV, namespace: Namespace, options: EngineOptions, problems: list[str] | None = None
) -> OpenTiers:
    """Allocate the memory and open the slower tiers required by ``options``. A failure leaves nothing open or locked.

    Args:
        paged: the model's KV cache.
        namespace: the namespace of the chunks.
        options: the resources that may be used.
        problems: receives the reason if the remote tier cannot be used now. Without it, the reason is logged.

    Raises:
        ConfigError: a size is too small or exceeds the machine's, or a resource cannot be used as configured.
        FolderOwnedError: another process uses a folder.
        TierError: a folder cannot be read, or a remote tier that is required does not answer.
    """
    slot_bytes = paged.layout.slot_bytes
    num_slots = options.max_local_cpu_bytes // slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"max_local_cpu_size of {options.max_local_cpu_bytes / 2**30:.3f} GiB does not hold one chunk of "
            f"{slot_bytes / 2**30:.3f} GiB: raise it"
        )
    named = (options.local_disk,) if isinstance(options.local_disk, str | Path) else options.local_disk or ()
    folders = tuple(map(Path, named))
    disk, remote, hot, survivors, trails, retained, limited = None, None, None, [], {}, [], []
    owners: dict[PrefixKey, bytes] = {}
    with ExitStack() as opened:
        pool = SlabPool(num_slots, slot_bytes, paged.device, pin_in_background=options.pin_in_background)
        cpu = LabelledPool(pool, paged.streams)
        opened.callback(cpu.close)
        if options.remote is not None:
            remote = open_remote(namespace, paged.layout, options.remote, options.io_timeout_s, problems=problems)
            opened.callback(remote.close)
        if folders:
            disk = open_folders(
                folders,
                namespace,
                paged.layout,
                options.max_local_disk_bytes,
                direct=options.use_odirect,
                codec=options.disk_codec,
                keys=open_ring(options.encryption_keys),
                wrap=lambda tier: guarded(tier, _guard_options(options.io_timeout_s, options.disk_io_threads)),
            )
            opened.callback(disk.close)
            survivors, trails, retained, limited = disk.scan(), trails_in(disk), retained_in(disk), disk.lifetimes()
            owners = owners_in(disk) if options.quotas else {}
            _log_foreign(folders, namespace)
        if options.max_local_gpu_bytes and paged.moves_layers:
            hot = HotChunks(paged, options.max_local_gpu_bytes)
        elif options.max_local_gpu_bytes:  # several groups of layers are loaded while steps run
            logger.warning(
                "max_local_gpu_size is ignored: chunks of a model with windows or states are never loaded from the "
                "device; set it to 0"
            )
        opened.pop_all()
    is_on_device = paged.device.type != "cpu"
    return OpenTiers(cpu, disk, remote, hot, survivors, trails, retained, limited, namespace.id, is_on_device, owners)


def log_device_bytes(paged: PagedKV, tiers: OpenTiers, *, threads: int) -> None:
    """Log the GPU memory in use, which the serving engine must leave free.

    Args:
        paged: the model's KV cache.
        tiers: one of which may be on the device.
        threads: number of threads that move chunks at once.
    """
    if paged.device.type != "cpu":
        taken = device_bytes(paged.layout, threads=threads, tier_bytes=tiers.hot.size_bytes if tiers.hot else 0)
        logger.info("using %.1f MiB of %s: %s", taken.total / 2**20, paged.device, taken)


def _log_foreign(folders: Sequence[Path], namespace: Namespace) -> None:
    """Log why chunks in the folders cannot be used: often one setting was changed by mistake."""
    try:
        described = sorted({line for folder in folders for line in describe_foreign(folder, namespace)})
    except OSError:  # only information is lost
        return
    for line in described:
        logger.info("the disk folder has chunks that cannot be used here: their namespace differs in %s", line)


def open_remote(
    namespace: Namespace,
    layout: KVLayout,
    options: RemoteOptions,
    io_timeout_s: float,
    *,
    asks_only: bool = False,
    problems: list[str] | None = None,
) -> Tier:
    """Open the tier that several engines share, guarded.

    Args:
        namespace: the namespace of the chunks.
        layout: the geometry of the chunks.
        options: the tier and its settings.
        io_timeout_s: deadline of each call.
        asks_only: True for lookups only, from one thread. Otherwise the tier is checked now, and a failure raises if it
            is required.
        problems: receives the reason if the tier cannot be used now and is not required. Without it, a warning is
            logged.

    Raises:
        ConfigError: the URL or a setting is wrong.
        TierError: it is required, and cannot be used now.
    """
    guard = _guard_options(io_timeout_s, options.io_threads, asks_storage=True)
    if asks_only:
        guard = replace(guard, threads=_ASKING_THREADS)
    own = None
    with ExitStack() as opened:
        if options.url is not None:
            settings = {**options.settings, "url": options.url}
            setup = TierSetup(namespace, layout, UNBOUNDED_BYTES, settings, partial(guarded, options=guard))
            own = guarded_parts(_open_own(setup, options, problems, check=not asks_only), guard)
            opened.callback(own.close)
        if options.peers is None and not options.divisions:
            if own is None:
                raise ConfigError("a remote tier needs an address or peers")
            tier: Tier = own
        else:
            others = OtherEngines(options, layout, replace(guard, failures=1))
            for url in options.sources:  # checked now, opened when a request names them
                at_rank(url, options.rank)
            if options.shared is not None and not asks_only:
                _open_own(shared_setup(options, namespace, layout), options, problems, check=True).close()
            peers = PeersTier(
                own,
                others.places,
                others.open,
                namespace,
                layout,
                sources=options.sources,
                watch=_open_watch(options),
                places_at=others.places_at,
                found_read_fronts=not options.divisions,  # whose chunks are put together of whole parts
            )
            tier = Statistics(peers)
        opened.pop_all()
    return tier


def _open_watch(options: RemoteOptions) -> PeerWatch | None:
    if not options.watched_peers:
        return None
    from kvstore.tiers.peer_watch import PeerWatch  # noqa: PLC0415 - takes time to import, and few engines need it

    return PeerWatch(options.watched_peers, options.own_place)


def _open_own(setup: TierSetup, options: RemoteOptions, problems: list[str] | None, *, check: bool) -> Tier:
    with ExitStack() as opened:
        tier = open_tier(tier_behind(str(setup.options["url"])), setup)
        opened.callback(tier.close)
        try:
            if check:
                tier.check()
        except TierError as error:
            if options.required:
                raise
            if problems is None:
                logger.warning(
                    "the remote tier cannot be used now: %s; continuing without it and trying again later", error
                )
            else:
                problems.append(str(error))
        opened.pop_all()
    return tier


def open_directory(shards: Iterable[Shard]) -> RemoteDirectory:
    """Open a remote tier for lookups only, once for each shard that must hold its part of a chunk.

    Raises:
        ConfigError: the URL or a setting is wrong.
    """
    with ExitStack() as opened:
        tiers = []
        for namespace, layout, options in shards:
            tiers.append(open_remote(namespace, layout, options, options.lookup_timeout_s, asks_only=True))
            opened.callback(tiers[-1].close)
        opened.pop_all()
    return RemoteDirectory(tiers)


def slow_timeout_s(io_timeout_s: float) -> float:
    """Return the deadline of calls that touch every file, given that of other calls."""
    return max(io_timeout_s, _SLOW_TIMEOUT_S)


def _guard_options(io_timeout_s: float, read_threads: int, *, asks_storage: bool = False) -> GuardOptions:
    """Return guard options. One time-out per reader opens the breaker, so a load waits for a hung tier only once."""
    return GuardOptions(
        timeout_s=io_timeout_s,
        slow_timeout_s=slow_timeout_s(io_timeout_s),
        threads=read_threads + WRITE_THREADS + 2,
        failures=min(3, read_threads),
        probe_interval_s=PROBE_INTERVAL_S,
        asks_storage=asks_storage,
    )
