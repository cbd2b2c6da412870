"""Several workers of one scheduler, and several engines side by side; `support/fake_vllm.py` checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.remote import FakeServer

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.index.plans import Place, chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import PrefixHasher

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
STAGES = (2, 40)  # layers; a chunk of the second needs a slot, and a file, twice as large

Build = Callable[[Setup], FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, which live side by side until the end of the test."""
    engines: list[FakeVllm] = []

    def build_(setup: Setup) -> FakeVllm:
        engines.append(FakeVllm(setup))
        return engines[-1]

    yield build_
    for engine in engines:
        engine.close()


def loaded_again(vllm: FakeVllm, name: str = "again") -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask(name, PROMPT)
    return vllm.loaded_tokens[name]


# -- pipeline parallelism: each rank holds other layers ---------------------------------------------------------------


def test_stages_of_different_sizes(build: Build, tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, stages=STAGES)
    vllm = build(setup)
    assert [worker.facts().num_slots for worker in vllm.workers] == [16, 8]
    assert vllm.index.num_slots == 8
    vllm.ask("first", PROMPT)
    assert loaded_again(vllm) == WHOLE
    vllm.settle()
    vllm.assert_nothing_leaked()
    vllm.close()
    vllm = build(setup)
    assert loaded_again(vllm) == WHOLE
    assert vllm.workers[1]._mover.counters.chunks_loaded_from_disk == 4
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_one_stage_lost_is_computed_by_all(build: Build, tmp_path: Path, rank: int) -> None:
    vllm = build(Setup(folder=tmp_path, stages=STAGES, local_cpu=False))
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm.chunk_files(rank)[0].unlink()
    assert loaded_again(vllm) == WHOLE, "nobody knows yet"
    assert vllm.recovered == 1
    assert vllm.index.counters.lost_chunks == 1
    vllm.settle()
    assert loaded_again(vllm, "once more") == WHOLE
    assert vllm.recovered == 1, "it is there again, on every rank"
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_one_stage_cannot_store_is_not_found(
    build: Build, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(Setup(stages=STAGES))
    monkeypatch.setattr(vllm.workers[rank]._mover, "is_stuck", lambda _slot: True)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert vllm.index.counters.failed_stores == 4
    assert loaded_again(vllm) == 0
    monkeypatch.undo()
    vllm.ask("stores", [*PROMPT, *PROMPT])
    assert loaded_again(vllm, "later") == WHOLE, "the tail has become a whole chunk, which leads to it"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_what_one_rank_refused_is_stored_when_the_other_is_done_with_it(build: Build, tmp_path: Path) -> None:
    vllm = build(Setup(folder=tmp_path, ranks=2, budget=100))
    vllm.workers[1]._poisoned_step = 1  # it refuses the stores of the first step
    goes_on = threading.Event()
    tier = vllm.workers[0]._mover._lanes[Place.DISK]._tier
    with patch.object(tier, "put", side_effect=lambda transfers, put=tier.put: goes_on.wait(30) and put(transfers)):
        vllm.add("first", PROMPT, max_tokens=30)
        for _ in range(4):
            vllm.step()
        assert vllm.index.counters.failed_stores == 4
        goes_on.set()
        assert vllm.workers[0]._mover.flush(30)
        vllm.settle()
    assert loaded_again(vllm) == WHOLE
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_stages_in_a_remote_tier(build: Build) -> None:
    """A chunk counts as there when the parts of all stages are."""
    server = FakeServer()
    setup = Setup(stages=STAGES, server=server, max_write_queue=64)
    vllm = build(setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert [len(chunks) for chunks in server.chunks.values()] == [4, 4]
    assert loaded_again(build(setup)) == WHOLE
    next(iter(server.chunks.values())).clear()
    assert loaded_again(build(setup)) == 0


# -- what one rank could not load, others compute on ------------------------------------------------------------------


def spoilt(vllm: FakeVllm, rank: int) -> None:
    """Damage all that a rank has on its disk; vLLM's own cache is empty."""
    for path in vllm.chunk_files(rank):
        path.write_bytes(b"garbage")
    vllm.forget_local()


def assert_right(vllm: FakeVllm, server: FakeServer, tokens: list[int]) -> None:
    """Assert that every chunk that a rank has sent holds what its key promises."""
    wanted = {ref: tokens[:end] for ref, end in chunks_of(tokens)}
    for rank in range(len(vllm.workers)):
        for ref, payload in server.chunks[vllm.namespace(rank).id].items():
            right = vllm.payload(wanted[ref], ref.num_blocks, "", rank, 0)
            assert payload[: len(right)] == right, f"rank {rank}"  # a tier gets a whole slot


def chunks_of(tokens: list[int]) -> list[tuple[ChunkRef, int]]:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(tokens)
    refs = chunk_refs(hasher, with_tail=True)
    return list(zip(refs, accumulate(ref.num_blocks * BLOCK for ref in refs), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_nothing_is_handed_over_that_rests_on_what_another_rank_could_not_load(
    build: Build, tmp_path: Path, rank: int, layerwise: bool, run_ahead: int
) -> None:
    outbox = FakeServer()
    sends = HandoverOptions(sends=True, receives=False, allows_host=lambda _: True)
    setup = Setup(ranks=2, folder=tmp_path, local_cpu=False, handover=sends, receiver=outbox, async_load=False)
    vllm = build(replace(setup, layerwise=layerwise, run_ahead=run_ahead))
    vllm.ask("first", PROMPT[: 2 * CHUNK])
    vllm.settle()
    spoilt(vllm, rank)
    vllm.ask("again", PROMPT, handover=Handover(DisaggSpec("client", "here", (7000,))))
    vllm.settle()
    for worker in vllm.workers:
        assert worker._pushes._pusher is not None
        assert worker._pushes._pusher.flush(10)
    assert_right(vllm, outbox, PROMPT)
    assert [len(chunks) for chunks in outbox.chunks.values()] == [4, 4]
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("replicas", [False, True])
def test_nothing_is_sent_that_rests_on_what_another_rank_could_not_load(
    build: Build, tmp_path: Path, rank: int, replicas: bool
) -> None:
    """It would stay there, because an engine that finds a chunk at a shared tier does not send it again."""
    server = FakeServer()
    setup = Setup(ranks=2, replicas=replicas, folder=tmp_path, local_cpu=False, async_load=False, max_write_queue=64)
    vllm = build(setup)
    vllm.ask("first", PROMPT[: 2 * CHUNK])
    vllm.settle()
    vllm.close()
    vllm = build(replace(setup, server=server))
    spoilt(vllm, rank)
    vllm.ask("again", PROMPT)
    vllm.settle()
    assert_right(vllm, server, PROMPT)
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("ranks", "server", "beside"), [(1, True, 0), (2, False, 0), (2, True, 4)])
def test_the_step_waits_for_a_load_where_nobody_else_can_be_misled(
    build: Build, ranks: int, server: bool, beside: int
) -> None:
    vllm = build(Setup(ranks=ranks, server=FakeServer() if server else None, async_load=False, max_write_queue=64))
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert loaded_again(vllm) == WHOLE
    assert vllm.workers[0]._background.counters().chunks_loaded == beside


# -- ranks that hold the same -----------------------------------------------------------------------------------------


def test_replicas_send_a_chunk_once_and_both_load_it(build: Build) -> None:
    server = FakeServer()
    setup = Setup(ranks=2, replicas=True, server=server, max_write_queue=64)
    vllm = build(setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert len(server.puts) == len(server.all_chunks()) == 4
    other = build(setup)
    assert loaded_again(other) == WHOLE
    assert [worker._counters().chunks_loaded_from_remote for worker in other.workers] == [4, 4]
    other.settle()
    assert len(server.puts) == 4
    other.assert_nothing_leaked()


def test_replicas_count_a_chunk_as_sent_when_it_is(build: Build) -> None:
    server = FakeServer()

    def broken() -> None:
        raise TierError("broken on purpose")

    server.before_put = broken
    vllm = build(Setup(ranks=2, replicas=True, server=server, max_write_queue=64))
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert vllm.index.counters.sends_failed == 4
    assert vllm.index.counters.sends_done == 0
    vllm.assert_nothing_leaked()


# -- engines beside each other: data parallelism ----------------------------------------------------------------------


def test_replicas_of_an_engine_share_a_remote_tier(build: Build) -> None:
    server = FakeServer()
    one, two = build(Setup(server=server, max_write_queue=64)), build(Setup(server=server, max_write_queue=64))
    one.ask("first", PROMPT)
    one.settle()
    two.ask("there, too", PROMPT)
    assert two.loaded_tokens["there, too"] == WHOLE
    longer = [*PROMPT, *range(2 * CHUNK)]
    two.ask("longer", longer)
    two.settle()
    one.forget_local()
    one.ask("back again", longer)
    assert one.loaded_tokens["back again"] > WHOLE
    one.settle()
    assert len(server.puts) == len(set(server.puts)), "what one has sent the other does not send again"
    for vllm in (one, two):
        vllm.assert_nothing_leaked()


def test_engines_that_compute_the_same_at_once(build: Build) -> None:
    """Both are right, and the second to send finds it there."""
    server = FakeServer()
    one, two = build(Setup(server=server, max_write_queue=64)), build(Setup(server=server, max_write_queue=64))
    for vllm in (one, two):
        vllm.ask("first", PROMPT)
        assert vllm.loaded_tokens["first"] == 0 or vllm is two
    for vllm in (one, two):
        vllm.settle()
        assert loaded_again(vllm) == WHOLE
        vllm.settle()
        vllm.assert_nothing_leaked()
    assert vllm.index.queued_writes(Place.REMOTE) == 0
    assert set(server.puts) == set(server.all_chunks())
