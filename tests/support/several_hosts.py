"""A simulated engine whose workers are on several hosts, each with its own server at the same local address."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.protocol.hosts import this_host
from support.fake_parts import Setup
from support.fake_vllm import FakeVllm
from support.remote import REMOTE, FakeServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.adapters.vllm.worker.worker import StoreWorker
    from kvstore.engine.options import RemoteOptions
    from kvstore.tiers.base import Tier, TierSetup


class HostServers(FakeServer):
    """The servers of all hosts. The address of ``REMOTE`` means that of the host on which it is opened.

    Attributes:
        here: the host that opens tiers; the scheduler's is the first.
    """

    def __init__(self, *hosts: str) -> None:
        super().__init__()
        self.servers = {host: FakeServer() for host in hosts}
        self.here = hosts[0]

    def open(self, kind: str, setup: TierSetup) -> Tier:
        url = str(setup.options["url"])
        host = self.here if url == REMOTE.url else url.removeprefix("redis://")
        return self.servers[host].open(kind, setup)


@dataclass(frozen=True)
class HostsSetup(Setup):
    """Setup with a host for each rank; the scheduler is on ``near``.

    ``reached`` tells if other hosts know the address of each host's server.
    """

    hosts: Sequence[str] = ("near", "far")
    ranks: int = 2
    max_write_queue: int | None = 64
    reached: bool = True


class SeveralHosts(FakeVllm):
    """Engine on several hosts."""

    setup: HostsSetup

    def _worker(self, rank: int) -> StoreWorker:
        server = self.setup.server
        assert isinstance(server, HostServers)
        server.here = self.setup.hosts[rank]
        try:
            return super()._worker(rank)
        finally:
            server.here = "near"

    def _remote_at(self, rank: int) -> RemoteOptions | None:
        """Of the workers of a host that hold the same KV, the first sends it."""
        remote = super()._remote_at(rank)
        is_first = self.setup.hosts.index(self.setup.hosts[rank]) == rank
        return remote and replace(remote, sends=remote.sends or is_first)

    def _facts(self, rank: int) -> WorkerFacts:
        host = self.setup.hosts[rank]
        url = f"redis://{host}" if self.setup.reached else None
        return replace(super()._facts(rank), host=this_host() if host == "near" else host, remote_url=url)
