"""Models of several groups, one situation after the other: what is stored, offered, loaded, and not tried twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_groups import FakeGroups, GroupSetup
from support.fake_scheduler import one_at_a_time
from support.fake_tables import FakeGroup
from support.remote import FakeServer

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.scheduler.choice import LoadChoice
from kvstore.index.plans import Place
from kvstore.model.groups import GroupKind
from kvstore.ops import metrics
from kvstore.transfer import mover

FULL, WIDE = FakeGroup(GroupKind.FULL, 4), FakeGroup(GroupKind.FULL, 8)
WINDOW, LONG = FakeGroup(GroupKind.WINDOW, 4, 9), FakeGroup(GroupKind.WINDOW, 8, 21)
STATE = FakeGroup(GroupKind.STATE, 4)
PROMPT = [number * 7 % 50 for number in range(63)]

HEADER = 4096

Build = Callable[..., FakeGroups]


@pytest.fixture
def build() -> Iterator[Build]:

    def make(*groups: FakeGroup, **changes: object) -> FakeGroups:
        setup = GroupSetup(groups=groups, stages=((2,) * len(groups),), budget=100, retention=0.0)
        return FakeGroups(replace(setup, **changes))  # type: ignore[arg-type] # checked by the dataclass

    with one_at_a_time(make) as build_:
        yield build_


def again(vllm: FakeGroups, tokens: list[int] = PROMPT, **how: object) -> int:
    """Return the tokens that a request loads from the store, with vLLM's own cache empty."""
    vllm.settle()
    vllm.forget_local()
    return vllm.ask("again", tokens, **how).hit


def damage(folder: Path, name: bytes) -> None:
    """Change a byte of a chunk on disk."""
    for path in folder.rglob(f"*{name.hex()}*.safetensors"):
        content = bytearray(path.read_bytes())
        content[HEADER] ^= 0x40
        path.write_bytes(content)


def test_a_state_is_stored_in_the_step_that_leaves_it_behind(build: Build) -> None:
    """The prompt's last step begins there, and leaves the state of the last token instead."""
    vllm = build(FULL, STATE)
    vllm.ask("first", PROMPT)
    assert again(vllm) == 60


def test_several_groups_that_keep_all_tokens_are_loaded_in_whole_blocks(build: Build) -> None:
    vllm = build(FULL, WIDE)
    prompt = PROMPT[:48]
    vllm.ask("first", [*prompt, 1])
    assert again(vllm, prompt) == 40
    assert vllm.failures == 0


def test_where_prompts_part_the_second_leaves_a_checkpoint_for_the_third(build: Build) -> None:
    vllm = build(FULL, WINDOW, WINDOW, WINDOW, WINDOW)
    vllm.ask("first", PROMPT)
    others = [[*PROMPT[:40], *range(start, start + 20)] for start in (0, 20)]
    assert again(vllm, others[0]) == 0, "it is there only where the first prompt ends"
    assert again(vllm, others[1]) == 32


def test_without_chunks_a_prompt_leaves_one_checkpoint(build: Build) -> None:
    vllm = build(WINDOW)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert [ref.num_blocks for ref in (chunk.ref for chunk in vllm.index._chunks.values())] == [3]
    assert again(vllm) == 60


def test_too_little_from_a_remote_tier_is_computed_also_without_chunks(build: Build) -> None:
    server = FakeServer()
    build(WINDOW, server=server).ask("first", PROMPT)
    assert again(build(WINDOW, server=server, min_remote_tokens=61)) == 0
    assert again(build(WINDOW, server=server, min_remote_tokens=60)) == 60


def test_a_bound_may_leave_too_little(build: Build) -> None:
    """The last checkpoint before a bound may lie far before it."""
    vllm = build(STATE, chunk=4, max_tokens_per_load=24, min_retrieve_tokens=16)
    vllm.ask("short", PROMPT[:13])
    vllm.ask("long", PROMPT)
    assert again(vllm) == 0


def test_what_the_request_has_is_not_read(build: Build, tmp_path: Path) -> None:
    """Of the window before the hit, the part below vLLM's own hit is not read from disk."""
    build(FULL, LONG, folder=tmp_path, chunk=8).ask("first", PROMPT[:57])
    vllm = build(FULL, LONG, folder=tmp_path, chunk=8)
    vllm.ask("shorter", PROMPT[:41], params=RequestParams(skip_load=True))
    request = vllm.ask("again", PROMPT[:57])
    assert (request.local, request.hit) == (40, 16)
    assert vllm.workers[0]._counters().chunks_loaded_from_disk == 4, "two chunks, and two blocks of the window of three"


def test_what_is_read_from_disk_teaches_the_pace_of_the_disk(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Mapping[Place, int]] = []
    monkeypatch.setattr(LoadChoice, "loaded", lambda _, carried, seconds: loaded.append(carried))
    build(FULL, LONG, folder=tmp_path, chunk=8).ask("first", PROMPT)
    vllm = build(FULL, LONG, folder=tmp_path, chunk=8)
    assert vllm.ask("again", PROMPT).hit > 0
    assert again(vllm) > 0
    (disk, memory) = loaded
    assert (list(disk), list(memory)) == ([Place.DISK], [Place.MEMORY])
    assert disk[Place.DISK] == memory[Place.MEMORY]


