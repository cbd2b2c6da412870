"""Tracker of what a request has left to save, step by step."""

from __future__ import annotations

import pytest
from support.fake_parts import BLOCK, CHUNK, FakeRequest

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.requests.tracker import RequestTracker, SaveRules, SaveSpec
from kvstore.model.keys import NO_EXTRAS, KeyExtras, PrefixHasher


def tracker_of(num_tokens: int, *, decode: bool = False, tails: bool = True) -> tuple[FakeRequest, RequestTracker]:
    request = FakeRequest("one", list(range(num_tokens)))
    return request, RequestTracker(request, NO_EXTRAS, SaveRules(BLOCK, CHUNK, decode, tails))


def sizes(save: SaveSpec | None) -> list[int]:
    return [ref.num_blocks for ref in save.refs] if save else []


def test_chunked_prefill_saves_each_chunk_once_and_the_tail_last() -> None:
    request, tracker = tracker_of(42)
    saves = []
    for count in (10, 10, 19, 3):
        saves.append(tracker.take_save(count))
        request.num_computed_tokens += count
    assert [sizes(save) for save in saves] == [[], [4], [4], [2]]
    assert [save.first_block for save in saves if save] == [0, 4, 8]
    assert tracker.is_saved


def test_the_tail_is_saved_in_the_step_that_ends_with_it() -> None:
    """The state of a model exists then, and the next step overwrites it."""
    request, tracker = tracker_of(42)
    assert sizes(tracker.take_save(40)) == [4, 4, 2]
    request.num_computed_tokens = 40
    assert tracker.take_save(2) is None


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
    request.num_computed_tokens = CHUNK + 8  # the last token's KV is not computed
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


@pytest.mark.parametrize(("skip", "expected"), [(0, [4, 1]), (1, [4, 1]), (2, [4]), (6, [3]), (100, [])])
def test_the_last_tokens_are_left_out(skip: int, expected: list[int]) -> None:
    request = FakeRequest("one", list(range(CHUNK + BLOCK + 1)))
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True, skip_last_tokens=skip)
    tracker = RequestTracker(request, NO_EXTRAS, rules)
    assert sizes(tracker.take_save(CHUNK + BLOCK + 1)) == expected
    assert tracker.is_saved


def test_who_does_not_save_has_nothing_to_save() -> None:
    request, tracker = tracker_of(2 * CHUNK, decode=True)
    tracker.saves = False
    tracker.restart_saving()
    assert tracker.is_saved
    request.num_computed_tokens = 2 * CHUNK
    assert tracker.take_final_save() is None


def test_nothing_is_saved_of_steps_that_ran_ahead_of_what_is_known() -> None:
    """Replays a schedule of asynchronous steps with two drafts; a step samples one token more than drafts are accepted.

    A step's row: tokens computed as vLLM counts them when it plans the step, drafts not yet judged included; tokens the
    step computes; tokens known by then. Rejected drafts are taken back in the next row but one.
    """
    request, tracker = tracker_of(CHUNK - 3, decode=True)
    schedule = [
        (0, 13, 13),  # the prompt
        (13, 3, 13),  # planned before its token is known: a placeholder and two drafts
        (16, 3, 14),  # the prompt's token is known; the outcome of the two drafts is not
        (17, 3, 15),  # both were rejected: 16 tokens' KV could be there, but 15 are known
        (18, 3, 16),  # rejected again; but now the chunk's tokens are known, and the step before computes the last
        (21, 3, 19),
    ]
    saved = []
    for computed, scheduled, known in schedule:
        request.num_computed_tokens = computed
        request.all_token_ids += range(known - len(request.all_token_ids))
        save = tracker.take_save(scheduled)
        saved.append(sizes(save))
        if save is not None:
            end_tokens = (save.first_block + sum(sizes(save))) * BLOCK
            assert end_tokens <= min(known, computed + scheduled)
    assert saved == [[3], [], [], [], [4], []]


def test_tags_are_unknown_to_vllms_own_prefix_cache() -> None:
    request = FakeRequest("one", list(range(CHUNK)))
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)
    tagged = RequestTracker(request, KeyExtras(cache_salt="s", tags=(("team", "red"),)), rules)
    plain = RequestTracker(request, KeyExtras(cache_salt="s"), rules)
    for tracker in (tagged, plain):
        tracker.hasher.update(request.all_token_ids)
    assert list(tagged.hasher.chunk_keys()) != list(plain.hasher.chunk_keys())
    assert list(tagged.local_hasher().chunk_keys()) == list(plain.local_hasher().chunk_keys())


