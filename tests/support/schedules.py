"""Number of random schedules that a test tries: some in every run, few in a quick one, thousands in ``make soak``.

A schedule that has failed is kept as an ``@example`` of its test, so that the next run need not find it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = 20
SOAK_EXAMPLES = 2_000
QUICK_SHARE = 4
SOAK_TIMEOUT_S = 4 * 3600
_QUIET = (
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
)

Test = TypeVar("Test", bound=Callable[..., Any])

# Defaults of a test: examples enough for a run, and no report of the time of one.
for _profile, _examples in (("suite", 40), ("quick", 10)):
    settings.register_profile(
        _profile, max_examples=_examples, deadline=None, suppress_health_check=_QUIET, print_blob=True
    )


class _Mode:
    """Mode of this run; set before any test is collected."""

    is_soak = False
    is_quick = False


def begin(*, is_soak: bool, is_quick: bool) -> None:
    """Decide how many schedules are tried, before any test is collected. In a soak they are thousands."""
    _Mode.is_soak, _Mode.is_quick = is_soak, is_quick and not is_soak
    settings.load_profile("quick" if _Mode.is_quick else "suite")


def schedule_settings(examples: int = EXAMPLES, **others: Any) -> settings:
    """Return Hypothesis's settings, for state machines, which take no decorator. Mark their test ``schedules``."""
    wanted = max(1, examples // QUICK_SHARE) if _Mode.is_quick else examples
    return settings(
        max_examples=SOAK_EXAMPLES if _Mode.is_soak else wanted,
        deadline=None,
        suppress_health_check=_QUIET,
        print_blob=True,
        **others,
    )


def schedules(examples: int = EXAMPLES) -> Callable[[Test], Test]:
    """Decorate a test, above ``@given``: as many random examples, or thousands in a soak, which it joins then."""

    def decorate(test: Test) -> Test:
        marked: Test = pytest.mark.schedules(schedule_settings(examples)(test))
        return marked

    return decorate


def seeds(some: int) -> range:
    """Return seeds for tests that draw by themselves: as many, or a hundred times as many in a soak."""
    return range(100 * some if _Mode.is_soak else some)


def join_soak(item: pytest.Item) -> None:
    """Make a test that tries random schedules a part of the soak, with time for thousands."""
    if item.get_closest_marker("schedules") and _Mode.is_soak:
        item.add_marker("soak")
        item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))
