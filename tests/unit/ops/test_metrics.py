"""Tallies, totals and metrics made of them: every number adds up."""

from __future__ import annotations

from pathlib import Path

from kvstore.index.entries import Departed
from kvstore.index.plans import MissReason
from kvstore.ops import metrics
from kvstore.ops.metrics import METRICS, Meter, MetricKind, Tally, Totals, split_key


class TestTally:
    def test_ranks_add_up(self) -> None:
        one, other = Tally(), Tally()
        for tally, source in ((one, "a"), (other, "b")):
            tally.count(metrics.MOVED_BYTES.key("disk", "load"), 10)
            tally.observe(metrics.LOAD_SECONDS.key(), [0.5])
            tally.show(metrics.DISK_USED_BYTES.key(), 7, source)
            tally.show(metrics.BREAKER_STATE.key("disk"), 2 if source == "b" else 0, source)
        one.add(other)
        assert one.counters == {"moved_bytes|disk|load": 20}
        assert one.samples == {"load_seconds": [0.5, 0.5]}
        assert one.levels() == {"disk_used_bytes": 14, "breaker_state|disk": 2}

    def test_of_one_source_the_last_word_counts(self) -> None:
        sums, later = Tally(), Tally()
        sums.show(metrics.DISK_USED_BYTES.key(), 7, "a")
        later.show(metrics.DISK_USED_BYTES.key(), 3, "a")
        sums.add(later)
        assert sums.levels() == {"disk_used_bytes": 3}

    def test_times_that_nobody_takes_are_bounded(self) -> None:
        tally = Tally()
        for _ in range(3):
            tally.observe(metrics.LOAD_SECONDS.key(), [0.1] * 2000)
        assert len(tally.samples["load_seconds"]) == metrics.MAX_SAMPLES

    def test_nothing_is_empty(self) -> None:
        tally = Tally()
        tally.count(metrics.LOOKUPS.key(), 0)
        tally.observe(metrics.LOAD_SECONDS.key(), [])
        assert not tally


def test_a_meter_gives_each_event_once() -> None:
    meter, tally = Meter(), Tally()
    for total in (3, 3, 10, 9, 12):  # 9: a difference of totals of two moments
        meter.advance({"lookups": total}, tally)
    assert tally.counters == {"lookups": 12}


def test_totals_show_every_counter_and_what_was_seen_of_the_rest() -> None:
    totals, tally = Totals(), Tally()
    tally.count(metrics.HIT_TOKENS.key("disk"), 512)
    tally.observe(metrics.TIER_CALL_SECONDS.key("disk", "load"), [1.0, 3.0])
    tally.show(metrics.USED_SLOTS.key(), 4)
    totals.add(tally)
    totals.add(tally)
    tree = totals.as_tree()
    assert tree["hit_tokens"] == {"memory": 0, "disk": 1024, "remote": 0}
    assert tree["used_slots"] == 4
    assert tree["tier_call_seconds"] == {"disk": {"load": {"count": 4, "mean_s": 2.0, "max_s": 3.0}}}
    assert {metric.name for metric in METRICS.values() if metric.kind is MetricKind.COUNTER} <= tree.keys()


def test_keys_can_be_split() -> None:
    for metric in METRICS.values():
        for values in metric.known_values(["red"]):
            assert len(values) == len(metric.labels)
            assert split_key(metric.key(*values)) == (metric, values)


def test_departed_is_bounded_and_forgets_the_oldest() -> None:
    departed = Departed(max_keys=2)
    for key, reason in ((b"a", MissReason.EVICTED), (b"b", MissReason.LOST), (b"a", MissReason.REMOVED)):
        departed.note(key, reason)
    departed.note(b"c", MissReason.EVICTED)
    assert len(departed._young) + len(departed._old) == 2
    assert [departed.reason(key) for key in (b"a", b"b", b"c")] == [MissReason.REMOVED, None, MissReason.EVICTED]


class TestDocumentation:
    PAGE = (Path(__file__).parents[3] / "docs/operations.md").read_text()

    def test_the_list_is_the_code(self) -> None:
        from support.doc_tables import metric_list, section

        assert section("operations.md", "metrics") == metric_list("vllm:kvstore_")

    def test_every_reason_is_explained(self) -> None:
        explained = [line.split("`")[1] for line in self.PAGE.splitlines() if line.startswith("- `")]
        assert {reason.value for reason in MissReason} <= set(explained)