def test_a_probe_is_unknown_to_vllms_own_prefix_cache() -> None:
    """vLLM shares blocks by the request's salt, so a load under way counts for all requests with that salt."""
    request = FakeRequest("one", list(range(CHUNK)), salt="s")
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)
    plain = RequestTracker(request, KeyExtras(cache_salt="s"), rules)
    probing = RequestTracker(request, KeyExtras(cache_salt="probe x"), rules, RequestParams(probe="x"))
    keys = [list(tracker.local_hasher().chunk_keys()) for tracker in (plain, probing)]
    probing.hasher.update(request.all_token_ids)
    assert keys[1] != list(probing.hasher.chunk_keys())
    plain.hasher.update(request.all_token_ids)
    assert keys[1] == list(plain.local_hasher().chunk_keys())


def test_vllms_own_prefix_cache_knows_an_adapter_by_its_name() -> None:
    """One request may come before the adapter's files could be read, and another share its blocks."""
    request = FakeRequest("one", list(range(CHUNK)))
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)
    lora = [("french", "1234"), ("french", ""), ("german", ""), None]
    trackers = [RequestTracker(request, KeyExtras(lora=named), rules) for named in lora]
    told, untold, other, base = (list(tracker.local_hasher().chunk_keys()) for tracker in trackers)
    assert told == untold
    assert untold != other
    assert base not in (untold, other)


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


@pytest.mark.parametrize("num_tokens", [40, 41, 43])
def test_a_prompt_ends_with_the_step_that_computes_its_last_whole_block(num_tokens: int) -> None:
    """Only that step leaves a state there."""
    request, tracker = tracker_of(num_tokens)
    assert sizes(tracker.take_save(39)) == [4, 4]
    request.num_computed_tokens = 39
    save = tracker.take_save(1)
    assert sizes(save) == [2]
    assert save is not None
    assert 40 in save.marks
    assert tracker.is_saved
    assert tracker.take_save(1) is None


def test_marks_are_where_the_prompt_ends_where_others_parted_and_where_the_request_ends() -> None:
    request, tracker = tracker_of(2 * CHUNK + BLOCK + 1, decode=True)
    tracker.parted_tokens = CHUNK
    save = tracker.take_save(2 * CHUNK + BLOCK + 1)
    assert save is not None
    assert set(save.marks) == {CHUNK, 2 * CHUNK + BLOCK}
    request.all_token_ids += range(2 * BLOCK)
    request.num_computed_tokens = request.num_tokens - 1
    save = tracker.take_final_save()
    assert save is not None
    assert set(save.marks) == {CHUNK, 2 * CHUNK + BLOCK, 2 * CHUNK + 3 * BLOCK}


@pytest.mark.parametrize(("spares_last", "expected"), [(False, 2 * CHUNK), (True, CHUNK)])
def test_without_tails_a_prompt_ends_with_its_last_chunk(expected: int, *, spares_last: bool) -> None:
    request = FakeRequest("one", list(range(2 * CHUNK)))
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=False, spares_last_token=spares_last)
    save = RequestTracker(request, NO_EXTRAS, rules).take_save(2 * CHUNK)
    assert save is not None
    assert set(save.marks) == {0, expected}, "0 stands for no token at all"


@pytest.mark.parametrize("decode", [False, True])
def test_where_hits_end_in_blocks_a_prompt_ends_before_its_last_token(*, decode: bool) -> None:
    """The chunk that ends with that token is stored with the generated ones, as soon as it is computed."""
    request = FakeRequest("one", list(range(2 * CHUNK)))
    rules = SaveRules(BLOCK, CHUNK, decode, save_tails=True, spares_last_token=True)
    tracker = RequestTracker(request, NO_EXTRAS, rules)
    assert sizes(tracker.take_save(2 * CHUNK)) == [4, 3]
    request.num_computed_tokens = 2 * CHUNK
    request.all_token_ids += range(CHUNK)
    assert sizes(tracker.take_save(1)) == ([4] if decode else [])
    request.num_computed_tokens = 3 * CHUNK - 1
    assert sizes(tracker.take_save(1)) == ([4] if decode else []), "its last step leaves the state that belongs to it"
