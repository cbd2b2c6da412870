"""Engines that read each other's servers, over real sockets; `support/fake_vllm.py` checks every token's KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S

from kvstore.adapters.vllm.requests.params import Handover, Source
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server.tier import ServerTier
from kvstore.tools.processes import free_port

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
OTHER = [token + 1 for token in PROMPT]

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, which live side by side until the end of the test."""
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
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask(name, prompt)
    return vllm.loaded_tokens[name]


def filled(build: Build, **setup: object) -> FakeVllm:
    """Return an engine with a server, which has all of the prompt."""
    vllm = build(port=free_port(), **setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    return vllm


@pytest.mark.parametrize("setup", [{}, {"ranks": 3}, {"ranks": 2, "replicas": True}, {"stages": (2, 40)}])
@pytest.mark.parametrize("async_load", [False, True])
def test_each_rank_reads_its_part_from_the_same_rank(
    build: Build, setup: dict[str, object], *, async_load: bool
) -> None:
    engine = filled(build, **setup)
    reader = build(peers=(url_of(engine),), async_load=async_load, **setup)
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
    """No slot has it then; layer by layer it goes through slots."""
    engine = filled(build, local_cpu=False, layerwise=layerwise)
    engine.workers[0]._tiers.cpu.clear()  # chunks that were stored passed through slots, which still have them
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


class FakePeer(NamedTuple):
    """A port on which nothing listens."""

    port: int


def naming(engine: FakeVllm) -> Handover:
    """Return the hand-over parameters of a request that an engine has answered before."""
    return Handover(None, Source("127.0.0.1", engine.setup.port or 0, WHOLE))


def allowing(*engines: FakeVllm) -> dict[str, object]:
    """Return the options of an engine whose requests may name some others."""
    ports = {engine.setup.port for engine in engines}
    options = HandoverOptions(sends=True, receives=False, allows_source=lambda _, port: port in ports)
    return {"peers": (), "sources": tuple(map(url_of, engines)), "handover": options}


class TestNamedByRequests:
    @pytest.mark.parametrize("async_load", [False, True])
    @pytest.mark.parametrize("layerwise", [False, True])
    def test_it_is_read_for_the_request_that_names_it(self, build: Build, *, async_load: bool, layerwise: bool) -> None:
        engine = filled(build, ranks=2)
        reader = build(ranks=2, async_load=async_load, layerwise=layerwise, **allowing(engine))
        reader.ask("plain", PROMPT)
        assert reader.loaded_tokens["plain"] == 0, "a request that names nobody"
        reader.settle()
        reader.scheduler.clear()
        for worker in reader.workers:
            worker._mover.clear()
        reader.forget_local()
        reader.ask("names", PROMPT, handover=naming(engine))
        assert reader.loaded_tokens["names"] == WHOLE
        assert not reader.recovered

    def test_it_changes_nothing_for_others(self, build: Build) -> None:
        """Neither during its request nor afterwards."""
        engine = filled(build)
        engine.ask("more", OTHER)
        engine.settle()
        reader = build(**allowing(engine))
        names = reader.add("names", PROMPT, handover=naming(engine))
        other = reader.add("other", OTHER)
        reader.run()
        assert (names.state, other.state) == ("finished", "finished")
        assert (reader.loaded_tokens["names"], reader.loaded_tokens["other"]) == (WHOLE, 0)
        reader.settle()
        reader.scheduler.clear()
        for worker in reader.workers:
            worker._mover.clear()
        assert loaded(reader, "later") == 0, "it has been read for that request only"
        assert not reader.recovered

    def test_what_it_holds_is_not_remembered_for_others(self, build: Build) -> None:
        engine = filled(build)
        reader = build(**allowing(engine))
        reader.ask("names", PROMPT, handover=naming(engine))
        refs = list(reader.connected.remote.view._answers)
        now_s = time.monotonic()
        assert not [ref for ref in refs if reader.connected.remote.view.holds(ref, now_s)]

    def test_one_that_is_not_listed_is_never_asked(self, build: Build, caplog: pytest.LogCaptureFixture) -> None:
        engine = filled(build)
        reader = build(peers=(), handover=HandoverOptions(sends=True, receives=False))
        for number in range(3):
            reader.forget_local()
            reader.ask(f"names {number}", [*PROMPT, number], handover=naming(engine))
        assert reader.workers[0]._counters().chunks_loaded_from_remote == 0
        said = f"'127.0.0.1:{engine.setup.port}'"
        assert sum(said in record.getMessage() for record in caplog.records) == 1

    @pytest.mark.slow
    def test_one_that_is_dead_costs_only_who_names_it(self, build: Build) -> None:
        """Requests of others come each after one that names an engine that does not exist."""
        engine = build(port=free_port())
        others = [[number * 3 + token % 7 for token in PROMPT] for number in range(10)]
        for number, prompt in enumerate(others):
            engine.ask(f"first {number}", prompt)
            engine.settle()  # or a slow machine has no slot left for what comes later
        dead = [FakePeer(free_port()) for _ in range(3)]
        options = HandoverOptions(sends=True, receives=False, allows_source=lambda _host, _port: True)
        urls = tuple(f"kvs://127.0.0.1:{peer.port}" for peer in dead)
        patient = {"lookup_timeout_s": HANG_GUARD_S}  # enough for a busy machine
        reader = build(peers=(url_of(engine),), sources=urls, handover=options, slots=64, **patient)
        for number, prompt in enumerate(others):
            source = Source("127.0.0.1", dead[number % 3].port, WHOLE)
            reader.add(f"names {number}", [*OTHER, number], handover=Handover(None, source))
            reader.add(f"other {number}", prompt)
        reader.run(max_steps=4_000)
        assert reader.connected.remote.timeouts == 0
        assert [reader.loaded_tokens[f"other {number}"] for number in range(len(others))] == [WHOLE] * len(others)

    def test_an_engine_that_borrows_from_its_own_server_reads_it(self, build: Build) -> None:
        """Chunks of other engines are copied, so nothing is borrowed."""
        engine = filled(build)
        reader = build(port=free_port(), local_cpu=False, **allowing(engine))
        reader.ask("names", PROMPT, handover=naming(engine))
        assert reader.loaded_tokens["names"] == WHOLE
        assert not reader.recovered


def test_new_weights(build: Build) -> None:
    """The engine itself continues with its server; others, whose weights may be old, no longer read it."""
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
    engine = build(port=free_port(), save_tails=False)
    reader = build(min_remote_tokens=min_tokens, save_tails=False, **allowing(engine))
    reader.ask("own", PROMPT[: CHUNK + 1])
    engine.ask("first", PROMPT[: 2 * CHUNK + 1])
    engine.settle()
    reader.forget_local()
    reader.ask("more", PROMPT[: 2 * CHUNK + 1], handover=naming(engine))
    assert reader.loaded_tokens["more"] == CHUNK + fetched


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_two_engines_that_read_each_other(build: Build, seed: int) -> None:
    """Their pools hold only a part of it; prefixes are random, with aborts and a change of weights."""
    random, ports = Random(seed), (free_port(), free_port())
    engines = [
        build(port=mine, peers=(f"kvs://127.0.0.1:{other}",), slots=8, seed=seed, async_load=None, run_ahead=seed)
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
