"""The engine against a model: any calls in any order, and shortened runs that once failed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine_machine import FAMILIES, LAYERS, EngineMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_the_engine_against_a_model() -> None:
    profile = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(EngineMachine, settings=profile)


@pytest.mark.soak
def test_the_engine_against_a_model_for_long() -> None:
    profile = settings(max_examples=3000, stateful_step_count=50, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(EngineMachine, settings=profile)


# Shortened runs that once failed

ONE = FAMILIES[0][:32]


@contextmanager
def machine(**start: Any) -> Iterator[EngineMachine]:
    machine = EngineMachine()
    chosen = {"slots": 6, "hot_slots": 6, "local_cpu": True, "has_disk": False, "reads_layers": True, **start}
    machine.start(**chosen)
    yield machine
    machine.what_was_put_belongs_to_the_epoch()
    machine.the_index_is_consistent()
    machine.the_index_is_consistent()
    machine.teardown()


@pytest.mark.parametrize("how", ["sequence", "condemn"])
def test_copies_on_the_device_end_with_their_chunks(how: str) -> None:
    with machine() as run:
        run.store(ONE, loads=3)
        run.remove(ONE, how, loads=3)


def test_a_load_given_up_leaves_no_copy_on_the_device() -> None:
    with machine() as run:
        run.store(ONE)
        for _ in range(3):
            run.begin_load(ONE, advances=2)
            run.abandon(run.loading[0])
        run.retrieve(ONE)


@pytest.mark.parametrize("place", ["remote", "disk"])
def test_a_write_overtaken_by_new_weights_stores_nothing(place: str) -> None:
    with machine(has_disk=True) as run:
        run.trouble(place, "hold put", [0])
        run.store(ONE)
        run.trouble(place, "remove", [0, 0, 0])
        run.reset()
        run.trouble(place, "go on", [0])
        run.retrieve(ONE)


def test_what_was_found_wrong_is_removed_though_the_clear_behind_it_fails() -> None:
    with machine(hot_slots=0) as run:
        for _ in range(20):  # threads decide if the removal still waits
            run.trouble("remote", "clear", [0])
            run.store(ONE)
            run.remove(ONE, "condemn")
            run.clear()
            run.retrieve(ONE)


@pytest.mark.parametrize("how", ["sequence", "all", "weights"])
@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_layered_load_ends_with_what_it_loads(how: str, local_cpu: bool) -> None:
    with machine(has_disk=True, local_cpu=local_cpu) as run:
        run.store(ONE)
        run.begin_load(ONE, advances=2)
        run.remove(ONE, how, loads=0)
        run.advance_load(run.loading[0], LAYERS)
