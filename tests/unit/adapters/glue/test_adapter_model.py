"""Random schedules against a model of what every block must hold: no byte is wrong, and nothing is left behind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_parts import BLOCK, CHUNK, GARBAGE, Setup
from support.fake_vllm import FakeVllm
from support.gate import Gate
from support.late_device import LateDevice
from support.random_client import RandomClient
from support.remote import FakeServer
from support.schedules import schedules

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.model.errors import TierError
from kvstore.ops import metrics
from kvstore.paged import device as device_module
from kvstore.paged import places as places_module
from kvstore.transfer import layerwise

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
    names_layers_early=st.sampled_from([False, False, True]),
    seed=st.integers(0, 2**32),
    server=st.sampled_from([False, True]).map(lambda shared: FakeServer() if shared else None),
)


# On a device whose work is done as late as allowed, so that unordered work gives wrong bytes.
LATE_SETUPS = st.builds(
    replace,
    SETUPS,
    eagerness=st.sampled_from([0.1, 0.4, 0.6]),
    overwrites_early=st.booleans(),
    hot_slots=st.sampled_from([0, 2, 8]),
    async_save=st.sampled_from([True, True, False]),
    local_cpu=st.sampled_from([True, True, False]),
    gpu_blocks=st.sampled_from([24, 40, 80]),  # few, so that they are soon reused by other requests
    budget=st.sampled_from([32, 100, 200]),  # enough chunks for a step to use all buffers several times
    staging_chunks=st.sampled_from([1, 1, 2]),
    copy_bytes=st.sampled_from([1, 100, 1 << 18]),
    copies=st.booleans(),
)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the launch buffers, so that they are soon reused, and let layers be read one by one."""
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)
    monkeypatch.setattr(places_module, "LAUNCHES", 2)
    monkeypatch.setattr(device_module, "MAX_BLOCKS", 8)


class _Client(RandomClient):
    """Client that also pins and retains prompts, and lets the engine sleep."""

    vllm: FakeVllm
    reset_preempts = 0.5

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.005:
            self.vllm.sleep()
        elif chance < 0.015 and self.vllm.late is not None:
            self.sleep(self.vllm.late)
        else:
            super().act()

    def wishes(self) -> RequestParams:
        return replace(
            super().wishes(),
            pin=self.random.choice([None, True, False]),
            retain_s=self.random.choice([None, None, 60.0, 0.001]),
            tags=self.random.choice([(), (("team", "red"),)]),
        )

    def sleep(self, device: LateDevice) -> None:
        """Let the engine give its device's memory away, and get it back later with other contents."""
        for request in self.alive():
            self.vllm.abort(request)
        weights = self.vllm.weights
        self.vllm.reset()
        if self.vllm.weights == weights:
            return  # a load is under way
        for worker in self.vllm.workers:
            assert worker.drain(30)
        assert device.is_idle
        for layers in self.vllm.caches:
            for layer in layers:
                layer[:] = GARBAGE


def assert_books_balance(vllm: FakeVllm) -> None:
    """Assert that the counts taken step by step equal the counts of the parts themselves."""
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


def _play(setup: Setup, *, with_faults: bool) -> None:
    vllm = FakeVllm(setup)
    try:
        vllm.take = lambda offered: offered if vllm.random.random() < 0.8 else vllm.random.randint(0, offered)
        _Client(vllm, with_faults=with_faults).play()
        assert_books_balance(vllm)
    except TierError:  # the engine stops: nothing else fails within a step that vLLM does not wait for
        assert setup.run_ahead
        assert vllm.late is not None
        assert sum(worker._counters().failed_copies for worker in vllm.workers)
        assert not vllm.wrong
    finally:
        vllm.close()


@schedules(12)
@given(setup=SETUPS)
def test_any_schedule_in_memory(setup: Setup) -> None:
    _play(setup, with_faults=False)


@schedules(12)
@given(setup=SETUPS, with_faults=st.booleans())
def test_any_schedule_with_a_disk_that_fails(setup: Setup, *, with_faults: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder)), with_faults=with_faults)


@schedules(12)
@given(setup=LATE_SETUPS, on_disk=st.booleans(), with_faults=st.booleans())
@pytest.mark.usefixtures("small_parts")
def test_any_schedule_on_a_device(setup: Setup, *, on_disk: bool, with_faults: bool) -> None:
    """Steps write, preempt, zero, copy, save, load, load by layer, sleep and reset, at times on a full device."""
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder) if on_disk else None), with_faults=with_faults)


@pytest.mark.parametrize("overwrites_early", [False, True])
def test_a_late_save_reads_blocks_before_others_get_them(*, overwrites_early: bool) -> None:
    """Cover a case that random schedules seldom reach: a preempted request's blocks are overwritten before its save."""
    vllm = FakeVllm(Setup(gpu_blocks=12, async_save=True, eagerness=0.0, overwrites_early=overwrites_early))
    prompt, other = list(range(2 * CHUNK + 1)), list(range(49, 49 - 2 * CHUNK - 1, -1))
    device, saves, gate = vllm.late, vllm.workers[0]._background, Gate()
    assert device is not None
    try:
        saves._stores.submit(gate)  # it waits for the device, which would do everything at once
        device.stalled = [saves._storer.paged.streams.current]  # type: ignore[attr-defined]
        request = vllm.add("first", prompt, max_tokens=5)
        vllm.step()
        blocks = set(request.tables[0])
        vllm.preempt(request)
        vllm.abort(request)
        vllm.forget_local()
        vllm.add("other", other, max_tokens=5)
        vllm.step()
        assert blocks & set(vllm.running[0].tables[0])
        device.run_unstalled()
        device.stalled = []
        gate.open()
        vllm.settle()
        vllm.forget_local()
        vllm.ask("again", prompt)
        device.run_all()
        assert vllm.loaded_tokens["again"] == 2 * CHUNK
        assert not vllm.wrong
    finally:
        gate.open()
        vllm.close()
