"""What a request has left to save, step by step."""

from __future__ import annotations

import pytest
from support.fake_vllm import BLOCK, CHUNK, FakeRequest

from kvstore.adapters.vllm.tracker import RequestTracker, SaveRules, SaveSpec
from kvstore.keys import NO_EXTRAS, PrefixHasher


def tracker_of(num_tokens: int, *, decode: bool = False, tails: bool = True) -> tuple[FakeRequest, RequestTracker]:
    request = FakeRequest("one", list(range(num_tokens)))
    return request, RequestTracker.start(request, NO_EXTRAS, SaveRules(BLOCK, CHUNK, decode, tails))


def sizes(save: SaveSpec | None) -> list[int]:
    return [ref.num_blocks for ref in save.refs] if save else []


def test_chunked_prefill_saves_each_chunk_once_and_the_tail_last() -> None:
    request, tracker = tracker_of(42)
    saves = []
    for count in (10, 10, 20, 2):
        saves.append(tracker.take_save(count))
        request.num_computed_tokens += count
    assert [sizes(save) for save in saves] == [[], [4], [4], [2]]
    assert [save.first_block for save in saves if save] == [0, 4, 8]
    assert tracker.is_saved


def test_keys_are_those_of_the_whole_prefix() -> None:
    _, tracker = tracker_of(42)
    save = tracker.take_save(42)
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(list(range(42)))
    assert save is not None
    assert [ref.prefix_key for ref in save.refs] == [*hasher.chunk_keys(), hasher.block_keys(2)[1]]


@pytest.mark.parametrize(("tails", "expected"), [(True, [4, 1]), (False, [4])])
def test_tails_are_a_choice(*, tails: bool, expected: list[int]) -> None:
    _, tracker = tracker_of(CHUNK + BLOCK + 1, tails=tails)
    assert sizes(tracker.take_save(CHUNK + BLOCK + 1)) == expected


def test_less_than_a_block_is_not_saved() -> None:
    _, tracker = tracker_of(BLOCK - 1)
    assert tracker.take_save(BLOCK - 1) is None


def test_generated_tokens_are_saved_only_if_wanted_and_known() -> None:
    request, tracker = tracker_of(CHUNK - 2, decode=True)
    tracker.take_save(CHUNK - 2)
    request.num_computed_tokens = CHUNK + 3  # optimistic: drafts and placeholders
    assert tracker.take_save(4) is None, "the tokens are not known yet"
    request.all_token_ids += [1, 2, 3]
    assert sizes(tracker.take_save(1)) == [4]
    assert not tracker.is_saved


def test_final_save_ends_where_known_and_computed_meet() -> None:
    request, tracker = tracker_of(CHUNK, decode=True)
    tracker.take_save(CHUNK)
    request.all_token_ids += range(9)
    request.num_computed_tokens = CHUNK + 8  # the last token's KV is not there
    assert sizes(tracker.take_final_save()) == [2]


def test_final_save_of_a_resumed_request_that_has_less_than_before() -> None:
    request, tracker = tracker_of(3 * CHUNK + 1, decode=True)
    tracker.take_save(3 * CHUNK + 1)
    request.num_computed_tokens = CHUNK + 2 * BLOCK  # preempted, resumed, aborted
    save = tracker.take_final_save()
    assert save is not None
    assert (sizes(save), save.first_block) == ([2], CHUNK // BLOCK)
    assert tracker.num_saved_chunks == 3


def test_without_decode_saving_nothing_is_left_at_the_end() -> None:
    request, tracker = tracker_of(CHUNK)
    request.num_computed_tokens = CHUNK
    assert tracker.take_final_save() is None


def test_restart_offers_everything_again() -> None:
    request, tracker = tracker_of(40)
    tracker.take_save(40)
    request.num_computed_tokens = 40
    assert tracker.take_save(1) is None
    tracker.restart_saving()
    assert sizes(tracker.take_save(1)) == [4, 4, 2]


def test_a_resumed_request_counts_from_where_it_is_computed() -> None:
    request, tracker = tracker_of(40)
    request.num_computed_tokens = 32
    tracker.take_save(8)
    tracker.restart_saving()
    request.num_computed_tokens = 0
    assert sizes(tracker.take_save(20)) == [4], "the rest holds nothing yet"
