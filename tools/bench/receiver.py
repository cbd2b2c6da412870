"""Receiving process for ``handover.py``: a server as a decode engine embeds it, and the receivers of its limits.

    python -m kvstore.tools.bench.receiver GEOMETRY_HEX POOL_BYTES BATCH_BYTES CHANNEL

Prints the server's port, and a second port that receives ``BATCH_BYTES`` repeatedly into one buffer and answers with a
byte each time. With a channel, ``attach ADDRESS METADATA_HEX`` and then ``read`` on standard input read as many bytes
by bare NIXL; each command is answered with a line.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any, Final

import msgspec
import numpy as np

from kvstore.chunks import ByteArray
from kvstore.protocol.geometry import Geometry
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.samples import NAMESPACE

PIECE_BYTES: Final = 2 << 20  # bytes of one bare NIXL read


class BareReader:
    """A bare loop of reads by NIXL."""

    def __init__(self, target: ByteArray) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - an extra

        self._target = target
        self._agent: Any = nixl_agent("bench-reader", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(target.ctypes.data, len(target), 0, "")], "DRAM")

    def attach(self, address: int, metadata: bytes) -> None:
        """Select the peer and its address to read from."""
        self._address = address
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def read(self) -> None:
        """Read the whole batch, piece by piece."""
        for begin in range(0, len(self._target), PIECE_BYTES):
            size = min(PIECE_BYTES, len(self._target) - begin)
            here, there = (
                self._agent.get_xfer_descs([(base + begin, size, 0)], "DRAM")
                for base in (self._target.ctypes.data, self._address)
            )
            handle = self._agent.initialize_xfer("READ", here, there, self._peer)
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise SystemExit("NIXL failed to read")


def _take(listening: socket.socket, target: ByteArray) -> None:
    connection, _ = listening.accept()
    view = target.data
    while True:
        done = 0
        while done < len(view):
            count = connection.recv_into(view[done:])
            if not count:
                return
            done += count
        connection.sendall(b"\1")


def _say(text: str) -> None:
    sys.stdout.write(f"said {text}\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until killed."""
    geometry, (pool_bytes, batch_bytes), channel = sys.argv[1], map(int, sys.argv[2:4]), sys.argv[4] or None
    layout = msgspec.msgpack.decode(bytes.fromhex(geometry), type=Geometry).layout()
    target = prefaulted(batch_bytes)
    np.copyto(target, 1)
    server = EmbeddedServer(NAMESPACE, layout, EmbeddedOptions(pool_bytes, "127.0.0.1", 0, channel=channel))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_take, args=(listening, target), daemon=True).start()
        reader = BareReader(target) if channel else None
        _say(f"{server.port} {listening.getsockname()[1]}")
        for line in sys.stdin:
            command, *words = line.split()
            assert reader is not None
            if command == "attach":
                reader.attach(int(words[0]), bytes.fromhex(words[1]))
            else:
                reader.read()
            _say(command)
    server.close()


if __name__ == "__main__":
    main()
