"""Malformed messages to a cache server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest
from support.cache_server import serving_ipc, serving_tcp
from support.malformed import fuzz

from kvstore.server import sessions
from soak.memory import own_bytes
from soak.part import Batch, Do, Part

MESSAGES: Final = 5_000  # of a batch
_SILENCE_S: Final = 5.0  # shorter than in service, as many a client leaves right after its hello


@contextmanager
def opened(_: Path) -> Iterator[Do]:
    """Yield batches of messages to two servers in this process, by turns: at a unix socket, and at a port."""
    with pytest.MonkeyPatch.context() as patch, serving_ipc() as here, serving_tcp() as there:
        patch.setattr(sessions, "SILENCE_S", _SILENCE_S)

        def send(seed: int) -> Batch:
            server = (here, there)[seed % 2]
            num_before = server.hub.reception.num_malformed
            fuzz(server, MESSAGES, seed)
            cut_off = server.hub.reception.num_malformed - num_before
            return Batch(cut_off, notes={"messages": MESSAGES}, memory=[own_bytes(psutil.Process())])

        yield send


PART = Part("messages", "malformed messages to the server", 1_000_000, opened)
