"""The index against a model: random plans, in any order, some of them failing, with a simulated pool and disk."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test
from support.index_machine import IndexMachine
from support.schedules import schedule_settings


@pytest.mark.schedules
def test_index_against_a_model() -> None:
    run_state_machine_as_test(IndexMachine, settings=schedule_settings(50, stateful_step_count=30))
