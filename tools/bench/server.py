"""Bench lines of the cache server: a private server, the server tier, and its limits.

On one host the limit is a memcpy of the same chunks, one after the other. (A memcpy of all chunks at once can be faster
by bypassing the processor's caches; a chunk is too short for that.) Over TCP the limit is plain pyzmq, which sends as
many frames of the same size to another process, or receives them, and leaves them in ZeroMQ's memory, without checksums
and without a copy to their destination. The limit of a lookup is bare round trips of one small frame.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.raw_peer import RawPeer
from kvstore.tools.bench.remote import RemoteChunks
from kvstore.tools.bench.samples import Tick, alternating
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import running

STORE = Subject("server store", "memcpy", "the tier's put, a chunk a call: asking for pages, copy, commit")
RETRIEVE = Subject("server retrieve", "memcpy", "the tier's get, a chunk a call: asking for pages, copy, release")
TCP_STORE = Subject(
    "server store over TCP", "plain pyzmq", "the tier's put, a chunk a call: checksums made and compared, copies"
)
TCP_RETRIEVE = Subject(
    "server retrieve over TCP", "plain pyzmq", "the tier's get, a chunk a call: checksums made and compared, copies"
)
QUARTER = Subject("server: a chunk for its quarter", "its leading quarter", "the tier's get of each")
TCP_QUARTER = QUARTER._replace(name="server: a chunk for its quarter, TCP")
LOOKUP = Subject("server lookup, 128 known keys", "3 round trips", "the tier's contains, over ipc")


@contextmanager
def private_server(folder: Path, pool_bytes: int) -> Iterator[tuple[str, str]]:
    """Run a private cache server, and yield its URLs over ipc and over TCP.

    Raises:
        ConfigError: the server does not start.
    """
    config = folder / "cache.yaml"
    url = f"kvs+ipc://{folder / 'run'}"
    config.write_text(f"max_local_cpu_size: {pool_bytes / 2**30}\nserver_listen: '{url}, kvs://127.0.0.1:0'\n")
    command = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(config), "--json"]
    log = folder / "server.log"
    with log.open("wb") as errors, running(command, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            reason = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"the cache server does not start: {' '.join(reason)}")
        yield url, f"kvs://127.0.0.1:{json.loads(line)['tcp_port']}"


def measure_server(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store, retrieve and look up on a private server, in alternation with the limits.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: pyzmq or msgspec are not installed, or the server does not start.
    """
    layout = workbench.paged.layout
    chunks = RemoteChunks(layout, workbench.num_chunks)
    copy = prefaulted(chunks.stored.size).reshape(chunks.stored.shape)

    def memcpy() -> None:
        for target, source in zip(copy, chunks.stored, strict=True):
            np.copyto(target, source)

    pool_bytes = 4 * (workbench.num_chunks + 1) * layout.slot_bytes + (64 << 20)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))
        urls = opened.enter_context(private_server(folder, pool_bytes))
        near, far = (opened.enter_context(closing(chunks.tier("server", url))) for url in urls)
        from kvstore.protocol.messages import PIECE_BYTES  # noqa: PLC0415 - of an extra, which the tier needs, too

        payloads = chunks.stored[:, : layout.payload_bytes(layout.blocks_per_chunk)]
        peer = opened.enter_context(closing(RawPeer(folder, payloads, PIECE_BYTES)))
        moved = [
            chunks.move(near, memcpy, memcpy, limit_first=limit_first)
            + chunks.move(far, peer.store, peer.retrieve, limit_first=limit_first)
            + (chunks.quarter(near, limit_first=limit_first), chunks.quarter(far, limit_first=limit_first))
            for limit_first in alternating("server", rounds, tick)
        ]
        lookups = chunks.look_up(near, peer.ping)
    lines = move_lines((STORE, RETRIEVE, TCP_STORE, TCP_RETRIEVE, QUARTER, TCP_QUARTER), moved, workbench)
    return [*lines, LOOKUP.line(workbench.geometry, lookups)]
