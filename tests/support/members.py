"""Several cache servers for tests, and the tier over them as an engine opens it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from kvstore.engine.opening import open_remote
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_payload, make_transfer
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.guards import layers
from kvstore.tiers.members.placement import owners, seed_of
from kvstore.tiers.members.tier import MembersTier
from support.cache_server import ServerThread
from support.redis_server import wait_for

POOL_BYTES = 16 << 20
QUICKLY = (0.02, 0.05)  # between two looks for members


class Cluster:
    """Servers in this process, and the file that names those in use."""

    def __init__(self, folder: Path, num_servers: int) -> None:
        self.file = folder / "members"
        self._folder = folder
        self._options = [ServerOptions(POOL_BYTES, tcp=TcpAddress("127.0.0.1", 0)) for _ in range(num_servers)]
        self.servers = [ServerThread(options) for options in self._options]
        self.names = [f"127.0.0.1:{server.hub.tcp_port}" for server in self.servers]
        self.url = f"kvs+file://{self.file}"
        self.name(*range(num_servers))

    def name(self, *numbers: int) -> None:
        """Name servers in the file, which is replaced as a whole."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{self.names[number]}\n" for number in numbers))
        new.replace(self.file)

    def name_and_wait(self, tier: Tier, *numbers: int) -> None:
        self.name(*numbers)
        expected = sorted(self.names[number] for number in numbers)
        wait_for("the members are known", lambda: names_in(tier) == expected)

    def end(self, number: int) -> None:
        self.servers[number].close()

    def begin(self, number: int, *, at: int | None = None) -> None:
        """Start a server again, at its port, or at that of another one."""
        port = int(self.names[number if at is None else at].rpartition(":")[2])
        self.servers[number] = ServerThread(replace(self._options[number], tcp=TcpAddress("127.0.0.1", port)))

    def give_disk(self, number: int) -> None:
        """Restart a server with a disk, which it keeps from now on."""
        self.end(number)
        disk = DiskOptions(self._folder / f"disk {number}", 64 << 20)
        self._options[number] = replace(self._options[number], disk=disk)
        self.begin(number)

    def chunks(self, number: int, namespace: Namespace = MINE) -> int:
        """Count the chunks that a server holds in a namespace."""
        spaces = self.servers[number].hub.stock.spaces.values()
        return sum(len(space.chunks) for space in spaces if space.namespace.id == namespace.id)

    def close(self) -> None:
        for server in self.servers:
            server.close()


def open_members(url: str, *, namespace: Namespace = MINE, **settings: object) -> Tier:
    """Open the tier as a worker with one thread does, which leaves a server out after one failure."""
    options = RemoteOptions(url, {"timeout_s": 1.5, **settings}, io_threads=1)
    return open_remote(namespace, EVEN, options, 30.0, problems=[])


def members_in(tier: Tier) -> MembersTier:
    *_, inner = layers(tier)
    assert isinstance(inner, MembersTier)
    return inner


def names_in(tier: Tier) -> list[str]:
    return sorted(member.place.name for member in members_in(tier)._members)


def store(tier: Tier, refs: list[ChunkRef], version: int = 0) -> list[Outcome]:
    return [tier.put([make_transfer(EVEN, ref, version)])[0] for ref in refs]


def read(tier: Tier, refs: list[ChunkRef], version: int = 0) -> set[ChunkRef]:
    """Read chunks one by one, and return those that were hits, whose bytes are compared."""
    hits = set()
    for ref in refs:
        buffer = make_buffer(EVEN.slot_bytes)
        if tier.get([Transfer(ref, buffer)]) == [Outcome.HIT]:
            payload = np.frombuffer(make_payload(EVEN, ref, version), np.uint8)
            assert (buffer[: len(payload)] == payload).all(), f"the wrong bytes of {ref}"
            hits.add(ref)
    return hits


def held(tier: Tier, refs: list[ChunkRef]) -> set[ChunkRef]:
    return {ref for ref, presence in zip(refs, tier.contains(refs), strict=True) if presence}


def owned(names: list[str], refs: list[ChunkRef]) -> dict[str, set[ChunkRef]]:
    """Return the chunks of each member."""
    places = owners(refs, [seed_of(name) for name in names])
    return {name: {ref for ref, at in zip(refs, places, strict=True) if names[at] == name} for name in names}
