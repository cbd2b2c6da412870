"""Bench lines of the proxy: the latency it adds to a request, and its processor time per request.

Clients, engine and proxy share the processors of one machine, so throughput is derived from processor time: 1 / the
processor time of a request is the throughput of one process on a dedicated core, in requests per second.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import psutil

from kvstore.model.errors import ConfigError
from kvstore.tools.bench.bare_http import ANSWER, Asker, run
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Pair, Tick, alternating, require
from kvstore.tools.bench.servers import child
from kvstore.tools.bench.workbench import Workbench

ADDED = Subject(
    "proxy: added at 100 requests/s",
    "a bare forwarder",
    "a request of 250 bytes to two engines that answer at once, less the median of asking them directly",
)
TIME = Subject("proxy: processor time of a request", "500 us", "32 clients; so many a second: 1 / this, on one core")
SHARE = Subject(
    "proxy: processor time, by a forwarder", "a bare forwarder", "the same; the forwarder reads only lengths"
)

REQUESTS_A_ROUND = 40
CLOSED_LOOP_S = 0.4
_PERIOD_S: Final = 0.01
_CLIENTS: Final = 32
_TARGET_S: Final = 500e-6
_LEAST_S: Final = 1e-6
_MODULE: Final = "kvstore.tools.bench.bare_http"
_BODY: Final = b'{"model": "m", "prompt": "' + b"a few words, " * 15 + b'", "max_tokens": 16, "temperature": 0.5}'
_REQUEST: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(_BODY)
    + _BODY
)


class _Stage(NamedTuple):
    """Started processes: the engine's port, and port and process of forwarder and proxy."""

    engine_port: int
    forwarder: tuple[int, psutil.Process]
    proxy: tuple[int, psutil.Process]


def measure_proxy(_: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Send requests through the proxy, through a bare forwarder, and directly, in alternation."""
    added: list[Pair] = []
    times: list[Pair] = []
    with _stage() as stage:
        for pair in alternating(rounds, tick):
            run(_round(stage, added, times, forwarder_first=pair.limit_first))
    shares = times[WARM_UP_ROUNDS:]
    return [
        ADDED.line(added[WARM_UP_ROUNDS * REQUESTS_A_ROUND :]),
        TIME.line([Pair(_TARGET_S, pair.path_s) for pair in shares]),
        SHARE.line(shares),
    ]


async def _round(stage: _Stage, added: list[Pair], times: list[Pair], *, forwarder_first: bool) -> None:
    direct_s = 2 * statistics.median(await _paced(stage.engine_port))
    ways = (stage.forwarder, stage.proxy) if forwarder_first else (stage.proxy, stage.forwarder)
    latencies = [await _paced(port) for port, _ in ways]
    busy = [await _busy(*way) for way in ways]
    if not forwarder_first:
        latencies.reverse()
        busy.reverse()
    forwarded, proxied = ([max(one - direct_s, _LEAST_S) for one in sorted(found)] for found in latencies)
    added += map(Pair, forwarded, proxied)  # paired by rank, from fastest to slowest
    times.append(Pair(*busy))


async def _paced(port: int) -> list[float]:
    """Send requests at a fixed 100 per second, and return the seconds of each."""
    found: list[float] = []

    async def ask(asker: Asker, at_s: float) -> None:
        begin_s = time.perf_counter()
        await asyncio.sleep(max(0.0, at_s - begin_s))
        begin_s = time.perf_counter()
        _check(await asker.ask(_REQUEST))
        found.append(time.perf_counter() - begin_s)

    async with _clients(port) as askers:
        begin_s = time.perf_counter()
        for first in range(0, REQUESTS_A_ROUND, _CLIENTS):
            numbers = range(first, min(first + _CLIENTS, REQUESTS_A_ROUND))
            asked = zip(askers, numbers, strict=False)
            await asyncio.gather(*(ask(asker, begin_s + number * _PERIOD_S) for asker, number in asked))
    return found


async def _busy(port: int, process: psutil.Process) -> float:
    """Return a process's processor time per request while each client sends requests without a pause."""
    asked = 0

    async def go_on(asker: Asker) -> None:
        nonlocal asked
        while time.perf_counter() < end_s:
            _check(await asker.ask(_REQUEST))
            asked += 1

    async with _clients(port) as askers:
        await asyncio.gather(*(asker.ask(_REQUEST) for asker in askers))  # now all connections are open
        end_s, before_s = time.perf_counter() + CLOSED_LOOP_S, _processor_s(process)
        await asyncio.gather(*map(go_on, askers))
        taken_s = _processor_s(process) - before_s
    return max(taken_s / asked, _LEAST_S)


@asynccontextmanager
async def _clients(port: int) -> AsyncIterator[list[Asker]]:
    askers = [Asker() for _ in range(_CLIENTS)]
    for asker in askers:
        await asker.connect(port)
    yield askers
    for asker in askers:
        asker.connection.close()


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _check(answer: bytes) -> None:
    content = ANSWER.partition(b"\r\n\r\n")[2]
    require(answer.endswith(content), "an answer that passed the proxy is not the engine's")


@contextmanager
def _stage() -> Iterator[_Stage]:
    """Run an engine, the forwarder and the proxy until the end of the block."""
    with ExitStack() as stack:

        def start(*words: str) -> tuple[str, psutil.Process]:
            process = stack.enter_context(child(*words))
            line = process.said()
            if not line:
                raise ConfigError("the proxy does not start: pip install 'vllm-kvstore[proxy]'")
            return line, psutil.Process(process.process.pid)

        engine_port, _ = start(_MODULE, "engine")
        forwarder_port, forwarder = start(_MODULE, "forwarder", engine_port)
        url = f"http://127.0.0.1:{engine_port}"
        options = ("--prefill", url, "--decode", url, "--port", "0", "--health-interval-s", "60", "--json")
        report, proxy = start("kvstore.tools.cli", "proxy", *options)
        port = urlsplit(json.loads(report)["url"]).port
        yield _Stage(int(engine_port), (int(forwarder_port), forwarder), (port or 0, proxy))
