"""Lines of the mooncake tier on a private store: a master, an owner of its memory, and plain calls of Mooncake."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.model.errors import ConfigError
from kvstore.tiers.mooncake.session import Session
from kvstore.tiers.mooncake.url import MooncakeTarget
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.remote import Chunks
from kvstore.tools.bench.samples import Tick, alternating, require
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import free_port, is_listening, running, wait_until
from kvstore.transfer.lane import WRITE_THREADS

MOONCAKE: Final = (
    Subject("mooncake store", "Mooncake's upsert_from", "the tier's put, as an engine's threads: copy, xxh3, epoch"),
    Subject("mooncake retrieve", "Mooncake's get_into", "the tier's get, likewise: epoch, copy, xxh3 verified"),
)
_WAIT_S: Final = 20.0
_SPARE_BYTES: Final = 64 << 20


def measure_mooncake(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store and retrieve on a private store, in alternation with Mooncake's own calls.

    Raises:
        ConfigError: Mooncake is not installed, or does not start.
    """
    layout, num_chunks = workbench.paged.layout, workbench.num_chunks
    chunks = Chunks(layout, num_chunks)
    room_bytes = 3 * num_chunks * (layout.slot_bytes + (1 << 16)) + _SPARE_BYTES
    with (
        _store(room_bytes) as target,
        closing(_Plain(target, layout.slot_bytes, num_chunks)) as plain,
        closing(chunks.tier("mooncake", f"mooncake://{target}")) as tier,
        ThreadPoolExecutor(WRITE_THREADS) as threads,
    ):
        found = []
        for pair in alternating(rounds, tick):
            found.append(chunks.move(tier, partial(plain.do, "upsert"), partial(plain.do, "get"), pair, threads))
            plain.do("remove")
    return move_lines(MOONCAKE, found, workbench)


class _Plain:
    """Mooncake's own calls on all chunks: one order to a process, in a batch if that is faster. Threads are slower."""

    def __init__(self, target: MooncakeTarget, size_bytes: int, number: int) -> None:
        self._session = _open(target, size_bytes, number)
        self.close = self._session.close
        self._slots = self._session.slots.take(number, 0.0)
        for slot in self._slots:
            self._session.slots.view(slot)[:] = np.random.default_rng(slot).integers(256, size=size_bytes, dtype="u1")
        self._sizes = [size_bytes] * number
        self._order = {"keys": [f"plain{slot}" for slot in self._slots], "sizes": self._sizes}

    def do(self, call: str) -> None:
        """Put, get or remove all chunks by Mooncake's calls for whole objects."""
        started = self._session.start(call, "", self._slots, self._order)
        reply = self._session.wait(started, time.monotonic() + _WAIT_S)
        require(reply is not None and {*reply["codes"]} <= {0, *self._sizes}, f"Mooncake's {call} failed")


def _open(target: MooncakeTarget, slot_bytes: int, number: int) -> Session:
    session = Session(target, slot_bytes, number)
    require(session.wait(session.ready, time.monotonic() + _WAIT_S) is not None, "Mooncake does not start")
    return session


@contextmanager
def _store(room_bytes: int) -> Iterator[MooncakeTarget]:
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ConfigError("Mooncake is not installed: pip install 'vllm-kvstore[mooncake]'")
    port, program = free_port(), str(Path(spec.origin).with_name("mooncake_master"))
    ports = (f"--rpc_port={port}", f"--metrics_port={free_port()}")
    command = [program, *ports, "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: is_listening(port) or process.poll() is not None, _WAIT_S, every_s=0.02)
        target = MooncakeTarget("127.0.0.1", port)
        with closing(_open(target, 1, 1)) as owner:
            owner.give(room_bytes, time.monotonic() + _WAIT_S)
            yield target
