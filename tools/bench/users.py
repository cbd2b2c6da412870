"""Many users behind one system prompt: ``kvstore bench --users``.

Counts the tokens that are computed, and moves no byte. Every user's tool prompt is that of an earlier user up to a
random place; then come the user's own tokens, turn by turn, the users in random order. A turn's prompt is the one
before and some tokens more; no answers are generated. Each prompt is stored before the next one comes. Three caches of
the same bytes start empty: kvstore's memory, found by whole chunks and tails only, as it was before hits could end with
any block; kvstore's memory as it is; vLLM's own prefix cache, by its own code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from kvstore.catalog.index import ChunkIndex
from kvstore.errors import ConfigError
from kvstore.keys import PrefixHasher
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.vllm import has_vllm
from kvstore.tools.console import numbers, parse_numbers
from kvstore.tools.replay import Replay

USERS: Final = 200
TURNS: Final = 3
SYSTEM_TOKENS: Final = 1_000
TOOL_TOKENS: Final = 600
TURN_TOKENS: Final = (50, 500)  # at least, at most
WHOLE, BLOCKS, VLLM = "kvstore, whole chunks and tails", "kvstore", "vLLM's prefix cache"
_VOCABULARY: Final = 100_000
_GIB: Final = 1 << 30

Ask = Callable[[Sequence[int]], int]
"""Looks a prompt up, stores it, and returns how many of its tokens were found."""


@dataclass(frozen=True)
class Count:
    """What one cache of one size spared.

    Attributes:
        cache: whose.
        share: its size, as a share of what kvstore takes where nothing is evicted.
        size_bytes: the same in bytes.
        computed_tokens, prompt_tokens: of all requests together.
    """

    cache: str
    share: float
    size_bytes: int
    computed_tokens: int
    prompt_tokens: int


def parse_shares(text: str) -> list[float]:
    """Sizes of caches, separated by commas.

    Raises:
        ConfigError: one of them is no number greater than 0.
    """
    return parse_numbers(text, "--users", "shares of all KV separated by commas, such as 1,0.33")


def make_prompts(seed: int = 0) -> list[list[int]]:
    """The prompts of all users' turns, in the order in which they are asked; the same for the same seed."""
    chooser = random.Random(seed)  # noqa: S311 - the same prompts in every run

    def words(count: int) -> list[int]:
        return chooser.choices(range(_VOCABULARY), k=count)

    system, tools = words(SYSTEM_TOKENS), [words(TOOL_TOKENS)]
    for _ in range(1, USERS):
        common = chooser.randint(0, TOOL_TOKENS)
        tools.append([*chooser.choice(tools)[:common], *words(TOOL_TOKENS - common)])
    order = [user for user in range(USERS) for _ in range(TURNS)]
    chooser.shuffle(order)
    asked = [[*system, *tool] for tool in tools]
    prompts = []
    for user in order:
        asked[user] = asked[user] + words(chooser.randint(*TURN_TOKENS))
        prompts.append(asked[user])
    return prompts


def count_computed(shares: Sequence[float], geometry: Geometry) -> list[Count]:
    """What every cache of every size spares; without vLLM its own is left out.

    Raises:
        ConfigError: a cache would not hold the longest prompt.
    """
    prompts = make_prompts()
    total, longest = _slots_for_all(prompts, geometry), max(map(len, prompts))
    prompt_tokens = sum(map(len, prompts))
    found = []
    for share in shares:
        slots = round(share * total)
        if slots * geometry.chunk_tokens < longest:
            raise ConfigError(
                f"--users {share:g} makes a cache of {slots} chunks: a prompt of {longest:,} tokens does not fit in it"
            )
        for name, ask in _caches(slots, longest, geometry).items():
            computed_tokens = prompt_tokens - sum(map(ask, prompts))
            found.append(Count(name, share, slots * geometry.chunk_bytes, computed_tokens, prompt_tokens))
    return found


def users_table(counts: Sequence[Count], geometry: Geometry) -> Table:
    """Tokens computed, by cache and size."""
    title = f"{USERS} users, {TURNS} turns each: {counts[0].prompt_tokens:,} tokens asked, KV of {geometry.name}"
    table = Table("size of the cache", "cache", *numbers("tokens computed", "of those asked"), title=title)
    for before, count in zip([None, *counts], counts, strict=False):
        is_first = before is None or before.share != count.share
        if is_first and before is not None:
            table.add_section()
        table.add_row(
            f"{count.size_bytes / _GIB:.1f} GiB ({count.share:.0%})" if is_first else "",
            count.cache,
            f"{count.computed_tokens:,}",
            f"{count.computed_tokens / count.prompt_tokens:.1%}",
        )
    if not has_vllm():
        table.caption = f"not counted: {VLLM}, as vLLM is not installed"
    return table


def _slots_for_all(prompts: Sequence[Sequence[int]], geometry: Geometry) -> int:
    """The slots that kvstore takes where nothing is evicted."""
    enough = sum(-(-len(prompt) // geometry.chunk_tokens) for prompt in prompts)
    replays = [Replay(ChunkIndex(enough), block_ends=block_ends) for block_ends in (False, True)]
    for replay in replays:
        for prompt in prompts:
            replay.ask(_hasher(prompt, geometry))
    return max(replay.most_slots for replay in replays)


def _caches(slots: int, longest_tokens: int, geometry: Geometry) -> dict[str, Ask]:
    caches = {WHOLE: _store(slots, geometry, block_ends=False), BLOCKS: _store(slots, geometry, block_ends=True)}
    if has_vllm():
        from kvstore.adapters.vllm.offline.prefix_cache import PrefixCache  # noqa: PLC0415 - imports vLLM

        caches[VLLM] = PrefixCache(slots * geometry.blocks_per_chunk, geometry.block_tokens, longest_tokens).ask
    return caches


def _store(slots: int, geometry: Geometry, *, block_ends: bool) -> Ask:
    """What kvstore's memory finds; of a prompt found whole the last token is computed all the same."""
    replay = Replay(ChunkIndex(slots), block_ends=block_ends)
    return lambda prompt: min(replay.ask(_hasher(prompt, geometry)).num_tokens, len(prompt) - 1)


def _hasher(prompt: Sequence[int], geometry: Geometry) -> PrefixHasher:
    hasher = PrefixHasher(geometry.chunk_tokens, geometry.block_tokens)
    hasher.update(prompt)
    return hasher
