"""Rows of block tables: what is stored and loaded of chunks and checkpoints, and which rows a request lacks."""

from __future__ import annotations

import pytest

from kvstore.adapters.vllm.requests.rows import NO_STATES, RowMap
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.layout import KVLayout
from kvstore.paged.base import BlockIds
from kvstore.paged.grouped import row_of

FULL = Group(GroupKind.FULL, 4, 64)
WINDOW = Group(GroupKind.WINDOW, 4, 64, span_tokens=9)
STATE = Group(GroupKind.STATE, 8, 64)
LAYOUT = KVLayout(page_bytes=(128,), planes=1, block_tokens=8, chunk_tokens=16)  # a part has room for four blocks

TABLES = [
    [11, 12, 13, 14, 15, 16, 17, 18],
    [0, 0, 0, 24, 25, 26, 27, 28],  # three have left the window
    [0, 0, 0, 34],
]


def row_map(*groups: Group) -> RowMap:
    found = Groups(groups)
    return RowMap(found, Checkpoints((found,), (LAYOUT,)) if found.needs_checkpoints else None)


ROWS = row_map(FULL, WINDOW, STATE)


def pairs(rows: BlockIds | None) -> list[tuple[int, int]] | None:
    """Return each row as its group and block."""
    return None if rows is None else [(int(row) >> 32, int(row) & 0xFFFF) for row in rows]


def test_one_group_that_keeps_all_tokens_is_its_own_rows() -> None:
    rows = row_map(FULL)
    assert not rows.is_grouped
    assert pairs(rows.of_chunk([[0, 5, 6]], 1, 2)) == [(0, 5), (0, 6)]
    assert row_map(WINDOW).is_grouped
    assert row_map(FULL, FULL).is_grouped


def test_a_chunk_is_the_groups_that_keep_all_tokens() -> None:
    assert pairs(ROWS.of_chunk(TABLES, 1, 2)) == [(0, 13), (0, 14), (0, 15), (0, 16)], "in blocks of the whole model"
    assert ROWS.of_chunk(TABLES, 3, 2) is None, "the request is not so long"
    two = row_map(FULL, Group(GroupKind.FULL, 8, 64))
    assert pairs(two.of_chunk([TABLES[0], [1, 2, 3, 4]], 0, 2)) == [
        *((0, block) for block in range(11, 15)),
        (1, 1),
        (1, 2),
    ]
    assert two.of_chunk([TABLES[0], [1, 0, 3, 4]], 0, 2) is None


def test_of_a_chunk_to_load_the_blocks_that_are_not_wanted_are_null() -> None:
    assert pairs(ROWS.to_load(TABLES, begin=0, start=1, stop=2, num_blocks=2)) == [(0, 0), (0, 0), (0, 13), (0, 14)]
    assert ROWS.to_load(TABLES, begin=2, start=2, stop=5, num_blocks=3) is None


def test_a_checkpoint_is_the_window_before_it_and_the_state_there() -> None:
    (part,) = ROWS.checkpoint(TABLES, {(2, 24): 9}, 24) or []
    assert pairs(part) == [(1, 24), (1, 25), (1, 26), (2, 9)], "the table does not tell what state a block holds"


@pytest.mark.parametrize(
    ("states", "end_tokens"),
    [
        (NO_STATES, 32),  # the place of the state is unknown
        ({(2, 24): 9}, 32),  # of another token
        ({(2, 16): 9}, 16),  # blocks have left that window
        ({(2, 40): 9}, 40),  # not computed yet
    ],
)
def test_a_checkpoint_of_which_the_request_lacks_a_block_is_none(
    states: dict[tuple[int, int], int], end_tokens: int
) -> None:
    assert ROWS.checkpoint(TABLES, states, end_tokens) is None


def test_blocks_that_the_request_has_are_not_loaded() -> None:
    assert ROWS.checkpoints is not None
    (rows,) = ROWS.checkpoints.rows(32)
    assert pairs(ROWS.part_to_load(TABLES, rows, 0)) == [(1, 26), (1, 27), (1, 28), (2, 34)]
    assert pairs(ROWS.part_to_load(TABLES, rows, 24)) == [(1, 0), (1, 27), (1, 28), (2, 34)], "those below are shared"
    assert ROWS.part_to_load([TABLES[0], [0] * 8, TABLES[2]], rows, 24) is None
    assert ROWS.part_to_load([TABLES[0], TABLES[1][:7], TABLES[2]], rows, 0) is None


@pytest.mark.parametrize(("end_tokens", "expected"), [(32, {(2, 32): 34}), (31, {}), (28, {}), (8, {(2, 8): 0})])
def test_a_step_leaves_states_where_it_ends_with_a_block_of_every_group(
    end_tokens: int, expected: dict[tuple[int, int], int]
) -> None:
    assert ROWS.states_at(TABLES, (0, end_tokens), NO_STATES) == expected
    assert ROWS.states_at(TABLES, (0, end_tokens), {(2, 24): 9}) == {**expected, (2, 24): 9}, "beside what vLLM offers"
    assert row_map(FULL, WINDOW).states_at(TABLES, (0, end_tokens), NO_STATES) == {}


def test_the_state_that_a_step_began_with_is_still_there() -> None:
    """With run-ahead scheduling a token is known one step late, after the step that reached the end of its block."""
    assert ROWS.states_at(TABLES, (32, 33), NO_STATES) == {(2, 32): 34}
    assert ROWS.states_at(TABLES, (31, 33), NO_STATES) == {}


def test_a_row_is_a_block_below_its_group() -> None:
    assert pairs(ROWS.of_chunk(TABLES, 0, 1)) == [(0, 11), (0, 12)]
    assert row_of(2, 34) == (2 << 32) + 34
