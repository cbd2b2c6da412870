"""Blocks that a model needs to continue at a token, and their division into parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.model.checkpoints import Checkpoints
from kvstore.model.errors import LayoutError
from kvstore.model.groups import Group, GroupKind, Groups, Row, Run, cut
from kvstore.model.layout import KVLayout

FULL = Group(GroupKind.FULL, 16, 100)
WINDOW = Group(GroupKind.WINDOW, 16, 40, span_tokens=47)
LOCAL = Group(GroupKind.LOCAL, 16, 40, span_tokens=64)
STATE = Group(GroupKind.STATE, 32, 90)
KEY = b"k" * 16


def tokens_needed(group: Group, end_tokens: int) -> set[int]:
    """Return the tokens whose KV the next token attends to, by the definition of each kind."""
    match group.kind:
        case GroupKind.FULL:
            return set(range(end_tokens))
        case GroupKind.WINDOW:
            return {token for token in range(end_tokens) if end_tokens - token <= group.span_tokens}
        case GroupKind.LOCAL:
            return {
                token for token in range(end_tokens) if token // group.span_tokens == end_tokens // group.span_tokens
            }
        case GroupKind.STATE:
            return {end_tokens - 1} if end_tokens else set()


@pytest.mark.parametrize("group", [FULL, WINDOW, LOCAL, STATE], ids=lambda group: group.kind.value)
def test_blocks_are_those_of_the_tokens_that_the_next_one_attends_to(group: Group) -> None:
    for end_tokens in range(0, 320, group.block_tokens):
        needed = {token // group.block_tokens for token in tokens_needed(group, end_tokens)}
        assert set(group.blocks_at(end_tokens)) == needed


def test_a_model_with_one_full_group_needs_no_checkpoint() -> None:
    assert not Groups((FULL,)).needs_checkpoints
    assert Groups((FULL, WINDOW)).needs_checkpoints
    assert Groups((STATE,)).full == ()


def test_blocks_of_all_groups_end_together() -> None:
    assert Groups((FULL, STATE)).block_tokens == 32
    assert Groups((Group(GroupKind.FULL, 32, 1), Group(GroupKind.WINDOW, 48, 1, 10))).block_tokens == 96


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV cache"):
        Groups(())


def test_parts_fit_on_every_rank_and_hold_every_row_once_in_order() -> None:
    small = Groups((FULL, WINDOW, STATE))
    large = Groups((FULL, Group(GroupKind.WINDOW, 16, 60, 47), STATE))
    assert cut([(1, 3), (2, 1)], [small, large], [130, 130]) == [(Run(1, 0, 2),), (Run(1, 2, 3),), (Run(2, 0, 1),)]
    assert cut([(1, 3), (2, 1)], [small], [130]) == [(Run(1, 0, 3),), (Run(2, 0, 1),)]
    assert cut([(1, 0), (2, 1)], [small], [130]) == [(Run(2, 0, 1),)]


def test_a_block_larger_than_a_chunk_is_refused_with_the_key_to_change() -> None:
    groups = Groups((FULL, STATE))
    with pytest.raises(LayoutError, match=r"group 1 has 90 bytes, more than the 80 of a chunk: set chunk_size"):
        cut([(1, 1)], [groups], [80])


def checkpoints(*groups: Group, chunk_tokens: int = 64, interval_tokens: int = 0) -> Checkpoints:
    layout = KVLayout(page_bytes=(100,), planes=1, block_tokens=16, chunk_tokens=chunk_tokens)
    return Checkpoints((Groups(groups),), (layout,), interval_tokens)


def test_a_part_is_named_by_its_tokens_and_by_what_it_holds() -> None:
    found = checkpoints(FULL, WINDOW)
    assert list(found.refs(KEY, 320)) == list(found.refs(KEY, 320))
    names = [ref.prefix_key for ref in found.refs(KEY, 320)]
    names += [ref.prefix_key for ref in found.refs(b"o" * 16, 320)]
    names += [ref.prefix_key for ref in checkpoints(FULL, WINDOW, WINDOW).refs(KEY, 320)]
    names += [ref.prefix_key for ref in checkpoints(WINDOW, FULL).refs(KEY, 320)]
    names += [ref.prefix_key for ref in checkpoints(FULL, *4 * [WINDOW]).refs(KEY, 320)]  # in two parts
    names += [ref.prefix_key for ref in checkpoints(FULL, *8 * [WINDOW]).refs(KEY, 320)]  # in three, the first alike
    assert len(set(names)) == len(names)
    assert KEY not in names


def test_a_part_has_as_many_blocks_of_a_chunk_as_it_has_bytes() -> None:
    assert [ref.num_blocks for ref in checkpoints(FULL, WINDOW).refs(KEY, 320)] == [2]  # 3 blocks of 40 bytes
    many = checkpoints(FULL, WINDOW, WINDOW, WINDOW, WINDOW)
    assert [ref.num_blocks for ref in many.refs(KEY, 320)] == [4, 1]
    assert [len(rows) for rows in many.rows(320)] == [10, 2]
    assert many.rows(320)[1] == (Row(4, 18), Row(4, 19))
    assert many.rows(32) == [tuple(Row(number, position) for number in (1, 2, 3, 4) for position in (0, 1))]


@pytest.mark.parametrize(
    ("end_tokens", "marks", "interval_tokens", "wanted"),
    [
        (320, (320,), 0, True),  # a prompt ends there
        (320, (), 0, False),
        (320, (), 320, True),
        (384, (), 320, False),
        (640, (), 320, True),
        (320, (), 300, True),  # the first end behind it
    ],
)
def test_where_one_is_kept(end_tokens: int, marks: tuple[int, ...], interval_tokens: int, *, wanted: bool) -> None:
    large = checkpoints(FULL, WINDOW, WINDOW, WINDOW, WINDOW, interval_tokens=interval_tokens)
    assert large.is_wanted(end_tokens - 64, end_tokens, marks) is wanted
    assert checkpoints(FULL, WINDOW).is_wanted(end_tokens - 64, end_tokens, marks), "no larger than a chunk"


def test_without_chunks_nothing_is_small_beside_them() -> None:
    assert not checkpoints(STATE).is_wanted(256, 320, ())


def test_blocks_that_fit_into_no_chunk_are_refused_at_start() -> None:
    layout = KVLayout(page_bytes=(10,), planes=1, block_tokens=16, chunk_tokens=64)
    small = Groups((FULL, STATE))
    with pytest.raises(LayoutError, match=r"group 1 has 90 bytes, more than the 40 of a chunk: set chunk_size"):
        Checkpoints((small, small), (replace(layout, page_bytes=(200,)), layout))


def test_what_is_small_is_so_on_all_ranks_together() -> None:
    """The first stage has no layer with a window, and the last none that keeps all tokens."""
    stages = [(100, 0), (100, 120), (0, 40)]
    ranks = tuple(Groups((replace(FULL, block_bytes=full), replace(WINDOW, block_bytes=part))) for full, part in stages)
    layouts = tuple(
        KVLayout(page_bytes=(full or part,), planes=1, block_tokens=16, chunk_tokens=64) for full, part in stages
    )
    found = Checkpoints(ranks, layouts)
    assert found.is_wanted(256, 320, ()), "480 bytes beside 800"
    large = (*ranks[:2], Groups((replace(FULL, block_bytes=0), replace(WINDOW, block_bytes=160))))
    assert not replace(found, ranks=large, layouts=(*layouts[:2], replace(layouts[2], page_bytes=(160,)))).is_wanted(
        256, 320, ()
    )
