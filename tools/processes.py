"""Processes that a tool starts: free ports, waiting, and a guaranteed end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

_PORTS: Final = range(15_000, 22_000)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Linux gives neither it, nor the next ones, nor the one 10,000 above (of the bus of a Redis Cluster) to connections
    made meanwhile, as it takes their ports from 32,768 on.

    Raises:
        OSError: of a thousand ports none is free.
    """
    for port in random.SystemRandom().sample(_PORTS, 1_000):  # a seeded generator repeats itself
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}: end processes that listen there")


def is_listening(port: int) -> bool:
    """Tell if a process of this machine accepts connections on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401 - Popen's
    """Run a process with text pipes, and kill it at the end of the block; ``options`` are those of ``Popen``."""
    with subprocess.Popen(command, text=True, **options) as process:  # noqa: S603 - callers name the programs
        try:
            yield process
        finally:
            process.kill()


def kill_group(leader: int) -> None:
    """Kill all processes of the group that a process leads, if any is left."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals with ``handler`` until the end of the block."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def wait_until(done: Callable[[], bool], timeout_s: float, *, every_s: float) -> bool:
    """Poll ``done`` until it returns True; return False if ``timeout_s`` has passed before."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True
