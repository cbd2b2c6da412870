"""Implementation of ``kvstore pack``: chunks of a disk folder to one file, and back to a folder or a Redis."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.pack import Pack, PackWriter, Shard, open_pack
from kvstore.format.sealing import open_ring
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.lifetime import Lifetime
from kvstore.tiers import leads_to, open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.disk.inventory import Inventory, inventories
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.survey import held_bytes
from kvstore.tiers.pack import PackTier
from kvstore.tools.ends import Ends
from kvstore.tools.interrupts import ShouldStop, never
from kvstore.tools.locks import require_free
from kvstore.tools.verify import Fault, Tick, place_in_pack

_SHARD_FIELD = "shard"
_ROOM_CHUNKS = 4  # a tier writes before it deletes
_NO_TRAILS: Mapping[ChunkRef, bytes] = MappingProxyType({})


def _ignore(_total: int, _size_bytes: int) -> None:
    """Do nothing, as the default tick."""


@dataclass
class PackReport:
    """Result of an export or import.

    Attributes:
        path: the pack.
        chunks: chunks moved by this run.
        present: chunks already in the pack of an interrupted export, or in the target of an import.
        missing: requested chunks that are not in the source.
        refused: chunks that the target did not store, because it has no room or failed.
        faults: chunks damaged in the source, which were left out.
        size_bytes: bytes of the chunks moved by this run.
        broke: error that ended the run in the middle; None if there was none.
        interrupted: whether the run was stopped before the last chunk; start it again to complete it.
    """

    path: str
    chunks: int = 0
    present: int = 0
    missing: int = 0
    refused: int = 0
    faults: list[Fault] = field(default_factory=list)
    size_bytes: int = 0
    broke: str | None = None
    interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        """True if every requested chunk is in the pack or the target."""
        return not (self.missing or self.refused or self.faults or self.broke or self.interrupted)


class Source:
    """Chunks of one engine in a disk folder, by the shards of its workers.

    Args:
        folder: the engine's ``local_disk``.
        namespace: first hex digits of a namespace's id, if the folder has namespaces of several engines.

    Raises:
        ConfigError: there is no such namespace, there are several engines, or their geometry is unknown.
    """

    def __init__(self, folder: Path, namespace: str | None = None) -> None:
        found = inventories(folder)
        if namespace is not None:
            found = [inventory for inventory in found if inventory.home.name.startswith(namespace.lower())]
        if not found:
            raise ConfigError(f"{folder} has no such namespace: see kvstore inspect {folder}")
        if any(inventory.is_servers for inventory in found):
            raise ConfigError(f"{folder} belongs to a cache server: a pack is made from an engine's folder")
        engines: set[str] = set()
        by_id: dict[bytes, list[Inventory]] = {}
        for inventory in found:
            if inventory.namespace is None or not inventory.is_layout_noted or inventory.layout is None:
                raise ConfigError(
                    f"{inventory.home} does not say whose chunks these are: start an engine of this version on it once"
                )
            fields = {name: value for name, value in inventory.namespace.fields.items() if name != _SHARD_FIELD}
            engines.add(Namespace(fields).to_json())
            by_id.setdefault(inventory.namespace_id, []).append(inventory)
        if len(engines) > 1:
            ids = ", ".join(sorted(inventory.home.name for inventory in found))
            raise ConfigError(f"{folder} has chunks of several models or settings: choose one by --namespace: {ids}")
        self.inventories = list(by_id.values())
        self.shards = [_shard(folder, same) for same in self.inventories]

    def refs(self) -> list[ChunkRef]:
        """Return all chunks, oldest first, which puts the beginnings of prompts before their ends."""
        found: dict[ChunkRef, int] = {}
        for place in (place for same in self.inventories for inventory in same for place in inventory.places()):
            if place.ref is not None and place.until_s is None:  # a pack keeps chunks for ever
                found.setdefault(place.ref, place.path.lstat().st_mtime_ns)
        return sorted(found, key=lambda ref: (found[ref], ref))

    def trails(self, refs: Iterable[ChunkRef]) -> list[bytes]:
        """Return the noted trails of chunks. Pass all chunks of the folder, because ``refs`` limits what is read."""
        keys = {ref.prefix_key for ref in refs}
        found = [inventory.trails(keys) for same in self.inventories for inventory in same]
        return list({key: trail for trails in found for key, trail in trails.items()}.values())


def _shard(folder: Path, same: Sequence[Inventory]) -> Shard:
    first = same[0]
    assert first.namespace is not None
    assert first.layout is not None
    folders = tuple(str(inventory.home.parent.relative_to(folder)) for inventory in same)
    return Shard(first.namespace, first.layout, tuple("" if name == "." else name for name in folders))


def export(
    source: Source,
    path: Path,
    *,
    refs: Iterable[ChunkRef] | None = None,
    trails: Mapping[ChunkRef, bytes] = _NO_TRAILS,
    tick: Tick = _ignore,
    should_stop: ShouldStop = never,
) -> PackReport:
    """Read, check and copy chunks to a pack, one after the other. The next call continues an interrupted export.

    Args:
        source: chunks of an engine, which may be using the folder.
        path: the pack. An existing one is replaced when the new one is complete.
        refs: chunks to export, in order; all if None.
        trails: trails of the chunks that end a prompt. A chunk without a file is cut out of a longer one that holds it.
        tick: called after each chunk.
        should_stop: called before each chunk; if it returns True, the export ends, and the next call continues it.

    Raises:
        ConfigError: the pack cannot be written.
    """
    stored = source.refs()
    wanted = stored if refs is None else list(dict.fromkeys(refs))
    report = PackReport(str(path))
    pairs = zip(source.inventories, source.shards, strict=True)
    workers = [Ends(same, shard.layout, trails) for same, shard in pairs]
    with PackWriter(path, source.shards) as writer:
        noted = source.trails([*stored, *(ref for _, ref in writer.held)])  # before any of these is evicted
        for ref in wanted:
            if should_stop():
                report.interrupted = True
                return report
            for number, ends in enumerate(workers):
                moved_bytes = _export_one(writer, report, ends, number, ref)
                tick(len(wanted) * len(workers), moved_bytes)
        writer.finish([*noted, *trails.values()])
    return report


def _export_one(writer: PackWriter, report: PackReport, source: Ends, number: int, ref: ChunkRef) -> int:
    """Copy one chunk, and return the bytes moved."""
    if (number, ref) in writer.held:
        report.present += 1
        return 0
    image = _read(source, ref)
    if image is None:
        report.missing += 1
        return 0
    if isinstance(image, Fault):
        report.faults.append(image)
        return 0
    writer.add(number, ref, image)
    report.chunks += 1
    report.size_bytes += len(image)
    return len(image)


def _read(source: Ends, ref: ChunkRef) -> ByteArray | Fault | None:
    """Return the content of a chunk's file, or of the one that it would have; None if no file holds the chunk."""
    for inventory in source.inventories:
        image = inventory.read(ref)
        if image is not None:
            return Fault(str(inventory.path(ref)), image) if isinstance(image, str) else image
    return source.read(ref)