def test_what_is_loaded_of_a_checkpoint_stays_though_another_part_was_not_needed(build: Build) -> None:
    server = FakeServer()
    build(FULL, LONG, server=server, chunk=8).ask("first", PROMPT[:57])
    vllm = build(FULL, LONG, server=server, chunk=8)
    vllm.ask("shorter", PROMPT[:41], params=RequestParams(skip_load=True))
    assert vllm.ask("again", PROMPT[:57], params=RequestParams(skip_save=True)).hit == 16
    vllm.settle()
    vllm.ask("other", [1])
    missing = [ref for ref in server.all_chunks() if not vllm.index.in_memory(ref.prefix_key)]
    assert len(missing) == 1


def test_a_load_that_fails_is_not_tried_again(build: Build, tmp_path: Path) -> None:
    vllm = build(FULL, WINDOW, folder=tmp_path, local_cpu=False, stages=((2, 1), (1, 2)))
    vllm.ask("first", PROMPT)
    vllm.settle()
    tail = next(chunk.ref for chunk in vllm.index._chunks.values() if chunk.ref.num_blocks == 3)
    damage(tmp_path / "rank-1", tail.prefix_key)
    assert again(vllm) == 0, "though the chunks before it are there, and a checkpoint behind each"
    assert (vllm.loads, vllm.failures) == (1, 1)
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_pinned_prompt_keeps_its_checkpoint(build: Build) -> None:
    vllm = build(FULL, LONG, slots=20)
    vllm.ask("pinned", PROMPT[:41], params=RequestParams(pin=True))
    for number in range(8):
        vllm.ask(f"other {number}", [number, *PROMPT[:40]])
    assert again(vllm, PROMPT[:41]) == 40


def test_a_stage_without_layers_in_chunks_compares_nothing_it_did_not_compute(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dirty(size: int, dtype: type[np.uint8]) -> object:
        return np.full(size, 0x55, dtype)

    monkeypatch.setattr(mover, "np", SimpleNamespace(empty=dirty, zeros=np.zeros, fromiter=np.fromiter, **_TYPES))
    vllm = build(FULL, WINDOW, stages=((0, 2), (2, 1)), verify_fraction=1.0)
    vllm.ask("first", PROMPT)
    assert again(vllm) == 0, "it is computed, to be compared"
    vllm.settle()
    vllm.scheduler.take_tally()
    totals = vllm.scheduler.totals
    assert totals[metrics.VERIFIED_CHUNKS.key("mismatch")] == 0
    assert totals[metrics.VERIFIED_CHUNKS.key("equal")] > 0


_TYPES = {"uint8": np.uint8, "int64": np.int64}


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("async_save", [False, True])
def test_an_answer_is_stored_up_to_its_end(build: Build, run_ahead: int, *, async_save: bool) -> None:
    window = FakeGroup(GroupKind.WINDOW, 4, 11)  # of 12 tokens: of the last whole block's, none has left it
    vllm = build(FULL, window, run_ahead=run_ahead, async_save=async_save, save_decode=True)
    first = vllm.ask("first", PROMPT[:30], max_tokens=20)
    assert again(vllm, [*first.all_token_ids, 1, 2]) == 48
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("run_ahead", "retention"), [(0, 0.0), (0, 1.0), (1, 1.0), (2, 1.0)])
def test_states_of_what_is_generated_are_stored_where_they_are(build: Build, run_ahead: int, retention: float) -> None:
    """A step that ends with a chunk leaves one; if the tokens are known a step later, vLLM offers it then."""
    vllm = build(FULL, STATE, run_ahead=run_ahead, retention=retention, save_decode=True, interval=16)
    first = vllm.ask("first", PROMPT[:30], max_tokens=24)
    assert again(vllm, [*first.all_token_ids, 1, 2]) == 48


def test_a_request_that_was_preempted_leaves_its_checkpoints(build: Build) -> None:
    vllm = build(FULL, STATE, budget=24)
    request = vllm.add("first", PROMPT)
    vllm.step()
    vllm.step()
    vllm.preempt(request)
    vllm.run()
    assert again(vllm) == 60


def test_a_store_that_failed_is_tried_again_as_far_as_the_blocks_are_there(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(FULL, WINDOW, stages=((1, 1), (1, 1)))
    worker, request = vllm.workers[0], vllm.add("first", PROMPT, max_tokens=12)
    with monkeypatch.context() as broken:
        broken.setattr(worker._mover, "store", worker._mover.refuse)
        vllm.step()
    vllm.run()
    assert request.num_outputs == 12
    vllm.settle()
    assert vllm.index.counters.failed_stores > 0
    assert len(vllm.index) > 0, "the chunks are there, and of windows what had not been left"
    again(vllm)
    assert vllm.failures == 0
