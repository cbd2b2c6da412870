"""Tests of samples and rates: restarts, gaps, series that come and go, reports of other versions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.tools.live import Course, Sample, Series, figures, kind_of

READ, CLIENTS = "kvstore_server_read_chunks_total", "kvstore_server_clients"
FOUND, MISSING = "kvstore_server_found_chunks_total", "kvstore_server_missing_chunks_total"


def page(at_s: float, *lines: tuple[str, dict[str, str], float]) -> Sample:
    return Sample.of_page(at_s, lines)


def reads(at_s: float, **by_namespace: float) -> Sample:
    return page(at_s, *((READ, {"namespace": name}, value) for name, value in by_namespace.items()))


def space(name: str, found: int, **more: Any) -> dict[str, Any]:
    held = {"chunks": 3, "used_bytes": 4096, "clients": 1}
    counters = {"found_chunks": found, "missing_chunks": 1}
    return {"id": name, "fields": {"model": "m"}, "tenant": "", **held, "counters": counters, **more}


def stats(at_s: float, uptime_s: float, *spaces: dict[str, Any]) -> Sample:
    tree = {"version": "0.1.0", "status": "ok", "uptime_s": uptime_s, "clients": 1, "leases": 0}
    return Sample.of_stats(at_s - 0.1, at_s, {**tree, "namespaces": list(spaces)})


def course(*samples: Sample) -> Course:
    found = Course()
    for sample in samples:
        found.add(sample)
    return found


class TestRates:
    def test_one_sample_has_none(self) -> None:
        assert course(reads(1.0, a=10)).rate(READ) is None

    def test_the_difference_counts(self) -> None:
        found = course(reads(1.0, a=10, b=1), reads(3.0, a=30, b=5))
        assert found.rate(READ) == 12.0
        assert found.rate(READ, namespace="b") == 2.0
        assert found.rate("kvstore_server_full_total") == 0.0

    def test_a_namespace_that_appears_or_disappears_does_not_count(self) -> None:
        assert course(reads(1.0, a=10, b=90), reads(2.0, a=11, c=1000)).rate(READ) == 1.0

    def test_time_that_stands_still(self) -> None:
        assert course(reads(1.0, a=10), reads(1.0, a=20)).rate(READ) is None

    def test_numbers_that_are_none(self) -> None:
        sample = page(1.0, (READ, {}, math.nan), (READ, {"namespace": "a"}, 2.0), ("python_gc_total", {}, 3.0))
        assert sample.total(READ) == 2.0
        assert list(sample.values) == [Series(READ, (("namespace", "a"),))]


class TestRestarts:
    def test_all_counters_fell(self) -> None:
        found = course(reads(1.0, a=10, b=5), reads(2.0, a=2))
        assert (found.restarts, found.rate(READ)) == (1, None)
        found.add(reads(3.0, a=6))
        assert (found.restarts, found.rate(READ)) == (1, 4.0)

    def test_one_counter_fell_as_a_server_forgets_namespaces(self) -> None:
        found = course(reads(1.0, a=10, b=5), reads(2.0, a=11, b=1))
        assert (found.restarts, found.rate(READ)) == (0, 1.0)

    def test_an_idle_process(self) -> None:
        assert course(reads(1.0, a=0), reads(2.0, a=0)).restarts == 0

    @pytest.mark.parametrize(
        ("uptimes", "restarts"),
        [((50.0, 51.0), 0), ((50.0, 0.5), 1), ((0.2, 1.2), 0)],
        ids=["goes on", "is another", "is young"],
    )
    def test_the_age_of_the_process_decides(self, uptimes: tuple[float, float], restarts: int) -> None:
        before, now = uptimes
        found = course(stats(1.0, before, space("a", 10)), stats(2.0, now, space("a", 3)))
        assert found.restarts == restarts

    def test_an_answer_that_takes_long(self) -> None:
        before = Sample.of_stats(1.0, 1.0, {"uptime_s": 10.0})
        assert course(before, Sample.of_stats(2.0, 6.0, {"uptime_s": 11.0})).restarts == 0
        assert course(before, Sample.of_stats(2.0, 6.0, {"uptime_s": 10.5})).restarts == 1

    def test_one_that_is_older_than_the_last_sample_s(self) -> None:
        """It was restarted in a long gap, and has run for longer than the other one had."""
        found = course(stats(0.0, 3.0, space("a", 10)))
        found.miss(10.0, "refused")
        found.add(stats(100.0, 60.0, space("a", 20)))
        assert (found.restarts, found.rate(FOUND)) == (1, None)


class TestGaps:
    def test_it_is_told_and_survived(self) -> None:
        found = course(reads(1.0, a=10), reads(2.0, a=12))
        found.miss(4.0, "refused")
        assert (found.error, found.gap_s, found.rate(READ)) == ("refused", 2.0, None)
        found.miss(5.0, "refused")
        assert found.gap_s == 3.0
        found.add(reads(6.0, a=20))
        assert (found.error, found.gap_s, found.restarts) == ("", 4.0, 0)
        assert found.rate(READ) == 2.0, "over the gap"
        found.add(reads(7.0, a=21))
        assert (found.gap_s, found.rate(READ)) == (0.0, 1.0)

    def test_before_any_sample(self) -> None:
        found = Course()
        found.miss(1.0, "refused")
        assert (found.gap_s, figures(found)) == (0.0, {})


class TestFigures:
    def test_a_server(self) -> None:
        found = figures(course(stats(1.0, 1.0, space("a", 1)), stats(2.0, 2.0, space("a", 4), space("b", 7))))
        assert (found["kind"], found["about"], found["uptime_s"]) == ("cache server", "kvstore 0.1.0, ok", 2.0)
        assert found["hit_rate"] == {"now": 1.0, "total": 11 / 13, "unit": "chunks"}
        assert [each["namespace"] for each in found["namespaces"]] == ["a", "b"]
        assert [each["hit_rate"]["now"] for each in found["namespaces"]] == [1.0, None]

    def test_namespaces_of_one_name_count_together(self) -> None:
        """One may have several geometries."""
        found = figures(course(stats(1.0, 1.0, space("a", 1), space("a", 5))))
        (only,) = found["namespaces"]
        assert (only["used_bytes"], only["chunks"]) == (8192, 6)

    def test_a_tenant_is_another_one_s(self) -> None:
        found = figures(course(stats(1.0, 1.0, space("a", 1), space("a", 5, tenant="t", used_bytes=1))))
        assert [(each["tenant"], each["chunks"]) for each in found["namespaces"]] == [("", 3), ("t", 3)]

    def test_a_report_for_a_client_that_may_see_no_more(self) -> None:
        sample = Sample.of_stats(1.0, 1.0, {"version": "0.1.0", "status": "ok", "namespaces": [space("a", 1)]})
        kind = kind_of(sample)
        assert kind is not None
        assert kind.name == "cache server"
        assert figures(course(sample))["tiers"] == {}

    def test_an_engine(self) -> None:
        def sample(at_s: float, hits: float, asked: float) -> Sample:
            labels = {"model_name": "m", "engine": "0"}
            return page(
                at_s,
                ("vllm:kvstore_lookups_total", labels, 5),
                ("vllm:kvstore_hit_tokens_total", {**labels, "tier": "disk"}, hits),
                ("vllm:kvstore_asked_tokens_total", labels, asked),
                ("vllm:kvstore_used_slots", labels, 6),
                ("vllm:kvstore_slots", labels, 8),
                ("vllm:kvstore_breaker_state", {**labels, "tier": "disk"}, 2),
                ("vllm:time_to_first_token_seconds_sum", labels, at_s),
                ("vllm:time_to_first_token_seconds_count", labels, 2 * at_s),
            )

        found = figures(course(sample(1.0, 10, 100), sample(2.0, 40, 140)))
        assert found["kind"] == "engine"
        assert found["hit_rate"] == {"now": 0.75, "total": 40 / 140, "unit": "tokens"}
        assert found["first_token_s"] == {"now": 0.5, "total": 0.5}
        assert found["tiers"] == {"memory": {"used": 6, "capacity": 8, "unit": "slots"}}
        assert found["states"] == {"tier disk": 2}
        assert found["flows"][0] == {"label": "found in disk", "unit": "tokens", "per_s": 30.0, "total": 40}

    @pytest.mark.parametrize("status", ["ok", "closing"])
    def test_a_server_that_drains_and_its_page(self, status: str) -> None:
        drains = status == "closing"
        report = Sample.of_stats(1.0, 1.0, {"version": "0.1.0", "status": status, "clients": 1})
        server = page(1.0, (CLIENTS, {}, 1.0), ("kvstore_server_draining", {}, float(drains)))
        assert [figures(course(sample))["draining"] for sample in (report, server)] == [drains, drains]

    @pytest.mark.parametrize("draining", [(), (0.0, 0.0), (0.0, 1.0)], ids=["earlier version", "none", "one of two"])
    def test_engines_of_which_one_drains(self, draining: tuple[float, ...]) -> None:
        lookups = ("vllm:kvstore_lookups_total", {"engine": "0"}, 1.0)
        told = [("vllm:kvstore_draining", {"engine": str(number)}, value) for number, value in enumerate(draining)]
        assert figures(course(page(1.0, lookups, *told)))["draining"] is any(draining)

    def test_a_page_of_something_else(self) -> None:
        assert kind_of(page(1.0, ("python_info", {}, 1.0))) is None
