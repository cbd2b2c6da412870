"""The process that calls Mooncake, apart from the engine's.

Mooncake's calls cannot be cancelled, some keep Python's lock for minutes while its master is away, and its ``close``
crashes while another call runs. Here they stop no thread of an engine, and this process can be killed. It shares
memory with the engine, and carries out orders, one JSON object a line, each on one of its threads, while it can.

The memory begins with a page for each thread, which holds the epoch while it is read.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

PAGE_BYTES: Final = 4096
_BUFFER_BYTES: Final = 16 << 20  # of Mooncake's own, which nothing here uses
_BATCH_BYTES: Final = 8 << 20  # batches of larger objects take several times as long
_SHOWN_BYTES: Final = 64  # of an epoch, which has 16
NO_ROOM: Final = -200
TOO_SMALL: Final = -600
UNFINISHED: Final = -703
TRANSFER_FAILED: Final = -800  # Mooncake's code, also while the transfer still runs
Order = dict[str, Any]


def main() -> None:
    """Serve the engine at the other end of a socket, until it closes that."""
    link_fd, memory_fd, settings = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    with socket.socket(fileno=link_fd) as link:
        memory = mmap.mmap(memory_fd, 0)
        try:
            server = Server(link, memory, open_store(settings, memory), settings["protocol"])
        except Exception as error:  # noqa: BLE001 - of Mooncake or of the linker, all for the engine to report
            link.sendall(_line({"id": 0, "error": f"{type(error).__name__}: {error}"}))
            os._exit(1)
        server.run(settings["threads"])
        server.leave()
        os._exit(0)  # as Mooncake crashes if a call runs


def open_store(settings: Order, memory: mmap.mmap) -> Any:  # noqa: ANN401 - Mooncake has no types
    """Open Mooncake's client and register the memory with it.

    Raises:
        ImportError: the package, or a library that it needs, is missing.
        RuntimeError: Mooncake refuses.
    """
    host = settings["hostname"] or _own_address(*settings["master"])
    for name, value in (
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),  # or a master that is away costs 90 s before it is tried anew
        ("MC_TCP_BIND_ADDRESS", host),  # or the ports are open on all networks
    ):
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - after the variables

    store = MooncakeDistributedStore()
    master_host, master_port = settings["master"]
    place = f"[{master_host}]:{master_port}" if ":" in master_host else f"{master_host}:{master_port}"
    code = store.setup(
        host,
        settings["metadata_server"],
        0,  # memory is given once chunks move
        _BUFFER_BYTES,
        settings["protocol"],
        settings["devices"],
        place,
    )
    if code:
        raise RuntimeError(f"the client does not start, code {code}: is the master at {place} running?")
    code = store.register_buffer(_address(memory), len(memory))
    if code:
        raise RuntimeError(f"Mooncake does not register {len(memory):,} bytes of memory, code {code}")
    return store


class Server:
    """Orders under way. ``run`` belongs to one thread."""

    def __init__(self, link: socket.socket, memory: mmap.mmap, store: Any, protocol: str) -> None:  # noqa: ANN401
        self._link = link
        self._memory = memory
        self._base = _address(memory)
        self._store = store
        self._protocol = protocol
        self._lines = link.makefile("rb")
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._running = 0
        self._gives = False

    def run(self, threads: int) -> None:
        """Take orders until the engine is gone."""
        for number in range(threads):
            page = number * PAGE_BYTES
            threading.Thread(target=self._serve, args=(page,), name="kvstore-mooncake-call", daemon=True).start()
        self._answer({"id": 0})
        gone = select.poll()  # as all threads may hang
        gone.register(self._link, select.POLLRDHUP)
        gone.poll()

    def leave(self) -> None:
        """Take the memory that this process gave out of the store at once, unless a call runs, which would crash."""
        with self._lock:
            if self._gives and not self._running:
                self._store.close()

    def _serve(self, page: int) -> None:
        while True:
            with self._reading:  # by the thread that carries it out, as another one would first have to wake it
                line = self._lines.readline()
            if not line:
                return
            order = json.loads(line)
            with self._lock:
                self._running += 1
            try:
                answer = self._carry_out(order, page)
            except Exception as error:  # noqa: BLE001 - the engine reports it
                answer = {"error": f"{type(error).__name__}: {error}"}
            with self._lock:
                self._running -= 1
            self._answer({**answer, "id": order["id"]})

    def _answer(self, answer: Order) -> None:
        try:
            with self._lock:
                self._link.sendall(_line(answer))
        except OSError:  # the engine is gone
            os._exit(0)

    def _carry_out(self, order: Order, page: int) -> Order:
        """Carry out one order; returns Mooncake's codes, and the epoch if its key is given."""
        store, keys, epoch_key = self._store, order.get("keys", []), order["epoch_key"]  # empty to read none
        places = [self._base + at for at in order.get("at", [])]
        codes: list[int] = []
        match order["call"]:
            case "get":
                codes = _each(store.batch_get_into, store.get_into, keys, places, order["sizes"])
            case "ranges":
                codes = self._read(keys, places, order["parts"], is_all=order["is_all"])
            case "put":
                codes = _each(
                    self._put, lambda *one: self._put(*([each] for each in one))[0], keys, places, order["sizes"]
                )
            case "upsert":
                codes = _each(store.batch_upsert_from, store.upsert_from, keys, places, order["sizes"])
            case "remove":
                codes = store.batch_remove(keys, True)
            case "sweep":
                codes = [store.remove_by_regex(order["pattern"], True)]
            case "begin" | "renew" as call:
                text = order["epoch"].encode()
                self._memory[page : page + len(text)] = text
                write = store.put_from if call == "begin" else store.upsert_from  # the first of two puts counts
                codes = [write(order["key"], self._base + page, len(text))]
            case "exist":
                codes = store.batch_is_exist(keys)
            case "give":
                self._gives = True
                codes = [store.allocate_and_mount_segment(order["size"], self._protocol)["ret"]]
        if not epoch_key:
            return {"codes": codes}
        return {"codes": codes, **self._epoch(store.get_into(epoch_key, self._base + page, PAGE_BYTES), page)}

    def _read(self, keys: list[str], places: list[int], parts: list[list[list[int]]], *, is_all: bool) -> list[int]:
        """Read parts of objects; if they should be all of them, an object that has more is ``TOO_SMALL``.

        A byte behind the last part tells, which is refused if it is not there.
        """
        targets, offsets, asked = parts
        sizes = asked
        if is_all:
            targets = [[*one, 0] for one in targets]
            offsets = [[*one, sum(each)] for one, each in zip(offsets, asked, strict=True)]
            sizes = [[*one, 1] for one in asked]
        sides = ([[one] for one in side] for side in (targets, offsets, sizes))
        found = [lengths for ((*lengths,),) in self._store.get_into_ranges(places, [[key] for key in keys], *sides)]
        for lengths in found if is_all else ():
            behind = lengths.pop()
            if behind != TOO_SMALL:
                lengths[:] = [TOO_SMALL if behind == 1 and length > 0 else min(length, behind) for length in lengths]
        return [_code_of(*each) for each in zip(found, asked, strict=True)]

    def _put(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        """Store objects, or replace them; returns 0 for each, or the code of what failed.

        Sessions take half the time and a third of the processor time of the other calls, but cannot replace.
        One that fails is not revoked, or its memory could be another object's before its transfer ends.
        """
        store = self._store
        codes: list[int] = store.batch_put_session_start(keys, sizes)
        begun = [at for at, code in enumerate(codes) if code == 0]
        refused = [at for at, code in enumerate(codes) if code not in (0, NO_ROOM)]  # there is one, or it is being put
        if begun:
            parts = [[[side[at]] for at in begun] for side in (places, sizes)]
            sent = store.batch_put_from_multi_buffer_ranges([keys[at] for at in begun], *parts, [[0]] * len(begun))
            for at, length in zip(begun, sent, strict=True):
                codes[at] = 0 if length == sizes[at] else length if length < 0 else TRANSFER_FAILED
        if whole := [at for at in begun if codes[at] == 0]:
            for at, code in zip(whole, store.batch_put_session_end([keys[at] for at in whole]), strict=True):
                codes[at] = UNFINISHED if code else 0  # another put came before, for one; nothing runs any more
        if refused:
            some = [keys[at] for at in refused], [places[at] for at in refused], [sizes[at] for at in refused]
            for at, code in zip(refused, _each(store.batch_upsert_from, store.upsert_from, *some), strict=True):
                codes[at] = code
        return codes

    def _epoch(self, code: int, page: int) -> Order:
        """Return a code, and what the page holds if that is the length of an epoch."""
        text = self._memory[page : page + min(code, _SHOWN_BYTES)] if code > 0 else b""
        return {"epoch_code": code, "epoch": text.decode("ascii", "replace")}


def _each(
    batch: Callable[..., list[int]], one: Callable[..., int], keys: list[str], places: list[int], sizes: list[int]
) -> list[int]:
    """Call Mooncake for all objects in one call, or for each of them where that is faster."""
    if len(keys) > 1 and max(sizes) <= _BATCH_BYTES:
        return batch(keys, places, sizes)
    return [one(*each) for each in zip(keys, places, sizes, strict=True)]


def _code_of(lengths: list[int], asked: list[int]) -> int:
    """Return the bytes of all ranges of an object, or the code of those that failed, which may not hide another.

    A length that was not asked for says nothing of the transfer.
    """
    pairs = zip(lengths, asked, strict=True)
    failures = {length if length < 0 else TRANSFER_FAILED for length, size in pairs if length != size}
    if not failures:
        return sum(lengths)
    return failures.pop() if len(failures) == 1 else TRANSFER_FAILED


def _line(answer: Order) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _own_address(host: str, port: int) -> str:
    """Return the address from which a host is reached."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as knocking:
        knocking.connect(place)
        return str(knocking.getsockname()[0])


if __name__ == "__main__":
    main()
