"""Random schedules of models with several groups: no wrong row or state, nothing left behind, no load tried twice."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_groups import FakeGroups, GroupSetup
from support.fake_tables import FakeGroup
from support.random_client import RandomClient
from support.remote import FakeServer
from support.schedules import schedules

from kvstore.model.groups import GroupKind
from kvstore.ops import metrics

FULL, WIDE = FakeGroup(GroupKind.FULL, 4), FakeGroup(GroupKind.FULL, 8)
WINDOW, LONG = FakeGroup(GroupKind.WINDOW, 4, 7), FakeGroup(GroupKind.WINDOW, 8, 21)
LOCAL = FakeGroup(GroupKind.LOCAL, 4, 12)
STATE, COARSE = FakeGroup(GroupKind.STATE, 4), FakeGroup(GroupKind.STATE, 8)

MODELS: dict[str, tuple[FakeGroup, ...]] = {
    "gptoss": (WINDOW, FULL),
    "gemma4": (LONG, FULL),
    "mistral": (WINDOW,),
    "llama4": (FULL, LOCAL),
    "local": (LOCAL,),
    "granite": (FULL, STATE),
    "coarse states": (FULL, COARSE),
    "mamba": (STATE,),
    "all": (FULL, COARSE, WINDOW, LOCAL),
    "two full": (FULL, WIDE),
}

# Layers of each group on each rank, by the number of groups: one rank, two with equal parts, or stages.
STAGES: dict[int, list[tuple[tuple[int, ...], ...]]] = {
    1: [((2,),), ((1,), (1,)), ((1,), (2,))],
    2: [((2, 2),), ((1, 1), (1, 1)), ((1, 2), (1, 0)), ((0, 1), (2, 2))],
    4: [((2, 2, 1, 1),), ((1, 1, 1, 1),) * 2, ((1, 0, 1, 0), (1, 1, 0, 1))],
}

MODEL_STAGES = st.sampled_from([(groups, stages) for groups in MODELS.values() for stages in STAGES[len(groups)]])

SETUPS = st.builds(
    lambda model, **others: GroupSetup(groups=model[0], stages=model[1], **others),
    MODEL_STAGES,
    chunk=st.sampled_from([8, 16, 16]),
    gpu_blocks=st.sampled_from([90, 140, 250]),
    slots=st.sampled_from([8, 20, 60]),
    local_cpu=st.sampled_from([True, True, False]),
    save_decode=st.booleans(),
    save_tails=st.booleans(),
    interval=st.sampled_from([0, 0, 24]),
    min_retrieve_tokens=st.sampled_from([0, 0, 10]),
    max_tokens_per_load=st.sampled_from([0, 0, 24]),
    max_write_queue=st.sampled_from([None, 1]),
    verify_fraction=st.sampled_from([0.0, 0.0, 0.5]),
    run_ahead=st.sampled_from([0, 1, 2]),
    budget=st.sampled_from([10, 32, 100]),
    async_save=st.booleans(),
    retention=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)

# On a device whose work is done as late as allowed, so that unordered work gives wrong bytes.
LATE_SETUPS = st.builds(
    replace,
    SETUPS,
    eagerness=st.sampled_from([0.1, 0.4, 0.6]),
    overwrites_early=st.booleans(),
    staging_bytes=st.sampled_from([1 << 12, 1 << 14]),
    copies=st.booleans(),
)


def _play(setup: GroupSetup, *, with_faults: bool) -> None:
    vllm = FakeGroups(setup)
    try:
        RandomClient(vllm, with_faults=with_faults).play()
        vllm.scheduler.take_tally()
        totals = vllm.scheduler.totals
        assert totals[metrics.VERIFIED_CHUNKS.key("mismatch")] == 0
        assert totals[metrics.STORED_CHUNKS.key()] == vllm.index.counters.stored
    finally:
        vllm.close()


@schedules(12)
@given(setup=SETUPS)
def test_any_schedule_in_memory(setup: GroupSetup) -> None:
    _play(setup, with_faults=False)


@schedules(12)
@given(setup=SETUPS, with_faults=st.booleans())
def test_any_schedule_with_a_disk_that_fails(setup: GroupSetup, *, with_faults: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder)), with_faults=with_faults)


@schedules(12)
@given(setup=SETUPS, with_faults=st.booleans(), min_remote_tokens=st.sampled_from([0, 20]))
def test_any_schedule_with_a_remote_tier(setup: GroupSetup, *, with_faults: bool, min_remote_tokens: int) -> None:
    setup = replace(setup, server=FakeServer(), min_remote_tokens=min_remote_tokens)
    _play(setup, with_faults=with_faults)


@schedules(12)
@given(setup=LATE_SETUPS, on_disk=st.booleans(), with_faults=st.booleans())
def test_any_schedule_on_a_device(setup: GroupSetup, *, on_disk: bool, with_faults: bool) -> None:
    """Steps write, preempt, zero and copy blocks, save, load, sleep and reset, with a full device at times."""
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder) if on_disk else None), with_faults=with_faults)


@pytest.mark.parametrize("num_tokens", [61, 63])
@pytest.mark.parametrize("chunk", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_asked_again_is_loaded_up_to_its_last_whole_blocks(model: str, chunk: int, num_tokens: int) -> None:
    groups, prompt = MODELS[model], [number * 7 % 50 for number in range(num_tokens)]
    vllm = FakeGroups(GroupSetup(groups=groups, stages=STAGES[len(groups)][-1], chunk=chunk, retention=0.0, budget=24))
    try:
        first = vllm.ask("first", prompt, max_tokens=6)
        vllm.settle()
        vllm.forget_local()
        again = vllm.ask("again", prompt, max_tokens=6)
        assert again.local + again.hit == (num_tokens - 1) // vllm.align * vllm.align
        assert again.all_token_ids == first.all_token_ids
        assert vllm.failures == 0
    finally:
        vllm.close()
