"""Random schedules against a model that knows what every block must hold: no wrong byte, and nothing left behind."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_parts import BLOCK, GARBAGE, LAYERS, FakeRequest, Setup
from support.fake_vllm import FakeVllm
from support.remote import FakeServer
from support.schedules import schedules

from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.errors import TierError
from kvstore.ops import metrics
from kvstore.paged import device as device_module
from kvstore.paged import places as places_module
from kvstore.transfer import layerwise

HEADER = 4096

SETUPS = st.builds(
    Setup,
    ranks=st.sampled_from([1, 1, 2]),
    replicas=st.booleans(),
    gpu_blocks=st.sampled_from([24, 40, 80]),
    slots=st.sampled_from([2, 5, 12, 30]),
    disk_chunks=st.sampled_from([3, 10, 60]),
    local_cpu=st.booleans(),
    save_decode=st.booleans(),
    save_tails=st.booleans(),
    skip_last_tokens=st.sampled_from([0, 0, 5]),
    verify_fraction=st.sampled_from([0.0, 0.0, 0.5]),
    priority_limit=st.sampled_from([None, 0]),
    min_retrieve_tokens=st.sampled_from([0, 0, 10]),
    max_tokens_per_load=st.sampled_from([0, 0, 2 * BLOCK, 21]),
    max_write_queue=st.sampled_from([None, 1]),
    run_ahead=st.sampled_from([0, 1, 2]),
    drafts=st.sampled_from([0, 0, 3]),
    budget=st.sampled_from([10, 32, 100]),
    defer_stores=st.booleans(),
    async_load=st.sampled_from([None, True, False]),
    async_save=st.booleans(),
    layerwise=st.booleans(),
    seed=st.integers(0, 2**32),
    server=st.sampled_from([False, True]).map(lambda shared: FakeServer() if shared else None),
)


# On a device whose work is done as late as it may be: what nobody puts in order comes out wrong.
LATE_SETUPS = st.builds(
    replace,
    SETUPS,
    eagerness=st.sampled_from([0.1, 0.4, 0.6]),
    overwrites_early=st.booleans(),
    hot_slots=st.sampled_from([0, 2, 8]),
    async_save=st.sampled_from([True, True, False]),
    local_cpu=st.sampled_from([True, True, False]),
    gpu_blocks=st.sampled_from([24, 40, 80]),  # few, so that they are taken away and given to others
    budget=st.sampled_from([32, 100, 200]),  # of chunks enough for a step to use all buffers several times
    staging_chunks=st.sampled_from([1, 1, 2]),
    copy_bytes=st.sampled_from([1, 100, 1 << 18]),
    copies=st.booleans(),
)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device is sent of each launch is soon overwritten by the next ones; layers are read one by one."""
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)
    monkeypatch.setattr(places_module, "LAUNCHES", 2)
    monkeypatch.setattr(device_module, "MAX_BLOCKS", 8)


class _Client:
    """Does at random what clients, operators and disks do."""

    def __init__(self, vllm: FakeVllm, *, with_faults: bool) -> None:
        self.vllm = vllm
        self.random = vllm.random
        self.with_faults = with_faults
        self.requests: list[FakeRequest] = []
        self.pinned: list[tuple[list[int], str, tuple[tuple[str, str], ...]]] = []
        stems = [[self.random.randrange(50) for _ in range(60)] for _ in range(2)]
        self.prompts = [[*stem[: self.random.randrange(1, 60)], self.random.randrange(50)] for stem in stems * 4]

    def act(self) -> None:
        """One random event."""
        chance = self.random.random()
        alive = [request for request in self.requests if request.state != "finished"]
        if chance < 0.35 and len(alive) < 6:
            self.send()
        elif chance < 0.40 and alive:
            self.vllm.abort(self.random.choice(alive))
        elif chance < 0.44 and self.vllm.running:
            victim = self.random.choice(self.vllm.running)
            self.vllm.preempt(victim)
        elif chance < 0.48:
            self.vllm.forget_local()
        elif chance < 0.49:
            self.vllm.reset(preempt=self.random.random() < 0.5)
        elif chance < 0.495:
            self.vllm.sleep()
        elif chance < 0.55 and self.with_faults and self.vllm.setup.folder is not None:
            self.break_a_file()
        elif chance < 0.58 and self.vllm.setup.server is not None:
            self.upset(self.vllm.setup.server)
        elif chance < 0.60:
            self.vllm.scheduler.enabled = self.random.random() < 0.6
        elif chance < 0.605:
            self.vllm.scheduler.call_soon(self.vllm.scheduler.clear)
        elif chance < 0.615 and self.vllm.late is not None:
            self.sleep(alive)
        elif chance < 0.63 and self.vllm.late is not None and self.with_faults:
            self.vllm.late.become_full(is_under_way=self.random.random() < 0.5)
        else:
            self.vllm.step()

    def send(self) -> None:
        done = [request for request in self.requests if request.state == "finished"]
        tokens = list(self.random.choice(self.prompts))
        if done and self.random.random() < 0.3:  # the next turn of a chat
            tokens = [*self.random.choice(done).all_token_ids, *tokens][:70]
        name = f"request {len(self.requests)}"
        salt = self.random.choice(["", "", "salt"])
        params = self.wishes()
        if params.pin:
            self.pinned.append((tokens, salt, params.tags))
        priority = self.random.randint(0, 1)
        max_tokens = self.random.randint(1, 12)
        request = self.vllm.add(name, tokens, max_tokens=max_tokens, salt=salt, priority=priority, params=params)
        self.requests.append(request)

    def wishes(self) -> RequestParams:
        if self.random.random() < 0.6:
            return NO_PARAMS
        return RequestParams(
            skip_save=self.random.random() < 0.2,
            skip_load=self.random.random() < 0.2,
            ttl_s=self.random.choice([None, 1e-6, 1000.0]),
            pin=self.random.choice([None, True, False]),
            tags=self.random.choice([(), (("team", "red"),)]),
        )

    def sleep(self, alive: list[FakeRequest]) -> None:
        """The engine gives its device's memory away, and gets it back later, with something else in it."""
        for request in alive:
            self.vllm.abort(request)
        weights = self.vllm.weights
        self.vllm.reset(preempt=True)
        if self.vllm.weights == weights:
            return  # a load is under way
        for worker in self.vllm.workers:
            assert worker.drain(30)
        assert self.vllm.late is not None
        assert self.vllm.late.is_idle
        for layers in self.vllm.caches:
            for layer in layers:
                layer[:] = GARBAGE

    def upset(self, server: FakeServer) -> None:
        """A server evicts what it likes, and fails, and recovers."""
        server.lose(ref for ref in server.all_chunks() if self.random.random() < 0.5)
        for call in ("before_contains", "before_get", "before_put"):
            fails = self.with_faults and self.random.random() < 0.3
            setattr(server, call, broken if fails else lambda: None)

    def break_a_file(self) -> None:
        files = self.vllm.chunk_files(self.random.randrange(len(self.vllm.workers)))
        if files:
            break_file(self.random.choice(files), self.random)


