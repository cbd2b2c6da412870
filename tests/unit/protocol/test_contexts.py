"""ZeroMQ contexts that were never closed."""

from __future__ import annotations

import subprocess
import sys

FORGOTTEN = """
import gc, os, zmq
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server

listening = zmq.Context().socket(zmq.ROUTER)
port = listening.bind_to_random_port("tcp://127.0.0.1")
for _ in range(20):
    operator = Operator(parse_server(f"kvs://127.0.0.1:{port}", {}))
    operator.myself = operator
    del operator
gc.collect()
print("collected", flush=True)
os._exit(0)
"""


def test_one_that_nobody_closed_holds_up_no_collection() -> None:
    result = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=20, check=False)
    assert result.stdout == "collected\n", result.stderr
