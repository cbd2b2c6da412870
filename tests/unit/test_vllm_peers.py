"""Engines that read each other's servers, over real sockets; `support/fake_vllm.py` checks every token's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from support.fake_vllm import BLOCK, CHUNK, FakeVllm, Setup
from support.redis_server import free_port

from kvstore.errors import ConfigError
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server import ServerTier

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
OTHER = [token + 1 for token in PROMPT]

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes engines, which live beside each other until the end of the test."""
    engines: list[FakeVllm] = []

    def build_(**setup: object) -> FakeVllm:
        engines.append(FakeVllm(Setup(**setup)))  # type: ignore[arg-type]
        return engines[-1]

    yield build_
    for engine in engines:
        engine.settle()
        engine.assert_nothing_leaked()
        engine.close()


def url_of(vllm: FakeVllm) -> str:
    return f"kvs://127.0.0.1:{vllm.setup.port}"


def loaded(vllm: FakeVllm, name: str, prompt: list[int] = PROMPT) -> int:
    """Ask with vLLM's own cache empty; how many tokens were loaded?"""
    vllm.forget_local()
    vllm.ask(name, prompt)
    return vllm.loaded_tokens[name]


def filled(build: Build, **setup: object) -> FakeVllm:
    """An engine with a server, which has all of the prompt."""
    vllm = build(port=free_port(), **setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    return vllm


@pytest.mark.parametrize("setup", [{}, {"ranks": 3}, {"ranks": 2, "replicas": True}, {"stages": (2, 40)}])
@pytest.mark.parametrize("beside", [False, True])
def test_each_rank_reads_its_part_from_the_same_rank(build: Build, setup: dict[str, object], *, beside: bool) -> None:
    engine = filled(build, **setup)
    reader = build(peers=(url_of(engine),), beside=beside, **setup)
    assert loaded(reader, "first") == WHOLE
    for worker in reader.workers:
        assert worker._counters().chunks_loaded_from_remote == 4
    assert loaded(reader, "again") == WHOLE, "from its own memory now"


def test_an_engine_finds_in_its_own_server_what_it_has_no_room_for(build: Build) -> None:
    engine = filled(build, ranks=2, local_cpu=False)
    assert loaded(engine, "again") == WHOLE
    assert engine.workers[1]._counters().chunks_loaded_from_remote == 4


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_only_passes_through_is_lent_by_its_own_server(build: Build, *, layerwise: bool) -> None:
    """Then no slot has it; layer by layer it goes through slots."""
    engine = filled(build, local_cpu=False, layerwise=layerwise)
    engine.workers[0]._tiers.cpu.clear()  # what was stored passed through slots, which still have it
    assert loaded(engine, "again") == WHOLE
    assert any(label is not None for label in engine.workers[0]._tiers.cpu._labels) is layerwise


def test_a_chunk_that_one_rank_lacks_is_not_there(build: Build) -> None:
    engine = filled(build, ranks=2)
    reader = build(ranks=2, peers=(url_of(engine),))
    facts = engine.workers[1].facts()
    tier = ServerTier.open(TierSetup(facts.namespace, facts.layout, UNBOUNDED_BYTES, {"url": facts.server_url}))
    tier.clear()
    tier.close()
    assert loaded(reader, "first") == 0


def test_an_engine_with_other_shards_is_a_stranger(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = filled(build, stages=(2, 2))
    reader = build(stages=(2, 40), peers=(url_of(engine),))
    assert loaded(reader, "first") == 0
    assert loaded(reader, "own") == WHOLE
    assert "they differ in layout" in caplog.text


class TestNamedByRequests:
    def test_it_is_read_from_then_on(self, build: Build) -> None:
        engine = filled(build, ranks=2)
        reader = build(ranks=2, peers=())
        assert loaded(reader, "before", OTHER) == 0
        reader.scheduler.note_peer(url_of(engine))
        assert loaded(reader, "after") == WHOLE

    def test_an_engine_that_borrowed_from_its_own_server_reads_it(self, build: Build) -> None:
        """What peers have is copied, so nothing is borrowed any more."""
        engine = filled(build)
        reader = filled(build, local_cpu=False)
        assert loaded(reader, "own") == WHOLE
        engine.ask("other", OTHER)
        engine.settle()
        assert loaded(reader, "before", OTHER) == 0
        reader.settle()
        reader.scheduler.clear()
        for worker in reader.workers:
            worker._mover.clear()
        reader.scheduler.note_peer(url_of(engine))
        assert loaded(reader, "after", OTHER) == WHOLE
        assert not reader.recovered

    def test_workers_are_told_once_each_time_it_is_named(self, build: Build) -> None:
        reader = build(peers=())
        urls = [f"kvs://127.0.0.1:{port}" for port in range(1, 30)]
        for url in [*urls, urls[-1]]:
            reader.scheduler.note_peer(url)
        plans = [reader.scheduler.plan_step({}, lambda _: []) for _ in range(2)]
        assert plans[0].peers == tuple(urls[-16:])
        assert plans[1].peers == ()

    def test_addresses_that_are_none(self, build: Build) -> None:
        with pytest.raises(ConfigError, match="kvs://host:port"):
            build(peers=()).scheduler.note_peer("http://localhost:80")

    def test_without_peers_it_has_no_effect(self, build: Build) -> None:
        engine = filled(build)
        reader = build()
        reader.scheduler.note_peer(url_of(engine))
        assert reader.scheduler.plan_step({}, lambda _: []).peers == ()


def test_new_weights(build: Build) -> None:
    """The engine itself goes on with its server; nobody else reads it any more, whose weights may be the old ones."""
    engine = filled(build, ranks=2, local_cpu=False)
    reader = build(ranks=2, peers=(url_of(engine),))
    engine.reset(preempt=True)
    assert loaded(engine, "new") == 0
    engine.settle()
    assert loaded(engine, "again") == WHOLE
    assert loaded(reader, "old") == 0


def test_the_reader_has_new_weights(build: Build) -> None:
    engine = filled(build)
    reader = build(peers=(url_of(engine),))
    assert loaded(reader, "old") == WHOLE
    reader.reset(preempt=True)
    assert loaded(reader, "new") == 0
    assert loaded(engine, "own") == WHOLE


@pytest.mark.parametrize(("min_tokens", "fetched"), [(0, CHUNK), (CHUNK, CHUNK), (CHUNK + 1, 0)])
def test_what_peers_would_add_must_be_worth_it(build: Build, min_tokens: int, fetched: int) -> None:
    reader = build(peers=(), min_remote_tokens=min_tokens, save_tails=False)
    reader.ask("own", PROMPT[: CHUNK + 1])
    engine = build(port=free_port(), save_tails=False)
    engine.ask("first", PROMPT[: 2 * CHUNK + 1])
    engine.settle()
    reader.scheduler.note_peer(url_of(engine))
    assert loaded(reader, "more", PROMPT[: 2 * CHUNK + 1]) == CHUNK + fetched


@pytest.mark.parametrize("seed", range(3))
def test_two_engines_that_read_each_other(build: Build, seed: int) -> None:
    """With pools that hold a part of it only, random prefixes, aborts and a change of weights."""
    random, ports = Random(seed), (free_port(), free_port())
    engines = [
        build(port=mine, peers=(f"kvs://127.0.0.1:{other}",), slots=8, seed=seed, beside=None, run_ahead=seed)
        for mine, other in (ports, ports[::-1])
    ]
    prompts = [[kind] * CHUNK + [kind * 7 + number for number in range(3 * CHUNK)] for kind in range(1, 6)]
    for number in range(60):
        vllm = engines[random.randrange(2)]
        request = vllm.add(f"request {number}", random.choice(prompts)[: random.randrange(2, 4 * CHUNK)], max_tokens=3)
        if random.random() < 0.2:
            vllm.step()
            vllm.abort(request)
        if random.random() < 0.5:
            vllm.run()
        if random.random() < 0.3:
            vllm.forget_local()
        if number == 40:
            vllm.run()
            vllm.reset(preempt=True)
    for vllm in engines:
        vllm.run()
    pulled = sum(worker._counters().chunks_loaded_from_remote for vllm in engines for worker in vllm.workers)
    assert pulled > 5
