"""kvstore and LMCache 0.5.6 in one interleaved run: the same KV, the same tokens, the same checks.

    python -m kvstore.tools.dev.beside memory|disk|redis|server [--rounds 7] [--mib 1024] [--chunk-tokens 256] ...

Run it with an interpreter that has both; docs/benchmarks.md makes one without CUDA. The KV is that of Llama-8B on the
CPU, as ``[2, blocks, tokens, heads, head size]`` tensors, which both systems read in place. LMCache's connectors are
for GPUs, so ``CpuConnector`` stands in for one: a loop over chunks around LMCache's own copy operation.

A store ends when every chunk is in its tier: in memory, in files, in Redis. Every round has new KV, new tokens and
other blocks, and starts with both systems empty; they take turns to go first. Every byte is compared after each
retrieve.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from kvstore.errors import KVStoreError
from kvstore.options import EngineOptions, RemoteOptions
from kvstore.tools.bench import redis
from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.samples import require, timed
from kvstore.tools.bench.server import private_server
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.console import numbers
from kvstore.tools.dev.beside.lmcache import GIB, Lmcache, LmcacheServer, lmcache_server
from kvstore.tools.dev.beside.systems import SETTLE_S, Kvstore, System

LOOKUPS = 20
HOLD_S = 0.05  # kvstore may reuse an earlier lookup's result for this time
GEOMETRY = GEOMETRIES["llama-8b"]


class Samples(NamedTuple):
    """Seconds of each call."""

    store_s: list[float]
    lookup_s: list[float]
    retrieve_s: list[float]


def measure(systems: dict[str, System], workbench: Workbench, rounds: int) -> dict[str, Samples]:
    """Measure interleaved rounds after one of warm-up, with memcpy of as many bytes."""
    samples = {name: Samples([], [], []) for name in (*systems, "memcpy")}
    for number in range(1 + rounds):
        slots = workbench.new_batch()
        ordered = list(systems.items())[:: 1 if number % 2 else -1]
        for name, system in ordered:
            samples[name].store_s.append(timed(partial(system.store, workbench.tokens, slots))[0])
        samples["memcpy"].store_s.append(timed(workbench.memcpy)[0])
        for name, system in ordered:
            samples[name].lookup_s.append(looked_up_s(name, system, workbench))
        for name, system in ordered:
            samples[name].retrieve_s.append(retrieved_s(name, system, workbench))
        for system in systems.values():
            system.clear(workbench.tokens)
    return {name: Samples(*(part[1:] for part in found)) for name, found in samples.items()}


def retrieved_s(name: str, system: System, workbench: Workbench) -> float:
    """Return the seconds of a retrieve, whose bytes are all compared afterwards."""
    blocks, slots = workbench.destination()
    seconds, loaded = timed(partial(system.retrieve, workbench.tokens, slots))
    require(loaded == workbench.num_tokens, f"{name} loaded {loaded} of {workbench.num_tokens} tokens")
    workbench.check(blocks)
    return seconds


def looked_up_s(name: str, system: System, workbench: Workbench) -> float:
    """Return the median seconds of some lookups, which must find everything."""
    seconds = []
    for _ in range(LOOKUPS):
        time.sleep(1.2 * HOLD_S)
        took_s, found = timed(lambda: system.lookup(workbench.tokens))
        seconds.append(took_s)
        require(found == workbench.num_tokens, f"{name} found {found} of {workbench.num_tokens} tokens")
    return statistics.median(seconds)


@contextmanager
def opened(tier: str, workbench: Workbench, folder: Path) -> Iterator[dict[str, System]]:
    """Yield both systems over one tier, with room in memory for a prompt and a quarter."""
    pool_bytes = int(1.25 * workbench.batch_bytes)
    theirs: dict[str, Any] = {"local_cpu": tier == "memory", "max_local_cpu_size": pool_bytes / GIB}
    with ExitStack() as stack:
        ours = EngineOptions(pool_bytes, local_cpu=tier == "memory", io_timeout_s=SETTLE_S)
        if tier == "disk":
            room_bytes = 3 * pool_bytes
            ours = replace(
                ours,
                local_disk=folder / "ours",
                max_local_disk_bytes=room_bytes,
                max_write_queue=workbench.num_chunks,
            )
            theirs |= {"local_disk": f"file://{folder}/theirs/", "extra_config": {"use_odirect": True}}
            theirs |= {"max_local_disk_size": 32 * room_bytes / GIB}  # its clear() frees no room
        elif tier == "redis":
            port = stack.enter_context(redis.private_server(shutil.which("redis-server"), folder))
            url = f"redis://127.0.0.1:{port}"
            ours = replace(ours, remote=remote(url, workbench))
            theirs |= {"remote_url": url, "remote_serde": "naive"}
        elif tier == "server":
            url, _ = stack.enter_context(private_server(folder, 2 * pool_bytes))
            ours = replace(ours, remote=remote(url, workbench))
            their_url = stack.enter_context(lmcache_server(folder, pool_bytes, workbench.geometry.chunk_tokens))
            yield {"kvstore": Kvstore(workbench, ours), "LMCache": LmcacheServer(workbench, their_url)}
            return
        yield {"kvstore": Kvstore(workbench, ours), "LMCache": Lmcache(workbench, theirs)}


def remote(url: str, workbench: Workbench) -> RemoteOptions:
    """Return the options of a remote tier that every lookup here queries again."""
    return RemoteOptions(url, lookup_timeout_s=SETTLE_S, hold_s=HOLD_S, max_queue=workbench.num_chunks)


def table(samples: dict[str, Samples], num_bytes: int, title: str) -> Table:
    """Return a table of medians, and of the speed-up of kvstore."""
    made = Table(*numbers("", *samples, "times"), title=title)
    for name in Samples._fields:
        times = {system: getattr(part, name) for system, part in samples.items()}
        medians = {system: statistics.median(found) for system, found in times.items() if found}
        shown = (_shown(name, medians.get(system), num_bytes) for system in samples)
        made.add_row(name.removesuffix("_s"), *shown, f"{medians['LMCache'] / medians['kvstore']:.1f}")
    return made


def _shown(name: str, seconds: float | None, num_bytes: int) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} us" if name == "lookup_s" else f"{num_bytes / seconds / 1e9:.2f} GB/s"


def main() -> None:
    """Measure one tier, and print the table and the samples as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=["memory", "disk", "redis", "server"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=GEOMETRY.chunk_tokens)
    parser.add_argument("--torch-threads", type=int, default=1, help="LMCache copies with them, kvstore with its own")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))  # noqa: S108
    given = parser.parse_args()
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_MP_TRANSFER_MODE", "engine_driven")  # through shared memory, as on a CPU
    geometry = replace(GEOMETRY, chunk_tokens=given.chunk_tokens)
    workbench = Workbench(geometry, (given.mib << 20) // geometry.chunk_bytes, split=True)
    torch.set_num_threads(given.torch_threads)
    with tempfile.TemporaryDirectory(prefix="side-", dir=given.folder) as folder:
        with opened(given.tier, workbench, Path(folder)) as systems:
            samples = measure(systems, workbench, given.rounds)
        title = f"{given.tier}, {workbench.num_chunks} chunks, {given.mib} MiB of Llama-8B KV"
        Console(width=100).print(table(samples, workbench.batch_bytes, title))
        print(json.dumps({"tier": given.tier, "samples_s": {name: part._asdict() for name, part in samples.items()}}))
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KVStoreError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # LMCache's threads may not end
    os._exit(0)
