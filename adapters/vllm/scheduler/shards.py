"""Places at which the scheduler asks for the workers' parts of chunks, on its own host and on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.engine.options import RemoteOptions, Shard
from kvstore.model.errors import ConfigError
from kvstore.model.heads import Division
from kvstore.protocol.hosts import is_on_each_host, this_host


def check_hosts(facts: Sequence[WorkerFacts], remote: RemoteOptions | None) -> None:
    """Check that the workers are where they can be used.

    Raises:
        ConfigError: a server for other engines on another host is not reached there, or must read from workers on
            several hosts; or a required tier cannot be asked.
    """
    far = [worker for worker in facts if worker.server_url is not None and worker.host != this_host()]
    if any(worker.remote_url is None for worker in far):
        raise ConfigError(
            "pd_peer_init_port is set, and this engine's workers are on several hosts, which do not reach each other "
            "at pd_peer_host: set it to {host}, which stands for the address of each host"
        )
    if any(worker.divisions for worker in far):
        raise ConfigError(
            "reshard_from is set, and this engine's workers take KV on several hosts, where they cannot divide it: "
            "start them on one host, or prefill engines of the same size, and unset it"
        )
    if remote is not None and remote.required and remote.url is not None and (ranks := unreached(facts)):
        raise ConfigError(
            f"remote_required is true, and the tier of worker {ranks[0]} cannot be asked from here, as each host has "
            "its own: set remote_host_url, or remote_required to false"
        )


def shards_of(facts: Sequence[WorkerFacts], remote: RemoteOptions | None) -> list[Shard]:
    """Return the shard to ask for each part of a chunk, given the workers in the order of their ranks.

    Workers that hold the same KV share their part at a remote tier, unless each has its own server or peers. There are
    none if a worker's tier cannot be asked, as a chunk counts only if every part does.
    """
    if remote is None:
        return []
    shards = {}
    servers = tuple(worker.server_url for worker in facts if worker.server_url is not None)
    for rank, worker in enumerate(facts):
        where, divisions = remote, worker.divisions
        if worker.server_url is not None:
            where = replace(remote, url=worker.server_url, is_own=True, servers=servers)
        if worker.host != this_host():
            where, divisions = _as_reached(worker, where), tuple(map(_without_folders, divisions))
        options = replace(where, rank=rank, divisions=divisions)
        if not _can_be_asked(options):
            return []
        name = worker.namespace.id, options.url, rank if options.peers is not None else 0
        shards[name] = Shard(worker.namespace, worker.layout, options)
    return list(shards.values())


def unreached(facts: Sequence[WorkerFacts]) -> list[int]:
    """Return the ranks on other hosts whose shared tier, if there is one, cannot be reached from here."""
    return [rank for rank, worker in enumerate(facts) if worker.host != this_host() and worker.remote_url is None]


def _as_reached(worker: WorkerFacts, remote: RemoteOptions) -> RemoteOptions:
    """Return the tier and the other engines of a worker on another host, as they are reached from here."""
    url = worker.remote_url if remote.url is not None else None
    listed = remote.peers or (), remote.sources, (remote.shared,) if remote.shared is not None else ()
    peers, sources, shared = (tuple(url for url in urls if not is_on_each_host(url)) for urls in listed)
    return replace(
        remote,
        url=url,
        settings=remote.peer_settings if remote.is_own else remote.settings,
        peers=None if remote.peers is None and url is not None else peers,
        watched_peers=tuple(url for url in remote.watched_peers if not is_on_each_host(url)),
        sources=sources,
        shared=next(iter(shared), None),
    )


def _without_folders(division: Division) -> Division:
    return replace(division, parts=tuple(part._replace(folders=()) for part in division.parts))


def _can_be_asked(options: RemoteOptions) -> bool:
    folders = any(part.folders for division in options.divisions for part in division.parts)
    return bool(options.url or options.peers or options.watched_peers or options.sources or folders)
