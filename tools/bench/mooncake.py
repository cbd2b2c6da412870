"""Lines of the mooncake tier on a private store: a master, an owner of its memory, and plain calls of Mooncake.

python -m kvstore.tools.bench.mooncake MASTER_PORT BYTES              owns memory
python -m kvstore.tools.bench.mooncake MASTER_PORT CHUNKS CHUNK_BYTES    puts, gets or removes all chunks for each line
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.remote import Chunks
from kvstore.tools.bench.samples import Tick, alternating, require
from kvstore.tools.bench.servers import Child, child
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.processes import free_port, is_listening, running, wait_until

MOONCAKE: Final = (
    Subject("mooncake store", "Mooncake's put_from", "the tier's put, a chunk a call: copy, xxh3, epoch"),
    Subject("mooncake retrieve", "Mooncake's get_into", "the tier's get, a chunk a call: epoch, copy, xxh3 verified"),
)
_MARK: Final = "mooncake: "
_START_S: Final = 20.0
_SPARE_BYTES: Final = 64 << 20


def measure_mooncake(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store and retrieve on a private store, in alternation with Mooncake's own calls.

    Raises:
        ConfigError: Mooncake is not installed, or does not start.
    """
    layout, num_chunks = workbench.paged.layout, workbench.num_chunks
    chunks = Chunks(layout, num_chunks)
    room_bytes = 3 * num_chunks * (layout.slot_bytes + (1 << 16)) + _SPARE_BYTES
    with _store(room_bytes) as port:
        words = ("kvstore.tools.bench.mooncake", str(port), str(num_chunks), str(layout.slot_bytes))
        with (
            child(*words, mark=_MARK) as plain,
            closing(chunks.tier("mooncake", f"mooncake://127.0.0.1:{port}")) as tier,
        ):
            _require_word(plain, "ready")
            found = []
            for pair in alternating(rounds, tick):
                found.append(chunks.move(tier, lambda: _do(plain, "put"), lambda: _do(plain, "get"), pair))
                _do(plain, "remove")
    return move_lines(MOONCAKE, found, workbench)


def _do(plain: Child, word: str) -> None:
    plain.tell(word)
    require(plain.said() == word, f"Mooncake's own {word} failed")


def _require_word(process: Child, word: str) -> None:
    if process.said() != word:
        raise ConfigError(f"Mooncake does not start: {' '.join(process.complaint().splitlines()[-1:])}")


@contextmanager
def _store(room_bytes: int) -> Iterator[int]:
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ConfigError("Mooncake is not installed: pip install 'vllm-kvstore[mooncake]'")
    port, pages = free_port(), free_port()
    command: list[str | Path] = [
        Path(spec.origin).with_name("mooncake_master"),
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
    ]
    command += [f"--metrics_port={pages}", "--metrics_host=127.0.0.1"]
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: is_listening(port) or process.poll() is not None, _START_S, every_s=0.02)
        with child("kvstore.tools.bench.mooncake", str(port), str(room_bytes), mark=_MARK) as owner:
            _require_word(owner, "ready")
            yield port


def main() -> None:
    """Own memory of a store, or call Mooncake until the end of the input."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - in its own process only

    port, *sizes = map(int, sys.argv[1:])
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    store, segment = MooncakeDistributedStore(), sizes[0] if len(sizes) == 1 else 0
    require(store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", f"127.0.0.1:{port}") == 0, "setup")
    number, size = sizes if len(sizes) > 1 else (1, mmap.PAGESIZE)
    memory = mmap.mmap(-1, number * size)
    memory[:] = os.urandom(1 << 12) * (len(memory) >> 12)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    require(store.register_buffer(place, len(memory)) == 0, "no memory can be registered")
    print(f"{_MARK}ready", flush=True)
    for line in sys.stdin:
        for at in range(number):
            call, given = {
                "put": (store.put_from, (place + at * size, size)),
                "get": (store.get_into, (place + at * size, size)),
                "remove": (store.remove, (True,)),
            }[line.strip()]
            code = call(f"plain{at}", *given)
            require(code in (0, size), f"code {code}")
        print(f"{_MARK}{line.strip()}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
