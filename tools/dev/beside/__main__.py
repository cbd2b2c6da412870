"""kvstore and LMCache 0.5.6 in one interleaved run: the same KV, the same tokens, the same checks.

    python -m kvstore.tools.dev.beside memory|disk|redis|server [--rounds 7] [--mib 1024] [--chunk-tokens 256] ...

Run it with an interpreter that has both; docs/benchmarks.md says how to make one without CUDA. KV is that of Llama-8B
on the CPU, as ``[2, blocks, tokens, heads, head size]`` tensors, which both systems read where they are. LMCache's
connectors are for GPUs, so ``CpuConnector`` stands in for one: a loop over chunks round LMCache's own copy operation.

A store ends when every chunk is where it belongs: in memory, in files, in Redis. Every round has new KV, new tokens and
other blocks, and both systems begin it empty; who goes first alternates. Every byte is compared after each retrieve.
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

from kvstore.options import EngineOptions, RemoteOptions
from kvstore.tools.bench import limits, redis
from kvstore.tools.bench.samples import timed
from kvstore.tools.bench.server import private_server
from kvstore.tools.dev.beside.lmcache import GIB, Lmcache, LmcacheServer, lmcache_server
from kvstore.tools.dev.beside.prompts import CHUNK_TOKENS, TOKEN_BYTES, Prompts
from kvstore.tools.dev.beside.systems import SETTLE_S, Kvstore, System

LOOKUPS = 20
HOLD_S = 0.05  # how long ours may answer from what it asked before


class Samples(NamedTuple):
    """Seconds of each call."""

    store_s: list[float]
    lookup_s: list[float]
    retrieve_s: list[float]


def measure(systems: dict[str, System], prompts: Prompts, rounds: int) -> dict[str, Samples]:
    """Interleaved rounds, one of warming up first; memcpy of as many bytes beside them."""
    samples = {name: Samples([], [], []) for name in (*systems, "memcpy")}
    source, target = (limits.prefaulted(prompts.num_bytes) for _ in range(2))
    for number in range(1 + rounds):
        slots = prompts.new()
        ordered = list(systems.items())[:: 1 if number % 2 else -1]
        for name, system in ordered:
            samples[name].store_s.append(timed(partial(system.store, prompts.tokens, slots))[0])
        samples["memcpy"].store_s.append(timed(partial(limits.memcpy, target, source))[0])
        for name, system in ordered:
            samples[name].lookup_s.append(looked_up_s(name, system, prompts))
        for name, system in ordered:
            samples[name].retrieve_s.append(retrieved_s(name, system, prompts))
        for system in systems.values():
            system.clear(prompts.tokens)
    return {name: Samples(*(part[1:] for part in found)) for name, found in samples.items()}


def retrieved_s(name: str, system: System, prompts: Prompts) -> float:
    """A retrieve, every byte of it compared afterwards."""
    blocks, slots = prompts.destination()
    seconds, loaded = timed(partial(system.retrieve, prompts.tokens, slots))
    if loaded != prompts.num_tokens:
        raise SystemExit(f"{name} loaded {loaded} of {prompts.num_tokens} tokens")
    prompts.check(blocks)
    return seconds


def looked_up_s(name: str, system: System, prompts: Prompts) -> float:
    """The median of some lookups, which find everything."""
    seconds = []
    for _ in range(LOOKUPS):
        time.sleep(1.2 * HOLD_S)
        took_s, found = timed(lambda: system.lookup(prompts.tokens))
        seconds.append(took_s)
        if found != prompts.num_tokens:
            raise SystemExit(f"{name} found {found} of {prompts.num_tokens} tokens")
    return statistics.median(seconds)


@contextmanager
def opened(tier: str, prompts: Prompts, folder: Path) -> Iterator[dict[str, System]]:
    """Both systems, over one tier, with room for a prompt and a quarter in memory."""
    pool_bytes = int(1.25 * prompts.num_bytes)
    theirs: dict[str, Any] = {"local_cpu": tier == "memory", "max_local_cpu_size": pool_bytes / GIB}
    with ExitStack() as stack:
        ours = EngineOptions(pool_bytes, local_cpu=tier == "memory", io_timeout_s=SETTLE_S)
        if tier == "disk":
            room_bytes = 3 * pool_bytes
            ours = replace(
                ours,
                local_disk=folder / "ours",
                max_local_disk_bytes=room_bytes,
                max_write_queue=prompts.num_chunks,
            )
            theirs |= {"local_disk": f"file://{folder}/theirs/"}
            theirs |= {"max_local_disk_size": 32 * room_bytes / GIB}  # clear gives files back there, but no room
            theirs |= {"extra_config": {"use_odirect": True}}
        elif tier == "redis":
            program = shutil.which("redis-server")
            if program is None:
                raise SystemExit("redis-server is not on the PATH")
            url = f"redis://127.0.0.1:{stack.enter_context(redis.private_server(Path(program), folder))}"
            ours = replace(ours, remote=remote(url, prompts))
            theirs |= {"remote_url": url, "remote_serde": "naive"}
        elif tier == "server":
            url, _ = stack.enter_context(private_server(folder, 2 * pool_bytes))
            ours = replace(ours, remote=remote(url, prompts))
            their_url = stack.enter_context(lmcache_server(folder, pool_bytes, prompts.chunk_tokens))
            yield {"kvstore": Kvstore(prompts, ours), "LMCache": LmcacheServer(prompts, their_url)}
            return
        yield {"kvstore": Kvstore(prompts, ours), "LMCache": Lmcache(prompts, theirs)}


def remote(url: str, prompts: Prompts) -> RemoteOptions:
    """A remote tier that is asked anew by every lookup here."""
    return RemoteOptions(url, lookup_timeout_s=SETTLE_S, hold_s=HOLD_S, max_queue=prompts.num_chunks)


def table(samples: dict[str, Samples], num_bytes: int, title: str) -> Table:
    """Medians, and how many times faster ours is."""
    made = Table(title=title)
    for column in ("", *samples, "times"):
        made.add_column(column, justify="right")
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
    """Measure one tier; the table, and the samples as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=["memory", "disk", "redis", "server"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--torch-threads", type=int, default=1, help="LMCache copies with them, kvstore with its own")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))  # noqa: S108
    given = parser.parse_args()
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_MP_TRANSFER_MODE", "engine_driven")  # through shared memory: its way on a CPU
    prompts = Prompts((given.mib << 20) // TOKEN_BYTES, given.chunk_tokens)
    torch.set_num_threads(given.torch_threads)
    with tempfile.TemporaryDirectory(prefix="side-", dir=given.folder) as folder:
        with opened(given.tier, prompts, Path(folder)) as systems:
            samples = measure(systems, prompts, given.rounds)
        title = f"{given.tier}, {prompts.num_chunks} chunks, {given.mib} MiB of Llama-8B KV"
        Console(width=100).print(table(samples, prompts.num_bytes, title))
        print(json.dumps({"tier": given.tier, "samples_s": {name: part._asdict() for name, part in samples.items()}}))
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # LMCache's threads may not end
    os._exit(0)
