"""Choice of the way to load a hit, by configuration and by measurement."""

from __future__ import annotations

import pytest

from kvstore.adapters.vllm.scheduler.choice import BRIEF_S, RETRY_EVERY, LoadChoice, LoadRules, StepClock, prefilled
from kvstore.index.plans import Place

MEMORY, DISK, REMOTE = ({place: 256} for place in Place)


def measured(choice: LoadChoice, *, load_s: float, compute_s: float, place: Place = Place.DISK) -> LoadChoice:
    """Let a choice learn the times of 256 tokens."""
    for _ in range(3):
        choice.loaded({place: 256}, load_s)
        choice.computed(256, compute_s)
    return choice


@pytest.mark.parametrize("async_load", [True, False])
def test_a_fixed_rule_holds_for_every_load(*, async_load: bool) -> None:
    choice = LoadChoice(LoadRules(async_load=async_load))
    for tokens in (MEMORY, DISK, REMOTE):
        assert choice.is_async(tokens, others_run=False) is async_load


@pytest.mark.parametrize(
    ("tokens", "rules", "others_run", "async_load"),
    [
        (DISK, LoadRules(), False, True),
        (REMOTE, LoadRules(), True, True),
        ({Place.MEMORY: 2560, Place.DISK: 16}, LoadRules(), False, True),
        (DISK, LoadRules(layerwise=True), False, False),
        (DISK, LoadRules(layerwise=True), True, True),
        (DISK, LoadRules(layerwise=True, runs_ahead=True), False, True),
        (MEMORY, LoadRules(), False, False),
        (MEMORY, LoadRules(runs_ahead=True), True, False),
    ],
)
def test_what_is_chosen_by_itself(
    tokens: dict[Place, int], rules: LoadRules, *, others_run: bool, async_load: bool
) -> None:
    assert LoadChoice(rules).is_async(tokens, others_run=others_run) is async_load


def test_a_long_load_from_memory_does_not_hold_up_others() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=BRIEF_S, compute_s=1.0, place=Place.MEMORY)
    assert not choice.is_async({Place.MEMORY: 128}, others_run=True)
    assert choice.is_async({Place.MEMORY: 512}, others_run=True)
    assert not choice.is_async({Place.MEMORY: 512}, others_run=False)


def test_what_is_faster_to_compute_is_computed_but_for_a_try_now_and_then() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=0.2, compute_s=0.1)
    assert [choice.declines(DISK, 256) for _ in range(2 * RETRY_EVERY)].count(False) == 2
    assert not choice.declines(MEMORY, 256), "nothing is known of memory"


@pytest.mark.parametrize(
    ("rules", "load_s"), [(LoadRules(), 0.05), (LoadRules(only_if_faster=False), 0.2)], ids=["faster", "not asked"]
)
def test_other_loads_are_done(rules: LoadRules, load_s: float) -> None:
    assert not measured(LoadChoice(rules), load_s=load_s, compute_s=0.1).declines(DISK, 256)


def test_a_chunk_is_carried_as_a_whole_and_must_be_worth_it() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=0.1, compute_s=0.4)
    assert not choice.is_slower(DISK, 80)
    assert choice.is_slower(DISK, 48)


def test_nothing_is_declined_before_enough_was_measured() -> None:
    choice = LoadChoice(LoadRules())
    for _ in range(2):
        choice.loaded(DISK, 9.0)
        choice.computed(256, 0.1)
    for _ in range(9):
        choice.computed(8, 0.1)  # decodes tell nothing about a prefill
    assert not choice.declines(DISK, 256)


def test_a_tier_that_recovers_is_used_again() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=0.2, compute_s=0.1)
    for _ in range(10):
        choice.loaded(DISK, 0.01)
    assert not choice.declines(DISK, 256)


def test_a_load_from_two_places_teaches_what_the_slower_one_takes() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=0.1, compute_s=1.0, place=Place.MEMORY)
    for _ in range(3):
        choice.loaded({Place.MEMORY: 2560, Place.REMOTE: 256}, 1.5)  # of which memory takes 1.0
    assert not choice.is_slower({Place.REMOTE: 480}, 256)
    assert choice.is_slower({Place.REMOTE: 544}, 256)
    assert choice.is_slower({Place.MEMORY: 1536, Place.REMOTE: 256}, 256), "both count"
    assert not choice.is_slower({Place.MEMORY: 2304}, 256)


def test_short_samples_tell_little() -> None:
    choice = measured(LoadChoice(LoadRules()), load_s=0.4, compute_s=0.1)
    for tokens, seconds in ((64, 0.2), (2560, 1.0), (64, 0.2)):  # the weights are read once a step
        choice.computed(tokens, seconds)
    assert choice.is_slower(DISK, 256)


@pytest.mark.parametrize(
    ("scheduled", "num_tokens"),
    [
        ([256], 256),
        ([1] * 64, 0),
        ([1] * 512, 0),
        ([4] * 128, 0),  # with drafts
        ([1] * 64 + [128], 0),
        ([1] * 64 + [2048], 2112),
        ([], 0),
    ],
)
def test_only_steps_of_prefill_teach_what_computing_takes(scheduled: list[int], num_tokens: int) -> None:
    assert prefilled(scheduled) == num_tokens


def test_steps_that_overlap_are_not_counted_twice() -> None:
    clock = StepClock()
    clock.planned(1, 10.0, 100)
    clock.planned(2, 10.5, 200)  # while the first runs
    assert clock.ended(1, 11.0) == (100, 1.0)
    assert clock.ended(2, 13.0) == (200, 2.0)
    clock.planned(3, 20.0, 300)
    assert clock.ended(3, 20.5) == (300, 0.5)
    assert clock.ended(3, 30.0) == (0, 0.0)


def test_steps_whose_end_nobody_hears_of_shift_nothing() -> None:
    clock = StepClock()
    clock.planned(1, 10.0, 0)
    clock.planned(2, 10.0, 0)
    clock.planned(3, 11.0, 100)
    assert clock.ended(3, 12.0) == (100, 1.0)
    clock.planned(4, 20.0, 0)
    clock.planned(5, 21.0, 500)
    assert clock.ended(5, 25.0) == (500, 4.0)
