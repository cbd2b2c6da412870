"""Servers that replace one another, in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.server.succession.giving import Giver
from kvstore.server.succession.link import Link, connect
from kvstore.server.succession.taking import find_predecessor
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tiers.server.tier import ServerTier
from kvstore.tools.processes import free_port
from support.cache_server import POOL_BYTES, ServerThread, short_folder
from support.served import check_read

REFS = [make_ref(number) for number in range(40)]


class Line:
    """A server and its successors, of which the last one serves."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.servers = [ServerThread(options)]
        self.givers = [Giver(self.now.hub)]

    @property
    def now(self) -> ServerThread:
        return self.servers[-1]

    @property
    def tcp_url(self) -> str:
        return f"kvs://127.0.0.1:{self.now.hub.tcp_port}"

    def succeed(self, **changes: object) -> ServerThread:
        """Replace the last server by one with other options."""
        former, options = self.now, replace(self.options, **changes)  # type: ignore[arg-type]
        succession = find_predecessor(options)
        assert succession is not None
        with closing(succession):
            heir = ServerThread(options, succession)
        former.close()
        self.givers[-1].close()
        assert former.drained
        self.servers.append(heir)
        self.givers.append(Giver(heir.hub))
        return heir

    def link(self) -> Link:
        """Return a link to the last server, through which a test plays the successor."""
        assert self.options.folder is not None
        link = connect(self.options.folder)
        assert link is not None
        return link

    def close(self) -> None:
        self.givers[-1].close()
        for server in self.servers:
            server.close()


@contextmanager
def a_line(folder: Path | None = None, **changes: object) -> Iterator[Line]:
    """Yield a line of servers with both addresses; all pages of the first are allocated."""
    with short_folder() as own:
        options = ServerOptions(POOL_BYTES, folder=folder or own, tcp=TcpAddress("127.0.0.1", free_port()))
        with closing(Line(replace(options, **changes))) as line:  # type: ignore[arg-type]
            assert line.now.hub.pool.wait_allocated(30.0)
            yield line


def chunk_files(folder: Path) -> list[Path]:
    """Return the files of chunks in a server's folder."""
    return [path for path in folder.rglob("*.safetensors") if path.parent.name != ".free"]


def fill(tier: ServerTier, refs: list[ChunkRef] = REFS) -> None:
    """Store chunks."""
    for ref in refs:
        assert tier.put([make_transfer(EVEN, ref)]) == [Outcome.STORED]


def check_all(tier: ServerTier, refs: list[ChunkRef] = REFS) -> None:
    """Check that chunks are there, and their bytes."""
    assert tier.contains(refs) == [True] * len(refs)
    assert {check_read(tier, ref) for ref in refs} == {Outcome.HIT}
