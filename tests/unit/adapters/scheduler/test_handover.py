"""Two engines around vLLM's model, one for prefill and one for decode: what is sent, waited for, and answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_parts import BLOCK, CHUNK, FakeRequest, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S
from support.remote import FakeServer
from support.schedules import schedules

from kvstore.adapters.vllm.requests.params import NO_PARAMS, DisaggSpec, Handover, RequestParams, Source, parse_handover
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import KeyExtras, PrefixHasher
from kvstore.ops import metrics

PROMPT = list(range(2 * CHUNK + 2 * BLOCK + 1))
HOST = "127.0.0.1"
SPEC = DisaggSpec("client-1", HOST, (7000,))
SENDS = HandoverOptions(sends=True, receives=False, allows_host=HOST.__eq__)
RECEIVES = HandoverOptions(sends=False, receives=True, own=(HOST, 7000), allows_host=HOST.__eq__, timeout_s=5.0)


@contextmanager
def running(setup: Setup) -> Iterator[FakeVllm]:
    vllm = FakeVllm(setup)
    try:
        yield vllm
    finally:
        vllm.close()


def producer(outbox: FakeServer, **how: Any) -> Setup:
    return Setup(handover=SENDS, receiver=outbox, loads=how.pop("loads", False), **how)


def consumer(inbox: FakeServer, options: HandoverOptions = RECEIVES, **how: Any) -> Setup:
    return Setup(handover=options, server=inbox, saves=False, **how)


def refs_of(tokens: list[int], salt: str = "") -> list[tuple[ChunkRef, int]]:
    """Return the chunks of a prompt, its tail included, each with the token at which it ends."""
    hasher = PrefixHasher(CHUNK, BLOCK, KeyExtras(cache_salt=salt))
    hasher.update(tokens)
    refs = chunk_refs(hasher, with_tail=True)
    ends, end = [], 0
    for ref in refs:
        end += ref.num_blocks * BLOCK
        ends.append(end)
    return list(zip(refs, ends, strict=True))


def flushed(vllm: FakeVllm) -> None:
    for worker in vllm.workers:
        assert worker._pushes._pusher is None or worker._pushes._pusher.flush(10)


def sent_of(request: FakeRequest) -> dict[str, Any]:
    """Return the part of the answer that describes the hand-over."""
    assert request.answer is not None
    spec = request.answer["disagg_spec"]
    assert isinstance(spec, dict)
    return spec


def assert_handed_over(vllm: FakeVllm, outbox: FakeServer, tokens: list[int], salt: str = "") -> None:
    flushed(vllm)
    for rank in range(len(vllm.workers)):
        chunks = outbox.chunks[vllm.namespace(rank).id]
        for ref, end in refs_of(tokens, salt):
            assert chunks[ref] == vllm.payload(tokens[:end], ref.num_blocks, salt, rank, 0)


class TestProducer:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("budget", [10, 100])
    def test_the_whole_prompt_is_handed_over(self, ranks: int, budget: int) -> None:
        outbox = FakeServer()
        with running(producer(outbox, ranks=ranks, budget=budget)) as vllm:
            request = vllm.ask("one", PROMPT, handover=Handover(SPEC))
            assert_handed_over(vllm, outbox, PROMPT)
            assert request.answer is not None
            spec = sent_of(request)
            assert 0 <= spec.pop("num_transferred_tokens") <= 2 * CHUNK + 2 * BLOCK
            assert len(spec.pop("sender")) == 16
            assert spec == {
                "req_id": "client-1",
                "receiver_host": HOST,
                "receiver_init_port": 7000,
                "is_last_prefill": True,
                "num_coming_tokens": 2 * CHUNK + 2 * BLOCK,
                "handover": 0,
            }
            assert "first_tok" not in request.answer

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_an_answer_tells_what_has_arrived_from_what_is_on_its_way(self, ranks: int) -> None:
        outbox, may_go = FakeServer(), threading.Event()
        with running(producer(outbox, ranks=ranks, budget=CHUNK)) as vllm:
            request = vllm.add("one", PROMPT, handover=Handover(SPEC))
            vllm.step()
            flushed(vllm)
            outbox.before_put = lambda: may_go.wait(HANG_GUARD_S)
            vllm.run()
            may_go.set()
            assert sent_of(request)["num_transferred_tokens"] == CHUNK
            assert sent_of(request)["num_coming_tokens"] == 2 * CHUNK + 2 * BLOCK

    def test_an_answer_names_nothing_that_is_known_to_be_lost(self) -> None:
        outbox = FakeServer()
        with running(producer(outbox, ranks=2, budget=CHUNK)) as vllm:
            request = vllm.add("one", list(range(5 * CHUNK)), handover=Handover(SPEC))
            while request.state != "finished":
                vllm.step()
                flushed(vllm)
                outbox.before_put = _refuse
            assert sent_of(request)["num_coming_tokens"] == CHUNK
            assert sent_of(request)["num_transferred_tokens"] == CHUNK
            flushed(vllm)
            lost = vllm.add("two", [7] * len(PROMPT), handover=Handover(SPEC))
            vllm.run()
            assert lost.answer == {}

    def test_what_is_sent_again_is_another_hand_over(self) -> None:
        """The first hand-over was computed on garbage, so its losses say nothing of the second."""
        outbox = FakeServer()
        with running(producer(outbox, budget=CHUNK)) as vllm:
            request = vllm.add("one", PROMPT, handover=Handover(SPEC))
            vllm.step()
            flushed(vllm)
            vllm.scheduler._handovers.outgoing.restart()
            vllm.run()
            flushed(vllm)
            assert sent_of(request)["handover"] == 1
            assert sent_of(request)["num_coming_tokens"] == 2 * CHUNK + 2 * BLOCK
            tracker = vllm.workers[0]._pushes._pusher.tracker  # type: ignore[union-attr]
            assert tracker._entries == {}

    @pytest.mark.parametrize(
        ("setup", "params", "priority"),
        [
            ({"saves": False}, NO_PARAMS, 0),
            ({"save_tails": False}, NO_PARAMS, 0),
            ({"priority_limit": 0}, NO_PARAMS, 5),
            ({"skip_last_tokens": 9}, NO_PARAMS, 0),
            ({}, RequestParams(skip_save=True), 0),
            ({"slots": 1}, NO_PARAMS, 0),
        ],
        ids=["force_skip", "no_tails", "priority", "skip_last", "skip_save", "full_pool"],
    )
    def test_what_is_not_saved_is_handed_over_all_the_same(
        self, setup: dict[str, Any], params: RequestParams, priority: int
    ) -> None:
        outbox = FakeServer()
        with running(producer(outbox, **setup)) as vllm:
            vllm.ask("one", PROMPT, handover=Handover(SPEC), params=params, priority=priority)
            assert_handed_over(vllm, outbox, PROMPT)

    @pytest.mark.parametrize("local", [True, False], ids=["vllms_prefix_cache", "ours"])
    def test_what_is_known_here_and_not_there_is_sent(self, local: bool) -> None:
        outbox = FakeServer()
        with running(producer(outbox, loads=True)) as vllm:
            vllm.ask("first", PROMPT)
            vllm.settle()
            assert not outbox.chunks
            if not local:
                vllm.forget_local()
            vllm.ask("again", PROMPT, handover=Handover(SPEC))
            assert vllm.loaded_tokens["again"] == (0 if local else 2 * CHUNK + 2 * BLOCK)
            assert_handed_over(vllm, outbox, PROMPT)

    def test_only_the_prompt_goes(self) -> None:
        outbox = FakeServer()
        with running(producer(outbox, save_decode=True)) as vllm:
            vllm.ask("one", PROMPT, handover=Handover(SPEC), max_tokens=3 * CHUNK)
            flushed(vllm)
            assert len(outbox.all_chunks()) == 3

    def test_the_first_token_on_request(self) -> None:
        with running(producer(FakeServer())) as vllm:
            request = vllm.ask("one", PROMPT, handover=Handover(SPEC, wants_first_token=True))
            assert request.answer is not None
            assert request.answer["first_tok"] == request.all_token_ids[len(PROMPT)]

    def test_hosts_that_are_not_allowed_are_ignored_and_named_once(self, caplog: pytest.LogCaptureFixture) -> None:
        outbox = FakeServer()
        with running(producer(outbox)) as vllm:
            for number in range(3):
                spec = DisaggSpec("client", "evil.example", (80,))
                request = vllm.ask(f"request {number}", PROMPT, handover=Handover(spec))
                assert request.answer is None
            flushed(vllm)
        assert not outbox.chunks
        assert sum("'evil.example'" in record.message for record in caplog.records) == 1

    def test_an_abort_leaves_nothing_behind(self) -> None:
        outbox = FakeServer()
        with running(producer(outbox, budget=CHUNK + 3)) as vllm:
            request = vllm.add("one", PROMPT, handover=Handover(SPEC))
            vllm.step()
            vllm.abort(request)
            vllm.settle()
            flushed(vllm)
            vllm.assert_nothing_leaked()
            assert not list(vllm.scheduler._handovers.outgoing)
            assert [ref for ref, _ in refs_of(PROMPT)[:1]] == list(outbox.all_chunks())

    def test_new_weights_hand_over_nothing_of_the_old(self) -> None:
        outbox = FakeServer()
        with running(producer(outbox, budget=CHUNK)) as vllm:
            vllm.add("one", PROMPT, handover=Handover(SPEC))
            vllm.step()
            vllm.reset(preempt=False)
            vllm.run()
            vllm.ask("two", PROMPT, handover=Handover(SPEC))
            flushed(vllm)
            chunks = outbox.chunks[vllm.namespace(weights=1).id]
            assert len(chunks) == 3
            for ref, end in refs_of(PROMPT):
                assert chunks[ref] == vllm.payload(PROMPT[:end], ref.num_blocks, "", 0, 1)

    def test_it_counts(self) -> None:
        outbox = FakeServer()
        with running(producer(outbox)) as vllm:
            vllm.ask("one", PROMPT, handover=Handover(SPEC))
            flushed(vllm)
            vllm.settle()
            vllm.ask("two", [9] * 9)  # its report tells
            vllm.settle()
            vllm.scheduler.take_tally()
            assert vllm.scheduler.totals[metrics.PUSHED_CHUNKS.key("sent")] == 3
            assert vllm.scheduler.totals[metrics.PUSHED_BYTES.key()] == sum(map(len, outbox.all_chunks().values()))


class TestConsumer:
    def test_it_computes_only_what_is_left(self) -> None:
        shared = FakeServer()
        with running(producer(shared)) as first, running(consumer(shared)) as second:
            answer = first.ask("one", PROMPT, handover=Handover(SPEC)).answer
            flushed(first)
            handover = parse_handover(answer, "one")
            second.ask("one", PROMPT, handover=handover, max_tokens=5)
            assert second.loaded_tokens["one"] == len(PROMPT) - 1

    def test_it_waits_for_what_is_on_its_way(self) -> None:
        shared = FakeServer()
        with running(producer(shared, budget=CHUNK)) as first, running(consumer(shared)) as second:
            second.add("one", PROMPT, handover=Handover(SPEC))
            first.add("one", PROMPT, handover=Handover(SPEC))
            for _ in range(3):
                second.step()
                first.step()
                flushed(first)
            assert second.waiting  # the tail is missing
            first.run()
            flushed(first)
            second.run()
            assert second.loaded_tokens["one"] == len(PROMPT) - 1

    def test_it_computes_after_the_deadline(self, caplog: pytest.LogCaptureFixture) -> None:
        options = HandoverOptions(sends=False, receives=True, own=(HOST, 7000), timeout_s=0.1)
        with running(consumer(FakeServer(), options)) as vllm:
            vllm.ask("one", PROMPT, handover=Handover(SPEC))
            assert vllm.loaded_tokens["one"] == 0
            vllm.scheduler.take_tally()
            assert vllm.scheduler.totals[metrics.HANDOVER_TIMEOUTS.key()] == 1
            assert any("did not hand them over within 0.1 s" in record.message for record in caplog.records)
            assert not len(vllm.scheduler._handovers.waits)

    def test_a_part_of_it_is_used(self) -> None:
        shared = FakeServer()
        options = HandoverOptions(sends=False, receives=True, own=(HOST, 7000), timeout_s=0.2)
        with running(producer(shared)) as first, running(consumer(shared, options)) as second:
            first.ask("one", PROMPT, handover=Handover(SPEC))
            flushed(first)
            shared.lose(ref for ref, _ in refs_of(PROMPT)[1:])
            second.ask("one", PROMPT, handover=Handover(SPEC))
            assert second.loaded_tokens["one"] == CHUNK

    def test_an_abort_while_it_waits(self) -> None:
        with running(consumer(FakeServer())) as vllm:
            request = vllm.add("one", PROMPT, handover=Handover(SPEC))
            vllm.step()
            vllm.abort(request)
            vllm.settle()
            vllm.assert_nothing_leaked()
            assert not len(vllm.scheduler._handovers.waits)

    def test_other_requests_do_not_wait(self) -> None:
        with running(consumer(FakeServer())) as vllm:
            request = vllm.add("one", PROMPT, handover=Handover(SPEC))
            other = vllm.add("two", [5] * 9)
            for _ in range(3):
                vllm.step()
            assert other.state == "finished"
            assert request.state == "waiting"
            vllm.abort(request)

    def test_an_engine_that_does_both_knows_its_own_address(self) -> None:
        shared = FakeServer()
        both = HandoverOptions(sends=True, receives=True, own=(HOST, 7001), allows_host=HOST.__eq__)
        with running(Setup(handover=both, receiver=shared, server=FakeServer())) as vllm:
            vllm.ask("to another", PROMPT, handover=Handover(SPEC))
            assert_handed_over(vllm, shared, PROMPT)
            to_itself = Handover(DisaggSpec("client", HOST, (7001,)))
            request = vllm.add("to itself", [7] * 40, handover=to_itself)
            vllm.step()
            assert request.state == "waiting"
            vllm.abort(request)


class TestBothWays:
    def test_the_next_turn_loads_what_the_other_decoded(self) -> None:
        decoded = FakeServer()
        answers = HandoverOptions(False, True, (HOST, 7000), HOST.__eq__, answers=True)
        decoding = Setup(handover=answers, server=decoded, save_decode=True, max_write_queue=16)
        with running(decoding) as second, running(Setup(handover=SENDS, server=decoded)) as first:
            turn = second.ask("one", PROMPT, max_tokens=CHUNK)
            second.settle()
            assert turn.answer == {"remote_host": HOST, "remote_port": 7000, "num_tokens": 3 * CHUNK + 2 * BLOCK}
            handover = parse_handover(turn.answer, "two")
            assert handover == Handover(None, Source(HOST, 7000, 3 * CHUNK + 2 * BLOCK))
            first.ask("two", [*turn.all_token_ids, 7, 7, 7, 7, 7], handover=handover)
            assert first.loaded_tokens["two"] == 3 * CHUNK + 2 * BLOCK


SETUPS = st.builds(
    Setup,
    ranks=st.sampled_from([1, 2]),
    gpu_blocks=st.sampled_from([24, 60]),
    slots=st.sampled_from([2, 12]),
    saves=st.booleans(),
    save_tails=st.booleans(),
    run_ahead=st.sampled_from([0, 1, 2]),
    drafts=st.sampled_from([0, 3]),
    budget=st.sampled_from([10, 32, 100]),
    async_load=st.sampled_from([None, True, False]),
    async_save=st.booleans(),
    layerwise=st.booleans(),
    defer_stores=st.booleans(),
    push_slots=st.sampled_from([1, 3, 30]),
    seed=st.integers(0, 2**32),
    eagerness=st.sampled_from([None, 0.2, 0.5]),
    staging_chunks=st.sampled_from([1, 2]),
    copy_bytes=st.sampled_from([1, 1 << 18]),
)


@schedules(12)
@given(SETUPS, st.booleans())
@example(  # rank 1 handed over KV that rests on chunks that rank 0 could not load
    Setup(
        ranks=2,
        gpu_blocks=24,
        slots=2,
        save_tails=False,
        run_ahead=2,
        drafts=3,
        budget=32,
        push_slots=1,
        seed=3546215,
    ),
    True,
)
def test_any_schedule_hands_over_right_bytes_only(
    tmp_path_factory: pytest.TempPathFactory,
    setup: Setup,
    with_faults: bool,
) -> None:
    """Preemption, aborts, new weights, failed loads and receivers give no wrong byte; without them there is no gap."""
    outbox, folder = FakeServer(), tmp_path_factory.mktemp("cache")
    setup.__dict__.update(handover=SENDS, receiver=outbox, folder=folder)
    with running(setup) as vllm:
        sent = _play(vllm, outbox, with_faults=with_faults)
        outbox.before_put = lambda: None
        vllm.settle()
        flushed(vllm)
        vllm.assert_nothing_leaked()
        _assert_right(vllm, outbox, sent)
        if not with_faults and not vllm.weights:
            for request in sent:
                if request.answer is not None and request.num_outputs:
                    assert_handed_over(vllm, outbox, request.all_token_ids[: request.num_prompt_tokens], request.salt)


def _play(vllm: FakeVllm, outbox: FakeServer, *, with_faults: bool) -> list[FakeRequest]:
    rng = vllm.random
    stems = [[rng.randrange(50) for _ in range(60)] for _ in range(2)]
    sent: list[FakeRequest] = []
    for _ in range(rng.randint(20, 60)):
        chance = rng.random()
        alive = [request for request in sent if request.state != "finished"]
        if chance < 0.35 and len(alive) < 6:
            tokens = [*rng.choice(stems)[: rng.randrange(1, 60)], rng.randrange(50)]
            handover = Handover(SPEC) if rng.random() < 0.7 else None
            salt = rng.choice(["", "salt"])
            sent.append(
                vllm.add(f"request {len(sent)}", tokens, max_tokens=rng.randint(1, 6), salt=salt, handover=handover)
            )
        elif chance < 0.40 and alive:
            vllm.abort(rng.choice(alive))
        elif chance < 0.46 and vllm.running:
            vllm.preempt(rng.choice(vllm.running))
        elif chance < 0.52:
            vllm.forget_local()
        elif chance < 0.54 and with_faults:
            vllm.reset(preempt=rng.random() < 0.5)
        elif chance < 0.62 and with_faults:
            for path in vllm.chunk_files()[:3]:
                path.write_bytes(b"garbage")
        elif chance < 0.68 and with_faults:
            outbox.before_put = _refuse if rng.random() < 0.5 else lambda: None
        else:
            vllm.step()
    vllm.run()
    return sent


def _refuse() -> None:
    raise TierError("broken on purpose")


def _assert_right(vllm: FakeVllm, outbox: FakeServer, sent: list[FakeRequest]) -> None:
    """Assert that every chunk that arrived holds what its key and namespace promise."""
    wanted: dict[ChunkRef, tuple[list[int], str]] = {}
    for request in sent:
        tokens = request.all_token_ids[: request.num_prompt_tokens]
        wanted.update({ref: (tokens[:end], request.salt) for ref, end in refs_of(tokens, request.salt)})
    homes = {
        vllm.namespace(rank, weights).id: (rank, weights)
        for rank in range(len(vllm.workers))
        for weights in vllm.epochs
    }
    for namespace, chunks in outbox.chunks.items():
        rank, weights = homes[namespace]
        for ref, payload in chunks.items():
            tokens, salt = wanted[ref]
            assert payload == vllm.payload(tokens, ref.num_blocks, salt, rank, weights)
