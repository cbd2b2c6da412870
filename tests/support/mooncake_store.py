"""Real Mooncake stores for tests: a master and owners of memory, which can be stopped and killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.processes import free_port
from support.frozen import Freezable

WAIT_S = 40.0
_OWNER = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
os._exit(0)
"""
_ADMIN = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
for line in sys.stdin:
    name, key, value = json.loads(line)
    given = [] if key is None else [key]
    if name == "upsert":
        given.append(bytes.fromhex(value))
    elif name in ("remove", "remove_all"):
        given.append(True)
    found = getattr(store, name)(*given)
    print(json.dumps(found.hex() if isinstance(found, bytes) else found), flush=True)
os._exit(0)
"""
_QUIET = {"GLOG_minloglevel": "3", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


@cache
def _why_not() -> str:
    if find_spec("mooncake") is None:
        return "needs Mooncake: the extra `mooncake`"
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return f"Mooncake cannot be loaded: {tried.stderr[-200:]}" if tried.returncode else ""


def require_mooncake() -> None:
    """Skip tests where Mooncake, or Debian's libibverbs1 and librdmacm1, are missing."""
    if reason := _why_not():
        pytest.skip(reason)


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.05)


class Process(Freezable):
    """A process that can be stopped, and killed and started again."""

    def _run(self, *command: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | _QUIET,
        )
        return self.process


class Master(Process):
    """The master of a store, which lets a read take up to ``lease_s``."""

    def __init__(self, lease_s: int) -> None:
        super().__init__()
        self._lease_s = lease_s
        self.port, self.http_port = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}?http_port={self.http_port}"

    def start(self) -> None:
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        self._run(
            str(Path(spec.origin).with_name("mooncake_master")),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.http_port}",
            f"--default_kv_lease_ttl={1000 * self._lease_s}",
            "--logtostderr=1",
        )
        wait_for("a master", self._listens)

    def _listens(self) -> bool:
        with suppress(OSError):
            for port in (self.port, self.http_port):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
            return True
        return False

    def list_keys(self) -> list[str]:
        """Return the keys of all objects."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/get_all_keys", timeout=WAIT_S) as found:
            return str(found.read().decode()).split()


class Owner(Process):
    """A process that gives memory to a store."""

    def __init__(self, master: Master, size_bytes: int) -> None:
        super().__init__()
        self._master, self._size_bytes = master, size_bytes

    def start(self) -> None:
        place = f"127.0.0.1:{self._master.port}"
        process = self._run(sys.executable, "-c", _OWNER, place, str(self._size_bytes))
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"


class Admin(Process):
    """A client of Mooncake that bypasses the tier; in a process of its own, as Mooncake hangs when that ends."""

    def __init__(self, master: Master) -> None:
        super().__init__()
        self._master = master

    def call(self, name: str, key: str | None = None, value: bytes = b"") -> Any:
        """Return the answer of a method of Mooncake; removals are forced."""
        if self.process is None:
            self._run(sys.executable, "-c", _ADMIN, f"127.0.0.1:{self._master.port}")
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, key, value.hex()]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def get(self, key: str) -> bytes:
        """Return an object; empty if there is none."""
        return bytes.fromhex(self.call("get", key))


class Store:
    """A master and two owners.

    Attributes:
        master: of the store.
        owners: of its memory.
        admin: a client, for use while nothing hangs.
    """

    def __init__(self, owner_bytes: int, lease_s: int) -> None:
        self.master = Master(lease_s)
        self.owners = [Owner(self.master, owner_bytes) for _ in range(2)]
        self.admin = Admin(self.master)

    def chunk_keys(self) -> list[str]:
        """Return the keys of all chunks of any namespace and epoch."""
        return [key for key in self.master.list_keys() if key.startswith("kvs:") and not key.endswith(":epoch")]


@contextmanager
def a_store(owner_bytes: int = 128 << 20, lease_s: int = 1) -> Iterator[Store]:
    """Run a store; skips the test where Mooncake is missing."""
    require_mooncake()
    store = Store(owner_bytes, lease_s)
    try:
        store.master.start()
        for owner in store.owners:
            owner.start()
        yield store
    finally:
        for process in (store.admin, *store.owners, store.master):
            process.kill()
