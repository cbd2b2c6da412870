"""Replay by runs of chunks: it counts what a replay chunk by chunk counts."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policies import open_policy
from kvstore.policies.simulation import SimulatedStore, TierCounts, best_hits
from kvstore.tools.simulate.cells import Scale, Trace, replay
from kvstore.tools.simulate.runs import BY_RUNS, BestRuns, Forest

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

Chain = tuple[bytes, ...]
Request = tuple[Chain, int | None]


def talks(seed: int, num_requests: int) -> Iterator[Request]:
    """Yield requests of conversations that share stems, go on, branch, end, and are repeated."""
    chooser = random.Random(seed)
    known: list[Chain] = [()]
    for number in range(num_requests):
        before = chooser.choice(known[-8:] if chooser.random() < 0.7 else known)
        kept = before[: chooser.randint(0, len(before))] if chooser.random() < 0.2 else before
        own = chooser.choice((0, 0, 1, 2, 5, 30)) or (not kept)
        chain = (*kept, *(number.to_bytes(4, "big") + place.to_bytes(2, "big") for place in range(own)))
        known.append(chain if chooser.random() < 0.9 else ())
        yield chain, chooser.choice((None, 5, 5, 100, 5_000))


def by_chunks(requests: Sequence[Request], policy: str, capacity: int) -> TierCounts:
    store = SimulatedStore([open_policy(policy, capacity)])
    for chain, answer_tokens in requests:
        store.request(chain, [1] * len(chain), answer_tokens)
    counts = store.tiers[0].counts
    counts.hit_bytes = counts.written_bytes = 0  # runs count chunks only
    return counts


def assert_counts_are_equal(requests: Sequence[Request], capacity: int) -> None:
    chains = [chain for chain, _ in requests]
    forest = Forest.of(chains)
    assert forest is not None
    for policy, kind in BY_RUNS.items():
        tier = kind(forest, capacity)
        for number, (_, answer_tokens) in enumerate(requests):
            tier.request(number, answer_tokens)
        assert tier.counts == by_chunks(requests, policy, capacity), policy
    best = BestRuns(forest, capacity)
    for number in range(len(requests)):
        best.request(number, None)
    assert best.counts.hit_chunks == best_hits(chains, [[1] * len(chain) for chain in chains], capacity)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 20), num_requests=st.integers(1, 300), capacity=st.integers(1, 300))
def test_runs_count_what_chunks_count(seed: int, num_requests: int, capacity: int) -> None:
    assert_counts_are_equal(list(talks(seed, num_requests)), capacity)


def test_long_experience_and_few_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are updated many times, and old keys are forgotten."""
    for module in ("kvstore.policies.adaptive", "kvstore.policies.base", "kvstore.tools.simulate.runs"):
        monkeypatch.setattr(f"{module}.MIN_GHOSTS", 200)
    requests = list(talks(7, 4_000))
    for capacity in (20, 150):
        assert_counts_are_equal(requests, capacity)


def test_a_tenth_of_a_fleet_of_agents() -> None:
    path = TRACES / "claude_code_fleet.jsonl.xz"
    if not path.exists():
        pytest.skip(f"the trace is not beside the checkout: no {path.name} in ../shared/traces")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line, _ in zip(file, range(4_469), strict=False)]
    requests = [
        (tuple(block.to_bytes(8, "little") for block in line["hash_ids"][7::8]), line["output_length"])
        for line in lines
    ]
    assert_counts_are_equal([request for request in requests if request[0]], 250)


def test_keys_that_do_not_name_prefixes_are_replayed_chunk_by_chunk() -> None:
    chains: list[Chain] = [(b"a", b"b"), (b"c", b"b"), (b"a", b"b")]
    trace = Trace("trace", chains, [[1] * 2] * 3, [None] * 3)
    assert trace.forest is None
    cell = replay(trace, "LRU", 10, disk=None, scale=Scale(), tick=lambda _: None)
    assert cell.tiers[0]["hit_chunks"] == 2
    assert Forest.of([(b"a", b"a")]) is None
