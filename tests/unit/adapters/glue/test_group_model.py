"""Random schedules of models with several groups: no wrong row or state, nothing left behind, no load tried twice."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_group_runner import GroupSetup
from support.fake_groups import FakeGroups
from support.fake_tables import FakeGroup, GroupRequest
from support.remote import FakeServer
from support.schedules import schedules

from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.checkpoints.groups import Kind
from kvstore.errors import TierError
from kvstore.ops import metrics

HEADER = 4096
FULL, WIDE = FakeGroup(Kind.FULL, 4), FakeGroup(Kind.FULL, 8)
WINDOW, LONG = FakeGroup(Kind.WINDOW, 4, 7), FakeGroup(Kind.WINDOW, 8, 21)
LOCAL = FakeGroup(Kind.LOCAL, 4, 12)
STATE, COARSE = FakeGroup(Kind.STATE, 4), FakeGroup(Kind.STATE, 8)

MODELS: dict[str, tuple[FakeGroup, ...]] = {
    "gptoss": (WINDOW, FULL),
    "gemma4": (LONG, FULL),
    "mistral": (WINDOW,),
    "llama4": (FULL, LOCAL),
    "local": (LOCAL,),
    "granite": (FULL, STATE),
    "coarse states": (FULL, COARSE),
    "mamba": (STATE,),
    "all": (FULL, COARSE, WINDOW, LOCAL),
    "two full": (FULL, WIDE),
}

# Layers of each group on each rank, for a model of so many groups: one rank, two with equal parts, or stages.
STAGES: dict[int, list[tuple[tuple[int, ...], ...]]] = {
    1: [((2,),), ((1,), (1,)), ((1,), (2,))],
    2: [((2, 2),), ((1, 1), (1, 1)), ((1, 2), (1, 0)), ((0, 1), (2, 2))],
    4: [((2, 2, 1, 1),), ((1, 1, 1, 1),) * 2, ((1, 0, 1, 0), (1, 1, 0, 1))],
}

MODEL_STAGES = st.sampled_from([(groups, stages) for groups in MODELS.values() for stages in STAGES[len(groups)]])

SETUPS = st.builds(
    lambda model, **others: GroupSetup(groups=model[0], stages=model[1], **others),
    MODEL_STAGES,
    chunk=st.sampled_from([8, 16, 16]),
    gpu_blocks=st.sampled_from([90, 140, 250]),
    slots=st.sampled_from([8, 20, 60]),
    local_cpu=st.sampled_from([True, True, False]),
    save_decode=st.booleans(),
    save_tails=st.booleans(),
    interval=st.sampled_from([0, 0, 24]),
    min_retrieve_tokens=st.sampled_from([0, 0, 10]),
    max_tokens_per_load=st.sampled_from([0, 0, 24]),
    max_write_queue=st.sampled_from([None, 1]),
    verify_fraction=st.sampled_from([0.0, 0.0, 0.5]),
    run_ahead=st.sampled_from([0, 1, 2]),
    budget=st.sampled_from([10, 32, 100]),
    async_save=st.booleans(),
    retention=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)

# On a device whose work is done as late as it may be: what nobody puts in order comes out wrong.
LATE_SETUPS = st.builds(
    replace,
    SETUPS,
    eagerness=st.sampled_from([0.1, 0.4, 0.6]),
    overwrites_early=st.booleans(),
    staging_bytes=st.sampled_from([1 << 12, 1 << 14]),
    copies=st.booleans(),
)


def broken() -> None:
    raise TierError("broken on purpose")


class _Client:
    """Does at random what clients, operators and disks do."""

    def __init__(self, vllm: FakeGroups, *, with_faults: bool) -> None:
        self.vllm = vllm
        self.random = vllm.random
        self.with_faults = with_faults
        self.requests: list[GroupRequest] = []
        stems = [[self.random.randrange(50) for _ in range(60)] for _ in range(2)]
        self.prompts = [[*stem[: self.random.randrange(1, 60)], self.random.randrange(50)] for stem in stems * 4]

    def act(self) -> None:
        """One random event."""
        chance = self.random.random()
        alive = [request for request in self.requests if request.state != "finished"]
        if chance < 0.35 and len(alive) < 5:
            self.send()
        elif chance < 0.40 and alive:
            self.vllm.abort(self.random.choice(alive))
        elif chance < 0.44 and self.vllm.running:
            self.vllm.preempt(self.random.choice(self.vllm.running))
        elif chance < 0.50:
            self.vllm.forget_local()
        elif chance < 0.51:
            self.vllm.reset()
        elif chance < 0.57 and self.with_faults and self.vllm.setup.folder is not None:
            self.break_a_file(self.vllm.setup.folder)
        elif chance < 0.60 and self.vllm.setup.server is not None:
            self.upset(self.vllm.setup.server)
        elif chance < 0.61:
            self.vllm.scheduler.enabled = self.random.random() < 0.6
        elif chance < 0.615:
            self.vllm.scheduler.call_soon(self.vllm.scheduler.clear)
        elif chance < 0.625 and self.vllm.late is not None:
            self.vllm.sleep()
        elif chance < 0.64 and self.vllm.late is not None and self.with_faults:
            self.vllm.late.become_full(is_under_way=self.random.random() < 0.5)
        else:
            self.vllm.step()

    def send(self) -> None:
        done = [request for request in self.requests if request.state == "finished"]
        tokens = list(self.random.choice(self.prompts))
        if done and self.random.random() < 0.3:  # the next turn of a chat
            tokens = [*self.random.choice(done).all_token_ids, *tokens][:70]
        params = NO_PARAMS
        if self.random.random() < 0.2:
            params = RequestParams(
                skip_save=self.random.random() < 0.3,
                skip_load=self.random.random() < 0.3,
                ttl_s=self.random.choice([None, 1e-6, 1000.0]),
            )
        salt = self.random.choice(["", "", "salt"])
        name = f"request {len(self.requests)}"
        max_tokens = self.random.randint(1, 12)
        self.requests.append(self.vllm.add(name, tokens, max_tokens=max_tokens, salt=salt, params=params))

    def upset(self, server: FakeServer) -> None:
        """A server evicts what it likes, and fails, and recovers."""
        server.lose(ref for ref in server.all_chunks() if self.random.random() < 0.5)
        for call in ("before_contains", "before_get", "before_put"):
            fails = self.with_faults and self.random.random() < 0.3
            setattr(server, call, broken if fails else lambda: None)

    def break_a_file(self, folder: Path) -> None:
        try:
            path = self.random.choice(sorted(folder.rglob("*.safetensors")))
            content = bytearray(path.read_bytes())
            content[HEADER + self.random.randrange(64)] ^= 0x40
            if self.random.random() < 0.7:
                path.write_bytes(content)
            else:
                path.unlink()
        except (FileNotFoundError, IndexError):
            return  # there is none, or it was evicted meanwhile


def _play(setup: GroupSetup, *, with_faults: bool, events: int = 60) -> None:
    vllm = FakeGroups(setup)
    try:
        client = _Client(vllm, with_faults=with_faults)
        for _ in range(events):
            client.act()
        vllm.scheduler.enabled = True
        if vllm.late is not None:
            vllm.late.failures.clear()
        vllm.settle()
        vllm.assert_nothing_leaked()
        for prompt in client.prompts:  # all that is stored must still be right
            vllm.forget_local()
            vllm.ask("again", prompt)
        vllm.settle()
        vllm.assert_nothing_leaked()
        vllm.index.check_invariants()
        vllm.scheduler.take_tally()
        totals = vllm.scheduler.totals
        assert totals[metrics.VERIFIED_CHUNKS.key("mismatch")] == 0
        assert totals[metrics.STORED_CHUNKS.key()] == vllm.index.counters.stored
    finally:
        vllm.close()


@schedules()
@given(setup=SETUPS)
def test_any_schedule_in_memory(setup: GroupSetup) -> None:
    _play(setup, with_faults=False)


@schedules()
@given(setup=SETUPS, with_faults=st.booleans())
def test_any_schedule_with_a_disk_that_fails(setup: GroupSetup, *, with_faults: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder)), with_faults=with_faults)


@schedules()
@given(setup=SETUPS, with_faults=st.booleans(), min_remote_tokens=st.sampled_from([0, 20]))
def test_any_schedule_with_a_remote_tier(setup: GroupSetup, *, with_faults: bool, min_remote_tokens: int) -> None:
    setup = replace(setup, server=FakeServer(), min_remote_tokens=min_remote_tokens)
    _play(setup, with_faults=with_faults)


@schedules()
@given(setup=LATE_SETUPS, on_disk=st.booleans(), with_faults=st.booleans())
def test_any_schedule_on_a_device(setup: GroupSetup, *, on_disk: bool, with_faults: bool) -> None:
    """Writes, preemption, blocks zeroed and copied, saves, loads, sleep, resets, a full device."""
    with tempfile.TemporaryDirectory() as folder:
        _play(replace(setup, folder=Path(folder) if on_disk else None), with_faults=with_faults)


@pytest.mark.parametrize("num_tokens", [61, 63])
@pytest.mark.parametrize("chunk", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_asked_again_is_loaded_up_to_its_last_whole_blocks(model: str, chunk: int, num_tokens: int) -> None:
    groups, prompt = MODELS[model], [number * 7 % 50 for number in range(num_tokens)]
    vllm = FakeGroups(GroupSetup(groups=groups, stages=STAGES[len(groups)][-1], chunk=chunk, retention=0.0, budget=24))
    try:
        first = vllm.ask("first", prompt, max_tokens=6)
        vllm.settle()
        vllm.forget_local()
        again = vllm.ask("again", prompt, max_tokens=6)
        assert again.local + again.hit == (num_tokens - 1) // vllm.align * vllm.align
        assert again.all_token_ids == first.all_token_ids
        assert vllm.failures == 0
    finally:
        vllm.close()
