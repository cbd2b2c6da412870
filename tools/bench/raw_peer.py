"""Limits of the cache server's network lines: plain pyzmq to another process, ``peer.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.chunks import ByteArray

if TYPE_CHECKING:
    import zmq

_TIMEOUT_S = 60.0


class RawPeer:
    """One connection over TCP for chunks, and one over ipc for pings.

    Args:
        folder: folder of the ipc socket; its path must be short.
        chunks: uint8 ``[num_chunks, chunk_bytes]``. Both sides send as many different bytes as the path does, because a
            repeated chunk would be read from the processor's cache.
        piece_bytes: maximum bytes of a frame.
    """

    def __init__(self, folder: Path, chunks: ByteArray, piece_bytes: int) -> None:
        import zmq  # noqa: PLC0415 - an extra

        self._chunks = [in_pieces(chunk, piece_bytes) for chunk in chunks]
        ipc_address = f"ipc://{folder}/peer"
        sizes = [str(size) for size in (*chunks.shape, piece_bytes)]
        command = [sys.executable, "-m", "kvstore.tools.bench.peer", ipc_address, *sizes]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - ourselves
        assert self._process.stdout is not None
        with self._process.stdout as said:
            tcp_address = said.readline().decode().strip()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tcp, self._ipc = (self._connect(address, zmq.DEALER) for address in (tcp_address, ipc_address))

    def close(self) -> None:
        """End the other process."""
        self._process.kill()
        self._process.wait()
        self._context.destroy(linger=0)

    def store(self) -> None:
        """Send all chunks."""
        for pieces in self._chunks:
            self._tcp.send_multipart(pieces, copy=False)
        for _ in self._chunks:
            self._tcp.recv()

    def retrieve(self) -> None:
        """Receive as many chunks as ``store`` sends."""
        for _ in self._chunks:
            self._tcp.send(b"get")
        for _ in self._chunks:
            self._tcp.recv_multipart(copy=False)

    def ping(self) -> None:
        """Make one round trip over ipc."""
        self._ipc.send(b"ping")
        self._ipc.recv()

    def _connect(self, address: str, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = int(_TIMEOUT_S * 1000)
        socket.connect(address)
        return socket


def in_pieces(chunk: ByteArray, piece_bytes: int) -> list[memoryview]:
    """Return views of a chunk, all but the last one of ``piece_bytes``."""
    return [chunk[begin : begin + piece_bytes].data for begin in range(0, len(chunk), piece_bytes)]
