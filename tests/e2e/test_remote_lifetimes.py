"""Tests of two real vLLMs that share a store: what one stores with a time to live ends for the other, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_server import serving_ipc
from support.vllm_engine import Engine, check_ends, through_memory

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

PROMPT = [number % 900 + 7 for number in range(200)]
LIFE_S = 60


@pytest.fixture(params=["server", "object"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "object":
        yield f"file://{tmp_path / 'kv'}"
    else:
        with serving_ipc() as server:
            yield server.url


def test_a_time_to_live_reaches_who_loads_the_chunks(tiny_model: Path, url: str) -> None:
    with Engine(tiny_model) as engine:
        plain = engine.generate([PROMPT], logprobs=2)
    store = through_memory(url)
    store.extra["kvstore.local_cpu"] = True
    with Engine(tiny_model, store) as engine:
        engine.generate([PROMPT], asks={"kvstore.ttl": LIFE_S})
        end_s = time.monotonic() + LIFE_S
        engine.settle()
    with Engine(tiny_model, store) as engine:
        check_ends(engine, PROMPT, plain, end_s)
