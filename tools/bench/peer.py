"""Server process for ``raw_peer.py``: plain pyzmq without library code.

    python -m kvstore.tools.bench.peer IPC_ADDRESS NUM_CHUNKS CHUNK_BYTES PIECE_BYTES

Prints the TCP address that it listens on. It answers ``get`` with the next chunk, in pieces. It echoes any other
message of one frame, and answers a message of several frames, which is a chunk, with one empty frame.
"""

from __future__ import annotations

import sys
from itertools import cycle

import numpy as np
import zmq

from kvstore.tools.bench.raw_peer import in_pieces


def main() -> None:
    """Answer until killed."""
    ipc_address, (num_chunks, chunk_bytes, piece_bytes) = sys.argv[1], map(int, sys.argv[2:])
    chunks = cycle([in_pieces(chunk, piece_bytes) for chunk in np.ones((num_chunks, chunk_bytes), np.uint8)])
    socket = zmq.Context(io_threads=2).socket(zmq.ROUTER)
    socket.bind(ipc_address)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.get_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        name, *frames = socket.recv_multipart(copy=False)
        if len(frames) > 1:
            socket.send_multipart([name, b""])
        elif frames[0].bytes == b"get":
            socket.send_multipart([name, *next(chunks)], copy=False)
        else:
            socket.send_multipart([name, *frames])


if __name__ == "__main__":
    main()
