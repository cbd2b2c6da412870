"""Metrics of a server: the text, and its bounds."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvstore.server.exposition import Exposition
from kvstore.server.passes import Passes

COUNTERS = {"lookups": 3, "stored_chunks": 2}


def space(number: int, **others: object) -> dict[str, Any]:
    usual = {"id": f"{number:016x}", "tenant": "", "fields": {"model": f"model {number}"}}
    return {**usual, "chunks": 1, "used_bytes": 10, "clients": 0, "counters": COUNTERS, **others}


def tree(*spaces: dict[str, Any], passes: Passes | None = None) -> dict[str, Any]:
    memory = {"capacity_bytes": 100, "used_bytes": 50, "chunks": 5, "pinned_bytes": 20}
    counted = dict.fromkeys(("clients", "leases", "leased_bytes", "malformed", "refused", "disk_errors"), 7)
    rest = {"tiers": {"memory": memory}, "quotas": [], "denied": [], "namespaces": list(spaces)}
    return {"status": "ok", "passes": (passes or Passes()).tree(), **counted, **rest}


def samples(page: str, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"kvstore_server_{name}"
    }


def test_all_of_it_can_be_parsed() -> None:
    passes = Passes()
    for time_s in (0.0001, 0.0005, 0.003, 7.0):
        passes.note(time_s)
    odd = space(1, fields={"model": 'a"\\\n{}'}, tenant="team")
    page = Exposition().page(tree(odd, passes=passes), {"ok": 2, "refused": 1})
    assert samples(page, "namespace_chunks") == {(f"{1:016x}", 'a"\\\n{}', "team"): 1}
    assert samples(page, "reloads_total") == {("ok",): 2, ("refused",): 1}
    assert samples(page, "pinned_bytes") == {(): 20}
    assert [samples(page, name) for name in ("ready", "draining")] == [{(): 1}, {(): 0}]
    buckets = samples(page, "turn_seconds_bucket")
    assert [buckets[bound,] for bound in ("0.0005", "0.002", "0.004", "1.024", "+Inf")] == [2, 2, 3, 3, 4]
    assert samples(page, "turn_seconds_count") == {(): 4}
    page = Exposition().page({**tree(), "status": "closing"})
    assert [samples(page, name) for name in ("ready", "draining")] == [{(): 0}, {(): 1}]


def test_namespaces_beyond_the_bound_are_one() -> None:
    page = Exposition().page(tree(*map(space, range(300))))
    chunks = samples(page, "namespace_chunks")
    assert len(chunks) == 257
    assert chunks["other", ""] == 44
    assert len(samples(page, "lookups_total")) == 256, "a sum of counters could fall when one of them is gone"


def test_clients_that_change_their_namespaces_make_few_series() -> None:
    now_s = 0.0
    exposition = Exposition(lambda: now_s)
    names = set()
    for turn in range(100):
        page = exposition.page(tree(*map(space, range(100 * turn, 100 * turn + 100))))
        names |= {labels[0] for labels in samples(page, "namespace_chunks")}
    assert len(names) == 512 + 1
    now_s = 3601.0
    page = exposition.page(tree(space(10**6)))
    assert (f"{10**6:016x}", f"model {10**6}") in samples(page, "namespace_chunks")


def test_names_that_clients_give_are_short() -> None:
    page = Exposition().page(tree(space(1, fields={"model": "m" * 60_000})))
    assert max(map(len, re.findall('model="(m*)"', page))) == 128
