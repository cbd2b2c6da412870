"""Calls to every kind of tier, while calls of the system fail, connections are cut, and files are damaged."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from support.cache_server import serving_tcp
from support.diskwork import bytes_on_disk
from support.failing_calls import FailingCalls
from support.redis_server import RedisServer, running
from support.relay import Relay
from support.tier_callers import Callers, patiently

from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN as LAYOUT
from kvstore.testing.harness import make_ref
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Tier, TierSetup
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.object.names import parse_place
from kvstore.tiers.object.tier import ObjectTier
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.server.tier import ServerTier
from soak.part import Batch, Do, Part

CALLERS: Final = 3
ROUNDS: Final = 12  # of a batch, every other one calm
CALLS: Final = 200  # of each caller in a round
_CUT_CALLS: Final = 20  # the same while connections are cut, as many of these calls wait for their deadline
_CAPACITY_BYTES: Final = 64 << 20
_FAILING_SHARE: Final = 0.05
_CUT_EVERY_S: Final = 0.2
_LATE_S: Final = 0.3
_RETRIES: Final = 64  # puts after which no file is left that could not be moved
_TIMEOUT_S: Final = 2.0
_DISKS: Final = {"disk": (1, "none"), "disks": (3, "none"), "coded disk": (1, "lz4")}  # folders, and the codec
_LOCAL: Final = (*_DISKS, "folder")
KINDS: Final = (*_LOCAL, *_LOCAL, *_LOCAL, "server", "redis")  # a batch of these two waits for timeouts


class Bench:
    """A tier with storage of its own, which can be made to fail.

    Args:
        kind: its name.
        open_tier: opens it for a namespace.
        seed: of all that is random about it.
        folders: those of its files, if they are here.
        relay: the way to its server, if it has one.
    """

    def __init__(
        self,
        kind: str,
        open_tier: Callable[[Namespace], Tier],
        seed: int,
        folders: Sequence[Path] = (),
        relay: Relay | None = None,
    ) -> None:
        self.kind = kind
        self.folders = folders
        self.relay = relay
        self.failing = FailingCalls(seed)
        self.dice = random.Random(seed)
        self.epoch = 0
        self._open_tier = open_tier
        self._seed = seed
        self.tier = open_tier(self.namespace)

    @property
    def namespace(self) -> Namespace:
        """Namespace of the present epoch."""
        first = Namespace({"model": f"soak {self._seed}"})
        return first.at_epoch(str(self.epoch)) if self.epoch else first

    def restart(self) -> None:
        """Open the tier again, in the present epoch."""
        self.tier.close()
        self.tier = self._open_tier(self.namespace)
        if isinstance(self.tier, BoundedTier):
            self.tier.scan()

    def chunk_files(self) -> list[Path]:
        """Return the files of chunks, as far as they lie in folders."""
        found = []
        for folder in self.folders:
            for path in sorted(folder.rglob("*")):
                is_chunk = path.suffix == ".safetensors" or parse_place(str(path.relative_to(folder))) is not None
                if is_chunk and path.is_file():
                    found.append(path)
        return found

    def damage(self) -> int:
        """Spoil some files of chunks; return their number."""
        paths = self.chunk_files()
        chosen = self.dice.sample(paths, min(len(paths), self.dice.randrange(4)))
        for path in chosen:
            data = bytearray(path.read_bytes())
            kind = self.dice.randrange(5)
            if kind == 0 and data:
                data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            elif kind == 1:
                del data[self.dice.randrange(len(data) + 1) :]
            elif kind == 2:
                data += self.dice.randbytes(4096)
            elif kind == 3:
                path.unlink()
                continue
            else:  # another chunk's file under this name
                data = bytearray(self.dice.choice([other for other in paths if other.exists()]).read_bytes())
            path.write_bytes(data)
        return len(chosen)


def work(bench: Bench, callers: Callers) -> None:
    """Let callers call in calm and in trouble, and settle after each."""
    for number in range(ROUNDS):
        if number % 2:
            _trouble(bench, callers)
        else:
            callers.round(bench.tier, CALLS)
        action = bench.dice.randrange(6)
        if action == 0:
            bench.restart()
        elif action == 1:
            patiently(bench.tier.clear)
            callers.enter(callers.all[0].epoch)
        elif action == 2:
            bench.epoch += 1
            patiently(partial(bench.tier.reset, bench.namespace))
            callers.enter(bench.epoch)
        elif action in (3, 4) and bench.damage():
            callers.doubt_all()
        callers.settle(bench.tier)
        if isinstance(bench.tier, BoundedTier):
            _retry(bench.tier)
            used_bytes, found_bytes = bench.tier.used_bytes, bytes_on_disk(*bench.folders)
            assert used_bytes == found_bytes, f"{used_bytes} bytes are counted, and {found_bytes} are on disk"
            assert used_bytes <= bench.tier.capacity_bytes


def _retry(tier: Tier) -> None:
    """Let folders look again at files they could not move, some in each put: those that damage took still count."""
    for part in tier.parts:
        for _ in range(_RETRIES):
            patiently(partial(part.put, []))


def _trouble(bench: Bench, callers: Callers) -> None:
    """Let callers call while the storage fails, and wait until it works again."""
    if bench.relay is None:
        with bench.failing.installed():
            bench.failing.share = _FAILING_SHARE
            callers.round(bench.tier, CALLS)
            bench.failing.share = 0.0
    else:
        with _cutting(bench.relay):
            callers.round(bench.tier, _CUT_CALLS)
        time.sleep(_LATE_S)  # what was under way may still end
        patiently(partial(bench.tier.contains, [make_ref(0)]))
    callers.doubt_all()


@contextmanager
def _cutting(relay: Relay) -> Iterator[None]:
    """End all connections through the relay, again and again."""
    is_over = threading.Event()

    def cut() -> None:
        while not is_over.wait(_CUT_EVERY_S):
            relay.aim(relay.target)

    thread = threading.Thread(target=cut, name="test-cutter")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tell(callers: Callers, bench: Bench, complaint: str) -> Batch:
    """Return the counts of all callers.

    Raises:
        AssertionError: no byte was wrong, but something else was.
    """
    counts = callers.counts()
    wrong = [text for caller in callers.all for text in caller.wrong]
    unexpected = [text for caller in callers.all for text in caller.unexpected] + ([complaint] if complaint else [])
    assert wrong or not unexpected, f"{bench.kind}: {len(unexpected)} answers, first {unexpected[0]}"
    faults = sum(bench.failing.failed.values()) if bench.relay is None else counts["errors"] + counts["failed"]
    assert wrong or faults or bench.relay is not None, f"{bench.kind}: no call of the system failed"
    notes = {f"on {bench.kind}": counts["calls"], "faults": faults, "hits": counts["hit"]}
    return Batch(counts["calls"], len(wrong), f"{bench.kind}: {wrong[0]}" if wrong else "", notes)


class Storage:
    """Storage of all batches: servers that go on, and a folder for each batch on disk."""

    def __init__(self, folder: Path, server_port: int, redis_port: int, relays: Sequence[Relay]) -> None:
        self._folder = folder
        self._relays = relays
        self._ports = server_port, redis_port

    @contextmanager
    def bench(self, seed: int) -> Iterator[Bench]:
        """Yield the bench of a batch, whose kind follows from the seed."""
        kind = KINDS[seed % len(KINDS)]
        folder = self._folder / str(seed)
        bench = self._disk(folder, seed, kind) if kind in _DISKS else self._remote(folder, seed, kind)
        try:
            yield bench
            patiently(bench.tier.clear)  # so that the next batch finds room
        finally:
            bench.tier.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _disk(self, folder: Path, seed: int, kind: str) -> Bench:
        number, codec = _DISKS[kind]
        folders = [folder / str(which) for which in range(number)]
        folder.mkdir()

        def open_tier(namespace: Namespace) -> Tier:
            tier = open_folders(folders, namespace, LAYOUT, _CAPACITY_BYTES, codec=codec)
            tier.scan()
            return tier

        return Bench(kind, open_tier, seed, folders)

    def _remote(self, folder: Path, seed: int, kind: str) -> Bench:
        if kind == "folder":
            folder.mkdir()
            return Bench(kind, partial(_open, ObjectTier, f"file://{folder}/kv"), seed, [folder / "kv"])
        number = ("server", "redis").index(kind)
        relay = self._relays[number]
        relay.aim(self._ports[number])
        scheme, tier = (("kvs", ServerTier), ("redis", RedisTier))[number]
        return Bench(kind, partial(_open, tier, f"{scheme}://127.0.0.1:{relay.port}"), seed, relay=relay)


def _open(kind: type[ObjectTier | ServerTier | RedisTier], url: str, namespace: Namespace) -> Tier:
    return kind.open(TierSetup(namespace, LAYOUT, UNBOUNDED_BYTES, {"url": url, "timeout_s": _TIMEOUT_S}))


def call(storage: Storage, seed: int) -> Batch:
    """Do a batch of calls to one kind of tier."""
    with storage.bench(seed) as bench:
        callers = Callers(CALLERS, LAYOUT, seed, knows_all=bench.kind != "folder")
        complaint = ""
        try:
            work(bench, callers)
        except AssertionError as error:
            complaint = str(error)
        return tell(callers, bench, complaint)


@contextmanager
def opened(folder: Path) -> Iterator[Do]:
    """Yield batches of calls to one kind of tier after the other."""
    redis = RedisServer(folder / "redis")
    with ExitStack() as stack:
        stack.enter_context(running(redis))
        server = stack.enter_context(serving_tcp())
        assert server.hub.tcp_port is not None
        ports = server.hub.tcp_port, redis.port
        storage = Storage(folder, *ports, [stack.enter_context(Relay(port)) for port in ports])

        yield partial(call, storage)


PART = Part("operations", "calls to tiers, with faults", 1_000_000, opened)