@dataclass(frozen=True)
class Target:
    """Target of an import.

    Attributes:
        folders: an engine's ``local_disk``; empty for a Redis.
        max_bytes: limit for each worker, as ``max_local_disk_size``; None for enough room for the pack.
        codec: codec, as in ``local_disk_serde`` or ``remote_serde``.
        encryption_keys: file with the keys that encrypt imported chunks, and decrypt those of the pack; None for no
            encryption.
        url: URL of a Redis.
        options: options of the Redis tier.
    """

    folders: tuple[Path, ...] = ()
    max_bytes: int | None = None
    codec: str = "none"
    encryption_keys: str | None = None
    url: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def import_pack(
    path: Path, target: Target, *, anyway: bool = False, tick: Tick = _ignore, should_stop: ShouldStop = never
) -> PackReport:
    """Import all chunks of a pack into an engine's folders or a Redis, except those already there.

    Args:
        path: the pack.
        target: target of the import; no engine may be using the folders.
        anyway: import even into folders whose chunks are of another model or other settings.
        tick: called after each chunk.
        should_stop: called before each chunk.

    Raises:
        ConfigError: the pack is incomplete, or was made for another model or settings than the folders' chunks.
        FolderOwnedError: an engine uses a folder.
        TierError: the target cannot be used at all. A later failure is in the report.
    """
    with open_pack(path) as pack:
        require_free(_places(pack, target.folders))
        _refuse_servers(target.folders)
        if target.folders and not anyway:
            refuse_foreign(pack, target.folders)
        places = [
            (number, shard, folder)
            for number, shard in enumerate(pack.shards)
            for folder in (shard.folders if target.folders else ("",))
        ]
        total = sum(len(pack.extents[number]) for number, _, _ in places)
        report = PackReport(str(path))
        for number, shard, folder in places:
            source = PackTier(pack, shard.namespace, shard.layout, open_ring(target.encryption_keys))
            try:
                with closing(_open_target(target, shard, folder, pack.extents[number])) as tier:
                    slot = np.frombuffer(mmap.mmap(-1, shard.layout.slot_bytes), np.uint8)
                    for ref, extent in pack.extents[number].items():
                        if should_stop():
                            report.interrupted = True
                            return report
                        transfer = Transfer(ref, slot, trail=source.trail_of(ref))
                        moved_bytes = _import_one(source, tier, shard, transfer, report, size_bytes=extent.size_bytes)
                        tick(total, moved_bytes)
            except TierError as error:
                if not report.chunks:  # nothing was moved
                    raise
                report.broke = str(error)
                break
    return report


