"""Many users with one system prompt, for ``kvstore bench --users``.

Counts the tokens that are computed, and moves no byte. Every user's tool prompt matches that of an earlier user up to a
random position, followed by the user's tokens, turn by turn, with the users in random order. A turn's prompt is the one
before and some tokens more; no answers are generated. Each prompt is stored before the next one arrives. Three caches
of the same bytes start empty: kvstore's memory with hits on whole chunks and tails only, as before hits could end at
any block; kvstore's memory as it is; and vLLM's prefix cache, with vLLM's code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from kvstore.index.index import ChunkIndex
from kvstore.model.errors import ConfigError
from kvstore.model.keys import PrefixHasher
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
"""Call that looks a prompt up, stores it, and returns the number of its tokens that were found."""


@dataclass(frozen=True)
class Count:
    """Tokens computed with one cache of one size.

    Attributes:
        cache: name of the cache.
        share: size of the cache, as a share of the size that kvstore needs without eviction.
        size_bytes: size of the cache in bytes.
        computed_tokens, prompt_tokens: totals of all requests.
    """

    cache: str
    share: float
    size_bytes: int
    computed_tokens: int
    prompt_tokens: int


def parse_shares(text: str) -> list[float]:
    """Parse sizes of caches, separated by commas.

    Raises:
        ConfigError: a size is not a number greater than 0.
    """
    return parse_numbers(text, "--users", "shares of all KV separated by commas, such as 1,0.33")


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Return the prompts of all users' turns, in the order of the requests; the same seed gives the same prompts."""
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
    """Count the tokens computed with every cache of every size; vLLM's is skipped if vLLM is not installed.

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
    """Return a table of the tokens computed, by cache and size."""
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
    """Return the slots that kvstore needs without eviction."""
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
    """Return an ``Ask`` over kvstore's memory; a prompt's last token never counts, because vLLM always computes it."""
    replay = Replay(ChunkIndex(slots), block_ends=block_ends)
    return lambda prompt: min(replay.ask(_hasher(prompt, geometry)).num_tokens, len(prompt) - 1)


def _hasher(prompt: Sequence[int], geometry: Geometry) -> PrefixHasher:
    hasher = PrefixHasher(geometry.chunk_tokens, geometry.block_tokens)
    hasher.update(prompt)
    return hasher