def assert_books_balance(vllm: FakeVllm) -> None:
    """What was counted on the way is what the parts themselves have counted."""
    vllm.scheduler.take_tally()
    totals, counters = vllm.scheduler.totals, vllm.index.counters
    hits = sum(totals[metrics.HIT_TOKENS.key(*tier)] for tier in metrics.HIT_TOKENS.values)
    assert hits <= totals[metrics.ASKED_TOKENS.key()]
    assert sum(totals[metrics.MISSES.key(*reason)] for reason in metrics.MISSES.values) <= totals[metrics.LOOKUPS.key()]
    assert totals[metrics.STORED_CHUNKS.key()] == counters.stored
    assert totals[metrics.FAILED_LOADS.key()] == counters.failed_loads
    assert totals[metrics.VERIFIED_CHUNKS.key("mismatch")] == 0
    gathered = sum(worker._counters().bytes_gathered for worker in vllm.workers)
    assert totals[metrics.MOVED_BYTES.key("memory", "store")] == gathered


def broken() -> None:
    raise TierError("broken on purpose")


def break_file(path: Path, chooser: random.Random) -> None:
    """Delete, cut or flip a chunk's file."""
    try:
        content = bytearray(path.read_bytes())
        how = chooser.randrange(3)
        if how == 0:
            path.unlink()
        elif how == 1 or len(content) <= HEADER:
            path.write_bytes(content[: len(content) // 2])
        else:
            content[HEADER + chooser.randrange(BLOCK * 8 * LAYERS)] ^= 0x40
            path.write_bytes(content)
    except FileNotFoundError:
        return  # it was evicted meanwhile


def _play(setup: Setup, *, with_faults: bool, events: int = 60) -> FakeVllm:
    vllm = FakeVllm(setup)
    try:
        client = _Client(vllm, with_faults=with_faults)
        vllm.take = lambda offered: offered if vllm.random.random() < 0.8 else vllm.random.randint(0, offered)
        for _ in range(events):
            client.act()
        vllm.scheduler.enabled = True
        if vllm.late is not None:
            vllm.late.failures.clear()
        vllm.settle()
        for prompt, salt, tags in client.pinned:
            vllm.ask("unpin", prompt, salt=salt, params=replace(WITHOUT_CACHE, pin=False, tags=tags))
        vllm.settle()
        vllm.assert_nothing_leaked()
        for prompt in client.prompts:  # all that is stored must still be right
            vllm.forget_local()
            vllm.ask("again", prompt)
        vllm.settle()
        vllm.assert_nothing_leaked()
        assert_books_balance(vllm)
    finally:
        vllm.close()
    return vllm


@schedules()
@given(setup=SETUPS)
def test_any_schedule_in_memory(setup: Setup) -> None:
    _play(setup, with_faults=False)


@schedules()
@given(setup=SETUPS, with_faults=st.booleans())
def test_any_schedule_with_a_disk_that_fails(setup: Setup, *, with_faults: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _play(Setup(**{**vars(setup), "folder": Path(folder)}), with_faults=with_faults)


@schedules()
@given(setup=LATE_SETUPS, on_disk=st.booleans(), with_faults=st.booleans())
@pytest.mark.usefixtures("small_parts")
def test_any_schedule_on_a_device(setup: Setup, *, on_disk: bool, with_faults: bool) -> None:
    """Writes, preemption, blocks zeroed and copied, saves, loads, by layer, sleep, resets, a full device."""
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder) if on_disk else None), with_faults=with_faults)