def refuse_used(path: Path, folders: Sequence[Path]) -> None:
    """Refuse folders that an engine uses, before any chunk is read.

    Raises:
        ConfigError: the pack is incomplete.
        FolderOwnedError: names the process.
    """
    with open_pack(path) as pack:
        require_free(_places(pack, folders))


def _places(pack: Pack, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of all workers' chunks, whose names below the engine's folder are in the pack."""
    return (base / name for base in folders for shard in pack.shards for name in shard.folders)


def _refuse_servers(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and any(inventory.is_servers for inventory in inventories(folder)):
            raise ConfigError(
                f"{folder} belongs to a cache server, which would not find these chunks: name an engine's folder"
            )


def refuse_foreign(pack: Pack, folders: Sequence[Path]) -> None:
    """Refuse folders that hold chunks, but none for an engine that could use this pack.

    Raises:
        ConfigError: names the fields that differ.
    """
    there = [s.namespace for folder in folders if folder.is_dir() for s in inventories(folder) if s.namespace]
    ours = [shard.namespace for shard in pack.shards]
    if not there or any(found.id == namespace.id for found in there for namespace in ours):
        return
    differing = min((namespace.differing_fields(found) for found in there for namespace in ours), key=len)
    raise ConfigError(
        f"the pack {pack.path} was made for something else than what is in {folders[0]}: it differs in "
        f"{', '.join(differing)}. An engine would not find its chunks; --anyway imports them all the same"
    )


def refuse_other_model(pack: Pack, identity: str) -> None:
    """Refuse a pack of another model.

    Args:
        pack: opened pack.
        identity: the model that will use it, as in a namespace: ``files <fingerprint>`` or ``id <model_id>``.

    Raises:
        ConfigError: names both models.
    """
    for shard in pack.shards:
        made_for = shard.namespace.fields.get("model")
        if made_for != identity:
            raise ConfigError(
                f"the pack {pack.path} differs in model: it was made for '{made_for}', and this is '{identity}'. Files "
                "that were copied keep their identity only with their times (cp -p, rsync -t); or name both by model_id"
            )


def _import_one(
    source: PackTier, tier: Tier, shard: Shard, transfer: Transfer, report: PackReport, *, size_bytes: int
) -> int:
    """Move one chunk, which has ``size_bytes`` in the pack, and return the bytes moved."""
    ref = transfer.ref
    if any(presence := tier.contains([ref])):
        if presence != [True]:
            tier.limit([Lifetime(ref, None)])  # an imported chunk has no end
        report.present += 1
        return 0
    if source.get([transfer]) != [Outcome.HIT]:
        report.faults.append(
            Fault(place_in_pack(shard, ref), "damaged in the pack, or encrypted with a key that is missing here")
        )
        return 0
    if tier.put([transfer._replace(tenant=source.tenant_of(ref))]) != [Outcome.STORED]:
        report.refused += 1
        return 0
    report.chunks += 1
    report.size_bytes += size_bytes
    return size_bytes


def _open_target(target: Target, shard: Shard, folder: str, refs: Iterable[ChunkRef]) -> Tier:
    if target.url is not None:
        name = next((name for name in ("redis", "object") if leads_to(target.url, name)), None)
        if name is None:
            raise ConfigError("a pack is imported into a folder, a Redis or an object store")
        options = {**target.options, "url": target.url}
        if target.codec != "none":
            options["codec"] = target.codec
        if target.encryption_keys is not None and name == "object":
            options["encryption_keys"] = target.encryption_keys
        return open_tier(name, TierSetup(shard.namespace, shard.layout, UNBOUNDED_BYTES, options))
    folders = [base / folder for base in target.folders]
    most = target.max_bytes
    if most is None:
        held = sum(held_bytes(path) for path in folders if path.is_dir())
        coming = sum(chunkfile.file_bytes(shard.layout, ref.num_blocks, chunkfile.ANY_CODEC) for ref in refs)
        share = chunkfile.file_bytes(shard.layout, shard.layout.blocks_per_chunk, chunkfile.ANY_CODEC) * _ROOM_CHUNKS
        most = held + coming + len(folders) * share
    keys = open_ring(target.encryption_keys)
    tier = open_folders(folders, shard.namespace, shard.layout, most, codec=target.codec, keys=keys)
    tier.scan()
    return tier
