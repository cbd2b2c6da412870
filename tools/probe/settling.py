"""Waiting for a running vLLM to store what it has computed, and the made-up prompts for that."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Final

import httpx

from kvstore.tools.probe.counters import Counters, read_counters
from kvstore.tools.vllmclient import events

LOWEST_TOKEN_ID: Final = 256
"""Lowest token id to use, because tokenizers tend to have single bytes and special tokens below it."""
END_TOKEN_ID: Final = 1000
"""End of the token ids to use, which real models exceed."""
_NUDGE_PAUSE_S: Final = 0.05


def made_up(num_tokens: int) -> list[int]:
    """Return a new random prompt, as token ids."""
    span = END_TOKEN_ID - LOWEST_TOKEN_ID
    return [LOWEST_TOKEN_ID + secrets.randbelow(span) for _ in range(num_tokens)]


def nudge(client: httpx.Client, model: str, engine: Mapping[str, str]) -> None:
    """Make vLLM run a few steps, because it collects and reports its workers' results only in steps."""
    request = {"model": model, "prompt": made_up(1), "max_tokens": 2, "cache_salt": secrets.token_hex(16)}
    for _ in events(client, request, engine):
        pass


def let_it_store(
    client: httpx.Client, model: str, engine: Mapping[str, str], *, most_nudges: int = 20, most_s: float = 10.0
) -> Counters | None:
    """Wait until no chunk is being stored or queued for writing, up to a limit, and return the last reading."""
    last, deadline_s = -1.0, time.monotonic() + most_s
    for _ in range(most_nudges):
        nudge(client, model, engine)
        counters = read_counters(client)
        if counters is None or (counters.settled_chunks == last and not counters["queued_writes"]):
            break
        if time.monotonic() > deadline_s:
            break
        last = counters.settled_chunks
        time.sleep(_NUDGE_PAUSE_S)
    return counters
