"""Bench lines of the Redis tier, on a private server, with a plain socket client as the limit."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.raw_redis import RawRedis
from kvstore.tools.bench.remote import RemoteChunks
from kvstore.tools.bench.samples import Tick, alternating, paired
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import free_port, is_listening, running, wait_until

# As docs/redis.md recommends. Otherwise the server returns memory to the system and faults it in again page by page.
# Debian's redis-server reads the first name, Redis built with its own allocator the second.
MALLOC_CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
MALLOC_NAMES = ("MALLOC_CONF", "JE_MALLOC_CONF")
_START_TIMEOUT_S = 10.0
_LOOKUP_SLACK_S = 0.5e-3
STORE = Subject("redis store", "plain socket SET", "the tier's put, a chunk a call: xxh3, parts of 1 MiB, transaction")
RETRIEVE = Subject("redis retrieve", "plain socket GET", "the tier's get, a chunk a call: parts, xxh3 verified")
QUARTER = Subject("redis: a chunk for its quarter", "its leading quarter", "GET, no tier, against GETRANGE of a part")
LOOKUP = Subject("redis lookup, 128 known keys", "3 round trips", "the tier's contains; the limit has 0.5 ms more")


@contextmanager
def private_server(program: str | Path | None, folder: Path) -> Iterator[int]:
    """Run a private Redis server without persistence, and yield its port.

    Raises:
        ConfigError: the server does not start, or ``program`` is None.
    """
    if program is None:
        raise ConfigError("redis-server is not on the PATH")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--logfile", "redis.log"]
    environment = {**os.environ, **dict.fromkeys(MALLOC_NAMES, MALLOC_CONF)}
    with running([program, *options], stdout=subprocess.DEVNULL, env=environment) as process:
        wait_until(lambda: is_listening(port) or process.poll() is not None, _START_TIMEOUT_S, every_s=0.02)
        if process.poll() is not None or not is_listening(port):
            raise ConfigError("redis-server does not start")
        yield port


def measure_redis(workbench: Workbench, program: Path, rounds: int, tick: Tick) -> list[Line]:
    """Store, retrieve and look up on a private server, in alternation with the limits.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: redis-py is not installed, or the server does not start.
    """
    chunks = RemoteChunks(workbench.paged.layout, workbench.num_chunks)
    moved = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        private_server(program, Path(folder)) as port,
        closing(chunks.tier("redis", f"redis://127.0.0.1:{port}")) as tier,
    ):
        from kvstore.tiers.redis.chunk import PART_BYTES  # noqa: PLC0415 - of an extra, which the tier needs, too

        layout = workbench.paged.layout
        quarter = layout.front_ranges(layout.blocks_per_chunk, max(1, layout.blocks_per_chunk // 4))
        payloads = prefaulted(workbench.batch_bytes).reshape(workbench.num_chunks, -1)
        with closing(RawRedis(port, payloads, PART_BYTES)) as raw:
            for limit_first in alternating("redis", rounds, tick):
                stored, loaded = chunks.move(tier, raw.store, raw.retrieve, limit_first=limit_first)
                part, _ = paired(lambda: raw.retrieve_ranges(quarter), raw.retrieve, limit_first=limit_first)
                moved.append((stored, loaded, part))
                raw.remove()  # otherwise the next round would replace values
            lookups = chunks.look_up(tier, raw.ping, slack_s=_LOOKUP_SLACK_S)
    return [*move_lines((STORE, RETRIEVE, QUARTER), moved, workbench), LOOKUP.line(workbench.geometry, lookups)]
