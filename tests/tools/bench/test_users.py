"""Many users with one system prompt: the hits of each cache, compared with a model without sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvstore.model.errors import ConfigError
from kvstore.tools.bench import users
from kvstore.tools.bench.geometry import GEOMETRIES, Geometry
from kvstore.tools.bench.users import BLOCKS, VLLM, WHOLE, count_computed, make_prompts, parse_shares, users_table
from kvstore.tools.bench.vllm import has_vllm
from kvstore.tools.cli import app

TOY = Geometry("toy", layers=1, kv_heads=1, head_size=8, block_tokens=4, chunk_tokens=32)
needs_vllm = pytest.mark.skipif(not has_vllm(), reason="needs vLLM")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USERS": 12, "SYSTEM_TOKENS": 50, "TOOL_TOKENS": 40, "TURN_TOKENS": (3, 40)}.items():
        monkeypatch.setattr(users, name, value)
    monkeypatch.setitem(GEOMETRIES, "toy", TOY)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "has_vllm", lambda: False)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def computed_by_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Count all tokens but the longest common prefix, in whole blocks, with any prompt before."""
    found = [
        max((common(prompt, before) // 4 * 4 for before in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    ]
    return sum(map(len, prompts)) - sum(found)


def counted(shares: Sequence[float]) -> dict[tuple[str, float], int]:
    return {(count.cache, count.share): count.computed_tokens for count in count_computed(shares, TOY)}


def test_the_prompts_part_where_it_may_be_and_grow_turn_by_turn() -> None:
    prompts = make_prompts()
    assert prompts == make_prompts()
    assert prompts != make_prompts(1)
    assert len(prompts) == users.USERS * users.TURNS
    assert all(prompt[:50] == prompts[0][:50] for prompt in prompts)
    tools: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in prompts:
        tools.setdefault(tuple(prompt[:90]), []).append(prompt)
    assert len(tools) == users.USERS
    for turns in tools.values():
        assert len(turns) == users.TURNS
        assert all(later[: len(turn)] == turn for turn, later in pairwise(turns))
    ends = {max(common(one, other) for other in tools if other != one) for one in tools}
    assert len(ends) > 3, "they part at random places"
    assert any(end % TOY.block_tokens for end in ends)


@pytest.mark.usefixtures("without_vllm")
def test_where_all_fits_a_hit_is_the_longest_common_prefix_in_whole_blocks() -> None:
    found = counted([1, 1.5])
    assert found[BLOCKS, 1] == found[BLOCKS, 1.5] == computed_by_blocks(make_prompts())
    assert found[WHOLE, 1] > found[BLOCKS, 1]


@pytest.mark.usefixtures("without_vllm")
def test_a_smaller_cache_computes_more() -> None:
    found = counted([1, 0.3])
    for cache in (WHOLE, BLOCKS):
        assert found[cache, 0.3] > found[cache, 1]


@pytest.mark.vllm
@needs_vllm
def test_vllm_finds_as_much_where_all_fits_and_less_where_not() -> None:
    found = counted([1, 0.3])
    assert found[VLLM, 1] == computed_by_blocks(make_prompts()) < found[VLLM, 0.3]


@pytest.mark.vllm
@needs_vllm
def test_vllm_evicts_what_is_longest_unused() -> None:
    from kvstore.adapters.vllm.offline.prefix_cache import PrefixCache

    cache = PrefixCache(6, 4, 40)
    first, second, third = ([start + place for place in range(9)] for start in (0, 100, 200))
    assert [cache.ask(prompt) for prompt in (first, second, first)] == [0, 0, 8]
    assert [cache.ask(prompt) for prompt in (third, first, second)] == [0, 8, 4], "the last block went first"
    with pytest.raises(ConfigError, match="a prompt of 28 tokens does not fit"):
        cache.ask(list(range(28)))


@pytest.mark.usefixtures("without_vllm")
def test_a_cache_that_does_not_hold_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--users 0.02 makes a cache of \d chunks"):
        count_computed([0.02], TOY)


@pytest.mark.parametrize(("text", "message"), [("all", "it must be shares"), ("1,0", "greater than 0")])
def test_shares_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_shares(text)


@pytest.mark.usefixtures("without_vllm")
def test_the_command_shows_what_was_counted() -> None:
    result = CliRunner().invoke(app, ["bench", "--users", "1,0.5", "--geometry", "toy", "--json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["users"]
    assert [(count["cache"], count["share"]) for count in found] == [
        (cache, share) for share in (1, 0.5) for cache in (WHOLE, BLOCKS)
    ]
    assert {count["prompt_tokens"] for count in found} == {sum(map(len, make_prompts()))}
    assert found[0]["size_bytes"] % TOY.chunk_bytes == 0
    result = CliRunner().invoke(app, ["bench", "--users", "1,0.5", "--geometry", "toy"])
    assert f"{found[1]['computed_tokens']:,}" in result.stdout
    assert "not counted: vLLM's prefix cache" in result.stdout


def test_the_table_names_each_size_once() -> None:
    one = users.Count(WHOLE, 1.0, 3 << 30, 250, 1000)
    console = Console(width=120, record=True)
    console.print(users_table([one, replace(one, cache=BLOCKS, computed_tokens=200)], TOY))
    text = console.export_text()
    assert text.count("3.0 GiB (100%)") == 1
    assert "25.0%" in text
    assert "20.0%" in text
